"""Hidden layers of K perceptrons: affine map, layer norm, ReLU, on (K, B, F).

Training on a CPU has a backward pass of its own. It goes over memory half as often as autograd's would, and takes sums
over the batch as products with ones.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rfdlc.training.networks.products import by_hand, input_gradient
from rfdlc.training.networks.stack import LayerNorm, Linear

aten = torch.ops.aten


class Hidden(nn.Module):
    """Affine map, layer norm, ReLU: (K, B, inputs) -> (K, B, outputs)."""

    def __init__(self, networks: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.map, self.norm = Linear(networks, inputs, outputs), LayerNorm(networks, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if not by_hand(x, self.map.weight):
            return self.norm(self.map(x)).relu()
        result: Tensor = _Hidden.apply(x, self.map.weight, self.map.bias, self.norm.weight, self.norm.bias)
        return result


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        before = torch.baddbmm(bias, x, weight)
        one = x.new_ones(before.shape[-1:])  # a weight, even of one, makes it quicker
        normed, mean, inverse = torch.native_layer_norm(before, before.shape[-1:], one, None, LayerNorm.epsilon)
        active = torch.addcmul(shift, normed, scale).relu_()
        ctx.save_for_backward(x, weight, scale, before, normed, mean, inverse, active)
        return active

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, before, normed, mean, inverse, active = ctx.saved_tensors
        ones = gradient.new_ones(len(x), 1, x.shape[1])
        gated = aten.threshold_backward(gradient, active, 0)
        by_scale, by_shift = ones.bmm(normed.mul_(gated)), ones.bmm(gated)
        statistics = before.shape[-1:], mean, inverse, None, None, (True, False, False)
        by_before = aten.native_layer_norm_backward(gated.mul_(scale), before, *statistics)[0]
        by_input = input_gradient(by_before, weight) if ctx.needs_input_grad[0] else None
        return by_input, x.mT.bmm(by_before), ones.bmm(by_before), by_scale, by_shift
