"""export: a run folder as one file that decides, compared with the run before it is
written.
"""

import hashlib
import io
import json
import logging
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rfdlc import __version__
from rfdlc.data.images import ImageFiles
from rfdlc.data.loader import Normaliser
from rfdlc.decisions.decider import Decider, chosen_decider
from rfdlc.decisions.rules import RULES
from rfdlc.decisions.utility import SHOWN_CLASSES, Utility
from rfdlc.errors import InputError, choose, counted, expect, listing
from rfdlc.evaluation.evaluate import entries, evaluate
from rfdlc.exporting.graph import serialise
from rfdlc.formats.files import replacing
from rfdlc.predicting import onnx_model as onnx_model
from rfdlc.predicting.onnx_model import Decisions, OnnxModel
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import PriorLike
from rfdlc.progress import announce
from rfdlc.training.building import OwnBackbone
from rfdlc.training.model import Model
from rfdlc.training.run import Run, data_of
from rfdlc.training.settings import settings_where

SAMPLES = 500
BATCH = 50  # samples: large images of many particles need much memory
TOLERANCE = 1e-5  # between probabilities, in 32 bits
ROUNDINGS = (
    4  # times the model's own rounding: two right orders of summation differ by about 2
)
EXACT_SAMPLES = 20  # those that differ most, computed in 64 bits
# of the utility's range: two actions this close are a tie, which rounding may decide
TIE = 1e-4
NORMAL = 1.96  # standard errors of a range of 95%
IMAGE_FILES = (
    "Image files become squares before the graph, as `resizing` in its metadata says:"
    " docs/export.md of rfdlc has the code under Image files. `rfdlc export --resize`"
    " puts that into the graph, which then takes images of any size."
)
TOLD = settings_where(lambda setting: setting.in_model_card)
RECORDED_AGREEMENT = (
    0.95  # with predictions.npz, which a GPU may have computed in 16 bits
)


@dataclass(frozen=True)
class Rounding:
    """How far probabilities in 32 bits are from those in 64, of the graph and the
    model: deep networks amplify it.
    """

    graph: float
    model: float

    @property
    def allowed(self) -> float:
        return max(TOLERANCE, ROUNDINGS * self.model)

    def __str__(self) -> str:
        return (
            f"; from 64 bits the graph differs by {self.graph:.2g}, the model itself by"
            f" {self.model:.2g}"
        )


@dataclass(frozen=True)
class Parity:
    """The distance of the exported graph from the library over `samples` samples."""

    samples: int
    inputs: str  # "test samples" or "random samples"
    largest_difference: float  # between probabilities
    decisions_changed: int  # ties aside
    ties: int
    recorded_agreement: float | None = (
        None  # fraction of decisions equal to those of predictions.npz
    )
    rounding: Rounding | None = (
        None  # measured where the probabilities differ by more than the tolerance
    )
    sets_changed: int = 0

    def check(self, run: Any) -> None:
        """Refuse an export in 32 bits that is not the model of the run."""
        rounding, agreement = self.rounding, self.recorded_agreement
        near = (
            self.largest_difference <= TOLERANCE
            if rounding is None
            else rounding.graph <= rounding.allowed
        )
        expect(
            near and not self.decisions_changed and not self.sets_changed,
            f"the exported graph is not the model in {run}: over {self.samples}"
            f" {self.inputs} {self.decisions_changed} decisions differ,"
            f" {self.sets_changed} sets, and probabilities by up to"
            f" {self.largest_difference:.2g} (allowed {TOLERANCE:g}){rounding or ''};"
            " nothing was written",
        )
        few = (
            f"only {agreement or 0:.1%} of the decisions equal those in"
            f" {run}/predictions.npz"
        )
        fits = agreement is None or agreement >= RECORDED_AGREEMENT
        expect(
            fits,
            f"{few}: weights, decider or data have changed since; nothing was written",
        )


@dataclass(frozen=True)
class Exported:
    """The file that was written, and how it compares with the model."""

    path: Path
    precision: str
    parity: Parity
    card: Path


def export(
    run: str | Path,
    out: str | Path,
    *,
    utility: Utility | None = None,
    target_prior: PriorLike | None = None,
    decider: Decider | None = None,
    utility_input: bool = False,
    resize: bool = False,
    precision: str = "float32",
    backbone: OwnBackbone | None = None,
) -> Exported:
    """Write a run as one graph from raw samples to actions; refused if the graph does
    not decide as the run does.

    Parameters
    ----------
    run, out : str or Path
        A run folder, and the file to write: ONNX (`.onnx`) or torch.export (`.pt2`).
    utility, target_prior : optional
        Replace the utility of the run's Decider, and the class prior that it decides
        for.
    decider : Decider, optional
        Instead of the run's own, for example `Decider.load(run)` with sets or a budget.
    utility_input, resize
        Whether the utility is an input of the graph instead of a constant; whether it
        takes images of any size.
    precision, backbone
        "float32", "half" (networks in 16 bits) or "int8" (weights in 8 bits, ONNX
        only); the network of a run that was trained with one of the user's own.

    Examples
    --------
    >>> export("runs/a", "model.onnx").parity.decisions_changed  # doctest: +SKIP
    0
    """
    path = Path(out)
    choose("precision", precision, ("float32", "half", "int8"))
    choose("the suffix of the exported file,", path.suffix, (".onnx", ".pt2"))
    onnx, full = path.suffix == ".onnx", precision == "float32"
    expect(
        onnx or precision != "int8",
        "int8 is for ONNX files: choose a name ending in .onnx, or half",
    )
    model = Model.load(run, backbone=backbone, device="cpu")
    model.decider = chosen_decider(model.decider, utility, target_prior, decider)
    onnx_model.check_exportable(
        model.decider, utility_input, model.familiarity is not None
    )
    shape = model.input_shape
    square = len(shape) == 3 and shape[1] == shape[2]
    expect(
        square or not resize,
        f"resize is for square images, but this model takes samples of shape {shape}",
    )
    metadata = {
        "resize": resize,
        "utility_input": utility_input,
        "precision": precision,
        **_describe(model),
    }
    if full:  # what any machine must compute for one sample
        metadata["reference"] = model.decider.probabilities(
            model.predict(onnx_model.blank_sample(shape))
        )[0].tolist()
    announce(
        f"translating the model to {path.suffix}: also for small ones, torch takes a"
        " while"
    )
    logger = logging.getLogger("torch.onnx")
    with warnings.catch_warnings(action="ignore"), ExitStack() as quiet:
        quiet.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # the exporter reports missing optional packages
        data = serialise(model, metadata, onnx)

    def decide(inputs: NDArray[Any]) -> Decisions:
        extra = (torch.tensor(model.decider.utility.matrix),) if utility_input else ()
        with torch.no_grad():
            found = [output.numpy() for output in program(torch.tensor(inputs), *extra)]
        return Decisions(
            **dict(zip(onnx_model.outputs_of(model.decider), found, strict=True))
        )

    announce("comparing the decisions of the file with those of the run")
    with replacing(path) as beside:
        beside.write_bytes(data)
        program: Any = None if onnx else torch.export.load(io.BytesIO(data)).module()
        parity = measure_parity(
            model, OnnxModel.load(beside).decide if onnx else decide, full=full
        )
        if full:
            parity.check(run)
    return Exported(path, precision, parity, write_card(model, path, precision, parity))


def _describe(model: Model) -> dict[str, Any]:
    """What the graph computes, and where it comes from; nothing about the machine."""
    run, weights, encoder = (
        Run(model.path),
        model.path / "model.safetensors",
        model.encoder,
    )
    digest = (
        hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
    )
    made_by = {
        "rfdlc": __version__,
        "torch": torch.__version__,
        "method": run.method_name,
    }
    made_from = {
        "run": run.path.resolve().name,
        "data": run.metadata["data"]["name"],
        "weights_sha256": digest,
    }
    samples: dict[str, Any] = {
        "input_shape": list(model.input_shape),
        **model.resizing.to_dict(),
    }
    samples |= {"image_files": IMAGE_FILES} if len(model.input_shape) == 3 else {}
    samples["encoder"] = None if encoder is None else encoder.to_dict()
    described = {
        "format": onnx_model.FORMAT,
        "version": onnx_model.VERSION,
        "decider": model.decider.to_dict(),
        **samples,
    }
    return {**described, "provenance": {**made_by, **made_from}}


def measure_parity(
    model: Model, decide: Callable[[NDArray[Any]], Decisions], *, full: bool = True
) -> Parity:
    """Compare `decide` with the model's own predictions and Decider; `full` if it
    computes in 32 bits too.
    """
    decider, (inputs, recorded) = model.decider, _samples(model)
    predictions = model.predict(inputs)
    expected = np.asarray(decider.probabilities(predictions))
    decided = [
        decide(some) for some in np.array_split(inputs, -(-len(inputs) // BATCH))
    ]
    probabilities = np.concatenate([batch.probabilities for batch in decided])
    actions = np.concatenate([batch.action for batch in decided])
    finite = np.isfinite(probabilities).all()
    expect(
        finite,
        "the exported graph gives numbers that are not finite: export it in 32 bits",
    )
    gains = RULES[decider.rule](decider.utility, None)(expected)
    values = np.sort(decider.deferral.charged(gains, decider.utility), axis=1)
    spread = np.maximum(
        expected @ np.ptp(decider.utility.matrix, axis=1), 1e-12
    )  # of what each sample can be
    tied = (values[:, -1] - values[:, -2:].min(axis=1) < TIE * spread) & (
        values.shape[1] > 1
    )
    changed = (actions != decider.decide(predictions)) & ~tied
    agreement = (
        None
        if recorded is None
        else float((decider.decide(recorded) == actions).mean())
    )
    differences, rounding = np.abs(probabilities - expected).max(axis=1), None
    if full and differences.max() > TOLERANCE:
        worst = np.argsort(-differences)[:EXACT_SAMPLES]
        rounding = measure_rounding(
            model, inputs[worst], probabilities[worst], expected[worst]
        )
    sets_changed = 0
    if decider.sets is not None:
        own = decider.sets.members(
            probabilities, decider.utility
        )  # of the same probabilities: thresholds are sharp
        sets_changed = int(
            (np.concatenate([batch.sets for batch in decided]) != own).any(axis=1).sum()
        )
    kind, largest = (
        "random samples" if recorded is None else "test samples",
        float(differences.max()),
    )
    return Parity(
        len(inputs),
        kind,
        largest,
        int(changed.sum()),
        int(tied.sum()),
        agreement,
        rounding,
        sets_changed,
    )


def measure_rounding(
    model: Model, inputs: NDArray[Any], graph: NDArray[Any], own: NDArray[Any]
) -> Rounding:
    """The graph's answers and the model's own, probabilities (N, C), against what the
    same weights give in 64 bits.
    """
    net = deepcopy(model.net).to("cpu", torch.float64).eval()
    normalise = Normaliser(
        model.normalisation, model.input_shape, torch.device("cpu"), torch.float64
    )
    samples = normalise(
        torch.from_numpy(np.ascontiguousarray(inputs)).to(torch.float32)
    )
    with torch.no_grad():
        exact = np.asarray(
            model.decider.probabilities(
                net(samples.unsqueeze(0))[0].numpy(), logits=True
            )
        )
    return Rounding(*(float(np.abs(answer - exact).max()) for answer in (graph, own)))


def _samples(model: Model) -> tuple[NDArray[Any], Predictions | None]:
    """Test samples with the predictions that the run recorded, if both can be read;
    else random samples.
    """
    with suppress(InputError, KeyError, OSError):  # the data are not on this machine
        recorded, test = (
            Predictions.load(model.path / "predictions.npz"),
            data_of(Run(model.path)).splits["test"],
        )
        if len(test) == len(recorded):
            spread = np.linspace(0, len(test) - 1, min(SAMPLES, len(test))).astype(
                int
            )  # often sorted by class
            own = (
                {}
                if recorded.unfamiliarity is None
                else {"unfamiliarity": recorded.unfamiliarity[spread]}
            )
            few = Predictions(
                logits=recorded.scores.values[:, spread],
                classes=recorded.classes,
                **own,
            )
            inputs = test.take(spread).inputs
            return inputs.decode()[0] if isinstance(inputs, ImageFiles) else inputs, few
    return random_samples(model, SAMPLES), None


def random_samples(model: Model, count: int) -> NDArray[Any]:
    """uint8 images, or features around the training mean."""
    rng = np.random.default_rng(0)
    if len(model.input_shape) == 3:
        return rng.integers(0, 256, (count, *model.input_shape), dtype=np.uint8)
    known = model.normalisation
    mean, spread = (
        (0.0, 1.0) if known is None else (np.array(known.mean), np.array(known.std))
    )
    return (rng.normal(size=(count, *model.input_shape)) * spread + mean).astype(
        np.float32
    )


def write_card(model: Model, path: Path, precision: str, parity: Parity) -> Path:
    """The card of what was exported, beside it; none in the run folder, whose own
    decisions may be others.
    """
    text, beside = (
        card(model, path.name, precision, parity),
        path.with_name("README.md"),
    )
    known = (
        beside.read_text(encoding="utf-8", errors="replace") if beside.exists() else ""
    )
    alone = all(each.name == path.name for each in path.parent.iterdir())
    if not alone and ("library_name: rfdlc" not in known or path.name not in known):
        beside = path.with_suffix(
            ".md"
        )  # a folder that is not the model's has a README of its own, or needs none
    with replacing(beside) as new:
        new.write_text(text, encoding="utf-8")
    return beside


def card(model: Model, file: str, precision: str, parity: Parity) -> str:
    """The template card.md, filled in."""
    run, classes, utility, agreement = (
        Run(model.path),
        model.classes,
        model.decider.utility,
        parity.recorded_agreement,
    )
    name, counts = run.metadata["data"]["name"], classes.counts
    task = (
        "image-classification"
        if len(model.input_shape) == 3
        else "tabular-classification"
    )
    metrics, index = (
        "The run has no labelled test predictions, so nothing was measured.",
        "",
    )
    recorded = model.path / "predictions.npz"
    predictions = Predictions.load(recorded, classes) if recorded.exists() else None
    if predictions is not None and predictions.targets is not None:
        # one at a time, as the file decides
        scored = evaluate(
            predictions, decider=model.decider, classes=classes, batch=False
        )
        measured = [
            entry
            for entry in entries(scored.values, shown=True)
            if not math.isnan(entry.value)
        ]
        rows = [
            [_plain(entry.full_label), entry.metric.format(entry.value)]
            for entry in measured
        ]
        metrics = f"On {scored.samples:,} test samples:\n\n" + _table(
            ["metric", "value"], rows
        )
        overall = [
            {"type": e.name, "value": round(e.value, 4)}
            for e in measured
            if e.metric.parent is None
        ]
        result = {
            "task": {"type": task},
            "dataset": {"name": name, "type": name, "split": "test"},
            "metrics": overall,
        }
        table = [{"name": f"{name} {run.method_name}", "results": [result]}]
        index = (  # JSON is YAML too, and no name of a data set can break it
            f"model-index: {json.dumps(table)}\n"
        )
    costs = f"{utility!r}. The full matrix is in the metadata of the exported file."
    if max(utility.matrix.shape) <= SHOWN_CLASSES:
        named = zip(utility.classes.names, utility.matrix, strict=True)
        rows = [
            [_plain(row), *(f"{value:g}" for value in values)] for row, values in named
        ]
        costs = _table(["true \\ action", *map(_plain, utility.actions)], rows)
    settings = [f"{name}={_setting(getattr(run.config, name))}" for name in TOLD]
    particles = counted(model.net.particles, "particle")
    made = f"{particles} trained by `{run.method_name}` with {', '.join(settings)}"
    if run.config.refit:
        again = "further" if run.config.warm_refit else "again, from new weights,"
        made += (
            f"; trained {again} on all samples, for"
            f" {counted(run.config.refit_epochs or run.config.epochs, 'epoch')}"
        )
    if (run.path / "choice.json").exists():  # of a table
        used = [
            own
            for own in run.read_json("choice.json")["candidates"]
            if own["weight"] > 0
        ]
        members = listing(f"{own['name']} ({own['weight']:.2f})" for own in used)
        made = (
            "A mean of logits with weights of highest out-of-fold likelihood:"
            f" {members}"
        )
    trained = (
        f", {sum(counts):,} training samples, {min(counts):,} to {max(counts):,} per"
        " class"
        if counts
        else ""
    )
    equal = (
        ""
        if agreement is None
        else f" {agreement:.2%} of the decisions equal those recorded in training."
    )
    images = f" {IMAGE_FILES}" if len(model.input_shape) == 3 else ""
    calibrator = model.decider.model.calibrator
    template = (files("rfdlc.exporting") / "card.md").read_text(encoding="utf-8")
    return template.format(
        model=model,
        run=run,
        parity=parity,
        file=file,
        precision=precision,
        version=__version__,
        task=task,
        index=index,
        made=made,
        images=images,
        metrics=metrics + handed_over_text(model, predictions),
        utility=costs,
        data=_plain(name),
        compared=f"{parity.rounding or ''}.{equal}",
        classes=f"{len(classes)} classes ({_plain(listing(classes.names))}){trained}",
        command=(
            f"rfdlc serve {file}"
            if file.endswith(".onnx")
            else f'torch.export.load("{file}").module()'
        ),
        calibrated=(
            f"was {'' if calibrator else 'NOT '}calibrated on held-out data like the"
            " training data"
        ),
    )


def handed_over_text(model: Model, predictions: Predictions | None) -> str:
    """The shares of a budget beside those that its prices hand over, and of which
    samples; empty without a budget.

    Test samples measure it. Without them, there are those that the prices are from.
    """
    decider, budget = model.decider, model.decider.deferral.budget
    if budget is None:
        return ""
    samples = "test samples"
    if predictions is None and (model.path / "held-out.npz").exists():
        predictions = Predictions.load(model.path / "held-out.npz")
        samples = "held-out samples, from which prices are found"
    if predictions is None:
        return "\n\nThe share that the budget hands over was not measured."
    utility = decider.utility
    counts = np.bincount(decider.decide(predictions), minlength=len(utility.actions))
    named = dict(zip(utility.actions, counts.tolist(), strict=True))
    rows = []
    for name, handed in budget.handed_over(named, utility).items():
        share = budget.shares[name]
        variance = share * (1 - share)
        error = math.sqrt(
            variance / len(predictions) + variance / (budget.samples or math.inf)
        )
        lowest = max(0.0, share - NORMAL * error)
        highest = min(1.0, share + NORMAL * error)
        expected = f"{lowest:.1%} to {highest:.1%}"
        if budget.prices[name] == 0:
            expected = f"at most {highest:.1%}: it hands over all that are worth it"
        rows.append([_plain(name), f"{100 * share:.3g}%", f"{handed:.2%}", expected])
    table = _table(["budget", "share", "handed over", "expected (95%)"], rows)
    return (
        f"\n\nHanded over, of {len(predictions):,} {samples}, one at a time by"
        f" price:\n\n{table}"
    )


def _setting(value: Any) -> str:
    """A setting as it is written on the command line."""
    return (
        ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    ) or "none"


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]
    )


def _plain(text: str) -> str:
    """Names without control characters, and without what Markdown would take for
    layout.
    """
    return "".join(
        f"\\{c}" if c in "|*_`[]<>#" else c if c.isprintable() else " " for c in text
    )
