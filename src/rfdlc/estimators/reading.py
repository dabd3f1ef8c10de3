"""Features of an estimator's X: of arrays, and of data frames with texts and dates;
both may have missing values.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.utils.validation import check_array, validate_data

from rfdlc.data.columns import parse_columns, without_identities
from rfdlc.data.frames import categorical, frame_columns, list_of, with_items
from rfdlc.data.table import TableEncoder, blurred
from rfdlc.errors import expect, listing

WIDE = (np.float64, np.float32)


class ReadingMixin:
    """Reads X: `fit` learns `encoder_` where cells are missing or not numbers,
    `left_out_`, and `median_`.
    """

    def _features(self: Any, X: Any, reset: bool) -> Any:
        """Finite features (N, F), dense or sparse: texts, dates and missing values as
        `rfdlc train` encodes them.
        """
        X = self._without_names(X, reset)
        if reset:
            self.encoder_ = _encoder(X) if _needs_encoding(X) else None
        encoder = self.encoder_
        by_name = hasattr(X, "columns") and (
            reset or hasattr(self, "feature_names_in_")
        )
        if encoder is not None and (by_name or not _holds_numbers(encoder)):
            expect(
                hasattr(X, "columns"),
                f"X has no columns: expected {encoder.expected}, as in fit",
            )
            validate_data(
                self, X, reset=reset, skip_check_array=True
            )  # the names of columns
            features = check_array(encoder.transform(_columns(X)), estimator=self)
        else:
            X = validate_data(
                self,
                X,
                accept_sparse="csr",
                dtype=WIDE,
                ensure_all_finite="allow-nan",
                reset=reset,
            )
            features = self._without_missing(X, reset)
        if reset:
            self.median_ = (
                np.zeros(X.shape[1]) if issparse(X) else np.median(features, axis=0)
            )
            self.offset_ = _offsets(features, self.median_)
        return features

    def _without_names(self: Any, X: Any, reset: bool) -> Any:
        """A data frame without the columns that only named rows in training; `fit`
        learns which these are.
        """
        if reset:
            columns = _columns(X) if hasattr(X, "columns") else {}
            names = without_identities(columns, "X", categorical(X)) if columns else []
            kept = {list_of(name) or name for name in names}
            self.left_out_ = tuple(
                name for name in map(str, getattr(X, "columns", ())) if name not in kept
            )
        if not hasattr(X, "columns") or not self.left_out_:
            return X
        return X[[name for name in X.columns if str(name) not in self.left_out_]]

    def _without_missing(self: Any, X: Any, reset: bool) -> Any:
        """Numbers (N, F) that may be NaN: encoded if training had some, otherwise
        filled with medians and a warning.
        """
        values = X.data if issparse(X) else X
        known = not np.isnan(values).any()
        expect(
            known or not issparse(X),
            "X is sparse and holds NaN: missing values need an array, X.toarray()",
        )
        if reset and not known:
            self.encoder_ = TableEncoder.fit(_by_place(X, range(X.shape[1])), "X")
        if (encoder := self.encoder_) is not None:
            return encoder.transform(
                _by_place(dense(X), [column.name for column in encoder.columns])
            )
        if known:
            return X
        missing = np.isnan(X).any(axis=0)
        names = getattr(self, "feature_names_in_", np.arange(len(missing)).astype(str))[
            missing
        ].tolist()
        told = (
            f"column {listing(map(repr, names))} has missing values, but had none in"
            " training"
        )
        warnings.warn(f"{told}: the model uses the median there", stacklevel=2)
        return np.where(np.isnan(X), self.median_, X)

    def _narrowed(self: Any, X: Any) -> NDArray[np.float32]:
        """Dense features in 32 bits, without their offsets."""
        moved = dense(X) - self.offset_ if self.offset_.any() else X
        return dense(
            check_array(
                moved,
                accept_sparse="csr",
                dtype=np.float32,
                input_name="X",
                estimator=self,
            )
        )


def _encoder(X: Any) -> TableEncoder:
    kinds = categorical(X)
    columns, strays = parse_columns(_columns(X), kinds)
    return TableEncoder.fit(columns, "X", kinds, strays)


def _columns(X: Any) -> dict[str, Any]:
    """Columns of a data frame by name."""
    return with_items(frame_columns(X))


def _by_place(X: NDArray[Any], names: Sequence[object]) -> dict[str, NDArray[Any]]:
    """Columns of an array by the names of a data frame with its columns in the same
    order.
    """
    return {str(name): column for name, column in zip(names, X.T, strict=True)}


def _needs_encoding(X: Any) -> bool:
    """Whether X is a data frame with columns that are not numbers, or with missing
    ones.
    """
    if categorical(X):
        return True
    columns = (
        [np.asarray(X[name]) for name in X.columns] if hasattr(X, "columns") else []
    )
    kinds = [column.dtype.kind for column in columns]
    return any(
        k not in "iufb" or (k == "f" and np.isnan(c).any())
        for k, c in zip(kinds, columns, strict=True)
    )


def _holds_numbers(encoder: TableEncoder) -> bool:
    """Whether each column is one of numbers, as those of an array, or was empty in
    training.
    """
    return not any(
        column.categories or column.is_date or column.of_list
        for column in encoder.columns
    )


def _offsets(X: Any, median: NDArray[Any]) -> NDArray[np.float64]:
    """The median of each feature that loses precision in 32 bits, 0 for all others
    (F,).
    """
    if issparse(X) or X.dtype.itemsize <= 4:
        return np.zeros(X.shape[1])
    with np.errstate(
        over="ignore"
    ):  # values too large for 32 bits raise in `_narrowed`
        return np.where([blurred(feature) for feature in X.T], median, 0.0)


def dense(X: Any) -> NDArray[Any]:
    return np.ascontiguousarray(X.toarray() if issparse(X) else X)
