"""Decider: the one way from scores to actions.

scores -> probabilities for a class prior -> expected utility -> action
"""

import copy
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decisions.budgets import Budget, PerDay, check_budget_rule, fit_budget
from rfdlc.decisions.deferral import Deferral
from rfdlc.decisions.rules import RULES, Explanation, explained, largest, value_of
from rfdlc.decisions.sets import PredictionSets, SetUtility, as_sets, check_coverage
from rfdlc.decisions.unfamiliar import Unfamiliar, fit_unfamiliar, unfamiliar_action
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, choose, listing
from rfdlc.formats.files import check_version
from rfdlc.formats.identity import check_same_model
from rfdlc.imports import with_imports
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.model import (
    SETTINGS,
    Probabilities,
    ProbabilityModel,
    corrected,
)
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import Prior, PriorEstimate, unlikely
from rfdlc.probabilities.scores import CORRECTED, CorrectedProbabilities, Floats

FORMAT = "rfdlc-decider"
VERSION = 5  # another number for whatever changes what a file says
OWN = ("utility", "model", "rule", "deferral", "sets")
DEFERRED = ("budget", "unfamiliar")
# Probabilities depend on these, and what was fitted to them does too.
SCALED = ("combine", "weights", "calibrator", "train_prior", "target_prior")
PRICED = ("combine", "weights", "train_prior", "target_prior")
UPSIDE_DOWN = (
    "every right decision is worth the least of its row: if these are costs, turn them"
    " into a utility (Utility.from_costs; on the command line --costs)"
)
NEEDS_SETS = (
    "this decider has no sets: fit them to held-out predictions (Decider.fit_sets;"
    " --sets macro --coverage 0.9 with --calibrate FILE), or answer with sets by"
    " expected utility (sets='u65', --sets u65)"
)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Decider:
    """Turn the scores of any model into the actions with the highest expected utility.

    A decider is immutable: `fit` and `replace` return new ones.

    Parameters
    ----------
    utility : Utility
        What each action is worth for each true class.
    model : ProbabilityModel, optional
        How scores become probabilities; by default one for the classes of the utility,
        with `settings`.
    rule : {"expected-utility", "argmax"}
        The decision rule; the second decides for the most probable class, for
        comparison.
    deferral : Deferral, optional
        Which samples are handed over beside those that the rule hands over: what
        `fit_budget` and `fit_unfamiliar` found.
    sets : {"u65", "u80"}, SetUtility, PredictionSets or None
        How `decide_sets` answers with several classes; `fit_sets` gives sets with a
        promised coverage.
    **settings
        Parameters of the `ProbabilityModel`: `combine`, `weights`, `calibration`,
        `train_prior`, `target_prior`.

    Examples
    --------
    >>> utility = Utility([[1, 0], [-5, 1]], ["healthy", "ill"])
    >>> decider = Decider(utility)
    >>> [utility.actions[a] for a in decider.decide([[0.9, 0.1], [0.7, 0.3]])]
    ['healthy', 'ill']
    """

    utility: Utility
    model: ProbabilityModel
    rule: str
    deferral: Deferral
    sets: PredictionSets | SetUtility | None

    def __init__(
        self,
        utility: Utility,
        model: ProbabilityModel | None = None,
        *,
        rule: str = "expected-utility",
        deferral: Deferral | None = None,
        sets: Any = None,
        **settings: Any,
    ) -> None:
        check_utility(utility)
        if model is None:
            for name in settings:
                choose("parameter", name, (*OWN, *SETTINGS))
            model = ProbabilityModel(utility.classes, **settings)
        elif settings:
            raise InputError(
                f"a Decider got a model and {listing(settings)}: settings belong to the"
                " model, give model.replace(...)"
            )
        self._set("utility", utility)
        self._set("model", model)
        self._set("rule", rule)
        self._set("deferral", deferral or Deferral())
        self._set("sets", sets)
        self._settle()
        warn_of_utility(utility)

    def replace(self, *, classes: Classes | None = None, **changes: Any) -> "Decider":
        """Return a copy with other parameters, also those of its model and of its
        deferral; nothing is fitted again.

        A new utility is matched by class name, and so are new `classes` (training
        counts and groups). Another calibration is not fitted yet.
        """
        allowed = (*OWN, *DEFERRED, *SETTINGS)
        for name in changes:
            choose("parameter", name, allowed)
        new = copy.copy(self)
        utility = changes.get("utility")
        if utility is None:
            utility = self.utility
        check_utility(utility)
        old = self.utility.classes
        if classes is not None or utility is not self.utility:
            ordered = (classes or old).in_order(old.names)
            new._set("utility", utility.with_classes(ordered, same_actions=True))
        for name in ("rule", "sets", "deferral", "model"):
            if name in changes:
                new._set(name, changes[name])
        deferred = {name: changes[name] for name in DEFERRED if name in changes}
        if deferred:
            parts = {name: getattr(new.deferral, name) for name in DEFERRED}
            new._set("deferral", Deferral(**{**parts, **deferred}))
        settings = {name: value for name, value in changes.items() if name in SETTINGS}
        if new.utility.classes is not new.model.classes:
            settings["classes"] = new.utility.classes
        if settings:
            new._set("model", new.model.replace(**settings))
        new._settle()
        if utility is not self.utility:
            warn_of_utility(utility)
        if "sets" not in changes:
            new._drop_sets_of(self)
        kept = not {"budget", "deferral"} & set(changes)
        if self.deferral.budget is not None and kept:
            new._check_prices_of(self)
        return new

    def fit(
        self,
        scores: Any,
        targets: ArrayLike | None = None,
        *,
        logits: bool = False,
        balanced: bool = False,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> "Decider":
        """Return a decider that is calibrated on held-out scores and labels.

        Parameters
        ----------
        scores : array-like of shape (n_samples, n_classes), Predictions or data frame
            Of one model, or with a first dimension of particles.
        targets : array-like of shape (n_samples,), optional
            Labels, where the scores do not hold them.
        logits : bool
            Whether an array holds logits; Predictions say it themselves.
        balanced : bool
            Give every class the same total weight.
        sample_weight : array-like of shape (n_samples,), optional
            A sample with weight 2 counts as two, and one with 0 is left out. Samples
            with equal scores and class are copies of one, unless samples of several
            classes have equal scores.
        groups : array-like of shape (n_samples,), optional
            Such as patients: "auto" is chosen on groups that calibrators were not
            fitted to.
        """
        model = self.model.fit(
            scores,
            targets,
            logits=logits,
            balanced=balanced,
            sample_weight=sample_weight,
            groups=groups,
        )
        sets = None if isinstance(self.sets, PredictionSets) else self.sets
        return self.replace(model=model, budget=None, sets=sets)

    def fit_sets(
        self,
        scores: Any,
        targets: ArrayLike | None = None,
        *,
        kind: str = "macro",
        coverage: float = 0.9,
        logits: bool = False,
        **options: Any,
    ) -> "Decider":
        """Return a decider whose sets contain the true class with a promised
        probability, from held-out samples.

        `kind` is "marginal", "class" or "macro"; see `PredictionSets.fit` for it and
        further options. Samples that calibrated this decider are used out of fold: each
        is calibrated without it.
        """
        check_coverage(coverage)
        model = self.model
        checked, y = model.read_labelled(scores, targets, logits)
        p = model.held_out_probabilities(checked, y)
        shifted = model.prior_warning(y, rare=False) is not None or unlikely(
            y, model.decided_prior, (1 - coverage) / 2
        )
        options = {"prior": model.decided_prior, "shifted": shifted, **options}
        sets = PredictionSets.fit(
            p, y, self.utility.classes, kind=kind, coverage=coverage, **options
        )
        return self.replace(sets=sets, model=model.known_as(checked.model))

    def fit_budget(
        self,
        scores: Any,
        targets: ArrayLike | None = None,
        *,
        budget: Any,
        logits: bool = False,
    ) -> "Decider":
        """Return a decider that hands over at most `budget` of the samples, those for
        which it is worth most.

        It is a share ("5%", 0.05), or shares by action: `{"radiologist": 0.02, "total":
        0.1}`. Prices are those of held-out samples, weighted to the prior that is
        decided for. Corrected probabilities need no targets.
        """
        check_budget_rule(self.rule)
        checked = self.model.read(scores, logits)
        y = None
        if not checked.corrected:
            y = self.model.read_labelled(scores, targets, logits)[1]
        flagged = self.deferral.flags(Probabilities(self.model, checked))
        fitted = fit_budget(self.model, self.utility, checked, y, budget, flagged)
        model = self.model.known_as(checked.model)
        return self.replace(budget=fitted, model=model)

    def fit_unfamiliar(
        self,
        scores: Any,
        targets: ArrayLike | None = None,
        *,
        false_alarm: float = 0.05,
        score: str = "auto",
        logits: bool = False,
    ) -> "Decider":
        """Return a decider that hands over a share of held-out samples, unlike all
        others by an `Unfamiliar` score.
        """
        checked, y = self.model.read_labelled(scores, targets, logits)
        unfamiliar = fit_unfamiliar(
            self.model, self.utility, checked, y, false_alarm, score
        )
        model = self.model.known_as(checked.model)
        return self.replace(unfamiliar=unfamiliar, model=model)

    def estimate_prior(self, scores: Any, *, logits: bool = False) -> PriorEstimate:
        """The class prior of unlabelled data with its uncertainty; after `fit`, the
        BBSE estimate is a check.
        """
        return self.model.estimate_prior(scores, logits=logits)

    def decide(
        self, scores: Any, *, logits: bool = False, batch: bool | PerDay = False
    ) -> Indices:
        """The chosen action of each sample (N,), an index into `utility.actions`;
        `batch` keeps to budgets exactly.
        """
        probabilities = self.model(scores, logits=logits)
        if self.deferral.applies(batch):
            return self._deferred(probabilities, batch)[0]
        # Linear rules take the correction of the prior into their matrix.
        gain = RULES[self.rule](self.utility, probabilities.ratio)
        chunks = probabilities.calibrated()
        return np.concatenate([largest(gain(p)) for _, p in chunks])

    def decide_values(
        self, scores: Any, *, logits: bool = False
    ) -> tuple[Indices, Floats]:
        """The actions of `decide` and their expected utilities, (N,) each: two columns
        of `explain`, at less cost.
        """
        if not self.gains_tell:
            explanation = self.explain(scores, logits=logits)
            return explanation.action, explanation.value
        probabilities = self.model(scores, logits=logits)
        gain = RULES[self.rule](self.utility, probabilities.ratio)
        value = value_of(self.utility, probabilities.ratio)
        actions, values = [], []
        for _, p in probabilities.calibrated():
            gains = gain(p)
            actions.append(largest(gains))
            values.append(value(p, gains, actions[-1]))
        return np.concatenate(actions), np.concatenate(values)

    def decide_probabilities(self, probabilities: Floats) -> Indices:
        """Like `decide`, from probabilities (N, C) that are calibrated and corrected
        already.
        """
        return largest(self._charged_gains(probabilities))

    def decide_sets(
        self, scores: Any, *, logits: bool = False, seed: int = 0
    ) -> NDArray[np.bool_]:
        """Which classes are in the set of each sample (N, C); `seed` is for randomised
        sets.
        """
        if self.sets is None:
            raise InputError(NEEDS_SETS)
        rng = np.random.default_rng(seed)
        chunks = self.model(scores, logits=logits).chunks(self.sets.scaled)
        return np.concatenate(
            [self.sets.members(p, self.utility, rng) for _, p in chunks]
        )

    def probabilities(self, scores: Any, *, logits: bool = False) -> Floats:
        """Combined, calibrated, prior-corrected probabilities (N, C), marked so that no
        Decider takes them again.
        """
        p = self.model(scores, logits=logits).array()
        return p.view(CorrectedProbabilities)

    def explain(
        self, scores: Any, *, logits: bool = False, batch: bool | PerDay = False
    ) -> Explanation:
        """For each sample the chosen action (as `decide`), its value, the runner-up,
        and what arg max would do.
        """
        probabilities = self.model(scores, logits=logits)
        decided: tuple[Any, ...] = ()
        if self.deferral.applies(batch):
            decided = self._deferred(probabilities, batch)
        return self._explanation(
            probabilities.calibrated(),
            probabilities.ratio,
            decided,
            daily=isinstance(batch, PerDay),
        )

    def explain_probabilities(
        self, probabilities: Floats, unfamiliar: Any = None
    ) -> Explanation:
        """Like `explain`, from corrected probabilities (N, C), and which samples are
        unfamiliar (N,), if known.
        """
        p = np.asarray(probabilities)
        decided: tuple[Any, ...] = ()
        if unfamiliar is not None:
            handed = unfamiliar_action(self.utility, p)
            kept = self.decide_probabilities(p)
            decided = (np.where(unfamiliar, handed, kept), unfamiliar)
        return self._explanation([(slice(None), p)], None, decided)

    @property
    def gains_tell(self) -> bool:
        """Whether the largest gain belongs to the action, so that it tells what the
        action is worth.
        """
        return self.rule == "expected-utility" and not self.deferral.applies()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        table = {
            "format": FORMAT,
            "version": VERSION,
            "utility": self.utility.to_dict(),
            "model": self.model.to_dict(),
            "rule": self.rule,
        }
        parts = {
            "sets": self.sets,
            "budget": self.deferral.budget,
            "unfamiliar": self.deferral.unfamiliar,
        }
        for name, part in parts.items():
            table[name] = None if part is None else part.to_dict()
        return table

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> "Decider":
        """The inverse of `to_dict`."""
        check_version("it", table, FORMAT, VERSION)
        utility = Utility.from_dict(table["utility"])
        model = ProbabilityModel.from_dict(table["model"], utility.classes)
        budget, unfamiliar = table["budget"], table["unfamiliar"]
        deferral = Deferral(
            budget and Budget(**budget), unfamiliar and Unfamiliar(**unfamiliar)
        )
        return cls(
            utility, model, rule=table["rule"], deferral=deferral, sets=table["sets"]
        )

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads."""
        text = json.dumps(self.to_dict(), ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Decider":
        """Read a file that `save` wrote; of a run folder, its `decider.json`."""
        file = Path(path) / "decider.json" if Path(path).is_dir() else Path(path)
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = "no such file"
            if file.exists():
                told = with_imports(error, file.parent)
                reason = f"cannot be read as a decider ({told})"
            raise InputError(
                f"{path}: {reason}: expected a JSON file of `rfdlc fit`,"
                " `Decider.save` or a run folder"
            ) from None

    def __repr__(self) -> str:
        state = self.model.calibrator or "not calibrated"
        return (
            f"Decider({self.rule}, {self.model.combine}, {state},"
            f" {self.model.decided_for}; {len(self.utility.actions)} actions)"
        )

    def _settle(self) -> None:
        """Bring all parameters into their final form, and fail now rather than at the
        first decision.
        """
        if self.model.classes.names != self.utility.classes.names:
            raise InputError(
                f"the model has the classes {listing(self.model.classes.names)}, the"
                f" utility {listing(self.utility.classes.names)}: expected the same, in"
                " the same order"
            )
        # A rule may not fit the utility.
        RULES[choose("rule", self.rule, RULES)](self.utility, None)
        if self.sets is not None:
            self._set("sets", as_sets(self.sets, len(self.utility.classes)))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _drop_sets_of(self, before: "Decider") -> None:
        """Leave out fitted sets where they were fitted to other probabilities."""
        if not isinstance(self.sets, PredictionSets):
            return
        moved = [
            name
            for name in SCALED
            if not np.array_equal(
                getattr(self.model, name), getattr(before.model, name)
            )
        ]
        if moved:
            self._set("sets", None)
            warnings.warn(
                f"{listing(moved)} changed: the sets were fitted to other probabilities"
                " and are left out: fit them again (Decider.fit_sets, --sets with"
                " --calibrate FILE)",
                stacklevel=3,
            )

    def _check_prices_of(self, before: "Decider") -> None:
        """Raise where the prices of a budget were found for other decisions; the order
        of classes may differ.
        """
        same = all(
            np.array_equal(getattr(self.model, name), getattr(before.model, name))
            for name in PRICED
        )
        same = same and self.model.calibrator is before.model.calibrator
        same = same and self.rule == before.rule
        now = self.utility.with_classes(before.utility.classes)
        same = same and now.actions == before.utility.actions
        if not same or not np.array_equal(now.matrix, before.utility.matrix):
            raise InputError(
                "the budget of this decider was fitted with another utility, prior or"
                " calibration: fit it again on held-out data (fit_budget, --budget with"
                " --calibrate), or leave it out (budget=None)"
            )

    def _deferred(
        self, probabilities: Probabilities, batch: bool | PerDay
    ) -> tuple[Indices, NDArray[np.bool_]]:
        if isinstance(batch, PerDay):
            check_budget_rule(self.rule)
        return self.deferral.decide(
            self.utility, probabilities, self._charged_gains, batch
        )

    def _charged_gains(self, probabilities: Floats) -> Floats:
        """What is compared, for each action (n, A), from corrected probabilities
        (n, C): the gains of the rule, minus prices.
        """
        gains = RULES[self.rule](self.utility, None)(probabilities)
        return self.deferral.charged(gains, self.utility)

    def _explanation(
        self,
        chunks: Iterable[tuple[slice, Floats]],
        ratio: Prior | None,
        decided: tuple[Any, ...],
        *,
        daily: bool = False,
    ) -> Explanation:
        """From chunks of calibrated probabilities, the ratio that corrects them, and
        what is `decided` already, if anything: actions (N,), and which samples are
        unfamiliar (N,).
        """
        has_budget = self.deferral.budget is not None
        rng = np.random.default_rng(0)
        gain = RULES[self.rule](self.utility, ratio)
        value = value_of(self.utility, ratio) if self.gains_tell else None
        columns = []
        for rows, calibrated in chunks:
            p = corrected(calibrated, ratio)
            if decided or has_budget:
                gains = self._charged_gains(p)
            else:
                gains = gain(calibrated)
            worth = None if value is None else partial(value, calibrated, gains)
            column = explained(
                self.utility,
                gains,
                p,
                *(values[rows] for values in decided),
                limited=daily or has_budget,
                value=worth,
            )
            if self.sets is not None:
                column = (*column, self.sets.members(p, self.utility, rng))
            columns.append(column)
        joined = map(np.concatenate, zip(*columns, strict=True))
        return Explanation(self.utility.actions, *joined)


def check_utility(utility: Any) -> None:
    """Raise unless this is a Utility."""
    if not isinstance(utility, Utility):
        raise InputError(
            f"utility is a {type(utility).__name__}: expected a Utility, such as"
            " Utility(matrix, names), Utility.read_csv(file) or Utility(frame)"
        )


def warn_of_utility(utility: Utility) -> None:
    """Warn of costs that were given as a utility."""
    if utility.upside_down:
        warnings.warn(UPSIDE_DOWN, stacklevel=4)


def chosen_decider(
    own: Decider, utility: Utility | None, prior: Any, decider: Decider | None = None
) -> Decider:
    """How a model is to decide: by another `decider`, or by its `own` for a utility and
    a class prior, where given.
    """
    if decider is None:
        changes = {} if prior is None else {"target_prior": prior}
        return own.replace(utility=utility, **changes)
    if utility is not None or prior is not None:
        raise InputError(
            "decider has a utility and a target prior of its own: give"
            " decider.replace(utility=...) alone"
        )
    if decider.model.source or decider.model.calibrator is not None:
        check_same_model(
            "the decider that was given",
            decider.model.source,
            "the model",
            own.model.source,
            "give the decider of this model, or one that was fitted to it",
        )
    return decider


def utility_interval(
    decider: Decider, scores: Any, *, logits: bool = False
) -> tuple[float, float] | None:
    """The 95% interval of the mean expected utility that the uncertainty of an
    estimated class prior leaves; None where it was not estimated.
    """
    estimate = decider.model.estimate
    if estimate is None:
        return None
    actions = decider.replace(budget=None, sets=None).decide(scores, logits=logits)
    values = decider.utility.matrix[:, actions].T  # (N, C)
    model = decider.model.replace(target_prior=None)
    p = np.asarray(model(scores, logits=logits).array(), dtype=np.float64)
    carried = model.effective_prior
    assert carried is not None  # an estimate has a prior to start from
    return estimate.mean_interval(p, values, carried)


def left_open(decider: Decider, scores: Any) -> str:
    """Words that follow `decided_for`: the prior of corrected scores, or what an
    estimated one leaves open.
    """
    if isinstance(scores, Predictions):
        corrected_for = str(scores.scores.corrected)
        if corrected_for.startswith(CORRECTED):
            return f": {corrected_for}"
    ends = utility_interval(decider, scores)
    if ends is None:
        return ""
    what, (low, high) = "utility", ends
    if decider.utility.has_costs:
        what, (low, high) = "cost", (0.0 - high, 0.0 - low)
    return f": a mean expected {what} from {low:.3g} to {high:.3g} (95% interval)"
