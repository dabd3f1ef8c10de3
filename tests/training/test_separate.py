"""Networks computed one after another give what the stack gives: outputs, gradients,
statistics, whole trainings.
"""

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.training.networks.backbones import backbone, large_resnet
from rfdlc.training.networks.particles import ParticleNet


def narrow_resnet50():
    return large_resnet(3, widths=(8, 8, 16, 16))


def nets(make, shared, runs=2, particles=3):
    """The same network twice: stacked and separate."""
    both = [
        ParticleNet(
            make(), 5, particles=particles, seeds=range(runs), shared_stages=shared
        )
        for _ in range(2)
    ]
    both[0].execute("stacked")
    both[1].execute("separate")
    assert not both[0].single
    assert both[1].single
    return [net.double() for net in both]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shared", [0, 2, 5])
def test_separate_networks_have_the_outputs_gradients_and_statistics_of_the_stack(
    shared, recompute
):
    stacked, separate = nets(narrow_resnet50, shared)
    separate.recompute = recompute
    x = torch.randn(
        2, 4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    outputs = []
    for net in (stacked, separate):
        net.train()
        logits = net(x)
        (logits**2).sum().backward()
        outputs.append(logits.detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-9)
    for (name, one), other in zip(
        stacked.named_parameters(), separate.parameters(), strict=True
    ):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-9, msg=name)
    for (name, one), other in zip(
        stacked.named_buffers(), separate.buffers(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)


def test_wide_networks_are_separate_and_narrow_ones_stacked():
    for name, separate in (
        ("resnet32", False),
        ("resnet50", True),
        ("resnext50", True),
    ):
        with torch.device("meta"):
            net = ParticleNet(backbone(name, (3, 32, 32)), 5, particles=2)
        net.execute("auto")
        assert bool(net.single) is separate
    with torch.device("meta"):
        alone = ParticleNet(backbone("resnet50", (3, 32, 32)), 5)
    alone.execute("auto")
    assert not alone.single


def test_a_training_is_the_same_either_way(tmp_path):
    # one epoch: rounding differs from processor to processor, and grows from step to
    # step
    settings = {
        "backbone": "resnet8",
        "particles": 2,
        "epochs": 1,
        "augment": "none",
        "hold_out": 0.2,
    }
    models = [
        rfdlc.train("digits-lt", "rf-dlc", tmp_path / how, execution=how, **settings)
        for how in ("stacked", "separate")
    ]
    one, other = (model.predict("digits-lt").scores.values for model in models)
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_an_unknown_execution_is_refused():
    with pytest.raises(rfdlc.InputError, match="execution"):
        rfdlc.TrainConfig(execution="parallel")


def test_a_single_network_is_not_built_again():
    net = ParticleNet(narrow_resnet50(), 5, particles=1)
    net.stages = ([], [lambda count: pytest.fail("built")])
    net.execute("separate")
    assert not net.single
