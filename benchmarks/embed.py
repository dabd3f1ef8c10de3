"""`rfdlc embed` over 5,000 and 20,000 images: speed beside the bare forward pass, peak
memory, and kill -9 on the way.

    python benchmarks/embed.py
        arrays in an .npz file, on a GPU where there is one; results/embed.csv
    python benchmarks/embed.py --files
        JPEG files, results/embed-files.csv

The bare forward pass is the same network on images that are on the device already, in
the same precision and batches. The speed of `embed` has all that an image costs:
reading, copying to the device, computing, writing parts and joining them. It is
measured between calls for few and for many images; another row has the whole call for
many, with the making, saving and hashing of the network. Further rows say where the
time of that call goes, per image: reading and copying to the device, each in a thread
of its own, launching kernels, waiting for the device, and building rows, all in the
main thread, writing parts in a thread, and joining them in the end. A GPU that is never
idle is waited for nearly all the time. The exit code is 1 where memory grows with the
number of images, a row is lost or another one after the kill, or, on a GPU, the speed
is below 0.9 of the bare forward pass.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recording import write
from rfdlc.data.images import ImageFiles
from rfdlc.formats.arrays import ZippedRows
from rfdlc.predicting.embed import ON_CPU, ON_GPU, Rows, embed
from rfdlc.predicting.parts import Parts
from rfdlc.training import embedding
from rfdlc.training.embedding import Embedder, new_embedder

SMALL, LARGE = 5_000, 20_000
LARGEST_RATIO, LEAST_SPEED = 1.1, 0.9
CHILD = (
    "import json, sys, rfdlc; rfdlc.embed(*sys.argv[1:3], **json.loads(sys.argv[3]))"
)
STAGES: dict[str, tuple[Any, str]] = {
    "reading arrays": (ZippedRows, "__getitem__"),
    "decoding files": (ImageFiles, "decode"),
    "copying to the device": (Embedder, "_copy"),
    "launching": (Embedder, "_launch"),
    "waiting for the device": (embedding, "_received"),
    "computing on the CPU": (Embedder, "_on_host"),
    "building rows": (Rows, "_rows"),
    "writing parts": (Parts, "write"),
    "joining parts": (Parts, "join"),
}
Row = dict[str, object]


def paint(place: Path, count: int, size: int, files: bool) -> None:
    """Noise, which is different in every image; a class for each hundred of files."""
    rng = np.random.default_rng(0)
    if files:
        from PIL import Image

        for i in range(count):
            folder = place / f"{i // 100:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = rng.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(
                folder / f"{i:06d}.jpg"
            )
        return
    block = rng.integers(0, 256, (500, 3, size, size), dtype=np.uint8)
    with zipfile.ZipFile(place, "w", allowZip64=True) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as member:
            header = {
                "descr": "|u1",
                "fortran_order": False,
                "shape": (count, 3, size, size),
            }
            np.lib.format.write_array_header_2_0(member, header)
            for start in range(0, count, len(block)):
                member.write(
                    np.roll(block, start // len(block), axis=3)[
                        : count - start
                    ].tobytes()
                )
        with archive.open("y.npy", "w") as member:
            np.lib.format.write_array(member, np.arange(count) % 10)


def bare(given: dict[str, Any], size: int, device: torch.device) -> float:
    """Images per second of the network alone."""
    options = {
        key: value for key, value in given.items() if key in ("image_size", "half")
    }
    embedder = new_embedder(given["backbone"], device=device, **options)
    cuda = device.type == "cuda"
    batch, times = (ON_GPU, LARGE // ON_GPU) if cuda else (ON_CPU, 8)
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last) if cuda else images
    with (
        torch.inference_mode(),
        torch.autocast(device.type, torch.float16, enabled=embedder.half),
    ):
        for repeated in (5, times):
            began = time.perf_counter()
            for _ in range(repeated):
                embedder.network(images)
            if cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
    return times * batch / seconds


def timed(
    function: Callable[..., Any], stage: str, seconds: dict[str, float]
) -> Callable[..., Any]:
    def measured(*given: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*given)
        finally:
            seconds[stage] += time.perf_counter() - began

    return measured


def child(
    source: Path, out: Path, given: dict[str, Any], kill_at: int | None = None
) -> tuple[float, int]:
    """Peak memory (MiB) and exit code of the call in a process of its own; killed after
    so many parts.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(out), json.dumps(given)]
    )
    while kill_at is not None and parts_done(out) < kill_at:
        time.sleep(0.02)
    if kill_at is not None:
        process.send_signal(signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    return usage.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)


def parts_done(out: Path) -> int:
    return len(list(out.with_name(f"{out.name}.parts").glob("part-*")))


def row(what: str, value: float, reference: float, required: str, unit: str) -> Row:
    numbers = {"value": round(value, 1), "unit": unit, "reference": round(reference, 1)}
    return {
        "what": what,
        **numbers,
        "ratio": round(value / reference, 3),
        "required": required,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--backbone", default="")
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--counts", type=int, nargs=2, default=(SMALL, LARGE))
    parser.add_argument("--half", action="store_true", help="16 bits on a GPU")
    parser.add_argument("--commit", default="", help="where there is no git")
    words = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, size = (
        torch.device("cuda" if cuda else "cpu"),
        words.size or (224 if cuda else 32),
    )
    name = words.backbone or ("resnet50" if cuda else "resnet8")
    given: dict[str, Any] = {
        "backbone": name,
        "image_size": size,
        "half": words.half,
        "device": device.type,
    }
    what, passed, rows = (
        f"{name}, {size} px{', 16 bits' if words.half else ''}",
        True,
        list[Row](),
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sources = {
            count: place / (f"photos-{count}" if words.files else f"{count}.npz")
            for count in words.counts
        }
        for count, source in sources.items():
            paint(source, count, size, words.files)
        peaks = [
            child(source, place / f"f-{count}.npz", given)
            for count, source in sources.items()
        ]
        assert [code for _, code in peaks] == [0, 0]
        ratio = peaks[1][0] / peaks[0][0]
        passed &= ratio < LARGEST_RATIO
        few, many = words.counts
        compared = f"{what}: peak memory for {many:,} images, against {few:,}"
        rows.append(
            row(
                compared,
                peaks[1][0],
                peaks[0][0],
                f"ratio below {LARGEST_RATIO}",
                "MiB",
            )
        )
        killed, parts = place / "killed.npz", -(-many // 1024)
        assert child(sources[many], killed, given, parts // 2)[1] == -signal.SIGKILL
        reached = parts_done(killed)
        assert not killed.exists()
        assert child(sources[many], killed, given)[1] == 0
        with np.load(killed) as found, np.load(place / f"f-{many}.npz") as whole:
            same = found["x"].shape == whole["x"].shape and np.array_equal(
                found["y"], whole["y"]
            )
            away = (
                float(np.abs(found["x"] - whole["x"]).max()) if same else float("inf")
            )
            scale = float(np.abs(whole["x"]).max())
        passed &= same and away <= 1e-3 * scale
        end = f"{what}: kill -9 after {reached} of {parts} parts, then to the end"
        rows.append(
            {
                "what": f"{end}: rows",
                "value": many if same else 0,
                "reference": many,
                "required": many,
            }
        )
        distance = {"value": f"{away / scale:.2g}", "required": "0.001 or less"}
        rows.append(
            {
                "what": (
                    f"{end}: largest difference from an uninterrupted call, relative"
                ),
                **distance,
            }
        )
        embed(sources[few], place / "warm.npz", **given)
        seconds, inside = dict[int, float](), defaultdict[str, float](float)
        for stage, (owner, function) in STAGES.items():
            setattr(owner, function, timed(getattr(owner, function), stage, inside))
        for count, source in sources.items():
            inside.clear()
            began = time.perf_counter()
            embed(source, place / f"timed-{count}.npz", **given)
            seconds[count] = time.perf_counter() - began
        speed, alone = (
            (many - few) / (seconds[many] - seconds[few]),
            bare(given, size, device),
        )
        passed &= not cuda or words.files or speed >= LEAST_SPEED * alone
        needed = f"{LEAST_SPEED} or more" if cuda and not words.files else ""
        rows.append(
            row(
                f"{what}: embed, against the bare forward pass",
                speed,
                alone,
                needed,
                "images/s",
            )
        )
        rows.append(
            row(
                f"{what}: the whole call for {many:,}",
                many / seconds[many],
                alone,
                "",
                "images/s",
            )
        )
        for stage, spent in inside.items():
            rows.append(
                {
                    "what": f"{what}: of it, {stage}",
                    "value": round(1e6 * spent / many, 1),
                    "unit": "µs/image",
                }
            )
    name = "embed-files" if words.files else "embed-half" if words.half else "embed"
    write(name, rows, ["rfdlc", "torch", "numpy", "pillow"], words.commit)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
