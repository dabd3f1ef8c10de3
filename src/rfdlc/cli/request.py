"""The options that commands share, and what they ask for: a utility, or predictions and
a decider.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from typer import Argument, Option

import rfdlc
from rfdlc.cli import reading
from rfdlc.cli.fitting import check_sets, with_deferral, with_sets
from rfdlc.errors import (
    InputError,
    are,
    choose,
    counted,
    expect,
    listing,
    repeated,
    suggestion,
)
from rfdlc.formats.files import runs_inside
from rfdlc.formats.tables import is_table, open_table

UTILITY = "CSV of U[true, action], or `one-hot` (the default), `tail-sensitive`."
CLASSES = (
    "Training counts: CSV with columns class,count[,group], JSON, or a run folder."
)
LABELS = (
    "True classes: CSV or Parquet with columns id, path or file, and target, instead of"
    " a column in FILE."
)
SKIP_UNKNOWN = (
    "Leave out labelled samples without a label, or of a class that is not predicted,"
    " and say how many."
)
CALIBRATORS = (
    "`auto` (default), `temperature`, `power-temperature`,"
    " `bias-corrected-temperature`, `prior-corrected-temperature`,"
    " `prior-corrected-power` or `matrix-scaling`."
)
CALIBRATE = (
    "Held-out predictions with targets. Of several inputs: one for all but run folders,"
    " or one each, in order."
)
DECIDER = (
    "A saved decider, or that of a run folder, instead of --calibrate and the priors."
)
BASE = (
    "A saved decider, or that of a run folder, to start from: what is not named by"
    " options stays, and it is calibrated only if it was not."
)
UNLABELLED = "With `--target-prior estimate`: predictions of samples to come."
OF_RUN = "A decider of `rfdlc fit`, instead of that of the run."
# Panels of --help.
COSTS = "What decisions are worth"
PROBABILITIES = "Probabilities"
DECISIONS = "Which samples are handed over, and answers with sets"
FILES = "The predictions"
SHARES = "`a=0.9,b=0.1`, or a CSV with columns class,share (or class,count)."
TRAIN_PRIOR = (
    "Class prior of the scores: `train` (the counts), `uniform` (after reweighting),"
    f" {SHARES}"
)
TARGET_PRIOR = (
    "Class prior to decide for: `train` (the default, if known), `uniform`, `estimate`"
    f" (by EM), {SHARES}"
)
NAME_OR_PATH = "A data set's name (`digits-lt`) or a path."
Source = Annotated[str, Argument(metavar="NAME_OR_PATH", help=NAME_OR_PATH)]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="A run folder.")]
Target = Annotated[
    str | None, Option(metavar="COLUMN", help="The class column of a table.")
]
ROOT = (
    "Folder of a named data set; for a list of images, the folder that its paths are"
    " relative to."
)
GROUPS = "CSV file or column of a table: samples that belong together."
CATEGORIES = (
    "A column whose values are categories, also where they are numbers, such as codes;"
    " may be repeated."
)
DEPENDENT = (
    "Column of tables, or of --labels, with patients or sites: what has one value"
    " depends on each other."
)
Force = Annotated[bool, Option("--force", help="Replace what is there.")]
PenaltyOption = Annotated[
    float | None,
    Option(
        help="For `tail-sensitive`: the value of a false head, by default -1.",
        rich_help_panel="What decisions are worth",
    ),
]
AbstainOption = Annotated[
    float | None,
    Option(
        help="Add an action `abstain` of this value; -0.2 is a cost of 0.2.",
        rich_help_panel="What decisions are worth",
    ),
]
EXPERT = (
    "CSV of somebody's answers, P(answer | true class), and optionally `cost`: an"
    " action of the file's name."
)
BUDGET = (
    "Share that is handed over: `5%`, `30/600`, or by action:"
    " `total=10%,radiologist=2%`. At most this share in "
)
BUDGET += (
    "`decide` of one file, `predict` and `evaluate`; elsewhere on average, by prices of"
    " held-out data. "
)
BUDGET += "Needs held-out data, but not for a table of `rfdlc predict`. "
BUDGET += "`decide` of one file also takes `50/day`, with --time."
ALARM = (
    "Hand over samples unlike all others, at this rate of false alarms (`5%`). Needs"
    " held-out data. "
)
ALARM += (
    "Found by entropy; by the energy of logits where it helps; of runs with"
    " familiarity=true, by features, too."
)
SETS = (
    "Answer with sets: `marginal`, `class` or `macro` (a promised coverage, from"
    " held-out data), `u65` or `u80`."
)
COVERAGE = (
    "Promised share of samples whose set contains the true class, by default 0.9 (or"
    " 90%)."
)
SET_SIZE = (
    "Largest size of a set: the most probable classes are kept. Then no coverage is"
    " promised."
)
SeedOption = Annotated[int, Option(min=0, help="Seed of everything that is drawn.")]
Prepared: TypeAlias = "tuple[rfdlc.Predictions, rfdlc.Decider]"
FORMAT = "Print the table alone: `markdown`, or `latex` (package booktabs)."


def _known_format(given: str | None) -> str | None:
    from rfdlc.formats.table_writing import FORMATS

    return None if given is None else choose("format", given, FORMATS)


FormatOption = Annotated[
    str | None, Option("--format", help=FORMAT, callback=_known_format)
]
JsonOption = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]


@dataclass(frozen=True)
class SourceRequest:
    """How data are read: every field is an option of the command."""

    root: Annotated[Path | None, Option("--root", help=ROOT)] = None
    skip_broken: Annotated[
        bool,
        Option("--skip-broken", help="Leave out broken files and rows, report them."),
    ] = False
    allow_links: Annotated[
        bool,
        Option("--allow-links", help="Accept links that leave a folder of images."),
    ] = False

    def given(self) -> dict[str, Any]:
        """Those that were given, without `root`."""
        return {
            name: value
            for name, value in vars(self).items()
            if value and name != "root"
        }


@dataclass(frozen=True)
class DataRequest(SourceRequest):
    """For data with labels."""

    target: Target = None
    groups: Annotated[str | None, Option(help=GROUPS)] = None
    time: Annotated[
        str | None,
        Option(metavar="COLUMN", help="Train on old rows, test on the newest."),
    ] = None
    drop: Annotated[
        list[str] | None,
        Option(metavar="COLUMN", help="Leave out a column; may be repeated."),
    ] = None
    categories: Annotated[
        list[str] | None, Option(metavar="COLUMN", help=CATEGORIES)
    ] = None


@dataclass(frozen=True)
class MakingOptions:
    """How a decider is made: every field is an option of the command."""

    penalty: PenaltyOption = None
    abstain: AbstainOption = None
    expert: Annotated[list[Path] | None, Option(help=EXPERT, rich_help_panel=COSTS)] = (
        None
    )
    calibration: Annotated[
        str | None, Option(help=CALIBRATORS, rich_help_panel=PROBABILITIES)
    ] = None
    balanced: Annotated[
        bool,
        Option(
            "--balanced",
            help="Calibrate with equal weight for every class.",
            rich_help_panel=PROBABILITIES,
        ),
    ] = False
    train_prior: Annotated[
        str | None, Option(help=TRAIN_PRIOR, rich_help_panel=PROBABILITIES)
    ] = None
    combine: Annotated[
        str | None,
        Option(
            help="For several particles: `mean-probabilities` or `mean-logits`.",
            rich_help_panel=PROBABILITIES,
        ),
    ] = None
    rule: Annotated[
        str | None,
        Option(help="`expected-utility` or `argmax`.", rich_help_panel=DECISIONS),
    ] = None
    sets: Annotated[
        str | None, Option(metavar="KIND", help=SETS, rich_help_panel=DECISIONS)
    ] = None
    coverage: Annotated[
        str | None, Option(metavar="SHARE", help=COVERAGE, rich_help_panel=DECISIONS)
    ] = None
    set_size: Annotated[
        int | None, Option(metavar="N", min=1, help=SET_SIZE, rich_help_panel=DECISIONS)
    ] = None
    budget: Annotated[
        str | None, Option(metavar="SHARE", help=BUDGET, rich_help_panel=DECISIONS)
    ] = None
    unfamiliar: Annotated[
        str | None, Option(metavar="SHARE", help=ALARM, rich_help_panel=DECISIONS)
    ] = None


@dataclass(frozen=True)
class UtilityRequest:
    """What to decide for: every field is an option of the command."""

    utility: Annotated[
        str | None, Option("--utility", "-u", help=UTILITY, rich_help_panel=COSTS)
    ] = None
    costs: Annotated[
        Path | None,
        Option(
            help="CSV of costs instead of utilities: U = -cost.", rich_help_panel=COSTS
        ),
    ] = None
    target_prior: Annotated[
        str | None, Option(help=TARGET_PRIOR, rich_help_panel=PROBABILITIES)
    ] = None
    # Options of commands that fit a decider (`MakingOptions`).
    penalty: float | None = field(default=None, init=False)
    abstain: float | None = field(default=None, init=False)
    expert: list[Path] | None = field(default=None, init=False)
    unfamiliar: str | None = field(default=None, init=False)

    def for_model(self, model: Path) -> dict[str, Any]:
        """The utility and target prior for a run folder or an exported file, None where
        no option names them.
        """
        classes = model / reading.CLASSES
        # Before what predicts is loaded.
        if model.suffix != ".onnx" and not classes.is_file():
            raise InputError(
                runs_inside(model)
                or f"{model} is not a run folder, nor a file of `rfdlc export` (.onnx)"
            )
        prior = None
        if self.target_prior is not None:
            prior = reading.read_prior(self.target_prior, "target prior")
        if self.utility is None and self.costs is None:
            return {"utility": None, "target_prior": prior}
        if model.suffix == ".onnx":
            exported = rfdlc.OnnxModel.load(model)
            utility = self.read_utility(exported.classes, exported.decider)
        else:
            saved = reading.folder_decider(model)
            utility = self.read_utility(rfdlc.Classes.from_json(classes), saved)
        return {"utility": utility, "target_prior": prior}

    def read_utility(
        self, classes: "rfdlc.Classes | None", saved: "rfdlc.Decider | None"
    ) -> "rfdlc.Utility | None":
        """The utility that the options name; `--abstain` or `--expert` alone adds to
        that of the `saved` decider.
        """
        costs, abstain = self.costs is not None, self.abstain
        expect(
            self.utility is None or not costs,
            "--utility and --costs exclude each other: give one of them",
        )
        named = str(self.costs) if costs else self.utility
        adds = abstain is not None or bool(self.expert)
        utility = saved.utility if saved is not None and adds else None
        if named is not None or self.penalty is not None or (adds and saved is None):
            utility = reading.read_utility(
                named or "one-hot", classes, self.penalty, costs
            )
        if utility is not None and abstain is not None:
            problem = (
                f"--abstain {abstain:g} is worth more than every decision under these"
                " costs"
            )
            wrong = costs and abstain > utility.matrix.max()
            expect(
                not wrong,
                f"{problem}: write --abstain {-abstain:g} for a cost of {abstain:g}",
            )
            utility = utility.with_abstain(abstain)
        for file in self.expert or ():
            utility = None if utility is None else reading.with_expert(utility, file)
        forced = self.unfamiliar is not None or (
            saved is not None and saved.deferral.unfamiliar is not None
        )
        if (
            utility is not None
            and not forced
            and (adds or named not in (None, *reading.BUILDERS))
        ):
            reading.warn_of_dominated_actions(
                utility
            )  # unfamiliar samples may be handed over to these, too
        return utility


@dataclass(frozen=True)
class ModelRequest(UtilityRequest):
    """For commands on the model of a run folder."""

    decider: Annotated[
        Path | None, Option(help=OF_RUN, rich_help_panel=PROBABILITIES)
    ] = None

    def for_model(self, model: Path) -> dict[str, Any]:
        """As in other requests; a decider with the utility and prior of the others."""
        options = super().for_model(model)
        if self.decider is None:
            return options
        if options["target_prior"] == "estimate":
            raise InputError(
                "--target-prior estimate with --decider: thresholds and sets are for"
                " one prior, and an estimated one is known after predicting: write"
                f" .npz (`rfdlc predict {model} DATA --out scores.npz`), then fit a"
                f" decider to it (`rfdlc fit {model} --target-prior estimate"
                " --unlabelled scores.npz`)"
            )
        changes = {name: value for name, value in options.items() if value is not None}
        return {"decider": rfdlc.Decider.load(self.decider).replace(**changes)}


@dataclass(frozen=True)
class Request(UtilityRequest):
    """How scores are to be decided: every field is an option of the command."""

    classes: Annotated[
        str | None, Option("--classes", "-c", help=CLASSES, rich_help_panel=FILES)
    ] = None
    calibrate: Annotated[
        list[Path] | None, Option(help=CALIBRATE, rich_help_panel=PROBABILITIES)
    ] = None
    groups: Annotated[
        str | None, Option(metavar="COLUMN", help=DEPENDENT, rich_help_panel=FILES)
    ] = None
    logits: Annotated[
        bool,
        Option(
            "--logits",
            help="The tables hold logits, not probabilities.",
            rich_help_panel=FILES,
        ),
    ] = False
    decider: Annotated[
        Path | None, Option(help=DECIDER, rich_help_panel=PROBABILITIES)
    ] = None
    skip_unknown: Annotated[
        bool, Option("--skip-unknown", help=SKIP_UNKNOWN, rich_help_panel=FILES)
    ] = False
    # Options of commands that fit a decider (`MakingOptions`).
    calibration: str | None = field(default=None, init=False)
    balanced: bool = field(default=False, init=False)
    train_prior: str | None = field(default=None, init=False)
    combine: str | None = field(default=None, init=False)
    rule: str | None = field(default=None, init=False)
    sets: str | None = field(default=None, init=False)
    coverage: str | None = field(default=None, init=False)
    set_size: int | None = field(default=None, init=False)
    budget: str | None = field(default=None, init=False)

    def prepare(
        self,
        file: Path,
        like: "rfdlc.Classes | None" = None,
        columns: Sequence[str] = (),
        skip: bool | None = None,
    ) -> "Prepared":
        """Read the predictions; make the decider, or change the saved one, and fit it
        if asked.

        The classes of a table are in the order of those that it is to be compared with;
        `columns` are not classes. `skip` says whether rows without labels are left out,
        or raise; None keeps them.
        """
        beside = file / "held-out.npz"
        if (
            (self.calibration or self.balanced)
            and not self.calibrate
            and beside.is_file()
        ):
            return replace(self, calibrate=[beside]).prepare(file, like, columns, skip)
        classes = self.checked_classes()
        if like is not None and is_table(file):
            classes = classes or like
            if {*classes.names} == {*like.names}:
                classes = classes.in_order(like.names)
        predictions = self.read(file, classes, columns, skip)
        decider = self.make_decider(
            file,
            classes,
            predictions.classes,
            predictions.named,
            lambda decider: decider.estimate_prior(predictions),
            predictions if predictions.scores.corrected else None,
        )
        return predictions, decider

    def read(
        self,
        file: Path,
        classes: "rfdlc.Classes | None",
        columns: Sequence[str] = (),
        skip: bool | None = None,
    ) -> "rfdlc.Predictions":
        """The predictions of a file; warns of ids that repeat, raises where the column
        of `--groups` is absent.
        """
        predictions = self.load(file, classes, columns, skip)
        ids = []
        if predictions.ids is not None and self.groups != "id":
            ids = predictions.ids.tolist()
        twice = repeated(ids)
        if twice:
            warnings.warn(
                f"{file}: {counted(len(twice), 'id')} {are(len(twice))} in several rows"
                f" ({listing(twice, 3)}), and each row counts: remove repeated rows, if"
                " they are the same sample; if ids name patients, use --groups id",
                stacklevel=2,
            )
        if {*columns} <= {*predictions.columns}:  # the others are those of labels
            reading.check_groups(predictions, self.groups, str(file))
        return predictions

    def load(
        self,
        file: Path,
        classes: "rfdlc.Classes | None",
        columns: Sequence[str] = (),
        skip: bool | None = None,
    ) -> "rfdlc.Predictions":
        """Predictions; columns of a table that are not classes are ignored where
        options or a run name the classes.
        """
        named = (
            self.named_classes(open_table(file).names, file)
            if classes is None and is_table(file)
            else None
        )
        given = "" if classes is None else "the classes of the other inputs"
        given = f"--classes {self.classes}" if self.classes else given
        others = given if named is None else self.names_classes
        kept = (*columns, *filter(None, [self.groups]))
        options: dict[str, Any] = {
            "logits": self.logits,
            "others": others,
            "columns": kept,
            "skip_unknown": skip,
        }
        return reading.with_groups(
            rfdlc.Predictions.load(file, classes or named, **options), self.groups
        )

    def named_classes(
        self, columns: Sequence[str], where: object
    ) -> "rfdlc.Classes | None":
        """Those of a saved decider, or of a table of utilities in the order of the
        columns; `where` has these.
        """
        if self.saved_decider is not None:
            return rfdlc.Classes(self.saved_decider.utility.classes.names)
        names = self.utility_names
        absent = [name for name in names if name not in columns]
        hint = suggestion(absent[0], {*columns} - {*names}) if absent else ""
        told = (
            f"{self.names_classes}: {where} has no column for the class"
            f" {listing(map(repr, absent))}; it has "
        )
        fix = (
            "correct one of the two; in a table of costs or utilities each line begins"
            " with its true class"
        )
        expect(not absent, f"{told}{listing(columns)}: {fix}{hint}")
        return (
            rfdlc.Classes(tuple(filter({*names}.__contains__, columns)))
            if names
            else None
        )

    @property
    def names_classes(self) -> str:
        """What `named_classes` are those of."""
        return (
            f"the utility of {self.decider}"
            if self.decider
            else str(self.costs or self.utility)
        )

    @cached_property
    def utility_names(self) -> tuple[str, ...]:
        """The classes of a table of utilities, read once; none if there is no such
        table.
        """
        table = str(self.costs or self.utility or reading.BUILDERS[0])
        with warnings.catch_warnings(
            action="ignore"
        ):  # these are shown when the utility is made
            return (
                ()
                if table in reading.BUILDERS
                else reading.read_table(table, self.costs is not None).classes.names
            )

    @cached_property
    def saved_decider(self) -> "rfdlc.Decider | None":
        """The decider of --decider, read once."""
        return None if self.decider is None else rfdlc.Decider.load(self.decider)

    def checked_classes(self) -> "rfdlc.Classes | None":
        """The classes that the options name; raises for options that do not fit
        together.
        """
        self.check_calibration()
        check_sets(self.sets, self.coverage, self.set_size)
        return None if self.classes is None else reading.read_classes(self.classes)

    def check_calibration(self) -> None:
        """Raise for options of calibration that do not fit together."""
        if not self.calibrate and (self.calibration or self.balanced):
            raise InputError(
                "--calibration and --balanced say how to fit: give held-out"
                " predictions, too (--calibrate FILE)"
            )
        files = self.calibrate or []
        if len(files) > 1:
            raise InputError(
                f"--calibrate is given {len(files)} times: expected one file for the"
                " one input"
            )
        saved = self.saved_decider
        if files and saved is not None and saved.model.calibrator is not None:
            raise InputError(
                f"--decider {self.decider} is calibrated, and --calibrate {files[0]}"
                " would replace that: give one of the two"
            )

    def make_decider(
        self,
        file: Path,
        classes: Any,
        own: Any,
        named: bool,
        estimate: Any,
        ready: "rfdlc.Predictions | None" = None,
    ) -> "rfdlc.Decider":
        """The decider that the options ask for, for scores of `own` classes; `estimate`
        gives their class prior.

        A budget of samples that are `ready`, calibrated and corrected, is found from
        them.
        """
        from rfdlc.probabilities.model import CORRECTED_TWICE

        if ready is not None and self.target_prior is not None:
            if self.target_prior != "estimate":  # a misspelt one is said first
                reading.read_prior(self.target_prior, "target prior")
            raise InputError(CORRECTED_TWICE)
        decider = self.unfitted(file, own, named)
        held = None
        if self.calibrate:
            held = self.load(self.calibrate[0], classes, skip=self.skip_unknown)
            if held.targets is None:
                raise InputError(
                    f"--calibrate {self.calibrate[0]}: has no true classes: expected a"
                    " column target"
                )
            reading.check_groups(held, self.groups, f"--calibrate {self.calibrate[0]}")
            decider = decider.replace(budget=None).fit(held, balanced=self.balanced)
        if self.target_prior == "estimate":
            decider = decider.replace(target_prior=estimate(decider))
        return self.fit_to(
            decider, held, file if self.decider is None else self.decider, ready
        )

    def unfitted(
        self, file: Path, own: "rfdlc.Classes", named: bool
    ) -> "rfdlc.Decider":
        """A decider of the utility, priors and rule that the options name, for scores
        of `own` classes: a new one, or the saved one with these.
        """
        saved = self.saved_decider
        if self.decider is None:
            saved = reading.folder_decider(file)
        classes = own
        if saved is not None and not named:
            classes = saved.utility.classes
        built = self.costs is None and self.utility in (None, *reading.BUILDERS)
        utility = self.read_utility(classes if named or built else None, saved)
        settings: dict[str, Any] = {
            "combine": self.combine,
            "calibration": self.calibration,
            "rule": self.rule,
        }
        if self.train_prior is not None:
            if self.decider is None:
                check_prior_unknown(file, saved)
            settings["train_prior"] = reading.read_prior(
                self.train_prior, "training prior"
            )
        if self.target_prior is not None and self.target_prior != "estimate":
            settings["target_prior"] = reading.read_prior(
                self.target_prior, "target prior"
            )
        settings = {
            name: value for name, value in settings.items() if value is not None
        }
        if saved is None:
            return rfdlc.Decider(utility or rfdlc.Utility.one_hot(own), **settings)
        if self.budget:
            settings["budget"] = None
        return saved.replace(utility=utility, **settings)

    def fit_to(
        self, decider: "rfdlc.Decider", held: Any, run: Path, ready: Any = None
    ) -> "rfdlc.Decider":
        """The decider with the sets and the handing over that the options ask for, by
        held-out data or the run's.
        """
        asked = self.sets or self.budget or self.unfamiliar
        if held is None and asked:
            held = reading.held_out(run)
        decider = with_sets(decider, self.sets, self.coverage, self.set_size, held)
        return with_deferral(
            decider,
            self.budget,
            self.unfamiliar,
            held,
            held if ready is None else ready,
        )

    def of_each(self, files: list[Path]) -> "list[Self]":
        """The requests of several inputs, which have one calibration file each, or
        share one but for run folders.

        A run has been calibrated by its own held-out samples: those of another model do
        not fit, nor does its prior.
        """
        given, count = self.calibrate or [], len(files)
        saved = [
            None if self.decider else reading.folder_decider(file) for file in files
        ]
        if len(given) != 1 or count == 1:
            once = (
                f"--calibrate is given {len(given)} times for {count} inputs: expected"
                " once, or once per input"
            )
            expect(len(given) in (0, count), once)
            each = [replace(self, calibrate=given[i : i + 1]) for i in range(count)]
        else:
            own = [
                run is not None and run.model.calibrator is not None for run in saved
            ]
            fix = (
                "all inputs have a calibration of their own: leave it out, or give it"
                " once per input"
            )
            expect(not all(own), f"--calibrate {given[0]}: {fix}")
            none: dict[str, Any] = {
                "calibrate": None,
                "calibration": None,
                "balanced": False,
            }
            each = [replace(self, **none) if kept else self for kept in own]
        mixed = None in saved  # a prior is that of inputs which do not know theirs
        return [
            replace(one, train_prior=None) if mixed and run else one
            for one, run in zip(each, saved, strict=True)
        ]


@dataclass(frozen=True)
class DecideRequest(MakingOptions, Request):
    """For `rfdlc decide`."""


@dataclass(frozen=True)
class LabelledRequest(MakingOptions, Request):
    """For commands that compare decisions with labels."""

    labels: Annotated[Path | None, Option(help=LABELS, rich_help_panel=FILES)] = None
    target: Annotated[
        str | None,
        Option(
            metavar="COLUMN",
            help="The class column of --labels FILE.",
            rich_help_panel=FILES,
        ),
    ] = None

    def checked_classes(self) -> "rfdlc.Classes | None":
        """As in other requests, after checking that --target has a file to name a
        column of.
        """
        own = (
            f"--target {self.target} names a column of --labels FILE: give that, too;"
            " in predictions it is `target`"
        )
        expect(self.target is None or self.labels is not None, own)
        return super().checked_classes()

    def read(
        self,
        file: Path,
        classes: "rfdlc.Classes | None",
        columns: Sequence[str] = (),
        skip: bool | None = None,
    ) -> "rfdlc.Predictions":
        """With labels and `columns` of a file, matched by id: as it is, or by the file
        name where it is a path.
        """
        names: Sequence[str] = ()
        if is_table(file):
            columns = (*columns, *filter(None, [self.groups]))
            names = open_table(file).names if columns else ()
        group, source = "", ""
        if columns and self.labels is None:
            group, source = reading.group_column(file)
        known = [*names, *filter(None, [group])]
        wanted = [name for name in columns if name not in known]
        if wanted and self.labels is None:
            raise InputError(
                f"{file}: no column {listing(wanted)}, it has"
                f" {listing(known, 20) or 'scores alone'}; see also --labels FILE"
            )
        if self.labels is None:
            skip = self.skip_unknown
        predictions = super().read(file, classes, columns, skip)
        if group in columns:
            predictions.columns[group] = reading.groups_of(
                predictions, f"{file}: --by {group}", source or "FILE"
            )
        if self.labels is None:
            return predictions
        predictions = self._with_labels(self.labels, predictions, file, wanted)
        return reading.with_groups(predictions, self.groups)

    def _with_labels(
        self,
        labels: Path,
        predictions: "rfdlc.Predictions",
        file: Path,
        wanted: Sequence[str],
    ) -> "rfdlc.Predictions":
        """The predictions with the labels, and the `wanted` columns, of the rows of
        their ids.
        """
        from rfdlc.data.load import IDS, id_column
        from rfdlc.data.readers.image_table import PATHS
        from rfdlc.data.rows import TARGETS

        named = reading.table_columns(labels)
        cells = {name.lower(): column for name, column in named.items()}
        cells |= named  # some may differ in case alone
        for name in (*wanted, *filter(None, [self.target])):
            choose(f"{labels}: column", name, named)
        target = self.target or _first_of(TARGETS, cells)
        if predictions.ids is None or not len(predictions.ids):
            raise InputError(
                f"{file}: has no ids, by which labels are matched: add a column id"
            )
        ids = predictions.ids.tolist()
        key = _first_of((*IDS, *PATHS), cells) or id_column(labels, named, {*ids})
        has_labels = target or (wanted and predictions.targets is not None)
        if key not in cells or not has_labels:
            raise InputError(
                f"{labels}: expected columns id (or path) and target; it has"
                f" {listing(named)}: rename those that are meant, or name the class"
                " column by --target"
            )
        rows = reading.rows_of(
            ids,
            cells[key],
            f"{labels}: expected one row for each id of {file}",
            self.skip_unknown and bool(target),
        )
        for name in wanted:
            predictions.columns[name] = _at(cells[name], rows)
        if not target:
            return predictions
        return reading.with_labels(
            predictions,
            _at(cells[target], rows),
            f"{labels}: {target}",
            self.skip_unknown,
        )


@dataclass(frozen=True)
class FitRequest(LabelledRequest):
    """Every option that makes a decider, for `rfdlc fit`."""

    # The held-out predictions are the argument of the command.
    calibrate: list[Path] | None = field(default=None, init=False)
    decider: Annotated[
        Path | None, Option(help=BASE, rich_help_panel=PROBABILITIES)
    ] = None
    unlabelled: Annotated[
        Path | None,
        Option(metavar="FILE", help=UNLABELLED, rich_help_panel=PROBABILITIES),
    ] = None

    def check_calibration(self) -> None:
        """There is always something to calibrate on."""

    def fit(self, source: Path) -> "Prepared":
        """The held-out predictions of a file or a run folder, and the decider that is
        fitted to them.

        A run or a saved decider that is calibrated stays as it is, unless options say
        how to calibrate.
        """
        classes = self.checked_classes()
        self._check_unlabelled()
        held_out = self.read(reading.held_out_file(source), classes)
        decider = self.unfitted(source, held_out.classes, held_out.named)
        if self._calibrates(decider, held_out, source):
            decider = decider.replace(budget=None).fit(held_out, balanced=self.balanced)
        if self.unlabelled is not None:
            samples = self.load(self.unlabelled, classes)
            decider = decider.replace(target_prior=decider.estimate_prior(samples))
        return held_out, self.fit_to(decider, held_out, source)

    def _calibrates(
        self, decider: "rfdlc.Decider", held_out: "rfdlc.Predictions", source: Path
    ) -> bool:
        """Whether the decider is to be calibrated; raises if there are no labels."""
        has_labels = held_out.targets is not None
        if self.calibration == "none" and not has_labels:
            return False
        if not (self.calibration or self.balanced):
            is_run = reading.folder_decider(source) is not None
            if decider.model.calibrator is not None:
                return False
            if is_run and self.decider is None:
                return False
        if not has_labels:
            raise InputError(
                f"{source}: has no true classes: expected a column target, or --labels"
                " FILE; without calibration (--calibration none) none are needed"
            )
        return True

    def _check_unlabelled(self) -> None:
        if self.unlabelled is None and self.target_prior == "estimate":
            raise InputError(
                "--target-prior estimate is for samples without labels: give them by"
                " --unlabelled FILE, or estimate when you decide (`rfdlc decide FILE"
                " --decider decider.json --target-prior estimate`)"
            )
        if self.unlabelled is not None and self.target_prior != "estimate":
            raise InputError(
                f"--unlabelled {self.unlabelled} is for an estimated class prior: give"
                " --target-prior estimate as well"
            )


def check_prior_unknown(file: Path, saved: "rfdlc.Decider | None") -> None:
    """Raise if the decider of a run knows the class prior of its scores."""
    if saved is not None and saved.model.train_prior is not None:
        raise InputError(
            f"--train-prior: {file} knows the class prior of its scores: leave the"
            " option out"
        )


def _first_of(names: Iterable[str], cells: Mapping[str, Any]) -> str:
    """The first name that is that of a column; none: empty."""
    return next((name for name in names if name in cells), "")


def _at(cells: Sequence[str], rows: Sequence[int | None]) -> list[str]:
    """The cells of the rows; empty where there is no row."""
    return ["" if row is None else cells[row] for row in rows]


def data_options(pairs: Iterable[str]) -> dict[str, str]:
    """Those of `data.key=value` among pairs, by key."""
    found = (
        pair.removeprefix("data.").partition("=")
        for pair in pairs
        if pair.startswith("data.")
    )
    return {key.strip().replace("-", "_"): value.strip() for key, _, value in found}


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of the command that is a dataclass by one option per
    field.
    """
    given = signature(command).parameters
    requests: dict[str, Any] = {
        name: own.annotation
        for name, own in given.items()
        if is_dataclass(own.annotation)
    }
    parameters = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for name, own in given.items()
        for parameter in (
            signature(requests[name]).parameters.values() if name in requests else [own]
        )
    ]
    parameters.sort(
        key=lambda parameter: parameter.default is not Parameter.empty
    )  # arguments come first

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, kind in requests.items():
            values[name] = kind(
                **{
                    own.name: values.pop(own.name)
                    for own in fields(kind)
                    if own.name in values
                }
            )
        command(**values)

    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return expanded
