"""Models for `unfamiliar.py`: scores of features, and logits, of samples of known and
of other classes.

    python benchmarks/unfamiliar_networks.py simulated FOLDER
    python benchmarks/unfamiliar_networks.py images images.npz --data DIR \
        --simulated FOLDER
    python benchmarks/unfamiliar_networks.py runs OUT/fine-tuned RUN0 RUN1 RUN2 \
        --images images.npz
    python benchmarks/unfamiliar_networks.py embed features.npz --images images.npz \
        --weights lite0.safetensors
    python benchmarks/unfamiliar_networks.py heads OUT/heads --features features.npz
    python benchmarks/unfamiliar_networks.py finetune OUT/networks \
        --images images.npz --weights lite0.safetensors

finetune: EfficientNet-Lite0 (ImageNet weights) with the preset `finetune` at 160 pixels
and `familiarity=true`, without some classes of CIFAR100-LT as heads are, with seed 0,
or of all classes (`--kinds none --seeds 0 1 2`). Networks without some classes see no
images of the test, those of all classes no others beside their own.

embed: features of all images of a file, by the settings with which `rfdlc embed`
computes them by default (224 pixels, bicubic), in 16 bits in the file. Weights:
benchmarks/lite.py.

heads: `rfdlc train` on features without some classes: one class of each superclass of
CIFAR-100 (`--kinds siblings`), a fifth of all classes (`random`), four superclasses
(`super`), with the photographs and simulated images as others; or of all classes, for
the test (`none`). A fifth of the samples of the other classes (a tenth for `none`) is
held out.

runs: run folders of fine-tuned networks of CIFAR100-LT (`benchmarks/finetune.py`, row
`ours`), with out-of-fold logits of all training images as held-out samples. Features of
a few training images per class (--known) give distances, for which there are no
held-out features, so no thresholds. The file of the first run has them, with 1,113
training images and 400 test images; logits are of all 10,000 test images and 600 of
each other data set. Measured with weights in 16 bits, and by ONNX Runtime but for the
logits of the test split.

images: DIR holds cifar-100-python/, cifar-10-batches-py/, dermamnist.npz and
caltech101/; the file has all training images of CIFAR100-LT, and 2,000 (or all, if
there are fewer) of other kinds: test images of CIFAR-100, CIFAR-10 and rebuilt
DermaMNIST, training images of Caltech-101, simulated ones; 32 x 32 pixels.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_digits

import rfdlc
from rfdlc.data.dataset import Split
from rfdlc.data.longtail import hold_out_indices
from rfdlc.decisions.unfamiliar import FeatureDistance
from rfdlc.training.building import choose_device
from rfdlc.training.embedding import new_embedder
from rfdlc.training.loop import split_outputs
from rfdlc.training.model import Model
from unfamiliar import LEFT_OUT, SIMULATED, left_out
from unfamiliar_scores import mahalanobis, of_features

Array = NDArray[Any]
COUNT, SIDE = 2000, 32  # of images of each kind, and their pixels
KINDS = {
    "siblings": 0.2,
    "random": 0.2,
    "super": 0.2,
    "none": 0.1,
}  # with the share of held-out samples
TEST = ("cifar100", "cifar10", "dermamnist")
BACKBONE = "timm:tf_efficientnet_lite0"


def outputs(model: Model, images: Array) -> tuple[Array, Array, Array | None]:
    """Logits (M, N, C) and features (M, N, F) of the particles, and unfamiliarity (N,)
    where the model has it.
    """
    found: list[Array] = []
    forward = model.net.outputs

    def watched(x: Any) -> Any:
        logits, features = forward(x)
        found.append(features[0].float().cpu().numpy())
        return logits, features

    model.net.outputs = watched
    try:
        split = Split(images, np.zeros(len(images), dtype=np.int64))
        given = model.normalisation, model.config, model.device
        logits, _, strange = split_outputs(
            model.net, split, *given, measure=model.familiarity
        )
    finally:
        model.net.outputs = forward
    assert logits is not None
    return (
        logits[0].numpy(),
        np.concatenate(found, axis=1),
        None if strange is None else strange.numpy(),
    )


def without(
    x: Array, y: Array, kind: str, seed: int
) -> tuple[dict[str, Array], dict[str, tuple[Array, Array]]]:
    """Data to train on without some classes, classes counted from 0; and the held-out
    and the left-out samples.
    """
    inside = ~np.isin(y, left_out(kind, seed, np.unique(y)))
    kept, held = hold_out_indices(y[inside], KINDS[kind], seed)
    codes = np.unique(y[inside], return_inverse=True)[1]
    own = {
        "train_x": x[inside][kept],
        "train_y": codes[kept],
        "val_x": x[inside][held],
        "val_y": codes[held],
    }
    parts = {"held-out": (own["val_x"], own["val_y"])}
    return own, parts | ({} if inside.all() else {"left out": (x[~inside], y[~inside])})


def finetune(kind: str, seed: int, options: argparse.Namespace) -> None:
    """A network without some classes, with its own unfamiliarity beside distances of
    its last features.
    """
    with np.load(options.images) as file:
        own, parts = without(file["train_x"], file["train_y"].astype(int), kind, seed)
        if kind == "none":
            parts |= {name: (file[f"{name}_x"], file[f"{name}_y"]) for name in TEST}
        else:
            parts["caltech101"] = file["caltech101_x"], file["caltech101_y"]
            images, labels = file["simulated_x"], file["simulated_y"]
            parts |= {
                name: (images[labels == name], labels[labels == name])
                for name in SIMULATED
            }
    given: dict[str, Any] = {
        "backbone": BACKBONE,
        "pretrained": str(options.weights),
        "image_size": 160,
    }
    given |= {"familiarity": True, **dict(pair.split("=", 1) for pair in options.set)}
    with TemporaryDirectory() as place:
        model = rfdlc.train(own, "rf-dlc", f"{place}/run", seed=seed, **given)
    known = outputs(model, own["train_x"])[1]
    fits: dict[str, Any] = {"Mahalanobis": mahalanobis, "distance": FeatureDistance.fit}
    measures = {
        name: [fit(each, own["train_y"]) for each in known]
        for name, fit in fits.items()
    }
    arrays: dict[str, Any] = {"counts": np.bincount(own["train_y"])}
    for part, (images, labels) in parts.items():
        found, features = model.predict(images), outputs(model, images)[1]
        for name, each in measures.items():
            arrays[f"{part}/{name}"] = np.mean(
                [fit(x) for fit, x in zip(each, features, strict=True)], axis=0
            )
        arrays |= {f"{part}/familiarity": found.unfamiliarity, f"{part}/y": labels}
        arrays[f"{part}/logits"] = found.scores.values.astype(np.float16)
    save(options.folder / f"{kind}-{seed}.npz", arrays)


def embed(images: Path, out: Path, weights: str, size: int) -> None:
    """Features of all images of a file under the same names, as `rfdlc embed` computes
    them.
    """
    embedder = new_embedder(
        BACKBONE, weights, device=choose_device("auto"), image_size=size
    )
    found: dict[str, Any] = {}
    with np.load(images) as file:
        for name in file.files:
            found[name] = (
                embedder(file[name]).astype(np.float16)
                if name.endswith("_x")
                else file[name]
            )
    np.savez_compressed(out, **found)


def heads(kind: str, seed: int, options: argparse.Namespace) -> None:
    """A model of features without some classes, or of all, and the file with its scores
    by part and name.
    """
    given = {
        name: values
        for file in options.features
        for name, values in np.load(file).items()
    }
    x, y = given["train_x"].astype(np.float32), given["train_y"].astype(int)
    names = {key[:-2] for key in given} - {"train"}
    names = names & set(TEST) if kind == "none" else names - set(TEST)
    parts = {
        name: (given[f"{name}_x"].astype(np.float32), given[f"{name}_y"])
        for name in names
    }
    own, others = without(x, y, kind, seed)
    if (
        kind == "none"
        # what a user does: the samples for thresholds are out-of-fold, and all are
        # trained on again
    ):
        own, others = (
            {
                "train_x": x,
                "train_y": y,
                "test_x": parts[TEST[0]][0],
                "test_y": parts[TEST[0]][1],
            },
            {},
        )
    parts |= others
    with TemporaryDirectory() as place:
        model = rfdlc.train(own, "rf-dlc", f"{place}/run", seed=seed, familiarity=True)
        found = {part: model.predict(each) for part, (each, _) in parts.items()}
        if kind == "none":
            found["held-out"] = rfdlc.Predictions.load(f"{place}/run/held-out.npz")
    fit = distances if kind == "none" else of_features
    measure: Any = fit(own["train_x"], own["train_y"])
    arrays: dict[str, Any] = {"counts": np.bincount(own["train_y"])}
    for part, each in found.items():
        measured = (
            measure(parts[part][0])
            if part in parts
            else out_of_fold(x, y, each.targets, model)
        )
        arrays |= {f"{part}/{name}": values for name, values in measured.items()}
        arrays |= {
            f"{part}/logits": each.scores.values,
            f"{part}/familiarity": each.unfamiliarity,
        }
        arrays |= {
            f"{part}/likeliest": model.decider.probabilities(each).argmax(axis=1)
        }
        arrays[f"{part}/y"] = parts[part][1] if part in parts else each.targets
    save(options.folder / f"{kind}-{seed}.npz", arrays)


def distances(x: Array, y: Array) -> Callable[[Array], dict[str, Array]]:
    """The plain distance and ours, from features."""
    known: dict[str, Any] = {
        "Mahalanobis": mahalanobis(x, y),
        "distance": FeatureDistance.fit(x, y),
    }
    return lambda z: {name: measure(z) for name, measure in known.items()}


def out_of_fold(x: Array, y: Array, targets: Any, model: Model) -> dict[str, Array]:
    """Distances of training samples by fits to the other folds, in the order of the
    held-out predictions.
    """
    fold = Split(x, y).folds(model.config.folds, model.config.seed)
    rows = [np.flatnonzero(fold == number) for number in range(model.config.folds)]
    assert np.array_equal(y[np.concatenate(rows)], targets)
    each = [
        distances(np.delete(x, own, axis=0), np.delete(y, own))(x[own]) for own in rows
    ]
    return {name: np.concatenate([own[name] for own in each]) for name in each[0]}


def fine_tuned(run: Path, file: Path, options: argparse.Namespace) -> None:
    """What a network of all classes says about images of the test."""
    model, held = Model.load(run), rfdlc.Predictions.load(run / "held-out.npz")
    arrays: dict[str, Any] = {
        "held-out/logits": held.scores.values.astype(np.float16),
        "held-out/y": held.targets,
    }
    arrays |= (
        {}
        if held.unfamiliarity is None
        else {"held-out/familiarity": held.unfamiliarity}
    )
    rng = np.random.default_rng(0)
    with np.load(options.images) as found:
        y = found["train_y"]
        arrays["counts"] = np.bincount(y)
        rows = [
            rng.permutation(np.flatnonzero(y == c))[: options.known]
            for c in np.unique(y)
        ]
        known = np.sort(np.concatenate(rows))
        known_features: Any = (
            outputs(model, found["train_x"][known])[1] if options.known else []
        )
        kinds: dict[str, Any] = {
            "Mahalanobis": mahalanobis,
            "distance": FeatureDistance.fit,
        }
        measures = {
            name: [fit(each, y[known]) for each in known_features]
            for name, fit in kinds.items()
        }
        for part in TEST:
            drawn = np.sort(rng.permutation(len(found[f"{part}_x"]))[: options.count])
            logits, features, strange = outputs(model, found[f"{part}_x"][drawn])
            arrays |= {} if strange is None else {f"{part}/familiarity": strange}
            arrays |= {
                f"{part}/logits": logits.astype(np.float16),
                f"{part}/y": found[f"{part}_y"][drawn],
            }
            for name, each in measures.items() if options.known else ():
                values = [
                    measure(own) for measure, own in zip(each, features, strict=True)
                ]
                arrays[f"{part}/{name}"] = np.mean(values, axis=0)
    save(file, arrays)


def save(file: Path, arrays: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)
    print(file, flush=True)


def simulated_images(folder: Path) -> None:
    """Noise, smooth blobs of colour, and digits, 150 of each as PNG files."""
    from PIL import Image

    rng, count = np.random.default_rng(1), 150
    smooth = np.stack(
        [gaussian_filter(rng.normal(size=(32, 32, 3)), (6, 6, 0)) for _ in range(count)]
    )
    smooth *= rng.uniform(5, 60, (count, 1, 1, 1)) / smooth.std(
        axis=(1, 2), keepdims=True
    )
    pixels = {
        "noise": rng.integers(0, 256, (count, 32, 32, 3)),
        "blobs": np.clip(rng.uniform(60, 200, (count, 1, 1, 3)) + smooth, 0, 255),
        "digits": np.repeat(
            np.kron(load_digits().images[:count], np.ones((4, 4)))[..., None]
            * 255
            / 16,
            3,
            axis=3,
        ),
    }
    for name, each in pixels.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(each.astype(np.uint8)):
            Image.fromarray(image).save(folder / name / f"{i:03}.png")


def collect(data: Path, simulated: Path, out: Path, count: int) -> None:
    """The file of images for `train`, without a seed: the first ones of a fixed
    permutation.
    """
    from PIL import Image

    def resized(image: Any) -> Array:
        found = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return np.asarray(found).transpose(2, 0, 1)

    def drawn(images: Any, labels: Any) -> tuple[Array, Array]:
        rows = np.sort(np.random.default_rng(0).permutation(len(images))[:count])
        return np.asarray(images)[rows], np.asarray(labels)[rows]

    cifar100 = rfdlc.load("cifar100-lt", root=data)
    with np.load(data / "dermamnist.npz") as file:
        lesions, kinds = drawn(file["test_images"], file["test_labels"][:, 0])
    splits = {
        "cifar100": cifar100.test,
        "cifar10": rfdlc.load("cifar10-lt", root=data).test,
    }
    found = {
        name: drawn(split.inputs, split.labels)
        for name, split in splits.items()
        if split is not None
    }
    found["dermamnist"] = (
        np.stack([resized(Image.fromarray(image)) for image in lesions]),
        kinds,
    )
    for name, folder in {
        "caltech101": data / "caltech101" / "train",
        "simulated": simulated,
    }.items():
        files = drawn(
            *zip(
                *((file, file.parent.name) for file in sorted(folder.glob("*/*.*"))),
                strict=True,
            )
        )
        found[name] = (
            np.stack([resized(Image.open(file)) for file in files[0]]),
            files[1],
        )
    arrays: dict[str, Any] = {
        "train_x": cifar100.train.inputs,
        "train_y": cifar100.train.labels,
    }
    for name, (images, labels) in found.items():
        arrays |= {f"{name}_x": images, f"{name}_y": labels}
    np.savez_compressed(out, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("simulated").add_argument("folder", type=Path)
    names = ("images", "runs", "heads", "finetune", "embed")
    first, second, third, fourth, fifth = (commands.add_parser(name) for name in names)
    first.add_argument("out", type=Path)
    first.add_argument("--data", type=Path, required=True)
    first.add_argument("--simulated", type=Path, required=True)
    first.add_argument(
        "--count",
        type=int,
        default=COUNT,
        help="images of each kind, but for training images",
    )
    second.add_argument("folder", type=Path)
    second.add_argument("runs", type=Path, nargs="+")
    second.add_argument("--images", type=Path, required=True)
    second.add_argument("--count", type=int, default=600, help="images of each kind")
    second.add_argument(
        "--known", type=int, default=12, help="training images per class for distances"
    )
    third.add_argument("--features", type=Path, nargs="+", required=True)
    fifth.add_argument("out", type=Path)
    fifth.add_argument("--image-size", type=int, default=0)
    for command in (fourth, fifth):
        command.add_argument("--images", type=Path, required=True)
        command.add_argument("--weights", required=True)
    fourth.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    for command in (third, fourth):
        command.add_argument("folder", type=Path)
        command.add_argument(
            "--kinds", nargs="+", choices=KINDS, default=list(LEFT_OUT)
        )
        command.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    if options.command == "simulated":
        simulated_images(options.folder)
    elif options.command == "images":
        collect(options.data, options.simulated, options.out, options.count)
    elif options.command == "embed":
        embed(options.images, options.out, options.weights, options.image_size)
    elif options.command == "runs":
        for seed, run in enumerate(options.runs):
            fine_tuned(run, options.folder / f"none-{seed}.npz", options)
    else:
        for seed in options.seeds:
            for kind in options.kinds:
                {"heads": heads, "finetune": finetune}[options.command](
                    kind, seed, options
                )


if __name__ == "__main__":
    main()
