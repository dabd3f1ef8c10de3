"""Kernels for GPUs are imported by no doctest where Triton is not there."""

from importlib.util import find_spec

NEED_TRITON = ("convolutions", "cutting", "kernels", "launching", "norms", "weight_gradients")
collect_ignore = [] if find_spec("triton") else [f"src/rfdlc/training/networks/fused/{name}.py" for name in NEED_TRITON]
