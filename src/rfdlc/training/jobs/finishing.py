"""The end of a training: held-out samples calibrate, the model is written, and then the test split is scored.

Training and calibration see training data alone; `score_test` comes after everything has been chosen and written.
"""

from typing import Any

from safetensors.torch import save

from rfdlc.data.dataset import Dataset
from rfdlc.decide.evaluation import evaluate
from rfdlc.decide.predictions import Predictions
from rfdlc.decide.utility import Utility
from rfdlc.training.heldout import balanced, carries_uniform, diversity
from rfdlc.training.jobs.job import Job
from rfdlc.training.model import Model, as_tensors, new_decider, predictions_of
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.processes.group import ALONE, Processes
from rfdlc.training.run import Run


def finish_phase(job: Job, net: ParticleNet, data: Dataset, phase: int) -> Model | None:
    """Calibrate where samples were held out; after the last phase, write and score the model."""
    if data.val is not None:
        _calibrate(job, net, data)
    if phase + 1 < job.phases:
        return None
    job.run.write("model.safetensors", save(as_tensors(net)))
    job.processes.wait()  # for the files, which all read
    model = Model.load(job.run.path, backbone=job.network, device=str(job.device))
    score_test(job.run, model, job.data, job.processes)
    job.processes.wait()
    return model


def _calibrate(job: Job, net: ParticleNet, data: Dataset) -> None:
    """Fit the Decider on held-out data, weighted to the prior that the probabilities carry."""
    predictions = held_out_predictions(job, net, data)
    if predictions is None:
        return
    decider = new_decider(job.name, job.settings, job.data.classes)
    if decider.calibration is not None:
        decider = decider.fit(predictions, balanced=carries_uniform(decider))
    job.run.write_with("decider.json", decider.save)
    job.run.write_with("held-out.npz", predictions.save)


def held_out_predictions(job: Job, net: ParticleNet, data: Dataset) -> Predictions | None:
    """Of held-out samples, by all processes together; the one that writes has them."""
    assert data.val is not None
    return predictions_of(net, data.val, data.normalisation, job.settings, job.data.classes, job.processes)


def score_test(run: Run, model: Model, data: Dataset, processes: Processes = ALONE) -> None:
    """The one place where test labels are read: predictions.npz and metrics.json, after everything was chosen."""
    test, known = data.test, (model.normalisation, model.settings, model.classes)
    predictions = None if test is None else predictions_of(model.net, test, *known, processes)
    if not processes.writes:
        return
    metrics: dict[str, Any] = {}
    if (run.path / "held-out.npz").exists():
        held = balanced(Predictions.load(run.path / "held-out.npz"))
        metrics["held_out_balanced"] = evaluate(held, decider=model.decider).to_dict()
    if predictions is not None:
        run.write_with("predictions.npz", predictions.save)
        metrics["test"] = evaluate(predictions, decider=model.decider).to_dict()
        metrics["diversity"] = diversity(predictions.scores.values)
        if predictions.uncertainty is not None:
            metrics[model.net.combination.measures] = float(predictions.uncertainty.mean())
        if data.classes.imbalance_factor > 1:
            decider = model.decider.replace(utility=Utility.tail_sensitive(data.classes))
            metrics["test_tail_sensitive"] = evaluate(predictions, decider=decider).to_dict()
    run.write_json("metrics.json", metrics)
