"""What the commands that decide write and say: columns, lines below the tables, and
parts of their JSON.
"""

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import rfdlc
from rfdlc.errors import are, counted, listing

if TYPE_CHECKING:
    from rfdlc.decisions.rules import Explanation


def mean_value(utility: "rfdlc.Utility", value: float) -> str:
    """The mean expected utility in words: as a cost where utilities are costs with
    their sign changed.
    """
    from rfdlc.evaluation.metrics import worth_in_words

    return (
        f"Mean expected {'cost' if utility.has_costs else 'utility'}"
        f" {worth_in_words(utility.has_costs, value)}"
    )


def mean_values(utility: "rfdlc.Utility", value: float) -> dict[str, float]:
    """The same for JSON."""
    return {"mean_expected_utility": value} | (
        {"mean_expected_cost": 0.0 - value} if utility.has_costs else {}
    )


def thresholds(utility: "rfdlc.Utility") -> dict[str, Any]:
    """Of two classes and two actions, for JSON: the probability of each class above
    which the action changes.
    """
    share, names = utility.threshold, utility.classes.names
    return (
        {}
        if share is None
        else {"thresholds": dict(zip(names, (1 - share, share), strict=True))}
    )


def threshold_lines(utility: "rfdlc.Utility") -> list[str]:
    """The lower of these thresholds in words."""
    shares = thresholds(utility).get("thresholds", {})
    lowest = sorted(enumerate(shares.items()), key=lambda each: each[1][1])[:1]
    told = "{} is decided where the probability of {} is above {:.3g}%.".format
    return [
        told(utility.actions[utility.matrix[c].argmax()], name, 100 * share)
        for c, (name, share) in lowest
    ]


def calibrated_lines(
    decider: "rfdlc.Decider", predictions: "rfdlc.Predictions"
) -> list[str]:
    from rfdlc.decisions.decider import left_open

    lines = []
    if decider.model.calibrator:
        lines.append(f"Calibrated: {decider.model.calibrator.short}.")
    if _has_threshold(decider):
        lines += threshold_lines(decider.utility)
    prior = f"D{decider.model.decided_for[1:]}"
    return [*lines, f"{prior}{left_open(decider, predictions)}."]


def decision_columns(
    decider: "rfdlc.Decider", found: "Explanation", ids: Any
) -> dict[str, list[Any]]:
    """Numbers have six significant digits, about the precision of float32."""
    from rfdlc.decisions.sets import set_texts

    values = found.value, found.runner_up_value, found.probability
    value, next_value, probability = (
        [float(f"{number:.6g}") for number in column] for column in values
    )
    action, runner_up = (
        [found.actions[i] for i in column] for column in (found.action, found.runner_up)
    )
    argmax = list(decider.utility.classes.select(found.argmax))
    columns = {
        "id": list(ids),
        "action": action,
        "expected_utility": value,
        "runner_up": runner_up,
    }
    columns |= {
        "runner_up_utility": next_value,
        "argmax": argmax,
        "argmax_probability": probability,
    }
    columns |= (
        {"reason": found.reason.tolist()}
        if (decider.utility.decided_class < 0).any()
        else {}
    )
    if found.sets is not None:
        columns["set"] = set_texts(found.sets, decider.utility.classes)
        columns["set_size"] = found.sets.sum(axis=1).tolist()
    return columns


def deferral_lines(
    decider: "rfdlc.Decider", found: "Explanation", actions: dict[str, int]
) -> list[str]:
    """The shares of a budget, from counts of actions of one batch; false alarms of
    unfamiliar samples.
    """
    from rfdlc.decisions.rules import OVER_BUDGET, UNFAMILIAR

    lines, budget, known = [], decider.deferral.budget, decider.deferral.unfamiliar
    if budget is not None:
        kept = int((found.reason == OVER_BUDGET).sum())
        shares = share_line(
            budget,
            budget.handed_over(actions, decider.utility),
            known is not None,
            len(found),
        )
        lines.append(
            f"{shares} {counted(kept, 'more sample')} {are(kept)} worth handing over."
        )
    if known is not None:
        count = int((found.reason == UNFAMILIAR).sum())
        lines.append(
            f"{count:,} unfamiliar; false alarms among held-out samples, classes"
            f" counting equally: {rates_in_words(known)}."
        )
    return lines


def share_line(budget: Any, handed: Any, unfamiliar: bool, samples: int = 0) -> str:
    """The shares of a budget beside those that were handed over, of a batch of so many
    samples; 0: by prices.
    """
    shown = (
        f"{name} {100 * share:.3g}%, handed over {handed[name]:.1%}"
        for name, share in budget.shares.items()
    )
    least = prices_in_words(budget)
    kept = (
        f"by prices of held-out samples (a gain of {least}), which keep to it on"
        " average"
    )
    if samples:
        few = (
            f"as {counted(samples, 'sample')} {are(samples)} too few for the share to"
            " be one of them"
        )
        priced = f"by its prices (a gain of {least}), {few}"
        kept = priced if budget.too_few(samples) else "of all samples as one batch"
    return (
        f"Budget: {'; '.join(shown)};"
        f" {kept}{', unfamiliar samples beside it' if unfamiliar else ''}."
    )


def prices_in_words(budget: Any) -> str:
    """The least gain for which each action of a budget is taken."""
    from rfdlc.evaluation.metrics import readable

    return listing(
        f"{name} {readable(price)} or more" for name, price in budget.prices.items()
    )


def rates_in_words(unfamiliar: Any) -> str:
    """The false alarms of each region."""
    return ", ".join(f"{name} {rate:.1%}" for name, rate in unfamiliar.rates.items())


def evaluated_shares(decider: "rfdlc.Decider", result: Any) -> list[str]:
    """The line of the budget of evaluated decisions, if there is one."""
    import numpy as np

    if decider.deferral.budget is None:
        return []
    names, chosen = decider.utility.actions, result.outcomes.actions
    counts = dict(
        zip(names, np.bincount(chosen, minlength=len(names)).tolist(), strict=True)
    )
    handed = decider.deferral.budget.handed_over(counts, decider.utility)
    return [
        share_line(
            decider.deferral.budget,
            handed,
            decider.deferral.unfamiliar is not None,
            result.samples,
        )
    ]


def warn_of_flags(file: str, reasons: Any) -> None:
    """Say that samples which `predict --unfamiliar` has flagged are decided like
    others.
    """
    from rfdlc.decisions.rules import UNFAMILIAR

    if count := sum(str(reason) == UNFAMILIAR for reason in reasons):
        kept = (
            "`rfdlc predict RUN DATA --raw --keep COLUMN`, then `rfdlc decide FILE"
            " --decider RUN --unfamiliar SHARE`"
        )
        told = (
            f"{file}: {counted(count, 'sample')} {are(count)} marked as unfamiliar and"
            " decided like others"
        )
        warnings.warn(f"{told}; to hand them over here, too: {kept}", stacklevel=2)


def handed_over_by_day(
    daily: "rfdlc.PerDay", decider: "rfdlc.Decider", found: "Explanation"
) -> dict[str, int]:
    """How many samples of each day are handed over."""
    away = decider.utility.decided_class[found.action] < 0
    handed = Counter(
        day for day, handed in zip(daily.names, away, strict=True) if handed
    )
    return {day: handed[day] for day in sorted({*daily.names})}


def daily_line(
    limits: dict[str, int], days: dict[str, int], found: "Explanation"
) -> str:
    from rfdlc.decisions.rules import OVER_BUDGET

    least, largest = min(days.values()), max(days.values())
    most = ", ".join(f"{name} {count:,}" for name, count in limits.items())
    span = f"{least:,}" if least == largest else f"{least:,} to {largest:,}"
    handed = (
        f"{span} on each of {counted(len(days), 'day')}, {sum(days.values()):,} in all"
    )
    more = int((found.reason == OVER_BUDGET).sum())
    return (
        f"Budget per day: {most}. Handed over: {handed}; {counted(more, 'more sample')}"
        f" {are(more)} worth it."
    )


def set_summary(decider: "rfdlc.Decider", sizes: Any) -> dict[str, Any]:
    from rfdlc.decisions.sets import PredictionSets

    sets: Any = decider.sets
    summary = {"kind": sets.kind, "mean_size": float(sizes.mean())}
    if isinstance(sets, PredictionSets):
        summary |= {
            "coverage": sets.coverage,
            "promises": sets.promises(decider.utility.classes),
        }
        summary |= (
            {"max_size": sets.max_size, "held_out_coverage": sets.held_out}
            if sets.max_size
            else {}
        )
    return summary


def set_line(decider: "rfdlc.Decider", sizes: Any) -> str:
    """What is promised for which classes, and how large the sets are."""
    text = str(decider.sets)
    summary = set_summary(decider, sizes)
    promises = summary.get("promises", ())
    pooled = [
        row["class"]
        for row in promises
        if summary["kind"] == "class" and len(row["promised_for"]) > 1
    ]
    none = [row["class"] for row in promises if not row["promised_for"]]
    none = ["any coverage"] if none and len(none) == len(promises) else none
    notes = [f"promised together: {listing(pooled)}"] * bool(pooled) + [
        f"not promised: {listing(none)}"
    ] * bool(none)
    size = f"{sizes.mean():.3g} classes per set on average, at most {sizes.max()}"
    return f"{text[0].upper()}{text[1:]}: {'; '.join([size, *notes])}."


def decider_summary(
    decider: "rfdlc.Decider", predictions: "rfdlc.Predictions"
) -> dict[str, Any]:
    """What was fitted and corrected, for JSON."""
    from rfdlc.decisions.decider import left_open, utility_interval

    target, names, estimate = (
        decider.model.target_prior,
        decider.utility.classes.names,
        decider.model.estimate,
    )
    intervals: dict[str, Any] = {}
    if estimate is not None:
        bounds = zip(*(end.tolist() for end in estimate.interval()), strict=True)
        intervals["target_prior_interval"] = dict(zip(names, bounds, strict=True))
        intervals["expected_utility_interval"] = utility_interval(decider, predictions)
    shares = None if target is None else dict(zip(names, target.tolist(), strict=True))
    fitted = str(decider.model.calibrator) if decider.model.calibrator else None
    known: dict[str, Any] = {
        "rule": decider.rule,
        "combine": decider.model.combine,
        "calibration": fitted,
    }
    told = decider.model.decided_for + (
        "" if estimate is not None else left_open(decider, predictions)
    )
    known |= thresholds(decider.utility) if _has_threshold(decider) else {}
    return intervals | known | {"decided_for": told, "target_prior": shares}


def _has_threshold(decider: "rfdlc.Decider") -> bool:
    """Whether its decisions are those of a threshold on the probability of the second
    class.
    """
    return (
        decider.utility.threshold is not None
        and decider.rule == "expected-utility"
        and decider.deferral.budget is None
    )


def likeliest(decider: "rfdlc.Decider") -> str:
    """The rule that takes the most probable class, and what of: before calibration it
    may be another one.
    """
    corrected = "" if decider.model.target_prior is None else " after correction"
    return f"arg max{' after calibration' if decider.model.calibrator else corrected}"
