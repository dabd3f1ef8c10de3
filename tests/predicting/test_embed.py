"""Features of images: the numbers of the network itself, kept with how they were made,
whatever was killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.data.embedding import Embedding
from rfdlc.data.images import ImageFiles, PackedText, Resizing
from rfdlc.predicting import embed as embedding_module
from rfdlc.predicting.parts import Parts
from rfdlc.serving.backend import open_backend

HERE = "tests.predicting.encoders"
SLOWLY = [sys.executable, "-m", "tests.predicting.slow_parts"]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
OPTIONS = {"image_size": 12, "mean": MEAN, "std": STD, "device": "cpu"}
NAMES = ["ant", "bee", "cat"]


def test_features_of_another_format_version_are_refused():
    fields = {"backbone": "resnet8", "input_shape": (3, 12, 12)}
    fields |= {"mean": MEAN, "std": STD}
    assert Embedding.read(fields, "features.npz").width == 1
    message = r"features.npz: .* has format version 2: this rfdlc reads version 1"
    with pytest.raises(rfdlc.InputError, match=message):
        Embedding.read({**fields, "version": 2}, "features.npz")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes that differ in colour, in two splits, of several sizes."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        for c, name in enumerate(NAMES):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = (
                    rng.integers(0, 60, (14 + i % 3, 16, 3), dtype=np.uint8)
                    + 60 * np.eye(3, dtype=np.uint8)[c]
                )
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(embedding_module, "ROWS", 16)


def decoded(root, names, crop=1.0):
    return ImageFiles(root, PackedText(names), 12, 3, Resizing(centre=crop)).decode()[0]


def by_hand(images):
    """What `corners` gives."""
    x = (images / 255 - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    return np.concatenate([x[..., :6].mean((2, 3)), x[..., 6:].mean((2, 3))], axis=1)


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_features_splits_labels_and_ids(photos, tmp_path, kind):
    out = tmp_path / f"f.{kind}"
    done = rfdlc.embed(photos, out, backbone=f"{HERE}:corners", **OPTIONS)
    assert (done.samples, done.skipped, done.embedding.width) == (81, 0, 6)
    data = rfdlc.load(out)
    assert data.classes.names == tuple(NAMES)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 60,
        "test": 21,
    }
    for split in data.splits.values():
        names = list(split.ids)
        np.testing.assert_allclose(
            split.array, by_hand(decoded(photos, names)), atol=1e-5
        )
        assert [NAMES[c] for c in split.labels] == [
            name.split("/")[1] for name in names
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        out.name,
        f"{out.name}.embedding.safetensors",
    ]
    assert data.embedding.is_like(done.embedding)


def test_flips_layers_and_crop(photos, tmp_path):
    more = {"flips": True, "layers": ["first", "output"], "crop": 0.5}
    rfdlc.embed(
        photos, tmp_path / "f.npz", backbone=f"{HERE}:corners", **OPTIONS, **more
    )
    split = rfdlc.load(tmp_path / "f.npz").test
    images = decoded(photos, list(split.ids), 0.5)
    halves = np.mean([by_hand(images), by_hand(images[..., ::-1])], axis=0)
    np.testing.assert_allclose(
        split.array[:, :3], halves.reshape(-1, 2, 3).mean(1), atol=1e-5
    )
    np.testing.assert_allclose(split.array[:, 3:], halves, atol=1e-5)


def test_arrays_of_another_size_and_grey(tmp_path):
    """Resized on the device as files are by pillow, within rounding; grey images are
    repeated.
    """
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (6, 24, 24), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(6) % 2, names=["no", "yes"])
    rfdlc.embed(
        tmp_path / "a.npz", tmp_path / "f.npz", backbone=f"{HERE}:corners", **OPTIONS
    )
    data = rfdlc.load(tmp_path / "f.npz", test_fraction=0)
    small = [
        np.asarray(Image.fromarray(image).resize((12, 12), Image.Resampling.BILINEAR))
        for image in images
    ]
    expected = by_hand(np.repeat(np.array(small)[:, None], 3, axis=1).astype(float))
    np.testing.assert_allclose(data.train.array, expected, atol=0.02)
    assert data.classes.names == ("no", "yes")


def test_a_list_a_table_and_a_folder_without_labels(photos, tmp_path):
    expected = {}
    rfdlc.embed(photos, tmp_path / "f.npz", backbone=f"{HERE}:corners", **OPTIONS)
    for split in rfdlc.load(tmp_path / "f.npz").splits.values():
        expected |= dict(zip(split.ids, split.array, strict=True))
    names = sorted(expected)[::5]
    labels = [name.split("/")[1] for name in names]
    (photos / "My_train.txt").write_text(
        "\n".join(f"{n} {NAMES.index(k)}" for n, k in zip(names, labels, strict=True))
    )
    rows = [f"{n},{k},train" for n, k in zip(names, labels, strict=True)]
    (photos / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    (photos / "plain.txt").write_text("\n".join(names))
    for source, labelled in (
        ("My_train.txt", True),
        ("table.csv", True),
        ("plain.txt", False),
    ):
        out = tmp_path / f"{source}.parquet"
        rfdlc.embed(photos / source, out, backbone=f"{HERE}:corners", **OPTIONS)
        table = parquet.read_table(out)
        assert table["id"].to_pylist() == names
        assert ("target" in table.column_names) == labelled
        assert not labelled or table["target"].to_pylist() == labels
        np.testing.assert_allclose(
            table["features"].to_pylist(), [expected[n] for n in names], atol=1e-6
        )
    with pytest.raises(
        rfdlc.InputError,
        match=r"plain.txt.parquet: has no labels: embed a labelled source",
    ):
        rfdlc.load(out)
    for file in ("My_train.txt", "table.csv", "plain.txt"):
        (photos / file).unlink()


def test_a_folder_of_lists_and_rows_of_unknown_splits(photos, tmp_path):
    names = [
        str(photos / "train" / name / f"{i}.png") for name in NAMES for i in range(4)
    ]
    lists = tmp_path / "lists"
    lists.mkdir()
    for split, some in (("train", names[::2]), ("test", names[1::2])):
        lines = [f"{name} {NAMES.index(Path(name).parent.name)}" for name in some]
        (lists / f"My_{split}.txt").write_text("\n".join(lines))
    (photos / "table.csv").write_text(
        "\n".join(["path,label,split", "train/ant/0.png,ant,holdout"])
    )
    given = {"backbone": f"{HERE}:corners", **OPTIONS}
    with pytest.raises(rfdlc.InputError, match="allow"):
        rfdlc.embed(lists, tmp_path / "f.npz", **given)
    assert (
        rfdlc.embed(lists, tmp_path / "f.npz", allow_links=True, **given).samples == 12
    )
    found = rfdlc.load(tmp_path / "f.npz")
    assert {name: list(split.ids) for name, split in found.splits.items()} == {
        "train": names[::2],
        "test": names[1::2],
    }
    with pytest.raises(
        rfdlc.InputError,
        match=r"the split 'holdout' in row 1 .* is unknown: expected train, val",
    ):
        rfdlc.embed(photos / "table.csv", tmp_path / "g.npz", **given)
    (photos / "table.csv").unlink()


def test_kill_9_and_go_on(photos, tmp_path, monkeypatch):
    """Also with weights that are drawn: they are the same every time."""
    whole, out, parts = (
        tmp_path / "whole.npz",
        tmp_path / "f.npz",
        tmp_path / "f.npz.parts",
    )
    given = {"backbone": f"{HERE}:random", "image_size": 12, "device": "cpu"}
    rfdlc.embed(photos, whole, **given)
    process = subprocess.Popen(
        [*SLOWLY, "embed", str(photos), str(out), given["backbone"]]
    )
    while not list(parts.glob("part-*-00000001.npz")):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before, written = len(list(parts.glob("part-*"))), []
    assert 2 <= before < 6
    assert not out.exists()
    write = Parts.write
    monkeypatch.setattr(
        Parts,
        "write",
        lambda self, part, *rest: (written.append(part), write(self, part, *rest)),
    )
    with pytest.raises(
        rfdlc.InputError,
        match=r"f.npz.parts was begun with other settings .embedding.:",
    ):
        rfdlc.embed(photos, out, **given, flips=True)
    assert rfdlc.embed(photos, out, **given).samples == 81
    assert written == list(range(before, 6))  # no part was done twice
    found, expected = np.load(out), np.load(whole)
    assert sorted(found.files) == sorted(expected.files)
    for name in set(expected.files) - {"embedding"}:  # which names the file of weights
        np.testing.assert_array_equal(found[name], expected[name])
    assert not parts.exists()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_processes_share_the_parts(photos, tmp_path, monkeypatch, order):
    monkeypatch.setenv("WORLD_SIZE", "2")
    complete = []
    for rank in order:
        monkeypatch.setenv("RANK", str(rank))
        complete.append(
            rfdlc.embed(
                photos, tmp_path / "f.parquet", backbone=f"{HERE}:corners", **OPTIONS
            ).complete
        )
    assert complete == [False, True]
    monkeypatch.delenv("WORLD_SIZE")
    data = rfdlc.load(tmp_path / "f.parquet")
    np.testing.assert_allclose(
        data.train.array, by_hand(decoded(photos, list(data.train.ids))), atol=1e-5
    )


def test_broken_images(photos, tmp_path):
    (photos / "test" / "cat" / "broken.png").write_bytes(b"no image")
    try:
        with pytest.raises(rfdlc.InputError, match=r"broken.png.*--skip-broken"):
            rfdlc.embed(
                photos, tmp_path / "f.npz", backbone=f"{HERE}:corners", **OPTIONS
            )
        done = rfdlc.embed(
            photos,
            tmp_path / "f.npz",
            backbone=f"{HERE}:corners",
            skip_broken=True,
            **OPTIONS,
        )
    finally:
        (photos / "test" / "cat" / "broken.png").unlink()
    assert (done.samples, done.skipped) == (81, 1)
    assert "broken.png" in done.skipped_file.read_text()
    assert len(rfdlc.load(tmp_path / "f.npz").test) == 21


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_a_model_of_features_predicts_from_images(photos, tmp_path, kind):
    features, run = tmp_path / f"f.{kind}", tmp_path / "run"
    rfdlc.embed(
        photos,
        features,
        backbone=f"{HERE}:random",
        image_size=12,
        flips=True,
        crop=0.8,
        device="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rfdlc.train(str(features), "ce", run, epochs=3, device="cpu")
    (tmp_path / f"f.{kind}.embedding.safetensors").unlink()  # the run has its own copy
    model = rfdlc.Model.load(run, device="cpu")
    by_features, by_images = model.predict(str(features)), model.predict(str(photos))
    assert by_images.ids.tolist() == by_features.ids.tolist()
    assert by_images.targets.tolist() == by_features.targets.tolist()
    np.testing.assert_allclose(
        by_images.scores.values, by_features.scores.values, atol=1e-4
    )
    images = decoded(photos, list(by_images.ids), 0.8)
    np.testing.assert_allclose(
        model.predict(images).scores.values, by_features.scores.values, atol=1e-4
    )
    done = rfdlc.predict(run, photos, tmp_path / "p.csv", split="train")
    np.testing.assert_allclose(
        rfdlc.Predictions.load(done.path).scores.values[0],
        model.decider.probabilities(model.predict(str(features), split="train")),
        atol=1e-5,
    )
    files = rfdlc.Split(
        ImageFiles(photos, PackedText(by_images.ids), 12), np.zeros(21, dtype=np.int64)
    )
    np.testing.assert_allclose(
        model.predict(files).scores.values, by_images.scores.values, atol=1e-5
    )
    own = by_images.scores.values[:, by_images.ids.tolist().index("test/bee/3.png")]
    np.testing.assert_allclose(
        model.predict(photos / "test" / "bee" / "3.png").scores.values[:, 0],
        own,
        atol=1e-5,
    )
    backend = open_backend(run)  # a server takes images, too
    np.testing.assert_allclose(
        backend.compute(images)[0], model.decider.probabilities(by_features), atol=1e-4
    )
    assert (backend.inputs.input_shape, backend.inputs.resizing.centre) == (
        (3, 12, 12),
        0.8,
    )
    (run / "embedding.safetensors").unlink()
    with pytest.raises(
        rfdlc.InputError, match="the weights of the embedding are not there"
    ):
        rfdlc.Model.load(run, device="cpu").predict(str(photos))
    assert len(rfdlc.Model.load(run, device="cpu").predict(str(features))) == 21


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_features_of_another_network_are_refused(photos, tmp_path, kind):
    for name in ("random", "corners"):
        rfdlc.embed(
            photos,
            tmp_path / f"{name}.{kind}",
            backbone=f"{HERE}:{name}",
            image_size=12,
            device="cpu",
        )
    (tmp_path / f"corners.{kind}.embedding.safetensors").unlink()
    with pytest.warns(
        UserWarning, match="will predict from features, but not from images"
    ):
        rfdlc.train(
            str(tmp_path / f"corners.{kind}"),
            "ce",
            tmp_path / "run",
            epochs=1,
            device="cpu",
        )
    with pytest.raises(
        rfdlc.InputError,
        match=r"has features of .*random \(6\), but this model was trained on",
    ):
        rfdlc.predict(tmp_path / "run", tmp_path / f"random.{kind}", tmp_path / "p.csv")
    assert (
        rfdlc.predict(
            tmp_path / "run", tmp_path / f"corners.{kind}", tmp_path / "p.csv"
        ).samples
        == 21
    )


def test_onnx(photos, tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["means"], keepdims=0)]
    nodes += [helper.make_node("Add", ["means", "means"], ["twice"])]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3, 12, 12])
    ]  # a fixed size of batches
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 3])
        for name in ("means", "twice")
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        outputs,
        [helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])],
    )
    versions = {"opset_imports": [helper.make_opsetid("", 18)], "ir_version": 9}
    onnx.save(helper.make_model(graph, **versions), tmp_path / "m.onnx")
    given = {
        "backbone": str(tmp_path / "m.onnx"),
        "layers": ["output", "twice"],
        **OPTIONS,
    }
    rfdlc.embed(photos, tmp_path / "f.parquet", **given)
    data = rfdlc.load(tmp_path / "f.parquet")
    means = by_hand(decoded(photos, list(data.test.ids))).reshape(-1, 2, 3).mean(1)
    np.testing.assert_allclose(
        data.test.array, np.concatenate([means, 2 * means], axis=1), atol=1e-5
    )
    (tmp_path / "m.onnx").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = rfdlc.train(
            str(tmp_path / "f.parquet"), "ce", tmp_path / "run", epochs=1, device="cpu"
        )
    same = (
        model.predict(str(photos)).scores.values,
        model.predict(str(tmp_path / "f.parquet")).scores.values,
    )
    np.testing.assert_allclose(*same, atol=1e-4)
    with pytest.raises(
        rfdlc.InputError, match=r"m.onnx: cannot be read as an ONNX model"
    ):
        rfdlc.embed(photos, tmp_path / "g.parquet", **given)


def test_timm_and_weights_of_a_file(photos, tmp_path):
    if find_spec("timm") is None:
        pytest.skip("needs timm")
    from rfdlc.training.networks.pretrained import load_backbone

    network = load_backbone("timm:resnet10t", image_size=32)
    for value in network.parameters():
        torch.nn.init.normal_(
            value, std=0.1, generator=torch.Generator().manual_seed(1)
        )
    save_file(
        {k: v.contiguous() for k, v in network.state_dict().items()},
        tmp_path / "w.safetensors",
    )
    out = tmp_path / "f.npz"
    given = {
        "pretrained": str(tmp_path / "w.safetensors"),
        "image_size": 32,
        "device": "cpu",
    }
    done = rfdlc.embed(photos, out, backbone="timm:resnet10t", **given)
    assert done.embedding.mean == network.preprocessing.mean
    assert load_file(done.weights).keys() == network.state_dict().keys()
    split, scale = (
        rfdlc.load(out).test,
        [np.array(v)[:, None, None] for v in (done.embedding.mean, done.embedding.std)],
    )
    images = ImageFiles(
        photos, PackedText(split.ids), 32, 3, done.embedding.resizing
    ).decode()[0]
    with torch.no_grad():
        expected = network(
            torch.tensor((images / 255 - scale[0]) / scale[1], dtype=torch.float32)
        ).numpy()
    np.testing.assert_allclose(
        split.array, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max()
    )
    with pytest.raises(rfdlc.InputError, match="weights of another network"):
        rfdlc.embed(photos, tmp_path / "g.npz", backbone="timm:resnet18", **given)


def test_sources_without_images(photos, tmp_path):
    given = {"backbone": f"{HERE}:corners", **OPTIONS}
    np.savez(tmp_path / "f.npz", x=np.eye(3), y=np.arange(3))
    (tmp_path / "t.csv").write_text("a,label\n1,x\n2,y\n3,x\n")
    for source in ("f.npz", "t.csv"):
        with pytest.raises(rfdlc.InputError, match="holds features, not images"):
            rfdlc.embed(tmp_path / source, tmp_path / "g.npz", **given)
    with pytest.raises(
        rfdlc.InputError, match="target 'kind' is a column of a table of images, but"
    ):
        rfdlc.embed(photos, tmp_path / "g.npz", target="kind", **given)
    (tmp_path / "images.csv").write_text("path,label\na.png,x\n")
    with pytest.raises(
        rfdlc.InputError,
        match=r"column 'labels' does not exist: .*did you mean 'label'",
    ):
        rfdlc.embed(
            tmp_path / "images.csv", tmp_path / "g.npz", target="labels", **given
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "resnet9"}, "'resnet9' is unknown: expected one of"),
        ({"backbone": "nowhere.at:all"}, "cannot be imported"),
        ({"backbone": f"{HERE}:images_out"}, "cannot compute images of shape"),
        (
            {"layers": ["second"]},
            "layer 'second' is unknown: expected one of output, first",
        ),
        ({"mean": (0.5,)}, "mean and std have 1 and 3 numbers: expected 3"),
        ({"channels": 1}, "cannot compute images of shape|channels"),
        ({"pretrained": "nowhere.safetensors"}, "is not a file"),
    ],
)
def test_what_cannot_be_used_raises_before_long_work(
    photos, tmp_path, changes, message
):
    given = {"backbone": f"{HERE}:corners", **OPTIONS, **changes}
    with pytest.raises(rfdlc.InputError, match=message):
        rfdlc.embed(photos, tmp_path / "f.npz", **given)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path):
    out = tmp_path / "d.npz"
    words = [
        "embed",
        "digits-lt",
        "--backbone",
        "resnet8",
        "--channels",
        "1",
        "--image-size",
        "8",
        "--out",
        str(out),
    ]
    found = CliRunner().invoke(app, [*words, "--mean", "0.3", "--std", "0.3", "--json"])
    told = json.loads(found.stdout)
    assert (told["samples"], told["embedding"]["width"], told["embedding"]["mean"]) == (
        885,
        64,
        [0.3],
    )
    assert len(rfdlc.load(out).test) == 450
    wrong = CliRunner().invoke(app, [*words, "--mean", "grey"])
    assert "--mean 'grey': expected a number per channel" in str(wrong.exception)
