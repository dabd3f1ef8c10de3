"""Networks of timm: trained, resumed, loaded, exported and served from the run folder
alone; stages; wrong input.
"""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.data.dataset import Split
from rfdlc.errors import InputError
from rfdlc.progress import shown

torch = pytest.importorskip("torch")
if find_spec("timm") is None:
    pytest.skip(
        "timm is not installed: pip install 'rfdlc[vision]'", allow_module_level=True
    )
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from rfdlc.probabilities.classes import Classes  # noqa: E402
from rfdlc.training import loop  # noqa: E402
from rfdlc.training.building import method_net, start_of  # noqa: E402
from rfdlc.training.methods import resolve  # noqa: E402
from rfdlc.training.networks import pretrained  # noqa: E402
from rfdlc.training.networks.lowrank import LowRank  # noqa: E402

NETWORKS = {
    "test_resnet": 5,
    "test_vit": 7,
    "test_efficientnet": 6,
    "test_convnext": 5,
}  # and their stages
ROTARY = (  # its blocks are called with embeddings of positions
    "vit_small_patch16_dinov3"
)
NETWORKS[ROTARY] = 4
SIDE = 32
OPTIONS = {name: {} for name in NETWORKS} | {"test_vit": {"img_size": SIDE}}
OPTIONS[ROTARY] = {"img_size": SIDE, "depth": 3, "embed_dim": 32, "num_heads": 2}
OPTIONS |= {
    f"test_vit {name}": {"img_size": SIDE, "depth": depth}
    for name, depth in (("small", 1), ("middle", 2))
}
FEW = {
    "epochs": 1,
    "batch_size": 16,
    "learning_rate": 0.01,
    "device": "cpu",
    "particles": 2,
    "refit": False,
}
TINY = {
    "backbone": "timm:test_vit",
    "backbone_options": {"depth": 1},
    "image_size": SIDE,
    "shared_stages": 2,
}
TINY |= {**FEW, "epochs": 5, "learning_rate": 0.03}


@pytest.fixture(scope="module")
def timm():
    return pretrained._timm()


@pytest.fixture(scope="module")
def weights(timm, tmp_path_factory):
    """Files of networks with random weights and a classifier of ten classes, as if they
    were pretrained.
    """
    folder = tmp_path_factory.mktemp("weights")
    for name, options in OPTIONS.items():
        torch.manual_seed(1)
        network = timm.create_model(name.split()[0], num_classes=10, **options)
        save_file(network.state_dict(), folder / f"{name}.safetensors")
    return {name: folder / f"{name}.safetensors" for name in OPTIONS}


def pictures(side=SIDE, channels=3):
    """Noise around a colour per class, long-tailed."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 200, (3, channels, 1, 1))
    labels = {
        "train": np.repeat(np.arange(3), (40, 20, 10)),
        "test": np.repeat(np.arange(3), 6),
    }
    splits = {
        name: Split(
            (colours[y] + rng.integers(0, 50, (len(y), channels, side, side))).astype(
                np.uint8
            ),
            y,
        )
        for name, y in labels.items()
    }
    return rfdlc.Dataset.of("pictures", ["ant", "bee", "cat"], splits)


@pytest.fixture(scope="module")
def run(weights, tmp_path_factory):
    """Two heads on one network; the file of weights is gone afterwards."""
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "copy.safetensors"
    file.write_bytes(weights["test_vit small"].read_bytes())
    rfdlc.train(pictures(), out=folder / "run", pretrained=file, **TINY)
    file.unlink()
    return folder / "run"


def built(name, weights, **settings):
    options = {key: value for key, value in OPTIONS[name].items() if key != "img_size"}
    known = {
        "backbone": f"timm:{name.split()[0]}",
        "backbone_options": options,
        "image_size": SIDE,
    }
    method, config = resolve("ce", "", {**known, **settings})
    start = start_of(config.replace(pretrained=str(weights[name])))
    return method_net(
        method,
        config,
        (3, SIDE, SIDE),
        Classes.from_counts([3, 2, 1]),
        (0,),
        start=start.weights,
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_the_stages_of_a_network_are_the_network(name, timm, weights):
    """In both modes, with the statistics of batch norm; the trunk exists once, the
    other stages per particle.
    """
    one = timm.create_model(name, num_classes=0, **OPTIONS[name])
    one.load_state_dict(load_file(weights[name]), strict=False)
    net = built(name, weights, particles=3, shared_stages=2)
    assert (len(net.trunk), len(net.branches)) == (2, NETWORKS[name] - 2)
    x = torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for training in (
        False,
        True,
        False,
    ):  # the last with the statistics of the batch before
        expected = one.train(training)(x)
        for found in net.train(training).features(x[None]):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    counted = [
        sum(p.numel() for p in part.parameters()) for part in (net.trunk, net.branches)
    ]
    assert counted[0] + counted[1] / 3 == sum(p.numel() for p in one.parameters())


def test_networks_without_batch_normalisation_are_trained_at_a_lower_rate(
    run, weights, tmp_path
):
    assert (
        json.loads((run / "config.json").read_text())["settings"]["backbone_rate"]
        == pretrained.SLOW
    )
    given = {
        "backbone": "timm:test_efficientnet",
        "pretrained": weights["test_efficientnet"],
        "image_size": SIDE,
    }
    assert (
        rfdlc.train(
            pictures(), "ce", tmp_path / "run", **given, **FEW
        ).config.backbone_rate
        == 1
    )
    asked = rfdlc.train(
        pictures(),
        "ce",
        tmp_path / "asked",
        pretrained=weights["test_vit small"],
        **TINY,
        backbone_rate=1,
    )
    assert asked.config.backbone_rate == 1


def test_a_run_predicts_without_its_weights_file(run):
    config = json.loads((run / "config.json").read_text())
    known = config["settings"]
    assert (known["image_size"], known["interpolation"]) == (SIDE, "bicubic")
    assert config["data"]["normalisation"] == {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }  # timm's, not that of the data
    model, data = rfdlc.Model.load(run, device="cpu"), pictures()
    recorded = rfdlc.Predictions.load(run).scores.values
    np.testing.assert_array_equal(model.predict(data).scores.values, recorded)
    found = json.loads((run / "metrics.json").read_text())
    assert found["test"]["accuracy"] > 0.5
    assert (
        found["diversity"]["mutual_information"] > 0
    )  # equal copies below different heads
    start = load_file(run / "pretrained.safetensors")
    trained = load_file(run / "model.safetensors")
    moved = (
        trained["trunk.0.copy_network__patch_embed__proj__weight"][0]
        - start["patch_embed.proj.weight"]
    )
    assert 0 < moved.abs().max() < 0.2


def test_resumed_and_refitted_it_is_the_undisturbed_run(weights, tmp_path, monkeypatch):
    """Killed in the first epoch: what it started from is in its folder. Dropout is
    drawn by (seed, epoch).
    """
    file = tmp_path / "copy.safetensors"
    file.write_bytes(weights["test_vit middle"].read_bytes())
    given = {
        "backbone": "timm:test_vit",
        "pretrained": file,
        "image_size": SIDE,
        **FEW,
        "refit": True,
    }
    given |= {
        "backbone_options": {"depth": 2, "drop_path_rate": 0.2},
        "shared_stages": 1,
    }
    whole = rfdlc.train(pictures(), out=tmp_path / "whole", **given).path

    def fail(*_):
        raise RuntimeError("killed")

    monkeypatch.setattr(loop, "_check_numbers", fail)
    with pytest.raises(RuntimeError, match="killed"):
        rfdlc.train(pictures(), out=tmp_path / "run", **given)
    monkeypatch.undo()
    file.unlink()
    rfdlc.resume(tmp_path / "run", pictures())
    assert (tmp_path / "run/model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()


def test_runs_of_a_stack_are_those_trained_alone(weights, run, tmp_path):
    settings = {"pretrained": weights["test_vit small"], **TINY}
    specs = [
        rfdlc.RunSpec(tmp_path / str(seed), "rf-dlc", {"seed": seed, **settings})
        for seed in (0, 1)
    ]
    first, second = (
        load_file(model.path / "model.safetensors")
        for model in rfdlc.train_many(pictures(), specs)
    )
    alone = load_file(run / "model.safetensors")
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(first["head.weight"], second["head.weight"])


@pytest.mark.usefixtures("quick_exports")
def test_exported_it_decides_the_same_and_is_served(run, tmp_path):
    import onnx
    from starlette.testclient import TestClient

    from rfdlc.serving.app import create_app
    from rfdlc.serving.backend import open_backend

    parity = rfdlc.export(run, tmp_path / "model.onnx").parity
    assert parity.decisions_changed == 0
    graph = onnx.load(tmp_path / "model.onnx").graph
    weights = {tensor.name for tensor in graph.initializer}
    sliced = [
        node
        for node in graph.node
        if node.op_type in ("Split", "Gather", "Slice") and weights & {node.input[0]}
    ]
    assert not sliced  # copies are exported as plain modules
    samples = pictures().test.inputs
    actions = rfdlc.Model.load(run, device="cpu").decide(samples)
    np.testing.assert_array_equal(
        rfdlc.OnnxModel.load(tmp_path / "model.onnx").decide(samples).action, actions
    )
    names = ["ant", "bee", "cat"]
    for model in (tmp_path / "model.onnx", run):
        with TestClient(
            create_app(open_backend(model)), base_url="http://localhost"
        ) as client:
            answer = client.post("/decide", json={"arrays": samples.tolist()}).json()
        assert answer["action"] == [names[action] for action in actions]


def test_photographs_from_the_command_line(weights, tmp_path):
    """Files are decoded at the size of the network; the folder says how, so that others
    are decoded the same way.
    """
    for name, split in pictures(40).splits.items():
        for number, (pixels, label) in enumerate(
            zip(split.inputs, split.labels, strict=True)
        ):
            place = tmp_path / "photos" / name / "abc"[label] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.transpose(1, 2, 0)).save(place)
    words = [
        "backbone=timm:test_convnext",
        f"pretrained={weights['test_convnext']}",
        "backbone.drop_rate=0.1",
    ]
    words += [
        "image_size=32",
        "particles=2",
        "shared_stages=4",
        "epochs=1",
        "refit=false",
        "device=cpu",
    ]
    given = ["train", str(tmp_path / "photos"), "--out", str(tmp_path / "run"), *words]
    with shown():
        result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "timm:test_convnext at 32 pixels, pretrained" in result.stderr
    assert "4 of 5 stages shared" in result.stderr
    assert "its classifier of 10 classes is ignored" in result.stderr
    assert "particles: the arg max of two of them differs on" in result.stdout
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data"]["input_shape"] == [3, 32, 32]
    assert config["data"]["resizing"]["interpolation"] == "bicubic"
    assert config["settings"]["backbone_options"] == {"drop_rate": 0.1}
    out = tmp_path / "predictions.npz"
    given = [
        "predict",
        str(tmp_path / "run"),
        str(tmp_path / "photos/test"),
        "--out",
        str(out),
    ]
    assert CliRunner().invoke(app, given).exit_code == 0
    recorded = rfdlc.Predictions.load(tmp_path / "run")
    assert (
        len(rfdlc.Predictions.load(out).scores.values[0])
        == len(recorded.scores.values[0])
        == 18
    )


def test_images_in_memory_are_resized_as_pillow_does():
    pixels = np.random.default_rng(0).integers(60, 190, (20, 28), dtype=np.uint8)
    for size in (12, 45):
        for name in ("bilinear", "bicubic"):
            resize = pretrained.Resize(20, 28, size, name)
            found = resize(
                torch.tensor(pixels, dtype=torch.float32).expand(2, 1, 3, 20, 28)
            )
            square = Image.fromarray(pixels).crop((4, 0, 24, 20))
            expected = np.asarray(
                square.resize((size, size), Image.Resampling[name.upper()]),
                dtype=np.float32,
            )
            assert found.shape == (2, 1, 3, size, size)
            assert (
                np.abs(found[1, 0, 2].numpy() - expected).max() <= 1.01
            )  # which rounds twice


def test_any_size_and_channels(timm, weights, tmp_path):
    """A file for other images is converted: embeddings of positions are resampled,
    colours summed.
    """
    data = pictures(20, channels=1)
    given = {
        "backbone": "timm:test_vit",
        "pretrained": weights["test_vit"],
        "image_size": 48,
        **FEW,
    }
    model = rfdlc.train(
        data, out=tmp_path / "run", backbone_options={"in_chans": 1}, **given
    )
    found, start = (
        load_file(model.path / "pretrained.safetensors"),
        load_file(weights["test_vit"]),
    )
    torch.testing.assert_close(
        found["patch_embed.proj.weight"],
        start["patch_embed.proj.weight"].sum(1, keepdim=True),
    )
    assert found["pos_embed"].shape[1] == start["pos_embed"].shape[1] + 9 - 4
    again = rfdlc.Model.load(model.path, device="cpu").predict(data).scores.values
    np.testing.assert_array_equal(again, model.predict(data).scores.values)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 16, 8))

    def forward(self, x):
        return self.body(x)


def test_weights_of_a_network_of_ones_own(tmp_path):
    torch.manual_seed(0)
    save_file(Own().state_dict(), tmp_path / "own.safetensors")
    start = load_file(tmp_path / "own.safetensors")
    given = {
        "backbone": Own,
        "pretrained": tmp_path / "own.safetensors",
        **FEW,
        "learning_rate": 0,
    }
    model = rfdlc.train(pictures(), out=tmp_path / "run", **given)
    for weight in load_file(model.path / "model.safetensors")[
        "trunk.0.copy_body__2__weight"
    ]:
        torch.testing.assert_close(weight, start["body.2.weight"], rtol=0, atol=0)


def test_low_rank_updates_are_all_that_is_trained(weights, tmp_path):
    """LoRA: it starts as the network, ends as W + B A with W as it was, and particles
    have updates of their own.
    """
    given = {
        "backbone": "timm:test_vit",
        "backbone_options": {"depth": 2},
        "pretrained": weights["test_vit middle"],
    }
    model = rfdlc.train(
        pictures(),
        out=tmp_path / "run",
        image_size=SIDE,
        lora=3,
        shared_stages=1,
        **given,
        **FEW,
    )
    start, trained = (
        load_file(model.path / "pretrained.safetensors"),
        load_file(model.path / "model.safetensors"),
    )
    names = {
        name for name, _ in model.net.named_parameters() if not name.startswith("head")
    }
    assert {name.split("__")[-1] for name in names} == {"down", "up"}
    place = "branches.0.copy_network__blocks__1__attn__qkv__"
    for particle in range(2):
        kept = trained[f"{place}weight"][particle]
        torch.testing.assert_close(
            kept, start["blocks.1.attn.qkv.weight"], rtol=0, atol=0
        )
    ups, downs = trained[f"{place}up"], trained[f"{place}down"]
    assert (ups.shape, downs.shape) == ((2, 3 * 64, 3), (2, 3, 64))
    assert (ups.abs().amax((1, 2)) > 0).all()
    assert (downs[0] - downs[1]).abs().max() > 0.01
    again = rfdlc.Model.load(model.path, device="cpu").predict(pictures()).scores.values
    np.testing.assert_array_equal(again, model.predict(pictures()).scores.values)

    plain, adapted = (built("test_vit middle", weights, lora=rank) for rank in (0, 3))
    x = torch.randn(1, 4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(adapted.eval().features(x), plain.eval().features(x))
    layer = nn.Linear(5, 4)
    update = LowRank(layer, 2)
    nn.init.normal_(update.up)
    merged = layer(x[0, :, 0, 0, :5]) + x[0, :, 0, 0, :5] @ (update.up @ update.down).T
    torch.testing.assert_close(update(x[0, :, 0, 0, :5]), merged)


WRONG = {
    r"'timm:test_resnt' is not a network of timm .*did you mean timm:test_resnet": {
        "backbone": "timm:test_resnt"
    },
    r"weights of another network than timm:test_resnet": {"pretrained": "test_vit"},
    r"'gone.safetensors' is not a file: expected a safetensors file, hub or none": {
        "pretrained": "gone.safetensors"
    },
    r"takes images of 4 channels, got 3: backbone.in_chans=3": {
        "backbone_options": {"in_chans": 4},
        "pretrained": "none",
    },
    r"timm cannot make 'timm:test_resnet'.*unexpected keyword argument 'x'": {
        "backbone_options": {"x": 1}
    },
    r"lora=4 is for transformers: timm:test_resnet calls no linear layers": {"lora": 4},
    r"lora=4 adapts pretrained weights: set pretrained=FILE or hub": {
        "lora": 4,
        "pretrained": "none",
    },
    r"lora=4 is for backbone=timm:NAME, got 'resnet8'": {
        "lora": 4,
        "backbone": "resnet8",
        "pretrained": "none",
    },
    r"write pretrained=a.safetensors": {"weights": "a.safetensors"},
    r"is for backbone=timm:NAME or a network of your own, got backbone='resnet8'": {
        "backbone": "resnet8"
    },
    r"backbone_options are for networks of timm": {
        "backbone": "resnet8",
        "backbone_options": {"x": 1},
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_used_raises_before_there_is_a_run(message, weights, tmp_path):
    given = {
        "backbone": "timm:test_resnet",
        "pretrained": "test_resnet",
        **WRONG[message],
    }
    given["pretrained"] = weights.get(given["pretrained"], given["pretrained"])
    with pytest.raises(InputError, match=message):
        rfdlc.train(pictures(), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_samples_that_are_not_images(tmp_path):
    with pytest.raises(
        InputError,
        match=r"needs images \(channels, height, width\), got samples of shape \(4,\)",
    ):
        rfdlc.train(
            (np.eye(8)[:, :4], [0, 1] * 4),
            out=tmp_path / "run",
            backbone="timm:test_resnet",
            hold_out=0,
        )


def test_without_a_network_the_hub_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fail)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    words = [
        "train",
        "digits-lt",
        "--out",
        str(tmp_path / "run"),
        "backbone=timm:test_resnet",
        "pretrained=true",
    ]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, InputError)
    assert (
        "cannot be downloaded ([Errno -2] Name or service not known): give a file"
        in str(result.exception)
    )


def test_weights_of_the_hub_are_kept_in_the_folder(weights, tmp_path, monkeypatch):
    import huggingface_hub
    from timm.models import _builder

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(
        _builder,
        "load_state_dict_from_hf",
        lambda *_, **__: load_file(weights["test_vit small"]),
    )
    path = rfdlc.train(
        pictures(), out=tmp_path / "run", pretrained=True, **TINY | {"epochs": 1}
    ).path
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", None)
    found, start = (
        load_file(path / "pretrained.safetensors"),
        load_file(weights["test_vit small"]),
    )
    assert {name: value.tolist() for name, value in found.items()} == {
        name: start[name].tolist() for name in found
    }
    assert rfdlc.Model.load(path).config.pretrained == "hub"
    forked = rfdlc.fork(path, tmp_path / "fork", data=pictures(), epochs=2)
    assert (forked.path / "pretrained.safetensors").read_bytes() == (
        path / "pretrained.safetensors"
    ).read_bytes()


def test_without_timm_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        InputError, match=r'needs timm .*: pip install "rfdlc\[vision\]"'
    ):
        rfdlc.train("digits-lt", out=tmp_path / "run", backbone="timm:resnet50")
