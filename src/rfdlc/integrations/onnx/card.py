"""The model card: README.md in the format of the Hugging Face hub, from what the run folder knows."""

import json
import math
import os
from importlib.resources import files
from pathlib import Path

from rfdlc import __version__
from rfdlc.decide.evaluation import entries, evaluate
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import SHOWN_CLASSES
from rfdlc.errors import listing
from rfdlc.files import replacing
from rfdlc.integrations.onnx.parity import Parity
from rfdlc.training.model import Model
from rfdlc.training.run import Run

MARK = "library_name: rfdlc"


def write_cards(model: Model, path: Path, precision: str, parity: Parity) -> tuple[Path, ...]:
    """One beside the exported file and one in the run folder (if it can be written), so that either can be pushed."""
    text, beside = card(model, path.name, precision, parity), path.with_name("README.md")
    if beside.exists() and MARK not in beside.read_text(encoding="utf-8", errors="replace"):
        beside = path.with_suffix(".md")  # somebody else's README stays
    places = [place for place in dict.fromkeys((beside, model.path / "README.md")) if os.access(place.parent, os.W_OK)]
    for place in places:
        with replacing(place) as new:
            new.write_text(text, encoding="utf-8")
    return tuple(places)


def card(model: Model, file: str, precision: str, parity: Parity) -> str:
    """The template card.md, filled in."""
    run, classes, utility, agreement = Run(model.path), model.classes, model.decider.utility, parity.recorded_agreement
    name, counts = run.metadata["data"]["name"], classes.counts
    task = "image-classification" if len(model.input_shape) == 3 else "tabular-classification"
    metrics, index = "The run has no labelled test predictions, so nothing was measured.", ""
    recorded = model.path / "predictions.npz"
    predictions = Predictions.load(recorded, classes) if recorded.exists() else None
    if predictions is not None and predictions.targets is not None:
        scored = evaluate(predictions, decider=model.decider, classes=classes)
        measured = [entry for entry in entries(scored.values) if not math.isnan(entry.value)]
        rows = [[_plain(entry.full_label), entry.metric.format(entry.value)] for entry in measured]
        metrics = f"On {scored.samples:,} test samples:\n\n" + _table(["metric", "value"], rows)
        overall = [{"type": e.name, "value": round(e.value, 4)} for e in measured if e.metric.parent is None]
        result = {"task": {"type": task}, "dataset": {"name": name, "type": name, "split": "test"}, "metrics": overall}
        table = [{"name": f"{name} {run.method_name}", "results": [result]}]
        index = f"model-index: {json.dumps(table)}\n"  # JSON is YAML too, and no name of a data set can break it
    costs = f"{utility!r}. The full matrix is in the metadata of the exported file."
    if max(utility.matrix.shape) <= SHOWN_CLASSES:
        named = zip(utility.classes.names, utility.matrix, strict=True)
        rows = [[_plain(row), *(f"{value:g}" for value in values)] for row, values in named]
        costs = _table(["true \\ action", *map(_plain, utility.actions)], rows)
    counted = f", {sum(counts):,} training samples, {min(counts):,} to {max(counts):,} per class" if counts else ""
    equal = "" if agreement is None else f" {agreement:.2%} of the decisions equal those recorded in training."
    template = (files("rfdlc.integrations.onnx") / "card.md").read_text(encoding="utf-8")
    return template.format(
        model=model,
        run=run,
        parity=parity,
        file=file,
        precision=precision,
        version=__version__,
        task=task,
        index=index,
        data=_plain(name),
        classes=f"{len(classes)} classes ({_plain(listing(classes.names))}){counted}",
        metrics=metrics,
        utility=costs,
        command=f"rfdlc serve {file}" if file.endswith(".onnx") else f'torch.export.load("{file}").module()',
        compared=f"{parity.rounding or ''}.{equal}",
        calibrated=f"was {'' if model.decider.fitted else 'NOT '}calibrated on held-out data like the training data",
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _plain(text: str) -> str:
    """Names without control characters, and without what Markdown would take for layout."""
    return "".join(f"\\{c}" if c in "|*_`[]<>#" else c if c.isprintable() else " " for c in text)
