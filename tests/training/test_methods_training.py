"""Every method through all its stages on the CPU: saved, loaded, predicted, resumed in
its second stage bit for bit.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rfdlc
from rfdlc.errors import InputError
from rfdlc.training import trainer
from rfdlc.training.building import method_net, new_decider
from rfdlc.training.config import TrainConfig
from rfdlc.training.loop import build_stages, epochs
from rfdlc.training.methods import METHODS, Method, Stage, find_method, resolve
from rfdlc.training.optimisation import (
    EpochMean,
    normalise_head,
    rate,
    reinitialize_head,
)
from rfdlc.training.run import Run
from rfdlc.training.trainer import TrainingInterrupted

pytestmark = pytest.mark.usefixtures("quick_tables")
SMALL = {"epochs": 3, "widths": (8,), "batch_size": 128, "calibration": "temperature"}
CPU = torch.device("cpu")
TWO_STAGES = sorted(name for name, row in METHODS.items() if len(row.stages) > 1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every method, trained once."""
    folder = tmp_path_factory.mktemp("methods")
    return {
        name: rfdlc.train("digits-lt", name, folder / name, **SMALL) for name in METHODS
    }


def weights(path):
    return (path / "model.safetensors").read_bytes()


def same_tensors(one, other):
    """Whether two runs have the same weights, whatever their methods are called."""
    first = load_file(one / "model.safetensors")
    second = load_file(other / "model.safetensors")
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def interrupt_in(monkeypatch, epoch):
    original = trainer.Trainer._history_row

    def row(self, run, member, done):
        if done.epoch == epoch:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, run, member, done)

    monkeypatch.setattr(trainer.Trainer, "_history_row", row)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_trained_saved_loaded_predicted(trained, method):
    model = trained[method]
    again, data = rfdlc.Model.load(model.path), rfdlc.load("digits-lt")
    saved = rfdlc.Predictions.load(model.path / "predictions.npz")
    found = again.predict(data)
    assert np.array_equal(found.scores.values, saved.scores.values)
    assert np.isfinite(found.scores.values).all()
    lines = (model.path / "history.csv").read_text().splitlines()
    assert len(lines) == 1 + METHODS[method].spans(model.config)[-1][1]
    utility = rfdlc.Utility.tail_sensitive(model.classes).with_abstain(0.2)
    actions = again.decide(data, utility)  # any method's model takes the same Decider
    assert actions.shape == (len(data.test),)
    assert np.isfinite(rfdlc.evaluate(found, decider=again.decider).mean_utility)


@pytest.mark.parametrize("method", TWO_STAGES)
@pytest.mark.parametrize(
    "after", [3, 5]
)  # at the very end of the first stage, in the middle of the second
def test_resumed_around_the_second_stage(trained, method, after, tmp_path, monkeypatch):
    interrupt_in(monkeypatch, after)
    with pytest.raises(TrainingInterrupted, match=f"after epoch {after} of"):
        rfdlc.train("digits-lt", method, tmp_path / "run", **SMALL)
    monkeypatch.undo()
    rfdlc.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(trained[method].path)
    for name in ("predictions.npz", "decider.json"):
        assert (tmp_path / "run" / name).read_bytes() == (
            trained[method].path / name
        ).read_bytes()


@pytest.mark.parametrize("method", ["tau-norm", "srepr"])
def test_a_finished_run_resumed_is_the_same(trained, method):
    before = weights(trained[method].path)
    assert weights(rfdlc.resume(trained[method].path).path) == before


def test_a_fork_goes_on_in_the_second_stage(tmp_path):
    whole = rfdlc.train("digits-lt", "crt", tmp_path / "run", keep=(1.0,), **SMALL)
    same = rfdlc.fork(whole.path, tmp_path / "same", at=3)
    assert weights(same.path) == weights(whole.path)
    slower = rfdlc.fork(whole.path, tmp_path / "slower", at=3, learning_rate=0.01)
    assert weights(slower.path) != weights(whole.path)


@pytest.mark.parametrize("method", ["crt", "tau-norm", "la-posthoc", "elkan"])
def test_a_fork_goes_on_as_another_method(trained, method, tmp_path):
    forked = rfdlc.fork(trained["ce"].path, tmp_path / "fork", method=method)
    assert weights(forked.path) == weights(trained[method].path)
    assert (forked.path / "decider.json").read_bytes() == (
        trained[method].path / "decider.json"
    ).read_bytes()


def test_a_fork_from_the_late_epoch(trained, tmp_path):
    forked = rfdlc.fork(
        trained["ldam"].path, tmp_path / "fork", at=2, method="ldam-drw"
    )
    assert weights(forked.path) == weights(trained["ldam-drw"].path)
    assert weights(forked.path) != weights(trained["ldam"].path)


def test_forks_that_cannot_be(trained, tmp_path):
    with pytest.raises(InputError, match="a fork cannot change head, particles"):
        rfdlc.fork(trained["ce"].path, tmp_path / "fork", method="rf-dlc-paper")
    with pytest.raises(InputError, match="cannot continue as ride"):
        rfdlc.fork(trained["ensemble-ldam"].path, tmp_path / "fork", method="ride")
    assert not (tmp_path / "fork").exists()


def test_forks_of_tables(tmp_path):
    rng = np.random.default_rng(0)
    table = {
        "x": rng.normal(size=(60, 3)).astype(np.float32),
        "y": np.repeat([0, 1, 2], 20),
    }
    own = {
        "backbone": "mlp",
        "particles": 1,
        "calibration": "auto",
        "widths": (4,),
        "epochs": 1,
    }
    run = rfdlc.train(table, "rf-dlc", tmp_path / "run", **own, device="cpu")
    forked = rfdlc.fork(run.path, tmp_path / "fork", data=table, epochs=2)
    assert forked.config == run.config.replace(epochs=2)
    mixture = rfdlc.train(
        table, "rf-dlc", tmp_path / "mixture", backbone="trees", device="cpu"
    )
    with pytest.raises(
        InputError,
        match="is a trees run, which has no epochs to continue from: start a new run",
    ):
        rfdlc.fork(mixture.path, tmp_path / "fork-2", data=table)


def test_a_fork_keeps_the_warmup_of_its_run_and_not_of_its_length(tmp_path):
    path = rfdlc.train(
        "digits-lt", "ce", tmp_path / "run", **{**SMALL, "epochs": 3}, preset="none"
    ).path
    assert rfdlc.fork(path, tmp_path / "longer", epochs=15).config.warmup == 5
    table = json.loads((path / "config.json").read_text())
    assert table["settings"]["warmup"] == 1
    table["settings"]["warmup"] = 5
    reached = Run(path).checkpoint()
    (path / "config.json").write_text(json.dumps(table))
    Run(path).save_checkpoint(reached)  # belongs to this configuration, too
    assert rfdlc.fork(path, tmp_path / "same").config.warmup == 5


def test_a_fork_leaves_the_settings_of_the_old_method_behind(trained, tmp_path):
    forked = rfdlc.fork(trained["ldam-drw"].path, tmp_path / "fork", method="ldam")
    assert forked.config == trained["ldam"].config


@pytest.mark.parametrize("method", ["srepr", "ride", "crt"])
def test_a_run_alone_equals_the_run_in_a_stack(method):
    data = rfdlc.load("digits-lt")
    row, settings = resolve(method, data.name, {**SMALL, "epochs": 2})
    nets = []
    for seeds in ((7,), (3, 7)):
        net = method_net(row, settings, data.input_shape, data.classes, seeds)
        list(epochs(net, build_stages(row, settings, data, seeds, CPU), {}))
        nets.append(net)
    for (name, one), two in zip(
        nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True
    ):
        assert torch.allclose(one, two.chunk(2)[1], atol=2e-4), name


def test_a_training_leaves_torchs_global_state_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    threads = torch.get_num_threads()
    rfdlc.train("digits-lt", "srepr", tmp_path / "run", **SMALL)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert torch.backends.cudnn.benchmark is False


# -- what stages do
# --------------------------------------------------------------------------------------


def stage_by_stage(method, **changes):
    """The state of the network at the end of every epoch, and the network itself."""
    data = rfdlc.load("digits-lt")
    row, settings = resolve(method, data.name, {**SMALL, **changes})
    net = method_net(row, settings, data.input_shape, data.classes, (0,))
    states = []
    for _ in epochs(net, build_stages(row, settings, data, (0,), CPU), {}):
        states.append(
            {name: tensor.clone() for name, tensor in net.state_dict().items()}
        )
    return states, net


def test_only_the_head_trains_in_crt():
    states, net = stage_by_stage("crt")
    first, last = states[2], net.state_dict()
    for name in first:
        assert torch.equal(first[name], last[name]) == (not name.startswith("head.")), (
            name
        )


def test_only_the_router_trains_in_rides_second_stage():
    states, net = stage_by_stage("ride", particles=3)
    first, last = states[2], net.state_dict()
    for name in first:
        assert torch.equal(first[name], last[name]) == (
            not name.startswith("combination.")
        ), name
    assert torch.equal(
        states[0]["combination.hidden.weight"], first["combination.hidden.weight"]
    )


def test_srepr_goes_on_from_mean_weights():
    states, _ = stage_by_stage("srepr", epochs=8)
    name = "branches.0.map.weight"
    expected = (
        states[6][name] + states[7][name]
    ) / 2  # epochs 7 and 8: the last quarter
    assert torch.allclose(states[8][name], expected, atol=1e-6)


def test_mean_and_deviation_of_weights():
    weight = torch.zeros(3)
    mean = EpochMean([weight])
    for value in (1.0, 2.0, 6.0):
        weight.fill_(value)
        mean.collect()
    (deviation,) = mean.finalize()
    assert weight.tolist() == pytest.approx([3.0] * 3)
    assert deviation.tolist() == pytest.approx([np.std([1, 2, 6])] * 3, rel=1e-5)


def test_heads_reinitialized_and_normalised():
    data = rfdlc.load("digits-lt")
    row, settings = resolve("ce", data.name, SMALL)
    net = method_net(row, settings, data.input_shape, data.classes, (0, 1))
    before = net.head.weight.detach().clone()
    with torch.no_grad():
        net.head.bias.fill_(1.0)
    reinitialize_head(net)
    assert not torch.equal(net.head.weight, before)
    assert not net.head.bias.any()
    start = net.head.weight.detach().clone()
    with torch.no_grad():
        net.head.bias.fill_(1.0)
    normalise_head(net, 1.0)
    assert torch.allclose(net.head.weight.norm(dim=1), torch.ones(2, 10))
    assert torch.allclose(
        net.head.weight * start.norm(dim=1, keepdim=True), start, atol=1e-6
    )
    assert not net.head.bias.any()


def test_the_schedule_of_averaging():
    found = [rate(epoch, 100, "swa") for epoch in (1, 51, 63, 76, 100)]
    assert found == pytest.approx([1, 1, 0.76, 0.5, 0.5], abs=0.01)


# -- how methods decide
# --------------------------------------------------------------------------------------


def test_decisions_of_methods_that_only_decide_otherwise(trained):
    plain, classes = trained["ce"], trained["ce"].classes
    for name in ("elkan", "la-posthoc"):
        assert same_tensors(trained[name].path, plain.path)
    predictions = plain.predict("digits-lt")
    elkan = trained["elkan"].predict("digits-lt")
    assert np.array_equal(elkan.scores.values, predictions.scores.values)
    by_utility = plain.decider.replace(
        utility=rfdlc.Utility.tail_sensitive(classes)
    ).decide(predictions)
    assert np.array_equal(trained["elkan"].decider.decide(elkan), by_utility)
    bare = new_decider("la-posthoc", plain.config.replace(calibration="none"), classes)
    adjusted = predictions.scores.values[0] - np.log(classes.prior)
    assert np.array_equal(bare.decide(predictions), adjusted.argmax(-1))
    assert same_tensors(trained["reweighted-elkan"].path, trained["cb"].path)
    assert same_tensors(trained["balanced-softmax"].path, trained["la"].path)


@pytest.mark.parametrize(
    ("method", "name"), [("ride", "experts_used"), ("tlc", "fused_uncertainty")]
)
def test_what_experts_say_of_themselves_reaches_the_metrics(trained, method, name):
    model = trained[method]
    saved = rfdlc.Predictions.load(model.path / "predictions.npz")
    assert saved.scores.values.shape[0] == 1
    assert json.loads((model.path / "metrics.json").read_text())[name] == pytest.approx(
        saved.uncertainty.mean()
    )
    assert (
        0
        <= rfdlc.evaluate(saved, decider=model.decider, uncertainty="own").error_auc
        <= 1
    )
    assert saved.with_classes(model.classes).uncertainty is not None
    assert model.net.particle_logits(torch.zeros(1, 2, 1, 8, 8)).shape == (1, 3, 2, 10)
    with pytest.raises(InputError, match="not stored in these predictions"):
        rfdlc.evaluate(trained["ce"].predict("digits-lt"), uncertainty="own")


def test_priors_that_methods_carry():
    classes = rfdlc.Classes.from_counts([80, 20])
    carried = {
        name: row.carried(resolve(name, "", {})[1], classes)[0]
        for name, row in METHODS.items()
    }
    for name in ("ce", "focal", "mixup", "ldam", "la-posthoc", "elkan", "ace"):
        assert carried[name] == pytest.approx(0.8), name
    for name in (
        "la",
        "balanced-softmax",
        "ce-balanced",
        "crt",
        "tau-norm",
        "srepr",
        "rf-dlc",
        "rf-dlc-paper",
    ):
        assert carried[name] == pytest.approx(0.5), name
    for name in ("cb", "cb-focal", "ldam-drw", "ride", "tlc", "ensemble-cb"):
        assert 0.499 < carried[name] < 0.51, (
            name
        )  # the effective number of few samples is nearly their number


def test_relative_costs():
    assert METHODS["ce"].relative_cost() == 1
    assert METHODS["ride"].relative_cost() == pytest.approx(3 * (1 + 5 / 600))
    assert METHODS["srepr"].relative_cost() == pytest.approx(1 + 6 * 10 / 600)
    assert METHODS["mdcs"].relative_cost() == pytest.approx(
        3 * 4 / 3
    )  # and a forward pass of the weak view


def test_options_of_methods_are_set_like_settings(tmp_path):
    def stages_of(method, **changes):
        row, config = resolve(method, "", {"epochs": 7, **changes})
        lengths = [end - start for start, end in row.spans(config)]
        return lengths, [stage.number("swag_samples", config) for stage in row.stages]

    assert stages_of("srepr") == ([7, 10], [0, 5])
    assert stages_of("srepr", head_epochs="3", swag_samples=2) == ([7, 3], [0, 2])
    assert stages_of("ride", method_options={"router_epochs": 1}) == ([7, 1], [0, 0])
    model = rfdlc.train("digits-lt", "tau-norm", tmp_path / "run", tau=0.0, **SMALL)
    assert (
        model.net.head.weight.norm(dim=1).std() > 1e-3
    )  # the lengths of class weights are left alone
    forked = rfdlc.fork(model.path, tmp_path / "fork", tau=1)
    assert forked.net.head.weight.norm(dim=1).std() < 1e-3
    assert forked.config.method_options == {"tau": 1.0}


def test_options_do_not_share_names_with_settings():
    settings = set(TrainConfig.describe())
    assert all(
        settings.isdisjoint(set(row.options) - {"method_options"})
        for row in METHODS.values()
    )


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "ride",
            {"router_epochs": 2.5},
            "router_epochs=2.5 is not possible: expected an integer, at least 1",
        ),
        (
            "ride",
            {"diversity": "much"},
            "diversity='much' is not possible: expected a number, at least 0",
        ),
        (
            "tlc",
            {"threshold": 2},
            "threshold=2 is not possible: expected a number, at least 0 and at most 1",
        ),
        (
            "ce",
            {"diversity": 1},
            "diversity is not an option of this method: expected one of no options",
        ),
        (
            "ride",
            {"method_options": {"eta": 1}},
            "eta is not an option of this method: expected one of diversity, ",
        ),
    ],
)
def test_options_that_cannot_be(method, changes, message):
    with pytest.raises(InputError, match=message):
        resolve(method, "", changes)


def test_a_run_folder_without_options_has_the_defaults_of_its_method():
    row, config = resolve("tlc", "", {})
    saved = {
        name: value
        for name, value in config.to_dict().items()
        if name != "method_options"
    }
    assert row.configure(saved) == config


def test_a_row_of_ones_own_and_one_that_is_missing(tmp_path, monkeypatch):
    mine = Method(
        "two short stages",
        "here",
        {"head": "linear"},
        stages=(Stage(), Stage(epochs=1, trains="head")),
    )
    monkeypatch.setitem(METHODS, "mine", mine)
    rfdlc.train("digits-lt", "mine", tmp_path / "run", **SMALL)
    monkeypatch.undo()
    with pytest.raises(InputError, match="'mine'"):
        rfdlc.Model.load(tmp_path / "run")
    with pytest.raises(InputError, match="expected particles=2 or more, got 1"):
        rfdlc.train("digits-lt", "ride", tmp_path / "one", particles=1)
    with pytest.raises(InputError, match="did you mean"):
        find_method("rides")
