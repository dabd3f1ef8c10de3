"""Figures for Prometheus: requests, latency, decisions, hand-overs, uncertainty, and the class prior that is met."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.decider import Decider
from rfdlc.integrations.server.deciding import Answer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
AT_ONCE = 128  # answers that are counted together: a call of numpy costs the same for one as for many
REMEMBERED = 1000  # samples: how far back the estimate of the class prior looks


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, np.zeros(len(bounds) + 1, dtype=np.int64), 0.0

    def add(self, values: NDArray[Any]) -> None:
        """Some more values."""
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.total += float(values.sum())

    def add_one(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterable[str]:
        """In Prometheus' text format."""
        for bound, count in zip((*self.bounds, "+Inf"), self.counts.cumsum(), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self.total:.9g}"
        yield f"{name}_count {self.counts.sum()}"


class Figures:
    """Updated and read on the event loop alone."""

    def __init__(self, decider: Decider) -> None:
        self.classes = decider.utility.classes.names
        self.requests: Counter[tuple[str, int]] = Counter()
        self.decisions = np.zeros(len(self.classes), dtype=np.int64)
        self.handed_over: Counter[str] = Counter({a: 0 for a in decider.utility.actions if a not in self.classes})
        self.latency, self.uncertainty = Histogram(SECONDS), Histogram(SHARES)
        self.accepted = self.answered = 0
        self._uncounted: list[Answer] = []
        carried = decider.target_prior if decider.target_prior is not None else decider.effective_prior
        uniform = np.full(len(self.classes), 1 / len(self.classes))
        self._carried = None if carried is None else np.maximum(carried, 1e-12)
        self.prior = uniform if carried is None else carried.copy()

    def request(self, path: str, status: int, seconds: float) -> None:
        """An answer that was sent."""
        self.requests[path, status] += 1
        if path == "/decide":
            self.latency.add_one(seconds)

    def decided(self, answer: Answer) -> None:
        """Decisions that were made; they are counted a little later."""
        self._uncounted.append(answer)
        if len(self._uncounted) >= AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Actions of a request's own utility that name no class count as one kind: `other`."""
        if not self._uncounted:
            return
        answers, self._uncounted = self._uncounted, []
        decided = np.concatenate([answer.utility.decided_class[answer.action] for answer in answers])
        self.decisions += np.bincount(decided[decided >= 0], minlength=len(self.classes))
        if (decided < 0).any():
            self._hand_over(answers)
        self.uncertainty.add(np.minimum(np.concatenate([answer.uncertainty for answer in answers]), 1.0))
        self._follow(np.concatenate([answer.probabilities for answer in answers]).astype(np.float64))

    def _hand_over(self, answers: list[Answer]) -> None:
        for answer in answers:
            for action in answer.action[answer.utility.decided_class[answer.action] < 0]:
                name = answer.utility.actions[action]
                self.handed_over[name if name in self.handed_over else "other"] += 1

    def _follow(self, p: NDArray[np.float64]) -> None:
        """A step of online EM: posteriors under the present estimate, averaged into it; the far past fades."""
        posterior = p if self._carried is None else p * (self.prior / self._carried)
        total = posterior.sum(axis=1, keepdims=True)
        mean = (posterior / np.maximum(total, 1e-300)).mean(axis=0)
        share = len(p) / (len(p) + REMEMBERED)
        self.prior = (1 - share) * self.prior + share * mean

    @property
    def waiting(self) -> int:
        """Requests that were accepted and are not answered yet."""
        return self.accepted - self.answered

    def text(self) -> str:
        """The page that Prometheus reads."""
        self._count()
        lines = [
            *_family("rfdlc_requests_total", "counter", "Answers by path and status."),
            *(f'rfdlc_requests_total{{path="{p}",status="{s}"}} {n}' for (p, s), n in sorted(self.requests.items())),
            *_family("rfdlc_request_seconds", "histogram", "Time to answer POST /decide."),
            *self.latency.lines("rfdlc_request_seconds"),
            *_family("rfdlc_waiting_requests", "gauge", "Requests accepted and not answered yet."),
            f"rfdlc_waiting_requests {self.waiting}",
            *_family("rfdlc_decisions_total", "counter", "Decisions for a class."),
            *_by_class("rfdlc_decisions_total", self.classes, self.decisions),
            *_family("rfdlc_abstentions_total", "counter", "Samples handed over, by action."),
            *_by_class("rfdlc_abstentions_total", self.handed_over, self.handed_over.values(), "action"),
            *_family("rfdlc_uncertainty", "histogram", "Entropy of the probabilities over log C."),
            *self.uncertainty.lines("rfdlc_uncertainty"),
            *_family("rfdlc_class_prior", "gauge", f"Estimated share of each class (EM, about {REMEMBERED} samples)."),
            *_by_class("rfdlc_class_prior", self.classes, (f"{share:.6g}" for share in self.prior)),
        ]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _by_class(name: str, labels: Iterable[str], values: Iterable[Any], key: str = "class") -> Iterable[str]:
    return (f'{name}{{{key}="{_escaped(label)}"}} {value}' for label, value in zip(labels, values, strict=True))


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
