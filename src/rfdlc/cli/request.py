"""The options that commands share, and what they ask for: a utility, or predictions and a decider."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rfdlc.cli.reading import BUILDERS, folder_decider, read_classes, read_predictions, read_prior, read_utility
from rfdlc.errors import InputError

if TYPE_CHECKING:
    from rfdlc.decide.classes import Classes
    from rfdlc.decide.decider import Decider
    from rfdlc.decide.predictions import Predictions
    from rfdlc.decide.utility import Utility

PenaltyOption = Annotated[
    float | None, typer.Option("--penalty", help="For `tail-sensitive`: the value of a false head, -1 by default.")
]
AbstainOption = Annotated[
    float | None,
    typer.Option("--abstain", help="Add the action `abstain` with this value for every class; -0.2 is a cost of 0.2."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True)
class UtilityRequest:
    """The utility to decide for: every field is an option of the command."""

    utility: Annotated[
        str | None,
        typer.Option(
            "--utility", "-u", help="CSV of U[true, action], or `one-hot`, `tail-sensitive`.", show_default="one-hot"
        ),
    ] = None
    costs: Annotated[Path | None, typer.Option("--costs", help="CSV of costs instead of utilities: U = -cost.")] = None
    penalty: PenaltyOption = None
    abstain: AbstainOption = None

    def read_utility(
        self, classes: "Callable[[], Classes | None]", saved: "Callable[[], Decider | None]"
    ) -> "Utility | None":
        """The utility that the options name; None without any of them, and then `classes` is not called.

        `--abstain` alone adds an action to the utility of the `saved` decider.
        """
        if self.utility is not None and self.costs is not None:
            raise InputError("--utility and --costs exclude each other: give one of them")
        named = self.utility if self.costs is None else str(self.costs)
        if named is None and self.penalty is None and self.abstain is None:
            return None
        decider = saved() if named is None and self.penalty is None else None
        if decider is not None:
            utility = decider.utility
        else:
            costs = self.costs is not None
            utility = read_utility(named or "one-hot", classes(), penalty=self.penalty, costs=costs)
        if self.abstain is None:
            return utility
        if self.costs is not None and self.abstain > utility.matrix.max():
            raise InputError(
                f"--abstain {self.abstain:g} is worth more than every decision under these costs: "
                f"write --abstain {-self.abstain:g} for a cost of {self.abstain:g}"
            )
        return utility.with_abstain(self.abstain)


@dataclass(frozen=True)
class Request(UtilityRequest):
    """How scores are to be decided: every field is an option of the command."""

    classes: Annotated[
        str | None,
        typer.Option("--classes", "-c", help="Training counts and groups: CSV with columns class,count[,group]; JSON."),
    ] = None
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", help="Held-out predictions with targets, to fit the calibration on.")
    ] = None
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            help="The calibrator: `temperature`, `bias-` or `prior-corrected-temperature`, `matrix-scaling`.",
            show_default="temperature",
        ),
    ] = None
    balanced: Annotated[
        bool, typer.Option("--balanced", help="Calibrate with the same total weight for every class.")
    ] = False
    train_prior: Annotated[
        str | None,
        typer.Option(
            "--train-prior",
            help="Class prior of the scores: `train` (the counts), `uniform` (after reweighting), `a=0.9,b=0.1`, or a "
            "CSV with columns class,share.",
        ),
    ] = None
    target_prior: Annotated[
        str | None,
        typer.Option(
            "--target-prior",
            help="Class prior where decisions are made: `uniform`, `train`, `estimate` (by EM, from FILE itself), "
            "`a=0.5,b=0.5`, or CSV. Without it the prior is not corrected.",
        ),
    ] = None
    combine: Annotated[
        str | None, typer.Option("--combine", help="`mean-probabilities` or `mean-logits`, for several particles.")
    ] = None
    rule: Annotated[
        str | None, typer.Option("--rule", help="`expected-utility`, `argmax`, `cobb`, or `paper-eq12` (warns).")
    ] = None
    logits: Annotated[bool, typer.Option("--logits", help="The tables hold logits, not probabilities.")] = False
    decider: Annotated[
        Path | None, typer.Option("--decider", help="A saved decider, instead of --calibrate and the priors.")
    ] = None

    def prepare(self, file: Path) -> "tuple[Predictions, Decider]":
        """Read the predictions; make the decider, and fit it if asked."""
        if self.calibrate is None and (self.calibration or self.balanced):
            raise InputError("--calibration and --balanced say how to fit: give held-out predictions, --calibrate FILE")
        classes = None if self.classes is None else read_classes(self.classes)
        predictions = read_predictions(file, classes, logits=self.logits)
        decider = self._new_decider(file, predictions)
        if self.calibrate is not None:
            decider = decider.fit(read_predictions(self.calibrate, classes, logits=self.logits), balanced=self.balanced)
        if self.target_prior == "estimate":
            decider = decider.replace(target_prior=decider.estimate_prior(predictions))
        elif self.target_prior is not None:
            decider = decider.replace(target_prior=read_prior(self.target_prior, "target prior"))
        return predictions, decider

    def _new_decider(self, file: Path, predictions: "Predictions") -> "Decider":
        """A new decider, or a saved one with the changes of the command line."""
        from rfdlc.decide.decider import Decider

        saved = Decider.load(self.decider) if self.decider else folder_decider(file)
        known = predictions.classes if predictions.named else None
        classes = known or (saved.utility.classes if saved else predictions.classes)
        built = self.costs is None and self.utility in (None, *BUILDERS)
        utility = self.read_utility(lambda: classes if known or built else None, lambda: saved)
        changes: dict[str, Any] = {"combine": self.combine, "calibration": self.calibration, "rule": self.rule}
        if self.train_prior is not None:
            changes["train_prior"] = read_prior(self.train_prior, "training prior")
        given = {name: value for name, value in changes.items() if value is not None}
        if saved is None:
            from rfdlc.decide.utility import Utility

            return Decider(utility or Utility.one_hot(predictions.classes), **given)
        return saved.replace(utility=utility, **given)


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's parameter `request` by one option for each field of its class."""
    hints = get_type_hints(command, include_extras=True)
    kind = hints["request"]
    types = get_type_hints(kind, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
        for name, parameter in signature(command).parameters.items()
        if name != "request"
    ]
    options = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
        for field in fields(kind)
    ]

    @wraps(command)
    def expanded(**values: Any) -> None:
        command(request=kind(**{option.name: values.pop(option.name) for option in options}), **values)

    # Arguments without a default come first, then the shared options, then the command's own.
    first = [parameter for parameter in own if parameter.default is Parameter.empty]
    parameters = [*first, *options, *(parameter for parameter in own if parameter not in first)]
    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded
