"""Histories and metrics in real local stores: event files of TensorBoard, MLflow's
files, W&B without a network.
"""

import json
import struct

import pytest

import rfdlc
from rfdlc.errors import InputError

SETTINGS = {"epochs": 3, "widths": 8, "evaluate_every": 1}


def train(path, log, **more):
    return rfdlc.train("digits-lt", "ce", path, log=log, **{**SETTINGS, **more})


def expected(path):
    """(step, value) of each metric in history.csv, and the test metrics."""
    import csv

    with open(path / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {
        name: [(int(row["epoch"]), float(row[name])) for row in rows]
        for name in ("loss", "held_out_nll", "epoch")
    }
    accuracy = json.loads((path / "metrics.json").read_text())["test"]["accuracy"]
    return found, accuracy


def test_tensorboard_has_every_epoch_and_the_metrics(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    train(tmp_path / "run", "tensorboard")
    history, accuracy = expected(tmp_path / "run")
    events = accumulator.EventAccumulator(
        str(tmp_path / "run" / "tensorboard")
    ).Reload()
    for name, rows in history.items():
        found = events.Scalars(name)
        assert [event.step for event in found] == [step for step, _ in rows]
        assert [event.value for event in found] == pytest.approx(
            [value for _, value in rows], rel=1e-6
        )
    assert events.Scalars("test/accuracy")[0].value == pytest.approx(accuracy, rel=1e-6)


def test_numbers_that_are_not_in_a_table_are_written(tmp_path):
    """A router's metrics lie beside those of the splits."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    rfdlc.train(
        "digits-lt",
        "ride",
        tmp_path / "run",
        log="tensorboard",
        router_epochs=1,
        **SETTINGS,
    )
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    plain = {name: value for name, value in metrics.items() if isinstance(value, float)}
    events = accumulator.EventAccumulator(
        str(tmp_path / "run" / "tensorboard")
    ).Reload()
    assert plain
    for name, value in {**plain, "test/accuracy": metrics["test"]["accuracy"]}.items():
        assert events.Scalars(name)[0].value == pytest.approx(value, rel=1e-6)


def test_mlflow_has_parameters_history_and_metrics_of_one_run(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "signs")
    train(tmp_path / "run", "mlflow")
    history, accuracy = expected(tmp_path / "run")
    client = tracking.MlflowClient()
    experiment = client.get_experiment_by_name("signs")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (run.data.params["method"], run.data.params["epochs"]) == ("ce", "3")
    for name, rows in history.items():
        found = client.get_metric_history(run.info.run_id, name)
        assert [(metric.step, metric.value) for metric in found] == rows
    assert run.data.metrics["test/accuracy"] == pytest.approx(accuracy)


def test_a_resumed_run_continues_in_its_store(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    original, calls = rfdlc.training.trainer._checkpoint, []

    def crash(run, net, epoch, *when):
        original(run, net, epoch, *when)
        calls.append(epoch.epoch)
        if len(calls) == 2:
            raise OSError("no power")

    monkeypatch.setattr(rfdlc.training.trainer, "_checkpoint", crash)
    with pytest.raises(OSError, match="no power"):
        train(tmp_path / "run", "mlflow", checkpoint_every=1)
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("rfdlc").experiment_id])
    assert run.info.status == "KILLED"
    rfdlc.resume(tmp_path / "run")
    (run,) = client.search_runs([client.get_experiment_by_name("rfdlc").experiment_id])
    assert run.info.status == "FINISHED"
    assert [
        metric.step for metric in client.get_metric_history(run.info.run_id, "loss")
    ] == [1, 2, 3]


def test_wandb_keeps_everything_in_the_folder_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    places = {
        "CONFIG_DIR": str(tmp_path),
        "CACHE_DIR": str(tmp_path),
        "DATA_DIR": str(tmp_path),
    }
    for name, value in {"MODE": "offline", "SILENT": "true", **places}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    train(tmp_path / "run", "wandb")
    history, accuracy = expected(tmp_path / "run")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    found = wandb_rows(file)
    for name, rows in history.items():
        assert [(step, row[name]) for step, row in found if name in row] == rows
    assert [
        row["test/accuracy"] for _, row in found if "test/accuracy" in row
    ] == pytest.approx([accuracy])


def wandb_rows(file):
    """Step and values of every row in a file of W&B: records in pieces of (checksum,
    length, kind), blocks of 32 KB.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, record, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15  # no piece begins in the last bytes of a block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # all of a record, or the end of one
            parsed, record = wandb_internal_pb2.Record.FromString(record), b""
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in parsed.history.item
            }
            rows += (
                [{key: json.loads(text) for key, text in items.items()}]
                if items
                else []
            )
    return [(row["_step"], row) for row in rows]


def test_refits_continue_the_steps(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    train(tmp_path / "run", "tensorboard", refit=True, epochs=2)
    events = accumulator.EventAccumulator(
        str(tmp_path / "run" / "tensorboard")
    ).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_unknown_and_missing_sinks_raise_before_there_is_a_folder(
    tmp_path, monkeypatch
):
    with pytest.raises(InputError, match="tensorbord"):
        train(tmp_path / "run", "tensorbord")
    monkeypatch.setattr("rfdlc.training.sinks.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r'log=mlflow needs mlflow: pip install "rfdlc\[log\]"'
    ):
        train(tmp_path / "run", "mlflow")
    assert not (tmp_path / "run").exists()


def test_nothing_is_written_without_a_sink(tmp_path):
    train(tmp_path / "run", "")
    assert not {file.name for file in (tmp_path / "run").iterdir()} & {
        "sinks.json",
        "tensorboard",
        "wandb",
    }
