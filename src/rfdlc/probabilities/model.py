"""ProbabilityModel: from the scores of any model to probabilities for a class prior.

combine particles -> calibrate -> correct the class prior
"""

import base64
import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rfdlc.errors import BrokenRows, InputError, choose, listing
from rfdlc.formats.identity import check_same_model
from rfdlc.imports import choose_registered
from rfdlc.probabilities import held_out, priors
from rfdlc.probabilities.calibrators import (
    CALIBRATORS,
    WITHOUT_PRIOR,
    Calibrator,
    NoCalibration,
    check_affine,
)
from rfdlc.probabilities.choosing import distinct, grouped_folds, stratified_folds
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.predictions import Predictions, targets_of
from rfdlc.probabilities.priors import (
    Prior,
    PriorEstimate,
    as_groups,
    as_prior,
    as_weights,
    in_words,
    is_uniform,
)
from rfdlc.probabilities.scores import (
    Floats,
    Scores,
    as_scores,
    log_softmax,
    safe_log,
    softmax,
)

COMBINATIONS = ("mean-probabilities", "mean-logits")
MOST_CHECKED = 1000  # classes: with more, the BBSE check costs more than it tells
REMEMBERED = 512  # hashes of the samples that calibrated
SAVED = ("combine", "weights", "calibration", "train_prior", "target_prior")
SETTINGS = (*SAVED, "source", "calibrator", "joint", "calibrated_on")
CORRECTED_TWICE = (
    "these probabilities are calibrated and corrected already (their column"
    " rfdlc_scores says so), and a second time would distort them: decide them without"
    " --decider, --calibrate and priors, or write raw ones (rfdlc predict --raw)"
)


@dataclass(frozen=True, eq=False, repr=False)
class ProbabilityModel:
    """How scores become probabilities: combined, calibrated, corrected for the prior.

    It is immutable: `fit` and `replace` return new ones.

    Parameters
    ----------
    classes : Classes
        Names and, where known, training counts.
    combine : {"mean-probabilities", "mean-logits"}
        How particles become one prediction; mean probabilities are better calibrated.
    weights : array-like of shape (n_particles,), optional
        Weights of the particles.
    calibration : str or None
        The calibrator that `fit` fits, of `CALIBRATORS`; "auto" is a weighted mean.
    train_prior : {"train", "uniform"}, array-like or mapping, optional
        The class prior that the scores carry: "train" (the training frequencies) for a
        plainly trained model, "uniform" after reweighting, balanced sampling or logit
        adjustment, or numbers.
    target_prior : {"train", "uniform"}, array-like, mapping, PriorEstimate or None
        The class prior to decide for; needs `train_prior`. By default that of the
        training data, if their counts and `train_prior` are known; None decides for the
        prior that the scores carry.
    calibrator, joint, calibrated_on : optional
        What `fit` found: the calibrator, the table (n_classes, n_classes) that checks
        estimated priors, and hashes of the samples.
    source : str
        The name of the model that gave the scores it was fitted to, where they say so;
        scores of another model are refused.

    Attributes
    ----------
    estimate : PriorEstimate or None
        Where the target prior was estimated: with its uncertainty.

    Examples
    --------
    >>> model = ProbabilityModel(
    ...     Classes(["healthy", "ill"], [900, 100]), train_prior="train",
    ...     target_prior=[0.5, 0.5],
    ... )
    >>> model([[0.9, 0.1]]).array().tolist()
    [[0.5, 0.5]]
    """

    classes: Classes
    _: KW_ONLY
    combine: str = "mean-probabilities"
    weights: Any = None
    calibration: str | None = "auto"
    train_prior: Any = None
    target_prior: Any = "natural"
    calibrator: Calibrator | None = None
    joint: Any = None
    calibrated_on: Any = None
    source: str = ""
    estimate: PriorEstimate | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._settle()

    def __call__(self, scores: Any, *, logits: bool = False) -> "Probabilities":
        """The probabilities of samples, from scores of any source."""
        return Probabilities(self, self.read(scores, logits))

    def replace(self, **changes: Any) -> "ProbabilityModel":
        """Return a copy with other parameters; another calibration is not fitted."""
        if changes.get("calibration", self.calibration) != self.calibration:
            unfitted = dict.fromkeys(("calibrator", "joint", "calibrated_on"))
            changes = {**unfitted, **changes}
        new = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(
                new, choose("parameter", name, ("classes", *SETTINGS)), value
            )
        new._settle()
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
    ) -> "ProbabilityModel":
        """Return a model that is calibrated on held-out scores and labels.

        Parameters and meaning are those of `Decider.fit`.
        """
        checked, y = self.read_labelled(scores, targets, logits, any_model=True)
        if checked.corrected:
            raise InputError(CORRECTED_TWICE)
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
        counts = self.classes.counts
        pieces = [self._log_combined(p, checked.logits) for _, p in checked.chunks()]
        log_p = np.concatenate(pieces)
        if self.calibration not in (None, "none"):
            held_out.warn_of_absent(
                self.classes, log_p, y, self.train_prior, self.target_prior, weights
            )

        calibrator = None
        if self.calibration:
            calibrator = CALIBRATORS[self.calibration].fit(
                log_softmax(log_p),
                y,
                sample_weight=weights,
                balanced=balanced,
                groups=checked.groups,
                train_prior=self.train_prior,
                target_prior=self.target_prior,
                training_counts=None if counts is None else np.array(counts),
            )

        joint = None
        if len(self.classes) <= MOST_CHECKED:
            drawn = calibrator.draws() if calibrator else [NoCalibration()]
            middle = drawn[len(drawn) // 2]
            joint = priors.joint_table(middle.apply(log_p), y, weights)
        return self.replace(
            calibrator=calibrator,
            joint=joint,
            calibrated_on=calibrated_on,
            source=checked.model,
        )

    def known_as(self, source: str) -> "ProbabilityModel":
        """The same, with the name of the model that gave the scores, where none is
        known yet.
        """
        return self.replace(source=self.source or source)

    @property
    def effective_prior(self) -> Prior | None:
        """The class prior that calibrated probabilities carry: biases move it to that
        of the held-out data.
        """
        moved = None if self.calibrator is None else self.calibrator.prior
        if moved is None:
            return self.train_prior
        return np.array(moved)

    @property
    def decided_prior(self) -> Prior | None:
        """The class prior of corrected probabilities: the target prior, or else the one
        that the scores carry.
        """
        if self.target_prior is None:
            return self.effective_prior
        return np.asarray(self.target_prior)

    @property
    def ratio(self) -> Prior | None:
        """The factor (C,) that corrects calibrated probabilities for the target prior;
        None for no correction.
        """
        if self.target_prior is None:
            return None
        target = self.target_prior
        carried = self._known_prior()
        lost = np.flatnonzero((carried == 0) & (target > 0))
        if len(lost):
            raise InputError(
                f"the training prior of {listing(self.classes.select(lost))} is 0 but"
                " its target prior is not: a class without training samples cannot be"
                " corrected for; give it a positive training prior"
            )
        return np.divide(target, carried, out=np.zeros_like(target), where=carried > 0)

    @property
    def decided_for(self) -> str:
        """The prior that is decided for, in words."""
        target = self.target_prior
        if target is None:
            return "decided for the class prior that the scores carry"
        if self.estimate is not None:
            shares = in_words(self.classes, target, self.estimate.interval())
            limits = "" if self._temperature_alone() else held_out.GIVEN_CALIBRATION
            return f"decided for the estimated class prior {shares}{limits}"
        if is_uniform(target):
            return "decided for a uniform class prior"
        counted = self.classes.counts is not None
        if counted and np.abs(target - self.classes.prior).max() < 1e-9:
            return "decided for the class prior of the training data"
        return f"decided for the class prior {in_words(self.classes, target)}"

    def estimate_prior(self, scores: Any, *, logits: bool = False) -> PriorEstimate:
        """The class prior of unlabelled data with its uncertainty; after `fit`, the
        BBSE estimate is a check.
        """
        checked = self.read(scores, logits)
        calibrators = self.calibrator.draws() if self.calibrator else [None]
        models = [self.replace(calibrator=calibrator) for calibrator in calibrators]
        middle = models[len(models) // 2]
        if self.joint is not None:
            held_out.warn_of_few(self.classes, self.joint)

        calibrated = np.concatenate([p for _, p in middle.calibrated(checked)])
        sampled = priors.gibbs_rows(calibrated.shape)
        some = self.read(checked.values[:, sampled], checked.logits)
        drawn = []
        if len(models) > 1:
            for model in models:
                drawn.append(np.concatenate([p for _, p in model.calibrated(some)]))
        return priors.estimate_prior(
            calibrated, middle._known_prior(), self.joint, drawn
        )

    def out_of_fold(
        self,
        scores: Scores,
        targets: Indices,
        *,
        folds: int = 5,
        balanced: bool = False,
    ) -> Floats:
        """Corrected probabilities (N, C), each row by a calibration that was fitted
        without it, and without its group.
        """
        if self.calibrator is None or not 0 < 2 * folds <= len(targets):
            return Probabilities(self, scores).array()
        fold = _folds(scores, targets, folds)
        probabilities: Floats | None = None
        with warnings.catch_warnings():
            # about few samples: the model itself was fitted to all of them
            warnings.simplefilter("ignore")
            for number in np.unique(fold):
                inside = fold == number
                groups = None if scores.groups is None else scores.groups[~inside]
                model = self.fit(
                    scores.values[:, ~inside],
                    targets[~inside],
                    logits=scores.logits,
                    balanced=balanced,
                    groups=groups,
                )
                # However the model itself was weighted, it decides for one prior.
                decided = self.decided_prior
                if decided is not None and model.effective_prior is not None:
                    model = model.replace(target_prior=decided)
                p = model(scores.values[:, inside], logits=scores.logits).array()
                if probabilities is None:
                    probabilities = np.empty((len(targets), p.shape[1]), p.dtype)
                probabilities[inside] = p
        assert probabilities is not None
        return probabilities

    def held_out_probabilities(self, scores: Scores, targets: Indices) -> Floats:
        """Corrected probabilities (N, C) of held-out samples: out of fold where they
        calibrated this model.
        """
        if self.overlap(scores, targets):
            return self.out_of_fold(scores, targets)
        return Probabilities(self, scores).array()

    def overlap(self, scores: Scores, targets: Indices) -> float:
        """The share of the samples that calibrated this model that are among these, by
        content or by id.
        """
        return scores.share_of(self.calibrated_on, targets)

    def prior_warning(self, targets: Indices, *, rare: bool = True) -> str | None:
        """What to say if frequencies of labelled samples, or of a `rare` class, are far
        from those decided for.
        """
        return held_out.prior_warning(self.classes, targets, self.decided_prior, rare)

    def read(
        self, scores: Any, logits: bool = False, *, any_model: bool = False
    ) -> Scores:
        """Checked scores of any source, with one column per class in the order of
        `classes`; scores that were read stay as they are.

        Those of another model raise, unless they may be of `any_model`.
        """
        if isinstance(scores, Scores):
            checked = scores
        elif isinstance(scores, Predictions):
            checked = scores.scores_for(self.classes)
        else:
            checked = as_scores(scores, self.classes, logits=logits)
        changes = (self.calibrator, self.train_prior, self.target_prior)
        if checked.corrected and any(value is not None for value in changes):
            raise InputError(CORRECTED_TWICE)
        if not any_model:
            file = scores.file if isinstance(scores, Predictions) else ""
            self._check_source(checked, file)
        particles = len(checked.values)
        if self.weights is not None and particles not in (1, len(self.weights)):
            raise InputError(
                f"{len(self.weights)} weights for {particles} particles: expected one"
                " per particle, or one particle that combines them"
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
        """Scores and labels in the class order of the model."""
        checked = self.read(scores, logits, any_model=any_model)
        y = targets_of(scores, targets, self.classes)
        if y.shape != (len(checked),):
            raise InputError(
                f"{y.size} targets for {len(checked)} samples: expected one per sample"
            )
        named = isinstance(scores, Predictions) or hasattr(scores, "columns")
        if not named:
            held_out.warn_of_order(checked, y, self.classes)
        return checked, y

    def calibrated(
        self, scores: Scores, ratio: Prior | None = None
    ) -> Iterator[tuple[slice, Floats]]:
        """Chunks of calibrated probabilities (n, C); of each sample something must be
        left where `ratio` is 0.
        """
        for rows, piece in scores.chunks():
            if self.calibrator is not None:
                p = self.calibrator.apply(self._log_combined(piece, scores.logits))
            elif self.combine == "mean-logits" and len(piece) > 1:
                p = softmax(self._log_combined(piece, scores.logits))
            else:
                p = self._mean(softmax(piece) if scores.logits else piece)
            if ratio is not None and not ratio.all():
                lost = (p[:, ratio > 0] == 0).all(axis=1)
                if lost.any():
                    raise BrokenRows(
                        "",
                        (rows.start + np.flatnonzero(lost)).tolist(),
                        " has all its probability on classes whose target prior is 0,"
                        " so that nothing is left to decide from: give these classes a"
                        " small share",
                    )
            yield rows, p

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and tables, ready for JSON; the classes are not among them."""
        table: dict[str, Any] = {"source": self.source}
        for name in SAVED:
            value = getattr(self, name)
            table[name] = value.tolist() if isinstance(value, np.ndarray) else value
        table["calibrator"] = None
        if self.calibrator is not None:
            named = {"name": self.calibrator.name}
            table["calibrator"] = named | self.calibrator.to_dict()
        table["calibrated_on"] = {
            kind: [f"{value:x}" for value in hashes.tolist()]
            for kind, hashes in self.calibrated_on.items()
        }
        table["joint"] = None
        if self.joint is not None:
            content = self.joint.astype("<f4").tobytes()
            table["joint"] = base64.b64encode(content).decode()
        return table

    @classmethod
    def from_dict(
        cls, table: Mapping[str, Any], classes: Classes
    ) -> "ProbabilityModel":
        """The inverse of `to_dict`."""
        parameters = {name: table[name] for name in ("source", *SAVED)}
        calibrator = table["calibrator"]
        if calibrator is not None:
            name = choose_registered("calibration", calibrator["name"], CALIBRATORS)
            parameters["calibrator"] = CALIBRATORS[name].from_dict(calibrator)
        parameters["calibrated_on"] = {
            kind: np.array([int(value, 16) % 2**64 for value in hashes], np.uint64)
            for kind, hashes in table["calibrated_on"].items()
        }
        if table["joint"] is not None:
            joint = np.frombuffer(base64.b64decode(table["joint"]), "<f4")
            parameters["joint"] = joint.reshape(len(classes), len(classes))
        return cls(classes, **parameters)

    def __repr__(self) -> str:
        state = self.calibrator or "not calibrated"
        return f"ProbabilityModel({self.combine}, {state}, {self.decided_for})"

    def _settle(self) -> None:
        """Bring all parameters into their final form, and fail now rather than at the
        first decision.
        """
        choose("combine", self.combine, COMBINATIONS)
        choose_registered("calibration", self.calibration or "none", CALIBRATORS)
        if self.calibrator is not None:
            check_affine(self.calibrator, len(self.classes))
        if self.weights is not None:
            self._set("weights", as_weights(self.weights, "weights"))
        if self.train_prior is not None:
            carried = as_prior(self.train_prior, self.classes, "train_prior")
            self._set("train_prior", carried)
        if self.joint is not None:
            self._set("joint", np.asarray(self.joint, dtype=np.float32))
        self._set("calibrated_on", self.calibrated_on or {})

        estimate = self.estimate
        if isinstance(self.target_prior, PriorEstimate):
            estimate = self.target_prior
        self._set("target_prior", self._as_target(self.target_prior))
        # An estimate has intervals as long as its prior is decided for.
        if estimate is not None and not np.array_equal(
            estimate.prior, self.target_prior
        ):
            estimate = None
        self._set("estimate", estimate)
        if self.target_prior is not None and (
            self.calibrator or self.calibration in WITHOUT_PRIOR
        ):
            self._known_prior()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _as_target(self, wanted: Any) -> Prior | None:
        if wanted is None:
            return None
        if isinstance(wanted, str) and wanted == "natural":
            if self.classes.counts is None or self.effective_prior is None:
                return None
            return self.classes.prior
        if isinstance(wanted, PriorEstimate):
            wanted = wanted.prior
        return as_prior(wanted, self.classes, "target_prior")

    def _known_prior(self) -> Prior:
        if self.effective_prior is None:
            raise InputError(
                "a target prior needs the training prior (train_prior, --train-prior)"
                " that the scores carry: 'train' for a plainly trained model, 'uniform'"
                " after reweighting or logit adjustment, or numbers; or a calibration"
                " with biases, fitted (--calibrate FILE)"
            )
        return self.effective_prior

    def _check_source(self, scores: Scores, file: str) -> None:
        """Raise for scores of another model than those that this was fitted to; warn
        where scores of a file, or what was fitted for them, do not say of which they
        are.
        """
        if not self.source and self.calibrator is None:
            return
        if file or (self.source and scores.model):
            check_same_model(
                file or "scores",
                scores.model,
                "the decider",
                self.source,
                "decide them by the decider of the model that scored them"
                " (decider.json of its run folder), or fit one to its held-out"
                " predictions (--calibrate FILE; Decider.fit)",
            )

    def _temperature_alone(self) -> bool:
        """Whether intervals of estimates include the error of the calibration: they do
        that of a temperature.
        """
        if self.calibrator is None:
            return True
        weight, bias = self.calibrator.as_affine()
        return np.ndim(weight) == 0 and not np.any(bias) and self.calibrator.power == 1

    def _log_combined(self, piece: Floats, logits: bool) -> Floats:
        """Logits of the combined prediction, (M, n, C) -> (n, C), up to a constant per
        row.
        """
        if self.combine == "mean-logits" or len(piece) == 1:
            if logits:
                return safe_log(self._mean(piece), logits=True)
            return self._mean(safe_log(piece))
        return safe_log(self._mean(softmax(piece) if logits else piece))

    def _mean(self, values: Floats) -> Floats:
        if len(values) == 1:
            return values[0]
        if self.weights is None:
            return values.mean(0)
        return np.tensordot(self.weights.astype(values.dtype), values, axes=1)


@dataclass(frozen=True, eq=False)
class Probabilities:
    """The probabilities of samples for the class prior that is decided for, computed
    chunk by chunk, so that memory stays constant.

    Attributes
    ----------
    model, scores
        What computes them, and from what.
    ratio : ndarray of shape (n_classes,) or None
        Calibrated probabilities times this are proportional to corrected ones. A rule
        that is linear takes it into its matrix, at no cost per sample.
    """

    model: ProbabilityModel
    scores: Scores
    ratio: Prior | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.model.ratio)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def prior(self) -> Prior | None:
        """The class prior that they are for, where it is known."""
        return self.model.decided_prior

    def calibrated(self) -> Iterator[tuple[slice, Floats]]:
        """Chunks of probabilities (n, C) before the class prior is corrected."""
        return self.model.calibrated(self.scores, self.ratio)

    def chunks(self, scaled: bool = True) -> Iterator[tuple[slice, Floats]]:
        """Chunks of corrected probabilities (n, C), each row summing to one if
        `scaled`.
        """
        for rows, p in self.calibrated():
            yield rows, corrected(p, self.ratio, scaled)

    def array(self) -> Floats:
        """All of them (N, C)."""
        return np.concatenate([p for _, p in self.chunks()])


def corrected(p: Floats, ratio: Prior | None, scaled: bool = True) -> Floats:
    """Probabilities (n, C) times the ratio (C,), each row summing to one if
    `scaled`.
    """
    moved = p if ratio is None else p * ratio.astype(p.dtype)
    if not scaled:
        return moved
    return moved / moved.sum(axis=1, keepdims=True)


def _folds(scores: Scores, targets: Indices, folds: int) -> Indices:
    """The fold of each sample (N,): by whole groups, or stratified by class."""
    # Of a single group, samples are all that can be held out.
    if scores.groups is not None and np.ptp(scores.groups):
        return grouped_folds(targets, scores.groups, folds)
    return stratified_folds(scores.values, targets, folds)
