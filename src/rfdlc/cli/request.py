"""The options of every command that decides, and what they ask for: predictions and a ready Decider."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rfdlc.cli.reading import BUILDERS, chosen_utility, folder_decider, read_classes, read_predictions, read_prior
from rfdlc.errors import InputError

if TYPE_CHECKING:
    from rfdlc.decide.classes import Classes
    from rfdlc.decide.decider import Decider
    from rfdlc.decide.predictions import Predictions
    from rfdlc.decide.utility import Utility

UtilityOption = Annotated[
    str | None,
    typer.Option(
        "--utility", "-u", help="CSV of U[true, action], or `one-hot`, `tail-sensitive`.", show_default="one-hot"
    ),
]
CostsOption = Annotated[Path | None, typer.Option("--costs", help="CSV of costs instead of utilities: U = -cost.")]
PenaltyOption = Annotated[
    float | None, typer.Option("--penalty", help="For `tail-sensitive`: the value of a false head, -1 if not given.")
]
AbstainOption = Annotated[
    float | None,
    typer.Option("--abstain", help="Add the action `abstain`, worth this whatever is true; -0.2 is a cost of 0.2."),
]
ClassesOption = Annotated[
    str | None,
    typer.Option("--classes", "-c", help="Training counts and groups: CSV with columns class,count[,group], or JSON."),
]
CalibrateOption = Annotated[
    Path | None, typer.Option("--calibrate", help="Held-out predictions with targets, to fit the calibration on.")
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="`temperature`, or `bias-` or `prior-corrected-temperature`.",
        show_default="temperature",
    ),
]
BalancedOption = Annotated[bool, typer.Option("--balanced", help="Calibrate with equal total weight for every class.")]
TrainPriorOption = Annotated[
    str | None,
    typer.Option(
        "--train-prior",
        help="Class prior that the scores carry: `train` (the counts), `uniform` (after reweighting), "
        "`a=0.9,b=0.1`, or CSV with columns class,share.",
    ),
]
TargetPriorOption = Annotated[
    str | None,
    typer.Option(
        "--target-prior",
        help="Class prior where decisions are made: `uniform`, `train`, `estimate` (by EM from FILE itself), "
        "`a=0.5,b=0.5`, or CSV. Without it the prior is left alone.",
    ),
]
CombineOption = Annotated[
    str | None, typer.Option("--combine", help="`mean-probabilities` or `mean-logits`, for several particles.")
]
RuleOption = Annotated[
    str | None, typer.Option("--rule", help="`expected-utility`, `argmax`, `cobb`, or `paper-eq12` (warns).")
]
LogitsOption = Annotated[bool, typer.Option("--logits", help="The tables hold logits, not probabilities.")]
DeciderOption = Annotated[
    Path | None, typer.Option("--decider", help="A decider saved before, instead of --calibrate and the priors.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True)
class Request:
    """How scores are to be decided: a field is an option of every command that decides."""

    utility: UtilityOption = None
    costs: CostsOption = None
    penalty: PenaltyOption = None
    abstain: AbstainOption = None
    classes: ClassesOption = None
    calibrate: CalibrateOption = None
    calibration: CalibrationOption = None
    balanced: BalancedOption = False
    train_prior: TrainPriorOption = None
    target_prior: TargetPriorOption = None
    combine: CombineOption = None
    rule: RuleOption = None
    logits: LogitsOption = False
    decider: DeciderOption = None

    def prepare(self, file: Path) -> "tuple[Predictions, Decider]":
        """Read everything, fit what is to be fitted."""
        if self.calibrate is None and (self.calibration or self.balanced):
            raise InputError("--calibration and --balanced say how to fit: give held-out predictions, --calibrate FILE")
        classes = None if self.classes is None else read_classes(self.classes)
        predictions = read_predictions(file, classes, logits=self.logits)
        decider = self._with_utility(file, predictions)
        if self.calibrate is not None:
            decider = decider.fit(read_predictions(self.calibrate, classes, logits=self.logits), balanced=self.balanced)
        if self.target_prior == "estimate":
            decider = decider.replace(target_prior=decider.estimate_prior(predictions))
        elif self.target_prior is not None:
            decider = decider.replace(target_prior=read_prior(self.target_prior, "target prior"))
        return predictions, decider

    def _with_utility(self, file: Path, predictions: "Predictions") -> "Decider":
        """A new decider, or a saved one with what the command line changes of it."""
        from rfdlc.decide.decider import Decider

        saved = Decider.load(self.decider) if self.decider else folder_decider(file)
        known = predictions.classes if predictions.named else None
        classes = known or (saved.utility.classes if saved else predictions.classes)
        utility = self._read_utility(classes, bool(known), saved)
        changes: dict[str, Any] = {"combine": self.combine, "calibration": self.calibration, "rule": self.rule}
        if self.train_prior is not None:
            changes["train_prior"] = read_prior(self.train_prior, "training prior")
        given = {name: value for name, value in changes.items() if value is not None}
        if saved is None:
            from rfdlc.decide.utility import Utility

            return Decider(utility or Utility.one_hot(predictions.classes), **given)
        return saved.replace(utility=utility, **given)

    def _read_utility(self, classes: "Classes", named: bool, saved: "Decider | None") -> "Utility | None":
        built = self.costs is None and self.utility in (None, *BUILDERS)
        read_as = classes if named or built else None
        return chosen_utility(lambda: read_as, lambda: saved, self.utility, self.costs, self.penalty, self.abstain)


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """In place of its parameter `request`, the command gets one option for each field of Request."""
    hints = get_type_hints(command, include_extras=True)
    types = get_type_hints(Request, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
        for name, parameter in signature(command).parameters.items()
        if name != "request"
    ]
    options = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
        for field in fields(Request)
    ]

    @wraps(command)
    def expanded(**values: Any) -> None:
        request = Request(**{option.name: values.pop(option.name) for option in options})
        command(request=request, **values)

    # Arguments without a default come first, then the shared options, then the command's own.
    first = [parameter for parameter in own if parameter.default is Parameter.empty]
    parameters = [*first, *options, *(parameter for parameter in own if parameter not in first)]
    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded
