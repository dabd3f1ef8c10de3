"""The rules of docs/export.md, written again from the metadata alone, give the features
of `TableEncoder`.
"""

import json
import re
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from rfdlc.data.table import TableEncoder

EMPTY = ("", "na", "n/a", "#n/a", "nan", "null", "?", "<na>", "nat")
TRAINING: dict[str, list[Any]] = {
    "amount": ["1.5", " 2 ", "-3e2", "4", "5"],
    "age": ["30", "", "41", "NA", "52"],
    "seconds": [str(1_700_000_000 + i) for i in range(5)],
    "born": [
        "2024-01-31",
        "31.1.2023",
        "2024-01-31T12:30:00+02:00",
        "2024-02-01 06:00",
        "1969-12-31",
    ],
    "seen": ["2024-01-31", "", "2024-03-31", "?", "2024-02-01"],
    "colour": ["red", "Red", " blue ", "green", "red"],
    "ward": ["A", None, "B", "null", "1"],
    "smoker": [True, False, True, False, True],
    "insured": ["false", "true", "", "true", "false"],
    "postal": ["01067", "10115", "00123", "01067", "10115"],
    "code": ["01", "1", "002", "003", "3"],
    "ferritin": ["20.5", "<20", "31", "40", None],
    "store": ["7", "12.0", 7.0, None, 3],
    "empty": ["", "NA", None, "?", "nan"],
}
NUMBERS = ["7", " -1.25 ", "1e3", "1700000001.5", ".5", *EMPTY]
DATES = [
    "2024-01-31",
    "1.2.2024",
    "01.02.2024 12:00",
    "2024-01-31 23:59:59.5",
    "2000-02-29T01:00-05:00",
    "NaT",
    "",
]
TEXTS = [
    "red",
    " Red",
    "RED",
    "blue",
    "A",
    "1",
    "0",
    "True",
    "TRUE",
    "false",
    "yes",
    "1067",
    "1067.0",
    "01067",
    "123.0",
]
TEXTS += [
    "00123",
    "10115.0",
    "002",
    "2",
    "02",
    "3",
    "3.0",
    "01",
    "1.0",
    *EMPTY,
    "N/A",
    " ",
]


def encode(column: dict[str, Any], cell: Any) -> list[float]:
    text = "" if cell is None else str(cell).strip()
    missing = text.lower() in EMPTY or text in column["missing"]
    if column["median"] is not None:
        value = (
            column["median"]
            if missing
            else days(text)
            if column["is_date"]
            else float(text)
        )
        return [
            value - column["offset"],
            *([float(missing)] if column["flags_missing"] else []),
        ]
    features = [0.0] * (len(column["categories"]) + column["counts_missing"])
    if missing or not column["categories"]:
        features[-1] = float(column["counts_missing"]) if features else 0.0
    elif (found := category(column["categories"], text)) is not None:
        features[column["categories"].index(found)] = 1.0
    return features


def days(text: str) -> float:
    if dotted := re.match(r"(\d+)\.(\d+)\.(\d{4})(.*)", text):
        day, month, year, rest = dotted.groups()
        text = f"{year}-{int(month):02}-{int(day):02}{rest}"
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86400


def category(known: list[str], text: str) -> str | None:
    if text in known:
        return text
    if sorted(each.lower() for each in known) == ["false", "true"]:
        meant = {"true": "true", "True": "true", "TRUE": "true", "1": "true"}
        meant |= {"false": "false", "False": "false", "FALSE": "false", "0": "false"}
        return next((each for each in known if each.lower() == meant.get(text)), None)
    if all(each.isdigit() for each in known):
        same = [each for each in known if str(int(each)) == text.removesuffix(".0")]
        return same[0] if len(same) == 1 else None
    return None


@pytest.mark.filterwarnings("ignore:column")
@pytest.mark.parametrize("name", TRAINING)
def test_metadata_and_rules_are_enough_to_encode(name: str) -> None:
    encoder = TableEncoder.fit(
        {name: TRAINING[name]}, categories=["store"], missing={"ferritin": ("<20",)}
    )
    (column,) = json.loads(json.dumps(encoder.to_dict()))["columns"]
    others = (
        TEXTS if column["median"] is None else DATES if column["is_date"] else NUMBERS
    )
    cells = [*TRAINING[name], *others, None]
    expected = np.array(
        [encode(column, cell) for cell in cells], dtype=np.float64
    ).astype(np.float32)
    np.testing.assert_array_equal(encoder.transform({name: cells}), expected)
