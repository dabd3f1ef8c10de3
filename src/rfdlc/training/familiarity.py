"""How far samples are from the training data, by what the networks compute from them.

Samples of other classes show in the last features (`FeatureDistance`), images of
another kind in the first stages: by the means and standard deviations of channels over
the image.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.decisions.unfamiliar import FeatureDistance, deviation, quantile, whitening
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats
from rfdlc.training.networks.particles import ParticleNet

FILE = "familiarity.safetensors"
STAGES = 3
MOST = 10_000  # training samples that are looked at
# weight of the first stages: s on new samples is up to five times that on training
# samples
FAR = 5.0
USUAL = 0.98  # the share of training samples for which the first stages add nothing
SHRUNK = 0.01  # correlations of the first stages, to the identity
LEAST = 0.01  # of the mean standard deviation: channels that hardly change count less


class Familiarity(nn.Module):
    """The unfamiliarity (B,) of samples, from features (M, B, F) and statistics of the
    first stages (B, S).

    mean_m d_m / s + 5 max(0, (e - t) / w). d_m is the `FeatureDistance` of particle m,
    s the standard deviation of the first term on training samples. e is the squared
    Mahalanobis distance of the statistics. It exceeds t for 2% of the training samples,
    and by w in the mean, each half of them by a fit to the other; classes count
    equally.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()
        for name, values in tensors.items():
            self.register_buffer(name, torch.as_tensor(values, dtype=torch.float32))

    @classmethod
    def fit(cls, features: Floats, first: Floats, labels: Indices) -> "Familiarity":
        """From training samples, in 64 bits."""
        weights, each = (
            1 / np.bincount(labels)[labels],
            [FeatureDistance.fit(own, labels) for own in features],
        )
        tensors = {
            name: np.stack([getattr(own, name) for own in each])
            for name in vars(each[0])
        }
        near = np.mean(
            [measure(own) for measure, own in zip(each, features, strict=True)], axis=0
        )
        tensors["middle"], tensors["white"] = _fitted(first)
        halves, far = np.arange(len(first)) % 2 == 0, np.empty(len(first))
        for half in (halves, ~halves):
            middle, white = _fitted(first[~half])
            far[half] = (((first[half] - middle) @ white) ** 2).sum(axis=1)
        usual = quantile(far, weights, USUAL)
        above = far > usual
        beyond = (
            np.average(far[above] - usual, weights=weights[above])
            if above.any()
            else 1.0
        )
        return cls({**tensors, "scales": [deviation(near, weights), usual, beyond]})

    def forward(self, features: Tensor, first: Tensor) -> Tensor:
        own: Any = self  # its buffers
        x = functional.normalize(features, dim=-1)
        white = x @ own.within
        squares = (
            white.square().sum(-1, keepdim=True)
            - 2 * white @ own.means.mT
            + own.means.square().sum(-1)[:, None]
        )
        nearest = (squares - own.excess[:, None]).amin(-1)
        near = (
            nearest - (x @ own.overall - own.centre[:, None]).square().sum(-1)
        ).mean(0)
        far = ((first - own.middle) @ own.white).square().sum(-1)
        found: Tensor = near / own.scales[0] + FAR * (
            (far - own.scales[1]) / own.scales[2]
        ).clamp(min=0)
        return found


def _fitted(x: Floats) -> tuple[Floats, Floats]:
    """Mean, and what makes x - mean white."""
    scale = x.std(axis=0)
    scale = np.maximum(scale, LEAST * scale.mean() + 1e-12)
    return (
        x.mean(axis=0),
        whitening((x - x.mean(axis=0)) / scale, SHRUNK) / scale[:, None],
    )


@contextmanager
def first_stages(net: ParticleNet) -> Iterator[Callable[[Tensor], Tensor]]:
    """A function of a batch that was just computed: statistics of channels (B, S) in
    stages of the first network.
    """
    parts = net.single or [net.trunk, net.branches]
    counts = [1, 1] if net.single else [net.runs, net.runs * net.particles]
    stages = [
        (stage, count)
        for part, count in zip(parts, counts, strict=True)
        for stage in part
    ][:STAGES]
    outputs: dict[int, Tensor] = {}

    def keep(
        number: int, count: int, stage: nn.Module, inputs: Any, output: Tensor
    ) -> None:
        outputs.setdefault(
            number, net.layout.unfold(output, count)[0]
        )  # networks may be computed one after another

    def statistics(inputs: Tensor) -> Tensor:
        found = [
            inputs.new_zeros(inputs.shape[0], 1, dtype=torch.float32)
        ]  # where there are no others
        for output in (outputs.pop(number).float() for number in sorted(outputs)):
            output = output[: inputs.shape[0]]  # other views follow
            pixels = output.flatten(2) if output.ndim == 4 else output.mT
            found += (
                [pixels.mean(-1), pixels.std(-1, correction=0)]
                if output.ndim > 2
                else []
            )
        return torch.cat(found, 1)

    hooks = [
        stage.register_forward_hook(partial(keep, i, count))
        for i, (stage, count) in enumerate(stages)
    ]
    try:
        yield statistics
    finally:
        for hook in hooks:
            hook.remove()
