"""Deciding a million samples costs no more than the bare matrix product, and no more
memory.

    python benchmarks/decide.py        writes benchmarks/results/decide.csv

Every figure is a ratio against a reference in the same run: the median of several
repetitions, taken in turns.
"""

import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from sklearn.metrics import accuracy_score, log_loss

import rfdlc
from recording import write

SAMPLES, CLASSES, REPETITIONS = 1_000_000, 100, 7
MANY_SAMPLES, MANY = 2_000, 10_000


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(
    ours: Callable[[], object], reference: Callable[[], object], times: int
) -> tuple[float, float]:
    """Median seconds of both, alternating so that a change of the machine's pace meets
    both.
    """
    pairs = [(seconds(ours), seconds(reference)) for _ in range(times)]
    return statistics.median(p[0] for p in pairs), statistics.median(
        p[1] for p in pairs
    )


def extra_memory(work: Callable[[], object]) -> int:
    """Bytes at the peak of the work beyond what was allocated before."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def import_seconds(module: str) -> float:
    code = (
        f"import time; t = time.perf_counter(); import {module};"
        " print(time.perf_counter() - t)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        for _ in range(9)
    ]
    return statistics.median(float(run.stdout) for run in runs)


def ratio_row(
    what: str, ours: float, reference: float, name: str, limit: float
) -> dict[str, object]:
    return {
        "what": what,
        "value": f"{ours:.4f}",
        "unit": "s",
        "reference": f"{name}: {reference:.4f} s",
        "ratio": f"{ours / reference:.3f}",
        "required": f"<= {limit}",
    }


def rows() -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    p = rng.random((SAMPLES, CLASSES), dtype=np.float32) ** 8
    p /= p.sum(axis=1, keepdims=True)
    y = rng.integers(0, CLASSES, SAMPLES)
    classes = rfdlc.Classes.from_counts(
        (500 * 100 ** (-np.arange(CLASSES) / (CLASSES - 1))).astype(int)
    )
    utility = rfdlc.Utility.tail_sensitive(classes)
    matrix = utility.matrix.astype(np.float32)
    plain = rfdlc.Decider(utility)
    corrected = rfdlc.Decider(utility, train_prior="train", target_prior="uniform")
    fitted = rfdlc.Decider(utility).fit(
        p[:20_000], (p[:20_000].argmax(axis=1) + (rng.random(20_000) < 0.3)) % CLASSES
    )
    gains = p @ matrix  # what is chosen is the best, or tied but for rounding
    assert (
        gains.max(axis=1) - gains[np.arange(SAMPLES), plain.decide(p)] <= 2e-6
    ).all()
    del gains

    bare = "(p @ U).argmax(1)"
    for what, decider in (("decide", plain), ("decide, prior corrected", corrected)):
        ours, reference = in_turns(
            partial(decider.decide, p),
            lambda: (p @ matrix).argmax(axis=1),
            REPETITIONS,
        )
        yield ratio_row(f"{what}, 1,000,000 x 100 float32", ours, reference, bare, 1.3)
    ours, reference = in_turns(
        lambda: fitted.decide(p), lambda: (p @ matrix).argmax(axis=1), REPETITIONS
    )
    yield ratio_row(
        "decide, temperature fitted (log and exp of every number)",
        ours,
        reference,
        bare,
        1.3,
    ) | {"required": ""}

    many = rng.random((MANY_SAMPLES, MANY), dtype=np.float32)
    many /= many.sum(axis=1, keepdims=True)
    large = rfdlc.Utility.tail_sensitive(
        rfdlc.Classes.from_counts(np.arange(MANY, 0, -1))
    )
    table, decider = large.matrix.astype(np.float32), rfdlc.Decider(large)
    ours, reference = in_turns(
        lambda: decider.decide(many), lambda: (many @ table).argmax(axis=1), 3
    )
    yield ratio_row(
        f"decide, {MANY_SAMPLES:,} x {MANY:,} float32", ours, reference, bare, 1.5
    )

    peak = 1 + extra_memory(lambda: plain.decide(p)) / p.nbytes
    yield {
        "what": "decide, peak memory over the input's",
        "value": f"{peak * p.nbytes / 2**20:.0f}",
        "unit": "MiB",
        "reference": f"input: {p.nbytes / 2**20:.0f} MiB",
        "ratio": f"{peak:.3f}",
        "required": "<= 1.5",
    }

    def scikit() -> None:
        accuracy_score(y, p.argmax(axis=1))
        log_loss(y, p, labels=np.arange(CLASSES))

    ours, reference = in_turns(lambda: rfdlc.evaluate(p, y, plain), scikit, 3)
    yield ratio_row(
        "evaluate, all metrics", ours, reference, "accuracy_score + log_loss", 5
    )
    yield ratio_row(
        "import rfdlc",
        import_seconds("rfdlc"),
        import_seconds("numpy"),
        "import numpy",
        1.2,
    )


if __name__ == "__main__":
    print(write("decide", rows(), ("rfdlc", "numpy", "scikit-learn")))
