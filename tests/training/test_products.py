"""Backward passes written by hand give autograd's gradients, of the layers written with
plain torch functions.
"""

import pytest
import torch
from torch.nn import functional

from rfdlc.training.networks.stack import CosineHead, Hidden, Linear

K, B, INPUTS, OUTPUTS = 3, 7, 5, 4


def plain_hidden(layer, x):
    rows = []
    for k in range(K):
        before = functional.linear(x[k], layer.map.weight[k].T, layer.map.bias[k, 0])
        scale, shift = layer.norm.weight[k, 0], layer.norm.bias[k, 0]
        rows.append(
            functional.relu(functional.layer_norm(before, (OUTPUTS,), scale, shift))
        )
    return torch.stack(rows)


def plain_linear(layer, x):
    return torch.stack(
        [functional.linear(x[k], layer.weight[k].T, layer.bias[k, 0]) for k in range(K)]
    )


def plain_cosine(layer, x):
    return torch.stack(
        [
            30
            * functional.normalize(x[k], dim=1)
            @ functional.normalize(layer.weight[k], dim=0)
            for k in range(K)
        ]
    )


LAYERS = {
    "hidden": (lambda: Hidden(K, INPUTS, OUTPUTS), plain_hidden),
    "linear": (lambda: Linear(K, INPUTS, OUTPUTS), plain_linear),
    "cosine": (lambda: CosineHead(K, INPUTS, OUTPUTS, 30.0), plain_cosine),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("first", [False, True], ids=["inside", "first layer"])
def test_gradients_are_those_of_plain_layers(name, first):
    make, plain = LAYERS[name]
    layer = make().double()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(K, B, INPUTS, dtype=torch.float64, requires_grad=not first)
    gradient = torch.randn(K, B, OUTPUTS, dtype=torch.float64)
    wanted = [*layer.parameters()] if first else [x, *layer.parameters()]
    ours, theirs = layer(x), plain(layer, x)
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():  # no gradient is asked for: another path, the same values
        torch.testing.assert_close(layer(x), theirs)
    for mine, reference in zip(
        torch.autograd.grad(ours, wanted, gradient),
        torch.autograd.grad(theirs, wanted, gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference)


def test_a_sample_without_features_has_equal_logits_and_finite_gradients():
    head = CosineHead(1, INPUTS, OUTPUTS, 30.0)
    torch.nn.init.normal_(head.weight)
    x = torch.zeros(1, 1, INPUTS, requires_grad=True)
    logits = head(x)
    assert not logits.any()
    found = torch.autograd.grad(logits.sum(), [x, head.weight])
    assert all(value.isfinite().all() for value in found)
