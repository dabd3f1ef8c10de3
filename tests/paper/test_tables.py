"""Tables: measured beside published, marks, forms, the generated page, the command, the
figures.
"""

import csv
import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from paper import experiments, grids, page, plots, rendering, results
from paper.__main__ import main
from paper.plots import draw_all
from paper.results import Results, Scored
from paper.scoring import PENALTIES, Point, Value
from paper.specs import EQUAL, SPECS, TAIL
from paper.tables import build, fhr_at, frontier
from rfdlc.errors import InputError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made-up measurements of three seeds: accuracy 50, 51, 52 and a false head rate of
    32 for the paper's method.
    """
    out = tmp_path_factory.mktemp("results")
    runs = {
        "rf-dlc-paper": 51.0,
        TAIL: 50.0,
        "rf-dlc": 52.0,
        "rf-dlc-paper+particles=2": 49.0,
        "ce": 38.0,
    }
    scored = []
    for run, accuracy in runs.items():
        for seed in (0, 1, 2):
            values = [
                Value("test", "argmax", "acc", accuracy + seed - 1),
                Value("test", "argmax", "fhr", 32.0),
            ]
            values += [
                Value("test", "argmax", region, accuracy + seed - 1)
                for region in ("head", "med", "tail")
            ]
            for place, penalty in enumerate(PENALTIES):
                name = f"calibrated {penalty:g}"
                values += [
                    Value("test", name, "acc", accuracy - place),
                    Value("test", name, "fhr", 30.0 - 2 * place),
                ]
                values.append(Value("test", name, "utility", 0.1))
            values += [
                Value("test", "calibrated", "acc", accuracy),
                Value("test", "calibrated", "fhr", 30.0),
            ]
            values.append(Value("test", "", "disagreement", 0.4 + seed / 10))
            points = [
                Point("test", decision, curve, x, 1 - x / 2, 0.25)
                for decision in ("argmax", "calibrated")
                for curve in ("reliability", "risk-coverage")
                for x in (0.25, 0.75)
            ]
            made = dict.fromkeys(results.COLUMNS["runs"], "") | {
                "run": run,
                "seed": seed,
                "seconds": 60,
                "beside": 0,
                "parameters": 9,
            }
            scored.append(Scored(made, values, points))
    results.write(out, "cifar100-lt", scored)
    return out


def cell(table, label, metric, data="cifar100-lt", protocol="paper"):
    row = next(
        r
        for r in table.rows
        if (r.data, r.label, r.protocol) == (data, label, protocol)
    )
    return next(c for c in row.cells if c.metric == metric)


def test_minutes_are_of_trainings_that_had_the_machine_to_themselves(tmp_path):
    scored = []
    for seed, (seconds, beside) in enumerate([(90, 0), (30, 0), (600, 3), ("", "")]):
        made = dict.fromkeys(results.COLUMNS["runs"], "") | {
            "run": "ce",
            "seed": seed,
            "parameters": 9 + seed,
        }
        made |= {"seconds": seconds, "beside": beside}
        scored.append(Scored(made, [Value("test", "argmax", "acc", 50.0)], []))
    results.write(tmp_path, "cifar100-lt", scored)
    found = build("cost", Results(tmp_path))
    minutes, parameters = (
        cell(found, "ResNet-32 (CE)", name).measured
        for name in ("minutes", "parameters")
    )
    assert (minutes.value, minutes.deviation, minutes.seeds) == (1.0, None, 2)
    assert (parameters.value, parameters.seeds) == (10.5, 4)
    assert Results(tmp_path).minutes("cifar100-lt", "ride") is None


def test_measured_stands_beside_published(folder):
    found = cell(build("accuracy", Results(folder)), "RF-DLC", "acc")
    assert (found.measured.value, found.measured.deviation, found.measured.seeds) == (
        51.0,
        1.0,
        3,
    )
    assert (found.published.value, found.published.deviation) == (50.24, 0.70)
    assert found.difference == pytest.approx(0.76)
    assert found.deviation == pytest.approx(np.hypot(1.0, 0.7))
    assert not found.disagrees


def test_more_than_two_deviations_are_marked(folder):
    table = build("accuracy", Results(folder))
    far = cell(table, "CE", "head")  # 38 +- 1 against 68.30 +- 0.61
    assert far.disagrees
    assert far.difference == pytest.approx(-30.3)
    assert "-30.30 ≠" in rendering.text([table])
    near = cell(
        build("fhr", Results(folder)), "RF-DLC, tail-sensitive", "fhr"
    )  # 32 against 32.08 +- 0.78
    assert not near.disagrees


def test_what_was_not_measured_says_so(folder):
    table = build("accuracy", Results(folder))
    row = next(
        r
        for r in table.rows
        if r.data == "imagenet-lt" and r.label == "RIDE" and r.protocol == "paper"
    )
    assert row.seeds == 0
    assert cell(table, "RIDE", "acc", "imagenet-lt").difference is None
    line = next(
        line
        for line in rendering.markdown([table]).splitlines()
        if "RIDE" in line and "54.32" in line
    )
    assert line.endswith("| not measured here |")


@pytest.mark.parametrize(
    ("label", "protocol"), [("2", "paper"), ("3 (ours)", "standard")]
)
def test_disagreement_is_of_the_particles_whatever_is_decided(folder, label, protocol):
    found = cell(
        build("particles", Results(folder)), label, "disagreement", protocol=protocol
    ).measured
    assert found.value == pytest.approx(0.5)


def naive_rate(points, accuracy):
    """The lowest rate on a polygon, by walking it in small steps."""
    rates = []
    for (_, a, r), (_, b, s) in itertools.pairwise(points):
        walked = np.linspace(0, 1, 20001)
        crossed = np.abs(a + walked * (b - a) - accuracy) <= abs(b - a) / 20000 + 1e-12
        rates += list((r + walked * (s - r))[crossed])
    return min(rates, default=None)


def test_rates_at_an_accuracy_agree_with_a_naive_walk():
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = [
            (0, *pair)
            for pair in zip(
                rng.integers(40, 50, 6),
                np.sort(rng.uniform(5, 30, 6))[::-1],
                strict=True,
            )
        ]
        for accuracy in [*rng.uniform(38, 52, 4).tolist(), float(points[2][1])]:
            found, expected = fhr_at(points, accuracy), naive_rate(points, accuracy)
            assert (found is None) == (expected is None)
            assert found is None or found == pytest.approx(expected, abs=0.01)


def test_equal_accuracy_moves_both_methods_along_their_own_curves(tmp_path):
    """Each seed has a line of its own; the reference solves for the rate by hand and
    asks scipy for the interval.
    """
    slopes, scored = {"rf-dlc": (50.0, 1.0, 24.0), "ce": (47.0, 0.5, 30.0)}, []
    for run, (top, slope, rate) in slopes.items():
        for seed in range(4):
            made = dict.fromkeys(results.COLUMNS["runs"], "") | {
                "run": run,
                "seed": seed,
            }
            values = [Value("test", "calibrated", "acc", top + seed)]
            for place, penalty in enumerate(PENALTIES):
                values.append(
                    Value(
                        "test",
                        f"calibrated {penalty:g}",
                        "acc",
                        top + seed - slope * place,
                    )
                )
                values.append(
                    Value(
                        "test",
                        f"calibrated {penalty:g}",
                        "fhr",
                        rate - place - seed**2 / 8,
                    )
                )
            scored.append(Scored(made, values, []))
    results.write(tmp_path, "cifar100-lt", scored)
    table = build("equal-cifar100-lt", Results(tmp_path))

    def expected(run, seed, accuracy):
        top, slope, rate = slopes[run]
        return rate - (top + seed - accuracy) / slope - seed**2 / 8

    differences = [
        expected("rf-dlc", seed, 46.0) - expected("ce", seed, 46.0) for seed in range(4)
    ]
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    found = cell(table, "CE", "46", protocol="standard")
    assert found.measured.value == pytest.approx(
        np.mean([expected("ce", seed, 46.0) for seed in range(4)])
    )
    assert (found.ours.value, found.ours.seeds, found.note) == (
        pytest.approx(np.mean(differences)),
        4,
        "",
    )
    assert (found.ours.low, found.ours.high) == pytest.approx(
        (interval.low, interval.high), rel=1e-6
    )
    some = cell(table, "CE", "48", protocol="standard")  # tops are 47, 48, 49, 50
    assert (some.measured.seeds, some.ours.seeds, some.note) == (3, 3, "3 of 4 seeds")
    one = cell(table, "CE", "50", protocol="standard")
    assert (one.measured.seeds, one.ours, one.note) == (1, None, "1 of 4 seeds")
    none = cell(
        table, "CE", "40", protocol="standard"
    )  # the lowest point of any seed is 40.5
    assert (none.measured, none.ours, none.note) == (None, None, "not reached")
    ours = cell(table, "RF-DLC (ours)", "46", protocol="standard")
    assert (ours.ours, ours.measured.seeds) == (None, 4)
    assert "(3 of 4 seeds, ours " in rendering.markdown([table])
    assert "not reached" in rendering.text([table])


def test_frontiers_have_points_of_all_seeds_only(tmp_path):
    """A seed of an earlier time was scored for fewer penalties: no mean of the others
    stands in for it.
    """
    scored = []
    for seed, penalties in enumerate([(0, -1, -2), (0, -1)]):
        made = dict.fromkeys(results.COLUMNS["runs"], "") | {"run": "ce", "seed": seed}
        rates = [
            Value("test", f"calibrated {penalty}", "fhr", 30.0 + 10 * penalty + seed)
            for penalty in penalties
        ]
        right = [
            Value("test", f"calibrated {penalty}", "acc", 50.0 + penalty + seed)
            for penalty in penalties
        ]
        scored.append(Scored(made, [*rates, *right], []))
    results.write(tmp_path, "cifar100-lt", scored)
    assert frontier(Results(tmp_path), "cifar100-lt", "ce") == [
        (0, 50.5, 30.5),
        (-1, 49.5, 20.5),
    ]


def test_frontiers_are_not_read_where_they_do_not_reach():
    assert fhr_at([(0, 50.0, 30.0), (-1, 40.0, 10.0)], 51.0) is None
    assert fhr_at([(0, 50.0, 30.0), (-1, 40.0, 10.0)], 39.0) is None
    assert fhr_at([], 39.0) is None


@pytest.mark.parametrize("name", SPECS)
def test_both_protocols_are_in_every_table(name):
    protocols = {line.protocol.split(",")[0] for line in SPECS[name].lines}
    assert protocols >= (
        {"standard"} if name in {"decisions", *EQUAL} else {"paper", "standard"}
    )


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.paper])
def test_every_line_that_names_a_row_of_the_paper_finds_it(name, tmp_path):
    table = build(name, Results(tmp_path))
    lines = {
        (line.label, line.protocol): line for line in SPECS[name].lines if line.row
    }
    first = SPECS[name].data[0]
    for row in table.rows:
        if row.data == first and (row.label, row.protocol) in lines:
            assert any(each.published for each in row.cells), row.label


def test_forms_hold_the_same_values(folder):
    tables = [build(name, Results(folder)) for name in SPECS]
    rows = list(csv.DictReader(io.StringIO(rendering.as_csv(tables))))
    cells = json.loads(rendering.as_json(tables))["cells"]
    assert (
        len(rows)
        == len(cells)
        == sum(len(row.cells) for table in tables for row in table.rows)
    )
    wanted = {
        "table": "accuracy",
        "data": "cifar100-lt",
        "protocol": "paper",
        "row": "RF-DLC",
        "metric": "acc",
    }
    (found,) = [c for c in cells if all(c[k] == v for k, v in wanted.items())]
    assert (found["measured"], found["published"], found["disagrees"]) == (
        51.0,
        50.24,
        False,
    )
    assert r"51.00 $\pm$ 1.00 (50.24 $\pm$ 0.70, +0.76)" in rendering.latex(tables)


def test_what_is_missing_is_found_in_the_grids(folder):
    table = build("particles", Results(folder))
    found = {
        grid.name: {run.name for stack in grid.stacks for run in stack}
        for grid in experiments.grids_for([table])
    }
    assert found == {
        "ablations": {f"rf-dlc-paper+particles={k}" for k in (1, 4, 5, 6, 7, 8)},
        "cifar100": {
            "rf-dlc-paper",
            "rf-dlc",
        },  # three of their five seeds were measured
    }


def test_the_page_is_not_stale():
    text = (DOCS / "evidence.md").read_text(encoding="utf-8")
    assert text == page.text(Results()), "run python -m paper page > docs/evidence.md"


def test_every_table_is_printed_without_torch_or_data(folder):
    code = (
        "import sys; from paper.__main__ import main; main(['tables', '--form', 'csv',"
        " '--results', sys.argv[1]]); sys.exit(any(m in sys.modules for m in ('torch',"
        " 'matplotlib', 'pandas')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {row["table"] for row in csv.DictReader(io.StringIO(done.stdout))} == set(
        SPECS
    )


def test_the_command(capsys):
    main(["tables", "--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(
        SPECS
    )
    main(["tables", "fhr", "--form", "json"])
    assert {c["table"] for c in json.loads(capsys.readouterr().out)["cells"]} == {"fhr"}
    for words, message in {
        ("tables", "fhrr"): "did you mean 'fhr'",
        ("tables", "fhrr", "--list"): "did you mean 'fhr'",
        ("tables", "--results", "nowhere"): "nowhere: there is no such folder",
        ("page", "--results", str(DOCS)): "docs: it has no results",
        ("figures", "nowhere", "--results", str(DOCS)): "docs: it has no results",
    }.items():
        with pytest.raises(InputError, match=message):
            main(words)


def test_data_that_are_not_there_do_not_stop_the_others(tmp_path, monkeypatch, capsys):
    table, ran = build("fhr", Results(tmp_path)), []

    def run(experiment, data, say):
        if experiment.grid.name in absent:
            raise InputError(f"{experiment.grid.data.source} was not found")
        ran.append(experiment.grid.name)

    monkeypatch.setattr(experiments, "run_grid", run)
    absent = {"cifar10", "imagenet"}
    experiments.complete([table], tmp_path, tmp_path / "runs", tmp_path / "out")
    assert ran == ["ablations", "cifar100"]
    assert "imagenet: left out, imagenet-lt was not found" in capsys.readouterr().err
    absent = set(grids.names())
    with pytest.raises(InputError, match=r"nothing could be run: .* was not found"):
        experiments.complete([table], tmp_path, tmp_path / "runs", tmp_path / "out")


def test_figures_are_drawn_from_the_files(folder, tmp_path):
    written = {path.name for path in draw_all(folder, tmp_path / "figures")}
    names = ["particles", "frontier-cifar100-lt", "risk-coverage-cifar100-lt"]
    names += [
        f"reliability-cifar100-lt-{decision}" for decision in ("argmax", "calibrated")
    ]
    assert written == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    text = (tmp_path / "figures" / "frontier-cifar100-lt.svg").read_text()
    assert "RF-DLC (ours)" in text
    assert "trained with utility" in text
    linked = re.findall(r"\(figures/(.+?)\)", page.text(Results(folder)))
    assert linked, "the page shows figures"
    assert set(linked) <= written
    with pytest.raises(InputError, match="nothing has been measured"):
        draw_all(tmp_path / "empty", tmp_path / "figures")


def test_files_and_folders_that_cannot_be_used_are_named(folder, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for use in (experiments.own_copy, lambda out: draw_all(folder, out)):
        with pytest.raises(
            InputError, match=r"taken: the folder for .* cannot be made"
        ):
            use(taken)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "runs.csv").write_text(
        ",".join(results.COLUMNS["runs"]) + "\n"
    )
    header = "run,seed,split,decision,metric,value\n"
    for text, told in (
        ("", "it is empty"),
        ("run,seed\nce,0\n", "its columns are run, seed"),
    ):
        (tmp_path / "made" / "metrics.csv").write_text(text)
        with pytest.raises(
            InputError,
            match=rf"metrics.csv: {told}; expected run, seed, split.*--rescore",
        ):
            Results(tmp_path)
    for cells in ("acc,good\n", "acc,nan\n", "acc,1,2\n", "", "acc"):
        (tmp_path / "made" / "metrics.csv").write_text(
            f"{header}ce,0,test,argmax,{cells}"
        )
        with pytest.raises(
            InputError,
            match=r"metrics.csv: .*'ce'.* is damaged; expected run, seed.*--rescore",
        ):
            Results(tmp_path)
    (tmp_path / "made" / "metrics.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(
        InputError, match=r"metrics.csv: this is not a table of results"
    ):
        results.finished(tmp_path, "made")


def test_figures_show_their_curves_and_no_bin_of_a_few_samples(tmp_path, monkeypatch):
    made = dict.fromkeys(results.COLUMNS["runs"], "") | {"run": "rf-dlc", "seed": 0}
    risks = [
        Point("test", "calibrated", "risk-coverage", x, x / 5, x) for x in (0.5, 1.0)
    ]
    bins = [
        Point("test", "calibrated", "reliability", *bin_)
        for bin_ in ((0.1, 1, 0.001), (0.5, 0.4, 0.5), (0.9, 0.8, 0.499))
    ]
    results.write(
        tmp_path,
        "digits-lt",
        [Scored(made, [Value("test", "argmax", "acc", 50.0)], [*risks, *bins])],
    )
    drawn = {}
    monkeypatch.setattr(
        plots, "_save", lambda figure, path: drawn.setdefault(path.stem, figure.axes[0])
    )
    draw_all(tmp_path, tmp_path / "figures")
    bottom, top = drawn["risk-coverage-digits-lt"].get_ylim()
    assert bottom == 0
    assert 0.2 < top < 0.3  # errors are 0.1 and 0.2
    curve = drawn["reliability-digits-lt-calibrated"].lines[-1]
    assert curve.get_xdata().tolist() == pytest.approx([0.5, 0.9])


def test_new_results_begin_with_those_of_the_package(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PACKAGED", folder)
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new", tmp_path / "empty"):
        assert Results(experiments.own_copy(out)).measured("cifar100-lt") == Results(
            folder
        ).measured("cifar100-lt")
    (tmp_path / "new" / "cifar100-lt").rename(tmp_path / "new" / "mine")
    assert list(Results(experiments.own_copy(tmp_path / "new")).runs) == [
        "mine"
    ]  # own results are kept


def test_a_run_without_metrics_is_not_finished(tmp_path):
    made = dict.fromkeys(results.COLUMNS["runs"], "") | {"run": "ce", "seed": 3}
    results.write(
        tmp_path,
        "digits-lt",
        [Scored(made, [Value("test", "argmax", "acc", 50.0)], [])],
    )
    assert results.finished(tmp_path, "digits-lt") == {("ce", 3)}
    (tmp_path / "digits-lt" / "metrics.csv").unlink()
    assert results.finished(tmp_path, "digits-lt") == set()


WRITES_FIVE = """
import sys
from pathlib import Path
from paper import results
from paper.scoring import Value

print("ready", flush=True)
sys.stdin.readline()
for seed in range(5):
    made = dict.fromkeys(results.COLUMNS["runs"], "")
    made |= {"run": sys.argv[2], "seed": seed}
    values = [Value("test", "argmax", f"metric{k}", k) for k in range(1000)]
    results.write(Path(sys.argv[1]), "digits-lt", [results.Scored(made, values, [])])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such lock")
def test_processes_that_write_to_one_folder_lose_no_rows(tmp_path):
    words = [sys.executable, "-c", WRITES_FIVE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*words, name], **pipes) for name in ("ce", "la")]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
    for writer in writers:  # both begin at once
        writer.stdin.write("now\n")
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.stdout.close()
    assert results.finished(tmp_path, "digits-lt") == {
        (run, seed) for run in ("ce", "la") for seed in range(5)
    }
    assert len(results.Results(tmp_path).runs["digits-lt"]) == 10
