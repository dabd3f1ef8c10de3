"""evaluate_lake: every metric of tables of any size, from sums that all cores
add up.
"""

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.decisions.decider import Decider
from rfdlc.errors import choose, expect, listing
from rfdlc.evaluation.evaluate import Evaluation, as_pairs
from rfdlc.evaluation.merging import Sums
from rfdlc.evaluation.outcomes import UNCERTAINTIES, observe
from rfdlc.lakes.decide import Report, check_model_of, in_threads
from rfdlc.lakes.reading import Lake, Unit, check_first_rows, predictions_of
from rfdlc.probabilities.classes import Classes, Indices
from rfdlc.probabilities.predictions import encode_targets
from rfdlc.probabilities.scores import KIND
from rfdlc.progress import live

TARGET = "target"


def evaluate_lake(
    source: str | Path | Lake,
    decider: Decider,
    *,
    logits: bool = False,
    groups: Sequence[tuple[str, str]] = (),
    uncertainty: str = "decision-probability",
) -> Evaluation:
    """Decide labelled tables of any size, and compute every metric from sums, in
    constant memory.

    Sums are exact. `error_auc` and `risk_coverage_area` come from a histogram (see
    `rfdlc.evaluation.merging`), and metrics that need all samples at once
    (`utility_by_budget`, `ece_debiased`, metrics of your own) are left out.

    Parameters
    ----------
    source : str or Path
        A folder, file, glob or URL of tables, as of `decide_lake`, with a column
        `target`.
    decider : Decider
    logits : bool
        Whether the columns of the classes hold logits.
    groups, uncertainty
        As of `evaluate`.

    Returns
    -------
    Evaluation
        With intervals of means.
    """
    choose(
        "uncertainty", uncertainty, [name for name in UNCERTAINTIES if name != "own"]
    )
    lake, classes = (
        source if isinstance(source, Lake) else Lake(source),
        decider.utility.classes,
    )
    missing = [name for name in (*classes.names, TARGET) if name not in lake.names]
    expect(
        not missing,
        f"{lake.source}: no column {listing(missing)}; it has {listing(lake.names)}",
    )
    _ = [
        (classes.members(a), decider.utility.deciding(b)) for a, b in as_pairs(groups)
    ]  # raises before long work
    check_first_rows(lake, classes, "the utility")
    check_model_of(lake, decider)
    others = [
        name
        for name in (TARGET, KIND)
        if name in lake.names and name not in classes.names
    ]
    probabilities = uncertainty == "decision-probability"

    def of_batch(batch: Any, where: str) -> Sums | None:
        if not batch.num_rows:
            return None
        predictions = predictions_of(batch, classes, logits=logits, where=where)
        scores, y = decider.model.read_labelled(
            predictions, _targets(batch.column(TARGET), classes)
        )
        return Sums.of(
            observe(scores, y, decider, uncertainty, batch=False), probabilities
        )

    def sums(unit: Unit, report: Report) -> Sums | None:
        found = None
        for own, _, rows in lake.each(
            unit, partial(of_batch, where=unit.file), classes.names, others, []
        ):
            found = own if found is None else found if own is None else found + own
            report(rows)
        return found

    with live(lake.rows, "Evaluating") as show:
        by_unit = in_threads(sums, lake.units, show)
    known = [
        by_unit[unit.name] for unit in lake.units if by_unit[unit.name] is not None
    ]
    expect(known, f"{lake.source}: has no rows: expected labelled samples")
    return reduce(add, known).evaluation(decider, groups, uncertainty)


def _targets(column: Any, classes: Classes) -> Indices:
    """Targets as indices; each text is looked up once."""
    coded = column.dictionary_encode()
    fix = (
        "expected a class in each; a file in memory may be without some"
        " (--skip-unknown)"
    )
    expect(
        not column.null_count,
        f"column {TARGET} has {column.null_count} empty cells: {fix}",
    )
    texts = [str(cell).strip() for cell in coded.dictionary.to_pylist()]
    return np.asarray(encode_targets(texts, classes)[coded.indices.to_numpy()])
