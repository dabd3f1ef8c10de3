"""Decisions watched without labels: simulated streams with label shift, without any
shift, and with other shifts.

    python benchmarks/watch.py --logits logits.npz [--streams 200 --workers 1]
        writes benchmarks/results/watch.csv

Every stream has held-out data of its own, on which its decider is calibrated.
`cifar100-lt`: the test logits of a fine-tuned ensemble (arrays `test` (M, N, C) and
`test_y`) are the population, from which 10,847 held-out samples and the streams are
drawn with replacement, at the class prior of CIFAR100-LT. `table`: a simulated table of
five classes (70% to 2%) and gradient boosting of scikit-learn; 10,000 held-out samples.
Traffic: 1,000 samples per day.

Shifts of a total variation: `class` (one class gains), `prior` (a part of the samples
has a prior drawn from a flat Dirichlet distribution), `tail` (a part has a uniform
prior), `factors` (each class is multiplied by e^s or e^-s at random, which moves the
mean of no group). They come after 1,000 samples. Covariate shift: 30% of the samples
are of 20 classes that the decider does not have (`cifar100-lt`), or columns of the
table move (`table`). Constants were chosen on another run's logits and other seeds (0
to 9; streams have seeds from 1,000).

    python benchmarks/watch.py --oracle   writes benchmarks/results/watch-oracle.csv

What tests find that see the true labels, know when the change comes and know the old
class prior: the best that a monitor without labels can hope for. Thresholds are
quantiles of 200,000 simulated unshifted windows, for one window (false alarms of 0.015)
and for all windows of a month. `size known`: the likelihood ratio averaged over the
signs of all factors, which is nearly the most powerful test for this kind of shift if
only the signs are unknown.

    python benchmarks/watch.py --long --logits logits.npz --streams 10
        writes benchmarks/results/watch-long.csv

How often the monitor finds the shifts by factors within 20,000 samples.
"""

import argparse
import warnings
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recording import in_parallel, write
from rfdlc import Classes, Decider, Utility
from rfdlc.decisions.unfamiliar import FeatureDistance
from rfdlc.monitoring.monitor import (
    LEVELS,
    MISFIT,
    PRIOR,
    STRANGE,
    UTILITY,
    Decided,
    Monitor,
    Reference,
    assess,
)

MONTH, BEFORE, AFTER, WINDOW, NEAR = 30_000, 1000, 1000, 5000, 0.02
LONG = 20_000
KINDS = ("class", "prior", "tail", "factors")
SHIFTS = (0.0, 0.1, 0.2, 0.3)
ABSTAIN = 0.4
COUNTS = np.array([int(500 * 0.01 ** (c / 99)) for c in range(100)])  # of CIFAR100-LT
Array = NDArray[Any]
Row = dict[str, Any]


class Photographs:
    """Kept logits as a population."""

    def __init__(self, path: str, seed: int) -> None:
        file, self.rng = np.load(path), np.random.default_rng(seed)
        self.logits, y = file["test"].astype(np.float32), file["test_y"]
        self.places = np.array([np.flatnonzero(y == c) for c in range(100)])
        self.classes = Classes.from_counts(COUNTS.tolist())
        self.prior, self.held_out, self.unknown = (
            COUNTS / COUNTS.sum(),
            int(COUNTS.sum()),
            0,
        )

    def draw(self, prior: Array, samples: int) -> tuple[Row, Array]:
        y = self.rng.choice(len(prior), samples, p=prior)
        rows = self.places[y, self.rng.integers(0, 100, samples)]
        return {
            "scores": self.logits[:, rows][..., : len(self.prior)],
            "logits": True,
        }, y

    def decider(self) -> Decider:
        utility = Utility.one_hot(self.classes).with_abstain(ABSTAIN)
        return Decider(
            utility,
            combine="mean-logits",
            calibration="prior-corrected-power",
            train_prior="train",
        )

    def without(self) -> "Photographs":
        """Twenty classes that the decider does not have: their columns come last, and
        are left out.
        """
        order = self.rng.permutation(100)
        self.logits, self.places = self.logits[..., order], self.places[order]
        counts = np.array(self.classes.counts)[order][:80]
        self.classes, self.prior = (
            Classes.from_counts(counts.tolist()),
            counts / counts.sum(),
        )
        return self

    def moved(self, samples: int) -> Row:
        familiar, others = np.zeros(100), np.zeros(100)
        familiar[:80], others[80:] = self.prior, 1 / 20
        return self.draw(0.7 * familiar + 0.3 * others, samples)[0]


@cache
def table() -> tuple[Any, FeatureDistance, Array, Array]:
    """A model, its distance of features, and rows with labels from which samples are
    drawn by class.
    """
    from sklearn.datasets import make_classification
    from sklearn.ensemble import HistGradientBoostingClassifier

    options: Row = {
        "n_features": 12,
        "n_informative": 8,
        "n_clusters_per_class": 2,
        "class_sep": 1.5,
    }
    x, y = make_classification(120_000, n_classes=5, **options, random_state=0)
    prior = np.array(PRIOR_OF_TABLE)
    chosen = np.concatenate(
        [np.flatnonzero(y == c)[: int(8000 * share)] for c, share in enumerate(prior)]
    )
    rest = np.setdiff1d(np.arange(len(y)), chosen)
    model = HistGradientBoostingClassifier(max_iter=100, random_state=0).fit(
        x[chosen], y[chosen]
    )
    return model, FeatureDistance.fit(x[chosen], y[chosen]), x[rest], y[rest]


PRIOR_OF_TABLE = (0.7, 0.18, 0.07, 0.03, 0.02)


class Table:
    """Rows of a simulated table."""

    def __init__(self, _: str, seed: int) -> None:
        self.rng, self.prior, self.held_out = (
            np.random.default_rng(seed),
            np.array(PRIOR_OF_TABLE),
            10_000,
        )
        self.model, self.distance, self.x, y = table()
        self.places = [np.flatnonzero(y == c) for c in range(5)]
        self.classes = Classes.from_counts((8000 * self.prior).astype(int).tolist())

    def draw(self, prior: Array, samples: int) -> tuple[Row, Array]:
        y = self.rng.choice(5, samples, p=prior)
        return self.scored(self.x[[self.rng.choice(self.places[c]) for c in y]]), y

    def scored(self, x: Array) -> Row:
        from rfdlc import Predictions

        distance = self.distance(x)
        return {
            "scores": Predictions(
                probabilities=self.model.predict_proba(x), unfamiliarity=distance
            )
        }

    def decider(self) -> Decider:
        utility = Utility.one_hot(self.classes).with_abstain(ABSTAIN)
        return Decider(
            utility, calibration="bias-corrected-temperature", train_prior="train"
        )

    def without(self) -> "Table":
        return self

    def moved(self, samples: int) -> Row:
        x = self.x[
            [
                self.rng.choice(self.places[c])
                for c in self.rng.choice(5, samples, p=self.prior)
            ]
        ].copy()
        x[:, :4] += 1.5 * x.std(axis=0)[:4]
        return self.scored(x)


WORLDS: Row = {"cifar100-lt": Photographs, "table": Table}


def shifted(world: Any, kind: str, size: float) -> Array:
    """A class prior at a total variation from the world's, or as near to it as this
    kind gets.
    """
    return shifted_prior(world.prior, kind, size, world.rng)


def shifted_prior(
    prior: Array, kind: str, size: float, rng: np.random.Generator
) -> Array:
    classes = len(prior)
    drawn = {
        "class": np.eye(classes)[rng.integers(classes)],
        "prior": rng.dirichlet(np.ones(classes)),
        "tail": np.full(classes, 1 / classes),
        "factors": prior * np.exp(rng.choice([-1.0, 1.0], classes)),
    }
    target = drawn[kind] / drawn[kind].sum()
    return prior + min(1.0, size / max(np.abs(target - prior).sum() / 2, 1e-9)) * (
        target - prior
    )


def started(
    name: str, path: str, seed: int, other: bool = False
) -> tuple[Any, Decider, Reference]:
    """A world, its decider and its reference."""
    world = WORLDS[name](path, seed)
    world = world.without() if other else world
    held, y = world.draw(world.prior, world.held_out)
    options = {"logits": True} if "logits" in held else {}
    decider = world.decider().fit(held["scores"], y, **options)
    decider = decider.fit_unfamiliar(held["scores"], y, false_alarm=0.02, **options)
    return world, decider, Reference.fit(decider, held["scores"], y, **options)


def stream(name: str, path: str, seed: int) -> Row:
    """What is seen of all streams with one seed."""
    warnings.simplefilter("ignore")
    world, decider, reference = started(name, path, seed)
    found: Row = {}
    quiet = Monitor(reference, per_month=MONTH)
    for _ in range(MONTH // 5000):
        quiet.update(Decided.of(decider, **world.draw(world.prior, 5000)[0]))
    found["quiet"] = {test: when is not None for test, when in quiet.alarms.items()}
    for kind in KINDS:
        monitor = Monitor(reference, per_month=MONTH)
        monitor.update(Decided.of(decider, **world.draw(world.prior, BEFORE)[0]))
        monitor.update(
            Decided.of(decider, **world.draw(shifted(world, kind, 0.1), AFTER)[0])
        )
        alarm = monitor.alarms[PRIOR]
        found[f"found {kind}"] = alarm is not None and alarm > BEFORE
        found[f"delay {kind}"] = np.nan if alarm is None else alarm - BEFORE
        found[f"trusted {kind}"] = monitor.trusted
    found["found"] = found[f"found {KINDS[seed % 3]}"]
    for size in SHIFTS:
        scores, y = world.draw(shifted(world, KINDS[seed % 3], size), WINDOW)
        decisions = Decided.of(decider, **scores)
        realised = float(decisions.utility.matrix[y, decisions.actions].mean())
        window = assess(reference, decisions)
        found[f"error {size}"] = window.expected_utility - realised
        found[f"covered {size}"] = window.interval[0] <= realised <= window.interval[1]
        found[f"promised {size}"] = float(decisions.expected.mean()) - realised
    world, decider, reference = started(name, path, seed + 10_000, other=True)
    monitor = Monitor(reference, per_month=MONTH)
    monitor.update(Decided.of(decider, **world.draw(world.prior, BEFORE)[0]))
    monitor.update(Decided.of(decider, **world.moved(AFTER)))
    found["distrusted"], found["called label shift"] = (
        not monitor.trusted,
        monitor.trusted and (monitor.alarms[PRIOR] is not None),
    )
    found["unfamiliar"], found["misfit"] = (
        monitor.alarms[test] is not None for test in (STRANGE, MISFIT)
    )
    return found


def long_stream(name: str, path: str, seed: int) -> float:
    """Samples until a shift by factors is found; not a number after 20,000."""
    warnings.simplefilter("ignore")
    world, decider, reference = started(name, path, seed)
    monitor = Monitor(reference, per_month=MONTH)
    monitor.update(Decided.of(decider, **world.draw(world.prior, BEFORE)[0]))
    prior = shifted(world, "factors", 0.1)
    while (alarm := monitor.alarms[PRIOR]) is None and monitor.evidence[
        PRIOR
    ].samples < BEFORE + LONG:
        monitor.update(Decided.of(decider, **world.draw(prior, 1000)[0]))
    return np.nan if alarm is None else alarm - BEFORE


def summary(name: str, streams: list[Row]) -> list[Row]:
    many = f"{name}, {len(streams)} streams"

    def mean(key: str) -> float:
        return float(np.mean([each[key] for each in streams]))

    quiet = {
        test: float(np.mean([each["quiet"][test] for each in streams]))
        for test in (PRIOR, UTILITY, STRANGE, MISFIT)
    }
    any_alarm = float(np.mean([any(each["quiet"].values()) for each in streams]))
    rows: list[Row] = [
        {
            "what": f"{many}: unshifted month with an alarm",
            "value": round(any_alarm, 3),
            "required": "at most 0.05",
        },
        *(
            {"what": f"{many}: unshifted month with an alarm: {test}", "value": v}
            for test, v in quiet.items()
        ),
    ]
    what = (
        f"{many}: shift of 0.1 ({', '.join(KINDS[:3])} in turn) found within {AFTER:,}"
        " samples"
    )
    rows.append(
        {"what": what, "value": round(mean("found"), 3), "required": "at least 0.9"}
    )
    for kind in KINDS:
        delay = np.array([each[f"delay {kind}"] for each in streams])
        middle = (
            "" if np.isnan(delay).all() else f"; median delay {np.nanmedian(delay):.0f}"
        )
        what = f"{many}: shift of 0.1 ({kind}) found within {AFTER:,} samples{middle}"
        rows.append({"what": what, "value": round(mean(f"found {kind}"), 3)})
        rows.append(
            {
                "what": f"{many}: label shift of 0.1 ({kind}) trusted",
                "value": round(mean(f"trusted {kind}"), 3),
            }
        )
    for size in SHIFTS:
        errors = np.array([each[f"error {size}"] for each in streams])
        promised = np.abs([each[f"promised {size}"] for each in streams])
        what = (
            f"{many}: shift of {size}: estimated minus realised utility of {WINDOW:,}"
            " samples"
        )
        value = round(float(np.abs(errors).mean()), 4)
        rows += [
            {
                "what": f"{what}: mean error (reference: promised minus realised)",
                "value": value,
                "reference": round(float(promised.mean()), 4),
                "required": NEAR,
            },
            {
                "what": f"{what}: share within {NEAR}",
                "value": round(float((np.abs(errors) <= NEAR).mean()), 3),
            },
            {"what": f"{what}: bias", "value": round(float(errors.mean()), 4)},
            {
                "what": f"{what}: share in the 95% interval",
                "value": round(mean(f"covered {size}"), 3),
            },
        ]
    rows += [
        {
            "what": f"{many}: covariate shift: estimate not to be trusted",
            "value": round(mean("distrusted"), 3),
        },
        {
            "what": f"{many}: covariate shift: unfamiliar input alarms",
            "value": round(mean("unfamiliar"), 3),
        },
        {
            "what": f"{many}: covariate shift: label shift does not fit",
            "value": round(mean("misfit"), 3),
        },
        {
            "what": f"{many}: covariate shift called label shift",
            "value": mean("called label shift"),
            "required": 0,
        },
    ]
    return rows


def oracle(
    name: str, prior: Array, streams: int = 10_000, unshifted: int = 200_000
) -> list[Row]:
    """The share of shifts that tests of true labels find."""
    rng, rows = np.random.default_rng(0), list[Row]()

    def chi_squared(counts: Array, samples: int) -> Array:
        return np.asarray(
            ((counts - samples * prior) ** 2 / (samples * prior)).sum(axis=-1)
        )

    def size_known(counts: Array, samples: int) -> Array:
        change, expected = (
            0.2,
            samples * prior,
        )  # twice the total variation: all classes by 1.2 or 0.8
        up, down = (
            counts * np.log1p(change) - change * expected,
            counts * np.log1p(-change) + change * expected,
        )
        return np.asarray(np.logaddexp(up, down).sum(axis=-1))

    for samples in (1000, 2000, 3000):
        quiet = rng.multinomial(samples, prior, unshifted)
        for kind in KINDS:
            priors = np.array(
                [shifted_prior(prior, kind, 0.1, rng) for _ in range(streams)]
            )
            counts = rng.multinomial(samples, priors)
            tests = {"chi-squared test": chi_squared}
            if (
                kind == "factors" and len(prior) > 10
            ):  # signs are nearly independent of each other
                tests["size known"] = size_known
            for test, statistic in tests.items():
                null, values = statistic(quiet, samples), statistic(counts, samples)
                for looks, level in (
                    ("one window", 1.0),
                    ("a month of windows", samples / MONTH),
                ):
                    found = float(
                        (values > np.quantile(null, 1 - LEVELS[PRIOR] * level)).mean()
                    )
                    what = (
                        f"{name}, true labels: shift of 0.1 ({kind}) found in"
                        f" {samples:,} samples: {test}, {looks}"
                    )
                    rows.append({"what": what, "value": round(found, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--logits",
        default="",
        help="an .npz file with `test` and `test_y`; without it, the table alone",
    )
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--commit", default="")
    parser.add_argument(
        "--oracle", action="store_true", help="only what tests of true labels find"
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="only shifts by factors, over 20,000 samples",
    )
    given = parser.parse_args()
    if given.oracle:
        priors = {
            "cifar100-lt": COUNTS / COUNTS.sum(),
            "table": np.array(PRIOR_OF_TABLE),
        }
        found = [row for name, prior in priors.items() for row in oracle(name, prior)]
        write("watch-oracle", found, ["rfdlc", "numpy"], given.commit)
        return
    rows: list[Row] = []
    for name in given.worlds.split(","):
        if name == "table" or given.logits:
            each = [
                (name, given.logits, seed)
                for seed in range(given.first, given.first + given.streams)
            ]
            if given.long:
                delays = np.array(list(in_parallel(long_stream, each, given.workers)))
                what = (
                    f"{name}, {len(delays)} streams: shift of 0.1 (factors) found"
                    f" within {LONG:,} samples"
                )
                rows.append(
                    {"what": what, "value": round(float(np.isfinite(delays).mean()), 3)}
                )
            else:
                rows += summary(name, list(in_parallel(stream, each, given.workers)))
    write(
        "watch-long" if given.long else "watch",
        rows,
        ["rfdlc", "numpy", "scikit-learn"],
        given.commit,
    )


if __name__ == "__main__":
    main()
