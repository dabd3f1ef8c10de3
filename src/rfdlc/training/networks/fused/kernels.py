"""The operations of fused stages on a GPU. `plain.py` has the same functions in torch; tests compare them."""

from rfdlc.training.networks.fused.convolutions import convolve, input_gradient
from rfdlc.training.networks.fused.norms import activate, gate, norm_gradient, norm_input_gradient, statistics
from rfdlc.training.networks.fused.weight_gradients import weight_gradient

__all__ = [
    "activate", "convolve", "gate", "input_gradient", "norm_gradient", "norm_input_gradient", "statistics",
    "weight_gradient",
]  # fmt: skip
