"""Kernels for GPUs, where Triton can compile them: it needs a C compiler, which not
every machine with a GPU has.
"""

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

OLDEST = (
    8,
    0,
)  # compute capability from which Triton is supported, and bfloat16 is computed
TRITON = (3, 4)  # from which it has all that kernels use; it comes with torch 2.8


@cache
def load_kernels(module: str) -> Any:
    """A module of kernels; None for an older GPU, without Triton, and with a warning
    where it cannot compile them.
    """
    if find_spec("triton") is None or torch.cuda.get_device_capability() < OLDEST:
        return None
    try:
        triton = import_module("triton")
        if tuple(map(int, triton.__version__.split(".")[:2])) >= TRITON:
            # which compiles what launches kernels
            triton.runtime.driver.active.get_current_target()
            return import_module(module)
        told, fix = (
            f"Triton {triton.__version__} is too old for kernels",
            "take torch 2.8 or later",
        )
    except Exception as error:  # of a compiler or a driver
        told = (
            f"Triton cannot compile kernels here ({type(error).__name__}:"
            f" {str(error)[:200]})"
        )
        fix = "install a C compiler (gcc) and the headers of Python (python3-dev)"
    warnings.warn(
        f"{told}: training goes on without them, slower; {fix}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None
