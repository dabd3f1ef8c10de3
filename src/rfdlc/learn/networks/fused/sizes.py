"""Kernels that are compiled once for every size of batch."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton

SIZES = ("batch", "pixels", "tiles", "sets", "programs", "count", "share", "networks")


def any_size(kernel: Callable[..., None]) -> Any:
    """A kernel in one machine code: the shorter last batch of an epoch needs no compilation of its own."""
    names = [name for name in signature(kernel).parameters if name in SIZES]
    return triton.jit(kernel, do_not_specialize=names)
