"""The file format of deciders: `decider.json` of this and earlier versions."""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from rfdlc.decide.budgets import Budget
from rfdlc.decide.calibrators import CALIBRATORS
from rfdlc.decide.unfamiliar import Unfamiliar
from rfdlc.decide.utility import Utility
from rfdlc.errors import expect
from rfdlc.imports import choose_registered

if TYPE_CHECKING:
    from rfdlc.decide.decider import Decider

FORMAT, VERSIONS = (
    "rfdlc-decider",
    (1, 2, 3),
)  # 3 is written where there is something that 2 cannot hold
ADDED = ("sets", "budget", "unfamiliar")  # by version 3
SAVED = (
    "combine",
    "weights",
    "calibration",
    "train_prior",
    "target_prior",
    "rule",
)  # as they are, or as lists


def as_table(decider: "Decider") -> dict[str, Any]:
    """Plain lists and tables, ready for JSON."""
    parameters, fitted, joint = (
        {name: getattr(decider, name) for name in SAVED},
        decider.fitted,
        decider.joint,
    )
    added = {
        name: getattr(decider, name)
        for name in ADDED
        if getattr(decider, name) is not None
    }
    return {
        "format": FORMAT,
        "version": 3 if added else 2,
        "utility": decider.utility.to_dict(),
        **{
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in parameters.items()
        },
        **{name: each.to_dict() for name, each in added.items()},
        "model": decider.model,
        "fitted": {"name": fitted.name} | fitted.to_dict() if fitted else None,
        "calibrated_on": {
            kind: [f"{h:x}" for h in each.tolist()]
            for kind, each in decider.calibrated_on.items()
        },
        "joint": (
            None
            if joint is None
            else base64.b64encode(joint.astype("<f4").tobytes()).decode()
        ),
    }


def parameters_of(table: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the decider that a table of this or an earlier version
    describes.
    """
    found, *earlier, newest = table.get("version"), *VERSIONS
    expect(
        table.get("format") == FORMAT and found in VERSIONS,
        "not a decider that this version reads: format and version"
        f" {(table.get('format'), found)}; expected {FORMAT!r},"
        f" {', '.join(map(str, earlier))} or {newest}",
    )
    utility, fitted, joint = (
        Utility.from_dict(table["utility"]),
        table["fitted"],
        table.get("joint"),
    )
    if joint is not None:
        joint = np.frombuffer(base64.b64decode(joint), "<f4").reshape(
            2 * (len(utility.classes),)
        )
    if fitted is not None:
        written = (
            "temperature"
            if fitted.get("bias") is None
            else "bias-corrected-temperature"
        )  # by version 1
        fitted = CALIBRATORS[
            choose_registered("calibration", fitted.get("name", written), CALIBRATORS)
        ].from_dict(fitted)
    seen = table.get("calibrated_on") or {}
    seen = (
        seen if isinstance(seen, dict) else {"scores": seen}
    )  # as earlier versions wrote it
    seen = {
        kind: np.array([int(each, 16) % 2**64 for each in own], dtype=np.uint64)
        for kind, own in seen.items()
    }
    parameters = {name: table[name] for name in SAVED}
    parameters["sets"] = table.get("sets")
    parameters["model"] = str(table.get("model", ""))
    for name, kind in (("budget", Budget), ("unfamiliar", Unfamiliar)):
        parameters[name] = None if table.get(name) is None else kind(**table[name])
    return parameters | {
        "utility": utility,
        "fitted": fitted,
        "joint": joint,
        "calibrated_on": seen,
    }
