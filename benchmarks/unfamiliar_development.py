"""Unfamiliar input: the choice of the sum of scores on development images, with
networks of all classes.

    python benchmarks/unfamiliar_development.py images dev.npz --images images.npz \
        --further further.npz
    python benchmarks/unfamiliar_development.py runs OUT RUN0 RUN1 ... --images dev.npz
    python benchmarks/unfamiliar_development.py choose OUT

Nothing of the test (CIFAR-10, DermaMNIST, test images of CIFAR-100) is used. Familiar
are 298 images of CIFAR-100's training part that are not in CIFAR100-LT, two to four of
nearly every class (further.npz: x and y). images.npz is written by
benchmarks/unfamiliar_networks.py. Unfamiliar are

- new content with the pixels of CIFAR-100, made of the familiar images: the left
  `halves` of one and the right of another class, two `mixed` half and half, `quarters`
  in another order, `upside` down, `zoomed` by two;
- photographs: Caltech-101 without classes that CIFAR-100 has, in colours (`caltech`),
  `negative` or with `swapped` channels; and of two photographs of scikit-learn
  `scenes`, `textures`, `strips` that are stretched, `blurred` ones, and grey ones that
  are `tinted`;
- `noise`, `blobs` and `digits`.

choose: writes results/unfamiliar-development.csv: the AUROC by family, mean over
networks; the regret is the most that the better of energy and largest probability is
above a score in any family. Terms are divided by their standard deviation on held-out
samples, classes counting equally. `r` is what the entropy leaves of the energy (least
squares), and r > t stands for max(0, r - t). The rule: the smallest regret of sums in
which all terms have the weight 1.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_sample_images
from sklearn.metrics import roc_auc_score

import rfdlc
from recording import write
from rfdlc.training.model import Model
from unfamiliar import PACKAGES, equal, read, standardised, unexplained
from unfamiliar_networks import SIDE, outputs, save

Array = NDArray[Any]
Named = dict[str, dict[str, Array]]
COUNT, SOME = 150, 300
COVERED = (  # classes of Caltech-101 that CIFAR-100 has, too
    "Faces",
    "Faces_easy",
    "Leopards",
    "Motorbikes",
    "beaver",
    "brontosaurus",
    "butterfly",
    "cellphone",
    "chair",
    "crab",
    "crocodile",
    "crocodile_head",
    "cup",
    "dolphin",
    "elephant",
    "hawksbill",
    "kangaroo",
    "lamp",
    "lobster",
    "stegosaurus",
    "sunflower",
    "watch",
    "windsor_chair",
)
COLUMNS = ("score", "family", "auroc", "deviation", "networks")


def photographs() -> dict[str, Array]:
    """Pieces (N, SIDE, SIDE, 3) of two photographs."""
    from PIL import Image

    rng, whole = np.random.default_rng(2), load_sample_images().images

    def piece(height: int, width: int) -> Array:
        image = whole[rng.integers(2)]
        top, left = (
            rng.integers(image.shape[0] - height + 1),
            rng.integers(image.shape[1] - width + 1),
        )
        return np.asarray(image[top : top + height, left : left + width])

    def pieces(height: int, width: int) -> Array:
        size, how = (SIDE, SIDE), Image.Resampling.BILINEAR
        return np.stack(
            [
                np.asarray(Image.fromarray(piece(height, width)).resize(size, how))
                for _ in range(COUNT)
            ]
        )

    found = {
        "textures": pieces(SIDE, SIDE),
        "strips": pieces(8, 128),
        "scenes": pieces(160, 160),
    }
    found["blurred"] = gaussian_filter(pieces(160, 160).astype(float), (0, 3, 3, 0))
    grey, tint = pieces(96, 96).mean(axis=3), rng.uniform(0.2, 1, (COUNT, 1, 1, 3))
    found["tinted"] = grey[..., None] * (tint / tint.max(axis=-1, keepdims=True))
    return {
        name: np.clip(each, 0, 255).astype(np.uint8).transpose(0, 3, 1, 2)
        for name, each in found.items()
    }


def altered(x: Array, y: Array) -> dict[str, Array]:
    """New content from familiar images (N, 3, SIDE, SIDE) of classes y."""
    rng, half = np.random.default_rng(3), SIDE // 2

    def others() -> Array:
        order = rng.permutation(len(y))
        while (same := y[order] == y).any():
            order[same] = rng.permutation(len(y))[: same.sum()]
        return x[order]

    halves = np.concatenate([x[..., :half], others()[..., half:]], axis=3)
    mixed = ((x.astype(int) + others()) // 2).astype(np.uint8)
    quarters = np.roll(x, (half, half), axis=(2, 3))
    middle = x[:, :, half // 2 : -half // 2, half // 2 : -half // 2]
    zoomed = middle.repeat(2, axis=2).repeat(2, axis=3)
    return {
        "halves": halves,
        "mixed": mixed,
        "quarters": quarters,
        "upside": x[:, :, ::-1],
        "zoomed": zoomed,
    }


def collect(images: Path, further: Path, out: Path) -> None:
    with np.load(images) as file, np.load(further) as own:
        x, y, simulated = own["x"], own["y"], file["simulated_y"]
        found = {
            name: file["simulated_x"][simulated == name]
            for name in ("noise", "blobs", "digits")
        }
        rows = ~np.isin(file["caltech101_y"], COVERED)
        caltech, kinds = file["caltech101_x"][rows], file["caltech101_y"][rows]
    found |= {
        "negative": 255 - caltech[:SOME],
        "swapped": caltech[SOME : 2 * SOME][:, [2, 0, 1]],
    }
    labelled = {"familiar": (x, y), "caltech": (caltech, kinds)}
    labelled |= {
        name: (each, np.zeros(len(each)))
        for name, each in (found | photographs() | altered(x, y)).items()
    }
    np.savez_compressed(
        out,
        **{
            f"{name}_{i}": each[i == "y"]
            for name, each in labelled.items()
            for i in "xy"
        },
    )


def run(folder: Path, file: Path, images: Path) -> None:
    """What a network says about held-out samples and development images."""
    model, held = Model.load(folder), rfdlc.Predictions.load(folder / "held-out.npz")
    arrays: dict[str, Any] = {
        "held-out/logits": held.scores.values,
        "held-out/familiarity": held.unfamiliarity,
    }
    arrays |= {"held-out/y": held.targets, "counts": model.classes.counts}
    with np.load(images) as found:
        for name in [
            key.removesuffix("_x") for key in found.files if key.endswith("_x")
        ]:
            logits, _, strange = outputs(model, found[f"{name}_x"])
            arrays |= {
                f"{name}/logits": logits,
                f"{name}/familiarity": strange,
                f"{name}/y": found[f"{name}_y"],
            }
    save(file, arrays)


def sums(scaled: Named, weights: Array) -> Named:
    """Scores and sums by name and part, from standardised scores."""
    rest, found = unexplained(scaled, weights), dict(scaled)
    for given, first, (size, least) in product(
        (0, 0.5, 1, 2), (0, 1), [(0, 0), *product((0.5, 1, 2), (0, 0.5, 1))]
    ):
        factors = {
            "familiarity": given,
            "energy": first,
            "entropy": 1,
            f"r > {least:g}": size,
        }
        name = " + ".join(
            each if factor == 1 else f"{factor:g} {each}"
            for each, factor in factors.items()
            if factor
        )
        found[name] = {
            part: (
                sum(
                    factors[each] * scaled[each][part]
                    for each in ("familiarity", "energy", "entropy")
                )
                + size * np.maximum(0, rest[part] - least)
            )
            for part in rest
        }
    return found


def aurocs(file: Path) -> dict[tuple[str, str], float]:
    """By score and family, of one network, classes counting equally."""
    scores, labels, _ = read(file)
    known = {
        name: scores[name]
        for name in ("energy", "entropy", "largest probability", "familiarity")
    }
    weights = equal(labels["held-out"])
    found, own = {}, equal(labels["familiar"])
    for name, parts in sums(standardised(known, weights), weights).items():
        for part in parts.keys() - {"held-out", "familiar"}:
            truth = np.repeat([0, 1], [len(own), len(parts[part])])
            given = truth, np.concatenate([parts["familiar"], parts[part]])
            found[name, part] = roc_auc_score(
                *given, sample_weight=np.concatenate([own, equal(labels[part])])
            )
    return found


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Regret, mean, and AUROC by family of each score, those of the smallest regret
    first.
    """
    values, files = (
        defaultdict[tuple[str, str], list[float]](list),
        sorted(folder.glob("*.npz")),
    )
    for file in files:
        for key, value in aurocs(file).items():
            values[key].append(value)
    families, names = (
        sorted({part for _, part in values}),
        dict.fromkeys(name for name, _ in values),
    )
    means = {
        name: np.array([np.mean(values[name, part]) for part in families])
        for name in names
    }
    best = np.maximum(means["energy"], means["largest probability"])
    for name in sorted(names, key=lambda name: (best - means[name]).max()):
        summary = {"regret": (best - means[name]).max(), "mean": means[name].mean()}
        for what, value in summary.items():
            yield {
                "score": name,
                "family": what,
                "auroc": f"{value:.4f}",
                "deviation": "",
                "networks": len(files),
            }
        for part, value in zip(families, means[name], strict=True):
            deviation = (
                f"{np.std(values[name, part], ddof=1):.4f}" if len(files) > 1 else ""
            )
            given = (name, part, f"{value:.4f}", deviation, len(files))
            yield dict(zip(COLUMNS, given, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    first, second, third = (
        commands.add_parser(name) for name in ("images", "runs", "choose")
    )
    first.add_argument("out", type=Path)
    first.add_argument("--further", type=Path, required=True)
    second.add_argument("folder", type=Path)
    second.add_argument("runs", type=Path, nargs="+")
    third.add_argument("folder", type=Path)
    third.add_argument("--commit", default="", help="where there is no git")
    for command in (first, second):
        command.add_argument("--images", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "images":
        collect(options.images, options.further, options.out)
    elif options.command == "runs":
        for seed, folder in enumerate(options.runs):
            run(folder, options.folder / f"{seed}.npz", options.images)
    else:
        write(
            "unfamiliar-development",
            rows(options.folder),
            PACKAGES,
            options.commit,
            COLUMNS,
        )


if __name__ == "__main__":
    main()
