"""The page of `rfdlc watch`: one HTML file without scripts, in the style of the
report.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc import __version__
from rfdlc.evaluation.metrics import readable
from rfdlc.formats.files import replacing
from rfdlc.monitoring.monitor import LEVELS, OUTCOMES
from rfdlc.monitoring.watch import NOT_TRUSTED, Watch, stamp
from rfdlc.reporting.report import asset, filled

WIDTH, HEIGHT, LEFT, LOW = 420, 170, 52, 22  # of a chart, and its margins
MOST_CLASSES = 300  # rows of the table


def write_page(watched: Watch, out: Path, source: str) -> None:
    """Write the page; no text of a user becomes markup."""
    decisions, decider, style = (
        watched.log.decisions,
        watched.log.decider,
        asset("report.css"),
    )
    own = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    lead = [
        f"{len(decisions):,} decisions of {source}",
        f"decider {watched.log.version}",
        decider.model.decided_for,
    ]
    if decisions.times is not None:
        lead.insert(
            1, f"{stamp(decisions.times[0])} to {stamp(decisions.times[-1])} UTC"
        )
    said = {escape(line): line.startswith(NOT_TRUSTED) for line in watched.verdict}
    bold = [
        f"<strong>{line}</strong>" if warns else line for line, warns in said.items()
    ]
    parts = {
        "title": "Decisions in service",
        "policy": (
            f"default-src 'none'; style-src 'sha256-{own}'; base-uri 'none';"
            " form-action 'none'"
        ),
        "style": style,
        "lead": escape("; ".join(lead)) + f"; rfdlc {__version__}",
        "verdict": "\n".join(
            f'<p class="notice" role="status">{line}</p>' for line in bold
        ),
        "cards": _cards(watched),
        "charts": _charts(watched),
        "tests": _tests(watched),
        "per_month": f"{watched.monitor.per_month:,}",
        "classes": _classes(watched),
        "windows": _windows(watched),
    }
    with replacing(out) as beside:
        beside.write_text(filled("watch.html", parts), encoding="utf-8", newline="\n")


def _cards(watched: Watch) -> str:
    whole, promised, shift = (
        watched.whole,
        watched.reference.values(),
        _shift(watched)[-1],
    )
    doubt = "" if watched.trusted else " (not to be trusted)"
    away, before = (
        sum(whole.handed_over.values()),
        sum(promised["handed_over"].values()),
    )
    reasons = "; ".join(
        f"{why} {share:.1%}" for why, share in whole.handed_over.items()
    )
    cards = [
        (
            f"Expected {watched.worth}{doubt}",
            watched.shown(whole.expected_utility),
            (
                f"{watched.shown(*whole.interval)}; held-out data:"
                f" {watched.shown(promised['realised_utility'])}"
                f" ({watched.shown(*promised['realised_utility_interval'])})"
            ),
        ),
        ("Handed over", f"{away:.1%}", f"{reasons}; held-out data: {before:.1%}"),
        (
            "Unfamiliar",
            f"{whole.unfamiliar:.1%}",
            f"held-out data: {promised['unfamiliar']:.1%}",
        ),
        (
            f"Change of the class prior{doubt}",
            f"{shift:.2f}",
            "total variation, last window",
        ),
    ]
    if watched.realised is not None:
        own = watched.realised
        note = f"{own.ends}; {own.chosen}; {own.promise}"
        cards.insert(1, (f"Realised {own.worth}", own.shown(own.utility), note))
    return "".join(
        f'<div class="card"><h3>{name}</h3><p class="value">{value}</p><p'
        f' class="interval">{escape(note)}</p></div>'
        for name, value, note in cards
    )


def _shift(watched: Watch) -> list[float]:
    prior = watched.reference.prior
    return [
        float(np.abs(window.estimate.prior - prior).sum() / 2)
        for window in watched.windows
    ]


def _charts(watched: Watch) -> str:
    windows, promised = watched.windows, watched.reference.values()
    ends = [window.first + window.samples for window in windows]
    sign = -1 if watched.worth == "cost" else 1
    lows, highs = zip(
        *(sorted(sign * end for end in window.interval) for window in windows),
        strict=True,
    )
    charts = [
        (
            f"Expected {watched.worth}",
            [sign * w.expected_utility for w in windows],
            sign * promised["realised_utility"],
            (lows, highs),
        ),
        ("Change of the class prior (total variation)", _shift(watched), 0.0, None),
        (
            "Handed over",
            [sum(w.handed_over.values()) for w in windows],
            sum(promised["handed_over"].values()),
            None,
        ),
        ("Unfamiliar", [w.unfamiliar for w in windows], promised["unfamiliar"], None),
    ]
    return "".join(
        f"<figure><h3>{name}</h3>{chart(name, ends, *rest)}</figure>"
        for name, *rest in charts
    )


def chart(
    name: str,
    ends: Sequence[int],
    values: Sequence[float],
    reference: float,
    band: Any = None,
) -> str:
    """A line over the last samples of windows, with its band and a reference,
    as SVG.
    """
    numbers = [
        *values,
        reference,
        *(band[0] if band else ()),
        *(band[1] if band else ()),
    ]
    low, high = min(numbers), max(numbers)
    pad = max((high - low) * 0.08, 0.005)
    low, high = low - pad, high + pad
    first = ends[0] if len(ends) > 1 else 0

    def x(end: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * (end - first) / max(ends[-1] - first, 1)

    def y(value: float) -> float:
        return (HEIGHT - LOW) * (1 - (value - low) / (high - low))

    def path(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)

    shapes = []
    if band:
        around = [
            *zip(ends, band[1], strict=True),
            *reversed([*zip(ends, band[0], strict=True)]),
        ]
        shapes.append(
            f'<polygon points="{path(around)}" fill="var(--accent)" opacity="0.15"/>'
        )
    level = (
        f'x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(reference):.1f}" y2="{y(reference):.1f}"'
    )
    shapes.append(f'<line {level} stroke="var(--soft)" stroke-dasharray="5 4"/>')
    line = path(zip(ends, values, strict=True))
    shapes.append(
        f'<polyline points="{line}" fill="none" stroke="var(--accent)"'
        ' stroke-width="2"/>'
    )
    dots = zip(ends, values, strict=True)
    shapes += [
        f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5" fill="var(--accent)"/>'
        for a, b in dots
    ]
    for value in (low + pad, high - pad):
        shapes.append(
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}"'
            f' text-anchor="end">{readable(value)}</text>'
        )
    shapes.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">sample {ends[0]:,}</text>')
    shapes.append(
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 4}" text-anchor="end">{ends[-1]:,}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(name)}">{"".join(shapes)}</svg>'
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are markup already."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        [f"<th>{first}</th>", *(f"<td>{cell}</td>" for cell in rest)]
        for first, *rest in rows
    ]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return (
        "<table"
        f' class="numbers"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    )


def _tests(watched: Watch) -> str:
    rows = []
    for name, when in watched.alarms.items():
        state = (
            "no alarm"
            if when is None
            else f'<span class="alarm">alarm at sample {when:,}</span>'
        )
        if name == OUTCOMES and not watched.learned.tested:
            state = "not tested: no labels"
        evidence = watched.monitor.evidence.get(name)
        rows.append(
            [
                name,
                state,
                "" if evidence is None else f"{evidence.value:.3g}",
                f"{LEVELS[name]:.1%}",
            ]
        )
    return _table(["test", "state", "e-value now", "false alarms per month"], rows)


def _classes(watched: Watch) -> str:
    names, whole, promised = (
        watched.log.decider.utility.classes.names,
        watched.whole,
        watched.reference.values(),
    )
    low, high = whole.estimate.interval()
    decided = np.bincount(watched.log.decisions.decided + 1, minlength=len(names) + 1)[
        1:
    ]
    order = np.argsort(-watched.reference.prior, kind="stable")
    rows = []
    for c in order[:MOST_CLASSES]:
        length, enough = watched.lengths[c]
        needed = f"{length:,}" if enough else f"more than {length:,}"
        accuracies = [
            "" if each is None else f"{each:.1%}"
            for each in (whole.accuracy[c], promised["accuracy"][c])
        ]
        share = f"{whole.estimate.prior[c]:.2%} ({low[c]:.2%} to {high[c]:.2%})"
        before = f"{watched.reference.prior[c]:.2%}"
        rows.append(
            [
                f"<bdi>{escape(names[c])}</bdi>",
                share,
                before,
                needed,
                f"{decided[c]:,}",
                *accuracies,
            ]
        )
    head = ["class", "share (95% interval)", "decided for", "samples needed", "decided"]
    more = len(names) - len(rows)
    note = (
        f'<p class="hint">{more:,} rarer classes are in the JSON output (--json).</p>'
        if more
        else ""
    )
    return (
        _table([*head, "expected accuracy of these decisions", "held-out data"], rows)
        + note
    )


def _windows(watched: Watch) -> str:
    rows = []
    for window, shift in zip(watched.windows, _shift(watched), strict=True):
        when = f"{window.first + 1:,} to {window.first + window.samples:,}"
        if window.span is not None:
            when = f"{stamp(window.span[0])} ({when})"
        shares = [
            f"{share:.1%}"
            for share in (*window.handed_over.values(), window.unfamiliar)
        ]
        fit = f"{window.misfit:.2g}"
        value = (
            f"{watched.shown(window.expected_utility)}"
            f" ({watched.shown(*window.interval)})"
        )
        known = (
            [value, f"{shift:.2f}"]
            if watched.fits(window)
            else ["not to be trusted"] * 2
        )
        rows.append([when, *known, *shares, fit])
    reasons = [f"handed over: {why}" for why in watched.whole.handed_over]
    head = [
        "samples",
        f"expected {watched.worth}",
        "change of the prior",
        *reasons,
        "unfamiliar input",
        "p: label shift fits",
    ]
    return _table(head, rows)
