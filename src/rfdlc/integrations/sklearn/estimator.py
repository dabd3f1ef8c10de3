"""RFDLCClassifier: an ensemble of small networks for long-tailed tables and embeddings."""

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.multiclass import _check_partial_fit_first_call, check_classification_targets
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, validate_data

from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.table import blurred
from rfdlc.decide import uncertainty
from rfdlc.decide.classes import Classes
from rfdlc.decide.priors import PriorLike, as_prior
from rfdlc.decide.scores import Floats
from rfdlc.decide.utility import Utility
from rfdlc.errors import choose, expect
from rfdlc.integrations.sklearn.labels import (
    DecidingMixin,
    action_labels,
    as_sample_weight,
    as_utility,
    label_names,
    named_prior,
)

try:
    from rfdlc.integrations.sklearn import particle_training as training
    from rfdlc.training.config import TrainConfig
    from rfdlc.training.model import new_decider
except ModuleNotFoundError as error:
    needed = f'RFDLCClassifier needs {error.name}: pip install "rfdlc[train]"'
    raise ModuleNotFoundError(needed, name=error.name) from error

_WIDE = (np.float64, np.float32)
_ROWS = 8192  # predicted together, so that memory stays small
_UNCERTAINTIES = {
    "entropy": lambda p, particles: uncertainty.entropy(p),
    "max-probability": lambda p, particles: uncertainty.max_probability(p),
    "mutual-information": lambda p, particles: uncertainty.mutual_information(particles),
}


class RFDLCClassifier(DecidingMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """An ensemble of multilayer perceptrons for imbalanced classes, calibrated, that decides by expected utility.

    It trains as `rfdlc train` does. Features are standardized inside. Sparse input is converted to dense input: at once
    by `fit`, in batches by predictions.

    Parameters
    ----------
    utility : Utility, data frame, path, array or str, optional
        U[true, action], as in `UtilityClassifier`.
    weighting : str, default "prior"
        How rare classes are trained: "prior" (the class prior inside the likelihood); class weights 1/f(n) with f
        "linear", "sqrt", "log", "power" or "effective"; or "none".
    particles, hidden : int, default 3; sequence of int, default (256, 256)
        Number of networks, and the widths of their hidden layers.
    epochs : int, default 60
        Passes over the data; the maximum with `early_stopping`.
    early_stopping, patience : bool, default False; int, default 10
        Stop if the loss on held-out samples has not fallen for `patience` epochs, and keep the best epoch.
    calibrate : bool or str, default True
        Fit a calibration on held-out samples: True, False, or the name of a calibrator.
    hold_out : float, default 0.1
        Share of the samples that is held out for calibration and early stopping: stratified, whole `groups`.
    target_prior : str, dict or array, default "train"
        Class prior where decisions are made: "train" (as in y), "uniform", or shares by class.
    batch_size, learning_rate : int or "auto"; float, default 0.002
        Rows per step, and the base learning rate.
    abstain_label : object or dict, default -1
        What `predict` returns for an action that is not a class, as in `UtilityClassifier`.
    warm_start : bool, default False
        `fit` continues with the networks of the previous call.
    random_state, device : int, RandomState or None; "auto", "cpu", "cuda" or "cuda:N"
        Seed of everything that is drawn, and where the networks are.

    Attributes
    ----------
    classes_, class_counts_, actions_ : array
        Labels of the classes, their numbers of samples, and labels of the actions.
    decider_ : Decider
        From logits to actions.
    loss_curve_, held_out_loss_curve_ : list of float
        Loss of each epoch.

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> X, y = load_wine(return_X_y=True)
    >>> model = RFDLCClassifier("tail-sensitive", hidden=(32,), random_state=0).fit(X, y)
    >>> model.predict(X[:3]), bool(model.score(X, y) > 0.95)
    (array([0, 0, 0]), True)
    """

    def __init__(
        self,
        utility: Any = None,
        *,
        weighting: str = "prior",
        particles: int = 3,
        hidden: Sequence[int] = (256, 256),
        epochs: int = 60,
        early_stopping: bool = False,
        patience: int = 10,
        calibrate: bool | str = True,
        hold_out: float = 0.1,
        target_prior: PriorLike = "train",
        batch_size: int | str = "auto",
        learning_rate: float = 2e-3,
        abstain_label: Any = -1,
        warm_start: bool = False,
        random_state: Any = None,
        device: str = "auto",
    ) -> None:
        self.utility = utility
        self.weighting = weighting
        self.particles = particles
        self.hidden = hidden
        self.epochs = epochs
        self.early_stopping = early_stopping
        self.patience = patience
        self.calibrate = calibrate
        self.hold_out = hold_out
        self.target_prior = target_prior
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.abstain_label = abstain_label
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None) -> Self:
        """Train the networks and calibrate them on held-out samples. No group of samples is on both sides."""
        first = not (self.warm_start and hasattr(self, "weights_"))
        split, labels = self._read(X, y, sample_weight, groups, reset=first)
        expect(len(labels) > 1, f"{type(self).__name__} needs at least 2 classes, but y has only one class: {labels}")
        expect(
            first or np.array_equal(labels, self.classes_),
            "warm_start can only be used where `self.classes_` is the same as in the previous call to fit: it was "
            f"{getattr(self, 'classes_', None)}, `y` has {labels}",
        )
        self.classes_, self.class_counts_ = labels, np.bincount(split.labels)
        data, utility = self._prepare(split, first)
        as_prior(named_prior(self.target_prior), data.classes, "target_prior")  # raises before any work
        config = self._config(len(split), first)
        decider = new_decider(training.METHOD, config, training.weighted(data).classes)
        if decider.calibration is not None or self.early_stopping:
            data = training.with_held_out(data, config)
        held = data.val
        loss = training.held_out_loss(decider, held) if self.early_stopping and held is not None else None
        before = training.Trained() if first else training.Trained(self.weights_)
        self._keep(training.train_particles(data, config, before, loss, self.patience), config, data)
        if held is not None:
            options: dict[str, Any] = {"sample_weight": held.weights}
            decider = decider.fit(self._particle_logits(held.array), held.labels, logits=True, **options)
        return self._decide_with(decider.replace(target_prior=named_prior(self.target_prior), utility=utility))

    def partial_fit(
        self, X: Any, y: Any, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Train for one pass over these samples, without calibration.

        The first call names all `classes`, and its samples set the scale of the features.
        """
        first = not hasattr(self, "weights_")
        _check_partial_fit_first_call(self, classes)
        split, _ = self._read(X, y, sample_weight, None, reset=first, labels=self.classes_)
        new = np.bincount(split.labels, minlength=len(self.classes_))
        self.class_counts_ = new if first else new + self.class_counts_
        data, utility = self._prepare(split, first)
        before = training.Trained() if first else training.Trained(self.weights_, self.optimiser_, self.loss_curve_)
        done = len(before.losses) if before.state else 0  # after `fit` it starts again
        config = self._config(len(split), first).replace(calibration="none")
        steady = config.replace(schedule="constant", warmup=0, epochs=done + 1)
        self._keep(training.train_particles(data, steady, before, keep_state=True), config, data)
        decider = new_decider(training.METHOD, config, data.classes)
        return self._decide_with(decider.replace(target_prior=named_prior(self.target_prior), utility=utility))

    def predict_proba(self, X: Any) -> Floats:
        """Calibrated probabilities (N, C) under the prior where decisions are made, in the order of `classes_`."""
        return np.concatenate([np.asarray(self.decider_.probabilities(z, logits=True)) for z in self._stream(X)])

    def predict_uncertainty(self, X: Any, kind: str = "entropy") -> Floats:
        """Uncertainty of each prediction (N,), larger is less certain.

        `kind` is "entropy" or "max-probability" of the calibrated probabilities, or "mutual-information", the
        disagreement of the networks.
        """
        choose("kind", kind, _UNCERTAINTIES)
        parts = []
        for logits in self._stream(X):
            calibrated = np.asarray(self.decider_.probabilities(logits, logits=True))
            parts.append(_UNCERTAINTIES[kind](calibrated, uncertainty.particle_probabilities(logits, True)))
        return np.concatenate(parts)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _config(self, samples: int, first: bool) -> TrainConfig:
        """The settings of `rfdlc train` for a table of this size, changed by the parameters."""
        choose("weighting", self.weighting, training.WEIGHTINGS)
        changes = {
            "particles": self.particles,
            "widths": tuple(np.atleast_1d(self.hidden).tolist()),
            "epochs": self.epochs,
            "learning_rate": self.learning_rate,
            "hold_out": self.hold_out,
            "seed": check_random_state(self.random_state).randint(2**31 - 1),
            "device": self.device,
        }
        if isinstance(self.random_state, Integral):
            changes["seed"] = int(self.random_state)
        if self.batch_size != "auto":
            changes["batch_size"] = self.batch_size
        if self.calibrate is not True:
            changes["calibration"] = self.calibrate or "none"
        config = training.table_settings(samples, self.weighting, **changes)
        for name in () if first else ("widths", "particles"):
            old, new = getattr(self.settings_, name), getattr(config, name)
            expect(old == new, f"{name} was {old} when training began and is {new} now: use a new estimator (clone)")
        return config

    def _read(
        self, X: Any, y: Any, sample_weight: Any, groups: Any, reset: bool, labels: Any = None
    ) -> tuple[Split, NDArray[Any]]:
        """Samples with a positive weight, scaled to mean 1, with labels as indices; and the sorted labels."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=_WIDE, reset=reset)
        check_classification_targets(y)
        if reset:
            self.offset_ = _offsets(X)
        group_of = None if groups is None else np.asarray(groups)
        check_consistent_length(X, y, group_of)
        weights = None if sample_weight is None else as_sample_weight(sample_weight, X)
        rows = np.arange(len(y)) if weights is None else np.flatnonzero(weights)
        known = np.unique(y[rows]) if labels is None else labels
        unknown = np.setdiff1d(y[rows], known)
        expect(not len(unknown), f"`y` has classes not in `self.classes_`: {unknown}. `self.classes_` has {known}.")
        relative = None if weights is None else weights[rows] / weights[rows].mean()
        group_of = None if group_of is None else group_of[rows]
        inputs = _dense(self._narrowed(X)[rows])
        return Split(inputs, np.searchsorted(known, y[rows]), groups=group_of, weights=relative), known

    def _narrowed(self, X: Any) -> Any:
        """Features in 32 bits, without their offsets."""
        moved = _dense(X) - self.offset_ if self.offset_.any() else X
        return check_array(moved, accept_sparse="csr", dtype=np.float32, input_name="X", estimator=self)

    def _prepare(self, split: Split, first: bool) -> tuple[Dataset, Utility]:
        """The samples as a data set, and the utility. Networks that continue keep the scale of the features."""
        self.named_classes_ = Classes.from_counts(self.class_counts_, label_names(self.classes_))
        utility = as_utility(self.utility, self.named_classes_)
        action_labels(utility, self.classes_, self.abstain_label)  # raises before any work
        scale = Normalisation.of_features(split.array) if first else self.normalisation_
        return Dataset("arrays", self.named_classes_, split, normalisation=scale), utility

    def _keep(self, trained: "training.Trained", config: TrainConfig, data: Dataset) -> None:
        self.weights_, self.optimiser_ = trained.weights, trained.state
        self.loss_curve_, self.held_out_loss_curve_ = trained.losses, trained.held_out_losses
        self.loss_, self.n_iter_ = trained.losses[-1], len(trained.losses)
        self.settings_, self.normalisation_ = config, data.normalisation

    def _particle_logits(self, inputs: NDArray[np.float32]) -> Floats:
        here = self.settings_.replace(device=self.device)
        return training.particle_logits(self.weights_, here, inputs, len(self.classes_), self.normalisation_)

    def _stream(self, X: Any) -> Iterator[Floats]:
        """Particle logits (M, n, C) in batches of rows."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_WIDE, reset=False)
        for rows in gen_batches(X.shape[0], _ROWS):
            yield self._particle_logits(_dense(self._narrowed(X[rows])))


def _offsets(X: Any) -> NDArray[np.float64]:
    """The median of each feature that loses precision in 32 bits, 0 for all others (F,)."""
    if issparse(X) or X.dtype.itemsize <= 4:
        return np.zeros(X.shape[1])
    with np.errstate(over="ignore"):  # values too large for 32 bits raise in `_narrowed`
        return np.array([np.median(feature) if blurred(feature) else 0.0 for feature in X.T])


def _dense(X: Any) -> NDArray[np.float32]:
    return np.ascontiguousarray(X.toarray() if issparse(X) else X)
