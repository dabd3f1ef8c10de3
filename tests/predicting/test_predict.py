"""Predictions of any number of samples: the same rows as Model.predict, whatever was
killed or shared out.
"""

import csv
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas
import pytest
from PIL import Image
from pyarrow import parquet
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app, main
from rfdlc.data.opening import open_samples
from rfdlc.data.samples import InputSpec
from rfdlc.decisions.decider import chosen_decider
from rfdlc.predicting import parts
from rfdlc.predicting import predict as predicting
from rfdlc.predicting.parts import Parts, TableStore
from rfdlc.serving.backend import open_backend

SLOWLY = [sys.executable, "-m", "tests.predicting.slow_parts"]
pytestmark = pytest.mark.usefixtures("quick_tables")
PHOTOS = 61  # not divisible by the size of parts or the number of processes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict") / "digits"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rfdlc.train("digits-lt", out=folder, epochs=2, widths=(8,), device="cpu")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(PHOTOS):
        (root / str(i % 10)).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 8 + i % 5), dtype=np.uint8)).save(
            root / str(i % 10) / f"{i}.png"
        )
    return root


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(predicting, "PART_ROWS", 8)


def expected(run, source, **options):
    model = rfdlc.Model.load(run, device="cpu")
    found = model.predict(source, **options)
    return found, np.asarray(model.decider.probabilities(found))


def same(out, run, source, **options):
    table, (found, probabilities) = (
        rfdlc.Predictions.load(out),
        expected(run, source, **options),
    )
    np.testing.assert_allclose(table.scores.values[0], probabilities, atol=1e-6)
    assert table.ids.tolist() == found.ids.tolist()
    assert (table.targets is None) == (found.targets is None)
    assert found.targets is None or table.targets.tolist() == found.targets.tolist()


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_folder(run, photos, tmp_path, kind):
    done = rfdlc.predict(run, photos, tmp_path / f"p.{kind}")
    assert (done.samples, done.skipped, done.complete) == (PHOTOS, 0, True)
    same(done.path, run, photos)
    assert [file.name for file in tmp_path.iterdir()] == [f"p.{kind}"]


def test_actions(run, photos, tmp_path):

    model = rfdlc.Model.load(run, device="cpu")
    utility = rfdlc.Utility.tail_sensitive(model.classes).with_abstain(0.5)
    done = rfdlc.predict(run, photos, tmp_path / "p.parquet", utility=utility)
    table, explained = (
        pandas.read_parquet(done.path),
        model.decider.replace(utility=utility).explain(model.predict(photos)),
    )
    assert table["action"].tolist() == [utility.actions[i] for i in explained.action]
    np.testing.assert_allclose(table["expected_utility"], explained.value, atol=1e-6)
    same(done.path, run, photos)  # the two columns are no classes
    with pytest.raises(rfdlc.InputError, match="a ndarray is not a path"):
        model.open_samples(np.zeros((2, 2)))
    options = {"utility": utility, "target prior": "uniform", "raw": True}
    for name, value in options.items():
        told = (
            rf"p.npz: an .npz file holds logits, not decisions, and takes no {name}:"
            r" write a table"
        )
        with pytest.raises(rfdlc.InputError, match=told):
            rfdlc.predict(
                run, photos, tmp_path / "p.npz", **{name.replace(" ", "_"): value}
            )


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_probabilities_are_never_corrected_twice(run, photos, tmp_path, kind):
    """A file says whether its numbers are raw or corrected; also after a round trip
    through pandas.
    """

    model = rfdlc.Model.load(run, device="cpu")
    decider = model.decider.replace(train_prior="train", target_prior="uniform")
    out, raw = tmp_path / f"p.{kind}", tmp_path / f"raw.{kind}"
    rfdlc.predict(run, photos, out)
    rfdlc.predict(run, photos, raw, raw=True)
    frame = pandas.read_csv(out) if kind == "csv" else pandas.read_parquet(out)
    frame.to_csv(tmp_path / "again.csv", index=False)
    for again in (out, tmp_path / "again.csv"):
        with pytest.raises(
            rfdlc.InputError,
            match=r"calibrated and corrected already.*rfdlc predict --raw",
        ):
            rfdlc.evaluate(rfdlc.Predictions.load(again), decider=decider)
    for call in (decider.decide, rfdlc.Decider(decider.utility).fit):
        with pytest.raises(rfdlc.InputError, match="calibrated and corrected already"):
            call(frame)
    plain = rfdlc.Decider(rfdlc.Utility.one_hot(model.classes), calibration=None)
    expected_p = np.asarray(model.decider.probabilities(model.predict(photos)))
    np.testing.assert_allclose(
        plain.probabilities(rfdlc.Predictions.load(out)), expected_p, atol=1e-6
    )
    np.testing.assert_allclose(
        model.decider.probabilities(rfdlc.Predictions.load(raw)), expected_p, atol=1e-5
    )
    if kind == "parquet":
        told = json.loads(parquet.read_schema(out).metadata[b"rfdlc.scores"])
        assert told["scores"] == "corrected"
    rfdlc.Predictions.load(out).save(tmp_path / "p.npz")
    assert rfdlc.Predictions.load(tmp_path / "p.npz", model.classes).scores.corrected


# -- killed, and going on
# --------------------------------------------------------------------------------------


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_kill_9_and_go_on(run, photos, tmp_path, monkeypatch):
    whole, out, parts = (
        tmp_path / "whole.parquet",
        tmp_path / "p.parquet",
        tmp_path / "p.parquet.parts",
    )
    rfdlc.predict(run, photos, whole)
    process = subprocess.Popen([*SLOWLY, "predict", str(run), str(photos), str(out)])
    wait_for(lambda: list(parts.glob("part-*-00000002.parquet")), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    before = list(parts.glob("part-*"))
    assert 3 <= len(before) < 8
    written = []
    monkeypatch.setattr(Parts, "write", _noting(Parts.write, written))
    assert rfdlc.predict(run, photos, out).samples == PHOTOS
    assert len(written) == 8 - len(before)  # no part was done twice
    assert out.read_bytes() == whole.read_bytes()
    assert not parts.exists()


def _noting(write, written):
    def noted(self, part, table, broken):
        written.append(part)
        write(self, part, table, broken)

    return noted


def interrupted(monkeypatch, run, source, out, after=3, **options):
    """A job that ended after some parts."""
    write, done = Parts.write, []

    def failing(self, part, table, broken):
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(part)
        write(self, part, table, broken)

    with monkeypatch.context() as patched:
        patched.setattr(Parts, "write", failing)
        with pytest.raises(KeyboardInterrupt):
            rfdlc.predict(run, source, out, **options)


def test_another_job_does_not_go_on(run, photos, tmp_path, monkeypatch):
    out = tmp_path / "p.csv"
    interrupted(monkeypatch, run, photos, out)
    begun = f"{out}.parts was begun with other"
    with pytest.raises(
        rfdlc.InputError,
        match=f"{begun} settings .utility, columns.:.*remove the folder to start over",
    ):
        rfdlc.predict(
            run,
            photos,
            out,
            utility=rfdlc.Utility.one_hot([str(i) for i in range(10)]).with_abstain(
                0.3
            ),
        )
    with pytest.raises(
        rfdlc.InputError, match=f"{begun} settings .source, columns, number of samples"
    ):
        rfdlc.predict(run, photos / "3", out)
    priors = (
        [0.2] * 4 + [0.1] * 2 + [0.0] * 4,
        [0.2] * 4 + [0.0] * 4 + [0.1] * 2,
    )  # alike in their largest shares
    interrupted(monkeypatch, run, photos, tmp_path / "q.csv", target_prior=priors[0])
    with pytest.raises(
        rfdlc.InputError, match=r"q.csv.parts was begun with other settings .prior.:"
    ):
        rfdlc.predict(run, photos, tmp_path / "q.csv", target_prior=priors[1])
    nearly = np.array(priors[0]) * (1 + 1e-7 * np.arange(10))
    assert (
        rfdlc.predict(run, photos, tmp_path / "q.csv", target_prior=nearly).samples
        == PHOTOS
    )
    decider = run / "decider.json"
    text = decider.read_text()
    try:
        decider.write_text(text.replace('"temperature": ', '"temperature": 1', 1))
        with pytest.raises(rfdlc.InputError, match=f"{begun} settings .model, calib"):
            rfdlc.predict(run, photos, out)
    finally:
        decider.write_text(text)
    assert rfdlc.predict(run, photos, out).samples == PHOTOS


def test_parts_of_another_model_are_never_joined(run, photos, tmp_path, monkeypatch):
    """Also where the description of the job is lost."""
    out, other = tmp_path / "p.parquet", tmp_path / "other"
    shutil.copytree(run, other)
    decider = other / "decider.json"
    decider.write_text(
        decider.read_text().replace('"temperature": ', '"temperature": 9', 1)
    )
    interrupted(monkeypatch, other, photos, out)
    (tmp_path / "p.parquet.parts" / "_rfdlc.json").unlink()
    with pytest.raises(rfdlc.InputError, match=r"p.parquet.parts holds other files"):
        rfdlc.predict(run, photos, out)
    assert rfdlc.predict(other, photos, out).complete  # whose parts they are
    same(out, other, photos)


def test_of_two_racing_models_one_writes(run, photos, tmp_path):
    out, other = tmp_path / "p.parquet", tmp_path / "other"
    shutil.copytree(run, other)
    decider = other / "decider.json"
    decider.write_text(
        decider.read_text().replace('"temperature": ', '"temperature": 9', 1)
    )
    racers = [
        subprocess.Popen(
            [*SLOWLY, "predict", str(model), str(photos), str(out)],
            stderr=subprocess.PIPE,
        )
        for model in (run, other)
    ]
    errors = [racer.communicate()[1].decode() for racer in racers]
    codes = [racer.returncode for racer in racers]
    assert sorted(map(bool, codes)) == [False, True], errors
    assert re.search(
        "another process is writing it|was begun with other settings .model",
        max(errors, key=len),
    )
    same(out, (run, other)[codes.index(0)], photos)


def test_a_file_that_another_process_writes(run, photos, tmp_path):
    out = tmp_path / "p.csv"
    process = subprocess.Popen([*SLOWLY, "predict", str(run), str(photos), str(out)])
    wait_for(lambda: list((tmp_path / "p.csv.parts").glob("part-*")), process)
    with pytest.raises(rfdlc.InputError, match=r"p.csv: another process is writing it"):
        rfdlc.predict(run, photos, out)
    assert process.wait() == 0
    same(out, run, photos)
    assert [file.name for file in tmp_path.iterdir()] == ["p.csv"]


def test_lost_rows_are_counted(run, photos, tmp_path, monkeypatch):
    out = tmp_path / "p.parquet"
    interrupted(monkeypatch, run, photos, out)
    part = sorted((tmp_path / "p.parquet.parts").glob("part-*"))[1]
    parquet.write_table(parquet.read_table(part).slice(1), part)
    with pytest.raises(
        rfdlc.InputError,
        match="holds 7 samples, expected 8; remove it, and run the command again",
    ):
        rfdlc.predict(run, photos, out)
    part.write_bytes(b"nonsense")
    with pytest.raises(
        rfdlc.InputError, match=r"cannot be read.*remove it, and run the command again"
    ):
        rfdlc.predict(run, photos, out)
    assert not out.exists()
    part.unlink()
    rfdlc.predict(run, photos, out)
    same(out, run, photos)


def test_decisions_continue_too(run, photos, tmp_path, monkeypatch):
    utility = rfdlc.Utility.one_hot([str(i) for i in range(10)]).with_abstain(0.3)
    interrupted(monkeypatch, run, photos, tmp_path / "p.csv", utility=utility)
    written = []
    monkeypatch.setattr(Parts, "write", _noting(Parts.write, written))
    done = rfdlc.predict(run, photos, tmp_path / "p.csv", utility=utility)
    assert done.complete
    assert written == [3, 4, 5, 6, 7]
    with open(tmp_path / "p.csv", newline="") as file:
        decided = [row["action"] for row in csv.DictReader(file)]
    assert done.actions == {
        action: decided.count(action) for action in utility.actions
    }  # also of earlier parts


def test_what_never_began_does_not_bar_the_next(run, photos, tmp_path):
    out = tmp_path / "p.csv"
    np.save(tmp_path / "small.npy", np.zeros((3, 1, 4, 4), np.uint8))
    (tmp_path / "rows.csv").write_text("x,target\n1,a\n2,b\n")
    with pytest.raises(rfdlc.InputError, match="trained on"):
        rfdlc.predict(run, tmp_path / "small.npy", out)
    with pytest.raises(
        rfdlc.InputError, match="is a table, but this model was trained on images"
    ):
        rfdlc.predict(run, tmp_path / "rows.csv", out)
    assert rfdlc.predict(run, photos, out).samples == PHOTOS


def test_a_folder_of_somebody_elses_stays(run, photos, tmp_path):
    (tmp_path / "p.csv.parts").mkdir()
    (tmp_path / "p.csv.parts" / "mine.txt").write_text("mine")
    with pytest.raises(rfdlc.InputError, match="holds other files"):
        rfdlc.predict(run, photos, tmp_path / "p.csv")
    assert (tmp_path / "p.csv.parts" / "mine.txt").exists()


def test_killed_while_merging(run, photos, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.csv", tmp_path / "p.csv"
    rfdlc.predict(run, photos, whole)
    for broken_step in ("replace", "unlink"):
        with monkeypatch.context() as patched:
            patched.setattr(
                f"rfdlc.predicting.parts.os.{broken_step}", _interrupting(broken_step)
            )
            with pytest.raises(KeyboardInterrupt):
                rfdlc.predict(run, photos, out)
        rfdlc.predict(run, photos, out)
        assert out.read_bytes() == whole.read_bytes()
        out.unlink()


def _interrupting(step):
    def failing(first, *rest):
        if step == "unlink" or "joined" in str(first):
            raise KeyboardInterrupt
        return replace(first, *rest)

    replace = os.replace
    return failing


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_full_disk_keeps_the_parts(run, photos, tmp_path, monkeypatch, kind):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / f"p.{kind}"
    with monkeypatch.context() as patched:
        patched.setattr(TableStore, "join", full)
        with pytest.raises(
            rfdlc.errors.InputError,
            match=r"cannot be written \(No space left on device\)",
        ):
            rfdlc.predict(run, photos, out)
    assert len(list((tmp_path / f"p.{kind}.parts").glob("part-*"))) == 8
    assert rfdlc.predict(run, photos, out).complete
    same(out, run, photos)


@pytest.mark.parametrize("kind", ["parquet", "csv", "npz"])
def test_names_of_files_that_are_not_utf8(run, photos, tmp_path, kind):
    folder = os.fsencode(tmp_path) + b"/p"
    os.mkdir(folder)
    picture = next(photos.rglob("*.png")).read_bytes()
    for name, content in ((b"caf\xe9.png", picture), (b"\xe9.png", b"no image")):
        with open(folder + b"/" + name, "wb") as file:
            file.write(content)
    done = rfdlc.predict(run, tmp_path / "p", tmp_path / f"p.{kind}", skip_broken=True)
    assert rfdlc.Predictions.load(done.path).ids.tolist() == [r"caf\xe9.png"]
    assert done.skipped == 1


def test_image_files_for_a_model_of_arrays_that_are_not_square(photos):
    taken = InputSpec(rfdlc.Classes(("a", "b")), (1, 8, 9))
    with pytest.raises(
        rfdlc.errors.InputError,
        match="become squares, but this model was trained on arrays of 8x9",
    ):
        open_samples(photos, taken)


# -- several processes
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_ranks_share_the_rows(run, photos, tmp_path, monkeypatch, order):
    out, written = tmp_path / "p.parquet", []
    monkeypatch.setattr(Parts, "write", _noting(Parts.write, written))
    monkeypatch.setenv("WORLD_SIZE", "3")
    told, shares = [], []

    @contextmanager
    def live(total, description, done):
        shown = []
        yield lambda steps, text: shown.append((steps, text))
        assert (
            done + sum(steps for steps, _ in shown) == total
        )  # a share begins at 0 and ends at 100%
        shares.append((total, done, shown[-1][1]))

    monkeypatch.setattr(parts, "live", live)
    for rank in order:
        monkeypatch.setenv("RANK", str(rank))
        told.append(rfdlc.predict(run, photos, out).complete)
    assert told == [False, False, True]
    assert {order[i]: share for i, share in enumerate(shares)} == {
        0: (24, 0, "24 of 24"),
        1: (21, 0, "21 of 21"),
        2: (16, 0, "16 of 16"),
    }
    assert sorted(written) == list(range(8))
    same(out, run, photos)


def test_another_number_of_processes_goes_on(run, photos, tmp_path, monkeypatch):
    out = tmp_path / "p.parquet"
    with monkeypatch.context() as patched:
        patched.setenv("WORLD_SIZE", "2")
        patched.setenv("RANK", "1")
        assert not rfdlc.predict(run, photos, out).complete
    assert rfdlc.predict(run, photos, out).complete
    same(out, run, photos)


def test_a_process_that_comes_when_all_is_done(run, photos, tmp_path, monkeypatch):
    out, written = tmp_path / "p.parquet", []
    rfdlc.predict(run, photos, out)
    monkeypatch.setattr(Parts, "write", _noting(Parts.write, written))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rfdlc.predict(run, photos, out).complete
    assert not written
    assert [file.name for file in tmp_path.iterdir()] == ["p.parquet"]


# -- sources
# --------------------------------------------------------------------------------------


def test_several_images_and_one(run, photos, tmp_path, monkeypatch):
    """As the shell expands *.png: rows in the given order, ids below the common folder,
    whose folders give labels.
    """
    monkeypatch.chdir(photos)
    out, names = tmp_path / "p.csv", ["3/3.png", "1/1.png", "1/11.png"]
    assert (
        CliRunner()
        .invoke(app, ["predict", str(run), *names, "--out", str(out)])
        .exit_code
        == 0
    )
    table, (found, p) = rfdlc.Predictions.load(out), expected(run, photos)
    assert table.ids.tolist() == names
    assert table.targets.tolist() == [3, 1, 1]
    rows = [found.ids.tolist().index(name) for name in names]
    np.testing.assert_allclose(table.scores.values[0], p[rows], atol=1e-6)
    assert (
        CliRunner()
        .invoke(
            app,
            [
                "predict",
                str(run),
                "1.png",
                "11.png",
                "--root",
                "1",
                "--out",
                str(tmp_path / "q.csv"),
            ],
        )
        .exit_code
        == 0
    )
    assert rfdlc.Predictions.load(tmp_path / "q.csv").ids.tolist() == [
        "1.png",
        "11.png",
    ]
    assert (
        CliRunner()
        .invoke(
            app, ["predict", str(run), "3/3.png", "--out", str(tmp_path / "one.csv")]
        )
        .exit_code
        == 0
    )
    one = rfdlc.Predictions.load(tmp_path / "one.csv")
    assert one.ids.tolist() == ["3.png"]
    np.testing.assert_allclose(one.scores.values[0], p[rows[:1]], atol=1e-6)


def test_several_sources_are_images(run, photos, tmp_path):
    for other in (photos / "1", photos / "none.png", photos / "plain.doc"):
        with pytest.raises(
            rfdlc.InputError,
            match=f"{other}: not an existing image file: expected several image files",
        ):
            rfdlc.predict(run, [photos / "3" / "3.png", other], tmp_path / "p.csv")
    with pytest.raises(
        rfdlc.InputError,
        match=r"3.png: an image file has no split 'test': leave it out",
    ):
        rfdlc.predict(run, [photos / "3" / "3.png"], tmp_path / "p.csv", split="test")


def test_lists_with_and_without_labels(run, photos, tmp_path):
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    plain, labelled = photos / "plain.txt", photos / "My_test.txt"
    plain.write_text("# all of them\n" + "\r\n".join(names))
    labelled.write_text("\n".join(f"{name} {name[0]}" for name in names))
    for source, targets in (
        (plain, None),
        (labelled, [int(name[0]) for name in names]),
    ):
        out = tmp_path / "p.parquet"
        rfdlc.predict(run, source, out)
        table = rfdlc.Predictions.load(out)
        assert table.ids.tolist() == names
        assert (None if table.targets is None else table.targets.tolist()) == targets
        same(out, run, source)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0/0.png 10", "line 2: label 10 is out of range: the model has 10 classes"),
        (
            "0/0.png 3",
            (
                "line 2: label 3 is '3' in the model, but the image lies in a folder of"
                " another class"
            ),
        ),
        ("../0.png", "line 2: the path '../0.png' leaves the root"),
        ("0/0.doc", "line 2: expected 'path label', got '0.0.doc'"),
        ("0/none.png", "none.png: the file does not exist"),
    ],
)
def test_wrong_lists(run, photos, tmp_path, line, message):
    (photos / "wrong.txt").write_text(f"0/0.png 0\n{line}\n")
    with pytest.raises(rfdlc.InputError, match=message):
        rfdlc.predict(run, photos / "wrong.txt", tmp_path / "p.csv")


def test_broken_images(run, tmp_path, monkeypatch):
    root, out = tmp_path / "photos", tmp_path / "p.parquet"
    root.mkdir()
    for i in range(30):
        Image.new("L", (8, 8), i).save(root / f"{i:02d}.png")
    gone = [*range(8, 16), 20]  # a whole part, and one more
    for i in gone:
        (root / f"{i:02d}.png").write_bytes(b"no image")
    with pytest.raises(
        rfdlc.InputError, match=r"corrupt: 8 times \(.*08.png.*--skip-broken"
    ):
        rfdlc.predict(run, root, out)
    done = rfdlc.predict(
        run, root, out, skip_broken=True
    )  # goes on where the error was
    assert (done.samples, done.skipped) == (21, 9)
    assert [
        line.split(":")[0].rpartition("/")[2]
        for line in done.skipped_file.read_text().splitlines()
    ] == [f"{i:02d}.png" for i in gone]
    same(out, run, root, skip_broken=True)
    for i in range(30):
        (root / f"{i:02d}.png").write_bytes(b"")
    with pytest.raises(rfdlc.InputError, match="none of the samples can be read"):
        rfdlc.predict(run, root, tmp_path / "p.npz", skip_broken=True)


def test_arrays_are_read_from_the_file(run, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (37, 1, 8, 8), dtype=np.uint8), rng.integers(0, 10, 37)
    model = rfdlc.Model.load(run, device="cpu")
    reference = np.asarray(model.decider.probabilities(model.predict(x)))
    for same in (
        x[:, 0],
        x.transpose(0, 2, 3, 1),
    ):  # images as training takes them, too
        assert np.array_equal(
            model.decider.probabilities(model.predict(same)), reference
        )
    np.save(tmp_path / "only.npy", x)
    np.save(tmp_path / "columns.npy", np.asfortranarray(x))
    np.savez(tmp_path / "plain.npz", x=x, y=y, ids=[f"n{i}" for i in range(37)])
    np.savez_compressed(
        tmp_path / "parts.npz",
        train_x=x[:3],
        train_y=y[:3],
        test_x=x,
        test_y=y.astype(str),
    )
    np.savez(
        tmp_path / "names.npz",
        x=x,
        y=y.astype(float),
        names=[str(9 - i) for i in range(10)],
    )
    np.savez(tmp_path / "others.npz", x=x, y=y, names=[f"class {i}" for i in range(10)])
    targets = {
        "only.npy": None,
        "columns.npy": None,
        "plain.npz": y,
        "parts.npz": y,
        "names.npz": 9 - y,
    }
    for name, wanted in {**targets, "others.npz": None}.items():
        table = rfdlc.Predictions.load(
            rfdlc.predict(run, tmp_path / name, tmp_path / "p.parquet").path
        )
        np.testing.assert_allclose(table.scores.values[0], reference, atol=1e-6)
        assert (
            (table.targets is None)
            if wanted is None
            else (table.targets == wanted).all()
        )
        assert (table.ids is not None) == (name == "plain.npz")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "only.npy").read_bytes()[:-100])
    with pytest.raises(rfdlc.InputError, match=r"cut.npy.*damaged"):
        rfdlc.predict(run, tmp_path / "cut.npy", tmp_path / "p.csv")
    np.savez(tmp_path / "beyond.npz", x=x, y=y + 1, names=[str(i) for i in range(10)])
    with pytest.raises(
        rfdlc.InputError, match="labels go from 1 to 10, but there are 10 names"
    ):
        rfdlc.predict(run, tmp_path / "beyond.npz", tmp_path / "p.csv")
    with pytest.raises(rfdlc.InputError, match="no split 'val'"):
        rfdlc.predict(run, tmp_path / "parts.npz", tmp_path / "p.csv", split="val")


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    kinds = [0] * 60 + [1] * 20
    lines = [
        f"p{i},{rng.normal(40 + 20 * k):.2f},{'red' if k else 'blue'},{k}"
        for i, k in enumerate(kinds)
    ]
    (folder / "train.csv").write_text("\n".join(["patient_id,age,colour,ill", *lines]))
    options = {"target": "ill"}
    rfdlc.train(
        folder / "train.csv",
        "ce",
        folder / "run",
        data_options=options,
        epochs=3,
        device="cpu",
    )
    return folder


def test_tables(patients, tmp_path):

    frame = pandas.DataFrame(
        {"age": [39.0, None, 61.0] * 9, "colour": ["blue", "green", None] * 9}
    )
    frame["patient_id"], frame["Split"] = (
        [f"q{i}" for i in range(27)],
        ["train", "test", "test"] * 9,
    )
    frame.to_csv(tmp_path / "new.csv", index=False)
    frame.to_parquet(tmp_path / "new.parquet", row_group_size=5)
    model = rfdlc.Model.load(patients / "run", device="cpu")
    reference = np.asarray(
        model.decider.probabilities(
            model.predict(frame.astype(object).where(frame.notna(), None))
        )
    )
    for name in ("new.csv", "new.parquet"):
        for split, rows in ((None, slice(None)), ("test", np.arange(27) % 3 > 0)):
            out = rfdlc.predict(
                patients / "run", tmp_path / name, tmp_path / "p.parquet", split=split
            ).path
            table = rfdlc.Predictions.load(out)
            np.testing.assert_allclose(
                table.scores.values[0], reference[rows], atol=1e-6
            )
            assert table.ids.tolist() == frame["patient_id"][rows].tolist()
    (tmp_path / "wrong.csv").write_text("age,colour\n3,red\n4,red,5\n")
    with pytest.raises(rfdlc.InputError, match=r"wrong.csv line 3: 3 cells"):
        rfdlc.predict(patients / "run", tmp_path / "wrong.csv", tmp_path / "p.csv")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_are_kept_by_row(patients, tmp_path, kind):
    """Also those of one split and in other types; and the result is decided per day,
    though it has other columns.
    """

    rng = np.random.default_rng(1)
    frame = pandas.DataFrame(
        {"age": rng.normal(50, 10, 60), "colour": rng.choice(["blue", "red"], 60)}
    )
    frame["patient_id"], frame["split"] = (
        [f"q{i}" for i in range(60)],
        ["train", "test", "test"] * 20,
    )
    hours = pandas.date_range(
        "2026-10-24 20:00", periods=60, freq="h", tz="Europe/Berlin"
    )  # over the end of summer
    frame["seen"], frame["bed"] = hours[rng.permutation(60)], rng.integers(0, 9, 60)
    frame["site"] = pandas.Categorical(rng.choice(["=a", "b"], 60))
    source, out = tmp_path / "new.parquet", tmp_path / f"p.{kind}"
    frame.to_parquet(source, row_group_size=7)
    plain = rfdlc.predict(
        patients / "run", source, tmp_path / "plain.parquet", split="test"
    ).path
    words = [
        "predict",
        patients / "run",
        source,
        "--split",
        "test",
        "--out",
        out,
        "--keep",
        "seen",
        "--keep",
        "site",
    ]
    done = CliRunner().invoke(app, list(map(str, [*words, "--keep", "bed"])))
    assert done.exit_code == 0, done.output
    given = frame[frame["split"] == "test"].reset_index(drop=True)
    found = pandas.read_csv(out) if kind == "csv" else pandas.read_parquet(out)
    assert found["id"].tolist() == given["patient_id"].tolist()
    assert found["bed"].tolist() == given["bed"].tolist()
    assert found["site"].str.removeprefix("'").tolist() == given["site"].tolist()
    assert (
        pandas.to_datetime(found["seen"], utc=True)
        == given["seen"].dt.tz_convert("UTC")
    ).all()
    same_scores = (
        rfdlc.Predictions.load(out).scores.values,
        rfdlc.Predictions.load(plain).scores.values,
    )
    np.testing.assert_allclose(*same_scores, atol=1e-6)
    decide = [
        "decide",
        out,
        "--abstain",
        "1.01",
        "--budget",
        "3/day",
        "--time",
        "seen",
        "--json",
    ]
    done = CliRunner().invoke(app, list(map(str, decide)))
    assert done.exit_code == 0, done.output
    handed, days = (
        json.loads(done.stdout)["budget"]["handed_over"],
        given["seen"].dt.strftime("%Y-%m-%d"),
    )
    assert handed == {
        day: min(3, count) for day, count in days.value_counts().sort_index().items()
    }


def test_columns_of_a_list_of_images_are_kept_without_broken_ones(run, tmp_path):
    rng = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(
            tmp_path / f"{i}.png"
        )
    for i in (0, 7, 13):
        (tmp_path / f"{i}.png").write_bytes(b"broken")
    (tmp_path / "list.csv").write_text(
        "path,site\n" + "".join(f"{i}.png,site {i}\n" for i in range(20))
    )
    done = rfdlc.predict(
        run, tmp_path / "list.csv", tmp_path / "p.csv", keep=["site"], skip_broken=True
    )
    with done.path.open(newline="") as file:
        found = [(row["id"], row["site"]) for row in csv.DictReader(file)]
    assert found == [
        (f"{i}.png", f"site {i}") for i in range(20) if i not in (0, 7, 13)
    ]


@pytest.mark.parametrize("named", [True, False])
def test_rows_that_cannot_be_read_are_left_out_if_asked(patients, tmp_path, named):
    """The others have the scores that they have alone, and the ids or numbers of their
    rows.
    """
    frame = pandas.read_csv(patients / "train.csv", dtype=str)[:20].drop(columns="ill")
    frame = frame if named else frame.drop(columns="patient_id")
    frame.to_csv(tmp_path / "fine.csv", index=False)
    broken = frame.copy()
    broken.loc[3, "age"], broken.loc[7, "age"] = "unknown", "1e39"
    broken.to_csv(tmp_path / "new.csv", index=False)
    told = (
        "new.csv: column 'age' holds numbers in the training data, but here 'unknown'"
        " in row 4; or leave such rows out"
    )
    with pytest.raises(rfdlc.InputError, match=told):
        rfdlc.predict(patients / "run", tmp_path / "new.csv", tmp_path / "p.csv")
    broken.drop(columns="colour").to_csv(tmp_path / "narrow.csv", index=False)
    for skip in (False, True):  # no row has what is absent: leaving rows out is no fix
        with pytest.raises(
            rfdlc.InputError,
            match=r"the rows lack the columns colour: expected all that training had$",
        ):
            rfdlc.predict(
                patients / "run",
                tmp_path / "narrow.csv",
                tmp_path / "p.csv",
                skip_broken=skip,
            )
    rfdlc.predict(patients / "run", tmp_path / "fine.csv", tmp_path / "fine-p.csv")
    done = rfdlc.predict(
        patients / "run", tmp_path / "new.csv", tmp_path / "p.csv", skip_broken=True
    )
    assert (done.samples, done.skipped) == (len(frame) - 2, 2)
    why = done.skipped_file.read_text().splitlines()
    assert "'unknown' in row 4" in why[0]
    assert "too large value in row 8 (1e39)" in why[1]
    found, expected = (
        pandas.read_csv(done.path, dtype={"id": str}),
        pandas.read_csv(tmp_path / "fine-p.csv"),
    )
    ids = (
        frame["patient_id"]
        if named
        else pandas.Series(range(1, len(frame) + 1)).astype(str)
    )
    assert found["id"].tolist() == ids.drop([3, 7]).tolist()
    classes = json.loads((patients / "run" / "classes.json").read_text())["names"]
    left = expected[classes].drop([3, 7]).to_numpy()
    np.testing.assert_allclose(found[classes].to_numpy(), left, rtol=1e-5)


def test_columns_that_cannot_be_kept(patients, run, photos, tmp_path):
    table = patients / "train.csv"
    for model, source, out, keep, message in (
        (
            patients / "run",
            table,
            "p.csv",
            "colours",
            "there is no column 'colours': expected one of patient_id, age",
        ),
        (patients / "run", table, "p.csv", "colours", "did you mean 'colour'?"),
        (
            patients / "run",
            table,
            "p.npz",
            "colour",
            "p.npz: an .npz file holds logits, not decisions, and takes no keep",
        ),
        (run, photos, "p.csv", "site", "is not a table: leave out keep"),
    ):
        with pytest.raises(rfdlc.InputError, match=re.escape(message)):
            rfdlc.predict(model, source, tmp_path / out, keep=[keep])
    (tmp_path / "new.csv").write_text("age,colour,action\n40,red,call\n")
    with pytest.raises(
        rfdlc.InputError,
        match="column action cannot be kept: predictions are written to a column",
    ):
        rfdlc.predict(
            patients / "run", tmp_path / "new.csv", tmp_path / "p.csv", keep=["action"]
        )


def test_predictions_are_not_samples(run, photos, tmp_path):
    rfdlc.predict(run, photos, tmp_path / "p.npz", skip_broken=True)
    with pytest.raises(
        rfdlc.InputError,
        match=r"p.npz: holds predictions \(logits\), not samples: `rfdlc decide`",
    ):
        rfdlc.predict(run, tmp_path / "p.npz", tmp_path / "q.npz")


def test_what_cannot_be_written(run, photos, tmp_path, monkeypatch):
    with pytest.raises(
        rfdlc.InputError, match=r"expected one of \.npz, \.parquet, \.csv"
    ):
        rfdlc.predict(run, photos, tmp_path / "p.txt")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("p.npz", "p.csv"):
        with pytest.raises(
            rfdlc.InputError,
            match="2 processes write one file together in Parquet alone",
        ):
            rfdlc.predict(run, photos, tmp_path / name)


def test_commands_never_correct_twice(run, photos, tmp_path):
    def command(*words):
        return CliRunner().invoke(app, list(map(str, words)))

    found = {}
    for name, options in (("corrected.csv", ()), ("raw.csv", ("--raw",))):
        assert (
            command(
                "predict", run, photos, "--out", tmp_path / name, *options
            ).exit_code
            == 0
        )
        found[name] = command(
            "evaluate", tmp_path / name, "--decider", run / "decider.json", "--json"
        )
    assert "calibrated and corrected already" in str(found["corrected.csv"].exception)
    plain = command("evaluate", tmp_path / "corrected.csv", "--json")
    for name in ("accuracy", "nll"):
        assert json.loads(found["raw.csv"].stdout)[name] == pytest.approx(
            json.loads(plain.stdout)[name], abs=1e-4
        )


def test_the_command_says_at_once_what_it_does(
    run, photos, tmp_path, monkeypatch, capsys
):
    def early(*_, **__):
        raise rfdlc.InputError(capsys.readouterr().err)

    monkeypatch.setattr(rfdlc, "predict", early, raising=False)
    monkeypatch.setattr(
        sys,
        "argv",
        ["rfdlc", "predict", str(run), str(photos), "--out", str(tmp_path / "p.csv")],
    )
    with pytest.raises(SystemExit):
        main()
    assert f"reading {run}" in capsys.readouterr().err


def test_the_command(run, photos, tmp_path):
    made = tmp_path / "d.json"
    fit = ["fit", run, "--abstain", "0.3", "-o", made]
    assert CliRunner().invoke(app, list(map(str, fit))).exit_code == 0
    words = [
        "predict",
        run,
        photos,
        "--out",
        tmp_path / "p.parquet",
        "--decider",
        made,
        "--json",
    ]
    told = json.loads(CliRunner().invoke(app, list(map(str, words))).stdout)
    assert (told["samples"], told["skipped"], told["complete"]) == (PHOTOS, 0, True)
    same(tmp_path / "p.parquet", run, photos)
    decided = parquet.read_table(tmp_path / "p.parquet").column("action").to_pylist()
    assert told["actions"] == {
        name: decided.count(name) for name in [*map(str, range(10)), "abstain"]
    }
    shown = CliRunner().invoke(app, list(map(str, words[:-1]))).stdout
    assert f"{PHOTOS} decisions" in shown
    assert re.search(rf"abstain +{decided.count('abstain')} ", shown)
    assert shown.rstrip().endswith(f"{tmp_path / 'p.parquet'}")


def test_the_command_shows_what_was_decided(run, photos, tmp_path):
    """One photo: its class and probability. Many: how often each class was decided,
    also where logits are written.
    """
    out, photo = tmp_path / "one.npz", photos / "0/0.png"
    printed = (
        CliRunner()
        .invoke(app, ["predict", str(run), str(photo), "--out", str(out)])
        .stdout
    )
    (found, (p,)), decider = expected(run, photo), rfdlc.Decider.load(run)
    row = next(line.split() for line in printed.splitlines() if "%" in line)
    names, likely = decider.utility.actions, decider.utility.classes.names[p.argmax()]
    assert row[1:] == [names[decider.decide(found)[0]], likely, f"{p.max():.1%}"]
    told = (
        CliRunner()
        .invoke(app, ["predict", str(run), str(photos), "--out", str(out), "--json"])
        .stdout
    )
    counts = np.bincount(
        decider.decide(expected(run, photos)[0]), minlength=10
    ).tolist()
    assert list(json.loads(told)["actions"].values()) == counts


def test_models_decide_by_one_decider_or_by_what_is_asked_for(run, photos, tmp_path):
    own, utility = (
        rfdlc.Decider.load(run),
        rfdlc.Utility.one_hot([str(i) for i in range(10)]).with_abstain(0.3),
    )
    other = own.replace(utility=utility)
    assert chosen_decider(own, None, None).to_dict() == own.to_dict()
    assert (
        chosen_decider(own, utility, "uniform").model.target_prior.tolist()
        == [0.1] * 10
    )
    assert chosen_decider(own, None, None, other) is other
    for use in (partial(rfdlc.predict, run, photos), partial(rfdlc.export, run)):
        with pytest.raises(
            rfdlc.InputError,
            match="decider has a utility and a target prior of its own",
        ):
            use(
                tmp_path / ("p.csv" if use.func is rfdlc.predict else "m.onnx"),
                decider=other,
                utility=utility,
            )
    with pytest.raises(
        rfdlc.InputError, match="decider has a utility and a target prior of its own"
    ):
        open_backend(run, None, "uniform", other)


def test_the_class_prior_of_the_samples_is_estimated(run, photos, tmp_path):
    def command(*words):
        return CliRunner().invoke(
            app, list(map(str, [*words, "--target-prior", "estimate"]))
        )

    told = json.loads(
        command("predict", run, photos, "--out", tmp_path / "p.csv", "--json").stdout
    )
    assert told["decided_for"].startswith("decided for the estimated class prior")
    model = rfdlc.Model.load(run, device="cpu")
    found = model.predict(photos)
    decider = model.decider.replace(target_prior=model.decider.estimate_prior(found))
    written = rfdlc.Predictions.load(tmp_path / "p.csv").scores.values[0]
    np.testing.assert_allclose(written, decider.probabilities(found), atol=1e-4)
    for words in (("export", run, tmp_path / "model.onnx"), ("serve", run)):
        assert "cannot be estimated here" in str(command(*words).exception)


def test_samples_of_the_training_are_named(tmp_path, recwarn):
    """Metrics on them look better than those of new samples: of a whole source, a
    split, or the folder of a split.
    """
    rng, told = (
        np.random.default_rng(0),
        r"{} of {} samples were in the run's training data: metrics on them",
    )
    lines = [f"{x:.4f},{'ab'[int(x + rng.normal() > 0)]}" for x in rng.normal(size=100)]
    whole, folder = tmp_path / "whole.csv", tmp_path / "splits"
    whole.write_text("\n".join(["x,target", *lines]))
    folder.mkdir()
    for name, part in (("train", lines[:60]), ("test", lines[60:])):
        (folder / f"{name}.csv").write_text("\n".join(["x,target", *part]))
    options = {
        "backbone": "mlp",
        "epochs": 1,
        "widths": (4,),
        "tune": "off",
        "device": "cpu",
    }
    for source in (whole, folder):
        rfdlc.train(source, out=tmp_path / f"run-{source.stem}", **options)
    with pytest.warns(UserWarning, match=told.format(80, 100)):
        rfdlc.predict(tmp_path / "run-whole", whole, tmp_path / "p.csv")
    split = tmp_path / "run-splits"
    for source, chosen in ((folder, "train"), (folder / "train.csv", None)):
        with pytest.warns(UserWarning, match=told.format(60, 60)):
            rfdlc.predict(split, source, tmp_path / "p.csv", split=chosen)
    recwarn.clear()
    for source in (folder, folder / "test.csv", whole):
        rfdlc.predict(split, source, tmp_path / "p.csv")
    assert not [w for w in recwarn if "training data: metrics" in str(w.message)]


def test_groups_of_a_run_are_groups_of_its_predictions(tmp_path):
    rng = np.random.default_rng(0)
    y, patient = rng.integers(0, 2, 400), np.arange(400) // 4
    cells = zip(
        patient, rng.normal(size=400) + y, np.where(y, "ill", "well"), strict=True
    )
    lines = [f"p{number},{x:.4f},{name}" for number, x, name in cells]
    (tmp_path / "t.csv").write_text("\n".join(["patient_id,x,target", *lines[:300]]))
    (tmp_path / "new.csv").write_text("\n".join(["patient_id,x,target", *lines[300:]]))
    run = rfdlc.train(
        tmp_path / "t.csv",
        out=tmp_path / "r",
        backbone="trees",
        data_options={"groups": "patient_id"},
    )
    for name in ("o.csv", "o.parquet", "o.npz"):
        rfdlc.predict(run.path, tmp_path / "new.csv", tmp_path / name)
        found = rfdlc.Predictions.load(tmp_path / name)
        assert found.ids is None
        assert found.groups.tolist() == (np.arange(100) // 4).tolist()
        done = CliRunner().invoke(app, ["evaluate", str(tmp_path / name), "--json"])
        assert json.loads(done.stdout)["groups"] == 25
        assert "several rows" not in done.stderr
    with (tmp_path / "o.csv").open() as file:
        assert [row["group"] for row in csv.DictReader(file)] == [
            f"p{number}" for number in patient[300:]
        ]
    (tmp_path / "bare.csv").write_text(
        "\n".join(["x,id", *[f"{i}.5,s{i}" for i in range(4)]])
    )
    rfdlc.predict(run.path, tmp_path / "bare.csv", tmp_path / "bare_o.csv", keep=["x"])
    bare = rfdlc.Predictions.load(tmp_path / "bare_o.csv")
    assert bare.groups is None
    assert bare.ids.tolist() == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize(
    ("kind", "raw"), [("parquet", False), ("csv", False), ("parquet", True)]
)
def test_a_budget_is_kept_exactly_over_all_parts(
    run, photos, tmp_path, kind, raw, monkeypatch
):

    decider = rfdlc.Decider.load(run)
    held = rfdlc.Predictions.load(run / "held-out.npz")
    decider = decider.replace(utility=decider.utility.with_abstain(0.99)).fit_budget(
        held, budget=0.1
    )
    out = tmp_path / f"p.{kind}"
    interrupted(monkeypatch, run, photos, out, decider=decider, raw=raw)
    done = rfdlc.predict(run, photos, out, decider=decider, raw=raw)
    table = pandas.read_csv(out) if kind == "csv" else pandas.read_parquet(out)
    found = rfdlc.Model.load(run, device="cpu").predict(photos)
    wanted = decider.explain(found, batch=True)
    assert table["action"].tolist() == [wanted.actions[a] for a in wanted.action]
    assert table["reason"].fillna("").tolist() == wanted.reason.tolist()
    np.testing.assert_allclose(table["expected_utility"], wanted.value, atol=1e-5)
    assert done.actions["abstain"] == PHOTOS // 10
    assert done.handed_over == {"total": PHOTOS // 10 / PHOTOS}
    assert not [name for name in table if name.startswith("rfdlc_gain")]
