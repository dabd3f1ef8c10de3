"""Familiarity: values against naive formulas, statistics of every kind of network, and
a run that keeps it.
"""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import rfdlc
from rfdlc.decisions.unfamiliar import FeatureDistance
from rfdlc.serving.backend import open_backend
from rfdlc.training.familiarity import FAR, SHRUNK, USUAL, Familiarity, first_stages
from rfdlc.training.networks.backbones import backbone, large_resnet, own
from rfdlc.training.networks.particles import ParticleNet


def weighted(values, weights):
    """Mean and standard deviation."""
    mean = (weights * values).sum() / weights.sum()
    return mean, np.sqrt((weights * (values - mean) ** 2).sum() / weights.sum())


def mahalanobis(known, x):
    """Squared distances, with correlations that are shrunk to the identity."""
    mean, scale = known.mean(axis=0), known.std(axis=0)
    scale = np.maximum(scale, 0.01 * scale.mean())
    z = (known - mean) / scale
    correlation = (1 - SHRUNK) * z.T @ z / len(z)
    inverse = np.linalg.inv(
        correlation + SHRUNK * np.mean(np.diag(z.T @ z / len(z))) * np.eye(z.shape[1])
    )
    return np.array([row @ inverse @ row for row in (x - mean) / scale])


def test_values_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [120, 60, 21])
    features = rng.normal(size=(2, len(y), 8)) + 3 * np.eye(8)[y]
    first = np.hstack(
        [
            rng.normal(size=(len(y), 3)) @ rng.normal(size=(3, 3)) + 5,
            np.zeros((len(y), 1)),
        ]
    )
    found = Familiarity.fit(features, first, y)
    new = (
        rng.normal(size=(2, 9, 8)),
        np.hstack([5 + 4 * rng.normal(size=(9, 3)), np.zeros((9, 1))]),
    )
    values = found(*(torch.tensor(each, dtype=torch.float32) for each in new)).numpy()

    measures = [FeatureDistance.fit(each, y) for each in features]
    near, own = (
        np.mean([measure(x) for measure, x in zip(measures, each, strict=True)], axis=0)
        for each in (new[0], features)
    )
    weights = 1 / np.array([120, 60, 21])[y]
    far = np.empty(len(y))
    far[::2], far[1::2] = (
        mahalanobis(first[1::2], first[::2]),
        mahalanobis(first[::2], first[1::2]),
    )
    order = np.argsort(far)
    usual = far[
        order[np.argmax(np.cumsum(weights[order]) >= USUAL * weights.sum() - 1e-12)]
    ]
    above = far > usual
    beyond = weighted(far[above] - usual, weights[above])[0]
    added = np.maximum(0, (mahalanobis(first, new[1]) - usual) / beyond)
    assert 0 < (added > 0).sum() < len(added)
    assert values == pytest.approx(
        near / weighted(own, weights)[1] + FAR * added, rel=1e-4, abs=1e-4
    )


def small_network():
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


@pytest.mark.parametrize("how", ["stacked", "separate"])
@pytest.mark.parametrize("shared", [0, 2])
def test_statistics_are_those_of_the_first_network(how, shared):
    net = ParticleNet(
        large_resnet(3, widths=(8, 8, 16, 16)), 5, particles=2, shared_stages=shared
    )
    net.execute(how)
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), first_stages(net.eval()) as statistics:
        logits = net(x[None])
        found = statistics(x)
    alone, state = (
        ParticleNet(large_resnet(3, widths=(8, 8, 16, 16)), 5),
        dict(net.head.state_dict(prefix="head.")),
    )
    state = {name: tensor.chunk(2)[0] for name, tensor in state.items()}
    for part, stages, networks in (
        ("trunk", net.trunk, 1),
        ("branches", net.branches, 2),
    ):
        for name, tensor in stages.state_dict().items():
            number, rest = name.split(".", 1)
            place = int(number) + shared * (part == "branches")
            state[f"branches.{place}.{rest}"] = (
                tensor.chunk(networks)[0] if tensor.ndim else tensor
            )
    alone.load_state_dict(state)
    values, expected = x, [torch.zeros(4, 1)]
    with torch.no_grad():
        for stage in list(alone.eval().branches)[:3]:
            values = stage(values)
            expected += [
                values.mean((2, 3)),
                ((values - values.mean((2, 3), keepdim=True)) ** 2).mean((2, 3)).sqrt(),
            ]
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net(x[None]), logits)  # and the network is as it was
    assert not [module for module in net.modules() if module._forward_hooks]


def test_networks_without_images_in_between_have_no_statistics():
    for found, x in (
        (backbone("mlp", (7,), (5, 5)), torch.randn(4, 7)),
        (own(small_network, torch.zeros(2, 3, 8, 8)), torch.randn(4, 3, 8, 8)),
    ):
        net = ParticleNet(found, 5, particles=2)
        with torch.no_grad(), first_stages(net.eval()) as statistics:
            net(x[None])
            assert statistics(x).tolist() == [[0.0]] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    settings = {
        "backbone": "resnet8",
        "particles": 2,
        "shared_stages": 2,
        "epochs": 1,
        "calibration": "temperature",
    }
    settings |= {"refit": True, "calibration_folds": 2, "familiarity": True}
    path = tmp_path_factory.mktemp("familiarity") / "run"
    rfdlc.train("digits-lt", "rf-dlc", path, **settings)
    return path


def test_a_run_keeps_what_training_samples_look_like(folder, tmp_path):
    data, model = rfdlc.load("digits-lt"), rfdlc.Model.load(folder)
    held, test = (
        rfdlc.Predictions.load(folder / f"{name}.npz")
        for name in ("held-out", "predictions")
    )
    assert held.unfamiliarity.shape == (len(data.train),)  # of both folds
    found = model.predict(data.test)
    assert found.unfamiliarity == pytest.approx(test.unfamiliarity, rel=1e-4, abs=1e-4)
    images = data.test.array
    noise = (
        np.random.default_rng(0)
        .integers(0, 256, (200, *images.shape[1:]))
        .astype(images.dtype)
    )
    new = model.predict(noise)
    truth = np.repeat([0, 1], [len(found), len(new)])
    assert (
        roc_auc_score(truth, np.concatenate([found.unfamiliarity, new.unfamiliarity]))
        > 0.99
    )

    utility = rfdlc.Utility.one_hot(model.classes).with_abstain(0.0, "unfamiliar")
    decider = model.decider.replace(utility=utility).fit_unfamiliar(
        held, false_alarm=0.05
    )
    assert decider.deferral.unfamiliar.kind == "given + energy + entropy"
    copy = model.save_pretrained(tmp_path / "copy")
    decider.save(copy / "decider.json")
    reasons = decider.explain(new).reason
    assert (reasons == "unfamiliar").mean() > 0.95
    assert (decider.explain(found).reason == "unfamiliar").mean() < 0.15
    strange = open_backend(copy).compute(noise)[2]  # as the server has it
    assert np.array_equal(strange, reasons == "unfamiliar")
    exported = rfdlc.export(copy, tmp_path / "model.pt2")
    assert exported.parity.decisions_changed == 0
    graph = torch.export.load(exported.path).module()
    assert np.array_equal(graph(torch.tensor(noise))[-1].numpy(), strange)
    (copy / "familiarity.safetensors").unlink()
    with pytest.raises(
        rfdlc.InputError, match="by scores of your own, which a graph has not"
    ):
        rfdlc.export(copy, tmp_path / "other.onnx")


def test_runs_without_it_have_no_unfamiliarity(folder, tmp_path):
    for file in folder.glob("*"):
        if file.name != "familiarity.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    images = rfdlc.load("digits-lt").test.array[:5]
    plain, other = (
        rfdlc.Model.load(place).predict(images) for place in (tmp_path, folder)
    )
    assert plain.unfamiliarity is None
    assert np.array_equal(plain.scores.values, other.scores.values)
    (tmp_path / "familiarity.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        rfdlc.InputError, match=r"familiarity.safetensors is not a file of weights"
    ):
        rfdlc.Model.load(tmp_path)
