"""What several commands read: classes, utilities, priors and predictions as a person writes them on a command line."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from rfdlc.errors import InputError, listing

if TYPE_CHECKING:
    from rfdlc.decide.classes import Classes
    from rfdlc.decide.decider import Decider
    from rfdlc.decide.predictions import Predictions
    from rfdlc.decide.utility import Utility

BUILDERS = ("one-hot", "tail-sensitive")


def read_classes(spec: str) -> "Classes":
    """`cat,dog,newt`; a JSON file; a CSV with columns class,count[,group]; or any table of predictions."""
    from rfdlc.decide.classes import Classes
    from rfdlc.decide.predictions import Predictions

    path = Path(spec)
    if not path.is_file():
        if path.suffix or "," not in spec:
            raise InputError(f"classes {spec!r}: no such file; expected a file, or names such as cat,dog,newt")
        return Classes(tuple(name.strip() for name in spec.split(",")))
    if path.suffix.lower() == ".json":
        return Classes.from_json(path)
    if path.suffix.lower() == ".csv" and "class" in _header(path):
        return _classes_table(path)
    return Predictions.load(path).classes


def read_utility(spec: str, classes: "Classes | None", *, penalty: float, costs: bool = False) -> "Utility":
    """The path of a CSV file, or `one-hot` or `tail-sensitive` for classes that are known."""
    from rfdlc.decide.utility import Utility

    if spec not in BUILDERS:
        if not Path(spec).is_file():
            raise InputError(f"utility {spec!r}: no such file; expected a CSV file or one of {listing(BUILDERS)}")
        utility = Utility.read_csv(spec, classes)
        return Utility(-utility.matrix + 0.0, utility.classes, utility.actions) if costs else utility
    if classes is None:
        raise InputError(f"utility {spec!r} needs the classes: give them with --classes")
    if spec == "one-hot":
        return Utility.one_hot(classes)
    if classes.counts is None:
        raise InputError("utility 'tail-sensitive' needs training counts: give --classes FILE with columns class,count")
    return Utility.tail_sensitive(classes, penalty)


def read_prior(spec: str, what: str) -> str | dict[str, float]:
    """`uniform`, `train`, `cat=0.2,dog=0.8`, or a CSV file with columns class,share: by name, never by position."""
    if "=" in spec:
        pairs = (item.partition("=") for item in spec.split(","))
        return {name.strip(): _share(value, f"{what} of {name.strip()!r}") for name, _, value in pairs}
    if not spec.lower().endswith(".csv"):
        return spec
    rows = _rows(Path(spec), ("class", "share"))
    return {row["class"]: _share(row["share"], f"{spec}: share of {row['class']!r}") for row in rows}


def read_predictions(path: Path, classes: "Classes | None", *, logits: bool = False) -> "Predictions":
    """A file of predictions, or a folder that holds `predictions.npz`."""
    from rfdlc.decide.predictions import Predictions

    return Predictions.load(path / "predictions.npz" if path.is_dir() else path, classes, logits=logits)


def folder_decider(path: Path) -> "Decider | None":
    """The decider that a folder of predictions brings along."""
    from rfdlc.decide.decider import Decider

    saved = path / "decider.json"
    return Decider.load(saved) if path.is_dir() and saved.is_file() else None


def _header(path: Path) -> list[str]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return [name.strip() for name in next(csv.reader(file), [])]


def _rows(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV in UTF-8 ({error})") from None
    if not rows or not set(needed) <= set(rows[0]):
        raise InputError(f"{path}: expected columns {', '.join(needed)} and one row a class")
    return rows


def _classes_table(path: Path) -> "Classes":
    from rfdlc.decide.classes import Classes

    rows = _rows(path, ("class",))
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.get("group"):
            groups.setdefault(row["group"], []).append(row["class"])
    names = [row["class"] for row in rows]
    if "count" not in rows[0]:
        return Classes(tuple(names), None, {name: tuple(members) for name, members in groups.items()})
    counts = [_share(row["count"], f"{path}: count of {row['class']!r}") for row in rows]
    return Classes.from_counts([int(c) if c == int(c) else c for c in counts], names, groups)  # type: ignore[misc]


def _share(text: str, what: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise InputError(f"{what}: {text!r} is not a number") from None
