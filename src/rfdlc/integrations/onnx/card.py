"""The model card: README.md in the format of the Hugging Face hub, from what the run folder knows."""

import json
import math
import os
from pathlib import Path
from typing import Any

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
CARD = """{header}

# {data}, {method}

{particles} particles trained by `{method}` ({summary}); decisions maximise expected utility. Exported by rfdlc {version} as `{file}` ({precision}).

## Data

`{data}`: {classes} classes ({names}){counts}. One sample has shape {shape}.

## Metrics

{metrics}

## Utility

{utility}

## Use

```
{command}
```

The graph takes raw samples and gives `probabilities`, `expected_utility`, `action`, `uncertainty` (entropy, from 0 to 1) and `mutual_information` (the disagreement of the particles). Class names, actions and the utility are in its metadata. A run folder loads with `rfdlc.Model.load(folder)`: safetensors and JSON only.

## Export

Compared with the model it came from on {samples:,} {inputs}: {changed} decisions changed ({ties} ties aside), probabilities differ by at most {difference:.2g} ({precision}){rounding}.{agreement}

## Limits

The model {calibrated}; where the class prior or the inputs differ, probabilities and decisions suffer: watch the estimated class prior that `rfdlc serve` shows. Metrics of the rarest classes rest on few samples. Inputs unlike any training sample get an answer all the same; uncertainty is a hint, not a guarantee.
"""  # noqa: E501


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
    """YAML header, then prose and tables."""
    assert model.path is not None
    config, counts, agreement = Run(model.path).metadata, model.classes.counts, parity.recorded_agreement
    samples, measured = _evaluated(model, utility)
    rows = [f"| {_plain(entry.full_label)} | {entry.metric.format(entry.value)} |" for entry in measured]
    table = "\n".join([f"On {samples:,} test samples:", "", "| metric | value |", "|---|---|", *rows])
    fitted = model.decider.fitted is not None
    return CARD.format(
        header=_header(model, config, measured),
        data=_plain(config["data"]["name"]),
        method=config["method"],
        particles=model.net.particles,
        summary=find_method(config["method"]).summary,
        version=__version__,
        file=file,
        precision=precision,
        classes=len(model.classes),
        names=_plain(listing(model.classes.names)),
        counts=f", {sum(counts):,} training samples, {min(counts):,} to {max(counts):,} per class" if counts else "",
        shape=model.input_shape,
        metrics=table if samples else "The run has no labelled test predictions, so nothing was measured.",
        utility=_utility(utility),
        command=f"rfdlc serve {file}" if file.endswith(".onnx") else f'torch.export.load("{file}").module()',
        samples=parity.samples,
        inputs=parity.inputs,
        changed=parity.decisions_changed,
        ties=parity.ties,
        difference=parity.largest_difference,
        rounding=parity.rounding or "",
        agreement="" if agreement is None else f" {agreement:.2%} of the decisions equal those recorded in training.",
        calibrated="was calibrated on held-out data like the training data" if fitted else "was NOT calibrated",
    )


def _evaluated(model: Model, utility: Utility) -> tuple[int, list[Entry]]:
    """The number of labelled test samples of the run, and the metrics that are defined on them."""
    assert model.path is not None
    file = model.path / "predictions.npz"
    predictions = Predictions.load(file, model.classes) if file.exists() else None
    if predictions is None or predictions.targets is None:
        return 0, []
    scored = evaluate(predictions, decider=model.decider.replace(utility=utility), classes=model.classes)
    return scored.samples, [entry for entry in entries(scored.values) if not math.isnan(entry.value)]


def _header(model: Model, config: dict[str, Any], measured: list[Entry]) -> str:
    """JSON strings are YAML too, so that no name of a data set can break the header."""
    task = "image-classification" if len(model.input_shape) == 3 else "tabular-classification"
    name, data = json.dumps(f"{config['data']['name']} {config['method']}"), json.dumps(config["data"]["name"])
    lines = [MARK, f"pipeline_tag: {task}", "tags: [rfdlc, long-tailed, cost-sensitive, calibration, ensemble]"]
    overall = [entry for entry in measured if entry.metric.parent is None]
    if overall:
        lines += ["model-index:", f"- name: {name}", "  results:", f"  - task: {{type: {task}}}"]
        lines += [f"    dataset: {{name: {data}, type: {data}, split: test}}", "    metrics:"]
        lines += [f"    - {{type: {json.dumps(entry.name)}, value: {entry.value:.4f}}}" for entry in overall]
    return "\n".join(["---", *lines, "---"])


def _utility(utility: Utility) -> str:
    if max(utility.matrix.shape) > SHOWN_CLASSES:
        return f"{utility!r}. The full matrix is in the metadata of the exported file."
    lines = ["| true \\ action | " + " | ".join(map(_plain, utility.actions)) + " |"]
    lines.append("|---" * (1 + len(utility.actions)) + "|")
    for name, row in zip(utility.classes.names, utility.matrix, strict=True):
        lines.append(f"| {_plain(name)} | " + " | ".join(f"{value:g}" for value in row) + " |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Names without control characters, and without what Markdown would take for layout."""
    return "".join(f"\\{c}" if c in "|*_`[]<>#" else c if c.isprintable() else " " for c in text)
