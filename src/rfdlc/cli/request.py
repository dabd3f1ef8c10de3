"""The options that commands share, and what they ask for: a utility, or predictions and a decider."""

import csv
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from rfdlc.errors import InputError, expect, listing

if TYPE_CHECKING:
    from rfdlc.decide.classes import Classes
    from rfdlc.decide.decider import Decider
    from rfdlc.decide.predictions import Predictions
    from rfdlc.decide.utility import Utility

BUILDERS = ("one-hot", "tail-sensitive")
_NO_TABLES = (".json", ".toml", ".yaml", ".yml", ".xlsx", ".xls", ".ods", ".parquet", ".npy", ".npz")
_CLASS_FILES = (".json", ".csv", ".tsv", ".parquet", ".npz")  # what can tell the classes; other dots are in names

UTILITY = "CSV of U[true, action], or `one-hot` (the default), `tail-sensitive`."
ABSTAIN = "Add the action `abstain` with this value for every class; -0.2 is a cost of 0.2."
CALIBRATORS = "`temperature` (the default), `bias-` or `prior-corrected-temperature`, `matrix-scaling`."
TRAIN_PRIOR = "Class prior of the scores: `train` (the counts), `uniform` (after reweighting), `a=0.9,b=0.1`, or CSV."
TARGET_PRIOR = (
    "Class prior to decide for: `train`, `uniform`, `estimate` (by EM, from FILE itself), `a=0.5,b=0.5`, or "
    "CSV with columns class,share. By default that of the training data if known."
)
PenaltyOption = Annotated[float | None, Option(help="For `tail-sensitive`: the value of a false head, by default -1.")]
AbstainOption = Annotated[float | None, Option(help=ABSTAIN)]
JsonOption = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True)
class UtilityRequest:
    """The utility to decide for: every field is an option of the command."""

    utility: Annotated[str | None, Option("--utility", "-u", help=UTILITY)] = None
    costs: Annotated[Path | None, Option(help="CSV of costs instead of utilities: U = -cost.")] = None
    penalty: PenaltyOption = None
    abstain: AbstainOption = None
    target_prior: Annotated[str | None, Option(help=TARGET_PRIOR)] = None

    def read_target_prior(self) -> Any:
        """The prior to decide for; None without the option."""
        return None if self.target_prior is None else read_prior(self.target_prior, "target prior")

    def read_utility(
        self, classes: "Callable[[], Classes | None]", saved: "Callable[[], Decider | None]"
    ) -> "Utility | None":
        """The utility that the options name; None without any of them, and then `classes` is not called.

        `--abstain` alone adds an action to the utility of the `saved` decider.
        """
        costs, abstain = self.costs is not None, self.abstain
        expect(self.utility is None or not costs, "--utility and --costs exclude each other: give one of them")
        named = str(self.costs) if costs else self.utility
        if named is None and self.penalty is None and abstain is None:
            return None
        decider = saved() if named is None and self.penalty is None else None
        if decider is None:
            utility = read_utility(named or "one-hot", classes(), self.penalty, costs)
        else:
            utility = decider.utility
        if abstain is None:
            return utility
        problem = f"--abstain {abstain:g} is worth more than every decision under these costs"
        wrong = costs and abstain > utility.matrix.max()
        expect(not wrong, f"{problem}: write --abstain {-abstain:g} for a cost of {abstain:g}")
        return utility.with_abstain(abstain)


@dataclass(frozen=True)
class Request(UtilityRequest):
    """How scores are to be decided: every field is an option of the command."""

    classes: Annotated[
        str | None, Option("--classes", "-c", help="Training counts: CSV with columns class,count[,group], or JSON.")
    ] = None
    calibrate: Annotated[Path | None, Option(help="Held-out predictions with targets, to fit the calibration.")] = None
    calibration: Annotated[str | None, Option(help=CALIBRATORS)] = None
    balanced: Annotated[bool, Option("--balanced", help="Calibrate with equal weight for every class.")] = False
    train_prior: Annotated[str | None, Option(help=TRAIN_PRIOR)] = None
    combine: Annotated[str | None, Option(help="For several particles: `mean-probabilities` or `mean-logits`.")] = None
    rule: Annotated[str | None, Option(help="`expected-utility`, `argmax`, `cobb`, or `paper-eq12` (warns).")] = None
    logits: Annotated[bool, Option("--logits", help="The tables hold logits, not probabilities.")] = False
    decider: Annotated[Path | None, Option(help="A saved decider, instead of --calibrate and the priors.")] = None

    def prepare(self, file: Path) -> "tuple[Predictions, Decider]":
        """Read the predictions; make the decider, and fit it if asked."""
        from rfdlc.decide.predictions import Predictions

        fits = self.calibrate is not None or not (self.calibration or self.balanced)
        expect(fits, "--calibration and --balanced say how to fit: give held-out predictions, --calibrate FILE")
        classes = None if self.classes is None else read_classes(self.classes)
        predictions = Predictions.load(file, classes, logits=self.logits)
        decider = self._new_decider(file, predictions)
        if self.calibrate is not None:
            held_out = Predictions.load(self.calibrate, classes, logits=self.logits)
            decider = decider.fit(held_out, balanced=self.balanced)
        if self.target_prior == "estimate":
            decider = decider.replace(target_prior=decider.estimate_prior(predictions))
        elif self.target_prior is not None:
            decider = decider.replace(target_prior=self.read_target_prior())
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


# -- what people write on a command line ---------------------------------------------------------------------------


def read_classes(spec: str) -> "Classes":
    """`cat,dog,newt`; a JSON file; a CSV with columns class,count[,group]; or any table of predictions."""
    from rfdlc.decide.classes import Classes
    from rfdlc.decide.predictions import Predictions
    from rfdlc.tables import SUFFIXES, open_table

    path = Path(spec)
    if not path.is_file():
        named = "," in spec and path.suffix.lower() not in _CLASS_FILES
        expect(named, f"classes {spec!r}: no such file; expected a file, or names such as cat,dog,newt")
        return Classes(tuple(name.strip() for name in next(csv.reader([spec], skipinitialspace=True))))
    if path.suffix.lower() == ".json":
        return Classes.from_json(path)
    if path.suffix.lower() in SUFFIXES and "class" in open_table(path).names:
        return _classes_table(path)
    try:
        return Predictions.load(path).classes
    except InputError as error:
        raise InputError(f"{error}; training counts are read from a CSV with columns class,count") from None


def read_utility(spec: str, classes: "Classes | None", penalty: float | None = None, costs: bool = False) -> "Utility":
    """The path of a CSV file, or `one-hot` or `tail-sensitive` for classes that are known."""
    from rfdlc.decide.utility import Utility

    allowed = penalty is None or spec == "tail-sensitive"
    expect(allowed, f"penalty {penalty} is for the utility tail-sensitive, not for {spec}: leave it out")
    if spec not in BUILDERS:
        exists = Path(spec).is_file()
        expect(exists, f"utility {spec!r}: no such file; expected a CSV file or one of {listing(BUILDERS)}")
        is_text = Path(spec).suffix.lower() not in _NO_TABLES
        hint = "as `rfdlc utility new` writes one (a saved decider is given with --decider)"
        expect(is_text, f"utility {spec!r}: expected a CSV file, {hint}")
        table = Utility.read_csv(spec, classes)
        utility = Utility.from_costs(table.matrix, table.classes, table.actions) if costs else table
        _warn_of_sign(spec, utility, costs)
        return utility
    if classes is None:
        raise InputError(f"utility {spec!r} needs the classes: give them with --classes")
    if spec == "one-hot":
        return Utility.one_hot(classes)
    counted = classes.counts is not None
    expect(counted, "utility 'tail-sensitive' needs training counts: give --classes FILE with columns class,count")
    return Utility.tail_sensitive(classes, -1.0 if penalty is None else penalty)


def _warn_of_sign(spec: str, utility: "Utility", costs: bool) -> None:
    """Costs read as utilities, or the reverse, would silently lead to the worst decisions."""
    own = utility.class_action
    if (own < 0).any():
        return
    among = utility.matrix[:, own]  # (C, C): what deciding for each class is worth
    right, least = among.diagonal(), among.min(axis=1)
    if (right == least).all() and (right < among.max(axis=1)).any():
        hints = (
            "is worth the least of its row: if these are costs, give them with --costs",
            "costs the most of its row: if these are utilities, give them with --utility",
        )
        warnings.warn(f"{spec}: every right decision {hints[costs]}", stacklevel=2)


def read_prior(spec: str, what: str) -> str | dict[str, float]:
    """`uniform`, `train`, `cat=0.2,dog=0.8`, or a CSV file with columns class,share: by name, never by position."""
    if spec in ("uniform", "train"):
        return spec
    if "=" in spec:
        pairs = (item.partition("=") for item in spec.split(","))
        return _shares(((name.strip(), value) for name, _, value in pairs), what)
    if not spec.lower().endswith((".csv", ".tsv")):
        raise InputError(
            f"{what} {spec!r} is unknown: expected uniform, train, estimate (a target prior alone), "
            "shares such as cat=0.2,dog=0.8, or a CSV file with columns class,share"
        )
    columns = _columns(Path(spec), ("class", "share"))
    return _shares(zip(columns["class"], columns["share"], strict=True), f"{spec}: share")


def folder_decider(path: Path) -> "Decider | None":
    """The decider that a folder of predictions brings along."""
    from rfdlc.decide.decider import Decider

    saved = path / "decider.json"
    return Decider.load(saved) if path.is_dir() and saved.is_file() else None


def _columns(path: Path, needed: tuple[str, ...]) -> dict[str, list[str]]:
    """The cells of a small table as text, by column."""
    from rfdlc.tables import read_columns

    columns = {name: [str(cell).strip() for cell in cells.to_pylist()] for name, cells in read_columns(path).items()}
    if not set(needed) <= set(columns) or not columns[needed[0]]:
        raise InputError(f"{path}: expected columns {', '.join(needed)} and one row per class")
    return columns


def _classes_table(path: Path) -> "Classes":
    from rfdlc.decide.classes import Classes

    columns = _columns(path, ("class",))
    names, groups = columns["class"], dict[str, list[str]]()
    for name, group in zip(names, columns.get("group", ()), strict=False):
        groups.setdefault(group, []).append(name)
    groups.pop("", None)
    counts: tuple[Any, ...] | None = None  # `Classes` checks that they are whole
    if "count" in columns:
        counts = tuple(
            _count(text, f"{path}: count of {name!r}") for name, text in zip(names, columns["count"], strict=True)
        )
    try:
        return Classes(tuple(names), counts, groups)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _shares(given: Iterable[tuple[str, str]], what: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for name, text in given:
        if name in shares:
            raise InputError(f"{what} of {name!r} is given twice: expected one for every class")
        shares[name] = _number(text, f"{what} of {name!r}")
    return shares


def _count(text: str, what: str) -> float:
    """A number that must be whole: 12.000, or 12,000 between semicolons, may be meant as twelve thousand."""
    if re.fullmatch(r"[0-9]{1,3}([.,][0-9]{3})+", text):
        raise InputError(f"{what}: {text!r} could be read in two ways: write it without a sign for thousands")
    return _number(text, what)


def _number(text: str, what: str) -> float:
    from rfdlc.tables import number

    try:
        return number(text)
    except ValueError:
        raise InputError(f"{what}: {text!r} is not a number") from None
