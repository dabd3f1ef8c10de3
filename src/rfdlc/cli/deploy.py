"""`rfdlc predict`, `rfdlc export` and `rfdlc serve`: what is done with a
trained model.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import rfdlc
from rfdlc.cli import decisions
from rfdlc.cli.request import (
    GROUPS,
    NAME_OR_PATH,
    JsonOption,
    ModelRequest,
    RunFolder,
    Source,
    SourceRequest,
    Target,
    UtilityRequest,
    takes_request,
)
from rfdlc.cli.train import ready
from rfdlc.cli.writing import SHOWN, action_table, check_writable, new_table, output
from rfdlc.errors import InputError, choose, counted, expect, listing, repeated
from rfdlc.progress import announce

BACKBONE = (
    "timm:NAME, package.module:function, a file .onnx, or a built-in backbone such as"
    " resnet50."
)
NAME_OR_PATHS = f"{NAME_OR_PATH[:-1]}, or several image files."
KEPT = (
    "Copy a column of a table to the predictions (not to .npz); may be repeated. A"
    " column `id` always is."
)
PREDICTED = "Probabilities as .parquet or .csv; logits of the particles as .npz."


@takes_request
def embed(
    source: Source,
    reading: SourceRequest,
    backbone: Annotated[str, Option("--backbone", "-b", help=BACKBONE)],
    out: Annotated[
        Path, Option("--out", "-o", help="Features as .parquet, or as .npz.")
    ] = Path("features.parquet"),
    pretrained: Annotated[
        str,
        Option(help="Weights: a safetensors file, `hub` (downloaded by timm), `none`."),
    ] = "none",
    layers: Annotated[
        str | None,
        Option(help="Modules or ONNX outputs to put side by side: `a,b,output`."),
    ] = None,
    flips: Annotated[
        bool,
        Option(
            "--flips", help="Average the features of an image and its mirror image."
        ),
    ] = False,
    image_size: Annotated[
        int, Option(min=0, help="Side of the images; 0 for the network's own.")
    ] = 0,
    channels: Annotated[int, Option(min=1, help="3 for colour, 1 for grey.")] = 3,
    mean: Annotated[
        str | None, Option(help="Of the channels, on the scale 0..1: `0.5,0.5,0.5`.")
    ] = None,
    std: Annotated[
        str | None, Option(help="Of the channels, on the scale 0..1.")
    ] = None,
    fit: Annotated[
        str | None, Option(help="How image files become squares: crop, pad or stretch.")
    ] = None,
    crop: Annotated[
        float | None, Option(help="Fraction of the square that is used, such as 0.875.")
    ] = None,
    interpolation: Annotated[str | None, Option(help="bilinear or bicubic.")] = None,
    half: Annotated[
        bool, Option("--half", help="Compute in 16 bits on a GPU.")
    ] = False,
    batch: Annotated[
        int,
        Option("--batch", min=0, help="Images computed together; 0: by the device."),
    ] = 0,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    target: Target = None,
    groups: Annotated[str | None, Option(help=GROUPS)] = None,
    json: JsonOption = False,
) -> None:
    """Write features of images by any network; `rfdlc train` on them gives a model that
    predicts from images.

    Images are read and features written in parts, in constant memory: after an
    interruption the same command continues. Under torchrun each process computes a
    share. Splits, labels, ids and groups are kept. The file says how it was made, and
    the weights are copied beside it.

    **Examples**

    - `rfdlc embed photos/ --backbone timm:resnet50 --pretrained resnet50.safetensors
      --out features.parquet --flips`
    - `rfdlc embed photos.csv --target species --groups site --backbone timm:resnet50
      --pretrained hub`
    - `rfdlc embed photos/ --backbone model.onnx --image-size 224 --out features.npz`
    - `rfdlc embed cifar100-lt --root data --backbone mypackage.networks:encoder
      --image-size 160`
    - `rfdlc train features.parquet --out runs/a && rfdlc predict runs/a new_photos/
      --out predictions.parquet`
    """
    check_writable(out, endings=(".parquet", ".npz"))
    given: dict[str, Any] = {
        "image_size": image_size,
        "channels": channels,
        "crop": crop,
        "half": half,
        "flips": flips,
    }
    given |= {
        "mean": numbers("mean", mean),
        "std": numbers("std", std),
        "batch_size": batch,
        "device": device,
    }
    given |= {
        "fit": fit,
        "interpolation": interpolation,
        "root": reading.root,
        "target": target,
        **reading.given(),
    }
    given |= {"groups": groups}
    with ready():
        try:
            named = [name.strip() for name in (layers or "").split(",") if name.strip()]
            done = rfdlc.embed(
                source,
                out,
                backbone=backbone,
                pretrained=pretrained,
                layers=named,
                **given,
            )
        except KeyboardInterrupt:
            print(
                f"rfdlc: interrupted; the same command continues with {out}.parts",
                file=sys.stderr,
            )
            raise
    summary, lines = _written(
        done, out, f"{done.embedding.width:,} features of {done.embedding.backbone}"
    )
    lines += [
        f"weights for new images: {done.weights}",
        f"next: rfdlc train {out} --out runs/features",
    ] * done.complete
    summary |= {
        "weights": str(done.weights),
        "embedding": done.embedding.model_dump(mode="json"),
    }
    output(json, summary, *lines)


def _written(done: Any, out: Path, what: str) -> tuple[dict[str, Any], list[str]]:
    """What was written, for JSON and in lines; of several processes, the last one
    writes the file.
    """
    listed = done.skipped_file and str(done.skipped_file)
    summary = {
        "out": str(out),
        "samples": done.samples,
        "complete": done.complete,
        "skipped": done.skipped,
    }
    lines = [f"{counted(done.samples, 'sample')}, {what}: {out}"]
    where = f": {listed}" if listed else ""
    lines += (
        [f"{counted(done.skipped, 'broken sample')} left out{where}"]
        if done.skipped
        else []
    )
    share = [
        "this process has finished its share; the last one to finish writes the file"
    ]
    return summary | {"skipped_file": listed}, lines if done.complete else share


def numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers between commas; None for None."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--{name} {text!r}: expected a number per channel, such as 0.5,0.5,0.5"
        ) from None


@takes_request
def predict(
    run: RunFolder,
    sources: Annotated[
        list[str],
        Argument(metavar="NAME_OR_PATH", help=NAME_OR_PATHS, show_default=False),
    ],
    request: ModelRequest,
    reading: SourceRequest,
    out: Annotated[Path, Option("--out", "-o", help=PREDICTED)] = Path(
        "predictions.npz"
    ),
    split: Annotated[
        str | None, Option(help="train, val or test; by default the last that exists.")
    ] = None,
    keep: Annotated[list[str] | None, Option(metavar="COLUMN", help=KEPT)] = None,
    raw: Annotated[
        bool,
        Option("--raw", help="Write the model's own probabilities, not corrected."),
    ] = False,
    engine: Annotated[
        str, Option("--engine", help="local, or ray: Parquet files in a folder --out.")
    ] = "local",
    address: Annotated[
        str | None, Option("--address", help="For ray: the cluster, such as auto.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict a data set with a trained model; `rfdlc decide`, `evaluate` and `report`
    read the result.

    The source is a folder of images (with or without class folders), image files, a
    list of them, a table, arrays, or a data set by name. Tables are written in parts,
    in constant memory: after an interruption the same command continues. Under torchrun
    each process predicts a share. Tables have one column per class with the calibrated
    and corrected probabilities (with `--raw` the model's own), `id` and `target` if
    they are known, the decided `action` with its `expected_utility`, and its `reason`
    and `set` where asked for. All samples are one batch, which keeps to a budget
    exactly (with `--engine ray` by prices of held-out data). An .npz file contains the
    logits of every particle and is made in memory.

    **Examples**

    - `rfdlc predict runs/a photos/ --out predictions.parquet --utility U.csv`
    - `rfdlc fit runs/a --abstain 0.7 --budget 5% --sets macro -o decider.json && rfdlc
      predict runs/a photos/ --out predictions.csv --decider decider.json`
    - `rfdlc predict runs/a list.txt --out predictions.parquet --skip-broken`
    - `rfdlc predict runs/a *.png --out predictions.csv`
    - `torchrun --nproc-per-node 8 -m rfdlc predict runs/a photos/ --out
      predictions.parquet`
    - `rfdlc predict runs/a patients.csv --out probabilities.csv --keep booked_at`
    - `rfdlc predict runs/a photos/ --out predictions/ --engine ray --address auto`
    """
    source = sources[0] if len(sources) == 1 else sources
    on_ray = choose("engine", engine, ("local", "ray")) == "ray"
    expect(
        on_ray or address is None,
        f"--address {address} is for --engine ray: give that as well",
    )
    check_writable(None if on_ray else out)
    options: dict[str, Any] = {
        "split": split,
        "root": reading.root,
        "raw": raw,
        "keep": tuple(keep or ()),
    }
    options |= reading.given() | request.for_model(run)
    announce(f"reading {run}")  # at once: what predicts takes a while to load
    with ready():
        try:
            if on_ray:
                from rfdlc.lakes.ray import predict_source

                done = predict_source(run, source, out, address=address, **options)
            else:
                done = rfdlc.predict(run, source, out, **options)
        except KeyboardInterrupt:
            if out.suffix.lower() != ".npz":
                print(
                    f"rfdlc: interrupted; the same command continues with {out}.parts",
                    file=sys.stderr,
                )
            raise
    summary, lines = _written(done, out, done.decided_for)
    tables = [action_table(done.actions)] if done.actions else []
    if raw or out.suffix.lower() == ".npz":
        lines.append(
            f"the file holds the model's own scores: decide them with --decider {run},"
            " and the same priors"
        )
    if out.suffix.lower() == ".npz":
        lines.append(
            "the file holds logits: --out predictions.csv writes probabilities and the"
            " decided action"
        )
        tables = [_decided(run, out)] if 0 < done.samples <= SHOWN else tables
    if done.budget is not None:
        summary["budget"] = done.budget.to_dict() | {
            "handed_over": dict(done.handed_over)
        }
        lines.append(
            decisions.share_line(
                done.budget, done.handed_over, False, 0 if on_ray else done.samples
            )
        )
    summary |= {
        "run": str(run),
        "decided_for": done.decided_for,
        "actions": dict(done.actions),
    }
    output(json, summary, *tables, *lines)


def _decided(run: Path, file: Path) -> Any:
    """What the run decides for a few samples, one row each."""
    predictions, decider = rfdlc.Predictions.load(file), rfdlc.Decider.load(run)
    found, table = (
        decider.explain(predictions),
        new_table("sample", "decided", "most probable", "probability", left=3),
    )
    ids = range(len(found)) if predictions.ids is None else predictions.ids
    likely = decider.utility.classes.select(found.argmax)
    for name, action, other, probability in zip(
        ids, found.action, likely, found.probability, strict=True
    ):
        table.add_row(str(name), found.actions[action], other, f"{probability:.1%}")
    return table


@takes_request
def export(
    run: RunFolder,
    out: Annotated[
        Path,
        Argument(metavar="FILE", help="`model.onnx`, or `model.pt2` for torch.export."),
    ],
    request: ModelRequest,
    utility_input: Annotated[
        bool, Option("--utility-input", help="Make the utility an input of the graph.")
    ] = False,
    resize: Annotated[
        bool, Option("--resize", help="The graph takes images of any size.")
    ] = False,
    half: Annotated[bool, Option("--half", help="Networks in 16 bits.")] = False,
    int8: Annotated[
        bool, Option("--int8", help="Weights in 8 bits (ONNX only).")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write preprocessing, particles, calibration, prior, expected utility and action
    as one graph.

    The graph is compared with the run before it is written, and refused if they differ.
    A model card is written next to it.

    **Examples**

    - `rfdlc export runs/a model.onnx --utility U.csv`
    - `rfdlc export runs/a model.onnx --utility-input --resize`
    - `rfdlc export runs/a model.onnx --decider decider.json`
    - `rfdlc export runs/a model.pt2`
    """
    check_writable(out)
    expect(
        not (half and int8), "--half and --int8 exclude each other: give one of them"
    )
    precision = "half" if half else "int8" if int8 else "float32"
    options = request.for_model(run) | {"utility_input": utility_input}
    announce(f"reading {run}")  # at once: what exports takes a while to load
    with ready():
        done = rfdlc.export(run, out, resize=resize, precision=precision, **options)
    parity, size, card = done.parity, done.path.stat().st_size, str(done.card)
    output(
        json,
        {
            "out": str(out),
            "bytes": size,
            "precision": precision,
            "card": card,
            **asdict(parity),
        },
        f"{out}: {size:,} bytes, {precision}",
        f"parity on {parity.samples:,} {parity.inputs}: {parity.decisions_changed}"
        " decisions changed, probabilities within"
        f" {parity.largest_difference:.2g}{parity.rounding or ''}",
        f"model card: {card}",
        *([f"next: rfdlc serve {out}"] if out.suffix == ".onnx" else []),
    )


@takes_request
def serve(
    model: Annotated[
        Path,
        Argument(
            metavar="MODEL", help="A run folder, or a `.onnx` file of `rfdlc export`."
        ),
    ],
    request: UtilityRequest,
    host: Annotated[
        str, Option("--host", help="Other than loopback only with a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, Option("--port", min=0, max=65535, help="0 takes a free one.")
    ] = 8000,
    token_file: Annotated[
        Path | None, Option(help="File with the token that requests must carry.")
    ] = None,
    queue: Annotated[
        int, Option("--queue", min=1, help="Requests that may wait; more get 429.")
    ] = 256,
    batch: Annotated[
        int, Option("--batch", min=1, help="Samples computed together.")
    ] = 128,
    seconds: Annotated[
        float, Option("--timeout", min=0.1, help="Seconds to send, and to answer.")
    ] = 10.0,
    drain: Annotated[
        float,
        Option(
            "--drain",
            min=0,
            help="Seconds after SIGTERM in which requests are accepted.",
        ),
    ] = 1,
    certificate: Annotated[
        Path | None, Option("--tls-certificate", help="PEM file, for TLS.")
    ] = None,
    key: Annotated[
        Path | None,
        Option("--tls-key", help="PEM file, unless the certificate holds the key."),
    ] = None,
    name: Annotated[
        str | None, Option(help="Of the model, for the Open Inference Protocol.")
    ] = None,
    version: Annotated[
        list[str] | None,
        Option(help="Another version beside it: `V=MODEL`; may be repeated."),
    ] = None,
    quiet: Annotated[
        bool, Option("--quiet", help="No log line for each request.")
    ] = False,
    log_decisions: Annotated[
        Path | None, Option(help="Folder for decisions (Parquet), without payloads.")
    ] = None,
    reference: Annotated[
        Path | None, Option(help="Held-out predictions, for alarms; a run has its own.")
    ] = None,
    per_month: Annotated[
        int, Option(min=1000, help="Decisions per month, for the rate of false alarms.")
    ] = 1_000_000,
    decider: Annotated[
        Path | None,
        Option(
            help="File of `rfdlc fit` or `recalibrate`, taken up when it changes.",
        ),
    ] = None,
) -> None:
    """Answer POST /decide with actions; GET /health, /ready, /metrics and /docs too.
    Logs are JSON lines.

    Clients of the Open Inference Protocol (KServe v2) find the model under
    /v2/models/NAME.

    **Examples**

    - `rfdlc serve runs/a --utility U.csv`
    - `rfdlc serve model.onnx --port 9000`
    - `rfdlc serve model.onnx --name digits --version 2=newer.onnx`
    - `rfdlc serve runs/a --host 0.0.0.0 --token-file token.txt`
    - `rfdlc serve runs/a --log-decisions decisions/ --decider decider.json`
    """
    from rfdlc.serving.backend import Limits
    from rfdlc.serving.serve import serve as serve_it

    pairs = [each.partition("=")[::2] for each in version or ()]
    for own, path in pairs:
        expect(
            own and path,
            f"--version {own or path!r}: expected V=MODEL, such as 2=model.onnx",
        )
    doubled = repeated(["1", *(own for own, _ in pairs)])
    expect(
        not doubled,
        f"--version {listing(doubled)} is there twice (MODEL is version 1): choose"
        " another name",
    )
    versions = dict(pairs)
    limits = Limits(requests=queue, batch=batch, seconds=seconds, drain=drain)
    options = request.for_model(model) | {"token_file": token_file, "quiet": quiet}
    options |= {
        "certificate": certificate,
        "key": key,
        "versions": versions,
        "name": name,
    }
    options |= {
        "log_decisions": log_decisions,
        "reference": reference,
        "per_month": per_month,
    }
    options |= {} if decider is None else {"decider": decider}
    serve_it(model, host=host, port=port, limits=limits, **options)
