"""A mutating fuzzer of every parser that meets strangers' bytes: input `i` of a seed is
always the same.

Inputs are valid files with changed bytes, numbers, texts, lengths and pieces; formats
with an outer layer (zip, checksum, JSON) are also changed inside it. Workers are
processes of their own, so that a crash, a hang or much memory is counted and the next
input follows.
"""

import io
import json
import multiprocessing
import pickle
import resource
import shutil
import tarfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.errors import InputError

SLOW, STUCK = 1.0, 20.0  # seconds: counted as slow; killed
MEMORY = 2**31  # bytes beyond the start, counted as too much
TEXTS = (
    b"",
    b"nan",
    b"-1",
    b"1e999",
    b"99999999999999999999",
    b"\xff\xfe",
    b"\x00",
    b"=1+1",
    b"\x1b[31m",
    b"[" * 3000,
    b'"',
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**15,
    10**30,
    1e308,
    -0.5,
    "",
    "x" * 5000,
    "\ud800",
    "a\nb",
    [],
    {},
    [[]],
    [None],
    {"a": 1},
)
Read = Callable[[Path], Any]
Inputs = Callable[[np.random.Generator], bytes]


@dataclass(frozen=True)
class Parser:
    """Valid inputs, how one is changed, and what reads a file of that name in a
    folder.
    """

    name: str  # of the file
    make: Callable[[Path], Inputs]  # from a folder with all that is needed
    read: Callable[[Path], Read]


def flipped(rng: np.random.Generator, content: bytes) -> bytes:
    """A few changes of bytes: flips, edges, deletions, repetitions, other lengths."""
    data = bytearray(content)
    for _ in range(int(rng.choice((1, 1, 1, 2, 4, 16)))):
        size = len(data)
        place, length = (
            int(rng.integers(0, size + 1)),
            int(rng.integers(1, 1 + min(64, max(1, size)))),
        )
        match int(rng.integers(0, 8)):
            case 0 | 1 if place < size:
                data[place] ^= 1 << int(rng.integers(0, 8))
            case 2 if place < size:
                data[place] = int(rng.choice((0, 1, 127, 128, 255, *b"\"',\n[]{}-.")))
            case 3:
                del data[place : place + length]
            case 4:
                data[place:place] = data[place : place + length] * int(
                    rng.integers(1, 20)
                )
            case 5:
                edge = int(rng.choice((0, 1, -1, 2**31 - 1, -(2**31), 2**16)))
                data[place : place + 4] = edge.to_bytes(4, "little", signed=True)
            case 6:
                data[place : place + int(rng.integers(0, 8))] = TEXTS[
                    int(rng.integers(len(TEXTS)))
                ]
            case _:
                data = data[:place] if rng.random() < 0.3 else data
    return bytes(data)


def json_changed(rng: np.random.Generator, table: Any) -> Any:
    """JSON with one value, somewhere in it, replaced, removed or moved."""
    if isinstance(table, dict | list) and table and rng.random() < 0.8:
        copy = dict(table) if isinstance(table, dict) else list(table)
        keys = list(table) if isinstance(table, dict) else list(range(len(table)))
        key = keys[int(rng.integers(len(keys)))]
        if rng.random() < 0.1:
            del copy[key]
        else:
            copy[key] = json_changed(rng, table[key])
        return copy
    return VALUES[int(rng.integers(len(VALUES)))]


def json_inputs(table: Any) -> Inputs:
    """Bytes of JSON, changed as a tree or as text."""
    text = json.dumps(table).encode()

    def make(rng: np.random.Generator) -> bytes:
        return (
            flipped(rng, text)
            if rng.random() < 0.4
            else json.dumps(json_changed(rng, table)).encode()
        )

    return make


def byte_inputs(*contents: bytes) -> Inputs:
    return lambda rng: flipped(rng, contents[int(rng.integers(len(contents)))])


def npz_inputs(**arrays: Any) -> Inputs:
    """Zip files changed from outside, and members changed inside a zip that is
    right.
    """
    buffer, members = io.BytesIO(), {}
    np.savez_compressed(buffer, **arrays)
    for name, array in arrays.items():
        one = io.BytesIO()
        np.save(one, array)
        members[f"{name}.npy"] = one.getvalue()

    def make(rng: np.random.Generator) -> bytes:
        if rng.random() < 0.3:
            return flipped(rng, buffer.getvalue())
        out, chosen = io.BytesIO(), list(members)[int(rng.integers(len(members)))]
        with (
            warnings.catch_warnings(action="ignore"),
            zipfile.ZipFile(out, "w") as archive,
        ):
            for name, content in members.items():
                archive.writestr(
                    name, flipped(rng, content) if name == chosen else content
                )
        return out.getvalue()

    return make


def _cifar(folder: Path) -> Inputs:
    rng, place = np.random.default_rng(0), folder / "cifar-10-batches-py"
    place.mkdir()
    contents = []
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        table = {
            b"data": rng.integers(0, 256, (10, 3072), dtype=np.uint8),
            b"labels": list(range(10)),
        }
        contents.append(pickle.dumps(table, protocol=2))
        (place / name).write_bytes(contents[-1])
    (place / "batches.meta").write_bytes(
        pickle.dumps({b"label_names": [f"c{i}".encode() for i in range(10)]}, 2)
    )
    small = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
    return byte_inputs(
        contents[0], *(pickle.dumps(small, protocol) for protocol in (0, 1, 2, 3, 4))
    )


def _table(folder: Path) -> Any:
    import pyarrow

    rng, n = np.random.default_rng(0), 60
    cells = {
        "age": rng.integers(20, 80, n),
        "weight": rng.normal(70, 9, n),
        "colour": rng.choice(["red", "blue"], n),
    }
    return pyarrow.table(cells | {"class": rng.choice(["a", "b", "c"], n)})


def _written(folder: Path, write: Callable[[Any, Path], Any]) -> Inputs:
    write(_table(folder), folder / "seed")
    return byte_inputs((folder / "seed").read_bytes())


def _csv(table: Any, path: Path) -> None:
    from pyarrow.csv import write_csv

    write_csv(table, path)


def _parquet(table: Any, path: Path) -> None:
    from pyarrow.parquet import write_table

    write_table(table, path)


def _arrow(table: Any, path: Path) -> None:
    from pyarrow.feather import write_feather

    write_feather(table, path)


def _load(folder: Path, **options: Any) -> Read:
    from rfdlc.data.load import load

    return lambda path: load(path, **options)


def _predictions(folder: Path) -> Read:
    from rfdlc.probabilities.predictions import Predictions

    return Predictions.load


def _scores() -> dict[str, Any]:
    classes = np.array(
        json.dumps({"names": ["a", "b", "c"], "counts": [5, 3, 1], "groups": {}})
    )
    return {
        "probabilities": np.full((1, 6, 3), 1 / 3),
        "targets": np.arange(6) % 3,
        "classes": classes,
    }


def _lists(folder: Path) -> Inputs:
    from PIL import Image

    names = [f"{i}.png" for i in range(8)]
    for i, name in enumerate(names):
        Image.fromarray(np.full((8, 8), 30 * i, np.uint8)).save(folder / name)
    return byte_inputs(
        "".join(f"{name} {i % 2}\n" for i, name in enumerate(names)).encode()
    )


def _tar(folder: Path) -> Inputs:
    """A tar with images of four pixels and their labels: most of its bytes are
    headers.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for i in range(6):
            for name, content in (
                (f"{i}.ppm", b"P6 2 2 255\n" + bytes(range(i, i + 12))),
                (f"{i}.cls", b"01"[i % 2 :][:1]),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return byte_inputs(buffer.getvalue())


def _parquet_images(folder: Path) -> Inputs:
    from pyarrow import table

    cells = [b"P6 2 2 255\n" + bytes(range(i, i + 12)) for i in range(8)]
    _parquet(
        table({"image": cells, "label": [i % 2 for i in range(8)]}), folder / "seed"
    )
    return byte_inputs((folder / "seed").read_bytes())


@cache
def _run() -> Path:
    """A trained run of digits, shared by the parsers that need one."""
    import tempfile

    from rfdlc.training.train import train

    folder = Path(tempfile.mkdtemp(prefix="rfdlc-fuzz-")) / "run"
    with warnings.catch_warnings(action="ignore"):
        train(
            "digits-lt", out=folder, epochs=1, device="cpu", backbone="mlp", widths=(8,)
        )
    return folder


def _run_files(folder: Path) -> Inputs:
    """One of a run folder's files, named in the first bytes of the input."""
    shutil.copytree(_run(), folder / "run")
    files = [
        folder / "run" / name
        for name in ("config.json", "classes.json", "decider.json", "model.safetensors")
    ]
    inputs = [
        (
            json_inputs(json.loads(file.read_text()))
            if file.suffix == ".json"
            else byte_inputs(file.read_bytes())
        )
        for file in files
    ]

    def make(rng: np.random.Generator) -> bytes:
        chosen = int(rng.integers(len(files)))
        return bytes([chosen]) + inputs[chosen](rng)

    return make


def _read_run(folder: Path) -> Read:
    from rfdlc.training.model import Model

    names = ("config.json", "classes.json", "decider.json", "model.safetensors")
    kept = {name: (_run() / name).read_bytes() for name in names}

    def read(path: Path) -> Any:
        content = path.read_bytes()
        changed = names[content[0] % len(names)] if content else names[0]
        for name in names:
            (folder / "run" / name).write_bytes(
                content[1:] if name == changed else kept[name]
            )
        return Model.load(folder / "run", device="cpu")

    return read


def _exported(folder: Path) -> Path:
    from rfdlc.exporting.export import export

    path = _run().parent / "model.onnx"
    if not path.exists():
        with warnings.catch_warnings(action="ignore"):
            export(_run(), path)
    return path


def _onnx(folder: Path) -> Inputs:
    """The metadata changed as JSON, or the bytes of the graph; the checksum is right in
    both.
    """
    import onnx

    from rfdlc.predicting.onnx_model import (
        CHECKSUM_LENGTH,
        METADATA_KEY,
        with_checksum,
    )

    content = _exported(folder).read_bytes()[:-CHECKSUM_LENGTH]
    graph = onnx.load_model_from_string(content)
    place = next(entry for entry in graph.metadata_props if entry.key == METADATA_KEY)
    metadata = json_inputs(json.loads(place.value))

    def make(rng: np.random.Generator) -> bytes:
        if rng.random() < 0.2:
            return with_checksum(flipped(rng, content))
        place.value = metadata(rng).decode("utf-8", "replace")
        return with_checksum(graph.SerializeToString())

    return make


def _read_onnx(folder: Path) -> Read:
    from rfdlc.predicting.onnx_model import OnnxModel

    return OnnxModel.load


def _decider(folder: Path) -> Inputs:
    import rfdlc

    rng = np.random.default_rng(0)
    utility = rfdlc.Utility(np.eye(3), ["a", "b", "c"]).with_abstain(0.3)
    fitted = rfdlc.Decider(utility).fit(
        rng.dirichlet(np.ones(3), 60), np.arange(60) % 3
    )
    return json_inputs(fitted.to_dict())


def _read_decider(folder: Path) -> Read:
    import rfdlc

    scores = np.full((2, 3), 1 / 3)
    return lambda path: rfdlc.Decider.load(path).decide(scores)


def _requests(folder: Path, infer: bool) -> Inputs:
    sample = np.zeros((1, 1, 8, 8), int)
    tensor = {
        "name": "inputs",
        "shape": [1, 1, 8, 8],
        "datatype": "UINT8",
        "data": sample.reshape(-1).tolist(),
    }
    utility = {
        "matrix": np.eye(10).tolist(),
        "actions": [str(i) for i in range(10)],
        "classes": [str(i) for i in range(10)],
    }
    decide = [
        json_inputs({"arrays": sample.tolist(), "utility": utility}),
        json_inputs({"probabilities": [[0.1] * 10]}),
    ]
    bodies = (
        [json_inputs({"id": "1", "inputs": [tensor], "outputs": [{"name": "action"}]})]
        if infer
        else decide
    )
    return lambda rng: bodies[int(rng.integers(len(bodies)))](rng)


def _reader(kind: str) -> Callable[[Path], Read]:
    def make(folder: Path) -> Read:
        from fastapi import HTTPException

        from rfdlc.serving.backend import Answer, Limits, open_backend
        from rfdlc.serving.inference import Inference
        from rfdlc.serving.requests import Reader

        backend = open_backend(_run())
        reader = Reader(backend, Limits())
        reads = {
            "decide": reader.read_json,
            "infer": Inference("m", "1", reader).read,
            "image": reader.read_image,
        }

        def read(path: Path) -> Any:
            try:
                question = reads[kind](path.read_bytes(), time.monotonic() + 10)
                if "utility" in question:
                    decider = backend.decider.replace(utility=question["utility"])
                    return Answer.of(decider, np.full((1, 10), 0.1), np.zeros(1))
                return question
            except HTTPException as error:
                raise InputError(str(error.detail)) from None

        return read

    return make


def _images(folder: Path) -> Inputs:
    from PIL import Image

    contents = []
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "PPM"):
        buffer = io.BytesIO()
        Image.fromarray(
            np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        ).save(buffer, kind)
        contents.append(buffer.getvalue())
    return byte_inputs(*contents)


def _utility(folder: Path) -> Read:
    from rfdlc.decisions.utility import Utility

    return Utility.read_csv


def _classes(folder: Path) -> Read:
    from rfdlc.probabilities.classes import Classes

    return Classes.from_json


ARRAYS = {
    "x": np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32),
    "y": np.arange(20) % 2,
}
UTILITY = b"true,a,b,abstain\na,1,0,.2\nb,-5,1,.2\n"
NAMES = {"names": ["a", "b"], "counts": [5, 2], "groups": {"rare": ["b"]}}
PARSERS = {
    "cifar": Parser(
        "cifar-10-batches-py/data_batch_1",
        _cifar,
        lambda folder: lambda path: _load(folder)(path.parent),
    ),
    "npz": Parser("data.npz", lambda folder: npz_inputs(**ARRAYS), _load),
    "npz-predictions": Parser(
        "scores.npz", lambda folder: npz_inputs(**_scores()), _predictions
    ),
    "csv": Parser(
        "table.csv", partial(_written, write=_csv), partial(_load, target="class")
    ),
    "parquet": Parser(
        "table.parquet",
        partial(_written, write=_parquet),
        partial(_load, target="class"),
    ),
    "arrow": Parser(
        "table.arrow", partial(_written, write=_arrow), partial(_load, target="class")
    ),
    "csv-predictions": Parser(
        "scores.csv",
        lambda folder: byte_inputs(b"id,a,b,target\n1,.9,.1,a\n2,.2,.8,b\n"),
        _predictions,
    ),
    "list": Parser("train.txt", _lists, _load),
    "tar": Parser("data.tar", _tar, _load),
    "parquet-images": Parser("images.parquet", _parquet_images, _load),
    "utility": Parser("U.csv", lambda folder: byte_inputs(UTILITY), _utility),
    "classes": Parser("classes.json", lambda folder: json_inputs(NAMES), _classes),
    "decider": Parser("decider.json", _decider, _read_decider),
    "run": Parser("input", _run_files, _read_run),
    "onnx": Parser("model.onnx", _onnx, _read_onnx),
    "request": Parser("body", partial(_requests, infer=False), _reader("decide")),
    "request-v2": Parser("body", partial(_requests, infer=True), _reader("infer")),
    "request-image": Parser("body", _images, _reader("image")),
}
MODULES = (
    "rfdlc.data.load",
    "rfdlc.training.model",
    "rfdlc.serving.inference",
    "pyarrow.dataset",
    "sklearn.tree",
)
COUNTS = ("inputs", "accepted", "refused", "tracebacks", "crashes", "stuck", "slow")


def _waited() -> float:
    """Seconds in which this thread could have run, but other processes did; 0 where the
    system does not tell.
    """
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def alone(read: Callable[[], Any]) -> float:
    """Seconds of a call as if nothing else ran: computing and sleeping count, waiting
    for a core does not.
    """
    began, waited = time.perf_counter(), _waited()
    with suppress(Exception):
        read()
    return time.perf_counter() - began - (_waited() - waited)


def _work(
    name: str,
    seed: int,
    start: int,
    stop: int,
    step: int,
    folder: Path,
    kept: Path,
    shared: Any,
) -> None:
    """Read inputs start, start + step, ... and count what happens in `shared`."""
    warnings.simplefilter("ignore")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parser = PARSERS[name]
    make, read, path = parser.make(folder), parser.read(folder), folder / parser.name
    for attempt in range(50):  # the first input that is accepted imports much
        path.write_bytes(make(np.random.default_rng([seed, 2**31 + attempt])))
        with suppress(Exception):
            read(path)
            break
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(start, stop, step):
        content = make(np.random.default_rng([seed, index]))
        path.write_bytes(content)
        shared[0], began = index, time.perf_counter()
        try:
            read(path)
            shared[2] += 1
        except InputError:
            shared[3] += 1
        except Exception:
            shared[4] += 1
            kept.mkdir(parents=True, exist_ok=True)
            (kept / f"{name}-{seed}-{index}").write_bytes(content)
            (kept / f"{name}-{seed}-{index}.txt").write_text(traceback.format_exc())
        took = time.perf_counter() - began
        for _ in range(3):  # on a busy machine anything can be slow once
            if took > SLOW:
                took = min(took, alone(lambda: read(path)))
        if took > SLOW:
            kept.mkdir(parents=True, exist_ok=True)
            (kept / f"{name}-{seed}-{index}-slow").write_bytes(content)
        shared[1] += 1
        shared[5], shared[6] = max(shared[5], took), shared[6] + (took > SLOW)
        shared[7] = max(
            shared[7],
            (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024,
        )


def fuzz(
    name: str, count: int, seed: int, workers: int, place: Path, kept: Path
) -> dict[str, Any]:
    """Counts of one parser over `count` inputs; a process that crashes or hangs is
    replaced.
    """
    context, began = multiprocessing.get_context("fork"), time.perf_counter()
    crashes = stuck = 0
    tables = [context.Array("d", 8, lock=False) for _ in range(workers)]
    for module in MODULES:
        import_module(module)  # once, not in every process
    if name in ("run", "onnx") or name.startswith("request"):
        _run()  # once, before the processes are forked

    def begin(worker: int, first: int) -> Any:
        tables[worker][0] = first - workers
        words = (
            name,
            seed,
            first,
            count,
            workers,
            place / f"{name}-{worker}",
            kept,
            tables[worker],
        )
        process = context.Process(target=_work, args=words)
        process.start()
        return process

    alive = {worker: begin(worker, worker) for worker in range(workers)}
    last = {worker: (-1.0, time.monotonic()) for worker in alive}
    while alive:
        time.sleep(0.05)
        for worker, process in list(alive.items()):
            at, since = last[worker]
            if tables[worker][1] != at:
                last[worker] = tables[worker][1], time.monotonic()
            hangs = (
                process.is_alive()
                and tables[worker][1] == at
                and time.monotonic() - since > STUCK + 100 * (at == 0)
            )
            if process.is_alive() and not hangs:
                continue
            process.kill()
            process.join()
            del alive[worker]
            if hangs or process.exitcode:
                crashes, stuck = crashes + (not hangs), stuck + hangs
                index = int(tables[worker][0])
                kept.mkdir(parents=True, exist_ok=True)
                with_input = place / f"{name}-{worker}" / PARSERS[name].name
                if with_input.exists():
                    shutil.copyfile(
                        with_input,
                        kept / f"{name}-{seed}-{index}-{'stuck' if hangs else 'crash'}",
                    )
                if index + workers < count:
                    alive[worker] = begin(worker, index + workers)
                    last[worker] = (-1.0, time.monotonic())
    sums = [sum(table[i] for table in tables) for i in range(8)]
    slowest, memory = (max(table[i] for table in tables) for i in (5, 7))
    found = (
        sums[1] + crashes + stuck,
        sums[2],
        sums[3],
        sums[4],
        crashes,
        stuck,
        sums[6],
    )
    row: dict[str, Any] = {
        "what": f"fuzz {name}",
        **{key: int(value) for key, value in zip(COUNTS, found, strict=True)},
    }
    row |= {
        "slowest_s": round(slowest, 3),
        "memory_mb": round(memory),
        "seconds": round(time.perf_counter() - began),
    }
    return row | {
        "holds": (
            not (row["tracebacks"] or crashes or stuck or row["slow"])
            and memory < MEMORY / 2**20
        )
    }
