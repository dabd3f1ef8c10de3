"""The model card: README.md in the format of the Hugging Face hub, from what the run folder knows."""

import json
import math
import os
from pathlib import Path
from typing import Any

from rfdlc import __version__
from rfdlc.decide.evaluation import Entry, Evaluation, entries, evaluate
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
    places = dict.fromkeys((_free_place(path), model.path / "README.md"))
    written = [place for place in places if os.access(place.parent, os.W_OK)]
    for place in written:
        with replacing(place) as beside:
            beside.write_text(text, encoding="utf-8")
    return tuple(written)


def _free_place(path: Path) -> Path:
    """README.md beside the file, or, where somebody else's README is there, a name after the file."""
    wanted = path.with_name("README.md")
    theirs = wanted.exists() and MARK not in wanted.read_text(encoding="utf-8", errors="replace")
    return path.with_suffix(".md") if theirs else wanted


def card(model: Model, utility: Utility, file: str, precision: str, parity: Parity) -> str:
    """YAML header, then prose and tables."""
    assert model.path is not None
    run = Run(model.path)
    config, scored = run.metadata, _scored(model, utility)
    method = find_method(config["method"])
    calibrated = ", calibrated on held-out data" if model.decider.fitted else ", not calibrated"
    parts = [
        _header(model, config, scored),
        f"# {_plain(config['data']['name'])}, {config['method']}",
        f"{model.net.particles} particles trained by `{config['method']}` ({method.summary}){calibrated}; "
        f"decisions maximise expected utility. Exported by rfdlc {__version__} as `{file}` ({precision}).",
        "## Data\n\n" + _data(model, config),
        "## Metrics\n\n" + _metrics(scored),
        "## Utility\n\n" + _utility(utility),
        "## Use\n\n" + _use(file),
        "## Export\n\n" + _export(parity, precision),
        "## Limits\n\n" + _limits(model),
    ]
    return "\n\n".join(parts) + "\n"


def _scored(model: Model, utility: Utility) -> Evaluation | None:
    assert model.path is not None
    file = model.path / "predictions.npz"
    if not file.exists():
        return None
    predictions = Predictions.load(file, model.classes)
    if predictions.targets is None:
        return None
    return evaluate(predictions, decider=model.decider.replace(utility=utility), classes=model.classes)


def _header(model: Model, config: dict[str, Any], scored: Evaluation | None) -> str:
    """JSON strings are YAML too, so that no name of a data set can break the header."""
    task = "image-classification" if len(model.input_shape) == 3 else "tabular-classification"
    name = json.dumps(f"{config['data']['name']} {config['method']}")
    lines = [MARK, f"pipeline_tag: {task}", "tags: [rfdlc, long-tailed, cost-sensitive, calibration, ensemble]"]
    if scored is not None:
        data = json.dumps(config["data"]["name"])
        known = [entry for entry in _known(scored) if entry.metric.parent is None]
        lines += [
            "model-index:",
            f"- name: {name}",
            "  results:",
            f"  - task: {{type: {task}}}",
            f"    dataset: {{name: {data}, type: {data}, split: test}}",
            "    metrics:",
            *(f"    - {{type: {json.dumps(entry.name)}, value: {entry.value:.4f}}}" for entry in known),
        ]
    return "\n".join(["---", *lines, "---"])


def _data(model: Model, config: dict[str, Any]) -> str:
    counts = model.classes.counts
    told = f"`{_plain(config['data']['name'])}`: {len(model.classes)} classes ({_plain(listing(model.classes.names))})"
    if counts:
        most, least = max(counts), min(counts)
        told += (
            f", {sum(counts):,} training samples, from {most:,} of the most frequent class to {least:,} of the rarest"
        )
    return f"{told}. One sample has shape {model.input_shape}."


def _known(scored: Evaluation) -> list[Entry]:
    return [entry for entry in entries(scored.values) if not math.isnan(entry.value)]


def _metrics(scored: Evaluation | None) -> str:
    if scored is None:
        return "The run has no labelled test predictions, so nothing was measured."
    lines = [f"| {_plain(entry.full_label)} | {entry.metric.format(entry.value)} |" for entry in _known(scored)]
    return "\n".join([f"On {scored.samples:,} test samples:", "", "| metric | value |", "|---|---|", *lines])


def _utility(utility: Utility) -> str:
    if max(utility.matrix.shape) > SHOWN_CLASSES:
        return f"{utility!r}. The full matrix is in the metadata of the exported file."
    lines = ["| true \\ action | " + " | ".join(map(_plain, utility.actions)) + " |"]
    lines.append("|---" * (1 + len(utility.actions)) + "|")
    for name, row in zip(utility.classes.names, utility.matrix, strict=True):
        lines.append(f"| {_plain(name)} | " + " | ".join(f"{value:g}" for value in row) + " |")
    return "\n".join(lines)


def _use(file: str) -> str:
    command = f"rfdlc serve {file}" if file.endswith(".onnx") else f'torch.export.load("{file}").module()'
    return (
        f"```\n{command}\n```\n\n"
        "The graph takes raw samples and gives `probabilities`, `expected_utility`, `action`, `uncertainty` (entropy, "
        "from 0 to 1) and `mutual_information` (what the particles disagree about). Class names, actions and the "
        "utility are in its metadata. A run folder loads with `rfdlc.Model.load(folder)`: safetensors and JSON only."
    )


def _export(parity: Parity, precision: str) -> str:
    text = (
        f"Compared with the model it came from on {parity.samples:,} {parity.inputs}: {parity.decisions_changed} "
        f"decisions changed ({parity.ties} ties aside), probabilities differ by at most "
        f"{parity.largest_difference:.2g} ({precision}){parity.rounding or ''}."
    )
    if parity.recorded_agreement is not None:
        text += f" {parity.recorded_agreement:.2%} of the decisions equal those recorded after training."
    return text


def _limits(model: Model) -> str:
    fitted = "was calibrated on held-out data like the training data" if model.decider.fitted else "was NOT calibrated"
    return (
        f"The model {fitted}; where the class prior or the inputs differ, probabilities and decisions suffer: watch "
        "the estimated class prior that `rfdlc serve` shows. Metrics of the rarest classes rest on few samples. Inputs "
        "unlike any training sample get an answer all the same; uncertainty is a hint, not a guarantee."
    )


def _plain(text: str) -> str:
    """Names without what Markdown would take for layout."""
    return "".join(f"\\{c}" if c in "|*_`[]<>#" else c for c in text)
