"""Trials before a training: they find what hurts, cost what they may, and are the same
when they are made again.
"""

import json
import warnings

import numpy as np
import pytest
import torch

import rfdlc
from rfdlc.errors import InputError
from rfdlc.progress import shown
from rfdlc.training import measuring, trainer
from rfdlc.training.config import TrainConfig
from rfdlc.training.methods import resolve
from rfdlc.training.run import Run
from rfdlc.training.trial_plan import TrialPlan
from rfdlc.training.tuning import planning, trying
from rfdlc.training.tuning.candidates import trial_of
from rfdlc.training.tuning.choosing import best_first, choose_settings
from rfdlc.training.tuning.planning import STRONGER
from rfdlc.training.tuning.trying import TrialLosses, balanced_losses, standard_errors

SMALL = {
    "widths": 32,
    "particles": 4,
    "batch_size": 32,
    "learning_rate": 0.05,
    "head": "linear",
    "shared_stages": 0,
}


def arrows(count, seed=0):
    """Images (N, 1, 8, 8) of arrows at random places that point to the left (0) or to
    the right (1).
    """
    rng = np.random.default_rng(seed)
    images, labels = (
        rng.integers(0, 60, (count, 1, 8, 8)).astype(np.uint8),
        rng.integers(0, 2, count),
    )
    for image, right in zip(images, labels, strict=True):
        row, column = rng.integers(3, 5, 2)
        for k in (-2, -1, 0, 1, 2):
            image[0, row + k, column + (1 - abs(k)) * (1 if right else -1)] = 220
    return images, labels


def places(count, seed=0):
    """Images whose class is the column of a line: a crop moves it to that of another
    class.
    """
    rng = np.random.default_rng(seed)
    images, labels = (
        rng.integers(0, 60, (count, 1, 8, 8)).astype(np.uint8),
        rng.integers(0, 8, count),
    )
    for image, column in zip(images, labels, strict=True):
        image[0, :, column] = 220
    return images, labels


def tuned(path, data, **settings):
    return rfdlc.train(data, "rf-dlc", path, **{**SMALL, "epochs": 40, **settings})


def certain(losses):
    """In place of `held_out_losses`: the losses of a function of the trials, without
    standard errors.
    """
    return lambda trainer, trials, until, later: (losses(trials), [0.0] * len(trials))


def best(plan):
    return best_first(TrialPlan(**plan))


def chosen_of(plan):
    return choose_settings(TrialPlan(**plan))


def read(path):
    return json.loads((path / "tuning.json").read_text())


def test_flips_are_not_chosen_where_they_turn_one_class_into_another(tmp_path):
    model, plan = tuned(tmp_path / "run", arrows(300)), read(tmp_path / "run")
    first = {own["augment"]: loss for own, loss in TrialPlan(**plan).rungs[0].pairs}
    assert first["crop-flip"] > first["crop"] + 0.1
    assert model.config.augment in ("none", "crop", "crop-randaugment")
    assert model.config.augment == plan["chosen"]["augment"]
    assert Run(tmp_path / "run").config == model.config.replace(device="auto")


def test_no_augmentation_is_chosen_where_places_matter(tmp_path):
    model = tuned(tmp_path / "run", places(400))
    assert model.config.augment == "none"
    assert rfdlc.Model.load(tmp_path / "run").config.augment == "none"
    assert (
        rfdlc.Model.from_pretrained(
            model.save_pretrained(tmp_path / "saved")
        ).config.augment
        == "none"
    )
    assert (
        json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]["accuracy"]
        > 0.9
    )


def test_interrupted_trials_continue_and_choose_the_same(tmp_path, monkeypatch):
    data = rfdlc.load(places(300))
    undisturbed = tuned(tmp_path / "one", data, epochs=20)
    losses, calls = trying.held_out_losses, []

    def interrupted(trainer, trials, *given):
        calls.append(len(trials))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return losses(trainer, trials, *given)

    monkeypatch.setattr(trying, "held_out_losses", interrupted)
    with pytest.raises(KeyboardInterrupt, match="rfdlc resume"):
        tuned(tmp_path / "two", data, epochs=20)
    assert [
        len(rung.get("losses", ())) for rung in read(tmp_path / "two")["rungs"][:2]
    ] == [calls[0], 0]
    again = rfdlc.resume(tmp_path / "two", data)
    assert read(tmp_path / "two") == read(tmp_path / "one")
    assert len(calls) == 1 + len(
        read(tmp_path / "one")["rungs"]
    )  # the first rung was not trained again
    assert again.config == undisturbed.config
    for one, two in zip(
        again.net.state_dict().values(),
        undisturbed.net.state_dict().values(),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("more", [{}, {"measured": 8.0, "seconds": []}])
def test_a_plan_is_written_as_it_was_read(more):
    """Also one whose later rungs are still to be tried."""
    tried = {
        "epochs": 4,
        "trials": [{"augment": "none"}],
        "losses": [None],
        "errors": [0.0],
    }
    plan = {
        "epochs": 9,
        "seconds_per_epoch": None,
        "rungs": [tried, {"epochs": 4, "varies": True}],
        "candidates": [],
    }
    assert TrialPlan.read(plan | more, "here").to_dict() == plan | more


def test_a_damaged_plan_is_named(tmp_path):
    model = tuned(tmp_path / "run", places(100), epochs=2, tune="off", budget=0)
    for damaged in (
        {"epochs": 2},
        {"epochs": "many", "rungs": []},
        {"epochs": 2, "rungs": [{"trials": 1}]},
    ):
        (model.path / "tuning.json").write_text(json.dumps(damaged))
        with pytest.raises(
            InputError, match=r"tuning.json is damaged \((rungs|epochs)"
        ):
            rfdlc.Model.load(model.path)


def test_settings_of_the_user_stay(tmp_path):
    model = tuned(
        tmp_path / "run", places(200), augment="crop-flip", head="cosine", epochs=20
    )
    assert (model.config.augment, model.config.head) == ("crop-flip", "cosine")
    tried = [own for rung in read(tmp_path / "run")["rungs"] for own in rung["trials"]]
    assert {own["augment"] for own in tried} == {"crop-flip"}
    assert {own["mixup"] for own in tried} == {0.0, 0.4}


def test_epochs_of_the_user_stay(tmp_path, monkeypatch):
    """Also where more epochs raise the loss; those of a preset do not."""
    monkeypatch.setattr(
        trying,
        "held_out_losses",
        certain(lambda trials: [float(trial.epochs) for trial in trials]),
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    run = tuned(tmp_path / "given", places(200), epochs=100)
    assert (run.config.epochs, Run(tmp_path / "given").config.epochs) == (100, 100)
    run = rfdlc.train(places(200), "rf-dlc", tmp_path / "usual", **SMALL)
    assert (
        run.config.epochs
        == read(tmp_path / "usual")["rungs"][0]["epochs"]
        < read(tmp_path / "usual")["epochs"]
    )


@pytest.mark.parametrize("length", [3, 15, 40, 200])
@pytest.mark.parametrize("more", [{}, {"particles": 1}, {"refit": True}, {"tune": 2}])
def test_trials_cost_at_most_the_share(tmp_path, monkeypatch, length, more):
    monkeypatch.setattr(
        trying,
        "held_out_losses",
        certain(lambda trials: [1.0 + i for i in range(len(trials))]),
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    tuned(tmp_path / "run", places(300), epochs=length, **more)
    plan, config = read(tmp_path / "run"), {**SMALL, "refit": False, **more}
    cost = 2 / (2 * config["particles"])  # two stages, none of them shared
    trained = [
        len(rung["trials"]) - ("varies" in rung) for rung in plan["rungs"]
    ]  # the best one is not trained again
    work = sum(
        count * rung["epochs"] * cost
        for count, rung in zip(trained, plan["rungs"], strict=True)
    )
    assert work <= 0.3 * length * (1 + config["refit"])
    assert length < 20 or plan["rungs"]  # few epochs of few steps leave no time
    assert len(plan["candidates"]) <= (2 if "tune" in more else 8)


def test_trials_of_a_long_budget_are_at_most_their_share_of_what_is_used(
    tmp_path, monkeypatch
):
    """An hour has time for 36,000 epochs of .1 s; the longest training has 400."""
    monkeypatch.setattr(
        planning, "_measured", lambda *given: planning.Speed(0.1, 0.25, 0.0)
    )
    monkeypatch.setattr(
        trying,
        "held_out_losses",
        certain(lambda trials: [1.0 + i for i in range(len(trials))]),
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    plans = []
    for budget in ("55s", "10m", "1h"):
        assert (
            tuned(
                tmp_path / budget, places(300), epochs=100, budget=budget
            ).config.epochs
            == 400
        )
        plans.append(read(tmp_path / budget)["rungs"])
    trained = [
        sum(
            (len(rung["trials"]) - ("varies" in rung)) * rung["epochs"]
            for rung in rungs
        )
        for rungs in plans
    ]
    shares = [0.25 * epochs / (0.25 * epochs + 400) for epochs in trained]
    assert 0.2 < shares[0] < 0.29 < shares[1] == shares[2] <= 0.3


def test_a_budget_gives_the_number_of_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr(
        planning,
        "seconds_per_epoch",
        lambda trainer, runs, most, show: 0.51 * len(runs),
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    for budget, expected in (
        ("60s", 105),
        ("1m", 105),
        (2, 3),
        (1, 1),
        ("1h", 4 * 40),
    ):
        path = tmp_path / f"run-{budget}"
        (run,) = [tuned(path, places(200), budget=budget, tune="off")]
        assert run.config.epochs == expected
        assert Run(path).config.epochs == read(path)["epochs"] == expected
        assert read(path)["seconds_per_epoch"] == 0.51


def test_fewer_epochs_have_a_shorter_warm_up_unless_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(
        planning, "seconds_per_epoch", lambda trainer, runs, most, show: 0.5 * len(runs)
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    for budget, given, epochs, warmup in (
        (2, {}, 3, 1),
        (30, {}, 54, 5),
        (2, {"warmup": 2}, 3, 2),
    ):
        run = tuned(
            tmp_path / f"{budget}-{len(given)}",
            places(200),
            budget=budget,
            tune="off",
            **given,
        )
        assert (run.config.epochs, run.config.warmup) == (epochs, warmup)


def test_a_budget_that_is_too_short_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        planning, "seconds_per_epoch", lambda trainer, runs, most, show: 0.5 * len(runs)
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    for budget, told in ((4, True), (60, False)):
        with shown():
            tuned(tmp_path / f"run-{budget}", places(200), budget=budget, tune="off")
        err = capsys.readouterr().err
        assert (
            "too short  7 of 40 epochs; 23 s give all of them; fewer particles and a"
            " smaller backbone take less\n" in err
        ) == told
        assert "overrun" not in err
    with shown():
        tuned(tmp_path / "short", places(200), budget=0.3, tune="off")
    late = "the training ends about 1 s after its budget of 0.3 s\n"
    assert (
        f"overrun    one epoch takes about 0.5 s, and one is the least: {late}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("more", "length", "trainings"),
    [
        ({}, 157, 1),
        ({"refit": True}, 78, 2),
        ({"refit": True, "warm_refit": True}, 78, 2),
    ],
)
def test_samples_that_a_budget_holds_out_stay_held_out(
    tmp_path, monkeypatch, more, length, trainings
):
    """One training of all the time, unless a refit is asked for."""
    monkeypatch.setattr(
        planning, "seconds_per_epoch", lambda trainer, runs, most, show: 0.1 * len(runs)
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    run = tuned(tmp_path / "run", places(200), budget=17.5, tune="off", **more)
    assert run.config.trainings == trainings
    assert run.config.epochs == length
    assert read(tmp_path / "run")["chosen"] == {"epochs": length}


@pytest.mark.parametrize(
    ("slower", "more", "phases"),
    # In 36 s, 72 epochs of 0.45 s, or twice 36. Half-way, 0.9 (36 - spent) s are left;
    # a quarter of the epochs at least
    [
        (0.5, {}, [72]),
        (1.2, {}, [36 + 28]),
        (1.5, {}, [36 + 16]),
        (3.0, {}, [36 + 9]),
    ],
)
def test_epochs_slower_than_measured_make_a_training_shorter(
    tmp_path, monkeypatch, capsys, slower, more, phases
):
    monkeypatch.setattr(
        planning, "_measured", lambda *given: planning.Speed(0.45, 1.0, 0.0)
    )
    rows = trainer.Trainer._history_row
    monkeypatch.setattr(
        trainer.Trainer,
        "_history_row",
        lambda *given: {**rows(*given), "seconds": 0.45 * slower},
    )
    with shown():
        model = tuned(tmp_path / "run", places(200), budget=36, tune="off", **more)
    told = f"shorter    {phases[0]} instead of {72 // len(phases)} epochs: they take"
    assert (told in capsys.readouterr().err) == (slower > 1)
    history = Run(tmp_path / "run").checkpoint().history
    assert [
        sum(row["phase"] == phase for row in history) for phase in range(len(phases))
    ] == phases
    assert history[-1]["learning_rate"] < 0.04 * max(
        row["learning_rate"] for row in history
    )  # it falls in time
    assert Run(tmp_path / "run").config == model.config.replace(device="auto")


def test_rungs_that_would_take_too_long_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(
        planning, "seconds_per_epoch", lambda trainer, runs, most, show: 0.1 * len(runs)
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    now = iter(np.arange(0, 10_000, 5.0))
    monkeypatch.setattr(
        "time.perf_counter", lambda: float(next(now))
    )  # every rung takes 5 s
    monkeypatch.setattr(
        trying,
        "held_out_losses",
        certain(lambda trials: [1.0 + i for i in range(len(trials))]),
    )
    for budget, expected in (
        (80, 3),
        (60, 2),
        (30, 1),
    ):  # of 18 seconds, measuring takes 5 and two rungs 10
        run = tuned(tmp_path / f"run-{budget}", places(300), budget=budget, epochs=100)
        plan = read(tmp_path / f"run-{budget}")
        assert plan["seconds"] == [5.0] * expected
        assert len(plan["rungs"]) == expected
        assert plan["measured"] + sum(plan["seconds"]) <= max(
            0.3 * budget, 10
        )  # one rung is always made
        assert plan["chosen"]["augment"] == run.config.augment == "crop"
    usual = {
        "widths": 32,
        "batch_size": 32,
        "epochs": 100,
    }  # two variations take one and a half times as long
    for budget, expected in (
        (59, 3),
        (57, 2),
    ):  # 17.7 seconds for 5 + 5 + 7.5, 17.1 are too few
        rfdlc.train(
            places(300),
            "rf-dlc",
            tmp_path / f"usual-{budget}",
            **usual,
            tune=2,
            budget=budget,
        )
        assert len(read(tmp_path / f"usual-{budget}")["rungs"]) == expected - 1


@pytest.fixture
def slow(simulated_steps):
    """A clock (now, and the seconds of a step of each particle), and the runs of each
    stack that was measured.
    """
    clock, measured = [0.0, 1.0], []
    simulated_steps(
        clock,
        lambda net: net.runs * net.particles * clock[1],
        lambda net: measured.append(net.runs),
    )
    return clock, measured


def test_without_a_budget_the_time_is_said_before_the_trials(
    tmp_path, slow, monkeypatch, capsys
):
    """Steps of 4 s, 6 of an epoch: 100 epochs, and 30% for trials."""
    monkeypatch.setattr(
        trying, "held_out_losses", certain(lambda trials: [1.0] * len(trials))
    )
    data = rfdlc.load({"train": places(192), "val": places(50), "test": places(50)})
    with shown():
        tuned(tmp_path / "run", data, epochs=100, tune="auto")
    told = capsys.readouterr().err
    assert (
        "time       about 0:52:00 in all, a quarter of it for the trials; --budget 10m"
        " limits it" in told
    )
    assert told.index("time       about") < told.index("chosen     ")


def test_slow_steps_leave_the_budget_to_the_training(tmp_path, slow, capsys):
    """Steps of 4 s, 6 of an epoch, in a budget of 200 s: 8 trials side by side would
    take 8 s a step.
    """
    clock, measured = slow
    data = rfdlc.load({"train": places(192), "val": places(50), "test": places(50)})
    with shown():
        run = tuned(tmp_path / "run", data, budget=200, epochs=100)
    plan = read(tmp_path / "run")
    assert measured == [1]  # the training alone
    assert clock[0] == plan["measured"] == 8.0  # two steps: 5% of 200 s are 10 s
    assert plan["seconds_per_epoch"] == 24.0
    assert plan["rungs"] == []
    assert run.config.epochs == int(0.9 * (200 - 8) / 24) == 7
    told = (
        f"too short  7 of 100 epochs; {int(np.ceil(8 + 100 * 24 * 1.3 / 0.9))} s give"
        " all of them; fewer"
    )
    err = capsys.readouterr().err
    assert told in err
    assert (
        f"; {int(np.ceil(8 + 500 * 4 / 0.9))} s give 500 steps, about the least of"
        " use\n" in err
    )


def test_the_size_of_images_that_a_budget_has_time_for_is_named():
    config, plan = (
        TrainConfig(budget=180, epochs=100),
        TrialPlan(epochs=1, seconds_per_epoch=86, rungs=[]),
    )
    told = planning._remedy(config, plan, planning.Speed(86.0, 1.0, 10.0), 7, (128, 16))
    wanted = 500 * 86 / 7 / 0.9
    assert told.startswith(f"; {int(np.ceil(10 + wanted))} s give 500 steps")
    assert told.endswith("so does data.image_size=16 in this budget")
    assert int(128 * (170 / wanted) ** 0.5) // 8 * 8 == 16
    assert "image_size" not in planning._remedy(
        config, plan, planning.Speed(86.0, 1.0, 10.0), 7, (128, 64)
    )


def test_one_step_is_measured_however_long_it_takes(tmp_path, slow):
    clock, _ = slow
    data = rfdlc.load({"train": places(192), "val": places(50), "test": places(50)})
    for budget, expected in (
        (60, int(0.9 * (60 - 8) / 48)),
        (200, int(0.9 * (200 - 8) / 48)),
        (5, 1),
    ):
        clock[:] = 0.0, 2.0
        run = tuned(tmp_path / str(budget), data, budget=budget, epochs=5)
        assert read(tmp_path / str(budget))["measured"] == 8.0
        assert run.config.epochs == max(1, expected)


def test_trials_are_measured_where_their_steps_are_quick(tmp_path, slow, monkeypatch):
    monkeypatch.setattr(
        trying,
        "held_out_losses",
        certain(lambda trials: [1.0 + i for i in range(len(trials))]),
    )
    slow[0][1] = 0.1
    run = tuned(tmp_path / "run", places(200), budget=600, epochs=100)
    plan = read(tmp_path / "run")
    assert slow[1] == [1, 8]
    assert 0 < plan["measured"] < 0.05 * 600
    assert plan["rungs"]
    left = 600 - plan["measured"]  # trials took no time: theirs goes to epochs
    assert (
        run.config.epochs
        == int(0.9 * left / plan["seconds_per_epoch"])
        > int(0.9 * left / 1.3 / 2)
    )


def test_trials_that_were_measured_while_the_machine_was_busy_are_not_cut_short(
    tmp_path, monkeypatch
):
    """As if steps of trials took fifty times as long as those of the training, which
    has three of their networks.
    """
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    monkeypatch.setattr(
        trying,
        "held_out_losses",
        certain(lambda trials: [1.0 + i for i in range(len(trials))]),
    )

    def lengths(slow):
        def seconds(trainer, runs, most, show):
            return 0.01 * (len(runs) * slow if len(runs) > 1 else 1)

        monkeypatch.setattr(planning, "seconds_per_epoch", seconds)
        tuned(tmp_path / str(slow), places(300), budget=600, epochs=100)
        return [rung["epochs"] for rung in read(tmp_path / str(slow))["rungs"]]

    assert lengths(50) == lengths(2)
    assert lengths(0.5)[0] > lengths(2.1)[0] >= 3


def test_a_rung_that_runs_out_of_time_is_stopped_and_left_out(tmp_path, monkeypatch):
    """Trials of 1,000 steps of 0.1 s in a budget of 60 s, whatever was measured
    before.
    """
    monkeypatch.setattr(
        planning,
        "seconds_per_epoch",
        lambda trainer, runs, most, show: 0.001 * len(runs),
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def steps(net, stages, start, show, later):
        for _ in range(1000):
            clock[0] += 0.1
            show(1, "")
            yield

    monkeypatch.setattr(trying, "epochs", steps)
    run, plan = (
        tuned(tmp_path / "run", places(300), budget=60, epochs=100),
        read(tmp_path / "run"),
    )
    assert clock[0] == pytest.approx(0.3 * 60, abs=0.11)
    assert plan["rungs"] == []
    assert plan["seconds"] == [pytest.approx(18, abs=0.11)]  # nothing else was begun
    assert plan["chosen"] == {"epochs": run.config.epochs}


def test_the_epochs_of_a_budget_are_recorded(tmp_path):
    data = rfdlc.load(places(200))
    model = tuned(tmp_path / "run", data, budget="2s", epochs=100)
    assert model.config.epochs == read(tmp_path / "run")["chosen"]["epochs"] >= 1
    assert rfdlc.resume(tmp_path / "run", data).config.epochs == model.config.epochs


def test_what_gains_by_more_epochs_is_expected_to_gain_again():
    fast, slow, lost = (
        {"augment": "none"},
        {"augment": "crop"},
        {"augment": "crop-flip"},
    )
    first = {"epochs": 4, "trials": [fast, slow, lost], "losses": [1.0, 2.0, None]}
    second = {"epochs": 8, "trials": [fast, slow], "losses": [0.9, 1.0]}
    assert best({"epochs": 16, "rungs": [first]}) == [fast, slow, lost]
    assert best({"epochs": 16, "rungs": [first, second]}) == [slow, fast]
    third = {
        "epochs": 8,
        "trials": [fast, slow],
        "losses": [0.9, 1.9],
    }  # falls by 5 and by 10%
    assert best(
        {"epochs": 16, "rungs": [{**first, "losses": [0.95, 2.11, None]}, third]}
    ) == [fast, slow]
    steep = [
        {**first, "losses": [0.9, 1.6, None]},
        {**third, "losses": [0.9, 1.25]},
    ]  # by 22%: again, then by less
    assert best({"epochs": 16, "rungs": steep}) == [fast, slow]
    assert best({"epochs": 32, "rungs": steep}) == [slow, fast]
    for loss, expected in (
        (0.9, slow),
        (0.97, fast),
    ):  # a variation must be clearly better
        varied = {
            "epochs": 8,
            "trials": [fast, slow],
            "losses": [1.0, loss],
            "varies": True,
        }
        assert best(
            {"epochs": 16, "rungs": [{**first, "losses": [9.0, 2.0, None]}, varied]}
        ) == [expected]
    noisy = {
        **first,
        "losses": [9.0, 2.0, None],
        "errors": [0.0, 0.05, 0.0],
    }  # the better one by two of them, too
    assert best({"epochs": 16, "rungs": [noisy, {**varied, "losses": [1.0, 0.9]}]}) == [
        fast
    ]
    assert best(
        {"epochs": 16, "rungs": [noisy, {**varied, "losses": [1.0, 0.84]}]}
    ) == [slow]
    late = {
        "epochs": 8,
        "trials": [fast, slow],
        "losses": [0.8, 1.2],
    }  # near chance at first, then at a factor of 0.4
    assert best(
        {"epochs": 16, "rungs": [{**first, "losses": [0.9, 3.0, None]}, late]}
    ) == [fast, slow]
    plan = {
        "epochs": 50,
        "rungs": [first, {"epochs": 8, "trials": [fast], "losses": [1.2]}],
    }
    assert chosen_of(plan) == {
        "augment": "none",
        "epochs": 4,
    }  # more epochs raised its loss
    assert chosen_of({"epochs": 50, "rungs": [first, second]})["epochs"] == 50
    for error, epochs in (
        (0.09, 4),
        (0.11, 50),
    ):  # a rise by .2 is clear, or less than two standard errors
        plan["rungs"][0] = {**first, "errors": [0.0, error, 0.0]}
        assert chosen_of(plan)["epochs"] == epochs


def test_trials_that_have_hardly_begun_to_learn_are_not_preferred():
    """Losses of a real run at chance, log 5 = 1.609: flips had learned nothing, and
    were chosen for regularising.
    """
    crop, none = {"augment": "crop", "mixup": 0.0}, {"augment": "none", "mixup": 0.0}
    flips, mixed = (
        {"augment": "crop-flip", "mixup": 0.0},
        {"augment": "crop-flip", "mixup": 0.4},
    )
    trials = [crop, none, flips, mixed]
    rung = {
        "epochs": 8,
        "trials": trials,
        "losses": [1.6058, 1.5601, 1.6094, 1.6094],
        "errors": [0.03, 0, 0.03, 0.03],
    }
    plan = {"epochs": 8, "rungs": [rung], "candidates": trials}
    assert best(plan)[0] == mixed
    assert best({**plan, "chance": np.log(5)}) == [none, crop, flips, mixed]
    learned = {
        **rung,
        "losses": [0.62, 0.6, 0.63, 0.64],
    }  # of what have learned as much, those that regularise more
    assert best({**plan, "rungs": [learned], "chance": np.log(5)})[0] == mixed
    noise = {
        **rung,
        "losses": [1.6081, 1.6093, 1.6094, 1.6075],
    }  # then what is trained without trials
    assert best({**plan, "rungs": [noise], "chance": np.log(5)}) == trials


def test_trials_at_chance_choose_nothing(tmp_path, monkeypatch):
    chance = np.log(8)
    near = certain(lambda trials: [chance - 0.001 * k for k, _ in enumerate(trials)])
    monkeypatch.setattr(trying, "held_out_losses", near)
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    run = rfdlc.train(places(300), "rf-dlc", tmp_path / "run", widths=32, epochs=200)
    plan = read(tmp_path / "run")
    assert plan["chance"] == pytest.approx(chance, abs=1e-6)
    assert (run.config.augment, run.config.mixup) == ("crop", 0.0)
    assert not any(rung.get("varies") for rung in plan["rungs"])


def test_what_regularises_less_must_be_clearly_better():
    weak, usual = {"augment": "none", "mixup": 0.0}, {"augment": "crop", "mixup": 0.4}
    half, flipped = (
        {"augment": "crop", "mixup": 0.0},
        {"augment": "crop-flip", "mixup": 0.4},
    )
    rung = {
        "epochs": 8,
        "trials": [weak, half, usual, flipped],
        "losses": [1.0, 1.3, 1.15, 1.14],
    }
    for errors, expected in (
        ([0, 0.1, 0.05, 0.05], [weak, flipped, usual, half]),
        (
            [0, 0.1, 0.08, 0.08],
            [flipped, usual, weak, half],
        ),  # less than two standard errors
        ([0, 0.2, 0.08, 0.08], [flipped, usual, half, weak]),
        ([0, 0.2, 0.08, 0.05], [usual, half, weak, flipped]),
    ):
        assert best({"epochs": 8, "rungs": [{**rung, "errors": errors}]}) == expected
    # What is expected of more epochs scales losses and their standard errors alike:
    # here both losses fall by half.
    first = {
        "epochs": 2,
        "trials": [weak, half],
        "losses": [0.6, 1.8],
        "errors": [0.0, 0.2],
    }
    last = {
        "epochs": 4,
        "trials": [weak, half],
        "losses": [0.3, 0.9],
        "errors": [0.0, 0.2],
    }
    for error, expected in ((0.2, [weak, half]), (0.31, [half, weak])):
        rungs = [first, {**last, "errors": [0.0, error]}]
        assert best({"epochs": 64, "rungs": rungs}) == expected


def test_long_trainings_with_randaugment_are_regularised_more_than_trials_can_show(
    tmp_path, monkeypatch
):
    flips, random = (
        {"augment": "crop-flip", "mixup": 0.4},
        {"augment": "randaugment", "mixup": 0.0},
    )
    rung = {"epochs": 8, "trials": [flips, random], "losses": [1.0, 1.15]}
    for error, stronger, expected in (
        (0.08, True, random),
        (0.08, False, flips),
        (0.07, True, flips),
    ):
        plan = {
            "epochs": 200,
            "rungs": [{**rung, "errors": [0, error]}],
            "stronger": STRONGER if stronger else {},
        }
        assert best(plan)[0] == expected  # preferred within two standard errors
        assert chosen_of(plan) == {
            **expected,
            **(STRONGER if expected is random else {}),
            "epochs": 200,
        }
    for loss, epochs, expected in (
        (1.09, 99, random),
        (1.11, 99, flips),
        (1.09, 100, flips),
    ):  # trials that are short
        plan = {
            "epochs": 200,
            "rungs": [{**rung, "epochs": epochs, "losses": [1.0, loss]}],
            "stronger": STRONGER,
        }
        assert best(plan)[0] == expected
    early = {
        **rung,
        "epochs": 4,
        "losses": [1.0, 0.5],
        "errors": [0, 0],
    }  # more epochs raised its loss: few of them
    plan = {
        "epochs": 200,
        "rungs": [early, {**rung, "errors": [0, 0.08]}],
        "stronger": STRONGER,
    }
    assert chosen_of(plan) == {**random, "epochs": 4}

    def losses(trials):
        return [
            1.0 if trial.config.augment == "randaugment" else 2.0 for trial in trials
        ]

    monkeypatch.setattr(trying, "held_out_losses", certain(losses))
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    names = ("augment", "magnitude", "cutout", "mixup", "weight_decay")
    usual = {"magnitude": 0, "cutout": 0, "mixup": 0.4, "weight_decay": 5e-4}
    for number, (settings, changed) in enumerate(
        (
            (
                {"epochs": 260, "batch_size": 8},
                STRONGER,
            ),  # of 27 steps: a fifth is the test split, a tenth held out
            ({"epochs": 250, "batch_size": 8}, usual),  # too few steps
            ({"epochs": 99, "batch_size": 2}, usual),  # too few epochs
            (
                {"epochs": 260, "batch_size": 8, "weight_decay": 2e-4},
                {**STRONGER, "weight_decay": 2e-4},
            ),
        )
    ):
        config = tuned(tmp_path / str(number), places(300), **settings).config
        assert {name: getattr(config, name) for name in names} == {
            "augment": "randaugment",
            **changed,
        }
    for batch_size, varies in (
        (8, False),
        (64, True),
    ):  # trials without these settings do not say what is best with them
        path = tmp_path / f"batches of {batch_size}"
        rfdlc.train(
            places(300), "rf-dlc", path, widths=32, epochs=260, batch_size=batch_size
        )
        assert any(rung.get("varies") for rung in read(path)["rungs"]) == varies


def test_standard_errors_are_those_of_differences_on_the_same_samples():
    rng, shares = np.random.default_rng(0), np.full(400, 1 / 400)
    common = rng.exponential(5, 400)  # how hard the samples are cancels
    trials = [
        TrialLosses(common + rng.normal(mean, 0.5, 400), shares) for mean in (0.2, 0.0)
    ]
    errors = standard_errors([trials[0], None, trials[1]])
    assert errors[1:] == [0.0, 0.0]
    naive = (trials[0].each - trials[1].each).std() / 20
    assert errors[0] == pytest.approx(naive, rel=1e-9)
    assert errors[0] == pytest.approx(0.5 * 2**0.5 / 20, rel=0.1)
    assert standard_errors([None]) == [0.0]


@pytest.mark.parametrize(
    ("given", "device", "budget"),
    [
        ({}, "cpu", 600),
        ({"particles": 2}, "cpu", 600),
        ({"epochs": 3}, "cpu", 0),
        ({"backbone": "resnet8"}, "cpu", 0),
        ({"budget": "1h"}, "cpu", 3600),
        ({"budget": 0}, "cpu", 0),
        ({"tune": "off"}, "cpu", 0),
        ({}, "cuda", 0),
        (
            {"preset": "digits-lt", "tune": "auto"},
            "cpu",
            0,
        ),  # whose network takes seconds
    ],
)
def test_images_on_a_cpu_have_a_budget_where_nothing_says_how_long(
    tmp_path, monkeypatch, given, device, budget
):
    monkeypatch.setattr(
        "rfdlc.training.tuning.choose_device", lambda wanted: torch.device(device)
    )
    monkeypatch.setattr("rfdlc.training.train.tune", lambda trainer, run: None)
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    assert (
        rfdlc.train(places(60), "rf-dlc", tmp_path / "run", **given).config.budget
        == budget
    )


def test_plain_networks_are_trained_and_decide_for_the_same_prior(tmp_path):
    images, labels = places(400)
    kept = np.flatnonzero(
        (labels < 4)
        & (np.random.default_rng(1).random(400) < np.where(labels == 0, 1, 0.3))
    )
    others, truth = (values[places(200, 1)[1] < 4] for values in places(200, 1))
    data = {"train": (images[kept], labels[kept]), "test": (others, truth)}
    plain = {"prior_tau": "", "head": "linear", "augment": "none", "tune": "off"}
    model = rfdlc.train(
        data, "rf-dlc", tmp_path / "run", widths=32, epochs=60, batch_size=32, **plain
    )
    assert model.config.prior_tau == ()
    np.testing.assert_allclose(
        model.decider.model.train_prior,
        np.bincount(labels[kept]) / len(kept),
        atol=1e-6,
    )
    assert (
        json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]["accuracy"]
        > 0.9
    )
    assert rfdlc.Model.load(tmp_path / "run").config == model.config


def test_a_trial_trains_as_one_of_the_particles_does(tmp_path, monkeypatch):
    configs = []

    def losses(trials):
        configs.extend(trial.config for trial in trials)
        return [1.0] * len(trials)

    monkeypatch.setattr(trying, "held_out_losses", certain(losses))
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    run = tuned(tmp_path / "run", places(300), epochs=100)
    trial = configs[0]
    assert {config.learning_rate for config in configs} == {0.05 / 4}
    assert trial_of(run, 5, {"learning_rate": 0.02}).config.learning_rate == 0.02 / 4
    starts, curves = torch.randn(4, 3), torch.rand(4, 3)
    together = [start.clone().requires_grad_() for start in starts]
    alone = starts[0].clone().requires_grad_()
    options = {"momentum": run.config.momentum, "nesterov": True}
    many = torch.optim.SGD(
        together,
        run.config.learning_rate,
        weight_decay=run.config.weight_decay,
        **options,
    )
    one = torch.optim.SGD(
        [alone], trial.learning_rate, weight_decay=trial.weight_decay, **options
    )
    for _ in range(20):
        losses = [
            (curve * (w - 1).abs() ** 1.5).sum()
            for w, curve in zip(together, curves, strict=True)
        ]
        many.zero_grad()
        torch.stack(losses).mean().backward()  # as a step takes it
        many.step()
        one.zero_grad()
        (curves[0] * (alone - 1).abs() ** 1.5).sum().backward()
        one.step()
    torch.testing.assert_close(together[0], alone)
    adaptive = rfdlc.TrainConfig(
        optimiser="adamw", particles=3, learning_rate=0.01
    )  # which no factor of a loss changes
    assert measuring.alone(adaptive)["learning_rate"] == 0.01


def test_losses_weigh_classes_equally_at_the_best_temperature():
    rng = np.random.default_rng(0)
    classes = rfdlc.Classes(["a", "b", "c"], [60, 30, 10])
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    logits = 5 * (np.eye(3)[labels] + rng.normal(0, 1, (100, 3)))
    decider = rfdlc.Decider(rfdlc.Utility.one_hot(classes), train_prior=[0.6, 0.3, 0.1])
    found = balanced_losses(
        rfdlc.Predictions(logits=logits, targets=labels, classes=classes), decider
    ).mean
    corrected = logits - np.log([0.6, 0.3, 0.1])
    best = np.inf
    for temperature in np.exp(np.linspace(-2, 5, 1000)):
        log_p = corrected / temperature
        log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
        best = min(best, -np.mean([log_p[labels == c, c].mean() for c in range(3)]))
    assert found == pytest.approx(best, rel=1e-3)
    noise = rfdlc.Predictions(
        logits=100 * rng.normal(0, 1, (100, 3)), targets=labels, classes=classes
    )
    assert (
        found < balanced_losses(noise, decider).mean <= np.log(3) + 1e-3
    )  # overconfident, but not worse than chance
    many = np.repeat([0, 1, 2], [6000, 30, 10])
    timid = (
        np.float32(3) * np.eye(3, dtype=np.float32)[many]
    )  # so that a low temperature is best
    timid[0] = 0, 30, 0  # and one is quite wrong: 32 bits hold no probability as small
    with warnings.catch_warnings(action="error"):
        sure = balanced_losses(
            rfdlc.Predictions(logits=timid, targets=many, classes=classes), decider
        )
    assert np.isfinite(sure.each).all()


def test_a_trial_that_diverges_is_left_out(tmp_path, monkeypatch):
    trials = [
        {"augment": "none", "learning_rate": 1e30},
        {"augment": "none", "learning_rate": 0.05},
    ]
    monkeypatch.setattr(planning, "find_candidates", lambda *_: trials)
    model = tuned(tmp_path / "run", places(200), epochs=30)
    assert [loss is None for loss in read(tmp_path / "run")["rungs"][0]["losses"]] == [
        True,
        False,
    ]
    assert model.config.learning_rate == pytest.approx(0.05)


def test_runs_of_a_stack_may_differ_in_augmentation_and_mixup(tmp_path):
    data = rfdlc.load(arrows(120))
    each = [
        {"augment": "none", "mixup": 0.0, "seed": 1},
        {"augment": "crop-flip", "mixup": 0.4, "seed": 1},
        {"augment": "randaugment", "mixup": 0.0, "seed": 2},
        {"augment": "crop-flip-rotate", "mixup": 0.8, "seed": 1},
    ]
    common = {**SMALL, "epochs": 2, "tune": "off"}
    specs = [
        rfdlc.RunSpec(tmp_path / f"many-{i}", "rf-dlc", {**common, **own})
        for i, own in enumerate(each)
    ]
    together = rfdlc.train_many(data, specs)
    for i, (model, own) in enumerate(zip(together, each, strict=True)):
        alone = rfdlc.train(data, "rf-dlc", tmp_path / f"alone-{i}", **common, **own)
        for name, weight in alone.net.state_dict().items():
            torch.testing.assert_close(
                model.net.state_dict()[name], weight, rtol=1e-4, atol=1e-5
            )


def test_features_and_own_mixup(tmp_path, monkeypatch):
    monkeypatch.setattr(
        trying,
        "held_out_losses",
        certain(lambda trials: [1.0 + i for i in range(len(trials))]),
    )
    monkeypatch.setattr("rfdlc.training.trainer.Trainer.fit", lambda self, runs: runs)
    images, labels = places(300)
    features = images.reshape(300, 64).astype(np.float32)
    tuned(tmp_path / "run", (features, labels), tune="auto", epochs=100, head="cosine")
    tried = [own for rung in read(tmp_path / "run")["rungs"] for own in rung["trials"]]
    assert {own["augment"] for own in tried} == {"auto"}  # which features do not have
    assert {own["mixup"] for own in tried} == {
        0.0,
        0.3,
    }  # the mixup of the preset, or none
    assert {own.get("learning_rate", 0.05) for own in tried} == {
        0.05
    }  # as it was given


def test_a_budget_for_features(tmp_path):
    images, labels = places(300)
    features = np.repeat(images.reshape(300, 64), 2, axis=1).astype(np.float32)
    model = rfdlc.train((features, labels), "rf-dlc", tmp_path / "run", budget="3s")
    assert model.config.preset == "features"
    assert read(tmp_path / "run")["chosen"]["epochs"] == model.config.epochs


def test_presets_of_benchmarks_have_no_trials():
    assert resolve("rf-dlc", "cifar100-lt", {}, "images")[1].tune == "off"
    assert resolve("rf-dlc", "mine", {}, "images")[1].tune == "auto"
    assert resolve("ce", "mine", {}, "images")[1].tune == "off"
    assert (
        resolve("ce", "mine", {}, "images")[1].augment == "crop"
    )  # no flips without trials
    assert resolve("rf-dlc", "imagenet-lt", {}, "images")[1].augment == "crop-flip"


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("crt", {"tune": "auto"}, "methods of one stage"),
        ("rf-dlc", {"tune": "auto", "hold_out": 0}, "held-out samples"),
        ("rf-dlc", {"tune": "1"}, "expected auto, off, or a number"),
        ("rf-dlc", {"budget": "10 minutes"}, "not a duration"),
    ],
)
def test_what_is_not_possible_raises(tmp_path, method, settings, message):
    with pytest.raises(InputError, match=message):
        rfdlc.train(places(50), method, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
    if "tune" in settings:
        with pytest.raises(InputError, match=r"trained alone|expected auto"):
            rfdlc.train_many(
                places(50), [rfdlc.RunSpec(tmp_path / "run", method, settings)]
            )


def test_runs_side_by_side_have_no_trials(tmp_path):
    specs = [
        rfdlc.RunSpec(
            tmp_path / str(tune),
            "rf-dlc",
            {**SMALL, "epochs": 1, "tune": tune, "budget": 0},
        )
        for tune in (False, "off")
    ]
    models = rfdlc.train_many(places(50), specs)
    assert [model.config.tune for model in models] == ["off", "off"]
    assert not list(tmp_path.glob("*/tuning.json"))


def test_a_short_budget_takes_smaller_networks(tmp_path, slow, capsys):
    """Two steps of an epoch, a second for each particle: 60 s have time for fewer than
    a quarter of 100 epochs.
    """
    clock, _ = slow
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 3, 16, 16)).astype(np.uint8), np.arange(60) % 3
    usual = {"batch_size": 32, "epochs": 100, "tune": "off", "particles": 3}
    for number, (budget, given, backbone, particles) in enumerate(
        [
            (60, {}, "cnn", 3),
            (20_000, {}, "auto", 3),
            (60, {"backbone": "resnet20"}, "resnet20", 3),
        ]
    ):
        clock[0] = 0.0
        with shown():
            run = rfdlc.train(
                images,
                "rf-dlc",
                tmp_path / str(number),
                **usual,
                **given,
                budget=budget,
            )
        assert (run.config.backbone, run.config.particles) == (backbone, particles)
        assert Run(tmp_path / str(number)).config.backbone == backbone
        assert ("smaller    cnn, particles: 3," in capsys.readouterr().err) == (
            backbone == "cnn"
        )
    del usual["particles"]
    clock[0] = 0.0
    run = rfdlc.train(images, "rf-dlc", tmp_path / "alone", **usual, budget=60)
    assert (run.config.backbone, run.config.particles) == ("cnn", 1)
    assert (run.config.optimiser, run.config.learning_rate, run.config.mixup) == (
        "adamw",
        3e-3,
        0,
    )
    assert Run(tmp_path / "alone").config == run.config
    clock[0] = 0.0
    run = rfdlc.train(
        images, "rf-dlc", tmp_path / "sgd", **usual, budget=60, optimiser="sgd"
    )  # which stays
    before = resolve("rf-dlc", "arrays", usual, "images", 54)[1]
    assert (run.config.backbone, run.config.particles, run.config.optimiser) == (
        "cnn",
        1,
        "sgd",
    )
    assert run.config.learning_rate == pytest.approx(
        before.learning_rate / before.particles
    )
    assert run.config.weight_decay == pytest.approx(
        before.weight_decay * before.particles
    )
