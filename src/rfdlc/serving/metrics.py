"""Prometheus metrics: requests, latency, decisions, abstentions, uncertainty, and an
estimate of the class prior.
"""

from collections import Counter as Counts
from itertools import chain

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import UNFAMILIAR
from rfdlc.monitoring.feedback import Realised, decider_version
from rfdlc.monitoring.monitor import Monitor
from rfdlc.serving.backend import Answer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# samples that are counted together: a numpy call costs the same for one as for many
DEFERRED = 128
WINDOW = 1000  # samples: how far back the estimate of the class prior looks


class Metrics:
    """Updated and read on the event loop only."""

    def __init__(self, decider: Decider) -> None:
        self.registry = registry = CollectorRegistry()
        self.classes, self.accepted, self.answered = decider.utility.classes.names, 0, 0
        self._requests = Counter(
            "rfdlc_requests", "Responses.", ("path", "status"), registry=registry
        )
        self._latency = Histogram(
            "rfdlc_request_seconds",
            "Time of POST /decide.",
            buckets=SECONDS,
            registry=registry,
        )
        waiting = Gauge(
            "rfdlc_waiting_requests",
            "Requests accepted and not answered yet.",
            registry=registry,
        )
        waiting.set_function(lambda: self.waiting)
        decisions = Counter(
            "rfdlc_decisions", "Decisions for a class.", ("class",), registry=registry
        )
        abstentions = Counter(
            "rfdlc_abstentions",
            "Samples handed over, by action.",
            ("action",),
            registry=registry,
        )
        self._other = abstentions.labels(
            "other"
        )  # a utility that came with a request may have unknown actions
        handed_over = sorted({*decider.utility.actions} - {*self.classes})
        self._actions = {name: abstentions.labels(name) for name in handed_over}
        self._actions |= {name: decisions.labels(name) for name in self.classes}
        self._uncertainty = Histogram(
            "rfdlc_uncertainty",
            "Entropy over log C.",
            buckets=FRACTIONS,
            registry=registry,
        )
        prior = Gauge(
            "rfdlc_class_prior",
            f"By EM, about {WINDOW} samples.",
            ("class",),
            registry=registry,
        )
        self._shares = [prior.labels(name) for name in self.classes]
        self._deferred: list[Answer] = []
        self._samples = 0  # of these
        self._utility = Gauge(
            "rfdlc_expected_utility",
            f"Mean, about {WINDOW} samples.",
            registry=registry,
        )
        self._reference = Gauge(
            "rfdlc_reference_utility", "Realised by held-out data.", registry=registry
        )
        self._reference.set(np.nan)  # not known before decisions are logged
        self._shift = Gauge(
            "rfdlc_class_prior_shift",
            "Total variation from the prior decided for.",
            registry=registry,
        )
        self._unfamiliar = Counter(
            "rfdlc_unfamiliar", "Samples handed over as unfamiliar.", registry=registry
        )
        self._unseen = Counter(
            "rfdlc_unseen_categories",
            "Rows of requests with warnings.",
            registry=registry,
        )
        self._alarms = Gauge(
            "rfdlc_alarm",
            "1 after an alarm of a sequential test.",
            ("test",),
            registry=registry,
        )
        self._evidence = Gauge(
            "rfdlc_evidence", "E-value of a test.", ("test",), registry=registry
        )
        self._labels = Counter(
            "rfdlc_feedback", "Labels of earlier decisions.", registry=registry
        )
        self._realised = Gauge(
            "rfdlc_realised_utility",
            "From labels: value, low, high.",
            ("of",),
            registry=registry,
        )
        self._dropped = Gauge(
            "rfdlc_unlogged_decisions",
            "Decisions that were not logged.",
            registry=registry,
        )
        self._info = Gauge(
            "rfdlc_decider_info",
            "The decider that is served.",
            ("version",),
            registry=registry,
        )
        self._seen, self._mean = 0, 0.0
        self.follow(decider)

    def follow(self, decider: Decider) -> None:
        """Another decider is served from now on."""
        if self._deferred:
            self._flush()
        carried = decider.model.decided_prior
        self._carried = None if carried is None else np.maximum(carried, 1e-12)
        self.prior = (
            np.full(len(self.classes), 1 / len(self.classes))
            if carried is None
            else carried.copy()
        )
        self._info.clear()
        self._info.labels(decider_version(decider)).set(1)

    @property
    def moved(self) -> float:
        """The total variation of the estimated class prior from the one that is decided
        for.
        """
        return (
            0.0
            if self._carried is None
            else float(np.abs(self.prior - self._carried).sum() / 2)
        )

    def count_feedback(self, labels: int, found: Realised | None) -> None:
        """Labels that came, and the utility that all labels so far show."""
        self._labels.inc(labels)
        if found is not None:
            for name, value in zip(
                ("value", "low", "high"),
                (found.utility, *(found.interval or ())),
                strict=False,
            ):
                self._realised.labels(name).set(value)

    def count_unseen(self, rows: int) -> None:
        """Rows of a request with categories, far numbers or missing values that
        training did not see.
        """
        self._unseen.inc(rows)

    @property
    def waiting(self) -> int:
        return self.accepted - self.answered

    def count_request(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        if path == "/decide":
            self._latency.observe(seconds)

    def count_decisions(self, answer: Answer) -> None:
        """Decisions that were made; they are counted a little later."""
        self._deferred.append(answer)
        self._samples += len(answer.probabilities)
        if self._samples >= DEFERRED:
            self._flush()

    def text(self, dropped: int = 0, monitor: Monitor | None = None) -> bytes:
        """The page that Prometheus reads, with the decisions that a log has `dropped`
        and what its monitor sees.
        """
        self._dropped.set(dropped)
        if monitor is not None:
            self._reference.set(monitor.reference.values()["realised_utility"])
            for test, alarm in monitor.alarms.items():
                self._alarms.labels(test).set(alarm is not None)
            for test, evidence in monitor.evidence.items():
                self._evidence.labels(test).set(evidence.value)
        if self._deferred:
            self._flush()
        self._shift.set(self.moved)
        self._utility.set(self._mean if self._seen else np.nan)
        for share, value in zip(self._shares, self.prior, strict=True):
            share.set(value)
        return generate_latest(self.registry)

    def _flush(self) -> None:
        answers, self._deferred, self._samples = self._deferred, [], 0
        columns = [answer.columns for answer in answers]
        for name, count in Counts(
            chain.from_iterable(table["action"] for table in columns)
        ).items():
            self._actions.get(name, self._other).inc(count)
        for value in chain.from_iterable(table["uncertainty"] for table in columns):
            self._uncertainty.observe(min(value, 1.0))
        values = [value for table in columns for value in table["expected_utility"]]
        self._unfamiliar.inc(
            sum(reason == UNFAMILIAR for table in columns for reason in table["reason"])
        )
        self._seen = min(self._seen + len(values), WINDOW)
        self._mean += (float(np.mean(values)) - self._mean) * min(
            1.0, len(values) / max(self._seen, 1)
        )
        # A step of online EM: the mean posterior under the current estimate, averaged
        # into it.
        p = np.concatenate([answer.probabilities for answer in answers]).astype(
            np.float64
        )
        posterior = p if self._carried is None else p * (self.prior / self._carried)
        mean = (
            posterior / np.maximum(posterior.sum(axis=1, keepdims=True), 1e-300)
        ).mean(axis=0)
        weight = len(p) / (len(p) + WINDOW)
        self.prior = (1 - weight) * self.prior + weight * mean
