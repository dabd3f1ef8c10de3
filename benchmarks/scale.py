"""Several processes on one machine: are they one training, what do they cost, and what
does a dead worker cost?

    python benchmarks/scale.py --record
        writes benchmarks/results/scale.csv
    python benchmarks/scale.py --paper
        what docs/scale.md counts and computes alone: memory, communication

1. Two gloo processes and one with the same global batch: largest difference of losses
   and weights after the training, for weighted, deferred and adjusted objectives and
   for repulsion with utility.
2. Samples a second of 1 and 2 processes (a core each), the batch shared (strong) or as
   large on each (weak).
3. A worker is killed (SIGKILL) at a random instant under `torchrun --max-restarts`: the
   run must end with the same number of epochs and bit for bit the same weights as one
   that was left alone.

The exit code is 1 where 1 or 3 does not hold.
"""

import argparse
import csv
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from recording import write
from rfdlc.probabilities.classes import as_classes
from rfdlc.training.building import method_net
from rfdlc.training.methods import resolve
from rfdlc.training.networks.particles import ParticleNet

Row = dict[str, Any]
Training = subprocess.Popen[str]
ALIKE = {
    "weighted (cb)": ["-m", "cb"],
    "deferred (ldam-drw)": ["-m", "ldam-drw"],
    "adjusted (la)": ["-m", "la"],
    "repulsion and utility (rf-dlc)": [
        "-m",
        "rf-dlc",
        "utility=tail-sensitive",
        "utility_form=bounded",
    ],
}
NETWORK = [
    "-m",
    "la",
    "backbone=resnet8",
    "epochs=4",
    "warmup=5",
    "hold_out=0",
    "checkpoint_every=9",
]
NETWORK += ["batch_norm=local"]
KILLED = ["digits-lt", "-m", "rf-dlc", "epochs=60", "widths=64", "checkpoint_every=1"]


def started(
    processes: int, words: list[str], out: Path, threads: int = 1, restarts: int = 0
) -> Training:
    launch = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    command = [
        sys.executable,
        "-m",
        *launch,
        "--max-restarts",
        str(restarts),
        "-m",
        "rfdlc",
        "train",
        *words,
    ]
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": source}
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    return subprocess.Popen([*command, "--out", str(out)], env=environment, **pipes)


def finished(running: Training) -> None:
    _, trouble = running.communicate()
    if running.returncode:
        raise SystemExit(f"a training failed:\n{trouble}")


def history(out: Path) -> list[dict[str, str]]:
    if not (out / "history.csv").exists():
        return []
    with (out / "history.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


# -- one training
# --------------------------------------------------------------------------------------


def differences(root: Path) -> Iterator[Row]:
    """digits-lt, 3 epochs: 36 steps, the last of each epoch shorter."""
    for name, words in ALIKE.items():
        folders = [root / f"{words[1]}-{count}" for count in (1, 2)]
        for count, out in zip((1, 2), folders, strict=True):
            finished(started(count, ["digits-lt", *words, "epochs=3", "warmup=2"], out))
        losses = [
            np.array([float(row["loss"]) for row in history(out)]) for out in folders
        ]
        one, two = (load_file(out / "model.safetensors") for out in folders)
        largest = max(float(np.abs(one[key] - two[key]).max()) for key in one)
        largest = max(largest, float(np.abs(losses[0] - losses[1]).max()))
        yield {
            "what": f"largest difference of 2 processes from 1, {name}",
            "value": largest,
            "required": 1e-5,
        }


# -- speed
# --------------------------------------------------------------------------------------


def efficiencies(root: Path, times: int) -> Iterator[Row]:
    """ResNet-8, 16 x 16 images; the best epoch of all trainings, which take turns."""
    rng = np.random.default_rng(0)
    images = {
        f"{part}_x": rng.integers(0, 256, (n, 16, 16, 3), np.uint8)
        for part, n in (("train", 1024), ("test", 8))
    }
    labels = {
        name.replace("_x", "_y"): np.arange(len(values)) % 8
        for name, values in images.items()
    }
    np.savez(root / "images.npz", **images, **labels)  # type: ignore[arg-type]
    kinds = {
        "1": (1, 1, 64),
        "1, two threads": (1, 2, 64),
        "2, strong": (2, 1, 64),
        "2, weak": (2, 1, 128),
    }
    speeds: dict[str, float] = dict.fromkeys(kinds, 0.0)
    load = os.getloadavg()[0]  # others on the machine spoil what follows
    for turn in range(times):
        for kind, (processes, threads, batch) in kinds.items():
            out = root / f"speed-{turn}-{processes}-{threads}-{batch}"
            finished(
                started(
                    processes,
                    [str(root / "images.npz"), *NETWORK, f"batch_size={batch}"],
                    out,
                    threads,
                )
            )
            speeds[kind] = max(
                speeds[kind],
                *(float(row["samples_per_second"]) for row in history(out)),
            )
    for kind, speed in speeds.items():
        shown = {
            "value": round(speed, 1),
            "unit": "samples/s",
            "reference": f"1 process, one thread; load {load:.1f}",
        }
        yield {
            "what": f"processes: {kind}",
            **shown,
            "ratio": round(speed / speeds["1"], 2),
        }


# -- dead workers
# --------------------------------------------------------------------------------------


def kills(root: Path, times: int, rng: random.Random) -> Row:
    finished(started(2, KILLED, root / "alone"))
    expected, epochs = digest(root / "alone"), len(history(root / "alone"))
    same = 0
    for number in range(times):
        out = root / f"killed-{number}"
        running = started(2, KILLED, out, restarts=2)
        wanted = rng.randrange(1, epochs - 2)  # killed some time after this epoch
        while len(history(out)) < wanted and running.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        workers = (
            Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        )
        os.kill(int(rng.choice(workers)), signal.SIGKILL)
        finished(running)
        same += len(history(out)) == epochs and digest(out) == expected
    what = "runs that end with the same epochs and weights after a worker was killed"
    return {
        "what": what,
        "value": same,
        "unit": "runs",
        "reference": times,
        "required": times,
    }


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


# -- on paper
# --------------------------------------------------------------------------------------

NETWORKS = {
    "ResNet-50": (25.6e6, 2500.0),
    "ResNet-50, 3 particles": (73.8e6, 1000.0),
}  # weights; samples/s of a GPU
LINKS = {  # GPUs: [(link, bytes/s of a ring through every GPU, seconds a hop)]
    8: [("NVLink", 360e9, 3e-6)],
    64: [
        ("InfiniBand, a NIC a node", 40e9, 10e-6),
        ("InfiniBand, a NIC a GPU", 320e9, 10e-6),
    ],
}


def summed(weights: float, gpus: int, bandwidth: float, hop: float) -> float:
    """Seconds of a ring all-reduce of float32 gradients: 2 (N-1)/N S/B + 2 (N-1) hop,
    nothing of it hidden.
    """
    return 2 * (gpus - 1) / gpus * 4 * weights / bandwidth + 2 * (gpus - 1) * hop


def paper() -> Iterator[Row]:
    for name, (weights, speed) in NETWORKS.items():
        for gpus, links in LINKS.items():
            for link, bandwidth, hop in links:
                for share in (32, 64, 128):
                    communication, step = (
                        summed(weights, gpus, bandwidth, hop),
                        share / speed,
                    )
                    told = (
                        f"on paper: {name}, {gpus} GPUs, {link}, {share} samples a GPU:"
                        " a step spends"
                    )
                    ratio = round(step / (step + communication), 3)
                    yield {
                        "what": told,
                        "value": round(1e3 * communication, 2),
                        "unit": "ms",
                        "ratio": ratio,
                        "reference": f"{1e3 * step:.1f} ms of computing",
                    }


# -- memory
# --------------------------------------------------------------------------------------


def activations() -> Iterator[Row]:
    """Bytes that the backward pass keeps for one sample more of 224 x 224, by preset:
    each memory once, no weights.
    """
    for preset, classes in (("imagenet-lt", 1000), ("inaturalist18", 8142)):
        for again in (False, True):
            row, settings = resolve(
                "rf-dlc",
                preset,
                {"checkpoint_activations": again, "compile": False},
                "images",
            )
            net = method_net(row, settings, (3, 224, 224), as_classes(classes), (0,))
            weights = sum(weight.numel() for weight in net.parameters()) / 1e6
            what = (
                f"activations of a sample, {preset}"
                + ", checkpoint_activations" * again
            )
            yield {
                "what": what,
                "value": round((kept(net, 4) - kept(net, 2)) / 2e6, 1),
                "unit": "MB",
                "reference": f"float32; {weights:.1f} M weights",
            }


def kept(net: ParticleNet, samples: int) -> int:
    """Bytes that a forward pass keeps beside the weights."""
    mine = {
        weight.untyped_storage().data_ptr()
        for weight in [*net.parameters(), *net.buffers()]
    }
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = net.particle_logits(
            torch.randn(1, samples, 3, 224, 224)
        )  # its graph holds what was kept
    return sum(found.values()) if logits.requires_grad else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--turns",
        type=int,
        default=3,
        help="trainings of each kind whose speed is measured",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/scale.csv"
    )
    parser.add_argument(
        "--paper", action="store_true", help="the communication model and memory alone"
    )
    options = parser.parse_args()
    rows = [*activations(), *paper()]
    if not options.paper:
        with tempfile.TemporaryDirectory() as place:
            root = Path(place)
            found = [*differences(root), *efficiencies(root, options.turns)]
            rows = [
                *found,
                kills(root, options.kills, random.Random(options.seed)),
                *rows,
            ]
    if options.record:
        write("scale", rows, ["rfdlc", "torch"])
    else:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    alike = [
        row["value"] <= row["required"] for row in rows if row.get("required") == 1e-5
    ]
    survived = [
        row["value"] == row["required"] for row in rows if row.get("unit") == "runs"
    ]
    sys.exit(not all([*alike, *survived]))


if __name__ == "__main__":
    main()
