"""Sets, budgets and thresholds that the options ask for, fitted to held-out
predictions.
"""

import re
from typing import Any

import rfdlc
from rfdlc.errors import choose, expect

_PER_TIME = re.compile(
    r"(^|=)\s*[\d.]+\s*/\s*[^\W\d]"
)  # 50/day, a=50/week; 30/600 is a share
_PER_DAY = re.compile(r"\s*(\d+)\s*/\s*day\s*", re.ASCII | re.IGNORECASE)


def check_sets(sets: str | None, coverage: str | None, size: int | None) -> None:
    """Raise for options that do not fit together, before anything is read."""
    from rfdlc.decisions.budgets import as_share
    from rfdlc.decisions.sets import DISCOUNTS, KINDS, check_coverage

    expect(
        sets is not None or coverage is None,
        "--coverage is for sets: give --sets marginal, class or macro as well",
    )
    expect(
        sets is not None or size is None,
        f"--set-size {size} is for sets: give --sets KIND as well",
    )
    if sets is not None:
        choose("sets", sets, (*KINDS, *DISCOUNTS))
        fits = coverage is None or sets in KINDS
        expect(
            fits,
            f"--coverage is for --sets marginal, class or macro: {sets} decides by"
            " expected utility",
        )
    if coverage is not None:
        check_coverage(as_share(coverage, "--coverage"))


def with_sets(
    decider: "rfdlc.Decider",
    sets: str | None,
    coverage: str | None,
    size: int | None,
    held: "rfdlc.Predictions | None",
) -> "rfdlc.Decider":
    """The decider with the sets that the options ask for; those of a saved decider stay
    if they are these.
    """
    from rfdlc.decisions.budgets import as_share
    from rfdlc.decisions.sets import DISCOUNTS, PredictionSets, SetUtility

    if sets is None:
        return decider
    if sets in DISCOUNTS:
        count = len(decider.utility.classes)
        return decider.replace(sets=SetUtility.of(sets, min(size or count, count)))
    share = None if coverage is None else as_share(coverage)
    if held is not None:
        return decider.fit_sets(
            held, kind=sets, coverage=0.9 if share is None else share, max_size=size
        )
    known = decider.sets
    same = (
        isinstance(known, PredictionSets)
        and known.kind == sets
        and share in (None, known.coverage)
        and size in (None, known.max_size)
    )
    expect(
        same,
        f"--sets {sets} needs held-out predictions with targets, from which the"
        " coverage is promised: --calibrate FILE, a run folder with held-out.npz, or"
        f" --decider FILE with such sets (this one has {known or 'none'})",
    )
    return decider


def with_deferral(
    decider: "rfdlc.Decider",
    budget: str | None,
    false_alarm: str | None,
    held: Any,
    priced: Any,
) -> "rfdlc.Decider":
    """The decider with the budget, by `priced` samples, and the thresholds of
    unfamiliar ones, by held-out samples.
    """
    from rfdlc.decisions.budgets import as_share

    per_time = (
        "is for `rfdlc decide` of one file, with --time COLUMN: give a share here, such"
        " as 5%"
    )
    expect(
        budget is None or not _PER_TIME.search(budget), f"--budget {budget} {per_time}"
    )
    for option, given, known in (
        ("--budget", budget, priced),
        ("--unfamiliar", false_alarm, held),
    ):
        expect(
            given is None or known is not None,
            f"{option} {given} needs held-out predictions with targets, from which"
            " thresholds are found: --calibrate FILE, or a run folder with"
            " held-out.npz (a saved decider keeps its own without the option)",
        )
    if false_alarm is not None:
        decider = decider.fit_unfamiliar(
            held, false_alarm=as_share(false_alarm, "--unfamiliar")
        )
    if budget is None:
        return decider
    return decider.fit_budget(
        priced, budget=_by_action(budget) if "=" in budget else budget
    )


def per_day(budget: str | None, time: str | None) -> dict[str, int]:
    """Samples per day of `50/day` or `total=50/day,doctor=20/day`, by name; none for a
    share.
    """
    from rfdlc.decisions.budgets import TOTAL

    if budget is None or not _PER_TIME.search(budget):
        expect(
            time is None,
            f"--time {time} is for a budget per day: give --budget 50/day as well",
        )
        return {}
    expect(
        time is not None,
        f"--budget {budget} needs the time of each sample: give its column by --time"
        " COLUMN",
    )
    named = _by_action(budget) if "=" in budget else {TOTAL: budget}
    found = {name: _PER_DAY.fullmatch(text) for name, text in named.items()}
    told = (
        f"--budget {budget}: expected samples per day, such as 50/day or"
        " total=50/day,doctor=20/day"
    )
    expect(all(found.values()), told)
    return {name: int(match[1]) for name, match in found.items() if match}


def _by_action(budget: str) -> dict[str, str]:
    return {
        name.strip(): value
        for name, _, value in (item.partition("=") for item in budget.split(","))
    }
