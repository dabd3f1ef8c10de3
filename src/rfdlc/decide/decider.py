"""Decider: the one way from scores to actions.

combine particles -> calibrate -> correct the prior -> expected utility -> action
"""

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rfdlc.decide.calibration import KINDS, Calibration, fit_calibration
from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.predictions import Predictions, encode_targets
from rfdlc.decide.priors import Prior, PriorEstimate, PriorLike, as_prior, estimate_prior, joint_table, prior_ratio
from rfdlc.decide.rules import RULES
from rfdlc.decide.scores import CorrectedProbabilities, Floats, Scores, as_scores, safe_log, softmax
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose

COMBINATIONS = ("mean-probabilities", "mean-logits")
CHECKED_CLASSES = 1000  # with more classes the BBSE check costs more than it tells
FORMAT, VERSION = "rfdlc-decider", 1
NEEDS_TRAIN_PRIOR = (
    "a target prior needs the training prior (train_prior, --train-prior) that the scores carry: 'train' for a plainly "
    "trained model, 'uniform' after reweighting or logit adjustment, or numbers; or a calibration with biases, fitted"
)


@dataclass(frozen=True)
class Explanation:
    """Why each sample was decided as it was; one entry a sample, actions as indices into `actions`."""

    actions: tuple[str, ...]
    action: Indices
    value: Floats  # expected utility of the chosen action
    runner_up: Indices  # the next best by the same rule
    runner_up_value: Floats
    argmax: Indices  # the most probable class, as a class index
    probability: Floats  # of that class

    def __len__(self) -> int:
        return len(self.action)


class Decider:
    """Turns scores of any model into the actions with the highest expected utility.

    - `combine`: how particles become one prediction: "mean-probabilities" (better calibrated) or "mean-logits";
      `weights` (M,) if particles count differently.
    - `calibration`: what `fit` fits on held-out data: "temperature", "bias-corrected-temperature",
      "prior-corrected-temperature" (needs training counts) or None.
    - `train_prior`: the class prior that the scores carry: "train" (the training frequencies) for a plainly trained
      model, "uniform" after reweighting, balanced sampling or logit adjustment, or numbers.
    - `target_prior`: the class prior where decisions are made; needs `train_prior`. None leaves the prior alone.
    - `rule`: "expected-utility", "argmax", or for comparison "cobb" and "paper-eq12".

    >>> utility = Utility([[1, 0], [-5, 1]], ["healthy", "ill"])
    >>> decider = Decider(utility)
    >>> [utility.actions[a] for a in decider.decide([[0.9, 0.1], [0.7, 0.3]])]
    ['healthy', 'ill']
    """

    def __init__(
        self,
        utility: Utility,
        *,
        combine: str = "mean-probabilities",
        weights: ArrayLike | None = None,
        calibration: str | None = "temperature",
        train_prior: PriorLike | None = None,
        target_prior: PriorLike | None = None,
        rule: str = "expected-utility",
    ) -> None:
        if not isinstance(utility, Utility):
            raise InputError(
                f"utility is a {type(utility).__name__}: expected a Utility, such as Utility(matrix, names)"
            )
        self.utility = utility
        self.combine = choose("combine", combine, COMBINATIONS)
        self.weights = None if weights is None else _as_weights(weights)
        self.calibration = None if calibration is None else choose("calibration", calibration, KINDS)
        self.rule = choose("rule", rule, RULES)
        self.fitted: Calibration | None = None
        self._joint: NDArray[np.float64] | None = None
        self.train_prior = None if train_prior is None else as_prior(train_prior, utility.classes, "train_prior")
        self.target_prior = None if target_prior is None else as_prior(target_prior, utility.classes, "target_prior")
        if self.target_prior is not None and self.train_prior is None and calibration in (None, KINDS[0]):
            raise InputError(NEEDS_TRAIN_PRIOR)
        self._check_rule()

    # -- fitting ----------------------------------------------------------------------------------------------

    def fit(
        self,
        scores: Any,
        targets: ArrayLike | None = None,
        *,
        logits: bool = False,
        balanced: bool = False,
        sample_weight: ArrayLike | None = None,
    ) -> "Decider":
        """Calibrate on held-out scores and labels; `balanced` gives every class the same total weight.

        A sample with weight 2 counts as two. Fitting again starts anew: nothing is ever calibrated or corrected twice.
        """
        checked, y = self.read_labelled(scores, targets, logits)
        multiplicity = None if sample_weight is None else _as_multiplicity(sample_weight, len(y))
        log_p = np.concatenate([self._log_combined(piece, checked.logits) for _, piece in checked.chunks()])
        counts = None if self.utility.classes.counts is None else self.utility.classes.count_array
        self.fitted = (
            fit_calibration(
                self.calibration, log_p, y, training_counts=counts, balanced=balanced, sample_weight=multiplicity
            )
            if self.calibration
            else None
        )
        if len(self.utility.classes) <= CHECKED_CLASSES:
            calibrated = self.fitted.apply(log_p) if self.fitted else softmax(log_p)
            self._joint = joint_table(calibrated, y, multiplicity)
        return self

    @property
    def effective_prior(self) -> Prior | None:
        """The class prior that calibrated probabilities carry: biases move it to that of the held-out data."""
        if self.fitted is not None and self.fitted.prior is not None:
            return np.array(self.fitted.prior)
        return self.train_prior

    def estimate_prior(self, scores: Any, *, logits: bool = False) -> PriorEstimate:
        """The class prior of unlabelled data, by EM, with the BBSE estimate as a check after `fit`."""
        if self.effective_prior is None:
            raise InputError(NEEDS_TRAIN_PRIOR)
        checked = self.read(scores, logits)
        calibrated = np.concatenate([self._calibrated(piece, checked.logits) for _, piece in checked.chunks()])
        return estimate_prior(calibrated, self.effective_prior, self._joint)

    def with_utility(self, utility: Utility) -> "Decider":
        """The same calibration and priors with another utility: nothing is fitted again."""
        changed = copy.copy(self)
        changed.utility = utility.with_classes(self.utility.classes)
        changed._check_rule(warns=False)
        return changed

    def changed(
        self,
        *,
        utility: Utility | None = None,
        train_prior: PriorLike | None = None,
        combine: str | None = None,
        calibration: str | None = None,
        rule: str | None = None,
    ) -> "Decider":
        """A copy with some things replaced; what was fitted stays, and `calibration` is what `fit` fits next."""
        new = copy.copy(self if utility is None else self.with_utility(utility))
        new.combine = choose("combine", combine, COMBINATIONS) if combine else self.combine
        new.calibration = choose("calibration", calibration, KINDS) if calibration else self.calibration
        if rule:
            new.rule = choose("rule", rule, RULES)
            new._check_rule()
        if train_prior is not None:
            new.train_prior = as_prior(train_prior, self.utility.classes, "train_prior")
        return new

    def with_classes(self, classes: Classes) -> "Decider":
        """The same Decider with the training counts and groups of `classes`, matched by name."""
        changed = copy.copy(self)
        known = classes.in_order(self.utility.classes.names)
        changed.utility = Utility(self.utility.matrix, known, self.utility.actions)
        return changed

    def with_target_prior(self, prior: PriorLike | PriorEstimate) -> "Decider":
        """The same Decider for data with another class prior, which replaces the one it had."""
        if self.effective_prior is None:
            raise InputError(NEEDS_TRAIN_PRIOR)
        changed = copy.copy(self)
        wanted = prior.prior if isinstance(prior, PriorEstimate) else prior
        changed.target_prior = as_prior(wanted, self.utility.classes, "target_prior")
        return changed

    # -- deciding ---------------------------------------------------------------------------------------------

    def decide(self, scores: Any, *, logits: bool = False) -> Indices:
        """The chosen action of each sample (N,), an index into `utility.actions`."""
        checked = self.read(scores, logits)
        actions = np.empty(len(checked), dtype=np.int64)
        for rows, gains in self._stream_gains(checked):
            np.argmax(gains, axis=1, out=actions[rows])
        return actions

    def expected_utility(self, scores: Any, *, logits: bool = False) -> Floats:
        """The expected utility of every action (N, A)."""
        checked = self.read(scores, logits)
        # In 64 bits: where all values are large, 32 would not tell one action from another.
        return np.concatenate([p @ self.utility.matrix for _, p in self.stream(checked)])

    def probabilities(self, scores: Any, *, logits: bool = False) -> Floats:
        """Combined, calibrated, prior-corrected probabilities (N, C), marked so that no Decider takes them again."""
        checked = self.read(scores, logits)
        return np.concatenate([p for _, p in self.stream(checked)]).view(CorrectedProbabilities)

    def explain(self, scores: Any, *, logits: bool = False) -> Explanation:
        """For each sample the chosen action and its value, the runner-up, and what arg max would have done."""
        checked = self.read(scores, logits)
        parts: list[tuple[NDArray[Any], ...]] = []
        for _, p in self.stream(checked):
            gains, values, rows = self.gains(p), p @ self.utility.matrix, np.arange(len(p))
            first = gains.argmax(axis=1)
            gains[rows, first] = -np.inf
            second = gains.argmax(axis=1)
            top = p.argmax(axis=1)
            parts.append((first, values[rows, first], second, values[rows, second], top, p[rows, top]))
        return Explanation(self.utility.actions, *(np.concatenate(column) for column in zip(*parts, strict=True)))

    def gains(self, probabilities: Floats) -> Floats:
        """What the rule compares, for each action (n, A), from corrected probabilities (n, C)."""
        return RULES[self.rule].gains(self.utility, probabilities)

    def stream(self, scores: Scores) -> Iterator[tuple[slice, Floats]]:
        """Pieces of corrected probabilities (n, C), each row summing to one; constant memory."""
        ratio = self._ratio()
        for rows, piece in scores.chunks():
            p = self._calibrated(piece, scores.logits)
            if ratio is not None:
                _check_possible(p, ratio, rows.start)
                p = p * ratio.astype(p.dtype)
            yield rows, p / p.sum(axis=1, keepdims=True)

    # -- files ------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "utility": self.utility.to_dict(),
            "combine": self.combine,
            "weights": _listed(self.weights),
            "calibration": self.calibration,
            "fitted": self.fitted.to_dict() if self.fitted else None,
            "train_prior": _listed(self.train_prior),
            "target_prior": _listed(self.target_prior),
            "rule": self.rule,
        }

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> "Decider":
        """The inverse of `to_dict`."""
        if table.get("format") != FORMAT or table.get("version") != VERSION:
            raise InputError(
                f"not a decider of this version: format {table.get('format')!r}, version {table.get('version')!r}; "
                f"expected {FORMAT!r}, {VERSION}"
            )
        names = ("combine", "weights", "calibration", "train_prior", "target_prior", "rule")
        decider = cls(Utility.from_dict(table["utility"]), **{name: table[name] for name in names})
        classes = len(decider.utility.classes)
        decider.fitted = Calibration.from_dict(table["fitted"], classes) if table["fitted"] else None
        return decider

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Decider":
        """Read a file that `save` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: cannot be read as a decider ({error})") from None

    def __repr__(self) -> str:
        state = f"temperature {self.fitted.temperature:.3g}" if self.fitted else "not calibrated"
        corrected = "prior left alone" if self.target_prior is None else "prior corrected"
        return f"Decider({self.rule}, {self.combine}, {state}, {corrected}; {len(self.utility.actions)} actions)"

    # -- the door ---------------------------------------------------------------------------------------------

    def read(self, scores: Any, logits: bool = False) -> Scores:
        """Anybody's scores, checked, with one column a class in the order of the utility."""
        if isinstance(scores, Predictions):
            checked = scores.with_classes(self.utility.classes).scores
        else:
            checked = as_scores(scores, self.utility.classes, logits=logits)
        if self.weights is not None and len(self.weights) != len(checked.values):
            raise InputError(
                f"{len(self.weights)} weights for {len(checked.values)} particles: expected one a particle"
            )
        return checked

    def read_labelled(self, scores: Any, targets: ArrayLike | None, logits: bool = False) -> tuple[Scores, Indices]:
        """Scores and labels in the class order of the utility."""
        if targets is None and isinstance(scores, Predictions):
            targets = scores.with_classes(self.utility.classes).targets
        elif hasattr(scores, "columns"):
            targets = scores["target"] if targets is None and "target" in scores.columns else targets
            if np.asarray(targets).dtype.kind in "iu":
                targets = np.asarray(targets).astype(str)  # as in a file: names, where classes are called by numbers
        if targets is None:
            raise InputError("no targets: expected the true class of every sample (in a table, a column 'target')")
        checked, y = self.read(scores, logits), encode_targets(targets, self.utility.classes)
        if y.shape != (len(checked),):
            raise InputError(f"{y.size} targets for {len(checked)} samples: expected one target a sample")
        return checked, y

    # -- inside -----------------------------------------------------------------------------------------------

    def _check_rule(self, *, warns: bool = True) -> None:
        """Fail now rather than at the first decision."""
        rule = RULES[self.rule]
        rule.prepare(self.utility, np.ones(len(self.utility.classes)))
        if rule.warning and warns:
            warnings.warn(rule.warning, stacklevel=3)

    def _ratio(self) -> Prior | None:
        train, target = self.effective_prior, self.target_prior
        if target is None:
            return None
        if train is None:
            raise InputError(NEEDS_TRAIN_PRIOR)
        return prior_ratio(target, train, self.utility.classes)

    def _stream_gains(self, scores: Scores) -> Iterator[tuple[slice, Floats]]:
        """Gains (n, A); a linear rule needs neither corrected nor normalised probabilities, which saves two passes."""
        if not RULES[self.rule].linear:
            yield from ((rows, self.gains(p)) for rows, p in self.stream(scores))
            return
        ratio = self._ratio()
        gain = RULES[self.rule].prepare(self.utility, np.ones(len(self.utility.classes)) if ratio is None else ratio)
        for rows, piece in scores.chunks():
            p = self._calibrated(piece, scores.logits)
            if ratio is not None:
                _check_possible(p, ratio, rows.start)
            yield rows, gain(p)

    def _calibrated(self, piece: Floats, logits: bool) -> Floats:
        """(M, n, C) -> (n, C)."""
        if self.fitted is not None:
            return self.fitted.apply(self._log_combined(piece, logits))
        if self.combine == "mean-logits":
            return softmax(self._log_combined(piece, logits)) if logits or len(piece) > 1 else piece[0]
        return self._mean(softmax(piece) if logits else piece)

    def _log_combined(self, piece: Floats, logits: bool) -> Floats:
        """Logits, up to a constant a row, of the combined prediction (n, C)."""
        if self.combine == "mean-logits" or len(piece) == 1:
            return self._mean(piece if logits else safe_log(piece))
        return safe_log(self._mean(softmax(piece) if logits else piece))

    def _mean(self, values: Floats) -> Floats:
        if len(values) == 1:
            return values[0]
        if self.weights is None:
            mean: Floats = values.mean(axis=0)
            return mean
        return np.tensordot(self.weights.astype(values.dtype), values, axes=1)


def _check_possible(probabilities: Floats, ratio: Prior, start: int) -> None:
    """A target prior of 0 rules classes out; of every sample something must be left."""
    if ratio.all():
        return
    lost = np.flatnonzero(probabilities[:, ratio > 0].max(axis=1, initial=0) == 0)
    if len(lost):
        raise InputError(
            f"row {start + int(lost[0])} (counted from 0) has all its probability on classes whose target prior is 0, "
            "so that nothing is left to decide from: give these classes a small share"
        )


def _as_weights(weights: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise InputError(f"weights {values} are no weights of particles: expected numbers of 0 or more, not all 0")
    return values / values.sum()


def _as_multiplicity(weights: ArrayLike, samples: int) -> NDArray[np.float64]:
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (samples,):
        raise InputError(f"sample_weight has shape {values.shape} for {samples} samples: expected one number a sample")
    if not np.isfinite(values).all() or (values < 0).any() or values.sum() <= 0:
        raise InputError(f"sample_weight holds {values.min()} to {values.max()}: expected 0 or more, not all 0")
    return values


def _listed(values: Sequence[float] | NDArray[Any] | None) -> list[float] | None:
    return None if values is None else [float(value) for value in values]
