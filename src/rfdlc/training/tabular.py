"""Tables: trees, linear models and networks are fitted fold by fold, and weighed by their held-out likelihood.

Every candidate predicts the samples that it was not fitted to. These predictions calibrate the candidates, give their
weights, and calibrate the decisions, so that in the end no sample is lost to the fit of small tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.loader import Normaliser
from rfdlc.decide.calibrators import Temperature
from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.priors import as_prior
from rfdlc.decide.scores import Floats, safe_log, softmax
from rfdlc.errors import expect
from rfdlc.progress import live
from rfdlc.training.config import TrainConfig
from rfdlc.training.factories import carried_prior
from rfdlc.training.loop import PreparedStage, epochs
from rfdlc.training.methods import NETWORKS, Method
from rfdlc.training.model import choose_device, method_net, sensible_threads
from rfdlc.training.networks.mixture import Mixture, Networks, boosting, forest, linear
from rfdlc.training.networks.particles import place

TREES, ITERATIONS, DEEPEST = 100, 100, 24  # of each forest; of boosting; levels of a tree in a forest
SMALL_TREES = {"learning_rate": 0.05, "max_leaf_nodes": 8, "min_samples_leaf": 5, "l2_regularization": 1.0}
FOLDS, MOST_FOLDED = 5, 10_000  # larger tables hold out one part alone
MOST_WORK = 5e7  # fits x samples x features x classes, above which boosting has one candidate, and later none
MOST_VALUES = 10_000_000  # in the leaves of a forest
SMALLEST = 0.02  # weight of a candidate that stays in the mixture
PRIOR_SAMPLES = 2  # that favour equal weights
STEPS = 500  # of expectation maximisation

Fit = Callable[[Floats, Indices, Any, int], Any]  # features, labels, sample weights, seed


@dataclass(frozen=True)
class Choice:
    """What was tried on a table: by candidate, the held-out loss in nats after calibration, and its weight."""

    losses: dict[str, float]
    weights: dict[str, float]
    mixture_loss: float  # with weights that were fitted to other folds

    def to_dict(self) -> dict[str, Any]:
        rows = [{"name": name, "loss": loss, "weight": self.weights[name]} for name, loss in self.losses.items()]
        return {"candidates": rows, "mixture_loss": self.mixture_loss}


@dataclass(frozen=True)
class FittedTable:
    """A mixture, the weights (M,) of its particles, their held-out logits (M, n, C), of which samples, and why."""

    net: Mixture
    weights: Floats
    logits: Floats
    held: Split
    choice: Choice


def check_table(method: Method, config: TrainConfig, data: Dataset, single: bool) -> None:
    """Raise where `config.backbone` cannot be fitted to these data."""
    what = f"setting backbone={config.backbone}"
    expect(data.kind == "features", f"{what} is for tables, but {data.name} has images: leave it out")
    expect(method.mixes, f"{what} is for methods that mix, which this is not: use --method rf-dlc, or backbone=mlp")
    expect(single, f"{what} is fitted by one process: leave torchrun out, or use backbone=mlp")


def describe_table(data: Dataset, config: TrainConfig) -> dict[str, str]:
    """What is going to be fitted, in words."""
    once = data.val is not None or len(data.train) > MOST_FOLDED
    fits = "one part of the samples is held out" if once else f"{FOLDS} folds, and all samples"
    names = [*_candidates(data, config), *(NETWORKS if config.backbone == "mixture" else ())]
    return {"candidates": ", ".join(names), "training": f"{fits}; weighed by held-out likelihood"}


def fit_table(data: Dataset, method: Method, config: TrainConfig) -> FittedTable:
    """Fit all candidates of `config.backbone`, weigh them, and keep those that matter."""
    scale = Normaliser(data.normalisation, data.input_shape, torch.device("cpu"), torch.float32)
    samples, splits = _splits(data, config)
    x, held = scale(torch.from_numpy(samples.array)).numpy(), samples.take(np.concatenate([h for _, h in splits]))
    candidates, found = _candidates(data, config), dict[str, tuple[nn.Module, Floats]]()
    networks = list(NETWORKS) if config.backbone == "mixture" else []
    with live(len(candidates) + len(networks), f"Fitting {data.name}") as show:
        for name, fit in candidates.items():
            show(0, name)
            found[name] = _fit_all(fit, x, samples, splits, config)
            show(1, "")
        for name in networks:
            show(0, name)
            found[name] = _fit_networks(data, samples, splits, method, config.replace(**NETWORKS[name]))
            show(1, "")
    found = dict(sorted(found.items()))  # the order of particles, also in files
    scales = [_scale(name, logits, held, data.classes, config) for name, (_, logits) in found.items()]
    scaled = [logits * slope + bias for (_, logits), (slope, bias) in zip(found.values(), scales, strict=True)]
    calibrated = safe_log(softmax(np.array(scaled, dtype=np.float64)))  # (M, n, C)
    likelihoods = calibrated[:, np.arange(len(held)), held.labels]
    shares = _shares(data.classes, held, config)
    weights, mixture_loss = _choose(likelihoods, shares, [len(rows) for _, rows in splits])
    losses, shown = (dict(zip(found, v.tolist(), strict=True)) for v in (-likelihoods @ shares, weights))
    choice = Choice(losses, shown, mixture_loss)
    kept = np.flatnonzero(weights)
    members = {name: found[name][0] for i, name in enumerate(found) if weights[i]}
    net = Mixture(members, *(torch.tensor(np.array([s[i] for s in scales])[kept]).float() for i in (0, 1)))
    logits = calibrated[kept].astype(np.float32)
    return FittedTable(place(net, choose_device(config.device)), weights[kept], logits, held, choice)


def _scale(name: str, logits: Floats, held: Split, classes: Classes, config: TrainConfig) -> tuple[float, Floats]:
    """Slope and bias (C,) that calibrate a candidate and bring it to the class prior of the training data."""
    carried = carried_prior(config.replace(**NETWORKS.get(name, {})), classes)
    fitted = Temperature.fit(safe_log(softmax(logits)), held.labels, sample_weight=held.weights, train_prior=carried)
    return 1 / fitted.temperature, np.log(carried_prior(config, classes)) - np.log(carried)


def _choose(log_p: Floats, shares: Floats, sizes: Sequence[int]) -> tuple[Floats, float]:
    """Weights (M,) from log p (M, n) of the true class; and the loss of a mixture that is weighed by other folds."""
    fold = np.repeat(np.arange(len(sizes)), sizes) if len(sizes) > 1 else np.arange(log_p.shape[1]) % FOLDS
    loss = 0.0
    for inside in (fold == k for k in np.unique(fold)):
        others = _weights(log_p[:, ~inside], shares[~inside] / shares[~inside].sum())
        loss -= float(np.log(others @ np.exp(log_p[:, inside])) @ shares[inside])
    weights = _weights(log_p, shares)
    weights = np.where(weights < SMALLEST, 0, weights)
    return weights / weights.sum(), loss


def _splits(data: Dataset, config: TrainConfig) -> tuple[Split, list[tuple[Indices, Indices]]]:
    """Samples, and for each fit the positions that it sees and those that it then predicts."""
    train, val = data.train, data.val
    if val is not None:
        joined = Split(np.concatenate([train.array, val.array]), np.concatenate([train.labels, val.labels]))
        return joined, [(np.arange(len(train)), np.arange(len(train), len(joined)))]
    if len(train) > MOST_FOLDED:
        return train, [train.hold_out(config.hold_out or 0.1, config.seed)]
    fold = train.folds(FOLDS, config.seed)
    few = f"{data.name}: no class has two samples (or groups), so none can be held out: use backbone=mlp"
    expect((fold >= 0).any(), few)
    return train, [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(FOLDS) if (fold == k).any()]


def _candidates(data: Dataset, config: TrainConfig) -> dict[str, Fit]:
    classes, fits = len(data.classes), 1 if data.val is not None or len(data.train) > MOST_FOLDED else FOLDS + 1
    kinds = {"forest-random": "RandomForestClassifier", "forest-extra": "ExtraTreesClassifier"}
    size = carried_prior(config, data.classes), max(MOST_VALUES // (2 * fits * TREES * classes), 32)
    trees: dict[str, Fit] = {name: partial(_fit_forest, kind, *size) for name, kind in kinds.items()}
    work = fits * len(data.train) * data.input_shape[0] * classes
    boosted = {"boosting": {}, "boosting-small": SMALL_TREES} if work < MOST_WORK else {"boosting": {}}
    trees |= {name: partial(_fit_boosting, given, classes) for name, given in boosted.items() if work < 4 * MOST_WORK}
    inverse = {"linear-small": 0.1, "linear": 1.0, "linear-large": 10.0}  # of the penalty on squared weights
    linear_ones: dict[str, Fit] = {name: partial(_fit_linear, c, classes) for name, c in inverse.items()}
    return trees if config.backbone == "trees" else {**linear_ones, **trees}


def _fit_all(
    fit: Fit, x: Floats, samples: Split, splits: Sequence[tuple[Indices, Indices]], config: TrainConfig
) -> tuple[nn.Module, Floats]:
    """A model per split, and one of all samples where several models are averaged; with held-out logits (n, C)."""
    models, logits = list[Any](), []
    for number, (rows, held) in enumerate(splits):
        weights = None if samples.weights is None else samples.weights[rows]
        models.append(fit(x[rows], samples.labels[rows], weights, config.seed + number))
        with torch.no_grad():
            pieces = [models[-1](torch.from_numpy(x[some]))[0] for some in np.array_split(held, -(-len(held) // 256))]
        logits.append(torch.cat(pieces).numpy())
    if len(splits) > 1 or config.refit:
        models.append(fit(x, samples.labels, samples.weights, config.seed + len(splits)))
    return type(models[0]).joined(models), np.concatenate(logits)


def _fit_forest(kind: str, prior: Any, leaves: int, x: Floats, y: Indices, weights: Any, seed: int) -> nn.Module:
    from sklearn import ensemble

    limits = {"max_depth": DEEPEST, "max_leaf_nodes": leaves}
    return forest(getattr(ensemble, kind)(TREES, **limits, random_state=seed, n_jobs=-1).fit(x, y, weights), prior)


def _fit_boosting(settings: dict[str, Any], classes: int, x: Floats, y: Indices, weights: Any, seed: int) -> nn.Module:
    from sklearn.ensemble import HistGradientBoostingClassifier

    model = HistGradientBoostingClassifier(max_iter=ITERATIONS, early_stopping=False, random_state=seed, **settings)
    return boosting(model.fit(x, y, weights), classes)


def _fit_linear(c: float, classes: int, x: Floats, y: Indices, weights: Any, seed: int) -> nn.Module:
    from sklearn.linear_model import LogisticRegression

    return linear(LogisticRegression(C=c, max_iter=300).fit(x, y, weights), classes)


def _fit_networks(
    data: Dataset, samples: Split, splits: Sequence[tuple[Indices, Indices]], method: Method, config: TrainConfig
) -> tuple[nn.Module, Floats]:
    """One stack of networks, one per split; all splits have as many samples as the largest, some of them twice."""
    device = choose_device(config.device)
    size, seeds = max(len(rows) for rows, _ in splits), [config.seed + k for k in range(len(splits))]
    positions = [np.resize(rows, size) for rows, _ in splits]
    classes = [Classes.from_labels(samples.labels[rows], data.classes.names) for rows, _ in splits]
    runs = [(method, config.replace(seed=seed), own) for seed, own in zip(seeds, classes, strict=True)]
    net = place(method_net(method, config, data.input_shape, data.classes, seeds), device)
    fitted = Dataset(data.name, data.classes, samples, normalisation=data.normalisation)
    stages = [PreparedStage(number, runs, fitted, device, positions=positions) for number in range(len(method.stages))]
    with sensible_threads(net, config):
        for _ in epochs(net, stages, {}):
            pass
    net.eval()
    scale, logits = Normaliser(data.normalisation, data.input_shape, device, torch.float32), []
    with torch.no_grad():
        for run, (_, held) in enumerate(splits):
            inputs = scale(torch.from_numpy(samples.array[held]).to(device))
            particles = net(inputs.expand(net.runs, *inputs.shape))[run].cpu().numpy()  # (M, n, C)
            logits.append(safe_log(softmax(particles).mean(0)))
    return Networks(net.requires_grad_(False)), np.concatenate(logits)


def _shares(classes: Classes, held: Split, config: TrainConfig) -> Floats:
    """How much each held-out sample counts: as under the class prior that is decided for; they sum to one."""
    shares = np.ones(len(held)) if held.weights is None else held.weights
    if config.target_prior not in ("train", "scores"):
        frequency = np.bincount(held.labels, shares, minlength=len(classes))
        target = as_prior(config.target_prior, classes, "target_prior")
        shares = shares * (target / np.maximum(frequency, 1e-12))[held.labels]
    return shares / shares.sum()


def _weights(log_p: Floats, shares: Floats) -> Floats:
    """Weights (M,) of highest likelihood of a mixture, from log p (M, n) of the true class, shrunk to equal ones."""
    members, p = len(log_p), np.exp(log_p - log_p.max(axis=0))
    weights, extra = np.full(members, 1 / members), PRIOR_SAMPLES * float(shares @ shares)
    for _ in range(STEPS):
        responsible = weights[:, None] * p
        weights = (responsible / responsible.sum(axis=0)) @ shares + extra / members
        weights /= weights.sum()
    return weights
