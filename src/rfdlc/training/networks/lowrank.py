"""LoRA (Hu et al. 2022): linear layers W x of a pretrained network become W x + B A x,
and only A and B are trained.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.errors import expect


class LowRank(nn.Module):
    """A linear layer with frozen weights, plus an update of low rank that starts at
    zero.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach())
        self.register_buffer(
            "bias", None if layer.bias is None else layer.bias.detach()
        )
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """A has rows of expected length 1, so that A x is as large as a component of x,
        whatever the width.
        """
        self.down.normal_(0, self.down.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        update = functional.linear(functional.linear(x, self.down), self.up)
        return functional.linear(x, self.weight, self.bias) + update


@torch.no_grad()
def adapt(network: Any, rank: int, name: str, example: Tensor) -> None:
    """Replace the linear layers that a network calls, in place; its other weights
    become buffers, which are frozen.
    """
    called: list[str] = []
    layers = {
        place: layer
        for place, layer in network.named_modules()
        if type(layer) is nn.Linear
    }
    hooks = [
        own.register_forward_hook(lambda *_, at=at: called.append(at))
        for at, own in layers.items()
    ]
    network(example)
    for hook in hooks:
        hook.remove()
    expect(
        called,
        f"lora={rank} is for transformers: {name} calls no linear layers; set lora=0",
    )
    for place in dict.fromkeys(called):
        network.set_submodule(place, LowRank(layers[place], rank))
    for module in network.modules():
        for place, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(module, LowRank):
                delattr(module, place)
                module.register_buffer(place, parameter.detach())


def copied(network: nn.Module) -> nn.Module:
    """A copy with updates of its own, where it has any."""
    copy = deepcopy(network)
    for module in copy.modules():
        if isinstance(module, LowRank):
            module.draw()
    return copy
