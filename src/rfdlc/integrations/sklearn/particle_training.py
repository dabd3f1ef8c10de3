"""Training of networks on arrays in memory, with the settings, objective and loop of `rfdlc train`.

Results are plain arrays by name; networks are built from them when they are needed.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
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
HeldOutLoss = Callable[[Floats], float]  # of particle logits (M, N, C)


@dataclass(frozen=True)
class Trained:
    """Result of a training: weights and optimizer state by name, and the losses of each epoch."""

    weights: Arrays = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)
    losses: Sequence[float] = ()
    held_out_losses: Sequence[float] = ()


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


def held_out_loss(decider: Decider, held: Split) -> HeldOutLoss:
    """Negative log-likelihood of held-out samples; classes weigh the same if the networks train for a uniform prior."""
    y, decider = held.labels, decider.replace(target_prior=None)
    weights = np.ones(len(y)) if held.weights is None else held.weights
    if decider.train_prior is not None and np.ptp(decider.train_prior) < 1e-9:
        weights = weights / np.bincount(y, weights)[y]

    def loss(logits: Floats) -> float:
        p = np.asarray(decider.probabilities(logits, logits=True))
        return float(np.average(nll(p[np.arange(len(y)), y]), weights=weights))

    return loss


def train_particles(
    data: Dataset,
    config: TrainConfig,
    before: Trained,
    held_out_loss: HeldOutLoss | None = None,
    patience: int = 0,
    keep_state: bool = False,
) -> Trained:
    """Train on `data.train` until the last epoch or, with `held_out_loss`, until the loss on `data.val` stops falling.

    Training starts from the weights `before`, if there are any, and continues its epochs if there is optimizer state.
    """
    device, done = choose_device(config.device), len(before.losses) if before.state else 0
    net = _network(config, data.input_shape, len(data.classes), device, before.weights)
    stages = build_stages(METHODS[METHOD], config, weighted(data), (config.seed,), device)
    state = {name: torch.tensor(array) for name, array in before.state.items()}
    losses, held, best = list(before.losses), [], None
    with sensible_threads(net, config):
        for epoch in epochs(net, stages, state, done):
            losses.append(epoch.losses[0])
            if held_out_loss is not None and data.val is not None:
                held.append(held_out_loss(_logits(net, data.val.array, data.normalisation)))
                best = _arrays(net.state_dict()) if held[-1] == min(held) else best
                if len(held) - 1 - int(np.argmin(held)) >= patience:
                    break
    kept = _arrays(epoch.state) if keep_state else {}
    return Trained(best or _arrays(net.state_dict()), kept, losses, held)


def particle_logits(
    weights: Arrays, config: TrainConfig, inputs: Floats, classes: int, normalisation: Normalisation | None
) -> Floats:
    """Particle logits (M, N, C) of features (N, F) by trained weights."""
    net = _network(config, inputs.shape[1:], classes, choose_device(config.device), weights)
    return _logits(net, inputs, normalisation)


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
