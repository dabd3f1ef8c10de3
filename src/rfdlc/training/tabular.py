"""Tables: trees, linear models and networks are fitted fold by fold, and weighed by
their held-out likelihood.

Every candidate predicts the samples that it was not fitted to. These predictions
calibrate the candidates, give their weights, and calibrate the decisions, so that in
the end no sample is lost to the fit of small tables.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import nn

from rfdlc.data.dataset import Dataset, Split
from rfdlc.data.loader import Normaliser
from rfdlc.data.longtail import far_from_asked
from rfdlc.errors import expect
from rfdlc.probabilities.calibrators import Temperature
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.priors import as_prior
from rfdlc.probabilities.scores import Floats, safe_log, softmax
from rfdlc.progress import announce, live
from rfdlc.training.building import (
    choose_device,
    method_net,
    new_decider,
    sensible_threads,
)
from rfdlc.training.config import SAFETY, TrainConfig
from rfdlc.training.factories import carried_prior
from rfdlc.training.loop import ROWS, PreparedStage, epochs, split_outputs
from rfdlc.training.methods import NETWORKS, Method, resolve
from rfdlc.training.networks import mixture
from rfdlc.training.networks.mixture import Mixture, Networks, TrainingRange, sees_logs
from rfdlc.training.networks.particles import place
from rfdlc.training.settings import settings_where
from rfdlc.training.skewed import Parameters, find_skewed, signed_log

TREES, ITERATIONS, DEEPEST = (
    100,
    100,
    24,
)  # of each forest; of boosting; levels of a tree in a forest
SMALL_TREES = {
    "learning_rate": 0.05,
    "max_leaf_nodes": 8,
    "min_samples_leaf": 5,
    "l2_regularization": 1.0,
}
LARGE_STEPS = {"learning_rate": 0.2, "max_iter": ITERATIONS // 2}
FORESTS = {"forest-random": {"min_samples_leaf": 5}, "forest-extra": {}}
PENALTIES = {
    "linear-small": 0.1,
    "linear": 1.0,
    "linear-large": 10.0,
    "linear-largest": 100.0,
}  # C, their inverse
FOLDS, MOST_FOLDED = 5, 10_000  # larger tables hold out one part alone
MOST_WORK = 2e8  # fits x samples x features x classes, above which there is no boosting
# of one core, above which a small table gets larger steps; a third of it for a second
# candidate
BOOSTING_SECONDS = 8.0
MOST_PRODUCTS = 3e6  # samples x products x classes of a quadratic model
SMALL, MEDIUM, LARGE = (
    500,
    2_000,
    50_000,
)  # samples up to which: two perceptrons; no stack of networks; perceptrons
MOST_VALUES = 10_000_000  # in the leaves of a forest
# values of a table up to which one thread fits a model: several wait for each other on
# busy cores
ALONE = 2_000_000
EFFORT = {
    "linear": 3,
    "quadratic": 10,
    "forest": 35,
    "boosting": 60,
    "perceptron": 90,
}  # about so many epochs of `mlp`
SMALLEST = 0.02  # weight of a candidate that stays in the mixture
PRIOR_SAMPLES, RIDGE = (
    1.0,
    0.05,
)  # that favour equal weights, also those of members that are the same
OF_NETWORKS = settings_where(lambda setting: setting.networks_only)

Fit = Callable[
    [Floats, Indices, Any, int], Any
]  # features, labels, sample weights, seed
Splits = list[tuple[Indices, Indices]]
Goes = Callable[
    [float], bool
]  # told the share of a candidate that was fitted: whether there is time for the rest
Found = tuple[nn.Module, Floats]  # models, and held-out logits (n, C)
Show = Callable[[int, str], None]  # steps, text


@dataclass(frozen=True)
class Choice:
    """What was tried on a table: by candidate, the held-out loss in nats after
    calibration, and its weight.
    """

    losses: dict[str, float]
    weights: dict[str, float]
    mixture_loss: float  # with weights that were fitted to other folds

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"name": name, "loss": loss, "weight": self.weights[name]}
            for name, loss in self.losses.items()
        ]
        return {"candidates": rows, "mixture_loss": self.mixture_loss}


@dataclass(frozen=True)
class FittedTable:
    """A mixture, the weights (M,) of its particles, their held-out logits (M, n, C), of
    which samples, and why.
    """

    net: Mixture
    weights: Floats
    logits: Floats
    held: Split
    choice: Choice


def check_table(
    method: Method, config: TrainConfig, data: Dataset, single: bool
) -> None:
    """Raise where `config.backbone` cannot be fitted to these data."""
    what = f"setting backbone={config.backbone}"
    expect(
        data.kind == "features",
        f"{what} is for tables, but {data.name} has images: leave it out",
    )
    expect(
        method.mixes,
        f"{what} is for methods that mix, which this is not: use --method rf-dlc, or"
        " backbone=mlp",
    )
    expect(
        single,
        f"{what} is fitted by one process: leave torchrun out, or use backbone=mlp",
    )


def table_plan(data: Dataset, method: str, config: TrainConfig) -> dict[str, str]:
    """What is going to be fitted, on what and for which class prior, in words."""
    samples = ", ".join(f"{len(split):,} {name}" for name, split in data.splits.items())
    known = (
        f"{data.name}, {samples} samples, {data.input_shape[0]:,} features,"
        f" {len(data.classes)} classes"
    )
    once = data.val is not None or len(data.train) > MOST_FOLDED
    fits = (
        "one part of the samples is held out"
        if once
        else f"{FOLDS} folds, and all samples"
    )
    names = [
        *_candidates(data, config, bool(_skewed(data, config))),
        *_networks(data, config),
    ]
    most = f"; those for which {config.budget:g} s are enough" if config.budget else ""
    usual = resolve(
        method, data.name, {"backbone": config.backbone}, data.suits, len(data.train)
    )[1]
    decider = new_decider(method, config, data.classes)
    plan = {
        "data": known,
        "candidates": ", ".join(names) + most,
        "training": f"{fits}; weighed by held-out likelihood",
    }
    unused = unused_settings(data, config, usual)
    if unused:
        plan["ignored"] = f"{', '.join(unused)}: for networks; use backbone=mlp"
    plan["decisions"] = decider.model.decided_for.removeprefix("decided ")
    return plan


def unused_settings(
    data: Dataset, config: TrainConfig, usual: TrainConfig
) -> list[str]:
    """Settings of networks that differ from the usual ones, but have no effect: there
    are no networks.
    """
    if _networks(data, config):
        return []
    return [
        f"{name}={getattr(config, name)}"
        for name in OF_NETWORKS
        if getattr(config, name) != getattr(usual, name)
    ]


def fit_table(data: Dataset, method: Method, config: TrainConfig) -> FittedTable:
    """Fit all candidates of `config.backbone`, weigh them, and keep those that
    matter.
    """
    scale = Normaliser(
        data.normalisation, data.input_shape, torch.device("cpu"), torch.float32
    )
    samples, splits = _splits(data, config)
    x, held = (
        scale(torch.from_numpy(samples.array)).numpy(),
        samples.take(np.concatenate([h for _, h in splits])),
    )
    rows = [seen for seen, _ in splits] + (
        [np.arange(len(samples))] if len(splits) > 1 or config.refit else []
    )
    skewed = _skewed(data, config)
    log = signed_log(x[: len(data.train)], skewed) if skewed else None
    logged = x if log is None else log(torch.from_numpy(x)).numpy()
    given, networks = (samples, splits, rows), _networks(data, config)
    fits: dict[str, Callable[[Goes], Found | None]] = {
        name: partial(
            _fit_all, fit, logged if sees_logs(name) else x, config.seed, *given
        )
        for name, fit in _candidates(data, config, bool(skewed)).items()
    }
    efforts = {name: EFFORT[name.split("-")[0]] for name in fits} | dict.fromkeys(
        networks, len(rows)
    )
    steps = (sum(efforts[name] for name in fits) + len(networks) * config.epochs) * len(
        rows
    )
    given = replace(samples, inputs=logged), splits, rows
    fits |= {
        n: partial(_fit_networks, data, method, config.replace(**NETWORKS[n]), *given)
        for n in networks
    }
    limited = (
        f", at most {config.budget:g} s" if config.budget else ""
    )  # then nobody knows how many steps are left
    with live(None if limited else steps, f"Fitting {data.name}{limited}") as show:
        found = _in_time(fits, efforts, config.budget, show)
    if left := [name for name in fits if name not in found]:
        announce(f"left out   {', '.join(left)}: not within {config.budget:g} s")
    found = dict(sorted(found.items()))  # the order of particles, also in files
    scales = [
        _scale(name, logits, held, data.classes, config)
        for name, (_, logits) in found.items()
    ]
    scaled = [
        logits * slope + bias
        for (_, logits), (slope, bias) in zip(found.values(), scales, strict=True)
    ]
    calibrated = safe_log(softmax(np.array(scaled, dtype=np.float64)))  # (M, n, C)
    shares = _shares(data.classes, held, config)
    weights, power, mixture_loss = _choose(
        calibrated, held.labels, shares, [len(rows) for _, rows in splits]
    )
    likelihoods = calibrated[:, np.arange(len(held)), held.labels]
    losses, shown = (
        dict(zip(found, v.tolist(), strict=True))
        for v in (-likelihoods @ shares, weights)
    )
    choice = Choice(losses, shown, mixture_loss)
    kept = np.flatnonzero(weights)
    members = {name: found[name][0] for i, name in enumerate(found) if weights[i]}
    slope, bias = (
        torch.tensor(power * np.array([s[i] for s in scales])[kept]).float()
        for i in (0, 1)
    )
    seen = torch.from_numpy(x)
    training_range = TrainingRange(low=seen.amin(0), high=seen.amax(0))
    log = log if any(map(sees_logs, members)) else None
    net = Mixture(members, slope, bias, log, training_range)
    logits = safe_log(softmax(power * calibrated[kept])).astype(np.float32)
    return FittedTable(
        place(net, choose_device(config.device)), weights[kept], logits, held, choice
    )


def _in_time(
    fits: Mapping[str, Callable[[Goes], Found | None]],
    efforts: Mapping[str, int],
    budget: float,
    show: Show,
) -> dict[str, Found]:
    """The first candidate, and with a budget, in seconds, those others that end within
    it.

    None is begun whose first step, by its effort and the time that earlier ones took,
    would end too late.
    """
    start, done, found = time.monotonic(), 0, dict[str, Found]()
    ends = start + SAFETY * budget if budget else np.inf

    def goes(name: str, began: float, until: float, share: float) -> bool:
        nonlocal done
        done += efforts[name]
        show(0 if budget else efforts[name], name)
        return share == 1 or began + (time.monotonic() - began) / share <= until

    for name, fit in fits.items():
        began, until = time.monotonic(), ends if found else np.inf
        first = efforts[name] * (began - start) / max(done, 1)
        fitted = (
            fit(partial(goes, name, began, until)) if began + first < until else None
        )
        found |= {} if fitted is None else {name: fitted}
    return found


def _scale(
    name: str, logits: Floats, held: Split, classes: Classes, config: TrainConfig
) -> tuple[float, Floats]:
    """Slope and bias (C,) that calibrate a candidate and bring it to the class prior of
    the training data.
    """
    log_p, carried = (
        safe_log(softmax(logits)),
        carried_prior(config.replace(**NETWORKS.get(name, {})), classes),
    )
    with warnings.catch_warnings(
        action="ignore"
    ):  # an unusual temperature: the weights leave out bad candidates
        fitted = Temperature.fit(
            log_p, held.labels, sample_weight=held.weights, train_prior=carried
        )
    return 1 / fitted.temperature, np.log(carried_prior(config, classes)) - np.log(
        carried
    )


def _choose(
    log_p: Floats, labels: Indices, shares: Floats, sizes: Sequence[int]
) -> tuple[Floats, float, float]:
    """Weights (M,) from log p (M, n, C), their sum before it was one; and the loss if
    they are weighed by other folds.

    Members that err in different samples know more together than each alone: their sum
    is above one.
    """
    fold = (
        np.repeat(np.arange(len(sizes)), sizes)
        if len(sizes) > 1
        else np.arange(len(labels)) % FOLDS
    )
    loss = 0.0
    for inside in (fold == k for k in np.unique(fold)):
        others = _weights(
            log_p[:, ~inside], labels[~inside], shares[~inside] / shares[~inside].sum()
        )
        pooled = safe_log(softmax(np.tensordot(others, log_p[:, inside], axes=1)))
        loss -= float(pooled[np.arange(inside.sum()), labels[inside]] @ shares[inside])
    weights = _weights(log_p, labels, shares)
    weights = np.where(weights < SMALLEST * weights.sum(), 0, weights)
    return weights / weights.sum(), float(weights.sum()), loss


def _splits(data: Dataset, config: TrainConfig) -> tuple[Split, Splits]:
    """Samples, and for each fit the positions that it sees and those that it then
    predicts.
    """
    train, val = data.train, data.val
    if val is not None:
        joined = _joined(train, val)
        return joined, [(np.arange(len(train)), np.arange(len(train), len(joined)))]
    if len(train) > MOST_FOLDED:
        kept, held = train.hold_out(fraction := config.hold_out or 0.1, config.seed)
        for told in far_from_asked(
            train.labels, data.classes.names, train.groups, held, fraction
        ):
            announce(f"held-out   {told}")
        return train, [(kept, held)]
    fold = train.folds(FOLDS, config.seed)
    few = (
        f"{data.name}: no class has two samples (or groups), so none can be held out:"
        " use backbone=mlp"
    )
    expect((fold >= 0).any(), few)
    return train, [
        (np.flatnonzero(fold != k), np.flatnonzero(fold == k))
        for k in range(FOLDS)
        if (fold == k).any()
    ]


def _joined(train: Split, val: Split) -> Split:
    """Both, with ids and groups where both have them, and weights where one has."""
    grouped = train.groups is not None and val.groups is not None
    groups = np.concatenate([train.groups, val.groups]) if grouped else None
    ids = None if train.ids is None or val.ids is None else [*train.ids, *val.ids]
    both = [
        np.ones(len(split)) if split.weights is None else split.weights
        for split in (train, val)
    ]
    weights = (
        None if train.weights is None and val.weights is None else np.concatenate(both)
    )
    inputs, labels = (
        np.concatenate([train.array, val.array]),
        np.concatenate([train.labels, val.labels]),
    )
    return Split(inputs, labels, ids, groups, weights)


def _skewed(data: Dataset, config: TrainConfig) -> Parameters:
    """Logarithms of skewed features, which trees do not need."""
    if config.backbone == "trees":
        return {}
    scale = Normaliser(
        data.normalisation, data.input_shape, torch.device("cpu"), torch.float32
    )
    return find_skewed(
        scale(torch.from_numpy(data.train.array)).numpy(),
        scale(torch.zeros(data.input_shape)).numpy(),
    )


def _candidates(data: Dataset, config: TrainConfig, skewed: bool) -> dict[str, Fit]:
    """The quickest first. Where logits may be linear in `skewed` features, not in their
    logarithms, `linear-raw` is.
    """
    classes, samples, features = len(data.classes), len(data.train), data.input_shape[0]
    fits = 1 if data.val is not None or samples > MOST_FOLDED else FOLDS + 1
    size = (
        carried_prior(config, data.classes),
        max(MOST_VALUES // (2 * fits * TREES * classes), 32),
    )
    trees: dict[str, Fit] = {
        name: partial(_fit_forest, name, *size) for name in FORESTS
    }
    if fits * samples * features * classes < MOST_WORK:
        count = fits * ITERATIONS * (classes if classes > 2 else 1)
        seconds = count * (7e-4 + 3e-8 * samples * features)  # measured
        larger = LARGE_STEPS if seconds > BOOSTING_SECONDS and samples <= MEDIUM else {}
        trees["boosting"] = partial(_fit_boosting, larger, classes)
        if seconds < BOOSTING_SECONDS / 3 or samples > MEDIUM:
            trees["boosting-small"] = partial(_fit_boosting, SMALL_TREES, classes)
    if config.backbone == "trees":
        return trees
    found: dict[str, Fit] = {
        name: partial(_fit_linear, c, classes) for name, c in PENALTIES.items()
    }
    found |= {"linear-raw": partial(_fit_linear, 1.0, classes)} if skewed else {}
    if samples * features * (features + 3) // 2 * classes <= MOST_PRODUCTS:
        trees["quadratic"] = partial(_fit_quadratic, classes)
    decays = {"perceptron": 1e-4} | (
        {"perceptron-smooth": 1.0} if samples <= SMALL else {}
    )
    return (
        found
        | trees
        | {
            n: partial(_fit_perceptron, d, classes)
            for n, d in decays.items()
            if samples <= LARGE
        }
    )


def _networks(data: Dataset, config: TrainConfig) -> list[str]:
    """Stacks of networks, which small tables do not repay."""
    return (
        list(NETWORKS)
        if config.backbone == "mixture" and len(data.train) > MEDIUM
        else []
    )


def _fit_all(
    fit: Fit,
    x: Floats,
    seed: int,
    samples: Split,
    splits: Splits,
    rows: Sequence[Indices],
    goes: Goes,
) -> Found | None:
    """A model per split, and one of all samples where several models are averaged; None
    if there is no time.
    """
    models, logits = list[Any](), []
    for number, seen in enumerate(rows):
        weights = None if samples.weights is None else samples.weights[seen]
        with (
            warnings.catch_warnings(action="ignore"),
            threadpool_limits(1 if x.size <= ALONE else None),
        ):
            models.append(
                fit(x[seen], samples.labels[seen], weights, seed + number)
            )  # weighed also if not converged
        if not goes((number + 1) / len(rows)):
            return None
    for model, (_, held) in zip(models, splits, strict=False):
        with torch.no_grad():
            pieces = [
                model(torch.from_numpy(x[some]))[0]
                for some in np.array_split(held, -(-len(held) // ROWS))
            ]
        logits.append(torch.cat(pieces).numpy())
    return type(models[0]).joined(models), np.concatenate(logits)


def _fit_forest(
    name: str, prior: Any, leaves: int, x: Floats, y: Indices, weights: Any, seed: int
) -> nn.Module:
    from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier

    kind = ExtraTreesClassifier if name == "forest-extra" else RandomForestClassifier
    given = {
        "max_depth": DEEPEST,
        "max_leaf_nodes": leaves,
        "random_state": seed,
        "n_jobs": -1,
        **FORESTS[name],
    }
    return mixture.forest(kind(TREES, **given).fit(x, y, weights), prior)


def _fit_boosting(
    settings: dict[str, Any],
    classes: int,
    x: Floats,
    y: Indices,
    weights: Any,
    seed: int,
) -> nn.Module:
    from sklearn.ensemble import HistGradientBoostingClassifier

    given = {
        "max_iter": ITERATIONS,
        "early_stopping": False,
        "random_state": seed,
        **settings,
    }
    return mixture.boosting(
        HistGradientBoostingClassifier(**given).fit(x, y, weights), classes
    )


def _fit_linear(
    c: float, classes: int, x: Floats, y: Indices, weights: Any, seed: int
) -> nn.Module:
    from sklearn.linear_model import LogisticRegression

    return mixture.linear(
        LogisticRegression(C=c, max_iter=300).fit(x, y, weights), classes
    )


def _fit_quadratic(
    classes: int, x: Floats, y: Indices, weights: Any, seed: int
) -> nn.Module:
    from sklearn.linear_model import LogisticRegression

    wide = mixture.products(torch.from_numpy(x)).numpy().astype(np.float64)
    spread = wide.std(axis=0)
    scale = np.where(
        spread > 1e-6, spread, np.inf
    )  # what is constant here gets no weight
    return mixture.quadratic(
        LogisticRegression(max_iter=300).fit(wide / scale, y, weights), scale, classes
    )


def _fit_perceptron(
    decay: float, classes: int, x: Floats, y: Indices, weights: Any, seed: int
) -> nn.Module:
    from sklearn.neural_network import MLPClassifier

    if (
        weights is not None
        # rows as often as they weigh, all classes at least once: old releases take no
        # weights
    ):
        often = np.searchsorted(
            np.cumsum(weights), (np.arange(len(y)) + 0.5) / len(y) * weights.sum()
        )
        rows = np.concatenate([often, np.unique(y, return_index=True)[1]])
        x, y = x[rows], y[rows]
    return mixture.perceptron(
        MLPClassifier(alpha=decay, random_state=seed).fit(x, y), classes
    )


def _fit_networks(
    data: Dataset,
    method: Method,
    config: TrainConfig,
    samples: Split,
    splits: Splits,
    rows: Sequence[Indices],
    goes: Goes,
) -> Found | None:
    """One stack of networks, one per split and one of all; the samples of each are as
    many, some of them twice.
    """
    device = choose_device(config.device)
    size, seeds = max(map(len, rows)), [config.seed + k for k in range(len(rows))]
    classes = [
        Classes.from_labels(samples.labels[own], data.classes.names) for own in rows
    ]
    runs = [
        (method, config.replace(seed=seed), own)
        for seed, own in zip(seeds, classes, strict=True)
    ]
    net = place(
        method_net(method, config, data.input_shape, data.classes, seeds), device
    )
    fitted = replace(
        data, train=samples, val=None, test=None, normalisation=None
    )  # samples are standardised
    positions = [np.resize(own, size) for own in rows]
    stages = [
        PreparedStage(number, runs, fitted, device, positions=positions)
        for number in range(len(method.stages))
    ]
    with sensible_threads(net, config):
        for number, _ in enumerate(epochs(net, stages, {}), 1):
            if not goes(number / stages[-1].end):
                return None
    logits = []
    for run, (_, held) in enumerate(splits):
        found = split_outputs(net, samples.take(held), None, config, device)[0]
        assert found is not None  # one process
        logits.append(safe_log(softmax(found[run].numpy()).mean(0)))  # of (M, n, C)
    return Networks(net.requires_grad_(False)), np.concatenate(logits)


def _shares(classes: Classes, held: Split, config: TrainConfig) -> Floats:
    """How much each held-out sample counts: as under the class prior that is decided
    for; they sum to one.
    """
    shares = np.ones(len(held)) if held.weights is None else held.weights
    if config.target_prior not in ("train", "scores"):
        frequency = np.bincount(held.labels, shares, minlength=len(classes))
        target = as_prior(config.target_prior, classes, "target_prior")
        shares = shares * (target / np.maximum(frequency, 1e-12))[held.labels]
    return shares / shares.sum()


def _weights(log_p: Floats, labels: Indices, shares: Floats) -> Floats:
    """Weights (M,) of highest likelihood of the product of powers of p, from log p (M,
    n, C); shrunk to equal ones.

    The prior knows as much as so many samples do (a unit information prior): also where
    all members are nearly certain.
    """
    members, rows, equal = len(log_p), np.arange(len(labels)), 1 / len(log_p)
    true, p = log_p[:, rows, labels], softmax(log_p.mean(axis=0))
    means, flat = np.einsum("mnc,nc->mn", log_p, p), log_p.reshape(members, -1)
    information = (flat * (p * shares[:, None]).ravel()) @ flat.T - (
        means * shares
    ) @ means.T  # of equal weights
    penalty = (
        PRIOR_SAMPLES
        * float(shares @ shares)
        * (information + RIDGE * members * np.eye(members))
    )

    def loss(weights: Floats) -> tuple[float, Floats]:
        p = softmax(np.tensordot(weights, log_p, axes=1))
        away = weights - equal
        slope = (
            np.tensordot(log_p, p * shares[:, None], axes=([1, 2], [0, 1]))
            - true @ shares
            + penalty @ away
        )
        value = -float(np.log(np.maximum(p[rows, labels], 1e-300)) @ shares)
        return value + float(away @ penalty @ away) / 2, slope

    bounds = [(0.0, None)] * members
    found: Floats = minimize(
        loss, np.full(members, equal), jac=True, method="L-BFGS-B", bounds=bounds
    ).x
    return (
        found if found.any() else np.full(members, equal)
    )  # none is better than chance, and none is preferred
