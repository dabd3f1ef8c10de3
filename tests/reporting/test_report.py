"""report() from folders, files and memory: what is written, what is refused, and that
nothing can be injected.
"""

import base64
import io
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import rfdlc
from rfdlc import Classes, Decider, InputError, Predictions, Utility
from rfdlc.cli import app
from rfdlc.reporting.report import MOST_CELLS, asset, write_report
from rfdlc.reporting.runs import ReportRun, as_runs

from .conftest import make_folder, make_predictions

HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"quoted\" & 'single'",
    "<b>bold</b>",
    "عربي",
    "🦎 newt\u2028",
]


def data_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(
        re.search(
            r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
        )[1]
    )


def test_report_of_a_run_folder(tmp_path, predictions):
    folder = make_folder(tmp_path / "runs" / "a", predictions)
    out = rfdlc.report(folder, None, tmp_path / "report.html", bootstrap=20)
    data = data_of(out)
    run = data["runs"][0]
    expected = rfdlc.evaluate(
        predictions, decider=Decider.load(folder / "decider.json"), bootstrap=20
    )
    assert run["metrics"]["accuracy"] == pytest.approx(expected.accuracy)
    assert "ece_paper" not in {
        metric["name"] for metric in data["metrics"]
    }  # it is for those who rerun the paper
    assert run["intervals"]["accuracy"] == pytest.approx(expected.intervals["accuracy"])
    assert run["name"] == "a"
    assert run["made"]["config"]["optimiser"] == {"rate": 0.1, "decay": "Infinity"}
    assert run["made"]["history"]["loss"] == [2.5, 1.5, None]
    assert data["classes"]["rank"] == predictions.classes.rank.tolist()


def test_means_are_costs_where_these_were_given(tmp_path, predictions):
    costs = 1 - np.eye(len(predictions.classes))
    utility = rfdlc.Utility.from_costs(costs, predictions.classes).with_abstain(-0.3)
    path = rfdlc.report(predictions, utility, tmp_path / "r.html", bootstrap=0)
    data, text = data_of(path), path.read_text(encoding="utf-8")
    metrics = {metric["name"]: metric for metric in data["metrics"]}
    assert (
        data["costs"],
        metrics["mean_utility"]["label"],
        metrics["mean_utility"]["cost"],
    ) == (
        True,
        "mean cost",
        True,
    )
    assert not [own["label"] for own in metrics.values() if "utility" in own["label"]]
    assert "Promised and realised cost" in text
    assert "a cost of 2 is −2 here" in text
    rfdlc.report(predictions, None, path, bootstrap=0)
    text = path.read_text(encoding="utf-8")
    assert not data_of(path)["costs"]
    assert "Promised and realised utility" in text
    assert "a cost of 2" not in text


@pytest.mark.skipif(
    shutil.which("node") is None, reason="no node, which runs the scripts of the page"
)
def test_the_page_shows_costs_with_their_sign_changed():
    metric = json.dumps({"name": "mean_utility", "unit": "", "cost": True})
    run = json.dumps({"intervals": {"mean_utility": [-0.5, -0.25]}})
    code = "\n".join(asset(name) for name in ("dom.js", "headline.js"))
    code += (
        f"\nconsole.log([shown(-0.3, {metric}), intervalText({run}, {metric}), shown(0,"
        f" {metric}), "
    )
    code += (
        f"pairedText([-0.1, -0.3, 0.2, 0.5], {metric}), shown(-0.3, {{ unit: ''"
        " })].join('|'))"
    )
    found = subprocess.run(
        ["node", "-"],
        input=code,
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    assert (
        found.stdout.strip()
        == "0.300|0.250 to 0.500|0.000|+0.100 (−0.200 to +0.300)|−0.300"
    )


def test_groups_of_samples_are_stated(tmp_path, predictions):
    known = {"targets": predictions.targets, "classes": predictions.classes}
    groups = np.arange(len(predictions)) // 3
    given = [
        Predictions(logits=predictions.scores.values, **known, groups=own)
        for own in (groups, None)
    ]
    runs = data_of(rfdlc.report(given, out=tmp_path / "report.html"))["runs"]
    assert [run["groups"] for run in runs] == [len(set(groups)), None]
    assert runs[0]["intervals"] != runs[1]["intervals"]
    assert runs[0]["intervals"]["accuracy"] == pytest.approx(
        rfdlc.evaluate(given[0]).intervals["accuracy"]
    )


def test_the_history_is_that_of_the_first_training(tmp_path, predictions):
    folder = make_folder(tmp_path / "a", predictions)
    (folder / "history.csv").write_text(
        "phase,epoch,loss\n0,1,2.5\n0,2,1.5\n1,1,2.0\n1,2,1.0\n"
    )
    (run,) = data_of(rfdlc.report(folder, out=tmp_path / "report.html", bootstrap=0))[
        "runs"
    ]
    assert run["made"]["history"] == {"epoch": [1, 2], "loss": [2.5, 1.5]}


def test_the_calibrator_is_named_in_a_few_words(tmp_path, predictions):
    folder = make_folder(tmp_path / "a", predictions, calibration="auto")
    (run,) = data_of(rfdlc.report(folder, out=tmp_path / "report.html", bootstrap=0))[
        "runs"
    ]
    weights = Decider.load(folder).model.calibrator.weights
    assert sorted(
        run["calibration"]["words"].removeprefix("auto: ").split(", ")
    ) == sorted(f"{share:.0%} {name}" for name, share in weights.items())


def test_report_takes_the_given_utility_and_several_runs(tmp_path, predictions):
    first = make_folder(tmp_path / "a", predictions)
    second = make_folder(tmp_path / "b", make_predictions(seed=5))
    utility = Utility.one_hot(predictions.classes).with_abstain(0.4)
    data = data_of(
        rfdlc.report([first, second], utility, tmp_path / "r.html", bootstrap=0)
    )
    assert data["actions"][-1] == "abstain"
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    for folder, run in zip((first, second), data["runs"], strict=True):
        decider = Decider.load(folder / "decider.json").replace(utility=utility)
        assert run["metrics"]["mean_utility"] == pytest.approx(
            rfdlc.evaluate(
                Predictions.load(folder / "predictions.npz"), decider=decider
            ).mean_utility
        )


def test_report_of_bare_predictions(tmp_path):
    file = tmp_path / "probs.csv"
    file.write_text("id,cat,dog,target\nx,0.9,0.1,cat\ny,0.2,0.8,cat\nz,0.4,0.6,dog\n")
    data = data_of(rfdlc.report(file, out=tmp_path / "r.html", bootstrap=0))
    assert data["classes"]["counts"] is None
    assert data["runs"][0]["metrics"]["accuracy"] == pytest.approx(2 / 3)
    named = data_of(
        rfdlc.report({"my model": file}, out=tmp_path / "r.html", bootstrap=0)
    )
    assert named["runs"][0]["name"] == "my model"


def test_counts_come_from_the_folder_when_the_predictions_lack_them(
    tmp_path, predictions
):
    folder = make_folder(tmp_path / "a", predictions)
    (folder / "decider.json").unlink()
    bare = Predictions(logits=predictions.scores.values, targets=predictions.targets)
    bare.save(folder / "predictions.npz")
    (folder / "classes.json").write_text(
        json.dumps({"names": ["0", "1", "2", "3", "4"], "counts": [9, 8, 7, 6, 5]})
    )
    assert as_runs(folder)[0].classes.counts == (9, 8, 7, 6, 5)


def test_hostile_names_are_data_and_nothing_else(tmp_path):
    predictions = make_predictions(
        60, names=HOSTILE, groups={"<img src=x onerror=alert(2)>": HOSTILE[:2]}
    )
    out = rfdlc.report(
        {"</title><script>": predictions}, None, tmp_path / "r.html", bootstrap=0
    )
    text = out.read_text(encoding="utf-8")
    assert not re.search(r"<script>alert|<img|<b>", text)
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert data_of(out)["classes"]["names"] == HOSTILE


def test_policy_names_the_hash_of_script_and_style(tmp_path, predictions):
    text = rfdlc.report(predictions, None, tmp_path / "r.html", bootstrap=0).read_text(
        encoding="utf-8"
    )
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg|http-equiv", "", text)


def test_large_problems_are_subsampled_alike_for_all_runs(
    tmp_path, monkeypatch, predictions
):
    monkeypatch.setattr("rfdlc.reporting.report.MOST_CELLS", 1000)
    data = data_of(
        rfdlc.report([predictions, predictions], None, tmp_path / "r.html", bootstrap=0)
    )
    assert [run["embedded"]["samples"] for run in data["runs"]] == [100, 100]
    assert data["runs"][0]["embedded"]["rows"] == data["runs"][1]["embedded"]["rows"]
    assert data["runs"][0]["samples"] == 400


def test_ten_thousand_by_a_hundred_stays_under_5_mb(tmp_path):
    predictions = make_predictions(10_000, range(500, 0, -5), 1)
    assert (
        rfdlc.report(predictions, None, tmp_path / "r.html", bootstrap=0).stat().st_size
        < 5_000_000
    )
    assert MOST_CELLS >= 10_000 * 100


def test_thumbnails_from_an_array_and_from_files(tmp_path, predictions):
    images = np.random.default_rng(0).integers(0, 255, (400, 8, 8, 3), dtype=np.uint8)
    data = data_of(
        rfdlc.report(predictions, None, tmp_path / "r.html", images=images, bootstrap=0)
    )
    pictures = data["runs"][0]["thumbnails"]
    assert {str(one["row"]) for one in data["runs"][0]["mistakes"]} <= set(pictures)
    assert all(
        picture.startswith("data:image/png;base64,") for picture in pictures.values()
    )
    from PIL import Image

    for i in range(400):
        Image.fromarray(images[i]).resize((100, 100)).save(
            tmp_path / f"sample-{i}", "PNG"
        )
    data = data_of(
        rfdlc.report(
            predictions, None, tmp_path / "r.html", images=tmp_path, bootstrap=0
        )
    )
    assert all(
        p.startswith("data:image/jpeg;base64,")
        for p in data["runs"][0]["thumbnails"].values()
    )


def test_thumbnails_of_ids_that_begin_with_folders_above(tmp_path, predictions):
    from PIL import Image

    (tmp_path / "test" / "crack").mkdir(parents=True)
    ids = [f"test/crack/{i}.png" for i in range(400)]
    for name in ids:
        Image.new("RGB", (9, 9)).save(tmp_path / name)
    scores = predictions.scores.values
    named = Predictions(
        logits=scores, targets=predictions.targets, classes=predictions.classes, ids=ids
    )
    for folder in (tmp_path, tmp_path / "test", tmp_path / "test" / "crack"):
        data = data_of(
            rfdlc.report(named, None, tmp_path / "r.html", images=folder, bootstrap=0)
        )
        assert len(data["runs"][0]["thumbnails"]) > 0


def test_a_photograph_is_shown_upright(tmp_path):
    from PIL import Image

    held = Image.Exif()
    held[0x0112] = 6  # the camera was turned to the right
    Image.new("RGB", (300, 100)).save(tmp_path / "a.jpg", exif=held)
    wrong = rfdlc.Predictions(probabilities=[[0.9, 0.1]], targets=[1], ids=["a.jpg"])
    data = data_of(
        rfdlc.report(wrong, None, tmp_path / "r.html", images=tmp_path, bootstrap=0)
    )
    shown = base64.b64decode(data["runs"][0]["thumbnails"]["0"].partition(",")[2])
    assert Image.open(io.BytesIO(shown)).size == (48, 144)


@pytest.mark.parametrize(
    "name", ["../secret.png", "{}/secret.png", "a/../../secret.png"]
)
def test_ids_that_leave_the_folder_of_the_images_are_refused(tmp_path, name):
    from PIL import Image

    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "secret.png")
    wrong = rfdlc.Predictions(
        probabilities=[[0.1, 0.9]], targets=[0], ids=[name.format(tmp_path)]
    )
    with pytest.raises(
        InputError, match=r"secret.png' leaves the folder: expected ids of files in it"
    ):
        rfdlc.report(
            wrong, None, tmp_path / "r.html", images=tmp_path / "photos", bootstrap=0
        )
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("source", ["photos", "list.txt"])
def test_the_command_names_the_folder_of_the_images(tmp_path, source):
    """They are not shown unasked."""
    from PIL import Image

    run, root = (
        tmp_path / "run",
        str(tmp_path / "photos") if source == "list.txt" else None,
    )
    (tmp_path / "photos" / "a").mkdir(parents=True)
    run.mkdir()
    (tmp_path / "list.txt").write_text("a/0.png 0")
    Image.new("L", (8, 8)).save(tmp_path / "photos" / "a" / "0.png")
    rfdlc.Predictions(probabilities=[[0.1, 0.9]], targets=[0], ids=["a/0.png"]).save(
        run / "predictions.npz"
    )
    (run / "config.json").write_text(
        json.dumps({"data": {"source": str(tmp_path / source), "root": root}})
    )
    words = ["report", str(run), "-o", str(tmp_path / "r.html"), "--bootstrap", "0"]
    shown = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert f"next: --images {tmp_path / 'photos'} puts the images" in shown
    assert not data_of(tmp_path / "r.html")["runs"][0]["thumbnails"]
    assert (
        "next:"
        not in CliRunner()
        .invoke(app, [*words, "--images", str(tmp_path / "photos")])
        .stdout
    )
    (tmp_path / "photos" / "a" / "0.png").unlink()
    assert "next:" not in CliRunner().invoke(app, words).stdout


def test_transparent_pixels_are_white_in_thumbnails(tmp_path):
    from PIL import Image

    Image.new("RGBA", (20, 20), (0, 90, 0, 0)).save(tmp_path / "a.png")
    wrong = rfdlc.Predictions(probabilities=[[0.9, 0.1]], targets=[1], ids=["a.png"])
    data = data_of(
        rfdlc.report(wrong, None, tmp_path / "r.html", images=tmp_path, bootstrap=0)
    )
    shown = base64.b64decode(data["runs"][0]["thumbnails"]["0"].partition(",")[2])
    assert Image.open(io.BytesIO(shown)).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": "nowhere"}, "nowhere: no such run folder"),
        ({"runs": []}, "0 runs: expected 1 to 8"),
        ({"out": "nowhere/r.html"}, "does not exist; create it first"),
        (
            {"images": np.zeros((3, 8, 8))},
            r"images have shape \(3, 8, 8\) for 400 samples",
        ),
        ({"images": "nowhere"}, "images 'nowhere': no such folder"),
        ({"images": "."}, "no id is a file in it"),
        ({"bootstrap": -1}, "bootstrap is -1"),
    ],
)
def test_bad_input_is_refused(tmp_path, predictions, change, message):
    arguments = {
        "runs": predictions,
        "out": tmp_path / "r.html",
        "bootstrap": 0,
    } | change
    with pytest.raises(InputError, match=message):
        rfdlc.report(**arguments)
    assert not (tmp_path / "r.html").exists()


def test_runs_with_other_classes_are_refused(predictions):
    other = make_predictions(names=["a", "b", "c", "d", "e"])
    with pytest.raises(InputError, match="same classes"):
        as_runs([predictions, other])


def test_predictions_without_targets_are_refused(tmp_path):
    predictions = Predictions(probabilities=[[0.5, 0.5]])
    with pytest.raises(InputError, match="no targets"):
        rfdlc.report(predictions, None, tmp_path / "r.html")


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [p], lambda p: {"a": p}])
def test_bare_arrays_are_refused(tmp_path, wrap):
    with pytest.raises(
        InputError, match=r"a ndarray cannot be reported.*Predictions\(probabilities"
    ):
        rfdlc.report(wrap(np.eye(2)), None, tmp_path / "r.html")


def test_one_sample_one_class_and_equal_counts(tmp_path):
    lone = Predictions(
        probabilities=[[1.0]], targets=[0], classes=Classes.from_counts([3])
    )
    flat = make_predictions(30, counts=(5, 5, 5))
    for case in (lone, flat):
        assert rfdlc.report(case, None, tmp_path / "r.html", bootstrap=5).is_file()


def test_command_line_writes_the_report_and_prints_json(tmp_path, predictions):
    folder, out = make_folder(tmp_path / "a", predictions), tmp_path / "r.html"
    result = CliRunner().invoke(
        app,
        [
            "report",
            str(folder),
            str(folder),
            "-o",
            str(out),
            "--abstain",
            "0.2",
            "--bootstrap",
            "0",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["out"] == str(out)
    assert printed["bytes"] == out.stat().st_size
    assert (
        printed["runs"][f"{folder} (1)"]["accuracy"]
        == data_of(out)["runs"][0]["metrics"]["accuracy"]
    )


def test_command_line_says_what_is_wrong(tmp_path):
    code = (
        "import sys; sys.argv = ['rfdlc', 'report', 'nowhere.csv']; from rfdlc.cli"
        " import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("rfdlc: nowhere.csv: no such file")


def test_writing_needs_neither_torch_nor_matplotlib(tmp_path):
    code = (
        "import sys, rfdlc; rfdlc.report(rfdlc.Predictions(probabilities=[[.9, .1],"
        f" [.3, .7]], targets=[0, 1]), None,{str(tmp_path / 'r.html')!r}, bootstrap=0);"
        " sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_written_evaluations_are_by_run(tmp_path, predictions):
    run = ReportRun("a", predictions, Decider(Utility.one_hot(predictions.classes)))
    written = write_report([run], tmp_path / "r.html", bootstrap=0)
    assert (
        written["a"].accuracy
        == rfdlc.evaluate(predictions, decider=run.decider).accuracy
    )


def test_runs_of_the_same_samples_are_compared_in_pairs(tmp_path, predictions):
    other = Predictions(
        logits=predictions.scores.values * 0.5,
        targets=predictions.targets,
        ids=predictions.ids,
        classes=predictions.classes,
    )
    data = data_of(
        rfdlc.report(
            {"a": predictions, "b": other}, None, tmp_path / "r.html", bootstrap=5
        )
    )
    expected = rfdlc.compare(predictions, other, bootstrap=5)["nll"]
    assert data["runs"][1]["compared"]["nll"] == pytest.approx(
        [expected.difference, expected.low, expected.high, expected.p]
    )
    apart = data_of(
        rfdlc.report(
            [predictions, make_predictions(300)], None, tmp_path / "r.html", bootstrap=0
        )
    )
    assert "compared" not in apart["runs"][1]


def test_promised_and_realised_utility(tmp_path, predictions):
    run = data_of(rfdlc.report(predictions, None, tmp_path / "r.html", bootstrap=0))[
        "runs"
    ][0]
    gap = (
        sum(
            one["samples"] * (one["promised"] - one["realised"])
            for one in run["promised"]
        )
        / 400
    )
    assert gap == pytest.approx(run["metrics"]["utility_gap"])
    assert len(run["intervals"]["utility_gap"]) == 2
    assert run["promise"].startswith(f"Promised minus realised utility {gap:.4f} (")
