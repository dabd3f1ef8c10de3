"""A stack of K networks equals K plain networks, forward and backward; parameter counts
as published.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rfdlc.errors import InputError
from rfdlc.training.networks.backbones import Bottleneck, backbone, own
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.networks.stack import IN_CHANNELS, reset


class PlainBlock(nn.Module):
    """Option-A residual block, written with plain torch layers."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.inputs, self.outputs, self.stride = inputs, outputs, stride
        self.conv1, self.norm1 = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x):
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        if self.inputs != self.outputs:
            before = (self.outputs - self.inputs) // 2
            wide = torch.zeros(x.shape[0], self.outputs, *y.shape[2:], dtype=x.dtype)
            wide[:, before : before + self.inputs] = x[:, :, ::2, ::2]
            x = wide
        return functional.relu(y + x)


class PlainResNet8(nn.Module):
    def __init__(self, classes, scale):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            PlainBlock(16, 16, 1), PlainBlock(16, 32, 2), PlainBlock(32, 64, 2)
        )
        self.head, self.scale = nn.Parameter(torch.empty(64, classes)), scale

    def forward(self, x):
        x = self.blocks(functional.relu(self.norm(self.conv(x)))).mean((2, 3))
        return (
            self.scale
            * functional.normalize(x, dim=1)
            @ functional.normalize(self.head, dim=0)
        )


def copy_into_plain(net, network, plain, networks):
    """Copy network k of a stack (nothing shared) into the plain network, in order of
    the layers.
    """
    ours = [p.chunk(networks)[network] for p in net.parameters()]
    for target, value in zip(ordered(plain), ours, strict=True):
        target.data.copy_(value.reshape(target.shape))


def ordered(plain):
    blocks = [p for block in plain.blocks for p in block.parameters()]
    return [plain.conv.weight, plain.norm.weight, plain.norm.bias, *blocks, plain.head]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_stack_equals_plain_networks_forward_and_backward():
    torch.manual_seed(0)
    net = ParticleNet(
        backbone("resnet8", (3, 12, 12)), 5, particles=2, seeds=(3, 4)
    ).double()
    x = torch.randn(2, 6, 3, 12, 12, dtype=torch.float64)
    weight = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    logits = net(x)
    (logits * weight).sum().backward()
    for run in range(2):
        for particle in range(2):
            network = 2 * run + particle
            plain = PlainResNet8(5, 30.0).double()
            copy_into_plain(net, network, plain, 4)
            expected = plain(x[run])
            assert torch.allclose(logits[run, particle], expected, atol=1e-10)
            (expected * weight[run, particle]).sum().backward()
            for ours, theirs in zip(net.parameters(), ordered(plain), strict=True):
                assert torch.allclose(
                    ours.grad.chunk(4)[network].reshape(theirs.shape),
                    theirs.grad,
                    atol=1e-9,
                )
            statistics = net.branches[0].norm.mean.chunk(4)[network]
            assert torch.allclose(statistics, plain.norm.running_mean, atol=1e-12)


@pytest.mark.parametrize("side", [9, 16])
def test_a_stack_of_cnns_equals_plain_ones(side):
    torch.manual_seed(0)
    net = ParticleNet(
        backbone("cnn", (2, side, side)), 5, particles=2, seeds=(3,)
    ).double()
    x = torch.randn(1, 6, 2, side, side, dtype=torch.float64)
    features = net.outputs(x)[1]
    for particle in range(2):
        y = x[0]
        for stage in net.branches:
            weight, scale, shift = (
                t.detach().chunk(2)[particle]
                for t in (stage.conv.weight, *stage.norm.parameters())
            )
            y = functional.conv2d(
                y, weight.reshape(len(weight.flatten(1)), -1, 3, 3), padding=1
            )
            y = functional.batch_norm(
                y, None, None, scale.flatten(), shift.flatten(), training=True
            )
            y = functional.max_pool2d(y.relu(), 2, ceil_mode=True)
        assert torch.allclose(
            features[0, particle], y.amax((2, 3)) + y.mean((2, 3)), atol=1e-10
        )


class PlainBottleneck(nn.Module):
    """Bottleneck block, written with plain torch layers."""

    def __init__(self, inputs, middle, outputs, stride, groups):
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(inputs, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
        )
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(middle)
        self.conv3, self.norm3 = (
            nn.Conv2d(middle, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


@pytest.mark.parametrize("groups", [1, 4])
def test_bottleneck_stack_equals_plain_blocks(groups):
    torch.manual_seed(0)
    stack = Bottleneck(3, 6, 16, 2, middle=8, groups=groups).double()
    reset(stack, (0, 1, 2))
    x = torch.randn(3, 4, 6, 8, 8, dtype=torch.float64)
    ours = stack(IN_CHANNELS.fold(x))
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    for k in range(3):
        plain = PlainBottleneck(6, 8, 16, 2, groups).double()
        for target, value in zip(plain.parameters(), stack.parameters(), strict=True):
            target.data.copy_(value.chunk(3)[k])
        expected = plain(x[k])
        assert torch.allclose(ours.chunk(3, 1)[k], expected, atol=1e-10)
        (expected * weight.chunk(3, 1)[k]).sum().backward()
        for target, value in zip(plain.parameters(), stack.parameters(), strict=True):
            assert torch.allclose(value.grad.chunk(3)[k], target.grad, atol=1e-9)


def test_mlp_stack_equals_plain_networks():
    net = ParticleNet(
        backbone("mlp", (7,), (8, 6)), 3, particles=3, head="linear", shared_stages=1
    ).double()
    x = torch.randn(1, 5, 7, dtype=torch.float64)
    logits = net(x)
    shared, branch = net.trunk[0], net.branches[0]
    for m in range(3):
        y = functional.layer_norm(
            x[0] @ shared.map.weight[0] + shared.map.bias[0], (8,)
        ).relu()
        y = functional.layer_norm(
            y @ branch.map.weight[m] + branch.map.bias[m], (6,)
        ).relu()
        assert torch.allclose(
            logits[0, m], y @ net.head.weight[m] + net.head.bias[m], atol=1e-12
        )


@pytest.mark.parametrize(("particles", "expected"), [(1, 469_904), (3, 1_408_784)])
def test_resnet32_parameters_as_published(particles, expected):
    net = ParticleNet(
        backbone("resnet32", (3, 32, 32)), 100, particles=particles, shared_stages=1
    )
    assert sum(p.numel() for p in net.parameters()) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("resnet50", 25_557_032), ("resnext50", 25_028_904)]
)
def test_large_networks_have_published_parameters(name, expected):
    with torch.device("meta"):
        parts = [stage(1) for stage in backbone(name, (3, 224, 224)).stages]
    assert (
        sum(p.numel() for part in parts for p in part.parameters()) + 2048 * 1000 + 1000
        == expected
    )


def test_slim_resnet50_trains_a_step():
    net = ParticleNet(
        backbone("resnet50-slim", (3, 32, 32)), 4, particles=2, shared_stages=4
    )
    logits = net(torch.randn(1, 2, 3, 32, 32))
    assert logits.shape == (1, 2, 2, 4)
    logits.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_all_stages_shared_leaves_heads_alone():
    net = ParticleNet(backbone("resnet8", (3, 8, 8)), 4, particles=2, shared_stages=4)
    assert net(torch.randn(1, 3, 3, 8, 8)).shape == (1, 2, 3, 4)
    assert net.head.weight.shape[0] == 2


def test_a_run_has_the_same_weights_alone_and_stacked():
    def build(seeds):
        network = backbone("resnet8", (3, 8, 8))
        return ParticleNet(network, 4, particles=2, seeds=seeds, shared_stages=1)

    alone, stacked = build((7,)), build((5, 7))
    for one, two in zip(alone.parameters(), stacked.parameters(), strict=True):
        assert torch.equal(one, two.chunk(2)[1])


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))


def test_own_network_is_a_backbone_with_statistics_of_its_own():
    net = ParticleNet(own(Own, torch.zeros(2, 3, 8, 8)), 5, particles=2, seeds=(1, 2))
    x = torch.randn(2, 6, 3, 8, 8)
    logits = net.train()(x)
    assert logits.shape == (2, 2, 6, 5)
    logits.sum().backward()
    copies = net.branches[0]
    assert copies.copy_conv__weight.grad.abs().sum((1, 2, 3, 4)).gt(0).all()
    assert not torch.equal(copies.copy_conv__weight[0], copies.copy_conv__weight[1])
    plain = Own()
    plain.conv.weight.data, plain.conv.bias.data = (
        copies.copy_conv__weight[2].data,
        copies.copy_conv__bias[2].data,
    )
    plain(x[1])
    assert torch.allclose(copies.copy_norm__running_mean[2], plain.norm.running_mean)
    assert copies.copy_norm__num_batches_tracked.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: own(Own, torch.zeros(2, 3, 8, 8)),
        lambda: backbone("resnet8", (3, 8, 8)),
        lambda: backbone("cnn", (3, 8, 8)),
    ],
)
def test_channels_last_changes_memory_and_no_value(make):
    """As a GPU has it: stacked weights of copies have five dimensions, which torch's
    own layout refuses.
    """
    build = lambda: ParticleNet(make(), 5, particles=2, seeds=(1, 2))  # noqa: E731
    x = torch.randn(2, 6, 3, 8, 8)
    plain, placed = build(), place(build(), torch.device("cpu"), channels_last=True)
    results = [(*net.state_dict().values(), net(x)) for net in (plain, placed)]
    for one, two in zip(*results, strict=True):
        assert torch.allclose(one, two, atol=1e-5)
    images = [p for p in placed.parameters() if p.ndim >= 4]
    slices = [w for p in images for w in (p if p.ndim == 5 else [p])]
    assert slices
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in slices)
    placed(x).sum().backward()


def test_a_module_is_copied_as_it_is():
    module = Own()
    net = ParticleNet(own(module, torch.zeros(2, 3, 8, 8)), 5, particles=2)
    assert torch.equal(net.branches[0].copy_conv__weight[1], module.conv.weight)


def test_a_backbone_with_a_wrong_output_is_refused():
    with pytest.raises(InputError, match="expected features"):
        own(lambda: nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8))


def test_unknown_backbone_and_impossible_sharing():
    with pytest.raises(InputError, match="did you mean 'resnet32'"):
        backbone("resnet23", (3, 8, 8))
    with pytest.raises(InputError, match="backbone=mlp"):
        backbone("resnet32", (20,))
    with pytest.raises(InputError, match="shared_stages 5"):
        ParticleNet(backbone("resnet8", (3, 8, 8)), 4, shared_stages=5)
