"""Decider: the one way from scores to actions.

combine particles -> calibrate -> correct the prior -> expected utility -> action
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decisions import budgets, saving, wording
from rfdlc.decisions.explaining import decided_values, explanation, gains_tell
from rfdlc.decisions.rules import RULES, Explanation, corrected, largest
from rfdlc.decisions.sets import PredictionSets, as_sets, check_coverage
from rfdlc.decisions.unfamiliar import (
    Unfamiliar,
    fitted_unfamiliar,
    flags,
    handed_over,
    is_limited,
    unfamiliar_action,
)
from rfdlc.decisions.utility import Utility
from rfdlc.errors import BrokenRows, InputError, choose, expect, listing
from rfdlc.imports import choose_registered, with_imports
from rfdlc.probabilities import priors
from rfdlc.probabilities.calibrators import (
    CALIBRATORS,
    WITHOUT_PRIOR,
    Calibrator,
    NoCalibration,
    check_affine,
)
from rfdlc.probabilities.choosing import distinct
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.folds import out_of_fold
from rfdlc.probabilities.predictions import Predictions, targets_of
from rfdlc.probabilities.priors import (
    Prior,
    PriorEstimate,
    as_groups,
    as_prior,
    as_weights,
)
from rfdlc.probabilities.scores import (
    CorrectedProbabilities,
    Floats,
    Scores,
    as_scores,
    log_softmax,
    safe_log,
    softmax,
)

COMBINATIONS = ("mean-probabilities", "mean-logits")
CHECKED_CLASSES = 1000  # with more classes the BBSE check costs more than it tells
SCALED = (
    "combine",
    "weights",
    "fitted",
    "train_prior",
    "target_prior",
)  # probabilities depend on these
REMEMBERED = 512  # hashes of the samples that calibrated


@dataclass(frozen=True, eq=False, repr=False)
class Decider:
    """Turn the scores of any model into the actions with the highest expected utility.

    A decider is immutable: `fit` and `replace` return new ones.

    Parameters
    ----------
    utility : Utility
        What each action is worth for each true class.
    combine : {"mean-probabilities", "mean-logits"}
        How particles become one prediction; mean probabilities are better calibrated.
    weights : array-like of shape (n_particles,), optional
        Weights of the particles.
    calibration : str or None
        The calibrator that `fit` fits, of
        `rfdlc.probabilities.calibrators.CALIBRATORS`; "auto" is a weighted mean.
    train_prior : {"train", "uniform"}, array-like or mapping, optional
        The class prior that the scores carry: "train" (the training frequencies) for a
        plainly trained model, "uniform" after reweighting, balanced sampling or logit
        adjustment, or numbers.
    target_prior : {"train", "uniform"}, array-like, mapping, PriorEstimate or None
        The class prior to decide for; needs `train_prior`. By default that of the
        training data, if their counts and `train_prior` are known; None decides for the
        prior that the scores carry.
    rule : {"expected-utility", "argmax"}
        The decision rule; the second, of the most probable class, is for comparison.
    sets : {"u65", "u80"}, SetUtility or None
        How `decide_sets` answers with several classes; `fit_sets` gives sets with a
        promised coverage.
    budget : Budget, optional
        What `fit_budget` found: shares of samples that may be handed over, and the
        prices that keep to them.
    unfamiliar : Unfamiliar, optional
        What `fit_unfamiliar` found: thresholds above which samples are handed over
        because they are unlike all others.
    fitted, joint, calibrated_on : optional
        What `fit` found: the calibrator, the table (n_classes, n_classes) that checks
        estimated priors, sample hashes.
    model : str, optional
        The name of the model that it was fitted to, where its predictions say so;
        those of another model are refused.

    Examples
    --------
    >>> utility = Utility([[1, 0], [-5, 1]], ["healthy", "ill"])
    >>> decider = Decider(utility)
    >>> [utility.actions[a] for a in decider.decide([[0.9, 0.1], [0.7, 0.3]])]
    ['healthy', 'ill']
    """

    utility: Utility
    _: KW_ONLY
    combine: str = "mean-probabilities"
    weights: Any = None
    calibration: str | None = "auto"
    train_prior: Any = None
    target_prior: Any = "natural"
    rule: str = "expected-utility"
    sets: Any = None
    budget: budgets.Budget | None = None
    unfamiliar: Unfamiliar | None = None
    fitted: Calibrator | None = None
    joint: Any = None
    calibrated_on: Any = None
    model: str = ""
    estimate: ClassVar[PriorEstimate | None] = None  # of the target prior

    def __post_init__(self) -> None:
        self._check()

    def replace(self, *, classes: Classes | None = None, **changes: Any) -> "Decider":
        """Return a copy with other parameters; nothing is fitted again, and another
        calibration is not fitted yet.

        A new utility is matched by class name, and so are new `classes` (training
        counts and groups).
        """
        if changes.get("calibration", self.calibration) != self.calibration:
            changes = {"fitted": None, "joint": None, "calibrated_on": None, **changes}
        new, old, given = (
            copy.copy(self),
            self.utility.classes,
            changes.pop("utility", None),
        )
        utility = self.utility if given is None else given
        expect(
            isinstance(utility, Utility),
            wording.NOT_A_UTILITY.format(type(utility).__name__),
        )
        if classes is not None or utility is not self.utility:
            changes["utility"] = utility.with_classes(
                (classes or old).in_order(old.names), same_actions=True
            )
        for name, value in changes.items():
            object.__setattr__(
                new, choose("parameter", name, self.__dataclass_fields__), value
            )
        new._check(warn=utility is not self.utility)
        moved = [
            name
            for name in SCALED
            if not np.array_equal(getattr(self, name), getattr(new, name))
        ]
        if moved and "sets" not in changes and isinstance(new.sets, PredictionSets):
            object.__setattr__(new, "sets", None)
            warnings.warn(wording.SETS_DROPPED.format(listing(moved)), stacklevel=2)
        given = self.budget is None or "budget" in changes
        expect(given or budgets.priced_alike(self, new), budgets.OTHER_PRICES)
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

        `balanced` gives every class the same total weight; a sample with
        `sample_weight` 2 counts as two, and one with 0 is left out. "auto" is chosen on
        `groups` (N,), such as patients, that calibrators were not fitted to. Samples
        with equal scores and class are copies of one, unless samples of several classes
        have equal scores. Nothing is calibrated twice.
        """
        checked, y = self.read_labelled(scores, targets, logits, any_model=True)
        expect(not checked.corrected, wording.CORRECTED_TWICE)
        if groups is not None:
            checked = replace(checked, groups=as_groups(groups, len(y)))
        repeats = np.ones(len(y))
        if sample_weight is not None:
            repeats = as_weights(sample_weight, "sample_weight", len(y))
            counted = repeats > 0
            checked = checked.checked().only(counted)
            y = y[counted]
            repeats = repeats[counted]
        calibrated_on = checked.fingerprints(y, REMEMBERED)
        # Copies of a sample are one, so weights and repetitions give the same.
        first, copy_of = distinct(checked.values, y, checked.groups)
        checked = checked.only(first)
        y = y[first]
        weights = np.bincount(copy_of, repeats).astype(np.float64)
        counts = self.utility.classes.counts
        context = {
            "sample_weight": weights,
            "balanced": balanced,
            "groups": checked.groups,
            "train_prior": self.train_prior,
            "target_prior": self.target_prior,
            "training_counts": None if counts is None else np.array(counts),
        }
        log_p = np.concatenate(
            [self._log_combined(piece, checked.logits) for _, piece in checked.chunks()]
        )
        wording.warn_of_absent(self, log_p, y, weights)
        fitted = (
            CALIBRATORS[self.calibration].fit(log_softmax(log_p), y, **context)
            if self.calibration
            else None
        )
        drawn = fitted.draws() if fitted else [NoCalibration()]
        middle, small = (
            drawn[len(drawn) // 2],
            len(self.utility.classes) <= CHECKED_CLASSES,
        )
        joint = priors.joint_table(middle.apply(log_p), y, weights) if small else None
        kept = {
            "budget": None,
            "sets": None if isinstance(self.sets, PredictionSets) else self.sets,
        }
        return self.replace(
            **kept,
            fitted=fitted,
            joint=joint,
            calibrated_on=calibrated_on,
            model=checked.model,
        )

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
        checked, y = self.read_labelled(scores, targets, logits)
        p = out_of_fold(self, checked, y, folds=5 if self.overlap(checked, y) else 0)
        shifted = self.prior_warning(y, rare=False) or priors.unlikely(
            y, self.decided_prior, (1 - coverage) / 2
        )
        options = {
            "prior": self.decided_prior,
            "shifted": bool(shifted),
            "kind": kind,
        } | options
        return self.replace(
            sets=PredictionSets.fit(
                p, y, self.utility.classes, coverage=coverage, **options
            ),
            model=self.model or checked.model,
        )

    def decide_sets(
        self, scores: Any, *, logits: bool = False, seed: int = 0
    ) -> NDArray[np.bool_]:
        """Which classes are in the set of each sample (N, C); `seed` is for randomised
        sets.
        """
        expect(self.sets is not None, wording.NEEDS_SETS)
        rng, pieces = (
            np.random.default_rng(seed),
            self.stream(self.read(scores, logits), self.sets.scaled),
        )
        return np.concatenate(
            [self.sets.members(p, self.utility, rng) for _, p in pieces]
        )

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
        checked = self.read(scores, logits)
        y = (
            None
            if checked.corrected
            else self.read_labelled(scores, targets, logits)[1]
        )
        return self.replace(
            budget=budgets.fitted_budget(
                self, checked, y, budget, flags(self, checked)
            ),
            model=self.model or checked.model,
        )

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
        checked, y = self.read_labelled(scores, targets, logits)
        return self.replace(
            unfamiliar=fitted_unfamiliar(self, checked, y, false_alarm, score),
            model=self.model or checked.model,
        )

    @property
    def effective_prior(self) -> Prior | None:
        """The class prior that calibrated probabilities carry: biases move it to that
        of the held-out data.
        """
        moved = None if self.fitted is None else self.fitted.prior
        return self.train_prior if moved is None else np.array(moved)

    @property
    def decided_prior(self) -> Prior | None:
        """The class prior of corrected probabilities: the target prior, or else the one
        that the scores carry.
        """
        return (
            self.effective_prior
            if self.target_prior is None
            else np.asarray(self.target_prior)
        )

    def estimate_prior(self, scores: Any, *, logits: bool = False) -> PriorEstimate:
        """The class prior of unlabelled data with its uncertainty; after `fit`, the
        BBSE estimate is a check.
        """
        checked, draws = (
            self.read(scores, logits),
            self.fitted.draws() if self.fitted else [None],
        )
        each = [
            self.replace(fitted=calibrator, budget=None, sets=None)
            for calibrator in draws
        ]
        middle = each[len(each) // 2]
        wording.warn_of_few(self)
        calibrated = np.concatenate([p for _, p in middle.calibrated(checked)])
        some = self.read(
            checked.values[:, priors.gibbs_rows(calibrated.shape)], checked.logits
        )
        drawn = [
            np.concatenate([p for _, p in decider.calibrated(some)])
            for decider in each
            if len(each) > 1
        ]
        return priors.estimate_prior(
            calibrated, middle._known_prior(), self.joint, drawn
        )

    def overlap(self, scores: Scores, targets: Indices) -> float:
        """The share of the samples that calibrated this decider that are among these,
        by content or by id.
        """
        return scores.share_of(self.calibrated_on, targets)

    def decide(
        self, scores: Any, *, logits: bool = False, batch: bool | budgets.PerDay = False
    ) -> Indices:
        """The chosen action of each sample (N,), an index into `utility.actions`;
        `batch` keeps to budgets exactly.
        """
        checked, ratio = self.read(scores, logits), self.ratio()
        if is_limited(self, batch):
            return handed_over(self, checked, batch)[0]
        gain = RULES[self.rule](
            self.utility, ratio
        )  # linear rules take the correction into their matrix
        return np.concatenate(
            [largest(gain(p)) for _, p in self.calibrated(checked, ratio)]
        )

    def decide_values(
        self, scores: Any, *, logits: bool = False
    ) -> tuple[Indices, Floats]:
        """The actions of `decide` and their expected utilities, (N,) each: two columns
        of `explain`, at less cost.
        """
        found = None if gains_tell(self) else self.explain(scores, logits=logits)
        return (
            decided_values(self, self.read(scores, logits))
            if found is None
            else (found.action, found.value)
        )

    def decide_probabilities(self, probabilities: Floats) -> Indices:
        """Like `decide`, from probabilities (N, C) that are calibrated and corrected
        already.
        """
        return largest(self.gains(probabilities))

    def gains(self, probabilities: Floats) -> Floats:
        """What the rule compares, for each action (n, A), from corrected probabilities
        (n, C).
        """
        gains = RULES[self.rule](self.utility, None)(probabilities)
        return (
            gains
            if self.budget is None
            else gains - self.budget.columns(self.utility).astype(gains.dtype)
        )

    def expected_utility(self, scores: Any, *, logits: bool = False) -> Floats:
        """The expected utility of every action (N, A)."""
        # In 64 bits: where all values are large, 32 would not tell one action from
        # another.
        return np.concatenate(
            [p @ self.utility.matrix for _, p in self.stream(self.read(scores, logits))]
        )

    def probabilities(self, scores: Any, *, logits: bool = False) -> Floats:
        """Combined, calibrated, prior-corrected probabilities (N, C), marked so that no
        Decider takes them again.
        """
        return np.concatenate(
            [p for _, p in self.stream(self.read(scores, logits))]
        ).view(CorrectedProbabilities)

    def explain(
        self, scores: Any, *, logits: bool = False, batch: bool | budgets.PerDay = False
    ) -> Explanation:
        """For each sample the chosen action (as `decide`), its value, the runner-up,
        and what arg max would do.
        """
        checked, ratio, daily = (
            self.read(scores, logits),
            self.ratio(),
            isinstance(batch, budgets.PerDay),
        )
        given = handed_over(self, checked, batch) if is_limited(self, batch) else ()
        return explanation(
            self, self.calibrated(checked, ratio), ratio, *given, daily=daily
        )

    def explain_probabilities(
        self, probabilities: Floats, unfamiliar: Any = None
    ) -> Explanation:
        """Like `explain`, from corrected probabilities (N, C), and which samples are
        unfamiliar (N,), if known.
        """
        p = np.asarray(probabilities)
        if unfamiliar is None:
            return explanation(self, [(slice(None), p)], None)
        chosen = np.where(
            unfamiliar, unfamiliar_action(self.utility, p), largest(self.gains(p))
        )
        return explanation(self, [(slice(None), p)], None, chosen, unfamiliar)

    def stream(
        self, scores: Scores, scaled: bool = True
    ) -> Iterator[tuple[slice, Floats]]:
        """Chunks of corrected probabilities (n, C), each row summing to one if
        `scaled`; constant memory.
        """
        ratio = self.ratio()
        return (
            (rows, corrected(p, ratio, scaled))
            for rows, p in self.calibrated(scores, ratio)
        )

    def ratio(self) -> Prior | None:
        """The factor (C,) that corrects calibrated probabilities for the target prior;
        None for no correction.
        """
        if self.target_prior is None:
            return None
        target, carried = self.target_prior, self._known_prior()
        impossible = self.utility.classes.select(
            np.flatnonzero((carried == 0) & (target > 0))
        )
        expect(not impossible, wording.IMPOSSIBLE.format(listing(impossible)))
        return np.divide(target, carried, out=np.zeros_like(target), where=carried > 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        return saving.as_table(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> "Decider":
        """The inverse of `to_dict`."""
        return cls(**saving.parameters_of(table))

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads."""
        Path(path).write_text(
            json.dumps(self.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8"
        )

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
            why = f"cannot be read as a decider ({with_imports(error, file.parent)})"
            raise InputError(
                f"{path}:"
                f" {why if file.exists() else 'no such file'}{wording.DECIDER_FILE}"
            ) from None

    def __repr__(self) -> str:
        state, actions = self.fitted or "not calibrated", len(self.utility.actions)
        return (
            f"Decider({self.rule}, {self.combine}, {state}, {self.decided_for};"
            f" {actions} actions)"
        )

    @property
    def decided_for(self) -> str:
        """The prior that is decided for, in words."""
        return wording.decided_for(self)

    def prior_warning(self, targets: Indices, *, rare: bool = True) -> str | None:
        """What to say if frequencies of labelled samples, or of a `rare` class, are far
        from those decided for.
        """
        return wording.prior_warning(self, targets, rare)

    def utility_interval(
        self, scores: Any, estimate: PriorEstimate, *, logits: bool = False
    ) -> tuple[float, float]:
        """The 95% interval of the mean expected utility that the uncertainty of an
        estimated class prior leaves.
        """
        plain = self.replace(budget=None, sets=None)
        values = self.utility.matrix[
            :, plain.replace(target_prior=estimate).decide(scores, logits=logits)
        ].T  # (N, C)
        p = plain.replace(target_prior=None).probabilities(scores, logits=logits)
        return estimate.mean_interval(
            np.asarray(p, dtype=np.float64), values, self._known_prior()
        )

    def left_open(self, scores: Any) -> str:
        """Words that follow `decided_for`: the prior of corrected scores, or what an
        estimated one leaves open.
        """
        return wording.left_open(self, scores)

    def read(
        self, scores: Any, logits: bool = False, *, any_model: bool = False
    ) -> Scores:
        """Checked scores of any source, with one column per class in the order of the
        utility; those of another model raise, unless they may be of `any_model`.
        """
        known, own = self.utility.classes, isinstance(scores, Predictions)
        checked = (
            scores.scores_for(known) if own else as_scores(scores, known, logits=logits)
        )
        changes = any(
            value is not None
            for value in (self.fitted, self.train_prior, self.target_prior)
        )
        expect(not (checked.corrected and changes), wording.CORRECTED_TWICE)
        file = scores.file if isinstance(scores, Predictions) else ""
        if not any_model:
            wording.check_model(self, checked, file)
        given, particles = (
            0 if self.weights is None else len(self.weights),
            len(checked.values),
        )
        expect(
            given in (0, particles) or particles == 1,
            wording.WEIGHTS.format(given, particles),
        )
        return checked

    def read_labelled(
        self,
        scores: Any,
        targets: ArrayLike | None,
        logits: bool = False,
        *,
        any_model: bool = False,
    ) -> tuple[Scores, Indices]:
        """Scores and labels in the class order of the utility."""
        checked, y = (
            self.read(scores, logits, any_model=any_model),
            targets_of(scores, targets, self.utility.classes),
        )
        expect(
            y.shape == (len(checked),),
            f"{y.size} targets for {len(checked)} samples: expected one per sample",
        )
        wording.warn_of_order(scores, checked, y, self.utility.classes)
        return checked, y

    def _check(self, warn: bool = True) -> None:
        """Bring all parameters into their final form, and fail now rather than at the
        first decision.
        """
        utility, kind = self.utility, type(self.utility).__name__
        expect(
            isinstance(utility, Utility),
            f"utility is a {kind}: expected a Utility, such as Utility(matrix, names)",
        )
        choose("combine", self.combine, COMBINATIONS)
        choose_registered("calibration", self.calibration or "none", CALIBRATORS)
        RULES[choose("rule", self.rule, RULES)](utility, None)
        if warn and utility.upside_down:
            warnings.warn(wording.UPSIDE_DOWN, stacklevel=4)
        if self.fitted is not None:
            check_affine(self.fitted, len(utility.classes))
        forms: dict[str, Callable[[Any], Any]] = {
            "weights": lambda given: as_weights(given, "weights"),
            "train_prior": lambda given: as_prior(
                given, utility.classes, "train_prior"
            ),
            "target_prior": self._as_target,
            "joint": lambda given: np.asarray(given, dtype=np.float32),
            "sets": lambda given: as_sets(given, len(utility.classes)),
        }
        given = {name: getattr(self, name) for name in forms}
        for name, value in given.items():
            object.__setattr__(
                self, name, None if value is None else forms[name](value)
            )
        object.__setattr__(self, "calibrated_on", self.calibrated_on or {})
        estimate = (
            given["target_prior"]
            if isinstance(given["target_prior"], PriorEstimate)
            else self.estimate
        )
        behind = estimate is not None and np.array_equal(
            estimate.prior, self.target_prior
        )  # for its intervals
        object.__setattr__(self, "estimate", estimate if behind else None)
        if self.target_prior is not None and (
            self.fitted or self.calibration in WITHOUT_PRIOR
        ):
            self._known_prior()

    def _as_target(self, given: Any) -> Prior | None:
        classes = self.utility.classes
        if isinstance(given, str) and given == "natural":
            return (
                None
                if classes.counts is None or self.effective_prior is None
                else classes.prior
            )
        return as_prior(
            given.prior if isinstance(given, PriorEstimate) else given,
            classes,
            "target_prior",
        )

    def _known_prior(self) -> Prior:
        if self.effective_prior is None:
            raise InputError(wording.NEEDS_TRAIN_PRIOR)
        return self.effective_prior

    def calibrated(
        self, scores: Scores, ratio: Prior | None = None
    ) -> Iterator[tuple[slice, Floats]]:
        """Chunks of calibrated probabilities (n, C); of each sample something must be
        left where `ratio` is 0.
        """
        for rows, piece in scores.chunks():
            if self.fitted is not None:
                p = self.fitted.apply(self._log_combined(piece, scores.logits))
            elif self.combine == "mean-logits" and len(piece) > 1:
                p = softmax(self._log_combined(piece, scores.logits))
            else:
                p = self._mean(softmax(piece) if scores.logits else piece)
            if (
                ratio is not None
                and not ratio.all()
                and (lost := (p[:, ratio > 0] == 0).all(axis=1)).any()
            ):
                raise BrokenRows(
                    "",
                    (rows.start + np.flatnonzero(lost)).tolist(),
                    wording.NOTHING_LEFT,
                )
            yield rows, p

    def _log_combined(self, piece: Floats, logits: bool) -> Floats:
        """Logits of the combined prediction, (M, n, C) -> (n, C), up to a constant per
        row.
        """
        if self.combine == "mean-logits" or len(piece) == 1:
            return (
                safe_log(self._mean(piece), logits=True)
                if logits
                else self._mean(safe_log(piece))
            )
        return safe_log(self._mean(softmax(piece) if logits else piece))

    def _mean(self, values: Floats) -> Floats:
        if len(values) == 1 or self.weights is None:
            return values[0] if len(values) == 1 else values.mean(0)
        return np.tensordot(self.weights.astype(values.dtype), values, axes=1)


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
    if decider.model or decider.fitted is not None:
        check_same_model(
            "the decider that was given",
            decider.model,
            "the model",
            own.model,
            "give the decider of this model, or one that was fitted to it",
        )
    return decider
