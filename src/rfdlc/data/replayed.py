"""Replayed: a function of tensors that a GPU runs as one launch."""

from collections.abc import Callable

import torch
from torch import Tensor


class Replayed:
    """A pure function of tensors whose shapes do not change, captured as a CUDA graph at its first call on a GPU.

    A hundred small kernels take longer to launch than to run. Elsewhere the function is simply called.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self.given: tuple[Tensor, ...] = ()
        self.found: tuple[Tensor, ...] = ()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not tensors[0].is_cuda:
            return self.function(*tensors)
        if self.graph is None:
            self._capture(tensors)
        assert self.graph is not None
        for buffer, value in zip(self.given, tensors, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.graph.replay()
        return tuple(result.clone() for result in self.found)  # the next replay writes where this one did

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        self.given = tuple(tensor.clone() for tensor in tensors)
        side = torch.cuda.Stream(tensors[0].device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.function(*self.given)  # libraries make themselves ready
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = self.function(*self.given)
