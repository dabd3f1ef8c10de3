"""The file format of deciders: `decider.json`."""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from rfdlc.decisions.budgets import Budget
from rfdlc.decisions.unfamiliar import Unfamiliar
from rfdlc.decisions.utility import Utility
from rfdlc.formats.files import check_version
from rfdlc.imports import choose_registered
from rfdlc.probabilities.calibrators import CALIBRATORS

if TYPE_CHECKING:
    from rfdlc.decisions.decider import Decider

FORMAT = "rfdlc-decider"
VERSION = 4  # another number for whatever changes what a file says
PARTS = ("sets", "budget", "unfamiliar")  # tables, or None
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
    parts = {name: getattr(decider, name) for name in PARTS}
    return {
        "format": FORMAT,
        "version": VERSION,
        "utility": decider.utility.to_dict(),
        **{
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in parameters.items()
        },
        **{
            name: None if part is None else part.to_dict()
            for name, part in parts.items()
        },
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
    """The parameters of the decider that a table describes."""
    check_version("it", table, FORMAT, VERSION)
    utility, fitted, joint = (
        Utility.from_dict(table["utility"]),
        table["fitted"],
        table["joint"],
    )
    if joint is not None:
        joint = np.frombuffer(base64.b64decode(joint), "<f4").reshape(
            2 * (len(utility.classes),)
        )
    if fitted is not None:
        name = choose_registered("calibration", fitted["name"], CALIBRATORS)
        fitted = CALIBRATORS[name].from_dict(fitted)
    seen = {
        kind: np.array([int(each, 16) % 2**64 for each in own], dtype=np.uint64)
        for kind, own in table["calibrated_on"].items()
    }
    parameters = {name: table[name] for name in SAVED}
    parameters["sets"] = table["sets"]
    parameters["model"] = table["model"]
    for name, kind in (("budget", Budget), ("unfamiliar", Unfamiliar)):
        parameters[name] = None if table[name] is None else kind(**table[name])
    return parameters | {
        "utility": utility,
        "fitted": fitted,
        "joint": joint,
        "calibrated_on": seen,
    }
