"""Training of networks on arrays in memory, with the settings, objective and loop of `rfdlc train`.

Results are plain arrays by name; networks are built from them when they are needed.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
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
from rfdlc.training.assembly import build_net, build_stages, choose_device, place, sensible_threads
from rfdlc.training.config import TrainConfig
from rfdlc.training.heldout import carries_uniform
from rfdlc.training.loop import epochs, optimiser_state
from rfdlc.training.losses.terms import WEIGHT_FORMS
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.networks.particles import ParticleNet

METHOD = "rf-dlc"
WEIGHTINGS = ("prior", "none", *(form for form in WEIGHT_FORMS if form != "constant"))

Arrays = Mapping[str, NDArray[Any]]
HeldOutLoss = Callable[[Floats], float]  # of particle logits (M, N, C)


@dataclass(frozen=True)
class Trained:
    """Result of a training: weights and optimizer state by name, and the losses of each epoch."""

    weights: Arrays
    state: Arrays
    losses: list[float]
    held_out_losses: list[float]


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


def with_held_out(data: Dataset, settings: TrainConfig) -> Dataset:
    """With samples held out, if wanted and if some class has two samples."""
    if not settings.hold_out:
        return data
    if data.classes.count_array.max() < 2:
        warnings.warn("no class has two samples, so none can be held out: not calibrated", stacklevel=3)
        return data
    return data.hold_out(settings.hold_out, seed=settings.seed)


def held_out_loss(decider: Decider, held: Split) -> HeldOutLoss:
    """Negative log-likelihood of held-out samples; classes weigh the same if the networks train for a uniform prior."""
    y = held.labels
    weights = np.ones(len(y)) if held.weights is None else held.weights
    if carries_uniform(decider):
        weights = weights / np.bincount(y, weights)[y]

    def loss(logits: Floats) -> float:
        p = np.asarray(decider.probabilities(logits, logits=True))
        return float(np.average(nll(p[np.arange(len(y)), y]), weights=weights))

    return loss


def train_particles(
    data: Dataset,
    settings: TrainConfig,
    *,
    start: Arrays | None = None,
    held_out_loss: HeldOutLoss | None = None,
    patience: int = 0,
) -> Trained:
    """Train on `data.train` for all epochs or, with `patience`, until the loss on `data.val` stops falling.

    Training starts from the weights `start`, if given. With `held_out_loss` the weights of the best epoch are kept.
    """
    device = choose_device(settings.device)
    net = _network(settings, data.input_shape, len(data.classes), device, start)
    parts = build_stages(METHODS[METHOD], settings, weighted(data), (settings.seed,), device)
    losses: list[float] = []
    held: list[float] = []
    best: Arrays | None = None
    with _own_random_numbers(device), sensible_threads(net, settings):
        for epoch in epochs(net, parts, {}):
            losses.append(epoch.losses[0])
            if held_out_loss is None or data.val is None:
                continue
            held.append(held_out_loss(_logits(net, data.val.array, data.normalisation)))
            best = _arrays(net.state_dict()) if held[-1] == min(held) else best
            if len(held) - 1 - int(np.argmin(held)) >= patience:
                break
    return Trained(best or _arrays(net.state_dict()), {}, losses, held)


def continue_particles(data: Dataset, settings: TrainConfig, before: Trained | None) -> Trained:
    """One more pass over `data.train` at a constant learning rate, with the optimizer state of the previous passes."""
    device = choose_device(settings.device)
    done = len(before.losses) if before is not None and before.state else 0  # after `fit` it starts again
    net = _network(settings, data.input_shape, len(data.classes), device, None if before is None else before.weights)
    steady = settings.replace(schedule="constant", warmup=0, epochs=done + 1)
    parts = build_stages(METHODS[METHOD], steady, weighted(data), (settings.seed,), device)
    state = {name: torch.tensor(array) for name, array in (before.state if before else {}).items()}
    with _own_random_numbers(device), sensible_threads(net, steady):
        (epoch,) = epochs(net, parts, state, done)
        kept = _arrays(optimiser_state(epoch.step))
    return Trained(_arrays(net.state_dict()), kept, [*(before.losses if before else []), epoch.losses[0]], [])


def particle_logits(
    weights: Arrays,
    settings: TrainConfig,
    inputs: NDArray[np.float32],
    classes: int,
    normalisation: Normalisation | None,
) -> Floats:
    """Particle logits (M, N, C) of features (N, F) by trained weights."""
    device = choose_device(settings.device)
    net = _network(settings, inputs.shape[1:], classes, device, weights)
    return _logits(net, inputs, normalisation)


def _network(
    settings: TrainConfig, shape: tuple[int, ...], classes: int, device: torch.device, weights: Arrays | None
) -> ParticleNet:
    net = build_net(settings, shape, classes, (settings.seed,))
    if weights is not None:
        net.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return place(net, device)


@torch.no_grad()
def _logits(net: ParticleNet, inputs: NDArray[np.float32], normalisation: Normalisation | None) -> Floats:
    """In double precision: a sample's prediction must not depend on the others in its batch."""
    exact = deepcopy(net).double().eval()
    device = exact.head.weight.device
    bare = Split(inputs, np.zeros(len(inputs), dtype=np.int64))
    loader = ResidentLoader(bare, normalisation, batch_size=4096, device=device, dtype=torch.float64)
    return torch.cat([exact(batch[None])[0] for batch, _ in loader.in_order()], dim=1).cpu().numpy()


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """The loop seeds torch's global generator; the caller's state is restored afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
