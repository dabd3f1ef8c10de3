"""The preset for features: which data it is for, heads that start at class means,
dropout, and the whole product.
"""

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rfdlc
from rfdlc.data.loader import seeded
from rfdlc.errors import InputError
from rfdlc.probabilities.classes import Classes
from rfdlc.training.building import method_net
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import (
    SHARES,
    PreparedStage,
    fit_whitening,
    start_at_class_means,
)
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.networks.backbones import Whitening
from rfdlc.training.networks.stack import Dropout
from rfdlc.training.run import Run

WIDTH = 64
SHORT = {"epochs": 100, "target_prior": "uniform", "head": "mixed"}  # 200 steps


def features(counts=(60, 30, 12, 4), width=WIDTH, seed=0):
    """Long-tailed classes around random means, with a common offset and features of
    different scales.
    """
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    means = np.random.default_rng(99).normal(0, 1.0, (len(counts), width))
    scales = np.geomspace(0.1, 10, width)
    return (
        (means[labels] + rng.normal(0, 1.5, (len(labels), width)) + 3) * scales
    ).astype(np.float32), labels


def arrays():
    (x, y), (test_x, test_y) = features(), features((20,) * 4, seed=1)
    return {"train_x": x, "train_y": y, "test_x": test_x, "test_y": test_y}


@pytest.fixture(scope="module")
def data():
    return rfdlc.load(arrays())


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return rfdlc.train(
        data, out=tmp_path_factory.mktemp("runs") / "features", **SHORT
    ).path


# -- which data it is for


@pytest.mark.parametrize(
    ("width", "preset"), [(WIDTH, "features"), (WIDTH - 1, "table")]
)
def test_wide_arrays_are_features(width, preset):
    data = rfdlc.load((*features(width=width),), test_fraction=0)
    assert data.suits == preset
    assert (
        resolve("rf-dlc", "cifar100-lt", {}, data.suits)[1].preset == preset
    )  # images have the name's own preset


def test_columns_of_lists_are_features_and_named_columns_are_not(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    x, y = features()
    pq.write_table(
        pa.table({"embedding": list(x), "target": y}), tmp_path / "lists.parquet"
    )
    pq.write_table(
        pa.table({f"f{i}": x[:, i] for i in range(WIDTH)} | {"target": y}),
        tmp_path / "named.parquet",
    )
    lists, named = (
        rfdlc.load(tmp_path / f"{name}.parquet") for name in ("lists", "named")
    )
    assert (lists.input_shape, lists.suits) == ((WIDTH,), "features")
    assert (named.input_shape, named.suits) == ((WIDTH,), "table")


def test_a_preset_can_be_chosen():
    assert (
        resolve("rf-dlc", "", {"preset": "table"}, "features", 1000)[1]
        == resolve("rf-dlc", "", {}, "table", 1000)[1]
    )
    assert resolve("rf-dlc", "", {"preset": "features"}, "table")[1].widths == ()
    assert (
        resolve("ce", "", {"preset": "none"}, "features")[1].widths
        == TrainConfig().widths
    )
    with pytest.raises(
        InputError, match=r"preset 'feature' is unknown.*did you mean 'features'"
    ):
        resolve("rf-dlc", "", {"preset": "feature"}, "features")


def test_a_validation_split_is_not_trained_on_again(data, tmp_path):
    assert resolve("rf-dlc", "", {}, "features")[1].refit
    held = data.hold_out(0.3)
    model = rfdlc.train(held, out=tmp_path / "run", epochs=1)
    assert not model.config.refit
    with pytest.raises(InputError, match="refit trains again on held-out samples"):
        rfdlc.train(held, out=tmp_path / "other", epochs=1, refit=True)


# -- heads that start at class means


@pytest.mark.parametrize("head", ["cosine", "mixed"])
def test_heads_start_at_the_weighted_means_of_classes(data, head):
    """Cosine heads at their directions; the linear head of the second particle has the
    logits of the nearest mean.
    """
    classes = Classes.from_counts((*data.classes.counts, 0))
    config = resolve(
        "rf-dlc", "", {"seed": 3, "head": head, "head_scale": 8}, "features"
    )[1]
    seeds, method = (3, 4), METHODS["rf-dlc"]
    net = method_net(method, config, data.input_shape, classes, seeds)
    before = net.head.weight.clone()
    absent = replace(data, classes=classes)
    stage = PreparedStage(
        0,
        [(method, config.replace(seed=seed), classes) for seed in seeds],
        absent,
        torch.device("cpu"),
    )
    start_at_class_means(net, stage)
    x = (data.train.array - np.array(data.normalisation.mean)) / np.array(
        data.normalisation.std
    )
    unit, scaled = x / np.linalg.norm(x, axis=1, keepdims=True), x / WIDTH**0.5
    logits = (
        net.eval()(torch.tensor(x, dtype=torch.float32).expand(2, *x.shape))
        .detach()
        .numpy()
    )  # (R, M, N, C)
    order, y = stage.loader.draw_order(0).numpy(), data.train.labels
    for run, seed in enumerate(seeds):
        shares = torch.rand((3, len(y)), generator=seeded(SHARES, seed, 0)).numpy()
        for particle in range(3):
            linear = head == "mixed" and particle == 1
            for c in range(len(data.classes)):
                places = np.flatnonzero(y[order[run]] == c)
                weights, members = (
                    shares[particle, places],
                    (scaled if linear else unit)[order[run, places]],
                )
                mean = np.average(members, 0, weights)
                if linear:  # a constant per sample apart, -|x - mean|^2 / 2
                    expected = 8 / 2 * (scaled @ mean - mean @ mean / 2)
                else:
                    expected = 8 * unit @ (mean / np.linalg.norm(mean))
                np.testing.assert_allclose(
                    logits[run, particle, :, c], expected, atol=1e-4
                )
    assert torch.equal(net.head.weight[..., -1], before[..., -1])


def test_class_means_are_for_cosine_heads():
    with pytest.raises(
        InputError, match="class-means is for cosine and mixed heads: set head=mixed"
    ):
        TrainConfig(head="linear", head_init="class-means")


# -- dropout


def dropped(dropout, steps, shape):
    ones = torch.ones(shape)
    return torch.stack([dropout(ones) == 0 for _ in range(steps)]).float()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_drops_independently(share):
    dropout = Dropout(2, share)
    dropout.seed([7], 1)
    kept = dropout(torch.ones(2, 3, 5))
    assert all(
        value == 0 or value == pytest.approx(1 / (1 - share))
        for value in kept.unique().tolist()
    )
    found = dropped(dropout, 20, (2, 50, 100))  # steps, networks, batch, features
    variance = share * (1 - share)
    assert abs(found.mean() - share) < 4 * (variance / found.numel()) ** 0.5
    for axis in range(
        found.ndim
    ):  # steps, networks, samples and features that are neighbours are not correlated
        length = found.shape[axis]
        products = (found.narrow(axis, 0, length - 1) - share) * (
            found.narrow(axis, 1, length - 1) - share
        )
        assert abs(products.mean()) < 4 * variance / products.numel() ** 0.5, axis
    shifted = (found[:-1].flatten(2)[..., 1:] - share) * (
        found[1:].flatten(2)[..., :-1] - share
    )
    assert (
        abs(shifted.mean()) < 4 * variance / shifted.numel() ** 0.5
    )  # nor does a step repeat the last one, moved


def test_dropout_depends_on_seed_epoch_and_rank_and_not_on_the_stack():
    alone, both = Dropout(3, 0.4), Dropout(6, 0.4)

    def drawn(dropout, seeds, epoch=2, rank=0):
        dropout.seed(seeds, epoch, rank)
        return dropped(dropout, 3, (len(dropout.key), 8, 16))

    expected = drawn(alone, [5])
    assert torch.equal(drawn(alone, [5]), expected)
    assert torch.equal(drawn(both, [1, 5])[:, 3:], expected)
    for other in (
        drawn(alone, [6]),
        drawn(alone, [5], epoch=3),
        drawn(alone, [5], rank=1),
    ):
        assert 0.4 < (other != expected).float().mean() < 0.56  # 2 * 0.4 * 0.6 = 0.48
    alone.eval()
    assert torch.equal(alone(torch.ones(3, 2, 2)), torch.ones(3, 2, 2))


# -- whitening


def test_whitening_is_by_the_shrunk_covariance_within_classes(data):
    """As naive: the scatter around class means, sample by sample, and the inverse root
    of its mixture with t I.
    """
    share = 0.6
    config = resolve("rf-dlc", "", {"whiten": share, "seed": 3}, "features")[1]
    method, device = METHODS["rf-dlc"], torch.device("cpu")
    seeds = (3, 4)
    net = method_net(method, config, data.input_shape, data.classes, seeds)
    runs = [(method, config.replace(seed=seed), data.classes) for seed in seeds]
    fit_whitening(net, PreparedStage(0, runs, data, device))
    scale = data.normalisation
    x = (data.train.array.astype(np.float64) - scale.mean) / scale.std
    scatter = np.zeros((WIDTH, WIDTH))
    for c in range(4):
        own = x[data.train.labels == c]
        scatter += sum(np.outer(row, row) for row in own - own.mean(0))
    scatter /= len(x) - 4
    t = np.trace(scatter) / WIDTH
    values, vectors = np.linalg.eigh(share * scatter + (1 - share) * t * np.eye(WIDTH))
    expected = x @ vectors @ np.diag(values**-0.5) @ vectors.T
    expected /= expected.std(0)
    found = net.trunk(torch.tensor(x, dtype=torch.float32).expand(2, -1, -1))
    for run in range(2):
        np.testing.assert_allclose(found[run], expected, atol=2e-4)
    assert not net.branches  # the particles share it


def test_samples_that_are_whitened_at_once_train_as_in_a_stack(data, tmp_path):
    given = {**SHORT, "head": "cosine", "epochs": 5, "refit": False}
    rfdlc.train(data, out=tmp_path / "alone", **given)
    rfdlc.train_many(
        data,
        [
            rfdlc.RunSpec(tmp_path / f"{seed}", settings={**given, "seed": seed})
            for seed in (0, 1)
        ],
    )
    alone, stacked = (
        load_file(tmp_path / name / "model.safetensors") for name in ("alone", "0")
    )
    assert "trunk.0.weight" in alone
    for name, weights in alone.items():
        torch.testing.assert_close(stacked[name], weights, atol=2e-5, rtol=1e-4)


def test_classes_of_single_samples_leave_nothing_to_whiten():
    layer = Whitening(2, 5, 0.5)
    layer.fit(torch.zeros(1, 5, 5), torch.eye(5)[None])
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(layer(x), x)


def test_a_feature_that_is_constant_in_training_is_not_magnified():
    """Sums of squares in 32 bits leave such a variance, and new samples may have other
    values there.
    """
    covariance = torch.diag(torch.tensor([1e-9, 1.0, 1.0, 1.0]))[None]
    layer = Whitening(1, 4, 0.4)
    layer.fit(covariance, covariance)
    assert layer.weight.abs().max() < 3


# -- calibration out of fold


def test_every_sample_calibrates_by_a_training_that_did_not_see_it(data, tmp_path):
    given = {**SHORT, "epochs": 3}
    model = rfdlc.train(data, out=tmp_path / "run", calibration_folds=3, **given)
    held, fold = (
        rfdlc.Predictions.load(tmp_path / "run" / "held-out.npz"),
        data.train.folds(3, 0),
    )
    order = np.argsort(fold, kind="stable")
    np.testing.assert_array_equal(held.targets, data.train.labels[order])
    for k in range(3):
        apart = data.held_apart(np.flatnonzero(fold != k), np.flatnonzero(fold == k))
        alone = rfdlc.train(apart, out=tmp_path / f"{k}", **given)
        np.testing.assert_allclose(
            held.scores.values[:, fold[order] == k],
            alone.predict(apart.val).scores.values,
        )
    again = model.decider.replace(calibration="temperature").fit(held, balanced=True)
    np.testing.assert_allclose(
        model.decider.probabilities(held), again.probabilities(held)
    )
    rows = csv.DictReader((tmp_path / "run" / "history.csv").read_text().splitlines())
    assert {row["phase"] for row in rows} == {"0", "1", "2", "3"}


def test_a_run_that_stops_between_folds_continues(data, tmp_path, monkeypatch):
    given = {**SHORT, "head": "cosine", "epochs": 3, "calibration_folds": 3}
    whole = rfdlc.train(data, out=tmp_path / "whole", **given)
    save, written = Run.write, []

    def once(self, name, content):
        save(self, name, content)
        written.append(name)
        if written.count("held-out.npz") == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "write", once)
    with pytest.raises(KeyboardInterrupt):
        rfdlc.train(data, out=tmp_path / "stopped", checkpoint_every=1, **given)
    monkeypatch.setattr(Run, "write", save)
    rfdlc.resume(tmp_path / "stopped", data)
    for name in ("held-out.npz", "model.safetensors", "decider.json"):
        assert (tmp_path / "stopped" / name).read_bytes() == (
            whole.path / name
        ).read_bytes()


# -- settings of each head


def test_a_head_brings_its_own_settings():
    found = {
        head: resolve("rf-dlc", "", {"head": head}, "features")[1]
        for head in ("cosine", "mixed")
    }
    assert resolve("rf-dlc", "", {}, "features")[1] == found["cosine"]
    assert [(c.head_scale, c.dropout, c.mixup) for c in found.values()] == [
        (30, 0.3, 0.3),
        (20, 0, 0),
    ]
    assert (
        resolve("rf-dlc", "", {"head": "mixed", "mixup": 0.2}, "features")[1].mixup
        == 0.2
    )


# -- the whole product


def test_stacked_runs_are_those_trained_alone(data, run, tmp_path):
    specs = [
        rfdlc.RunSpec(tmp_path / f"{seed}", settings={"seed": seed, **SHORT})
        for seed in (0, 1)
    ]
    rfdlc.train_many(data, specs)
    alone, stacked = (
        load_file(folder / "model.safetensors") for folder in (run, tmp_path / "0")
    )
    for name, weights in alone.items():
        torch.testing.assert_close(stacked[name], weights, atol=2e-5, rtol=1e-4)


def test_better_than_balanced_logistic_regression_in_spite_of_offset_and_scales(
    run, data
):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = rfdlc.Model.load(run)
    assert (model.config.preset, model.config.widths, model.net.name) == (
        "features",
        (),
        "mlp",
    )
    rival = make_pipeline(
        StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000)
    )
    theirs = rival.fit(data.train.array, data.train.labels).score(
        data.test.array, data.test.labels
    )
    assert np.mean(model.decide(data.test.array) == data.test.labels) > theirs > 0.5


@pytest.mark.usefixtures("quick_exports")
def test_exported_and_served_it_decides_the_same(run, data, tmp_path):
    from rfdlc.serving.backend import Answer, open_backend

    actions = rfdlc.Model.load(run).decide(data.test.array)
    found = rfdlc.export(run, tmp_path / "model.onnx")
    assert found.parity.decisions_changed == 0
    np.testing.assert_array_equal(
        rfdlc.OnnxModel.load(found.path).decide(data.test.array).action, actions
    )
    for path in (run, found.path):
        backend = open_backend(path)
        answer = Answer.of(backend.decider, *backend.compute(data.test.array))
        names = [backend.decider.utility.actions[action] for action in actions]
        assert answer.columns["action"] == names


@pytest.mark.parametrize(
    ("settings", "shared"),
    [({}, 1), ({"widths": (8, 8)}, 1), ({"whiten": 0.0, "widths": (8,)}, 0)],
)
def test_particles_share_whitening_and_nothing_else(settings, shared):
    row, config = resolve(
        "rf-dlc",
        "",
        {"preset": "features", "particles": 3, **settings},
        "features",
        100,
    )
    net = method_net(row, config, (20,), Classes.from_counts([50, 30, 20]), (0,))
    assert len(net.trunk) == shared
    assert all(isinstance(layer, Whitening) for layer in net.trunk)


def test_images_are_whitened_after_their_augmentation(tmp_path):
    settings = {
        "backbone": "mlp",
        "whiten": 0.4,
        "widths": (4,),
        "epochs": 1,
        "device": "cpu",
    }
    assert (
        len(
            rfdlc.train("digits-lt", "rf-dlc", tmp_path / "run", **settings).predict(
                "digits-lt"
            )
        )
        == 450
    )
