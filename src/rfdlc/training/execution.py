"""How the steps of a stage are executed: eagerly, through fused stages, compiled, or
captured as a CUDA graph.

A graph belongs to one shape of batch: the shorter last batch of an epoch has a graph of
its own.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rfdlc.data.loader import capture
from rfdlc.training.networks.fused.stages import kernels
from rfdlc.training.step import Step

WORTH_CAPTURING, WORTH_FUSING, WORTH_SEARCHING = (
    200,
    2000,
    10_000,
)  # steps after which the warm-up of each has paid


class Execution:
    """A step made fast: call it with a batch. `steps` is about how often it will be
    called.
    """

    capturing = True  # off for debugging and comparison

    def __init__(self, step: Step, steps: int = WORTH_FUSING) -> None:
        self.step = step
        net, settings, processes, on_gpu = (
            step.net,
            step.settings,
            step.processes,
            step.device.type == "cuda",
        )
        synchronised = (
            settings.batch_norm == "sync" and not processes.single
        )  # inside of the networks, layer by layer
        net.fused = (
            net.fusable
            and not net.single
            and steps >= WORTH_FUSING
            and not synchronised
        )
        if (
            settings.compile
            and on_gpu
            and step.stage.trains == "all"
            and not net.fused
            and not synchronised
        ):
            # for full micro-batches alone: compiling another shape costs more than it
            # saves
            full = -(
                -settings.batch_size // processes.world_size // settings.accumulate
            )
            eager, compiled = step.forward, torch.compile(step.forward, dynamic=False)
            step.forward = lambda inputs: (
                compiled if inputs.shape[1] == full else eager
            )(inputs)
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self.graphs: dict[
            tuple[int, ...], tuple[list[Tensor], torch.cuda.CUDAGraph]
        ] = {}
        # what other processes do, and random numbers that are put back, cannot be
        # captured
        capturable = processes.single and not settings.checkpoint_activations
        self.capture = (
            self.capturing and on_gpu and steps >= WORTH_CAPTURING and capturable
        )

    def __call__(self, *batch: Tensor) -> None:
        """Of inputs (R,B,...), targets (R,B), and what is drawn for mixing (R,3)."""
        self.step.steps += 1
        shape = tuple(batch[0].shape)
        if self.capture and shape not in self.graphs:
            self._capture(shape, [tensor.clone() for tensor in batch])
        if not self.capture:
            return self.step.compute(*batch)
        static, graph = self.graphs[shape]
        for buffer, value in zip(static, batch, strict=True):
            buffer.copy_(value, non_blocking=True)
        return graph.replay()

    def _capture(self, shape: tuple[int, ...], static: list[Tensor]) -> None:
        """Capture the step for this shape of batch; where that fails, steps run
        eagerly. Warm-up steps are undone.
        """
        step = self.step
        live = [
            *step.net.parameters(),
            *step.net.buffers(),
            step.total,
            step.good,
            *step.state.values(),
        ]
        saved = [tensor.detach().clone() for tensor in live]
        try:
            if step.net.fused and (fused := kernels()) is not None:
                fused.compile_together(lambda: step.compute(*static))
            graph, _ = capture(
                lambda: step.compute(*static), 3, self.pool
            )  # one replays at a time: they share memory
            self.graphs[shape] = (static, graph)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            warnings.warn(
                f"the step could not be captured and runs eagerly: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.capture = False
        with torch.no_grad():
            for tensor, value in zip(live, saved, strict=True):
                tensor.copy_(value)


@contextmanager
def torch_settings(device: torch.device, steps: int) -> Iterator[None]:
    """Global settings of torch for a training; afterwards they, and random numbers, are
    the caller's again.
    """
    before = torch.backends.cudnn.benchmark
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.backends.cudnn.benchmark = (
            steps >= WORTH_SEARCHING
        )  # for the fastest kernels, before the first step
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


def seed_all(device: torch.device, seed: int) -> None:
    """Seed what a network may draw from: the generators of the CPU and of this device,
    of no other.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
