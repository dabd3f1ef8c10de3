"""How kernels are compiled and launched, and how the work of a convolution is cut into programs.

A kernel is compiled once for every size of batch, and starts while the one before it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


# -- row by row of the images, or tile by tile of their pixels ----------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """How a convolution goes row by row."""

    group: int  # neighbouring pixels that are one row of the matrix product
    programs: int  # wanted, about
    warps: int
    ahead: int  # loads in flight
    tallest: int = 64  # rows of the matrix product: 64, or more where there are programs enough

    def images(self, width: int, of: int) -> int:
        """Images that a program works on side by side, of all there are."""
        tall = 64
        while tall < self.tallest and of * width // (2 * tall * self.group) >= self.programs:
            tall *= 2
        return max(1, tall * self.group // width)

    def parts(self, sets: int, height: int) -> int:
        """Into how many parts an image is cut, so that there are programs enough."""
        parts = 1
        while sets * parts < self.programs and height // parts > 4 and height % (2 * parts) == 0:
            parts *= 2
        return parts

    def window(self, channels: int) -> int:
        """Values that a row of the product sees: group + 2 pixels, up to a power of two that hardware can multiply."""
        return max(16, triton.next_power_of_2((self.group + 2) * channels))


@dataclass(frozen=True)
class Tiles:
    """How a convolution goes tile by tile."""

    pixels: int
    warps: int
    ahead: int


# By the channels made; chosen by measuring on an H200 (benchmarks/README.md)
ROWS = {16: Rows(2, 400, 4, 4), 32: Rows(2, 200, 4, 3)}
TILES = {16: Tiles(128, 4, 2), 32: Tiles(128, 4, 3), 64: Tiles(128, 4, 3)}
GRADIENT_ROWS = {16: Rows(2, 200, 4, 4, tallest=128), 32: Rows(1, 200, 8, 4, tallest=128)}
GRADIENT_TILES = {16: Tiles(64, 4, 2), 32: Tiles(64, 4, 2), 64: Tiles(64, 4, 2)}
GRADIENT_PROGRAMS = 512
