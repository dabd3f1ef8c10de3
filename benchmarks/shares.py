"""The share of new samples that a budget hands over: of a batch (`rfdlc predict`), one
at a time by a server (`rfdlc serve`) and by an exported file.

    python benchmarks/shares.py --data DIR --budget 120s
        writes benchmarks/results/shares.csv

DIR has `cifar10-lt.npz` and `caltech101-lt.npz`: arrays `train_images`, `train_labels`,
`test_images` and `test_labels` (photographs as squares of 32 pixels). The digits are
scikit-learn's: 1,000 images to train, 797 new ones. Networks are trained in the time of
the budget, for the uniform class prior of the new samples. Handing over is worth 1, as
much as a right decision, so that any share is worth it. New samples are those of the
test split, of which the first `--new` of a shuffled order are decided.

`expected` is the share that was asked for, and `range` the 95% range of the share of so
many new samples by a price from `effective` held-out ones (as many as count alike with
the weights of the class prior): 1.96 standard errors of both.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import rfdlc
from load import load, request, server
from recording import RESULTS, append, commit, hardware, versions

SHARES = ("1%", "5%", "20%")
PACKAGES = ("rfdlc", "torch", "onnxruntime", "numpy")
FIELDS = (
    "data",
    "settings",
    "budget",
    "seed",
    "surface",
    "expected",
    "handed_over",
    "range",
    "new",
    "effective",
    "accuracy",
    "ece",
    "nll",
    "hardware",
    "versions",
    "commit",
)


def digits() -> dict[str, NDArray[Any]]:
    """Arrays of scikit-learn's digits in the order of a file of images."""
    found = load_digits()
    images = (found.images * 15.9).astype(np.uint8)[..., None]
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1000], order[1000:]
    return {
        "train_images": images[train],
        "train_labels": found.target[train],
        "test_images": images[test],
        "test_labels": found.target[test],
    }


def served(run: Path, images: NDArray[Any], share: str) -> float:
    """The share that a server hands over, one image a request."""
    bodies = [
        request(json.dumps({"arrays": [image.tolist()]}).encode()) for image in images
    ]
    with server(run, "--abstain", "1", "--budget", share) as (_, port):
        replies, _ = load(port, bodies, 4)
    assert len(replies) == len(images)
    actions = [json.loads(reply.body)["action"][0] for reply in replies]
    return actions.count("abstain") / len(actions)


def exported(
    run: Path, images: NDArray[Any], decider: rfdlc.Decider, folder: Path
) -> float:
    """The share that an exported file hands over."""
    file = folder / "model.onnx"
    rfdlc.export(run, file, decider=decider)
    decided = [
        rfdlc.OnnxModel.load(file).decide(part).action
        for part in np.array_split(images, 10)
    ]
    return float((decider.utility.decided_class[np.concatenate(decided)] < 0).mean())


def measured(
    name: str, options: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Any]]:
    """Train, and hand over each share of new samples in each way."""
    file = folder / "images.npz"
    if name == "digits":
        drawn: dict[str, Any] = digits()
        np.savez(file, **drawn)
    else:
        with np.load(options.data / f"{name}.npz") as arrays:
            np.savez(file, **arrays)
    settings = dict(word.split("=") for word in options.set)
    run = folder / "run"
    model = rfdlc.train(
        file,
        out=run,
        budget=options.budget,
        target_prior="uniform",
        seed=options.seed,
        **settings,
    )
    data = rfdlc.load(file).test
    assert data is not None
    rows = np.random.default_rng(0).permutation(len(data))[: options.new]
    images = np.asarray(data.take(rows).inputs)
    new = folder / "new.npz"
    np.savez(new, x=images, y=np.asarray(data.labels)[rows])
    test = model.predict(images)
    values = rfdlc.evaluate(
        rfdlc.Predictions(
            logits=test.scores.values,
            classes=model.classes,
            targets=np.asarray(data.labels)[rows],
        ),
        decider=model.decider,
    ).values
    quality = {key: f"{values[key]:.4f}" for key in ("accuracy", "ece", "nll")}
    held = rfdlc.Predictions.load(run / "held-out.npz")
    utility = model.decider.utility.with_abstain(1.0)
    for share in SHARES:
        decider = model.decider.replace(utility=utility).fit_budget(held, budget=share)
        assert decider.deferral.budget is not None
        asked = decider.deferral.budget.shares["total"]
        effective = decider.deferral.budget.samples or len(held)
        error = np.sqrt(asked * (1 - asked) * (1 / len(images) + 1 / effective))
        batch = rfdlc.predict(run, new, folder / f"{share}.csv", decider=decider)
        surfaces = {
            "predict": batch.handed_over["total"],
            "by price": float((utility.decided_class[decider.decide(test)] < 0).mean()),
            "serve": served(run, images, share),
            "onnx": exported(run, images, decider, folder),
        }
        for surface, handed in surfaces.items():
            yield {
                "data": name,
                "settings": " ".join(options.set),
                "budget": options.budget,
                "seed": options.seed,
                "surface": surface,
                "expected": f"{asked:.4f}",
                "handed_over": f"{handed:.4f}",
                "range": f"{1.96 * error:.4f}",
                "new": len(images),
                "effective": f"{effective:.0f}",
                **quality,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["digits"])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--new", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--out", type=Path, default=RESULTS / "shares.csv")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    stamp = {
        "hardware": hardware(),
        "versions": versions(PACKAGES),
        "commit": options.commit or commit(),
    }
    for name in options.names:
        with TemporaryDirectory() as folder:
            for row in measured(name, options, Path(folder)):
                print(*row.values(), flush=True)
                append(options.out, [row | stamp], FIELDS)


if __name__ == "__main__":
    main()
