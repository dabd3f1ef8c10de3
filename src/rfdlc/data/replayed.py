"""CUDA graphs: what a GPU runs many times as one launch. A hundred small kernels take longer to launch than to run."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def capture(function: Callable[[], Any], warm_up: int = 1, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph that does what `function` does, on the same memory, and what the captured call returned.

    The calls before that make libraries ready and compile kernels.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # an older graph that is freed while this one is captured would spoil it
    try:
        with torch.cuda.graph(graph, pool=pool):
            found = function()
    finally:
        if collecting:
            gc.enable()
    return graph, found


class Replayed:
    """A pure function of tensors whose shapes do not change, captured at its first call on a GPU."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not tensors[0].is_cuda:
            return self.function(*tensors)
        if self.graph is None:
            self.given = tuple(tensor.clone() for tensor in tensors)
            self.graph, self.found = capture(lambda: self.function(*self.given))
        for buffer, value in zip(self.given, tensors, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.graph.replay()
        return tuple(result.clone() for result in self.found)  # the next replay writes where this one did
