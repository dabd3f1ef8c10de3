"""Fused stages: the backward pass by hand against autograd, and the kernels against
their reference in torch.
"""

import os
import sys
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rfdlc.training.networks.backbones import (
    BasicBlock,
    BasicBlocks,
    Stem,
    small_resnet,
)
from rfdlc.training.networks.fused import stages
from rfdlc.training.networks.fused.stages import usable
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.networks.stack import reset

sys.path.append(str(Path(__file__).parent))
import plain_kernels as plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # how to run them without a GPU
needs_kernels = pytest.mark.skipif(
    not (find_spec("triton") and (INTERPRETED or torch.cuda.is_available())),
    reason="needs Triton and a GPU",
)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"


@pytest.fixture
def operations_in_torch(monkeypatch):
    """The chain computes with the reference."""
    monkeypatch.setattr(stages, "kernels", lambda: plain)


def stage(kind, networks):
    if kind == "stem":
        return Stem(networks, 3, 16), 3
    if kind == "same":
        return (
            BasicBlocks(
                BasicBlock(networks, 16, 16, 1), BasicBlock(networks, 16, 16, 1)
            ),
            16,
        )
    if kind == "narrower":
        return (
            BasicBlocks(
                BasicBlock(networks, 16, 32, 2), BasicBlock(networks, 32, 32, 1)
            ),
            16,
        )
    blocks = [
        BasicBlock(networks, 16, 16, 1),
        BasicBlock(networks, 16, 32, 2),
        BasicBlock(networks, 32, 32, 1),
    ]
    return BasicBlocks(*blocks), 16  # the size halves in the middle


@given(
    kind=st.sampled_from(["stem", "same", "narrower", "in the middle"]),
    networks=st.integers(1, 3),
    batch=st.integers(1, 3),
    size=st.sampled_from([(4, 4), (8, 4), (4, 12)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_chain_is_what_autograd_makes_of_the_layers(
    operations_in_torch, kind, networks, batch, size, seed
):
    generator = torch.Generator().manual_seed(seed)
    layers, channels = stage(kind, networks)
    reset(layers, [seed])
    layers = layers.double()
    for name, parameter in layers.named_parameters():
        if "norm" in name:  # not ones and zeros
            parameter.data += 0.3 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
    fused = deepcopy(layers)
    x = torch.randn(
        (networks, batch, *size, channels), generator=generator, dtype=torch.float64
    )
    apart, together = (
        x.clone().requires_grad_(),
        plain._together(x).clone().requires_grad_(),
    )

    teacher = deepcopy(fused)
    with torch.no_grad():  # as predictions that others learn from
        detached = teacher(x)
    found, expected = fused(apart), layers(together)
    torch.testing.assert_close(detached, found.detach(), rtol=0, atol=0)
    for ours, theirs in zip(teacher.buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(plain._together(found), expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (plain._together(found) * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(plain._together(apart.grad), together.grad)
    for (name, ours), theirs in zip(
        fused.named_parameters(), layers.parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    for (name, ours), theirs in zip(
        fused.named_buffers(), layers.named_buffers(), strict=True
    ):
        torch.testing.assert_close(ours, theirs[1], msg=name)


def test_images_that_need_no_gradient_get_none(operations_in_torch):
    layers, _ = stage("stem", 2)
    reset(layers, [0])
    x = torch.randn(2, 3, 4, 4, 3)
    layers(x).sum().backward()
    assert layers.conv.weight.grad.abs().sum() > 0
    assert x.grad is None


def test_without_a_gpu_nothing_is_fused():
    assert not usable(torch.zeros(1, 2, 3, 32, 32))


SHAPES = [
    *(
        (3, 16, 1, 8),
        (16, 16, 1, 8),
        (16, 32, 2, 8),
        (32, 32, 1, 4),
        (32, 64, 2, 8),
        (64, 64, 1, 4),
    ),
    *(
        (3, 16, 1, 28),
        (16, 16, 1, 28),
        (16, 32, 2, 28),
        (32, 32, 1, 14),
        (32, 64, 2, 14),
        (64, 64, 1, 7),
    ),
    *(
        (3, 16, 1, 12),
        (16, 16, 1, 20),
        (32, 32, 1, 6),
        (16, 16, 1, 48),
    ),  # sides that are no powers of two
]


@needs_kernels
@pytest.mark.parametrize(("inputs", "outputs", "stride", "size"), SHAPES)
def test_kernels_compute_what_torch_computes(
    inputs, outputs, stride, size, monkeypatch
):
    from rfdlc.training.networks.fused import kernels

    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # the reference in whole float32
    networks, batch = 3, 5
    torch.manual_seed(0)
    close = {"rtol": 1e-4, "atol": 1e-4}
    x = torch.randn(networks, batch, size, size, inputs, device=DEVICE)
    w = torch.randn(networks * outputs, inputs, 3, 3, device=DEVICE).contiguous(
        memory_format=torch.channels_last
    )
    (y, sums), (found, partial) = (
        plain.convolve(x, w, stride),
        kernels.convolve(x, w, stride),
    )
    torch.testing.assert_close(found, y, **close)
    torch.testing.assert_close(partial.sum(1), sums.sum(1), rtol=1e-4, atol=1e-1)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        kernels.weight_gradient(dy, x, stride),
        plain.weight_gradient(dy, x, stride),
        rtol=1e-4,
        atol=1e-3,
    )
    if inputs >= 16:
        for around in (None, torch.randn_like(dy)) if stride == 2 else (None,):
            ours, theirs = (
                ops.input_gradient(dy, w, stride, around) for ops in (kernels, plain)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    count, size_of_all = y[0, ..., 0].numel(), networks * outputs
    norm = [torch.rand(size_of_all, device=DEVICE) for _ in range(4)]
    copies = [tensor.clone() for tensor in norm]
    known = plain.statistics(sums, count, *norm)
    torch.testing.assert_close(
        kernels.statistics(partial, count, *copies), known, **close
    )
    torch.testing.assert_close(copies, norm, **close)
    z = plain.activate(y, known)
    for shortcut in (None, dy, x) if stride == 2 else (None, dy):
        torch.testing.assert_close(
            kernels.activate(y, known, shortcut),
            plain.activate(y, known, shortcut),
            **close,
        )
    for shortcut, active in ((None, None), (None, z), (z, z)):
        gated = active is not None
        (ours, ours_sums), (theirs, theirs_sums) = (
            ops.gate(dy, shortcut, active, y, known) for ops in (kernels, plain)
        )
        torch.testing.assert_close(ours, theirs, **close)
        torch.testing.assert_close(
            ours_sums.sum(1), theirs_sums.sum(1), rtol=1e-4, atol=1e-2
        )
        factors = plain.norm_gradient(theirs_sums, count, known)
        torch.testing.assert_close(
            kernels.norm_gradient(theirs_sums, count, known), factors, **close
        )
        torch.testing.assert_close(
            kernels.norm_input_gradient(theirs, y, known, factors, gated),
            plain.norm_input_gradient(theirs, y, known, factors, gated),
            **close,
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_learns_the_same_fused_and_layer_by_layer():
    x = torch.randn(2, 16, 3, 32, 32, device="cuda")
    gradients = []
    for fused in (True, False):
        net = ParticleNet(
            small_resnet(3, blocks=1), 10, particles=2, seeds=(0, 1)
        ).cuda()
        net.fused = fused
        with torch.autocast("cuda", torch.bfloat16):
            net.particle_logits(x).float().logsumexp(-1).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99
