"""Doctests do not import the GPU kernels where Triton is not installed, and not what
`make docs` writes into docs.
"""

from importlib.util import find_spec

FUSED = "src/rfdlc/training/networks/fused"
NEED_TRITON = [
    f"{FUSED}/{name}.py" for name in ("convolutions", "kernels", "launching")
]
collect_ignore = (
    [] if find_spec("triton") else [*NEED_TRITON, "src/rfdlc/data/augment_kernels.py"]
)
collect_ignore += ["docs/gallery", "docs/api/generated"]
