"""One step of a stack of 3 MLPs (64-256-10, batch 256) takes at most half of the time
of three separate modules.

    python benchmarks/cpu_step.py        writes benchmarks/results/cpu_step.csv

The separate modules are plain nn.Sequential with torch.optim.SGD, each stepping alone
on the same batch. They compute the same networks: they start from the stack's weights,
and after some steps they must have the same ones. The two take turns in one run; the
ratio is the median over the turns. The stack has the threads that the library chooses;
the modules have one or all, whichever is faster for them.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from recording import write
from rfdlc import Classes
from rfdlc.training.building import method_net, sensible_threads
from rfdlc.training.config import TrainConfig
from rfdlc.training.execution import Execution
from rfdlc.training.factories import integrated_gain
from rfdlc.training.losses import RunLosses
from rfdlc.training.methods import METHODS
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.step import Step

NETWORKS, INPUTS, HIDDEN, CLASSES, BATCH = 3, 64, 256, 10, 256
STEPS, TURNS, RATE = 50, 15, 0.01


class NormedLinear(nn.Module):
    """A cosine head as it is usually written (Cao et al. 2019)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.weight = scale, nn.Parameter(torch.empty(HIDDEN, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * functional.normalize(x, dim=1).mm(
            functional.normalize(self.weight, dim=0)
        )


def weights(net: ParticleNet, number: int, module: nn.Module) -> list[Tensor]:
    """The weights of one network of the stack, in the shapes of a module's
    parameters.
    """
    stacked = [weight.detach()[number] for weight in net.parameters()]
    pairs = zip(stacked, module.parameters(), strict=True)
    return [
        own if own.shape == like.shape else own.T if like.ndim == 2 else own[0]
        for own, like in pairs
    ]


def separate(settings: TrainConfig, net: ParticleNet, number: int) -> nn.Sequential:
    """Network `number` of the stack as a module of its own."""
    head = (
        NormedLinear(settings.head_scale)
        if settings.head == "cosine"
        else nn.Linear(HIDDEN, CLASSES)
    )
    module = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), head
    )
    with torch.no_grad():
        for parameter, weight in zip(
            module.parameters(), weights(net, number, module), strict=True
        ):
            parameter.copy_(weight)
    return module


def stepper(
    settings: TrainConfig, batch: tuple[Tensor, Tensor]
) -> tuple[Callable[[], None], ParticleNet]:
    """The library's step, and the stack that it trains."""
    classes = Classes.from_counts([1] * CLASSES)
    net = method_net(METHODS["rf-dlc"], settings, (INPUTS,), classes, (0,))
    losses = RunLosses([integrated_gain(settings, classes, None)])
    step = Step(net, losses, settings)
    execution = Execution(step)
    step.begin_epoch(1, RATE)
    inputs, targets, mix = batch[0][None], batch[1][None], torch.ones(1, 3)
    return lambda: execution(inputs, targets, mix), net


def separate_stepper(
    settings: TrainConfig, net: ParticleNet, batch: tuple[Tensor, Tensor]
) -> tuple[Callable[[], None], list[nn.Sequential]]:
    """Three modules that step one after the other."""
    modules = [separate(settings, net, number) for number in range(NETWORKS)]
    momentum, decay = settings.momentum, settings.weight_decay
    optimisers = [
        torch.optim.SGD(m.parameters(), RATE, momentum, 0, decay, nesterov=True)
        for m in modules
    ]

    def steps() -> None:
        for module, optimiser in zip(modules, optimisers, strict=True):
            optimiser.zero_grad()
            loss = (
                functional.cross_entropy(module(batch[0]), batch[1]) / NETWORKS
            )  # the objective is a mean
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return steps, modules


def seconds(steps: Callable[[], None], threads: int) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    for _ in range(STEPS):
        steps()
    return (time.perf_counter() - start) / STEPS


def rows() -> Iterator[dict[str, object]]:
    cores = os.cpu_count() or 1
    for head in ("cosine", "linear"):
        settings = TrainConfig(
            backbone="mlp",
            widths=(HIDDEN,),
            particles=NETWORKS,
            batch_size=BATCH,
            head=head,
        )
        torch.manual_seed(0)
        batch = torch.randn(BATCH, INPUTS), torch.randint(CLASSES, (BATCH,))
        ours, net = stepper(settings, batch)
        theirs, modules = separate_stepper(settings, net, batch)
        for _ in range(5):
            ours()
            theirs()
        for number, module in enumerate(modules):
            pairs = zip(weights(net, number, module), module.parameters(), strict=True)
            assert all(
                torch.allclose(mine, other, atol=1e-4) for mine, other in pairs
            ), "not the same networks"
        torch.set_num_threads(cores)
        with sensible_threads(net, settings):
            threads = torch.get_num_threads()
        turns = []
        for _ in range(TURNS):
            mine = seconds(ours, threads)
            turns.append((mine, min(seconds(theirs, each) for each in {1, cores})))
        mine, reference = (
            statistics.median(times) for times in zip(*turns, strict=True)
        )
        ratio = statistics.median(other / own for own, other in turns)
        yield {
            "what": (
                f"step of {NETWORKS} MLPs {INPUTS}-{HIDDEN}-{CLASSES}, {head} head,"
                f" batch {BATCH}"
            ),
            "value": f"{1e3 * mine:.2f}",
            "unit": "ms",
            "reference": f"separate modules: {1e3 * reference:.2f} ms",
            "ratio": f"{ratio:.2f}",
            "required": ">= 2",
        }


if __name__ == "__main__":
    print(write("cpu_step", rows(), ("rfdlc", "torch")))
