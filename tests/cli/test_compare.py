"""`rfdlc compare` as a user runs it: runs of a sweep, several seeds per side, tables
for a paper.
"""

import json

import numpy as np
import pytest

from rfdlc import Classes, Predictions, compare
from rfdlc.cli.reading import paths_in


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Predictions of three seeds of two methods, in folders named as those of a
    sweep.
    """
    monkeypatch.chdir(tmp_path)
    y = np.random.default_rng(0).integers(0, 3, 300)
    for shift, method in ((0.0, "ce"), (0.5, "la")):
        for seed in range(3):
            z = (1.0 + shift) * np.eye(3)[y] + np.random.default_rng(
                [int(2 * shift), seed]
            ).normal(size=(300, 3))
            folder = tmp_path / f"runs/method={method},seed={seed}"
            folder.mkdir(parents=True)
            predictions = Predictions(
                logits=z,
                targets=y,
                classes=Classes.from_counts([9, 3, 1], ["a", "b", "c"]),
            )
            predictions.save(folder / "predictions.npz")
    return tmp_path / "runs"


def test_a_file_with_other_classes_than_the_first_one(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, name in (("a.csv", "dog"), ("b.csv", "newt")):
        (tmp_path / file).write_text(f"id,cat,{name},target\n1,0.5,0.5,cat\n")
    code, _, err = run("compare", "a.csv", "b.csv")
    assert code == 2
    assert "b.csv: no column for class 'dog'" in err
    assert err.endswith("or take the class out of the classes of the other inputs\n")


def side(method, seeds=range(3)):
    return ",".join(f"runs/method={method},seed={seed}" for seed in seeds)


def test_folders_of_a_sweep_have_commas_in_their_names(run, grid):
    code, out, err = run("compare", side("ce", [0]), side("la", [2]), "--json")
    assert (code, err) == (0, "")
    ends = [f"runs/method={name}" for name in ("ce,seed=0", "la,seed=2")]
    known = compare(*ends).to_dict()
    assert json.loads(out)["names"] == ["method=ce,seed=0", "method=la,seed=2"]
    assert json.loads(out)["differences"] == json.loads(
        json.dumps(known["differences"])
    )
    found = json.loads(run("compare", side("ce"), side("la"), "--json")[1])
    assert found["seeds"] == [3, 3]
    code, _, err = run("compare", side("ce", [0]), side("lda", [0]))
    assert (code, "runs/method=lda,seed=0: no such file or run folder" in err) == (
        2,
        True,
    )


def test_the_longest_existing_path_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a,b", "b,c=0", "x,y/z"):
        (tmp_path / name).mkdir(parents=True)
    for text, names in {
        "a,b": ["a,b"],
        "b,a": ["b", "a"],
        "a,b,a": ["a,b", "a"],
        "b,c=0,b": ["b,c=0", "b"],
        "x,y/z,a": ["x,y/z", "a"],
        "m=0,s=1": ["m=0,s=1"],  # none is there: an error about all of it
        "m=0,s=1,b,c=0": ["m=0,s=1", "b,c=0"],
        "b,m=0,s=1": ["b", "m=0,s=1"],
    }.items():
        assert [str(path) for path in paths_in(text)] == names


def test_a_side_of_several_runs_is_their_mean(run, grid):
    code, out, _ = run("compare", side("ce"), side("la"))
    assert code == 0
    assert "300 paired samples, 3 and 3 runs, not paired by seed" in out
    names = "method=ce (mean of 3 runs)", "method=la (mean of 3 runs)"
    assert out.splitlines()[-1].startswith(
        f"Mean utility: {names[1]} is better than {names[0]} by"
    )
    found = compare(
        *(
            [f"runs/method={name},seed={seed}" for seed in range(3)]
            for name in ("ce", "la")
        )
    )
    assert found.names == names
    right = [
        [
            (p.scores.values[0].argmax(1) == p.targets).mean()
            for p in map(Predictions.load, found_in)
        ]
        for found_in in (
            [f"runs/method={name},seed={seed}" for seed in range(3)]
            for name in ("ce", "la")
        )
    ]
    row = found["accuracy"]
    assert (row.a, row.b) == pytest.approx([np.mean(each) for each in right])
    assert (row.a_deviation, row.b_deviation) == pytest.approx(
        [np.std(each, ddof=1) for each in right]
    )
    cells = next(row for row in found.rows() if row[0] == "accuracy")
    assert cells[1] == f"{np.mean(right[0]):.2%} ± {np.std(right[0], ddof=1):.2%}"
    one = compare("runs/method=ce,seed=0", "runs/method=la,seed=0")
    assert one["accuracy"].a_deviation is None
    assert "±" not in one.rows()[0][1]


def test_more_than_eight_runs_can_be_compared(run, grid):
    assert json.loads(
        run("compare", side("ce", [0] * 5), side("la", [1] * 5), "--json")[1]
    )["seeds"] == [5, 5]
    files = [f"runs/method=ce,seed={seed}" for seed in [0] * 9]
    code, _, err = run("report", *files, "--out", "r.html")
    assert (code, "9 runs: expected 1 to 8" in err) == (2, True)


def test_tables_for_a_paper(run, grid):
    code, out, _ = run("compare", side("ce"), side("la"), "--format", "markdown")
    lines = [line.strip("| ").split(" | ") for line in out.splitlines()]
    found = compare(
        *(
            [f"runs/method={name},seed={seed}" for seed in range(3)]
            for name in ("ce", "la")
        )
    )
    assert code == 0
    assert lines[0] == [*found.columns]
    assert out.splitlines()[1] == "|---|---:|---:|---:|---:|---:|"
    assert [
        tuple(cell.replace("\\", "") for cell in line) for line in lines[2:]
    ] == found.rows()
    out = run("compare", side("ce"), side("la"), "--format", "latex")[1]
    assert out.startswith(
        "\\begin{tabular}{lrrrrr}\n\\toprule\nmetric & method=ce (mean of 3 runs) & "
    )
    assert out.endswith("\\bottomrule\n\\end{tabular}\n")
    row = found["accuracy"]
    assert (
        f"\naccuracy & {row.a * 100:.2f}\\% $\\pm$ {row.a_deviation * 100:.2f}\\% & "
        in out
    )
    code, out, err = run("compare", side("ce"), side("la"), "--format", "html")
    assert (
        code,
        out,
        "format 'html' is unknown: expected one of markdown, latex" in err,
    ) == (2, "", True)


def test_rows_as_numbers(grid):
    found = compare("runs/method=ce,seed=0", "runs/method=la,seed=0")
    records = found.records()
    assert [row["label"] for row in records] == [
        row[0].removesuffix(" (the question)") for row in found.rows()
    ]
    assert records[0] | {} == next(
        d for d in found.to_dict()["differences"] if d["name"] == "accuracy"
    )
