"""DecideTable: from tables of scores to tables of decisions, for any engine that maps
tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rfdlc.decisions.decider import Decider
from rfdlc.decisions.rules import Explanation
from rfdlc.decisions.sets import PredictionSets, set_texts
from rfdlc.errors import InputError, listing
from rfdlc.lakes.reading import predictions_of
from rfdlc.probabilities.classes import Indices
from rfdlc.probabilities.scores import Floats

DECISION = (("action", "string"), ("expected_utility", "float32"))


@dataclass(frozen=True)
class DecideTable:
    """A picklable function from tables of scores to tables of decisions, for any engine
    that maps tables.

    Parameters
    ----------
    decider : Decider
    keep : sequence of str
        Columns that are copied.
    logits : bool
        Whether the columns of the classes hold logits.

    Examples
    --------
    >>> import pyarrow
    >>> from rfdlc import Utility
    >>> decide = DecideTable(
    ...     Decider(Utility([[1, 0], [-5, 1]], ["healthy", "ill"])), keep=["id"]
    ... )
    >>> decide(
    ...     pyarrow.table({"id": [7, 8], "healthy": [0.9, 0.7], "ill": [0.1, 0.3]})
    ... ).select([0, 1]).to_pydict()
    {'id': [7, 8], 'action': ['healthy', 'ill']}
    """

    decider: Decider
    keep: Sequence[str] = ()
    logits: bool = False

    def __post_init__(self) -> None:
        sets = self.decider.sets
        if isinstance(sets, PredictionSets) and sets.ties is not None:
            raise InputError(
                "randomised sets depend on the order of all samples: fit sets that are"
                " not randomised"
            )
        written = {name for name, _ in (*DECISION, *self._detail_fields())}
        clash = [name for name in self.keep if name in written]
        if clash:
            raise InputError(
                f"column {listing(clash)} cannot be kept: decisions are written to a"
                " column of this name"
            )

    def __call__(self, table: Any) -> Any:
        """The decisions of a `pyarrow.Table` or `RecordBatch`, in the order of its
        rows.
        """
        import pyarrow

        kept = {name: table.column(name) for name in self.keep}
        fields = [table.schema.field(name) for name in self.keep]
        return pyarrow.table(
            {**kept, **self.columns(table)},
            pyarrow.schema([*fields, *DECISION, *self._detail_fields()]),
        )

    def columns(self, table: Any, where: str = "table") -> dict[str, Any]:
        """The columns of decisions by name: arrays of numpy, and of pyarrow for
        texts.
        """
        from pyarrow import array

        detail_fields = self._detail_fields()
        if not table.num_rows:
            details = {name: array([], kind) for name, kind in detail_fields}
            return self._columns(np.empty(0, dtype=np.intp), np.empty(0), details)
        # Sums over the classes, as in a softmax, would be rounded otherwise in another
        # layout.
        by_columns = (
            not detail_fields
            and self.decider.model.calibrator is None
            and not self.logits
            and self.decider.gains_tell
        )
        predictions = predictions_of(
            table,
            self.decider.utility.classes,
            logits=self.logits,
            where=where,
            by_columns=by_columns,
        )
        if not detail_fields:
            return self._columns(*self.decider.decide_values(predictions), {})
        explanation = self.decider.explain(predictions)
        return self._columns(
            explanation.action, explanation.value, self._details(explanation)
        )

    def _columns(
        self, action: Indices, value: Floats, details: dict[str, Any]
    ) -> dict[str, Any]:
        from pyarrow import DictionaryArray, array

        names = self.decider.utility.actions
        codes = action.astype(np.int8 if len(names) < 128 else np.int32)
        return {
            "action": DictionaryArray.from_arrays(codes, array(names, "string")),
            "expected_utility": value.astype(np.float32),
            **details,
        }

    def _details(self, explanation: Explanation) -> dict[str, Any]:
        """Why samples are handed over, and sets, where the decider has them."""
        from pyarrow import array

        details: dict[str, Any] = {"reason": array(explanation.reason, "string")}
        sets = explanation.sets
        if sets is not None:
            texts = set_texts(sets, self.decider.utility.classes)
            details["set"] = array(texts, "string")
            details["set_size"] = sets.sum(axis=1).astype(np.int32)
        return {name: details[name] for name, _ in self._detail_fields()}

    def _detail_fields(self) -> list[tuple[str, str]]:
        fields = []
        if (self.decider.utility.decided_class < 0).any():
            fields.append(("reason", "string"))
        if self.decider.sets is not None:
            fields += [("set", "string"), ("set_size", "int32")]
        return fields
