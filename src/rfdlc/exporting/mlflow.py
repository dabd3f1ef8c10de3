"""MLflow: a model of this library as an `mlflow.pyfunc` model, which takes inputs and
gives decisions.

The stored model is a folder of `Model.save_pretrained` and the name of this module,
which loads it: nothing is pickled.
"""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rfdlc import __version__
from rfdlc.errors import expect
from rfdlc.training.model import Model


class Deciding:
    """What `mlflow.pyfunc.load_model(...).predict` calls."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """A data frame with one row per sample: the action, its expected utility, and
        the probability of each class.
        """
        import pandas

        array = self.model.encoder is None and hasattr(model_input, "columns")
        found = self.model.predict(model_input.to_numpy() if array else model_input)
        explained = self.model.decider.explain(found)
        chosen = {
            "action": [explained.actions[i] for i in explained.action],
            "expected_utility": explained.value,
        }
        columns = zip(
            self.model.classes.names,
            np.asarray(self.model.decider.probabilities(found)).T,
            strict=True,
        )
        return pandas.DataFrame(
            chosen | {f"p({name})": column for name, column in columns}
        )


def _load_pyfunc(path: str) -> Deciding:
    """MLflow calls this with the stored folder."""
    return Deciding(Model.from_pretrained(path))


def save_model(model: Model, path: str | Path, **options: Any) -> None:
    """Save a model with its decider as a folder of MLflow; `options` are passed to
    `mlflow.pyfunc.save_model`.
    """
    with TemporaryDirectory() as folder:
        _pyfunc().save_model(str(path), **_described(model, folder), **options)


def log_model(model: Model, name: str = "model", **options: Any) -> Any:
    """Log a model to the active run of MLflow, and return its `ModelInfo`.

    `options` are passed to `mlflow.pyfunc.log_model`.

    Examples
    --------
    >>> info = log_model(Model.load("runs/a"))  # doctest: +SKIP
    >>> mlflow.pyfunc.load_model(info.model_uri).predict(images)  # doctest: +SKIP
    """
    with TemporaryDirectory() as folder:
        return _pyfunc().log_model(name=name, **_described(model, folder), **options)


def _pyfunc() -> Any:
    expect(
        find_spec("mlflow") is not None,
        'MLflow is not installed: pip install "rfdlc[log]"',
    )
    import mlflow.pyfunc

    return mlflow.pyfunc


def _described(model: Model, folder: str) -> dict[str, Any]:
    stored = str(model.save_pretrained(Path(folder, "run")))
    networks = (
        model.config.backbone,
        "" if model.embedding is None else model.embedding.backbone,
    )
    vision = ",vision" if any(name.startswith("timm:") for name in networks) else ""
    needs = [f"rfdlc[train,tables{vision}]=={__version__}"]
    return {"loader_module": __name__, "data_path": stored, "pip_requirements": needs}
