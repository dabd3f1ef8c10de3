"""Training of networks on arrays in memory, with the settings, objective and loop of `rfdlc train`.

Weights and optimizer state are plain arrays by name; networks are built from them when they are needed.
"""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc.data.dataset import Dataset, Normalisation, Split
from rfdlc.data.loader import ResidentLoader
from rfdlc.decide.classes import Classes
from rfdlc.decide.decider import Decider
from rfdlc.decide.metrics import nll
from rfdlc.decide.scores import Floats
from rfdlc.training.assembly import build_net, build_stages, choose_device, sensible_threads
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import epochs
from rfdlc.training.losses.terms import WEIGHT_FORMS
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.networks.particles import ParticleNet, place

METHOD = "rf-dlc"
WEIGHTINGS = ("prior", "none", *(form for form in WEIGHT_FORMS if form != "constant"))

Arrays = Mapping[str, NDArray[Any]]


def table_settings(samples: int, weighting: str, **changes: Any) -> TrainConfig:
    """The settings of `rfdlc train` for a table with this many rows and this class weighting."""
    tau = (1.0,) if weighting == "prior" else ()
    form = "constant" if weighting in ("prior", "none") else weighting
    return resolve(METHOD, "", {"prior_tau": tau, "weights": form, **changes}, "features", samples)[1]


def weighted(data: Dataset) -> Dataset:
    """The data with classes counted by sample weight, for the objective."""
    if data.train.weights is None:
        return data
    share = data.train.weights / data.train.weights.mean()
    counts = np.bincount(data.train.labels, share, minlength=len(data.classes))
    return replace(data, classes=Classes.from_counts(np.maximum(1, np.rint(counts)), data.classes.names))


def with_held_out(data: Dataset, config: TrainConfig) -> Dataset:
    """With samples held out, if wanted and if some class has two samples."""
    if not config.hold_out:
        return data
    if data.classes.count_array.max() < 2:
        warnings.warn("no class has two samples, so none can be held out: not calibrated", stacklevel=3)
        return data
    return data.hold_out(config.hold_out, seed=config.seed)


def train_particles(
    data: Dataset, config: TrainConfig, weights: Arrays, state: Arrays, done: int = 0, *,
    stop_by: Decider | None = None, patience: int = 0,
) -> tuple[Arrays, Arrays, list[float], list[float]]:  # fmt: skip
    """Train on `data.train`, from `weights` if there are any, and from optimizer `state` after `done` epochs.

    With `stop_by`, training ends if the loss of its probabilities on `data.val` has not fallen for `patience` epochs,
    and the weights are those of the best epoch. Returns weights, optimizer state, and the training and held-out losses
    of the epochs.
    """
    device = choose_device(config.device)
    net = _network(config, data.input_shape, len(data.classes), device, weights)
    stages = build_stages(METHODS[METHOD], config, weighted(data), (config.seed,), device)
    losses, held, best = list[float](), list[float](), None
    with sensible_threads(net, config):
        for epoch in epochs(net, stages, {name: torch.tensor(array) for name, array in state.items()}, done):
            losses.append(epoch.losses[0])
            if stop_by is not None and data.val is not None:
                held.append(_held_out_loss(stop_by, data.val, _logits(net, data.val.array, data.normalisation)))
                best = _arrays(net.state_dict()) if held[-1] == min(held) else best
                if len(held) - 1 - int(np.argmin(held)) >= patience:
                    break
    return best or _arrays(net.state_dict()), _arrays(epoch.state), losses, held


def particle_logits(
    weights: Arrays, config: TrainConfig, inputs: Floats, classes: int, normalisation: Normalisation | None
) -> Floats:
    """Particle logits (M, N, C) of features (N, F) by trained weights."""
    net = _network(config, inputs.shape[1:], classes, choose_device(config.device), weights)
    return _logits(net, inputs, normalisation)


def _held_out_loss(decider: Decider, held: Split, logits: Floats) -> float:
    """Negative log-likelihood; classes weigh the same if the networks train for a uniform prior."""
    y = held.labels
    weights = np.ones(len(y)) if held.weights is None else held.weights
    if decider.train_prior is not None and np.ptp(decider.train_prior) < 1e-9:
        weights = weights / np.bincount(y, weights)[y]
    p = np.asarray(decider.replace(target_prior=None).probabilities(logits, logits=True))
    return float(np.average(nll(p[np.arange(len(y)), y]), weights=weights))


def _network(
    config: TrainConfig, shape: tuple[int, ...], classes: int, device: torch.device, weights: Arrays
) -> ParticleNet:
    net = build_net(config, shape, classes, (config.seed,))
    if weights:
        net.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return place(net, device)


@torch.no_grad()
def _logits(net: ParticleNet, inputs: Floats, normalisation: Normalisation | None) -> Floats:
    """In double precision: a sample's prediction must not depend on the others in its batch."""
    exact = deepcopy(net).double().eval()
    device = exact.head.weight.device
    bare = Split(inputs, np.zeros(len(inputs), dtype=np.int64))
    loader = ResidentLoader(bare, normalisation, batch_size=4096, device=device, dtype=torch.float64)
    return torch.cat([exact(batch[None])[0] for batch, _ in loader.in_order()], dim=1).cpu().numpy()


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}
