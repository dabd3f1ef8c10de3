"""Commands that train: `rfdlc train`, `resume` and `fork`; and `rfdlc methods`."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import rfdlc
from rfdlc.cli.request import (
    DataRequest,
    Force,
    JsonOption,
    RunFolder,
    Source,
    data_options,
    takes_request,
)
from rfdlc.cli.writing import new_table, output
from rfdlc.errors import InputError, expect, listing, printable
from rfdlc.formats.files import FOLDED
from rfdlc.imports import check_imports
from rfdlc.progress import announce, speaks

if TYPE_CHECKING:
    from rfdlc.training.profiling import Profile
    from rfdlc.training.trial_plan import TrialPlan

LISTED = "List all settings and exit."
SETTINGS = "Settings; `rfdlc train --settings` lists them."
Pairs = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help=SETTINGS, show_default=False)
]

PREFIXES = (
    "data.",
    "backbone.",
)  # of options that are passed on: to the reader of the data, to timm
RUNS = "config.json", FOLDED  # what a folder holds once there is something to resume
SEVERAL = 5  # test samples of a class, of which arg max should find some
# of the log loss of class frequencies, from which on probabilities say almost nothing
LITTLE = 0.97
SCORED = {"test": "test", "held_out_balanced": "held out, classes weigh equally"}


def _print_settings(value: bool) -> None:
    if not value:
        return
    with ready():
        from rfdlc.training.settings import GROUPS

        described = rfdlc.TrainConfig.describe()
    for group, settings in GROUPS.items():
        typer.echo(f"\n{group}: {settings.__doc__}")
        for name in settings.model_fields:
            default, text = described[name]
            if isinstance(default, tuple):
                default = ",".join(map(str, default))
            typer.echo(f"{name}={default}".ljust(34) + text)
    raise typer.Exit


@takes_request
def train(
    source: Source,
    data: DataRequest,
    settings: Pairs = None,
    out: Annotated[Path, Option("--out", "-o", help="The run folder to make.")] = Path(
        "runs/run"
    ),
    method: Annotated[
        str, Option("--method", "-m", help="One of those that `rfdlc methods` lists.")
    ] = "rf-dlc",
    list_settings: Annotated[
        bool, Option("--settings", callback=_print_settings, is_eager=True, help=LISTED)
    ] = False,
    profile: Annotated[
        bool, Option("--profile", help="First measure and print where the time goes.")
    ] = False,
    budget: Annotated[
        str | None,
        Option(
            "--budget",
            help=(
                "Time for trials and training (with --cv, of each fold): 90s, 10m, 2h."
            ),
        ),
    ] = None,
    log: Annotated[
        str | None,
        Option(
            "--log", help="Log to tensorboard, mlflow, wandb, too, comma-separated."
        ),
    ] = None,
    cv: Annotated[
        int,
        Option(
            "--cv",
            help="Cross-validate instead, with N folds: out-of-fold predictions.",
        ),
    ] = 0,
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Train on long-tailed data; calibrate on held-out data; keep everything in a run
    folder.

    Settings come from the data set's preset and the method; `key=value` overrides them,
    `data.key=value` is an option of the data set, `backbone.key=value` one of a timm
    network. Ctrl-C stops at a checkpoint. `torchrun` starts it on several GPUs or
    machines.

    **Examples**

    - `rfdlc train digits-lt --out runs/digits data.factor=20 --profile`
    - `rfdlc train patients.csv --target diagnosis --groups patient --out runs/patients`
    - `rfdlc train patients.csv --target diagnosis --groups patient --out runs/folds
      --cv 5`
    - `rfdlc train photos/ --out runs/photos --budget 10m`
    - `rfdlc train cifar100-lt --root data --out runs/a particles=3 epochs=200
      refit=true`
    - `rfdlc train photos/ --out runs/b backbone=timm:resnet50
      pretrained=r50.safetensors particles=3 shared_stages=3`
    - `rfdlc train cifar100-lt --root data --out runs/c --method rf-dlc-paper
      utility=tail-sensitive`
    - `torchrun --nproc-per-node 8 --max-restarts 3 -m rfdlc train imagenet-lt --root
      data --out runs/d`
    """
    from rfdlc.data.load import check_source

    announce("checking settings")  # at once: what trains takes a while to load
    options, of_data = tuple(vars(data)), data.given() | data_options(settings or ())
    if not any(
        pair.partition("=")[0] in options for pair in settings or ()
    ):  # these get an error of their own below
        check_source(source, data.root, of_data)
    with ready():
        from rfdlc.training.methods import resolve

        chosen = _chosen(settings, ("out", *options))
        named = chosen.pop("method", method)
        prefixed = {
            key: chosen.pop(key) for key in [*chosen] if key.startswith(PREFIXES)
        }
        of_network = {
            k.removeprefix("backbone."): v
            for k, v in prefixed.items()
            if k.startswith("backbone.")
        }
        chosen |= {"backbone_options": of_network} if of_network else {}
        chosen |= {
            name: value for name, value in (("budget", budget), ("log", log)) if value
        }
        resolve(named, str(source), chosen)
        announce(f"reading {source}")
        given: dict[str, Any] = {"root": data.root, "data_options": of_data, **chosen}
        if profile:
            _show_profile(source, named, given)
        with _making(out, force):
            if cv:
                found = rfdlc.cross_validate(source, named, out, folds=cv, **given)
            else:
                model = rfdlc.train(source, named, out, **given)
        if cv:
            _report_folds(found, json)
        else:
            _report(model, json)


def _show_profile(source: Any, method: str, given: dict[str, Any]) -> None:
    """Print to stderr: stdout is for the result."""
    from rich.console import Console

    from rfdlc.training.profiling import profile as measure

    announce("measuring where the time of a step goes")
    found = measure(source, method, **given)
    table = new_table(
        "part of a step", "ms", "share", title="Where the time of a step goes"
    )
    for name, seconds in (*found.parts.items(), ("step", found.step)):
        shown = (
            f"{1000 * seconds:.3f}" if seconds else "~0"
        )  # a difference of two measurements that is within noise
        table.add_row(
            name, shown, f"{seconds / found.step:.0%}", end_section=name == "optimiser"
        )
    stage = f" of the first of {found.stages} stages" if found.stages > 1 else ""
    times = {1: "", 2: ", twice with refit"}.get(
        found.trainings, f", {found.trainings} times with folds and refit"
    )
    time = f"{found.step * found.steps:,.1f} s{times}"
    total = (
        f"{found.steps:,} steps{stage} take about {time}; one evaluation takes"
        f" {found.evaluation:.2f} s."
    )
    moved = (
        f"{found.traffic / 1e6:,.1f} MB through memory, at {found.bandwidth / 1e9:,.0f}"
        " GB/s on this device"
    )
    least = f"{1000 * found.floor:.3f} ms, {found.floor / found.step:.0%} of its time"
    bound = (
        f"A step moves at least {moved}: {least}. The rest is arithmetic, and what"
        " starting it costs."
    )
    Console(stderr=True, highlight=False).print(
        table, total, bound, _waiting(found), sep="\n"
    )


def _waiting(found: "Profile") -> str:
    """Whether decoding or the network sets the pace."""
    if found.workers is None:
        return ""
    data, rest = found.parts["data"], found.network
    share = 1 - rest / data if found.ahead else data / found.step
    waits = f"The network waits for image files {max(share, 0):.0%} of the time"
    times = (
        f"decoding takes {1000 * data:.1f} ms per step (workers={found.workers}), the"
        f" network {1000 * rest:.1f} ms"
    )
    fix = (
        "; data.cache=DIR decodes once, and more workers or a smaller data.image_size"
        " are faster, too"
    )
    return f"{waits}: {times}{fix if share > 0.1 else ''}."


def resume(run: RunFolder, json: JsonOption = False) -> None:
    """Continue a training from its last checkpoint, with the settings it was started
    with.

    **Examples**

    - `rfdlc resume runs/a`
    """
    check_imports(run)
    with ready():
        _report(rfdlc.resume(run), json)


def fork(
    run: RunFolder,
    settings: Pairs = None,
    out: Annotated[Path, Option("--out", "-o", help="The run folder to make.")] = Path(
        "runs/fork"
    ),
    at: Annotated[
        int | None, Option("--at", help="Epoch of a kept checkpoint (setting `keep`).")
    ] = None,
    method: Annotated[
        str | None, Option("--method", "-m", help="Continue as another method.")
    ] = None,
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Continue from another run's checkpoint with other settings: what differs only
    later shares what came before.

    **Examples**

    - `rfdlc fork runs/paper --at 160 --out runs/utility utility=tail-sensitive`
    - `rfdlc fork runs/ce --out runs/crt --method crt`
    """
    with ready():
        changes = _chosen(settings, ("out", "at"))
        with _making(out, force):
            model = rfdlc.fork(
                run, out, at=at, method=changes.pop("method", method), **changes
            )
        _report(model, json)


def methods(json: JsonOption = False) -> None:
    """List every method: what it does, whose it is, its options, particles and stages,
    and its relative cost.

    Options are set like settings: `rfdlc train DATA --method ride diversity=0.1`.
    `--json` has their meanings.

    The cost is that of a training of 200 epochs with the method's own settings, where
    particles share no layers.

    **Examples**

    - `rfdlc methods`
    - `rfdlc methods --json`
    """
    from rich.text import Text

    with ready():
        from rfdlc.training.methods import METHODS
    style = {
        "caption": "M: particles. Cards with formulas and sources: docs/methods.md",
        "caption_justify": "left",
    }
    table = new_table(
        "method", "description and reference", "M", "stages", "cost", left=2, **style
    )
    rows: dict[str, dict[str, Any]] = {}
    for name, row in METHODS.items():
        stages, options = [stage.trains for stage in row.stages], row.options.items()
        known = {
            "summary": row.summary,
            "reference": row.reference,
            "particles": row.settings.get("particles", 1),
        }
        known |= {"stages": stages, "cost": round(row.relative_cost(), 2)}
        rows[name] = known | {
            "options": {
                key: {"default": o.default, "help": o.help} for key, o in options
            }
        }
        defaults = (
            f"\n{' '.join(f'{key}={o.default:g}' for key, o in options)}"
            if options
            else ""
        )
        text = Text.assemble(row.summary, (f" ({row.reference})", "dim"), defaults)
        table.add_row(
            Text(name, "bold"),
            text,
            str(known["particles"]),
            " + ".join(stages),
            f"{known['cost']:.3g}",
        )
    output(json, {"methods": rows}, table)


@contextmanager
def ready() -> Iterator[None]:
    """One clear line where torch is missing, the loss is not a number, or Ctrl-C was
    pressed.
    """
    try:
        from rfdlc.training.loop import TrainingStopped
        from rfdlc.training.trainer import TrainingInterrupted
    except ModuleNotFoundError as error:
        raise InputError(
            f'training needs {error.name}: pip install "rfdlc[train]"'
        ) from None
    try:
        yield
    except (TrainingStopped, TrainingInterrupted) as error:
        if speaks():
            print(f"rfdlc: {printable(error)}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, TrainingStopped) else 130) from None


@contextmanager
def _making(out: Path, force: bool) -> Iterator[None]:
    """With `force`, a run that is in the folder is removed, if a new one takes its
    place. Ctrl-C before there is one says so.
    """
    expect(
        not force or "RANK" not in os.environ,
        "--force is for one process, not for torchrun: remove the folder",
    )
    replaced = out.with_name(f".{out.name}.replaced")
    if force and any((out / name).exists() for name in RUNS):
        shutil.rmtree(replaced, ignore_errors=True)  # of a process that was killed
        os.replace(out, replaced)
    try:
        yield
    except KeyboardInterrupt as error:
        from rfdlc.training.trainer import TrainingInterrupted

        if isinstance(error, TrainingInterrupted) or any(
            (out / name).exists() for name in RUNS
        ):
            raise
        told = (
            "stopped before the training began, nothing was written: to start again,"
            " run the same command"
        )
        raise TrainingInterrupted(told) from None
    finally:
        if force and replaced.exists() and not out.exists():
            os.replace(replaced, out)
        elif force:
            shutil.rmtree(replaced, ignore_errors=True)


def _chosen(pairs: list[str] | None, options: tuple[str, ...]) -> dict[str, Any]:
    """Settings by name, `method` and `data.key` among them; unknown names raise before
    any work.
    """
    from rfdlc.training.config import parse_pairs
    from rfdlc.training.methods import METHODS

    chosen = parse_pairs(pairs or [])
    for name in options:
        written = f"--{name.replace('_', '-')} {chosen.get(name)}"
        expect(
            name not in chosen,
            f"{name} is an option and not a setting: write {written}",
        )
    others = {
        "method",
        *(name for method in METHODS.values() for name in method.options),
    }
    rfdlc.TrainConfig.check_names(
        key for key in chosen if key not in others and not key.startswith(PREFIXES)
    )
    return dict(chosen)


def _report(model: "rfdlc.Model", as_json: bool) -> None:
    """What the folder now says, and what to do next."""
    if not speaks():
        return
    from rfdlc.training.run import Run

    run, path, fitted = Run(model.path), model.path, model.decider.model.calibrator
    metrics, notes = (
        run.read_json("metrics.json"),
        run.metadata["data"].get("notes", []),
    )
    title, columns = (
        None,
        {name: metrics[key] for key, name in SCORED.items() if key in metrics},
    )
    lines, following = (
        [f"data: {note}" for note in notes],
        f"predict {path} DATA --out predictions.csv",
    )
    sensitive = run.config.utility.startswith("tail-sensitive")
    if "test" in metrics:
        following = f"evaluate {path}{' --utility tail-sensitive' if sensitive else ''}"
        predictions = rfdlc.Predictions.load(path)
        targets = predictions.targets
        warning = targets is not None and (
            model.decider.model.prior_warning(targets)
            or _learned_little(metrics["test"]["nll"], targets)
        )
        lines += [f"warning: {warning}"] if warning else []
        lines += (
            []
            if targets is None
            else _never_likeliest(model.decider.probabilities(predictions), predictions)
        )
    if sensitive and "test_tail_sensitive" in metrics:
        title = "Test samples, utility tail-sensitive"
        rates = (
            "tail samples decided as a head class, mean over heads of 25, 50 and 75% of"
            " the classes"
        )
        utility = (
            "+1 for a right decision, -1 for a tail sample decided as a more frequent"
            " class"
        )
        lines[:0] = [f"utility: {utility}", f"false head rate: {rates}"]
        likely = model.decider.replace(
            utility=rfdlc.Utility.tail_sensitive(model.classes), rule="argmax"
        )
        found = rfdlc.evaluate(predictions, decider=likely)
        columns = {
            "arg max": found.to_dict(),
            "highest expected utility": metrics["test_tail_sensitive"],
        }
    if "diversity" in metrics and model.net.particles > 1:
        differ = metrics["diversity"]["disagreement"]
        lines.append(
            f"particles: the arg max of two of them differs on {differ:.1%} of the test"
            " samples"
        )
    lines += [
        f"calibration: {fitted.short if fitted else 'none'}",
        model.decider.model.decided_for,
    ]
    lines += [f"run folder: {path}", f"next: rfdlc {following}"]
    choice = run.read_json("choice.json") if (path / "choice.json").exists() else {}
    tables = [
        metrics_table(columns, title),
        *([_choice_table(choice)] if choice else []),
    ]
    tuning = run.tuning
    tables += [_trials_table(tuning)] if tuning and tuning.rungs else []
    chosen = {"choice": choice, "tuning": tuning.to_dict() if tuning else {}}
    output(
        as_json,
        {"run": str(path), "notes": notes, **metrics, **chosen},
        *tables,
        *lines,
    )


def _learned_little(loss: float, targets: Any) -> str | None:
    """What to say of probabilities that are hardly better than the class frequencies of
    the samples.
    """
    import numpy as np

    from rfdlc.probabilities.uncertainty import entropy

    alone = float(entropy(np.bincount(targets) / len(targets)))
    if (
        loss < LITTLE * alone or alone == 0
    ):  # one class alone says nothing about the model
        return None
    told = (
        f"almost nothing was learned: a log loss of {loss:.3f}, and {alone:.3f} by"
        " class frequencies alone"
    )
    return (
        f"{told}; train longer (--budget, epochs), or look at the data with `rfdlc"
        " inspect`"
    )


def _never_likeliest(p: Any, predictions: "rfdlc.Predictions") -> list[str]:
    """Which classes of several test samples are the most probable one of none: arg max
    never decides for them.
    """
    import numpy as np

    names, targets = predictions.classes.names, np.asarray(predictions.targets)
    count, chosen = (
        np.bincount(own, minlength=len(names)) for own in (targets, p.argmax(axis=1))
    )
    never = [
        f"{names[c]} ({count[c]} test samples)"
        for c in np.flatnonzero((count >= SEVERAL) & (chosen == 0))
    ]
    costs = (
        "decisions by costs (--costs) may still find them, and more time, samples or"
        " larger images may help"
    )
    return (
        [f"never the most probable class: {listing(never, 5)}; {costs}"]
        if never
        else []
    )


def _report_folds(found: Any, as_json: bool) -> None:
    """Metrics of out-of-fold predictions, and how far those of the folds are apart."""
    from rfdlc.formats.files import read_json

    metrics, path = read_json(found.path / "metrics.json"), found.path
    spread = [fold["accuracy"] for fold in metrics["folds"]]
    lines = [f"data: {note}" for note in found.notes]
    lines += [f"accuracy of the folds: {', '.join(f'{value:.3f}' for value in spread)}"]
    lines += [
        f"out-of-fold predictions, {found.predictions.scores.corrected}:"
        f" {path}/predictions.npz"
    ]
    lines += [f"next: rfdlc evaluate {path}"]
    output(
        as_json,
        {"folder": str(path), **metrics},
        metrics_table({"out of fold": metrics["test"]}),
        *lines,
    )


def _choice_table(choice: dict[str, Any]) -> Any:
    """The candidates for a table, with their losses on held-out samples, and what they
    count.
    """
    table = new_table(
        "candidate", "held-out loss", "weight", title="Chosen on held-out samples"
    )
    rows = choice["candidates"]
    for row in rows:
        weight = f"{row['weight']:.2f}" if row["weight"] else ""
        table.add_row(
            row["name"], f"{row['loss']:.4f}", weight, end_section=row is rows[-1]
        )
    table.add_row(
        "mixture, weighted by other folds", f"{choice['mixture_loss']:.4f}", ""
    )
    return table


def _trials_table(plan: "TrialPlan") -> Any:
    """What was tried before the training, with the held-out losses after so many
    epochs.
    """
    names = list(
        {name: None for rung in plan.rungs for own in rung.trials for name in own}
    )
    table = new_table(
        "epochs",
        *names,
        "held-out loss",
        title="Trials; the chosen settings are in tuning.json",
    )
    for rung in plan.rungs:
        for number, (own, loss) in enumerate(
            zip(rung.trials, rung.losses, strict=True), start=1
        ):
            cells = [str(own[name]) or "none" if name in own else "" for name in names]
            shown = "diverged" if loss is None else f"{loss:.4f}"
            table.add_row(
                str(rung.epochs), *cells, shown, end_section=number == len(rung.trials)
            )
    return table


def metrics_table(columns: dict[str, dict[str, Any]], title: str | None = None) -> Any:
    """The headline metrics of evaluations side by side; a column is what
    `Evaluation.to_dict` gives.
    """
    from rfdlc.evaluation.evaluate import entries

    table = new_table("metric", *columns, title=title)
    found = [
        {entry.name: entry for entry in entries(column, headline=True)}
        for column in columns.values()
    ]
    for name, entry in {
        name: entry for column in found for name, entry in column.items()
    }.items():
        values = [
            column[name].value if name in column else float("nan") for column in found
        ]
        label = f"  {entry.label}" if entry.metric.parent else entry.label
        table.add_row(
            label, *("" if value != value else f"{value:.3f}" for value in values)
        )
    return table
