"""Sets, budgets and thresholds that the options ask for, fitted to held-out predictions."""

from typing import Any

import rfdlc
from rfdlc.errors import choose, expect


def check_sets(sets: str | None, coverage: str | None, size: int | None) -> None:
    """Raise for options that do not fit together, before anything is read."""
    from rfdlc.decide.budgets import as_share
    from rfdlc.decide.sets import DISCOUNTS, KINDS, check_coverage

    expect(sets is not None or coverage is None, "--coverage is for sets: give --sets marginal, class or macro as well")
    expect(sets is not None or size is None, f"--set-size {size} is for sets: give --sets KIND as well")
    if sets is not None:
        choose("sets", sets, (*KINDS, *DISCOUNTS))
        fits = coverage is None or sets in KINDS
        expect(fits, f"--coverage is for --sets marginal, class or macro: {sets} decides by expected utility")
    if coverage is not None:
        check_coverage(as_share(coverage, "--coverage"))


def with_sets(
    decider: "rfdlc.Decider", sets: str | None, coverage: str | None, size: int | None, held: "rfdlc.Predictions | None"
) -> "rfdlc.Decider":
    """The decider with the sets that the options ask for; those of a saved decider stay if they are these."""
    from rfdlc.decide.budgets import as_share
    from rfdlc.decide.sets import DISCOUNTS, PredictionSets, SetUtility

    if sets is None:
        return decider
    if sets in DISCOUNTS:
        count = len(decider.utility.classes)
        return decider.replace(sets=SetUtility.of(sets, min(size or count, count)))
    share = None if coverage is None else as_share(coverage)
    if held is not None:
        return decider.fit_sets(held, kind=sets, coverage=0.9 if share is None else share, max_size=size)
    known = decider.sets
    same = isinstance(known, PredictionSets) and known.kind == sets and share in (None, known.coverage)
    same = same and size in (None, known.max_size)
    expect(
        same,
        f"--sets {sets} needs held-out predictions with targets, from which the coverage is promised: --calibrate "
        f"FILE, a run folder with held-out.npz, or --decider FILE with such sets (this one has {known or 'none'})",
    )
    return decider


def with_deferral(
    decider: "rfdlc.Decider", budget: str | None, false_alarm: str | None, held: Any, priced: Any
) -> "rfdlc.Decider":
    """The decider with the budget, by `priced` samples, and the thresholds of unfamiliar ones, by held-out samples."""
    from rfdlc.decide.budgets import as_share

    for option, given, known in (("--budget", budget, priced), ("--unfamiliar", false_alarm, held)):
        expect(
            given is None or known is not None,
            f"{option} {given} needs held-out predictions with targets, from which thresholds are found: --calibrate "
            "FILE, or a run folder with held-out.npz (a saved decider keeps its own without the option)",
        )
    if false_alarm is not None:
        decider = decider.fit_unfamiliar(held, false_alarm=as_share(false_alarm, "--unfamiliar"))
    if budget is None:
        return decider
    items = (item.partition("=") for item in budget.split(","))
    pairs = {name.strip(): share for name, _, share in items} if "=" in budget else budget
    return decider.fit_budget(priced, budget=pairs)
