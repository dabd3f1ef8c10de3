"""Grids from data to rows, on data small enough for a CPU."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from paper import grids, results
from paper.__main__ import main
from paper.experiments import Experiment, run_grid
from rfdlc.errors import InputError
from rfdlc.training.trainer import TrainingInterrupted

DIGITS = """
seeds = [0, 1]
calibration = { hold_out = 0.2, seeds = [0] }
[data]
source = "digits-lt"
[[stacks]]
runs = [{ method = "ce", epochs = 1 }]
[[stacks]]
runs = [{ method = "rf-dlc", epochs = 1, particles = 2 }]
"""
LISTS = """
seeds = [0]
[data]
source = "imagenet-lt"
name = "imagenet-lt"
options = { image_size = 32 }
[[stacks]]
[[stacks.runs]]
method = "rf-dlc-paper"
epochs = 1
particles = 2
backbone = "resnet8"
shared_stages = 1
batch_size = 8
workers = 0
"""


TASK = """
seeds = [0]
[data]
source = "cifar10-lt"
name = "cifar10-lt"
options = { factor = 2 }
[[stacks]]
runs = [
  { method = "rf-dlc-paper" },
  { method = "rf-dlc-paper", utility = "bird-plane" },
]
"""


def grid_of(tmp_path, text, **extra):
    path = tmp_path / "made.toml"
    path.write_text(text)
    return grids.read(str(path), extra=extra)


@pytest.fixture
def forbidden(monkeypatch):
    """From now on nothing may be trained."""

    def set_up():
        def fail(*_, **__):
            raise AssertionError("trained again")

        monkeypatch.setattr("rfdlc.training.train.train_many", fail)

    return set_up


def test_digits_from_grid_to_rows(tmp_path, forbidden):
    grid = grid_of(tmp_path, DIGITS)
    said = []
    experiment = Experiment(
        grid,
        tmp_path / "runs",
        tmp_path / "out",
        tmp_path / "light",
        commit="abc",
        beside=2,
    )
    run_grid(experiment, tmp_path, time_budget=-1, say=said.append)
    assert ["time budget" in line for line in said] == [True, True, False]
    run_grid(experiment, tmp_path, logits_seeds=[1], say=said.append)
    found = results.Results(tmp_path / "out")
    assert found.measured("digits-lt") == ["ce+epochs=1", "rf-dlc+epochs=1+particles=2"]
    for run in found.measured("digits-lt"):
        assert set(found.by_seed("digits-lt", run, "argmax", "acc")) == {0, 1}
        assert found.mean("digits-lt", run, "calibrated -1", "fhr") is not None
    row = next(
        row for row in found.runs["digits-lt"] if row["run"].startswith("rf-dlc")
    )
    assert (row["commit"], row["settings"]) == ("abc", "epochs=1 particles=2")
    assert float(row["seconds"]) > 0
    assert row["beside"] == "2"
    assert int(row["parameters"]) == 2 * (
        64 * 128 + 3 * 128 + 128 * 10 + 10
    )  # bias, scale and shift of the hidden layer
    assert "torch" in row["versions"]
    kept = sorted(
        str(path.parent.relative_to(tmp_path / "light"))
        for path in tmp_path.glob("light/**/config.json")
    )
    assert kept == [
        f"digits-lt/{run}/{part}"
        for run in found.measured("digits-lt")
        for part in ("held-out-0", "seed-1")
    ]
    forbidden()
    before = {path: path.read_bytes() for path in tmp_path.glob("out/**/*.csv")}
    run_grid(
        experiment, tmp_path, logits_seeds=[1], say=said.append
    )  # finished: nothing to do
    run_grid(
        experiment, tmp_path, logits_seeds=[1], rescore=True, say=said.append
    )  # the same rows again
    assert {path: path.read_bytes() for path in tmp_path.glob("out/**/*.csv")} == before
    light = Experiment(grid, tmp_path / "gone", tmp_path / "again", tmp_path / "light")
    assert (
        light.score([run for stack in grid.stacks for run in stack]) == 2
    )  # seed 1 of both, from light copies alone
    again = results.Results(tmp_path / "again").by_seed(
        "digits-lt", "ce+epochs=1", "calibrated", "acc"
    )
    assert again[1] == pytest.approx(
        found.by_seed("digits-lt", "ce+epochs=1", "calibrated", "acc")[1], abs=0.5
    )
    # a run that was finished when its stack was interrupted is of the commit that goes
    # on
    (tmp_path / "runs/digits-lt/ce+epochs=1/seed-0/experiment.json").unlink()
    run_grid(
        Experiment(grid, tmp_path / "runs", tmp_path / "third", commit="def"),
        tmp_path,
        say=said.append,
    )
    rows = results.Results(tmp_path / "third").runs["digits-lt"]
    assert [
        (row["commit"], bool(row["seconds"]), row["beside"]) for row in rows[:2]
    ] == [
        ("def", False, ""),
        ("abc", True, "2"),
    ]


def test_a_run_scored_before_it_was_calibrated_is_not_finished(tmp_path):
    without = DIGITS.replace("calibration = { hold_out = 0.2, seeds = [0] }", "")
    assert without != DIGITS
    for text, expected in (
        (without, []),
        (DIGITS, ["ce+epochs=1", "rf-dlc+epochs=1+particles=2"]),
    ):
        experiment = Experiment(
            grid_of(tmp_path, text), tmp_path / "runs", tmp_path / "out"
        )
        run_grid(experiment, tmp_path, say=lambda line: None)
        found = results.Results(tmp_path / "out")
        calibrated = [
            run
            for run in found.measured("digits-lt")
            if found.mean("digits-lt", run, "calibrated", "acc")
        ]
        assert calibrated == expected
        assert not [
            run for stack in experiment.grid.stacks for run in experiment.missing(stack)
        ]


def test_whole_folders_calibrate_rather_than_light_ones(tmp_path):
    """Logits of light copies are rounded: metrics must not depend on how folders are
    called.
    """
    for folder in (
        "a-light/digits-lt/ce/held-out-0",
        "runs/digits-lt/ce/held-out-0",
        "runs/digits-lt/ce/held-out-1",
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "held-out.npz").touch()
    experiment = Experiment(
        grids.read("digits"), tmp_path / "runs", tmp_path / "out", tmp_path / "a-light"
    )
    chosen = [
        experiment.calibration(grids.Wanted("ce", {}, seed)) for seed in (0, 1, 2)
    ]
    assert [str(path.relative_to(tmp_path)) for path in chosen] == [
        f"runs/digits-lt/ce/held-out-{k}" for k in (0, 1, 0)
    ]


def write_lists(folder, stem, **counts):
    """Images of 32 x 32 in lists of `path label`, so many of each class in each
    split.
    """
    rng = np.random.default_rng(0)
    for split, each in counts.items():
        lines = []
        for label, count in enumerate(each):
            for i in range(count):
                name = f"{split}-{label}-{i}.png"
                pixels = rng.integers(0, 80, (32, 32, 3), dtype=np.uint8)
                pixels[..., label] += 120
                Image.fromarray(pixels).save(folder / name)
                lines.append(f"{name} {label}")
        (folder / f"{stem}_{split}.txt").write_text("\n".join(lines) + "\n")


def test_an_image_list_in_the_format_of_imagenet_lt(tmp_path):
    write_lists(
        tmp_path, "ImageNet_LT", train=(16, 8, 4), val=(3, 3, 3), test=(4, 4, 4)
    )
    grid = grid_of(tmp_path, LISTS)
    with pytest.warns(
        UserWarning, match="published"
    ):  # it is not of the published size
        run_grid(
            Experiment(grid, tmp_path / "runs", tmp_path / "out"),
            tmp_path,
            say=lambda line: None,
        )
    found = results.Results(tmp_path / "out")
    (run,) = found.measured("imagenet-lt")
    assert found.mean("imagenet-lt", run, "argmax", "acc", "val") is not None
    assert (
        found.mean("imagenet-lt", run, "calibrated -1", "utility") is not None
    )  # the validation part calibrates
    config = (
        tmp_path / "runs" / "imagenet-lt" / run / "seed-0" / "config.json"
    ).read_text()
    assert '"alpha": 50.0' in config  # the preset of ImageNet-LT was found


def test_the_validation_part_of_inaturalist_is_what_is_scored(tmp_path):
    write_lists(tmp_path, "iNaturalist18", train=(5, 4, 3), val=(2, 2, 2))
    source = grids.read("inaturalist").data.model_copy(
        update={"options": {"image_size": 32}}
    )
    with pytest.warns(UserWarning, match="published"):
        data = source.load(tmp_path)
    assert (data.name, len(data.train), data.val, len(data.test)) == (
        "inaturalist18",
        12,
        None,
        6,
    )


def test_class_sensitive_training_on_cifar_files(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    labels = (np.arange(60) % 10).tolist()
    pixels = np.random.default_rng(0).integers(0, 256, (60, 3072), dtype=np.uint8)
    for file in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        part = slice(0, 60 if file == "test_batch" else 20)
        (folder / file).write_bytes(
            pickle.dumps({"data": pixels[part], "labels": labels[part]}, protocol=2)
        )
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": names}, protocol=2)
    )
    few = {
        "epochs": 2,
        "deferred": 0.5,
        "particles": 1,
        "backbone": "resnet8",
        "batch_size": 64,
    }
    grid = grid_of(tmp_path, TASK, **few)
    run_grid(
        Experiment(grid, tmp_path / "runs", tmp_path / "out"),
        tmp_path,
        say=lambda line: None,
    )
    found = results.Results(tmp_path / "out")
    plain, trained = sorted(found.measured("cifar10-lt"), key=len)
    assert trained == f"{plain}+utility=bird-plane"
    for run in (plain, trained):
        assert found.mean("cifar10-lt", run, "argmax", "rate_bird-plane").seeds == 1
    table = (
        (tmp_path / "runs" / "cifar10-lt" / "bird-plane.csv").read_text().splitlines()
    )
    assert table[3] == "bird,-1,0,1,0,0,0,0,0,0,0"  # a bird taken for an airplane
    differ = [
        found.by_seed("cifar10-lt", run, "argmax", "nll")[0] for run in (plain, trained)
    ]
    assert differ[0] != differ[1]  # the utility reached the training


def test_dry_run_prints_the_cost(capsys):
    main(["run", "digits", "--dry-run", "--seeds", "0", "--only", "ce"])
    assert "2 runs     2.0 network-trainings  ce" in capsys.readouterr().out


@pytest.mark.parametrize("locked", ["out", "out/digits-lt"])
def test_results_that_cannot_be_written_are_told_before_anything_is_trained(
    tmp_path, monkeypatch, forbidden, locked
):
    forbidden()
    (tmp_path / "out/digits-lt").mkdir(parents=True)
    monkeypatch.setattr(
        results.os, "access", lambda place, mode: place != tmp_path / locked
    )
    with pytest.raises(
        InputError, match=f"{locked}: the folder for results cannot be written to"
    ):
        run_grid(
            Experiment(grid_of(tmp_path, DIGITS), tmp_path / "runs", tmp_path / "out"),
            tmp_path,
        )


def test_what_cannot_be_trained_fails_before_anything_is(tmp_path, forbidden):
    forbidden()
    path = tmp_path / "made.toml"
    for wrong, told in (
        ("cee", "method 'cee' is unknown"),
        ('ce", epohcs = "3', "setting 'epohcs' is unknown"),
    ):
        path.write_text(DIGITS + f'[[stacks]]\nruns = [{{ method = "{wrong}" }}]\n')
        with pytest.raises(InputError, match=told):
            main(
                [
                    "run",
                    "digits",
                    str(path),
                    "--runs",
                    str(tmp_path / "runs"),
                    "--results",
                    str(tmp_path / "out"),
                ]
            )
    path.write_text("a file")
    for words in (
        ["--results", str(path)],
        ["--results", str(tmp_path / "out"), "--logits", str(path)],
    ):
        with pytest.raises(InputError, match="cannot be made"):
            main(["run", "digits", "--runs", str(tmp_path / "runs"), *words])


def test_data_that_are_missing_are_asked_for_by_an_option_that_is_there(tmp_path):
    with pytest.raises(
        InputError,
        match=r"dermamnist was not found.* give its folder with root \((--root)\)",
    ):
        main(
            [
                "run",
                "dermamnist",
                "--root",
                str(tmp_path),
                "--results",
                str(tmp_path / "out"),
                "--seeds",
                "0",
            ]
        )


def test_fewer_than_no_trainings_beside(tmp_path):
    with pytest.raises(InputError, match="--beside -1: expected 0 or more"):
        main(["run", "digits", "--beside", "-1", "--results", str(tmp_path)])


def test_only_takes_names_that_some_grid_has(capsys):
    main(
        [
            "run",
            "digits",
            "ablations",
            "--dry-run",
            "--only",
            "ldam-drw",
            "ensemble-cb+deferred=0.8",
        ]
    )
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "4",
        "digits:",
        "3",
        "ablations:",
    ]
    with pytest.raises(
        InputError, match=r"--only 'ldam-drv' is unknown.*did you mean 'ldam-drw'"
    ):
        main(["run", "digits", "--dry-run", "--only", "ce", "ldam-drv"])


def test_a_damaged_run_folder_is_named(tmp_path):
    folder = tmp_path / "runs/digits-lt/ce/seed-0"
    folder.mkdir(parents=True)
    for name, text in {
        "metrics.json": "{}",
        "experiment.json": "{}",
        "config.json": '{"settings"',
    }.items():
        (folder / name).write_text(text)
    with pytest.raises(InputError, match=r"ce/seed-0/config.json cannot be read"):
        main(
            [
                "run",
                "digits",
                "--rescore",
                "--runs",
                str(tmp_path / "runs"),
                "--results",
                str(tmp_path / "out"),
            ]
        )


def test_a_grid_that_was_edited_is_not_given_what_was_trained_before(
    tmp_path, forbidden
):
    """The names of folders tell neither the share that was held out nor how the data
    were made.
    """
    first = DIGITS[: DIGITS.rindex("[[stacks]]")].replace("[0, 1]", "[0]")
    made = first.replace(
        "\n[[stacks]]", '\nname = "digits-lt"\noptions = { factor = 20 }\n[[stacks]]'
    )
    run_grid(
        Experiment(grid_of(tmp_path, made), tmp_path / "runs", tmp_path / "out"),
        tmp_path,
    )
    forbidden()
    run_grid(
        Experiment(grid_of(tmp_path, made), tmp_path / "runs", tmp_path / "again"),
        tmp_path,
    )
    for old, new, told in (
        ("0.2", "0.3", r"hold_out = 0\.2, and the grid has 0\.3"),
        ("20", "5", "'factor': 20.*: 5"),
    ):
        edited = Experiment(
            grid_of(tmp_path, made.replace(old, new)),
            tmp_path / "runs",
            tmp_path / "out",
        )
        with pytest.raises(InputError, match=told):
            run_grid(edited, tmp_path)


def test_a_training_that_diverges_is_named(tmp_path):
    words = [
        "run",
        "digits",
        "--seeds",
        "0",
        "--only",
        "ce",
        "--set",
        "epochs=2",
        "learning_rate=1e20",
        "clip=0",
    ]
    with pytest.raises(InputError, match=r"^ce\+clip=0.*: the loss is not a number"):
        main(
            [
                *words,
                "--runs",
                str(tmp_path / "runs"),
                "--results",
                str(tmp_path / "out"),
            ]
        )


def test_scoring_needs_no_torch(tmp_path):
    """Neither does the command that scores: nothing that it loads may bring torch
    along.
    """
    words = [
        "run",
        "digits",
        "--rescore",
        "--runs",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path / "out"),
    ]
    code = (
        f"import sys; from paper.__main__ import main; main({words}); sys.exit('torch'"
        " in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("digits: 0 scored")


def test_after_an_interruption_the_same_command_goes_on(tmp_path, monkeypatch):
    """`rfdlc resume`, which a training alone recommends, does not know the data of a
    grid.
    """

    def interrupted(*_, **__):
        raise TrainingInterrupted("go on with `rfdlc resume`")

    monkeypatch.setattr("rfdlc.training.train.train_many", interrupted)
    with pytest.raises(
        TrainingInterrupted, match=r"^stopped; run the same command again to continue$"
    ):
        run_grid(
            Experiment(grid_of(tmp_path, DIGITS), tmp_path / "runs", tmp_path / "out"),
            tmp_path,
        )
