"""From samples or scores to an answer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rfdlc.decide.rules import RULES, largest
from rfdlc.decide.scores import Floats
from rfdlc.decide.uncertainty import entropy, mutual_information
from rfdlc.decide.utility import Utility
from rfdlc.integrations.server.backends import Backend
from rfdlc.integrations.server.reading import Question

DIGITS = 7  # after the point


@dataclass(frozen=True)
class Answer:
    """Decisions for n samples: columns for the reply, made once for a whole batch, and what they were decided from."""

    utility: Utility
    probabilities: Floats  # (n, C)
    disagreement: Floats  # (n,)
    action: Any  # (n,)
    uncertainty: Floats  # (n,)
    columns: dict[str, list[Any]]  # one entry a sample each

    @classmethod
    def of(cls, utility: Utility, probabilities: Floats, disagreement: Floats) -> "Answer":
        """By the first action of highest expected utility."""
        expected = probabilities @ utility.matrix.astype(probabilities.dtype)
        action, top = RULES["expected-utility"].actions(utility, probabilities), largest(probabilities)
        rows = np.arange(len(expected))
        unsure = entropy(probabilities, normalised=True)
        columns = {
            "action": [utility.actions[i] for i in action.tolist()],
            "expected_utility": _listed(expected[rows, action]),
            "argmax": [utility.classes.names[i] for i in top.tolist()],
            "probability": _listed(probabilities[rows, top]),
            "uncertainty": _listed(unsure),
            "mutual_information": _listed(disagreement),
        }
        return cls(utility, probabilities, disagreement, action, unsure, columns)

    def by(self, utility: Utility) -> "Answer":
        """The same samples, decided by another utility."""
        return Answer.of(utility, self.probabilities, self.disagreement)

    def part(self, rows: slice) -> "Answer":
        """The answer to some of the samples."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        parts = (self.probabilities[rows], self.disagreement[rows], self.action[rows], self.uncertainty[rows])
        return Answer(self.utility, *parts, columns)

    def to_dict(self, full: bool) -> dict[str, Any]:
        """Ready for JSON; `full` adds the tables that were decided from."""
        if not full:
            return self.columns
        expected = self.probabilities @ self.utility.matrix.astype(self.probabilities.dtype)
        return {
            **self.columns,
            "classes": list(self.utility.classes.names),
            "probabilities": _listed(self.probabilities),
            "actions": list(self.utility.actions),
            "expected_utilities": _listed(expected),
        }


def decide_samples(backend: Backend, samples: NDArray[Any]) -> Answer:
    """A whole batch, by the utility of the model."""
    return Answer.of(backend.decider.utility, *backend.compute(samples))


def decide_scores(backend: Backend, question: Question) -> Answer:
    """The scores that a request brought."""
    assert question.scores is not None
    probabilities = np.asarray(backend.decider.probabilities(question.scores))
    return Answer.of(backend.decider.utility, probabilities, mutual_information(question.scores))


def _listed(values: Floats) -> list[Any]:
    listed: list[Any] = np.round(values.astype(np.float64), DIGITS).tolist()
    return listed
