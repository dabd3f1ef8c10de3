"""RFDLCClassifier: trees, linear models and small networks for long-tailed tables and
embeddings.

Weights and optimizer state are kept as plain arrays by name; networks are built from
them when they are needed.
"""

from __future__ import annotations  # `help` shows them as written

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.multiclass import (
    _check_partial_fit_first_call,
    check_classification_targets,
)
from sklearn.utils.validation import check_consistent_length, check_is_fitted, check_X_y

from rfdlc.data.dataset import Dataset, Normalisation, Split, spelt_alike
from rfdlc.decisions.decider import Decider
from rfdlc.errors import choose, expect
from rfdlc.estimators.reading import WIDE, ReadingMixin
from rfdlc.estimators.scoring import named_prior
from rfdlc.estimators.utility_classifier import (
    DecidingMixin,
    as_sample_weight,
)
from rfdlc.probabilities import uncertainty
from rfdlc.probabilities.classes import Classes, as_classes
from rfdlc.probabilities.priors import PriorLike, is_uniform
from rfdlc.probabilities.scores import Floats, nll
from rfdlc.progress import shown

try:
    import torch

    from rfdlc.data.loader import ResidentLoader
    from rfdlc.training.building import (
        choose_device,
        method_net,
        mixture_net,
        new_decider,
        sensible_threads,
    )
    from rfdlc.training.config import TrainConfig
    from rfdlc.training.loop import build_stages, epochs
    from rfdlc.training.losses.terms import WEIGHT_FORMS
    from rfdlc.training.methods import METHODS, resolve
    from rfdlc.training.networks.particles import ParticleNet, place
    from rfdlc.training.settings import TABULAR
    from rfdlc.training.tabular import fit_table, unused_settings
except ModuleNotFoundError as error:
    needed = f'RFDLCClassifier needs {error.name}: pip install "rfdlc[train]"'
    raise ModuleNotFoundError(needed, name=error.name) from error

METHOD = "rf-dlc"
NETWORKS = ("mlp", "features")  # backbones that are networks only
WEIGHTINGS = ("prior", "none", *(form for form in WEIGHT_FORMS if form != "constant"))
Arrays = Mapping[str, NDArray[Any]]
_ROWS = 8192  # predicted together, so that memory stays small
_UNCERTAINTIES: dict[str, Any] = {
    "entropy": lambda p, particles: uncertainty.entropy(p),
    "max-probability": lambda p, particles: uncertainty.max_probability(p),
    "mutual-information": lambda p, particles: uncertainty.disagreement(
        particles, False
    ),
}


@dataclass(eq=False, repr=False)
class RFDLCClassifier(ReadingMixin, DecidingMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A mixture of trees, linear models and networks for imbalanced classes,
    calibrated; decides by expected utility.

    It trains as `rfdlc train` trains a table: data frames may have texts, dates and
    identifiers, data frames and arrays missing values (NaN). Features are standardized
    inside; sparse input becomes dense input.

    Parameters
    ----------
    utility : Utility, data frame, path, array or str, optional
        U[true, action], as in `UtilityClassifier`.
    backbone : {"mixture", "trees", "mlp", "features"}, default "mixture"
        Trees, linear models and networks, weighed by the likelihood of out-of-fold
        probabilities; only trees; only networks; or heads alone, for features of a
        pretrained network, as `rfdlc train` trains them (preset features).
        `partial_fit`, `warm_start` and `early_stopping` always train networks or heads
        only.
    weighting : str, default "prior"
        How networks learn rare classes: "prior" (the class prior inside the
        likelihood), "none", or class weights 1/f(n) with f "linear", "sqrt", "log",
        "power" or "effective".
    particles, hidden : int or "auto"; sequence of int or "auto"
        Number of networks, by default 3, in a mixture (above 2,000 samples) one per
        fold; and the widths of their hidden layers, by default (256, 256), of heads
        alone none.
    epochs, batch_size, learning_rate : int or "auto"; int or "auto"; float or "auto"
        Passes over the data (at most, with `early_stopping`), by default 60, of heads
        alone 10 or more; rows per step; and the base learning rate, by default 0.002,
        of heads alone 0.1.
    early_stopping, patience : bool, default False; int, default 10
        Stop if the loss on held-out samples has not fallen for `patience` epochs, and
        keep the best epoch.
    calibrate, hold_out : bool or str, default True; float, default 0.1
        Whether to calibrate, or the name of a calibrator; the share of the samples that
        is held out for calibration and early stopping of networks: stratified, whole
        `groups`. A mixture is calibrated out of fold instead.
    target_prior : str, dict or array, default "train"
        Class prior where decisions are made: "train" (as in y), "uniform", or shares by
        class.
    abstain_label, warm_start : object or dict, default -1; bool, default False
        As in `UtilityClassifier`; whether `fit` continues with the networks of the
        previous call.
    budget, verbose : float or str, optional; bool, default False
        Time of a fit, in seconds or as "90s", "2m" or "1h": leaves out slow candidates
        of a mixture or of trees, as
        `rfdlc train --budget` does. Whether progress is shown on standard error.
    random_state, device : int, RandomState or None; "auto", "cpu", "cuda" or "cuda:N"
        Seed of everything that is drawn, and where the networks are.

    Attributes
    ----------
    classes_, class_counts_, actions_ : array
        Labels of the classes, their numbers of samples, and labels of the actions.
    decider_, loss_curve_, held_out_loss_curve_ : Decider, lists of float
        From logits to actions; the losses of each epoch of networks alone.
    left_out_ : tuple of str
        Columns of the data frame that only name rows, and are not used.
    choice_ : Choice
        Of a mixture: the out-of-fold loss and the weight of each candidate.

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> X, y = load_wine(return_X_y=True)
    >>> model = RFDLCClassifier("tail-sensitive", backbone="mlp", random_state=0)
    >>> model = model.fit(X, y)
    >>> model.predict(X[:3]), bool(model.score(X, y) > 0.95)
    (array([0, 0, 0]), True)
    """

    utility: Any = None
    _: KW_ONLY
    backbone: str = "mixture"
    weighting: str = "prior"
    particles: int | str = "auto"
    hidden: Sequence[int] | str = "auto"
    epochs: int | str = "auto"
    early_stopping: bool = False
    patience: int = 10
    calibrate: bool | str = True
    hold_out: float = 0.1
    target_prior: PriorLike = "train"
    batch_size: int | str = "auto"
    learning_rate: float | str = "auto"
    abstain_label: Any = -1
    warm_start: bool = False
    budget: float | str | None = None
    verbose: bool = False
    random_state: Any = None
    device: str = "auto"

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Train the networks and calibrate them on held-out samples. No group of
        samples is on both sides.
        """
        first = not (self.warm_start and self._has_networks)
        split, labels = self._read(X, y, sample_weight, groups, reset=first)
        expect(
            len(labels) > 1,
            f"{type(self).__name__} needs at least 2 classes, but y has only one class:"
            f" {labels}",
        )
        for told in spelt_alike([str(label) for label in labels]):
            warnings.warn(told, stacklevel=2)
        known = labels if first else self.classes_
        problem = (
            "warm_start can only be used where `self.classes_` is the same as in the"
            " previous call to fit"
        )
        expect(
            np.array_equal(labels, known),
            f"{problem}: it was {known}, `y` has {labels}",
        )
        alone = self.backbone in NETWORKS or self.warm_start or self.early_stopping
        if alone and self.budget is not None:
            warnings.warn(
                "budget has no effect: networks alone take as long as their epochs",
                stacklevel=2,
            )
        with shown() if self.verbose else nullcontext():
            return (self._train if alone else self._mix)(
                split, labels, np.bincount(split.labels), first
            )

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Train for one pass, without calibration. The first call names all `classes`
        and scales the features.
        """
        first = not self._has_networks
        _check_partial_fit_first_call(self, classes)
        split, labels = self._read(
            X, y, sample_weight, None, reset=first, labels=self.classes_
        )
        counts = np.bincount(split.labels, minlength=len(labels))
        return self._train(
            split,
            labels,
            counts if first else counts + self.class_counts_,
            first,
            partial=True,
        )

    def predict_proba(self, X: Any) -> Floats:
        """Calibrated probabilities (N, C) under the prior where decisions are made, in
        the order of `classes_`.
        """
        return np.concatenate(
            [
                np.asarray(self.decider_.probabilities(z, logits=True))
                for z in self._stream(X)
            ]
        )

    def predict_uncertainty(self, X: Any, kind: str = "entropy") -> Floats:
        """Uncertainty (N,) of predictions: "entropy", "max-probability", or
        "mutual-information" of the networks.
        """
        measure, parts = _UNCERTAINTIES[choose("kind", kind, _UNCERTAINTIES)], []
        for logits in self._stream(X):
            calibrated = np.asarray(self.decider_.probabilities(logits, logits=True))
            parts.append(
                measure(calibrated, uncertainty.particle_probabilities(logits, True))
            )
        return np.concatenate(parts)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags

    @property
    def _has_networks(self) -> bool:
        """Whether there is something to continue: a mixture cannot be."""
        return hasattr(self, "weights_") and self.settings_.backbone not in TABULAR

    def _config(
        self, samples: int, first: bool, data: Dataset | None = None
    ) -> TrainConfig:
        """The settings of `rfdlc train` for so many samples, changed by the parameters;
        with `data` of networks.
        """
        choose("weighting", self.weighting, WEIGHTINGS)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        names = ("particles", "epochs", "learning_rate", "hold_out", "device")
        changes = {
            name: value
            for name in names
            if (value := getattr(self, name)) != "auto" or name == "device"
        }
        chosen = choose("backbone", self.backbone, (*NETWORKS, *TABULAR))
        changes["backbone"] = chosen if data is None and chosen in TABULAR else "mlp"
        changes["preset"] = "features" if chosen == "features" else "table"
        if not isinstance(self.hidden, str):
            changes["widths"] = tuple(np.atleast_1d(self.hidden).tolist())
        changes["seed"] = (
            int(self.random_state) if isinstance(self.random_state, Integral) else seed
        )
        if self.batch_size != "auto":
            changes["batch_size"] = self.batch_size
        if self.budget is not None:
            changes["budget"] = self.budget
        if self.calibrate is not True:
            changes["calibration"] = self.calibrate or "none"
        changes["prior_tau"] = (1.0,) if self.weighting == "prior" else ()
        changes["weights"] = (
            "constant" if self.weighting in ("prior", "none") else self.weighting
        )
        config = resolve(METHOD, "", changes, samples=samples)[1]
        for name in () if first else ("widths", "particles"):
            old, new = getattr(self.settings_, name), getattr(config, name)
            expect(
                old == new,
                f"{name} was {old} when training began and is {new} now: use a new"
                " estimator (clone)",
            )
        return (
            config if first else config.replace(head_init="random")
        )  # heads go on from where they are

    def _read(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        groups: Any,
        reset: bool,
        labels: Any = None,
    ) -> Any:
        """Samples with a positive weight, scaled to mean 1, with labels as indices; and
        the sorted labels.
        """
        X, y = check_X_y(
            self._features(X, reset), y, accept_sparse="csr", dtype=WIDE, estimator=self
        )
        check_classification_targets(y)
        group_of = None if groups is None else np.asarray(groups)
        check_consistent_length(X, y, group_of)
        weights = as_sample_weight(sample_weight, X, y, self.target_prior)
        rows: Any = slice(None)
        if weights is not None:
            rows = np.flatnonzero(weights)
            weights = weights[rows] / weights[rows].mean()
        known = np.unique(y[rows]) if labels is None else labels
        unknown = np.setdiff1d(y[rows], known)
        expect(
            not len(unknown),
            f"`y` has classes not in `self.classes_`: {unknown}. `self.classes_` has"
            f" {known}.",
        )
        group_of = None if group_of is None else group_of[rows]
        return (
            Split(
                self._narrowed(X[rows]),
                np.searchsorted(known, y[rows]),
                groups=group_of,
                weights=weights,
            ),
            known,
        )

    def _scaling(self, split: Split) -> Normalisation:
        return (
            Normalisation.of_table(split.array, self.encoder_)
            if self.encoder_
            else Normalisation.of(split.array)
        )

    def _train(
        self, split: Split, labels: Any, counts: Any, first: bool, partial: bool = False
    ) -> Self:
        """Train until the last epoch and calibrate; or, `partial`, for one more epoch
        without calibration.
        """
        utility = self._name_classes(labels, counts)
        self.normalisation_: Any = (
            self._scaling(split) if first else self.normalisation_
        )
        data = Dataset(
            "arrays", self.named_classes_, split, normalisation=self.normalisation_
        )
        config: TrainConfig = self._config(len(split), first, data)
        self.class_counts_, self.settings_ = counts, config
        weights = {} if first else self.weights_
        state, losses = (
            ({}, []) if first or not partial else (self.optimiser_, self.loss_curve_)
        )
        done = (
            len(losses) if state else 0
        )  # after `fit` the epochs of the optimizer start again
        if partial:
            config = config.replace(
                calibration="none", schedule="constant", warmup=0, epochs=done + 1
            )
        decider = new_decider(
            METHOD, config, data.classes if partial else _weighted(data).classes
        )
        stops, parts = self.early_stopping and not partial, [data]
        if config.hold_out and (decider.model.calibration is not None or stops):
            if data.classes.count_array.max() > 1:
                parts = _held_apart(data, config, stops)
            else:
                warnings.warn(
                    "no class has two samples, so none can be held out: not calibrated",
                    stacklevel=3,
                )
        logits, held = (
            list[Floats](),
            [part.val for part in parts if part.val is not None],
        )
        for part in parts:
            trained = _train_particles(
                part,
                config,
                weights,
                state,
                done,
                decider if stops else None,
                self.patience,
            )
            self.weights_: Arrays = trained[0]
            logits += (
                [] if part.val is None else [self._particle_logits(part.val.array)]
            )
        self.optimiser_: Arrays = trained[1] if partial else {}
        self.loss_curve_: list[float] = [*losses, *trained[2]]
        self.held_out_loss_curve_, self.loss_, self.n_iter_ = (
            trained[3],
            self.loss_curve_[-1],
            len(self.loss_curve_),
        )
        if held:
            scores, y = (
                np.concatenate(logits, axis=1),
                np.concatenate([part.labels for part in held]),
            )
            shares = (
                None
                if split.weights is None
                else np.concatenate([part.weights for part in held])
            )
            groups = (
                None
                if split.groups is None
                else np.concatenate([part.groups for part in held])
            )
            decider = decider.fit(
                scores, y, logits=True, sample_weight=shares, groups=groups
            )
            if config.refit and not stops:
                self.weights_ = _train_particles(
                    data, config, weights, {}, 0, None, self.patience
                )[0]
        return self._decide_with(
            decider.replace(
                target_prior=named_prior(self.target_prior), utility=utility
            )
        )

    def _mix(self, split: Split, labels: Any, counts: Any, first: bool) -> Self:
        """Fit a mixture, and calibrate it out of fold."""
        utility = self._name_classes(labels, counts)
        self.normalisation_, self.class_counts_ = self._scaling(split), counts
        self.settings_ = config = self._config(len(split), first)
        data = _weighted(
            Dataset(
                "arrays", self.named_classes_, split, normalisation=self.normalisation_
            )
        )
        usual = resolve(
            METHOD,
            "",
            {"backbone": config.backbone, "preset": "table"},
            samples=len(split),
        )[1]
        if unused := unused_settings(data, config, usual):
            warnings.warn(
                f"{', '.join(unused)} has no effect: it is for networks, use"
                ' backbone="mlp"',
                stacklevel=3,
            )
        found = fit_table(data, METHODS[METHOD], config)
        self.weights_, self.choice_, self.optimiser_ = (
            _arrays(found.net.state_dict()),
            found.choice,
            {},
        )
        self.loss_curve_, self.held_out_loss_curve_ = list[float](), list[float]()
        decider = new_decider(METHOD, config, data.classes).replace(
            weights=found.weights
        )
        if decider.model.calibration is not None:
            shares, groups = found.held.weights, found.held.together
            decider = decider.fit(
                found.logits,
                found.held.labels,
                logits=True,
                sample_weight=shares,
                groups=groups,
            )
        return self._decide_with(
            decider.replace(
                target_prior=named_prior(self.target_prior), utility=utility
            )
        )

    def _particle_logits(self, inputs: NDArray[np.float32]) -> Floats:
        here = self.settings_.replace(device=self.device)
        net = _network(here, inputs.shape[1:], len(self.classes_), self.weights_)
        return _logits(net, inputs, self.normalisation_)

    def _stream(self, X: Any) -> Iterator[Floats]:
        """Particle logits (M, n, C) in batches of rows."""
        check_is_fitted(self)
        X = self._features(X, reset=False)
        for rows in gen_batches(X.shape[0], _ROWS):
            yield self._particle_logits(self._narrowed(X[rows]))


def _weighted(data: Dataset) -> Dataset:
    """The data with classes counted by sample weight, for the objective."""
    if data.train.weights is None:
        return data
    share = data.train.weights / data.train.weights.mean()
    counts = np.bincount(data.train.labels, share, minlength=len(data.classes))
    return replace(
        data,
        classes=Classes.from_counts(np.maximum(1, np.rint(counts)), data.classes.names),
    )


def _held_apart(data: Dataset, config: TrainConfig, stops: bool) -> list[Dataset]:
    """The data with held-out samples; several times, each with another fold, where
    networks are trained again after.
    """
    folds = 1 if stops else config.folds
    if folds == 1:
        return [data.hold_out(config.hold_out, seed=config.seed)]
    fold = data.train.folds(folds, config.seed)
    return [
        data.held_apart(np.flatnonzero(fold != number), np.flatnonzero(fold == number))
        for number in range(folds)
    ]


def _train_particles(
    data: Dataset,
    config: TrainConfig,
    weights: Arrays,
    state: Arrays,
    done: int,
    stop_by: Decider | None,
    patience: int,
) -> tuple[Arrays, Arrays, list[float], list[float]]:
    """Train on `data.train`, from `weights` if there are any, and from optimizer
    `state` after `done` epochs.

    With `stop_by`, training ends if the loss of its probabilities on `data.val` has not
    fallen for `patience` epochs, and the weights are those of the best epoch. Returns
    weights, optimizer state, training losses and held-out losses.
    """
    net, held = _network(config, data.input_shape, len(data.classes), weights), data.val
    stages = build_stages(
        METHODS[METHOD],
        config,
        _weighted(data),
        (config.seed,),
        choose_device(config.device),
    )
    losses, held_out, best = list[float](), list[float](), None
    with sensible_threads(net, config):
        for epoch in epochs(
            net,
            stages,
            {name: torch.tensor(array) for name, array in state.items()},
            done,
        ):
            losses.append(epoch.losses[0])
            if stop_by is not None and held is not None:
                held_out.append(
                    _held_out_loss(
                        stop_by, held, _logits(net, held.array, data.normalisation)
                    )
                )
                best = (
                    _arrays(net.state_dict()) if held_out[-1] == min(held_out) else best
                )
                if len(held_out) - 1 - int(np.argmin(held_out)) >= patience:
                    break
    return best or _arrays(net.state_dict()), _arrays(epoch.state), losses, held_out


def _held_out_loss(decider: Decider, held: Split, logits: Floats) -> float:
    """Negative log-likelihood; classes weigh the same if the networks train for a
    uniform prior.
    """
    y, weights = (
        held.labels,
        np.ones(len(held)) if held.weights is None else held.weights,
    )
    if is_uniform(decider.model.train_prior):
        weights = weights / np.bincount(y, weights)[y]
    p = np.asarray(
        decider.replace(target_prior=None).probabilities(logits, logits=True)
    )
    return float(np.average(nll(p[np.arange(len(y)), y]), weights=weights))


def _network(
    config: TrainConfig, shape: tuple[int, ...], classes: int, weights: Arrays
) -> Any:
    method, names = METHODS[METHOD], as_classes(classes)
    tensors = {name: torch.tensor(array) for name, array in weights.items()}
    net: Any
    if config.backbone in TABULAR:
        net = mixture_net(method, config, shape, names, tensors)
    else:
        net = method_net(method, config, shape, names, seeds=(config.seed,))
    if weights:
        net.load_state_dict(tensors)
    return place(net, choose_device(config.device))


@torch.no_grad()
def _logits(
    net: torch.nn.Module, inputs: Floats, normalisation: Normalisation | None
) -> Floats:
    """In double precision: a sample's prediction must not depend on the others in its
    batch.
    """
    exact = deepcopy(net).double().eval()
    device = next(exact.parameters()).device
    bare = Split(inputs, np.zeros(len(inputs), dtype=np.int64))
    size = (
        4096 if isinstance(net, ParticleNet) else 256
    )  # every sample is in every tree
    loader = ResidentLoader(
        bare, normalisation, batch_size=size, device=device, dtype=torch.float64
    )
    return (
        torch.cat([exact(batch[None])[0] for batch, _ in loader.in_order()], dim=1)
        .cpu()
        .numpy()
    )


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {
        name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()
    }
