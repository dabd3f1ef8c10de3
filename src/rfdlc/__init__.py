"""rfdlc: reliable decisions on long-tailed data. Train once, calibrate, decide for any utility.

Public names load on first use, so that `import rfdlc` is cheap and never loads torch, pandas or matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rfdlc.data.dataset import Dataset as Dataset
    from rfdlc.data.dataset import Split as Split
    from rfdlc.data.load import load as load
    from rfdlc.decide.classes import Classes as Classes
    from rfdlc.decide.decider import Decider as Decider
    from rfdlc.decide.evaluation import Evaluation as Evaluation
    from rfdlc.decide.evaluation import evaluate as evaluate
    from rfdlc.decide.predictions import Predictions as Predictions
    from rfdlc.decide.utility import Utility as Utility
    from rfdlc.errors import InputError as InputError
    from rfdlc.integrations.onnx.exporting import export as export
    from rfdlc.integrations.onnx.model import OnnxModel as OnnxModel
    from rfdlc.integrations.predict.predicting import predict as predict
    from rfdlc.integrations.report.report import report as report
    from rfdlc.integrations.report.runs import compare as compare
    from rfdlc.integrations.server.client import Client as Client
    from rfdlc.integrations.sklearn.estimator import RFDLCClassifier as RFDLCClassifier
    from rfdlc.integrations.sklearn.scoring import make_utility_scorer as make_utility_scorer
    from rfdlc.integrations.sklearn.utility_classifier import UtilityClassifier as UtilityClassifier
    from rfdlc.training.config import TrainConfig as TrainConfig
    from rfdlc.training.model import Model as Model
    from rfdlc.training.train import (
        RunSpec as RunSpec,
    )
    from rfdlc.training.train import (
        fork as fork,
    )
    from rfdlc.training.train import (
        resume as resume,
    )
    from rfdlc.training.train import (
        train as train,
    )
    from rfdlc.training.train import (
        train_many as train_many,
    )

# The modules that define the public names.
_MODULES = {
    "data.dataset": "Dataset Split",
    "data.load": "load",
    "decide.classes": "Classes",
    "decide.decider": "Decider",
    "decide.evaluation": "Evaluation evaluate",
    "decide.predictions": "Predictions",
    "decide.utility": "Utility",
    "errors": "InputError",
    "integrations.onnx.exporting": "export",
    "integrations.onnx.model": "OnnxModel",
    "integrations.predict.predicting": "predict",
    "integrations.report.report": "report",
    "integrations.report.runs": "compare",
    "integrations.server.client": "Client",
    "integrations.sklearn.estimator": "RFDLCClassifier",
    "integrations.sklearn.scoring": "make_utility_scorer",
    "integrations.sklearn.utility_classifier": "UtilityClassifier",
    "training.config": "TrainConfig",
    "training.model": "Model",
    "training.train": "RunSpec fork resume train train_many",
}
_HOME = {name: f"rfdlc.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rfdlc' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
