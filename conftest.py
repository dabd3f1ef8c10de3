"""Doctests do not import the GPU kernels where Triton is not installed, and not what `make docs` writes into docs."""

from importlib.util import find_spec

NEED_TRITON = ("convolutions", "kernels", "launching")
collect_ignore = [] if find_spec("triton") else [f"src/rfdlc/training/networks/fused/{name}.py" for name in NEED_TRITON]
collect_ignore += ["docs/gallery", "docs/api/generated"]
