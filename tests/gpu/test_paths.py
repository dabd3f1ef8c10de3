"""Every path of a user on a GPU, for a few steps each: `make gpu-test`. Skipped on
machines without one.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rfdlc

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from rfdlc.data import streamed  # noqa: E402
from rfdlc.data.dataset import Split  # noqa: E402
from rfdlc.data.images import ImageFiles, PackedText  # noqa: E402
from rfdlc.methods import METHODS  # noqa: E402
from rfdlc.training import execution  # noqa: E402
from rfdlc.training.networks.backbones import large_resnet  # noqa: E402
from rfdlc.training.networks.fused import stages  # noqa: E402
from rfdlc.training.networks.particles import ParticleNet, place  # noqa: E402
from rfdlc.training.networks.pretrained import load_backbone  # noqa: E402

COUNTS = (400, 300, 200, 120, 60, 30)
FEW: dict[str, Any] = {"epochs": 6, "batch_size": 64}
SMALL: dict[str, Any] = {**FEW, "backbone": "resnet8"}
CHANCE = 1 / len(COUNTS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Images and features of six classes that a network can tell apart."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    labels = {
        "train": np.repeat(np.arange(len(COUNTS)), COUNTS),
        "test": rng.integers(0, len(COUNTS), 300),
    }
    colours, centres = (
        rng.integers(0, 255, (len(COUNTS), 1, 1, 3)),
        rng.normal(0, 1, (len(COUNTS), 64)),
    )
    images, features = {}, {}
    for split, y in labels.items():
        noisy = colours[y] + rng.normal(0, 40, (len(y), 32, 32, 3))
        images |= {
            f"x_{split}": np.clip(noisy, 0, 255).astype(np.uint8),
            f"y_{split}": y,
        }
        features |= {
            f"x_{split}": (
                (centres[y] + rng.normal(0, 1, (len(y), 64))).astype(np.float32)
            ),
            f"y_{split}": y,
        }
    np.savez(folder / "images.npz", **images)
    np.savez(folder / "features.npz", **features)
    return {"images": folder / "images.npz", "features": folder / "features.npz"}


@pytest.fixture(autouse=True)
def captured_without_warning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short trainings are captured too. A step that cannot be warns and runs eagerly:
    here that is a failure.
    """
    monkeypatch.setattr(execution, "WORTH_CAPTURING", 50)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the step could not be captured")
        yield


def accuracy(model: rfdlc.Model, data: Path) -> float:
    predictions = model.predict(str(data))
    return float(
        (predictions.scores.values.mean(0).argmax(1) == predictions.targets).mean()
    )


def trained(data: Path, out: Path, **settings: Any) -> float:
    return accuracy(rfdlc.train(str(data), out=str(out), **settings), data)


class Convolutions(nn.Module):
    """A user's own network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                nn.Conv2d(3, 16, 3, 2, 1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.ReLU(),
            ),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return self.body(x)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_method(method: str, files: dict[str, Path], tmp_path: Path) -> None:
    assert (
        trained(files["images"], tmp_path / "run", method=method, **SMALL) > 2 * CHANCE
    )


@pytest.mark.parametrize(
    "backbone",
    [Convolutions(), Convolutions, "resnet32", "resnet50"],
    ids=["module", "factory", "resnet32", "resnet50"],
)
def test_backbone(backbone: Any, files: dict[str, Path], tmp_path: Path) -> None:
    assert (
        trained(files["images"], tmp_path / "run", backbone=backbone, **FEW)
        > 2 * CHANCE
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2},
        {"checkpoint_activations": True},
        {"augment": "none"},
        {"augment": "crop-flip-rotate", "test_flip": True},
        {"augment": "randaugment", "cutout": 8},
        {"augment": "trivialaugment"},
        {"augment": "autoaugment", "cutout": 0.5},
        {"augment": "randaugment", "consistency": 1.0},
        {"mixup": 0, "cutmix": 1.0},
        {"refit": True},
        {"tune": "auto", "epochs": 30},
        {"budget": "5s"},
        {"patience": 3},
        {"average": 0.9},
        {"optimiser": "adamw", "learning_rate": 1e-3},
        {"precision": "float32"},
        {"compile": True},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_settings(
    settings: dict[str, Any], files: dict[str, Path], tmp_path: Path
) -> None:
    assert (
        trained(files["images"], tmp_path / "run", **{**SMALL, **settings})
        > 1.5 * CHANCE
    )


@pytest.mark.parametrize("mode", ["eager", "captured", "fused"])
@pytest.mark.parametrize("method", ["rf-dlc", "rf-dlc-paper"])
def test_execution(
    mode: str,
    method: str,
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never, soon, used = 10**9, 50, set[str]()

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            used.add(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(
        execution, "WORTH_CAPTURING", never if mode == "eager" else soon
    )
    monkeypatch.setattr(execution, "WORTH_FUSING", soon if mode == "fused" else never)
    monkeypatch.setattr(execution, "capture", noted("captured", execution.capture))
    monkeypatch.setattr(stages, "run", noted("fused", stages.run))
    assert (
        trained(files["images"], tmp_path / "run", method=method, **SMALL) > 3 * CHANCE
    )
    assert (
        used
        == {"eager": set(), "captured": {"captured"}, "fused": {"captured", "fused"}}[
            mode
        ]
    )


@pytest.mark.parametrize("shared", [0, 3])
def test_separate_networks_equal_stacked_ones(shared: int) -> None:
    """Logits and gradients of wide networks in full precision, which differ in the
    order of sums alone.
    """
    found = []
    for how in ("stacked", "separate"):
        net = ParticleNet(
            large_resnet(3, widths=(16, 16, 32, 32)),
            5,
            particles=3,
            shared_stages=shared,
        )
        net.execute(how)
        place(net.double(), torch.device("cuda")).train()
        x = torch.randn(
            1,
            8,
            3,
            64,
            64,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float64,
        ).cuda()
        logits = net(x)
        gradients = torch.autograd.grad(logits.square().sum(), [*net.parameters()])
        found.append((logits.detach(), *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("test_resnet", {}),
        ("test_efficientnet", {}),
        ("test_vit", {"compile": True}),
        ("test_vit", {"lora": 4}),
    ],
    ids=["resnet", "efficientnet", "vit-compiled", "vit-lora"],
)
def test_timm(
    name: str, settings: dict[str, Any], files: dict[str, Path], tmp_path: Path
) -> None:
    """A network of timm from a file of weights: trained on a shared trunk, resumed,
    loaded without that file.
    """
    pytest.importorskip("timm")
    weights, out, data = (
        tmp_path / "weights.safetensors",
        tmp_path / "run",
        str(files["images"]),
    )
    torch.manual_seed(0)  # a random network learns little in a few epochs: 15 of them
    save_file(load_backbone(f"timm:{name}", image_size=64).state_dict(), weights)
    network: dict[str, Any] = {
        "backbone": f"timm:{name}",
        "pretrained": weights,
        "image_size": 64,
        "shared_stages": 1,
    }
    model = rfdlc.train(
        data, out=str(out), **{**FEW, "epochs": 15}, **network, **settings
    )
    assert accuracy(model, files["images"]) > 2 * CHANCE
    weights.unlink()
    again = rfdlc.Model.load(str(out)).predict(data).scores.values
    np.testing.assert_allclose(
        again, model.predict(data).scores.values, rtol=0, atol=1e-4
    )
    rfdlc.resume(str(out))


@pytest.mark.parametrize("head", ["cosine", "mixed"])
def test_features(head: str, files: dict[str, Path], tmp_path: Path) -> None:
    assert trained(files["features"], tmp_path / "run", epochs=20, head=head) > 0.95


def test_a_table_is_predicted_as_on_the_cpu(
    files: dict[str, Path], tmp_path: Path
) -> None:
    """Linear models, trees and networks of one mixture: 16 bits would move the linear
    ones.
    """
    table, arrays = tmp_path / "table.npz", np.load(files["features"])
    np.savez(
        table,
        **{
            key: values[..., :8] if values.ndim == 2 else values
            for key, values in arrays.items()
        },
    )
    model = rfdlc.train(str(table), out=str(tmp_path / "run"))
    assert model.config.backbone == "mixture"
    on_cpu = (
        rfdlc.Model.load(str(tmp_path / "run"), device="cpu")
        .predict(str(table))
        .scores.values
    )
    np.testing.assert_allclose(
        model.predict(str(table)).scores.values, on_cpu, rtol=0, atol=0.01
    )


def test_predictions_agree_with_the_cpu(files: dict[str, Path], tmp_path: Path) -> None:
    """The same weights on both devices; convolutions of a GPU may round as TF32."""
    data, out = str(files["images"]), str(tmp_path / "run")
    model = rfdlc.train(data, out=out, precision="float32", **SMALL)
    on_cpu = rfdlc.Model.load(out, device="cpu")
    np.testing.assert_allclose(
        model.predict(data).scores.values,
        on_cpu.predict(data).scores.values,
        rtol=0,
        atol=0.1,
    )


def test_train_many(files: dict[str, Path], tmp_path: Path) -> None:
    runs = [(method, seed) for method in ("rf-dlc", "ldam-drw") for seed in (0, 1)]
    specs = [
        rfdlc.RunSpec(str(tmp_path / f"{m}-{s}"), m, {**SMALL, "seed": s})
        for m, s in runs
    ]
    for model in rfdlc.train_many(str(files["images"]), specs):
        assert accuracy(model, files["images"]) > 3 * CHANCE


def test_resume_predict_export(files: dict[str, Path], tmp_path: Path) -> None:
    out, data = tmp_path / "run", str(files["images"])
    model = rfdlc.train(data, out=str(out), **SMALL)
    again = rfdlc.Model.load(str(out))
    np.testing.assert_allclose(
        again.predict(data).scores.values,
        model.predict(data).scores.values,
        rtol=0,
        atol=1e-5,
    )
    resumed = rfdlc.resume(str(out))
    assert accuracy(resumed, files["images"]) == accuracy(model, files["images"])
    assert rfdlc.export(str(out), str(tmp_path / "model.onnx")) is not None
    assert (tmp_path / "model.onnx").stat().st_size > 10_000


@pytest.mark.parametrize("half", [False, True])
def test_embed(half: bool, files: dict[str, Path], tmp_path: Path) -> None:
    """Features of both devices agree, batch for batch, and the model on them predicts
    from images.
    """
    given: dict[str, Any] = {
        "backbone": "resnet50",
        "image_size": 64,
        "flips": True,
        "batch_size": 48,
    }
    found = {}
    for device in ("cpu", "cuda"):
        done = rfdlc.embed(
            files["images"],
            tmp_path / f"{device}.npz",
            **given,
            device=device,
            half=half,
        )
        found[device] = rfdlc.load(done.path)
    here, there = (found[device].train.array for device in ("cuda", "cpu"))
    assert np.abs(here - there).max() < (0.03 if half else 0.005) * np.abs(there).max()
    model = rfdlc.train(str(tmp_path / "cuda.npz"), "ce", tmp_path / "run", epochs=2)
    by_images, by_features = (
        model.predict(str(files["images"])),
        model.predict(str(tmp_path / "cuda.npz")),
    )
    apart = np.abs(by_images.scores.values - by_features.scores.values).max()
    assert apart < 0.02 * np.ptp(
        by_features.scores.values
    )  # whitening enlarges what batches of other sizes round


def test_streamed_batches_are_whole_while_the_device_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def numbered(
        self: Any, request: Any
    ) -> tuple[Any, str]:  # instead of decoding, so that pillow is not needed
        numbers = torch.from_numpy(request[0]).to(torch.uint8)
        return (
            numbers.view(-1, 1, 1, 1).expand(-1, *self.files.shape[1:]).contiguous(),
            "",
        )

    monkeypatch.setattr(streamed._Batches, "__getitem__", numbered)
    split = Split(
        ImageFiles(Path(), PackedText(str(i) for i in range(200)), 224),
        np.arange(200) % 5,
    )
    loader = streamed.StreamedLoader(split, batch_size=32, device="cuda", workers=2)
    busy = torch.randn(4096, 4096, device="cuda")
    for epoch in (1, 2):
        found = []
        for inputs, targets in loader.epoch(epoch):
            for _ in range(20):
                busy = nn.functional.normalize(busy @ busy)
            numbers = (255 * inputs[0]).flatten(1)
            found.append((numbers.amin(1), numbers.amax(1), targets[0]))
        least, most, labels = (
            torch.cat(column).cpu() for column in zip(*found, strict=True)
        )
        torch.testing.assert_close(least, most)
        assert sorted(least.round().int().tolist()) == list(range(200))
        assert (least.round().int() % 5).tolist() == labels.tolist()
