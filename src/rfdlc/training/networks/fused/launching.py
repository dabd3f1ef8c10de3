"""How kernels are compiled, side by side, and launched: each starts while the one
before ends.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial as bound
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl

SIZES = ("batch", "pixels", "tiles", "sets", "programs", "count", "share", "networks")
# From Hopper on, programs of a kernel can take their places while the last ones of the
# kernel before are at work
OVERLAPPING = tl.constexpr(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
)


@triton.jit
def wait_turn():
    """Wait until the kernel before has written its results; the next one, which begins
    alike, may be launched.
    """
    if OVERLAPPING:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class Kernel:
    """A kernel whose machine code depends on how work is cut, and not on the size of a
    batch.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        names = [name for name in signature(function).parameters if name in SIZES]
        self.compiled = triton.jit(function, do_not_specialize=names)

    noted: dict[Hashable, Callable[[], Any]] | None = (
        None  # what compiles the kernels that are not launched now
    )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        options = {"launch_pdl": True} if OVERLAPPING.value else {}
        return (
            bound(self.compiled[grid], **options)
            if Kernel.noted is None
            else bound(self._note, grid, **options)
        )

    def _note(self, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        types = [
            getattr(value, "dtype", value) for value in given
        ]  # which are enough to compile, and keep no memory
        known = tuple(
            value if isinstance(value, torch.dtype) else type(value) for value in types
        )
        assert Kernel.noted is not None
        Kernel.noted[self, known, tuple(options.items())] = bound(
            self.compiled.warmup, *types, grid=grid, **options
        )


def compile_together(step: Callable[[], Any]) -> None:
    """Compile the kernels of a step in threads: one after another takes long. What the
    step computes is undefined.
    """
    Kernel.noted, device = {}, torch.cuda.current_device()
    try:
        step()
    finally:
        noted, Kernel.noted = Kernel.noted, None

    def compiled(warmup: Callable[[], Any]) -> None:
        _ = warmup().run  # which makes what launches it, too

    with ThreadPoolExecutor(
        initializer=torch.cuda.set_device, initargs=(device,)
    ) as threads:
        list(threads.map(compiled, noted.values()))
