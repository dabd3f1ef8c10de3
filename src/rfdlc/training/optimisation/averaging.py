"""What is done with weights between steps: their mean over epochs, draws around it, heads made anew or normalised."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.func import functional_call

from rfdlc.data.sampling import seeded
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.stack import reset

COLLECTED_FROM = 0.75  # share of a stage's epochs after which weights are averaged (Izmailov et al. 2018)
DRAWN_WEIGHTS = 3  # a stream of random numbers beside those of order, augmentation and mixing


class EpochMean:
    """Mean and mean square of weights at the ends of epochs: SWA, and SWAG with a diagonal covariance.

    Izmailov et al. 2018; Maddox et al. 2019. `state` is what a checkpoint keeps.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.state = {
            "mean": [torch.zeros_like(w) for w in weights],
            "square": [torch.zeros_like(w) for w in weights],
            "collected": [torch.zeros((), device=weights[0].device)],
        }

    @torch.no_grad()
    def collect(self) -> None:
        """Take the weights as they are now into the mean."""
        (count,) = self.state["collected"]
        count += 1
        for weight, mean, square in zip(self.weights, self.state["mean"], self.state["square"], strict=True):
            mean += (weight - mean) / count
            square += (weight**2 - square) / count

    @torch.no_grad()
    def settle(self) -> list[Tensor]:
        """Put the mean in the weights' place; their standard deviations over the epochs."""
        deviations = []
        for weight, mean, square in zip(self.weights, self.state["mean"], self.state["square"], strict=True):
            weight.copy_(mean)
            deviations.append((square - mean**2).clamp(min=0).sqrt())
        return deviations


class DrawnNetworks:
    """S networks whose body is drawn around a network's own, with that network's head: stochastic representations.

    Drawn anew each epoch from (seed, epoch), so that nothing but the deviations must be kept.
    """

    def __init__(self, net: ParticleNet, deviations: Sequence[Tensor], samples: int) -> None:
        self.net, self.samples = net, samples
        self.body = {name: p for name, p in net.named_parameters() if name.startswith(("trunk.", "branches."))}
        known = list(deviations)[: len(self.body)] or [torch.zeros_like(p) for p in self.body.values()]
        self.deviations = known
        self.drawn = [{name: p.detach().clone() for name, p in self.body.items()} for _ in range(samples)]

    @torch.no_grad()
    def draw(self, epoch: int) -> None:
        """mean + deviation * noise, in place: a captured step reads the same memory."""
        for number, weights in enumerate(self.drawn):
            place = epoch * self.samples + number
            generators = [seeded(DRAWN_WEIGHTS, seed, place) for seed in self.net.seeds]
            for (name, mean), deviation in zip(self.body.items(), self.deviations, strict=True):
                shape = mean.chunk(self.net.runs)[0].shape
                noise = torch.cat([torch.randn(shape, generator=generator) for generator in generators])
                weights[name].copy_(mean + deviation * noise.to(mean))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits of the network, then of the drawn ones: (R, M + S*M, B, C)."""
        others = [functional_call(self.net, weights, (inputs,)) for weights in self.drawn]
        return torch.cat([self.net(inputs), *others], 1)


@torch.no_grad()
def draw_head(net: ParticleNet) -> None:
    """New weights for the head, of every run by its own seed; drawn on the CPU, wherever the network is."""
    fresh = deepcopy(net.head).cpu()
    reset(fresh, net.seeds)
    net.head.load_state_dict(fresh.state_dict())


@torch.no_grad()
def normalise_head(net: ParticleNet, tau: float) -> None:
    """w_c / |w_c|^tau for every class, and no bias (Kang et al. 2020): frequent classes lose their long weights."""
    net.head.weight.div_(net.head.weight.norm(dim=1, keepdim=True) ** tau)
    for name, bias in net.head.named_parameters():
        if name == "bias":
            bias.zero_()
