"""cross_validate: a run per fold, and the predictions of all samples by runs that have
not seen them.

fold-0, fold-1, ...  run folders
predictions.npz      out-of-fold probabilities, calibrated and corrected
decider.json         what decides them
metrics.json         their metrics, and those of each fold
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.data.dataset import Dataset
from rfdlc.data.load import load
from rfdlc.decisions.decider import Decider
from rfdlc.decisions.utility import Utility
from rfdlc.errors import REPLACE, InputError, expect
from rfdlc.evaluation.evaluate import Evaluation, evaluate
from rfdlc.formats.files import FOLDED, replacing
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.scores import CORRECTED
from rfdlc.progress import announce
from rfdlc.training.distributed import started_processes
from rfdlc.training.model import Model
from rfdlc.training.run import Run, data_of
from rfdlc.training.train import resume, train
from rfdlc.training.trainer import TrainingInterrupted


@dataclass(frozen=True)
class CrossValidation:
    """Out-of-fold predictions and their evaluation, and the run folder of every fold;
    in `path`.
    """

    path: Path
    predictions: Predictions
    evaluation: Evaluation
    folds: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def cross_validate(
    data: Any,
    method: str = "rf-dlc",
    out: str | Path = "runs/cv",
    *,
    folds: int = 5,
    root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> CrossValidation:
    """Train once per fold on the other folds, and predict every sample by the run that
    has not seen it.

    Folds are stratified, and keep groups and copies together. Each run is calibrated on
    its own training samples, so that the out-of-fold probabilities are those of a model
    that is used. A test split of the data is not touched. After an interruption, the
    same call continues.

    Parameters
    ----------
    data, method, root, data_options, **settings
        As in `rfdlc.train`; the setting `seed` also draws the folds.
    out, folds
        The folder to make, and the number of folds.

    Returns
    -------
    CrossValidation
        `rfdlc evaluate`, `report` and `compare` read its folder like that of a run.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> found = cross_validate("digits-lt", "ce", f"{mkdtemp()}/cv", folds=2, epochs=2)
    >>> found.predictions
    Predictions(1 particle, 435 samples, 10 classes, probabilities, with targets)
    """
    expect(
        started_processes() == 1,
        "cross-validation trains in one process: leave torchrun out",
    )
    expect(2 <= folds <= 100, f"{folds} folds are not possible: expected 2 to 100")
    expect(
        "time" not in (data_options or {}),
        "folds mix old and new rows: leave out time (--time) or folds (--cv)",
    )
    path, seed = Path(out), int(settings.get("seed", 0))
    given = (
        data
        if isinstance(data, Dataset)
        else load(data, root=root, **{"test_fraction": 0, **(data_options or {})})
    )
    samples, fold = given.train, given.train.folds(folds, seed)
    held = [np.flatnonzero(fold == number) for number in range(folds)]
    why = f" ({samples.joined})" if samples.joined else ""
    empty = (
        f"{given.name}: its {len(samples)} samples (or groups) do not fill {folds}"
        f" folds{why}: use fewer folds"
    )
    expect(all(map(len, held)), empty)
    texts = {key: str(value) for key, value in settings.items()}
    texts |= (
        {} if isinstance(settings.get("backbone", ""), str) else {"backbone": "own"}
    )
    _claim(path, {"method": method, "folds": folds, "settings": texts})
    models, parts, groups = [], list[Predictions](), samples.together
    for number, rows in enumerate(held):
        announce(f"fold {number + 1} of {folds}")
        apart = given.held_apart(np.flatnonzero(fold != number), rows)
        part = replace(apart, val=given.val, test=apart.val)
        try:
            models.append(_trained(part, method, path / f"fold-{number}", settings))
        except (
            TrainingInterrupted
        ):  # a fold alone cannot be resumed: its data are part of others
            raise TrainingInterrupted(
                f"stopped in fold {number + 1} of {folds}; do the same again to"
                " continue"
            ) from None
        classes, targets = models[-1].classes, samples.labels[rows]
        p = np.asarray(
            models[-1].decider.probabilities(models[-1].predict(samples.take(rows)))
        )
        known: dict[str, Any] = {
            "targets": targets,
            "groups": None if groups is None else groups[rows],
        }
        parts.append(
            Predictions(probabilities=p, classes=classes, corrected=True, **known)
        )
    never = int((fold < 0).sum())
    notes = (
        (f"{never} samples were never held out: their classes are in one fold alone",)
        if never
        else ()
    )
    return _joined_results(path, given, models, parts, held, notes)


def _claim(path: Path, wanted: dict[str, Any]) -> None:
    """Make the folder, or find in it what was made with the same settings."""
    file = path / FOLDED
    if path.exists() and any(path.iterdir()):
        expect(
            file.exists(),
            f"{path} holds other files: choose another folder, or replace it"
            f" ({REPLACE})",
        )
        same = json.loads(file.read_text(encoding="utf-8")) == wanted
        other = f"{path} holds a cross-validation with other settings"
        expect(same, f"{other}: choose another folder, or replace it ({REPLACE})")
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be made a folder ({error.strerror}): choose another"
        ) from None
    with replacing(file) as beside:
        beside.write_text(json.dumps(wanted), encoding="utf-8")


def _trained(
    data: Dataset, method: str, path: Path, settings: Mapping[str, Any]
) -> Model:
    run, backbone = Run(path), settings.get("backbone")
    own = None if isinstance(backbone, str) else backbone
    if run.finished:
        data_of(run, data)  # raises for other data
        return Model.load(path, backbone=own, device=run.config.device)
    return (
        resume(path, data, backbone=own)
        if run.exists
        else train(data, method, path, **settings)
    )


def _joined_results(
    path: Path,
    data: Dataset,
    models: list[Model],
    parts: list[Predictions],
    held: list[Any],
    notes: tuple[str, ...],
) -> CrossValidation:
    rows, classes = np.concatenate(held), data.classes
    order = np.argsort(rows)
    both: tuple[list[Any], ...] = (
        [part.scores.values[0] for part in parts],
        [part.targets for part in parts],
    )
    p, targets = (np.concatenate(each)[order] for each in both)
    ids = (
        None
        if data.train.ids is None
        else [data.train.ids[i] for i in rows[order].tolist()]
    )
    groups = None if data.train.together is None else data.train.together[rows[order]]
    known: dict[str, Any] = {"targets": targets, "ids": ids, "groups": groups}
    first = models[0].decider
    said = CORRECTED + first.model.decided_for.removeprefix("decided")
    predictions = Predictions(probabilities=p, classes=classes, corrected=said, **known)
    decider = Decider(
        first.utility.with_classes(classes),
        calibration=None,
        target_prior=None,
        rule=first.rule,
    )
    evaluation = evaluate(predictions, decider=decider)
    each = [evaluate(part, decider=decider).to_dict() for part in parts]
    metrics: dict[str, Any] = {
        "test": evaluation.to_dict(),
        "folds": each,
        "notes": list(notes),
    }
    if classes.imbalance_factor > 1:
        sensitive = decider.replace(utility=Utility.tail_sensitive(classes))
        metrics["test_tail_sensitive"] = evaluate(
            predictions, decider=sensitive
        ).to_dict()
    text = json.dumps(metrics, indent=1, ensure_ascii=False)
    files: dict[str, Any] = {
        "predictions.npz": predictions.save,
        "decider.json": decider.save,
    }
    for name, save in {
        **files,
        "metrics.json": lambda file: file.write_text(text, encoding="utf-8"),
    }.items():
        with replacing(path / name) as beside:
            save(beside)
    return CrossValidation(
        path, predictions, evaluation, tuple(model.path for model in models), notes
    )
