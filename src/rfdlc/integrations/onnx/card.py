"""The model card: README.md in the format of the Hugging Face hub, from what the run folder knows."""

import json
import math
import os
from importlib.resources import files
from pathlib import Path

from rfdlc import __version__
from rfdlc.decide.evaluation import Entry, entries, evaluate
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import SHOWN_CLASSES, Utility
from rfdlc.errors import listing
from rfdlc.files import replacing
from rfdlc.integrations.onnx.parity import Parity
from rfdlc.training.methods import find_method
from rfdlc.training.model import Model
from rfdlc.training.run import Run

MARK = "library_name: rfdlc"


def write_cards(model: Model, utility: Utility, path: Path, precision: str, parity: Parity) -> tuple[Path, ...]:
    """One beside the exported file and one in the run folder (if it can be written), so that either can be pushed."""
    assert model.path is not None
    text = card(model, utility, path.name, precision, parity)
    beside = path.with_name("README.md")
    if beside.exists() and MARK not in beside.read_text(encoding="utf-8", errors="replace"):
        beside = path.with_suffix(".md")  # somebody else's README stays
    places = [place for place in dict.fromkeys((beside, model.path / "README.md")) if os.access(place.parent, os.W_OK)]
    for place in places:
        with replacing(place) as new:
            new.write_text(text, encoding="utf-8")
    return tuple(places)


def card(model: Model, utility: Utility, file: str, precision: str, parity: Parity) -> str:
    """YAML header, then prose and tables, as in the template card.md."""
    assert model.path is not None
    config, counts, agreement = Run(model.path).metadata, model.classes.counts, parity.recorded_agreement
    name, method = config["data"]["name"], config["method"]
    metrics, measured = "The run has no labelled test predictions, so nothing was measured.", []
    recorded = model.path / "predictions.npz"
    predictions = Predictions.load(recorded, model.classes) if recorded.exists() else None
    if predictions is not None and predictions.targets is not None:
        scored = evaluate(predictions, decider=model.decider.replace(utility=utility), classes=model.classes)
        measured = [entry for entry in entries(scored.values) if not math.isnan(entry.value)]
        rows = [[_plain(entry.full_label), entry.metric.format(entry.value)] for entry in measured]
        metrics = f"On {scored.samples:,} test samples:\n\n" + _table(["metric", "value"], rows)
    costs = f"{utility!r}. The full matrix is in the metadata of the exported file."
    if max(utility.matrix.shape) <= SHOWN_CLASSES:
        named = zip(utility.classes.names, utility.matrix, strict=True)
        rows = [[_plain(row), *(f"{value:g}" for value in values)] for row, values in named]
        costs = _table(["true \\ action", *map(_plain, utility.actions)], rows)
    fitted = model.decider.fitted is not None
    template = (files("rfdlc.integrations.onnx") / "card.md").read_text(encoding="utf-8")
    return template.format(
        header=_header(model, name, method, measured),
        data=_plain(name),
        method=method,
        particles=model.net.particles,
        summary=find_method(method).summary,
        version=__version__,
        file=file,
        precision=precision,
        classes=len(model.classes),
        names=_plain(listing(model.classes.names)),
        counts=f", {sum(counts):,} training samples, {min(counts):,} to {max(counts):,} per class" if counts else "",
        shape=model.input_shape,
        metrics=metrics,
        utility=costs,
        command=f"rfdlc serve {file}" if file.endswith(".onnx") else f'torch.export.load("{file}").module()',
        parity=parity,
        rounding=parity.rounding or "",
        decided_for=model.decider.decided_for,
        agreement="" if agreement is None else f" {agreement:.2%} of the decisions equal those recorded in training.",
        calibrated="was calibrated on held-out data like the training data" if fitted else "was NOT calibrated",
    )


def _header(model: Model, name: str, method: str, measured: list[Entry]) -> str:
    """JSON strings are YAML too, so that no name of a data set can break the header."""
    task, data = "image-classification" if len(model.input_shape) == 3 else "tabular-classification", json.dumps(name)
    lines = [MARK, f"pipeline_tag: {task}", "tags: [rfdlc, long-tailed, cost-sensitive, calibration, ensemble]"]
    overall = [entry for entry in measured if entry.metric.parent is None]
    if overall:
        lines += [
            "model-index:",
            f"- name: {json.dumps(f'{name} {method}')}",
            "  results:",
            f"  - task: {{type: {task}}}",
        ]
        lines += [f"    dataset: {{name: {data}, type: {data}, split: test}}", "    metrics:"]
        lines += [f"    - {{type: {json.dumps(entry.name)}, value: {entry.value:.4f}}}" for entry in overall]
    return "\n".join(["---", *lines, "---"])


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _plain(text: str) -> str:
    """Names without control characters, and without what Markdown would take for layout."""
    return "".join(f"\\{c}" if c in "|*_`[]<>#" else c if c.isprintable() else " " for c in text)
