"""How kernels are compiled and launched: once for every size of batch, and each while the one before it ends."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl

SIZES = ("batch", "pixels", "tiles", "sets", "programs", "count", "share", "networks")
# From Hopper on, programs of a kernel can take their places while the last ones of the kernel before are at work
OVERLAPPING = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9)


@triton.jit
def after_the_one_before():
    """Wait until the kernel before has written all its results. Every kernel begins with it, reading nothing before.

    From here on the next kernel may be launched, which begins with the same.
    """
    if OVERLAPPING:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class Kernel:
    """A kernel in one machine code: the shorter last batch of an epoch needs no compilation of its own."""

    def __init__(self, function: Callable[..., None]) -> None:
        names = [name for name in signature(function).parameters if name in SIZES]
        self.compiled = triton.jit(function, do_not_specialize=names)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """What launches it on so many programs."""
        return partial(self.compiled[grid], **({"launch_pdl": True} if OVERLAPPING.value else {}))
