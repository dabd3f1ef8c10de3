"""report(): one self-contained HTML file of runs side by side, in which the utility can be edited."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc import __version__
from rfdlc.decide.classes import Classes, Indices
from rfdlc.decide.decider import Decider
from rfdlc.decide.evaluation import LEVEL, Evaluation, evaluate
from rfdlc.decide.metrics import HEAD_FRACTIONS
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError
from rfdlc.files import replacing
from rfdlc.integrations.report import figures
from rfdlc.integrations.report.packing import MOST_CELLS, STEP, pack, quantise, stratified
from rfdlc.integrations.report.page import build_page
from rfdlc.integrations.report.source import Run, Source, as_runs
from rfdlc.integrations.report.thumbnails import Images, thumbnails
from rfdlc.progress import track

BOOTSTRAP = 200
PICTURES = 150  # samples with a thumbnail: the costliest mistakes, then the surest errors


@dataclass(frozen=True)
class Written:
    """Where a report was written, and the figures at its head by the name of the run."""

    path: Path
    evaluations: dict[str, Evaluation]


def report(
    runs: Source | Sequence[Source] | Mapping[str, Source],
    utility: Utility | None = None,
    out: str | Path = "report.html",
    *,
    decider: Decider | None = None,
    classes: Classes | Sequence[str] | None = None,
    images: Images | None = None,
    title: str | None = None,
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
) -> Path:
    """Write the report of one run or several and return its path.

    A run is a run folder, a file of predictions (CSV, Parquet, .npz) or `Predictions`, with targets; a mapping gives
    them names. A folder brings its own decider along; `decider` replaces it, `utility` replaces what is decided for.
    `images` are all images of the samples as an array, or the folder that the ids are paths under.
    """
    return write_report(
        as_runs(runs, utility, decider, classes), Path(out), images=images, title=title, bootstrap=bootstrap, seed=seed
    ).path


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    images: Images | None = None,
    title: str | None = None,
    bootstrap: int = BOOTSTRAP,
    seed: int = 0,
) -> Written:
    """The report of runs that are ready, which share their classes and utility."""
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: the folder {out.absolute().parent} does not exist; create it first")
    evaluations = {
        run.name: evaluate(run.predictions, decider=run.decider, bootstrap=bootstrap, seed=seed) for run in runs
    }
    title = title or f"Decisions of {' and '.join(run.name for run in runs)}"
    rows_each = MOST_CELLS // (len(runs) * len(runs[0].classes))
    data = {
        "title": title,
        "made": _made(seed, bootstrap),
        "level": LEVEL,
        "step": STEP,
        **_problem(runs[0]),
        "runs": [
            _run_data(run, evaluations[run.name], max(1, rows_each), images, seed)
            for run in track(runs, "Drawing figures")
        ],
    }
    page = build_page(title, data, evaluations[runs[0].name].rows())
    with replacing(out) as beside:
        beside.write_text(page, encoding="utf-8", newline="\n")
    return Written(out, evaluations)


def _problem(run: Run) -> dict[str, Any]:
    """What all runs share: classes, their order and regions, actions and the utility."""
    classes, utility = run.classes, run.decider.utility
    known = classes.counts is not None
    return {
        "classes": {
            "names": list(classes.names),
            "counts": list(classes.counts) if classes.counts is not None else None,
            "rank": classes.rank.tolist() if known else None,
            "regions": {name: members.tolist() for name, members in classes.thirds.items()} if known else {},
            "groups": {name: classes.members(name).tolist() for name in classes.groups},
        },
        "head_fractions": list(HEAD_FRACTIONS),
        "actions": list(utility.actions),
        "decided_class": utility.decided_class.tolist(),
        "utility": pack(utility.matrix),
    }


def _run_data(run: Run, evaluation: Evaluation, most: int, images: Images | None, seed: int) -> dict[str, Any]:
    """Everything that the page shows of one run."""
    rows = stratified(run.targets, most, seed)
    curve_rows = stratified(run.targets, figures.frontier_rows(run), seed)
    worst = figures.costliest(run)
    pictured = _pictured(run, worst) if images is not None else worst
    return {
        "name": run.name,
        "samples": len(run.targets),
        "particles": len(run.scores.values),
        "figures": evaluation.to_dict() | {"flat": _finite(evaluation.flat())},
        "by_class": figures.by_class(run),
        "false_head_curve": figures.false_head_curve(run),
        "frontier": figures.frontier(run, curve_rows),
        "frontier_samples": len(curve_rows),
        "reliability": figures.reliability(run),
        "risk_coverage": figures.risk_coverage(run),
        "uncertainties": figures.uncertainties(run),
        "mistakes": figures.mistakes(run, worst),
        "thumbnails": {str(row): picture for row, picture in thumbnails(run, pictured, images).items()},
        "decider": run.decider.to_dict() | {"utility": None, "joint": None, "fitted": None},
        "calibration": _calibration(run.decider),
        "carried_prior": _listed(run.decider.effective_prior),
        "target_prior": _listed(run.decider.target_prior),
        "made": _plain(run.made),
        "embedded": _embedded(run, rows),
    }


def _calibration(decider: Decider) -> dict[str, Any] | None:
    """softmax(weight log p + bias), whatever the calibrator, and in words."""
    if decider.fitted is None:
        return None
    weight, bias = (np.asarray(values, dtype=np.float64).tolist() for values in decider.fitted.as_affine())
    words = f"{decider.fitted.name}: {decider.fitted}"
    return {"words": words, "weight": weight, "bias": bias, "prior": _listed(decider.fitted.prior)}


def _embedded(run: Run, rows: Indices) -> dict[str, Any]:
    """The samples that the page decides about itself."""
    return {
        "samples": len(rows),
        "levels": pack(quantise(run.calibrated[rows])),
        "targets": pack(run.targets[rows].astype(np.uint32)),
        "rows": pack(rows.astype(np.uint32)),
        "ids": None if run.predictions.ids is None else run.ids_of(rows),
    }


def _pictured(run: Run, worst: Indices) -> Indices:
    """The costliest mistakes, and what may become one when the utility is edited: errors made with confidence."""
    p = run.probabilities
    sure_errors = np.argsort(-np.where(p.argmax(axis=1) == run.targets, -1.0, p.max(axis=1)), kind="stable")
    return np.array(list(dict.fromkeys([*worst.tolist(), *sure_errors.tolist()]))[:PICTURES], dtype=np.int64)


def _made(seed: int, bootstrap: int) -> dict[str, Any]:
    return {
        "rfdlc": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "bootstrap": bootstrap,
    }


def _plain(value: Any) -> Any:
    """Settings as JSON knows them: no infinities, which no JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _finite(flat: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in flat.items() if np.isfinite(value)}


def _listed(prior: Any) -> list[float] | None:
    return None if prior is None else [float(share) for share in prior]
