"""The public names.

`__init__.py` reads here which module defines each, and type checkers and editors do
too.
"""

from rfdlc.data.dataset import Dataset as Dataset
from rfdlc.data.dataset import Split as Split
from rfdlc.data.load import load as load
from rfdlc.decide.budgets import PerDay as PerDay
from rfdlc.decide.classes import Classes as Classes
from rfdlc.decide.decider import Decider as Decider
from rfdlc.decide.evaluation import Evaluation as Evaluation
from rfdlc.decide.evaluation import evaluate as evaluate
from rfdlc.decide.labels import Mislabelled as Mislabelled
from rfdlc.decide.labels import find_mislabelled as find_mislabelled
from rfdlc.decide.predictions import Predictions as Predictions
from rfdlc.decide.streams import StreamController as StreamController
from rfdlc.decide.utility import Utility as Utility
from rfdlc.errors import InputError as InputError
from rfdlc.integrations.deciding import decide_lake as decide_lake
from rfdlc.integrations.embedding import embed as embed
from rfdlc.integrations.evaluating import evaluate_lake as evaluate_lake
from rfdlc.integrations.onnx.exporting import export as export
from rfdlc.integrations.onnx.model import OnnxModel as OnnxModel
from rfdlc.integrations.predicting import predict as predict
from rfdlc.integrations.report.report import report as report
from rfdlc.integrations.report.runs import compare as compare
from rfdlc.integrations.server.client import Client as Client
from rfdlc.integrations.sklearn.estimator import RFDLCClassifier as RFDLCClassifier
from rfdlc.integrations.sklearn.scoring import (
    make_utility_scorer as make_utility_scorer,
)
from rfdlc.integrations.sklearn.utility_classifier import (
    UtilityClassifier as UtilityClassifier,
)
from rfdlc.integrations.watching import recalibrate as recalibrate
from rfdlc.integrations.watching import watch as watch
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
