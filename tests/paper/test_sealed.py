"""Nothing that trains, calibrates or chooses can read test labels: they are sealed
until the final evaluation.
"""

import numpy as np
import pytest

from rfdlc.data.dataset import Dataset, Split
from rfdlc.training import trainer
from rfdlc.training.train import RunSpec, train, train_many

pytestmark = pytest.mark.usefixtures("quick_tables")


class Sealed:
    """Labels that only tell how many they are, until they are opened."""

    def __init__(self, labels):
        self._labels, self.open = labels, False

    def __len__(self):
        return len(self._labels)

    def __getattr__(self, name):
        if not self.open:
            raise AssertionError(
                f"test labels were read (.{name}) before the final evaluation"
            )
        return getattr(self._labels, name)

    def __array__(self, dtype=None, copy=None):
        return self.__getattr__("__array__")()

    def __getitem__(self, positions):
        return self.__getattr__("__getitem__")(positions)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [40, 20, 10])
    train_part = Split((rng.normal(size=(70, 4)) + y[:, None]).astype(np.float32), y)
    test_part = Split(
        rng.normal(size=(30, 4)).astype(np.float32), Sealed(np.arange(30) % 3)
    )
    return Dataset.of(
        "sealed", ["a", "b", "c"], {"train": train_part, "test": test_part}
    )


def test_sealed_labels_cannot_be_read(data):
    for read in (
        lambda y: y == 0,
        lambda y: y.min(),
        lambda y: y[:3],
        lambda y: np.bincount(y),
    ):
        with pytest.raises((AssertionError, TypeError)):
            assert read(data.test.labels) is not False


@pytest.mark.parametrize("refit", [False, True])
def test_training_and_calibration_never_read_them(data, tmp_path, monkeypatch, refit):
    evaluated = []

    def open_then_score(run, model, given, *others):
        assert (run.path / "decider.json").exists()  # everything was chosen and written
        assert (run.path / "model.safetensors").exists()
        data.test.labels.open = True
        evaluated.append(run.path.name)
        final(run, model, given, *others)
        data.test.labels.open = False

    final = trainer.score_test
    monkeypatch.setattr(trainer, "score_test", open_then_score)
    settings = {"epochs": 2, "hold_out": 0.2, "refit": refit, "evaluate_every": 1}
    train(data, "rf-dlc", tmp_path / "one", **settings)
    specs = [
        RunSpec(tmp_path / f"many-{seed}", "ldam-drw", {**settings, "seed": seed})
        for seed in (0, 1)
    ]
    train_many(data, specs)
    assert evaluated == ["one", "many-0", "many-1"]
