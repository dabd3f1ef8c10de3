"""The public names.

`__init__.py` reads here which module defines each, and type checkers and editors do
too.
"""

from rfdlc.data.dataset import Dataset as Dataset
from rfdlc.data.dataset import Split as Split
from rfdlc.data.load import load as load
from rfdlc.decisions.budgets import PerDay as PerDay
from rfdlc.decisions.decider import Decider as Decider
from rfdlc.decisions.streams import StreamController as StreamController
from rfdlc.decisions.utility import Utility as Utility
from rfdlc.errors import InputError as InputError
from rfdlc.estimators.estimator import RFDLCClassifier as RFDLCClassifier
from rfdlc.estimators.scoring import (
    make_utility_scorer as make_utility_scorer,
)
from rfdlc.estimators.utility_classifier import (
    UtilityClassifier as UtilityClassifier,
)
from rfdlc.evaluation.evaluate import Evaluation as Evaluation
from rfdlc.evaluation.evaluate import evaluate as evaluate
from rfdlc.evaluation.mislabelled import Mislabelled as Mislabelled
from rfdlc.evaluation.mislabelled import find_mislabelled as find_mislabelled
from rfdlc.exporting.export import export as export
from rfdlc.lakes.decide import decide_lake as decide_lake
from rfdlc.lakes.evaluate import evaluate_lake as evaluate_lake
from rfdlc.monitoring.watch import recalibrate as recalibrate
from rfdlc.monitoring.watch import watch as watch
from rfdlc.predicting.embed import embed as embed
from rfdlc.predicting.onnx_model import OnnxModel as OnnxModel
from rfdlc.predicting.predict import predict as predict
from rfdlc.probabilities.classes import Classes as Classes
from rfdlc.probabilities.predictions import Predictions as Predictions
from rfdlc.reporting.report import report as report
from rfdlc.reporting.runs import compare as compare
from rfdlc.serving.client import Client as Client
from rfdlc.training.config import TrainConfig as TrainConfig
from rfdlc.training.cross_validation import cross_validate as cross_validate
from rfdlc.training.model import Model as Model
from rfdlc.training.sweep import sweep as sweep
from rfdlc.training.train import RunSpec as RunSpec
from rfdlc.training.train import fork as fork
from rfdlc.training.train import resume as resume
from rfdlc.training.train import train as train
from rfdlc.training.train import train_many as train_many

__version__: str
