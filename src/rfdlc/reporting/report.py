"""report(): one self-contained HTML file in which the utility can be edited.

Template, styles, scripts and data are put together so that the page fetches nothing and
runs no text of a user. Probabilities take 16 bits on a logarithmic scale, because a
temperature and a prior act on logarithms: the relative error is at most `STEP / 2`
(0.02%) down to the floor at which the library takes logarithms.
"""

import base64
import hashlib
import html
import io
import json
import platform
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc import __version__
from rfdlc.data.images import BrokenImage, decoded, upright
from rfdlc.data.readers.image_files import leaves
from rfdlc.decisions.decider import Decider, left_open
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect
from rfdlc.evaluation.evaluate import Evaluation, entries, evaluate
from rfdlc.evaluation.metrics import HEAD_FRACTIONS
from rfdlc.formats.files import replacing
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.scores import PROBABILITY_FLOOR, Floats
from rfdlc.progress import track
from rfdlc.reporting import curves
from rfdlc.reporting.attention import highlighted, pixels_of
from rfdlc.reporting.runs import (
    ReportRun,
    Source,
    as_runs,
    check_number,
    compare_runs,
)
from rfdlc.statistics.intervals import LEVEL

BOOTSTRAP, LEVELS = 200, 65535
SIGNS = (
    " Costs are utilities with their sign changed: a cost of 2 is −2 here, and means"
    " are shown as costs."
)
STEP = float(-np.log(PROBABILITY_FLOOR) / LEVELS)
# probabilities in one page, all runs together: two bytes each, about 4 MB as text
MOST_CELLS = 2_000_000
SIDE = 72  # pixels of a thumbnail
Images = str | Path | NDArray[Any]
# samples with a thumbnail: the costliest mistakes, then the most confident errors
PICTURES = 150
# One script in this order: a file uses only names of earlier files.
SCRIPTS = (
    "dom.js",
    "unpack.js",
    "decisions.js",
    "workbench.js",
    "files.js",
    "charts.js",
    "matrix.js",
    "editor.js",
    "headline.js",
    "panels.js",
    "figures.js",
    "main.js",
)


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
    """Write an HTML report of one or several runs, in which the utility can be edited.

    Parameters
    ----------
    runs : path, Predictions, list, or dict of names to these
        Run folders, files of predictions (CSV, Parquet, .npz) or `Predictions`, all
        with targets.
    utility : Utility, optional
        Decide for this utility instead of that of the decider.
    out : path
        The HTML file to write.
    decider : Decider, optional
        Replaces the decider of a run folder.
    classes : Classes or list of str, optional
        Names and training counts, where the runs have none.
    images : path or array, optional
        All images of the samples, or the folder of the files named by the ids, for
        thumbnails.
    title : str, optional
        Heading of the page.
    bootstrap, seed : int
        Number of resamples for intervals of your own metrics that are not means, and
        their seed (also of the samples embedded in the page).

    Returns
    -------
    Path
        The file that was written.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from rfdlc import Predictions
    >>> predictions = Predictions(
    ...     probabilities=[[0.9, 0.1], [0.3, 0.7]], targets=[0, 1]
    ... )
    >>> with TemporaryDirectory() as folder:
    ...     report(predictions, out=f"{folder}/report.html").name
    'report.html'
    """
    write_report(
        as_runs(runs, utility, decider, classes),
        Path(out),
        images,
        title,
        bootstrap,
        seed,
    )
    return Path(out)


def write_report(
    runs: Sequence[ReportRun],
    out: Path,
    images: Any = None,
    title: Any = None,
    bootstrap: int = 0,
    seed: int = 0,
) -> dict[str, Evaluation]:
    """Write the report of runs that share their classes and utility; the evaluations in
    it, by run.
    """
    check_number(runs)
    folder = out.absolute().parent
    expect(
        folder.is_dir(), f"{out}: the folder {folder} does not exist; create it first"
    )
    draws: dict[str, Any] = {"bootstrap": bootstrap, "seed": seed}
    evaluations = {
        run.name: evaluate(run.predictions, None, run.decider, **draws) for run in runs
    }
    classes, utility, first = (
        runs[0].classes,
        runs[0].decider.utility,
        evaluations[runs[0].name],
    )
    known = classes.counts is not None
    title = title or f"Decisions of {' and '.join(run.name for run in runs)}"
    most = max(1, MOST_CELLS // (len(runs) * len(classes)))
    data: dict[str, Any] = {
        "title": title,
        "made": {
            "rfdlc": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        | {"date": datetime.now(UTC).isoformat(timespec="seconds"), **draws},
        "level": LEVEL,
        "step": STEP,
        "metrics": [
            {
                "name": e.name,
                "label": e.label,
                "direction": e.metric.direction,
                "unit": e.metric.unit,
            }
            | {"nested": e.metric.parent is not None, "headline": e.metric.headline}
            | (
                {"label": e.label.replace("utility", "cost"), "cost": True}
                if e.is_cost(utility)
                else {}
            )
            for e in entries(first.values, shown=True)
        ],
        "classes": {
            "names": classes.names,
            "counts": classes.counts,
            "rank": classes.rank.tolist() if known else None,
            "regions": (
                {name: members.tolist() for name, members in classes.thirds.items()}
                if known
                else {}
            ),
            "groups": {name: classes.members(name).tolist() for name in classes.groups},
        },
        "head_fractions": HEAD_FRACTIONS,
        "actions": utility.actions,
        "decided_class": utility.decided_class.tolist(),
        "utility": pack(utility.matrix),
        "costs": utility.has_costs,
        "runs": [
            _run_data(run, evaluations[run.name], most, images, seed)
            for run in track(runs, "Computing charts")
        ],
    }
    for run, found in zip(runs[1:], data["runs"][1:], strict=True):
        named = [
            set(own.predictions.ids)
            for own in (runs[0], run)
            if own.predictions.ids is not None
        ]
        if (
            len(named) == 2 and named[0] != named[1]
        ):  # the page has metrics of all samples
            continue
        with suppress(
            InputError
        ):  # other samples than those of the first run: not paired
            paired = compare_runs(runs[:1], [run], bootstrap, seed)
            found["compared"] = {
                d.name: [d.difference, d.low, d.high, d.p] for d in paired.differences
            }
    with replacing(out) as beside:
        beside.write_text(
            _page(title, data, first.rows()), encoding="utf-8", newline="\n"
        )
    return evaluations


def _run_data(
    run: ReportRun, evaluation: Evaluation, most: int, images: Images | None, seed: int
) -> dict[str, Any]:
    """Everything that the page shows of one run."""
    targets, decider, calibration = run.outcomes.targets, run.decider, None
    rows, worst = curves.stratified(targets, most, seed), curves.costliest(run)
    # Confident errors may become costly when the utility is edited.
    errors = np.argsort(
        -np.where(run.outcomes.right, -1.0, run.outcomes.confidence), kind="stable"
    )
    sheets = curves.sheets(run)
    first = [row for rows in (worst, *sheets.values()) for row in rows.tolist()]
    pictured = np.array(
        list(dict.fromkeys([*first, *errors.tolist()]))[:PICTURES], dtype=np.int64
    )
    calibrator = decider.model.calibrator
    if calibrator is not None:
        # softmax(bias - weight |log p|^power), whatever the calibrator
        weight, bias = calibrator.as_affine()
        prior = calibrator.prior
        calibration = {
            "words": f"{calibrator.name}: {calibrator.short}",
            "weight": np.asarray(weight, dtype=np.float64).tolist(),
            "bias": np.asarray(bias, dtype=np.float64).tolist(),
            "power": calibrator.power,
            "prior": None if prior is None else np.asarray(prior).tolist(),
        }
    return {
        "name": run.name,
        "samples": len(targets),
        "groups": evaluation.groups,
        "particles": len(run.scores.values),
        "metrics": {
            name: value
            for name, value in evaluation.flat().items()
            if np.isfinite(value)
        },
        "intervals": evaluation.intervals,
        "by_class": curves.by_class(run),
        "false_head_curve": curves.false_head_curve(run),
        "frontier": curves.frontier(run, seed),
        "frontier_samples": curves.frontier_samples(run),
        "reliability": curves.reliability(run),
        "risk_coverage": curves.risk_coverage_points(run),
        "uncertainties": curves.uncertainties(run),
        "sets": curves.set_curve(run, seed),
        "budget": curves.budget_points(run, seed),
        "promised": curves.promised(run),
        "promise": evaluation.promise,
        "mistakes": curves.mistakes(run, worst),
        "sheets": (
            {name: curves.mistakes(run, rows) for name, rows in sheets.items()}
            if images is not None
            else {}
        ),
        "thumbnails": thumbnails(run, pictured, images),  # checks the images
        "attention": {
            row: _encode(image)
            for row, image in highlighted(run, worst, images).items()
        },
        "decider": _as_it_decides(decider),
        "calibration": calibration,
        "carried_prior": (
            None
            if decider.model.effective_prior is None
            else decider.model.effective_prior.tolist()
        ),
        "decided_for": decider.model.decided_for + left_open(decider, run.predictions),
        "target_prior": (
            None
            if decider.model.target_prior is None
            else decider.model.target_prior.tolist()
        ),
        "made": json.loads(
            json.dumps(run.made), parse_constant=str
        ),  # JSON has no infinities
        "embedded": {  # the samples that the page itself decides
            "samples": len(rows),
            "levels": pack(quantise(run.calibrated[rows])),
            "targets": pack(targets[rows].astype(np.uint32)),
            "rows": pack(rows.astype(np.uint32)),
            "ids": None if run.predictions.ids is None else run.ids_of(rows),
        },
    }


def _page(
    title: str, data: Mapping[str, Any], summary: list[tuple[str, str, str]]
) -> str:
    """The page with its data; `summary` (metric, value, interval) is shown where
    scripts do not run.
    """
    style = asset("report.css")
    script = (
        '(() => {\n"use strict";\n'
        + "\n".join(asset(name) for name in SCRIPTS)
        + "})();\n"
    )
    # No character of the data can end a script element or start markup.
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    cells = [
        "".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in summary
    ]
    # Only our own script and style run, pictures are inside the page, and no request
    # can be made.
    own = [
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        for each in (script, style)
    ]
    policy = (
        f"default-src 'none'; script-src 'sha256-{own[0]}'; style-src"
        f" 'sha256-{own[1]}'; img-src data:; "
    )
    parts = {
        "title": html.escape(title),
        "policy": policy + "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "data": (
            text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
        ),
        "summary": "\n".join(f"<tr>{row}</tr>" for row in cells),
        "worth": "cost" if data["costs"] else "utility",
        "signs": SIGNS if data["costs"] else "",
    }
    return filled("report.html", parts)


def filled(name: str, parts: Mapping[str, str]) -> str:
    """An HTML file below the head that all have, with its parts.

    One pass: inserted text is not searched again, so that a name in the text of a user
    is never replaced.
    """
    page = asset(name).replace("{{head}}", asset("head.html"))
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def _as_it_decides(decider: Decider) -> dict[str, Any]:
    """The table of a decider without what the page has elsewhere, or cannot use."""
    table = decider.to_dict()
    table["utility"] = None
    table["model"] |= {"calibrator": None, "joint": None}
    return table


def asset(name: str) -> str:
    """A file of the page."""
    return (files("rfdlc.reporting") / "assets" / name).read_text(encoding="utf-8")


def quantise(probabilities: Floats) -> NDArray[np.uint16]:
    """-log p in steps of `STEP`: 0 is probability 1, `LEVELS` is the floor."""
    return np.rint(
        np.log(np.clip(probabilities, PROBABILITY_FLOOR, 1.0)) * (-1 / STEP)
    ).astype(np.uint16)


def pack(array: NDArray[Any]) -> str:
    """Little-endian bytes in planes (all first bytes, then all second bytes, ...),
    which deflate better, as base64.
    """
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    planes = plain.reshape(-1).view(np.uint8).reshape(-1, plain.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


def thumbnails(run: ReportRun, rows: Indices, images: Images | None) -> dict[str, str]:
    """Images of these samples by position: from an array of all images, or from files
    named by the ids.

    A sample without a file has no image; it is an error if no file is found at all.
    """
    if images is None:
        return {}
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            "thumbnails need Pillow: pip install pillow, or leave images out"
        ) from None
    if not isinstance(images, str | Path):
        array, count = np.asarray(images), len(run.outcomes)
        shapes = (
            "(samples, height, width), (samples, height, width, 3) or (samples, 3,"
            " height, width)"
        )
        fits = array.ndim in (3, 4) and len(array) == count
        expect(
            fits,
            f"images have shape {array.shape} for {count} samples: expected {shapes}",
        )
        return {
            str(row): _encode(Image.fromarray(pixels_of(array[row]))) for row in rows
        }
    folder = Path(images)
    named = folder.is_dir() and run.predictions.ids is not None
    expect(
        named,
        f"images {str(images)!r}: no such folder, or {run.name} has no ids that name"
        " its files",
    )
    outside = next(
        (name for name in run.ids_of(rows) if leaves(name.removeprefix(f"{folder}/"))),
        None,
    )
    wrong = f"images {str(images)!r}: the id {outside!r} leaves the folder"
    expect(
        outside is None,
        f"{wrong}: expected ids of files in it, as paths relative to it",
    )
    paths = {
        str(row): folder / name
        for row, name in zip(rows, run.ids_of(rows), strict=True)
    }
    named_here = {row: path.relative_to(folder).parts for row, path in paths.items()}
    found, deepest = dict[str, Path](), max(map(len, named_here.values()), default=0)
    for skipped in range(
        deepest
    ):  # ids may begin with folders that lead to this one, as test/crack/x.png
        tried = {
            row: folder.joinpath(*parts[skipped:])
            for row, parts in named_here.items()
            if parts[skipped:]
        }
        found = found or {row: path for row, path in tried.items() if path.is_file()}
    expect(
        found or not paths,
        f"images {str(images)!r}: no id is a file in it (tried"
        f" {[*paths.values(), ''][0]})",
    )
    try:
        return {
            row: _encode(upright(decoded(Image.open(path), 3)))
            for row, path in found.items()
        }
    except (OSError, BrokenImage) as error:
        raise InputError(
            f"images {str(images)!r}: one cannot be read ({error})"
        ) from None


def _encode(image: Any) -> str:
    """PNG for tiny images, which are enlarged without blur; JPEG for photographs."""
    file, tiny = io.BytesIO(), max(image.size) < SIDE
    if not tiny:
        image.thumbnail((SIDE * 2, SIDE * 2))
    image.save(
        file,
        "PNG" if tiny else "JPEG",
        optimize=True,
        **({} if tiny else {"quality": 80}),
    )
    kind = "png" if tiny else "jpeg"
    content = base64.b64encode(file.getvalue()).decode("ascii")
    return f"data:image/{kind};base64,{content}"
