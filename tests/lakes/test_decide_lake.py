"""A lake is decided file by file: equal to the same rows in memory bit for bit,
whatever happens meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import dataset, feather
from pyarrow import parquet as pq

from rfdlc import Decider, InputError, Predictions, Utility
from rfdlc.lakes import decide as deciding
from rfdlc.lakes import reading as lakes
from rfdlc.lakes.decide import decide_lake, lake_prior
from rfdlc.lakes.reading import Lake
from rfdlc.lakes.tables import DecideTable

NAMES = ["cat", "dog", "newt", "owl"]


def rows(seed, count, kind=np.float32):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet([4, 2, 1, 0.5], count).astype(kind)
    return {
        "id": [f"{seed}-{i}" for i in range(count)],
        **dict(zip(NAMES, p.T, strict=True)),
    }


def deciders():
    rng = np.random.default_rng(0)
    costs = Utility(np.eye(4) - rng.random((4, 4)), NAMES)
    p, y = rng.dirichlet(np.ones(4), 200), rng.integers(0, 4, 200)
    prior = {"train_prior": [0.5, 0.3, 0.1, 0.1], "target_prior": "uniform"}
    fitted = Decider(costs, calibration="temperature").fit(p, y)
    return {
        "plain": Decider(costs),
        "corrected": Decider(costs, **prior),
        "all positive": Decider(Utility(costs.matrix + 5, NAMES), **prior),
        "calibrated": fitted,
        "abstains": Decider(costs.with_abstain(0.3)),
        "argmax": Decider(costs, rule="argmax"),
        "sets": fitted.fit_sets(p, y, coverage=0.8),
        "budget": Decider(costs.with_abstain(0.3)).fit_budget(p, y, budget=0.1),
    }


@pytest.fixture
def lake(tmp_path, monkeypatch):
    """Partitions, several row groups and units, a file of one row and one
    without rows.
    """
    monkeypatch.setattr(lakes, "UNIT_ROWS", 300)
    for year, counts in ((2025, (700, 1)), (2026, (250, 0))):
        folder = tmp_path / "lake" / f"year={year}"
        folder.mkdir(parents=True)
        for number, count in enumerate(counts):
            pq.write_table(
                pa.table(rows(year + number, count)),
                folder / f"{number}.parquet",
                row_group_size=100,
            )
    (tmp_path / "lake" / "_log").mkdir()
    (tmp_path / "lake" / "_log" / "0.csv").write_text("not a table of scores")
    return tmp_path / "lake"


def joined(*seeds_and_counts, kind=np.float32):
    return pa.concat_tables(
        pa.table(rows(seed, count, kind)) for seed, count in seeds_and_counts
    )


def in_memory(table, decider):
    scores = np.stack([table[name].to_numpy() for name in NAMES], axis=1)
    found = decider.explain(scores)
    return found, [decider.utility.actions[i] for i in found.action]


@pytest.mark.parametrize("name", deciders())
def test_equals_memory_bit_for_bit(lake, tmp_path, name):
    decider, table = deciders()[name], joined((2025, 700), (2026, 1), (2026, 250))
    result = decide_lake(lake, tmp_path / "out", decider)
    written = dataset.dataset(tmp_path / "out", partitioning="hive").to_table()
    found, actions = in_memory(table, decider)
    assert written["id"].to_pylist() == table["id"].to_pylist()
    assert written["action"].to_pylist() == actions
    np.testing.assert_array_equal(
        written["expected_utility"].to_numpy(), found.value.astype(np.float32)
    )
    assert written["year"].to_pylist() == [2025] * 701 + [2026] * 250
    if "reason" in written.column_names:
        assert written["reason"].to_pylist() == found.reason.tolist()
    if found.sets is not None:
        assert written["set_size"].to_pylist() == found.sets.sum(axis=1).tolist()
    assert (result.samples, result.files) == (951, 6)
    assert result.actions == {
        action: actions.count(action) for action in decider.utility.actions
    }
    assert result.mean_expected_utility == pytest.approx(found.value.mean(), abs=1e-6)


def test_layouts_and_batches_decide_alike():
    """By columns or by rows, alone or among others: the same actions and values, and
    those of `decide`.
    """
    decider = deciders()["corrected"]
    table = joined((1, 3000))
    scores = np.stack([table[name].to_numpy() for name in NAMES], axis=1)
    actions, values = decider.decide_values(scores)
    np.testing.assert_array_equal(actions, decider.decide(scores))
    expected = decider.utility.gains(decider.probabilities(scores))
    np.testing.assert_allclose(values, expected[np.arange(3000), actions], atol=1e-6)
    np.testing.assert_allclose(values, expected.max(axis=1), atol=1e-6)
    for some in (slice(5, 6), slice(7, 9), slice(11, 2000)):
        for piece in (scores[some], np.asfortranarray(scores[some])):
            for whole, own in zip(
                (actions, values), decider.decide_values(piece), strict=True
            ):
                np.testing.assert_array_equal(own, whole[some])


def test_ties_take_the_first_action_in_both_layouts():
    from rfdlc.decisions.rules import largest

    gains = np.random.default_rng(0).integers(0, 3, (500, 200)).astype(np.float32)
    np.testing.assert_array_equal(
        largest(np.asfortranarray(gains)), gains.argmax(axis=1)
    )


@pytest.mark.parametrize("kind", ["csv", "arrow", "parquet"])
def test_every_format_through_a_url(tmp_path, kind):
    """In memory:// of fsspec, source and result; the numbers are 64-bit, as people
    write them.
    """
    fsspec = pytest.importorskip("fsspec")
    system, decider = fsspec.filesystem("memory"), deciders()["corrected"]
    for number in range(2):
        table, path = (
            pa.table(rows(number, 40, np.float64)),
            tmp_path / f"{number}.{kind}",
        )
        if kind == "csv":
            pa.csv.write_csv(table, path)
        else:
            (feather.write_feather if kind == "arrow" else pq.write_table)(table, path)
        system.pipe(f"/lake-{kind}/{path.name}", path.read_bytes())
    decide_lake(f"memory://lake-{kind}/*.{kind}", f"memory://decided-{kind}", decider)
    found, actions = in_memory(joined((0, 40), (1, 40), kind=np.float64), decider)
    ending = "" if kind == "parquet" else ".parquet"
    files = [f"/decided-{kind}/{number}.{kind}{ending}" for number in range(2)]
    tables = [pq.read_table(pa.BufferReader(system.cat(file))) for file in files]
    assert pa.concat_tables(tables)["action"].to_pylist() == actions
    values = pa.concat_tables(tables)["expected_utility"].to_numpy()
    np.testing.assert_array_equal(values, found.value.astype(np.float32))


def test_continues_and_follows_the_lake(lake, tmp_path, monkeypatch):
    """Only new and changed files are decided; another decider, foreign files and lost
    sources are refused.
    """
    decider, out, decided = deciders()["plain"], tmp_path / "out", []
    own = deciding._decide
    monkeypatch.setattr(
        deciding, "_decide", lambda *given: decided.append(given[3].name) or own(*given)
    )
    decide_lake(lake, out, decider)
    assert len(decided) == 6
    first = decide_lake(lake, out, decider)
    assert len(decided) == first.before == 6
    pq.write_table(pa.table(rows(3, 5)), lake / "year=2026" / "new.parquet")
    pq.write_table(pa.table(rows(4, 7)), lake / "year=2025" / "1.parquet")
    assert decide_lake(lake, out, decider).samples == first.samples + 5 + 6
    assert sorted(decided[6:]) == ["year=2025/1.parquet", "year=2026/new.parquet"]
    with pytest.raises(InputError, match=r"begun with other settings .decider."):
        decide_lake(lake, out, deciders()["argmax"])
    (lake / "year=2026" / "new.parquet").unlink()
    with pytest.raises(
        InputError, match=r"files that are gone \(year=2026/new.parquet\)"
    ):
        decide_lake(lake, out, decider)
    with pytest.raises(InputError, match="holds other files"):
        decide_lake(lake, lake, decider)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "download.part").touch()
    with pytest.raises(InputError, match=r"holds other files \(download.part\)"):
        decide_lake(lake, tmp_path / "mine", decider)
    assert (tmp_path / "mine" / "download.part").exists()


def test_columns_of_classes_can_be_kept(lake, tmp_path):
    decide_lake(lake, tmp_path / "out", deciders()["plain"], keep=["owl"])
    found, given = (
        pq.read_table(folder / "year=2025" / "1.parquet")
        for folder in (tmp_path / "out", lake)
    )
    assert found.column_names == ["id", "owl", "action", "expected_utility"]
    assert found["owl"].equals(given["owl"])


def test_a_changed_object_of_the_same_size_is_decided_again(tmp_path):
    system = pytest.importorskip("fsspec").filesystem("memory")
    for seed in (0, 1):
        pq.write_table(
            pa.table(rows(seed, 40)),
            tmp_path / f"{seed}.parquet",
            compression="none",
            use_dictionary=False,
        )
    contents = [(tmp_path / f"{seed}.parquet").read_bytes() for seed in (0, 1, 1)]
    assert len(contents[0]) == len(contents[1])
    for number, content in enumerate(contents):
        if number < 2:
            system.pipe("/changed/a.parquet", content)
        found = decide_lake(
            "memory://changed", "memory://changed-out", deciders()["plain"]
        )
        assert found.before == (number == 2)
    assert (
        pq.read_table(pa.BufferReader(system.cat("/changed-out/a.parquet")))["id"][
            0
        ].as_py()
        == "1-0"
    )


def test_decisions_inside_of_the_lake_are_not_decided(lake):
    first, again = (
        decide_lake(lake, lake / "actions", deciders()["plain"]) for _ in range(2)
    )
    assert (again.before, again.samples) == (first.files, first.samples)
    assert Lake(lake / "actions").rows == first.samples


def test_errors_name_the_file(lake, tmp_path):
    decider = deciders()["plain"]
    pq.write_table(pa.table({**rows(1, 20), "owl": np.ones(20)}), lake / "bad.parquet")
    with pytest.raises(
        InputError, match=r"bad.parquet: row 0 of the .* sums to .*--skip-broken"
    ):
        decide_lake(lake, tmp_path / "out", decider)
    (lake / "bad.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(InputError, match=r"bad.parquet: cannot be read as Parquet"):
        decide_lake(lake, tmp_path / "out", decider)
    (lake / "bad.parquet").unlink()
    with pytest.raises(InputError, match="no column price"):
        decide_lake(lake, tmp_path / "out", decider, keep=["price"])
    with pytest.raises(InputError, match="no tables found"):
        decide_lake(tmp_path / "nothing*.csv", tmp_path / "out", decider)
    marked = pa.table({**rows(1, 20), "rfdlc_scores": ["corrected"] * 20})
    with pytest.raises(InputError, match="already"):
        DecideTable(deciders()["corrected"])(marked)


def command(monkeypatch, capsys, *words):
    """Exit code, standard output and standard error of the command line."""
    from rfdlc.cli import main

    monkeypatch.setattr("sys.argv", ["rfdlc", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def broken(lake):
    """Rows of each kind that cannot be used, in two units of one file, and three files
    that cannot be read at all.
    """
    table = {name: np.array(column) for name, column in rows(9, 700).items()}
    table["dog"][17], table["cat"][250] = np.nan, -0.5
    table["owl"][[420, 421]] += 1
    empty = pa.array(
        [None if i in (20, 690) else p for i, p in enumerate(table["newt"].tolist())],
        pa.float32(),
    )
    pq.write_table(
        pa.table({**table, "newt": empty}), lake / "rows.parquet", row_group_size=100
    )
    (lake / "bytes.parquet").write_bytes(b"PAR1 is not enough")
    (lake / "cells.csv").write_text("id,cat,dog,newt,owl\na,1,0,0,0\nb,much,0,0,0\n")
    pq.write_table(
        pa.table({**rows(8, 30), "cat": np.full(30, np.nan)}), lake / "none.parquet"
    )
    return [17, 20, 250, 420, 421, 690]


@pytest.mark.parametrize("name", ["plain", "abstains", "sets", "budget", "calibrated"])
def test_broken_rows_and_files_are_left_out(lake, tmp_path, name):
    """All others are decided as without the broken ones, which are named; also when the
    call is repeated.
    """
    lost, decider = broken(lake), deciders()[name]
    for before in (0, 9):
        result = decide_lake(lake, tmp_path / "out", decider, skip_broken=True)
        assert (result.samples, result.before, result.complete) == (
            951 + 694,
            before,
            True,
        )
        by_file = dict[str, list]()
        for own in result.skipped:
            by_file.setdefault(own["file"].rpartition("/")[2], []).append(own)
            assert own["file"] in own["reason"]
        assert {
            file: own[0]["rows"]
            for file, own in by_file.items()
            if file != "rows.parquet"
        } == dict.fromkeys(["bytes.parquet", "cells.csv", "none.parquet"])
        assert [row for own in by_file["rows.parquet"] for row in own["rows"]] == lost
        reasons = " ".join(own["reason"] for own in by_file["rows.parquet"])
        expected = [
            "nan in row 17,",
            "row 420 of the probabilities sums to",
            "1 empty cells, first in row 690:",
        ]
        assert [text for text in expected if text not in reasons] == []
    kept = [i for i in range(700) if i not in lost]
    table = pa.table(rows(9, 700)).take(kept)
    found, actions = in_memory(table, decider)
    parts = [
        pq.read_table(tmp_path / "out" / f"rows-{i:05d}.parquet") for i in range(3)
    ]
    written = pa.concat_tables(parts)
    assert written["id"].to_pylist() == table["id"].to_pylist()
    assert written["action"].to_pylist() == actions
    np.testing.assert_array_equal(
        written["expected_utility"].to_numpy(), found.value.astype(np.float32)
    )


def test_a_mended_file_is_decided_and_a_strict_call_takes_nothing_that_lacks_rows(
    lake, tmp_path
):
    broken(lake)
    decide_lake(lake, tmp_path / "out", deciders()["plain"], skip_broken=True)
    for name in ("bytes.parquet", "cells.csv", "none.parquet"):
        (lake / name).unlink()
    with pytest.raises(InputError, match=r"rows.parquet: .*row \d+.*--skip-broken"):
        decide_lake(lake, tmp_path / "out", deciders()["plain"])
    pq.write_table(pa.table(rows(9, 700)), lake / "rows.parquet", row_group_size=100)
    result = decide_lake(lake, tmp_path / "out", deciders()["plain"])
    assert (result.samples, result.skipped) == (951 + 700, [])


def test_decisions_of_a_file_that_broke_are_removed(tmp_path):
    (tmp_path / "lake").mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table(rows(1, 9)), tmp_path / "lake" / f"{name}.parquet")
    decide_lake(tmp_path / "lake", tmp_path / "out", deciders()["plain"])
    pq.write_table(
        pa.table({**rows(2, 9), "owl": np.ones(9)}), tmp_path / "lake" / "b.parquet"
    )
    result = decide_lake(
        tmp_path / "lake", tmp_path / "out", deciders()["plain"], skip_broken=True
    )
    assert (result.samples, result.files) == (9, 1)
    assert not (tmp_path / "out" / "b.parquet").exists()
    (tmp_path / "lake" / "a.parquet").unlink()
    with pytest.raises(
        InputError, match=r"b.parquet: row 0 of the probabilities sums to"
    ):
        decide_lake(
            tmp_path / "lake", tmp_path / "other", deciders()["plain"], skip_broken=True
        )


def test_a_prior_is_estimated_without_broken_rows(lake):
    lost, decider = (
        broken(lake),
        Decider(Utility.one_hot(NAMES), train_prior="uniform", target_prior=None),
    )
    table = joined((9, 700), (2025, 700), (2026, 1), (2026, 250))
    kept = [i for i in range(951 + 700) if i not in lost]
    scores = np.stack([table[name].to_numpy()[kept] for name in NAMES], axis=1)
    found = lake_prior(Lake(lake, skip_broken=True), decider)
    np.testing.assert_allclose(
        found.prior, decider.estimate_prior(scores).prior, atol=1e-7
    )
    (lake / "bytes.parquet").unlink()
    with pytest.raises(
        InputError, match=r"(none|rows).parquet: .*row \d+|cells.csv line 3"
    ):
        lake_prior(Lake(lake), decider)


def test_command_with_a_broken_row(tmp_path, monkeypatch, capsys):
    """One empty cell in 1 of 5 files: an error that names file and row once, or a
    result without the row.
    """
    (tmp_path / "lake").mkdir()
    for number in range(5):
        pq.write_table(
            pa.table(rows(number, 40)), tmp_path / "lake" / f"{number}.parquet"
        )
    table = pa.table(rows(3, 40)).to_pandas()
    table.loc[7, "dog"] = None
    table.to_parquet(tmp_path / "lake" / "3.parquet")
    deciders()["budget"].save(tmp_path / "d.json")
    words = [
        "decide",
        tmp_path / "lake",
        "--decider",
        tmp_path / "d.json",
        "--out",
        f"{tmp_path}/out",
    ]
    code, said, problem = command(monkeypatch, capsys, *words)
    assert (code, said) == (2, "")
    assert (problem.count("3.parquet"), problem.count("row 7")) == (1, 1)
    code, said, _ = command(monkeypatch, capsys, *words, "--skip-broken")
    assert not code
    assert "5 files in" in said
    assert "Left out 1 row (7): " in said
    code, said, _ = command(monkeypatch, capsys, *words, "--skip-broken", "--json")
    found = json.loads(said)
    assert (found["samples"], [own["rows"] for own in found["skipped"]]) == (199, [[7]])
    assert found["files_before"] == 5
    code, _, problem = command(
        monkeypatch, capsys, *words[:-1], tmp_path / "a.csv", "--skip-broken"
    )
    assert (code, "--skip-broken is for folders" in problem) == (2, True)


def test_command_tells_how_much_of_a_budget_was_used(tmp_path, monkeypatch, capsys):
    """Prices of easy samples hand over more than the budget of harder ones: both shares
    are printed.
    """
    (tmp_path / "lake").mkdir()
    rng = np.random.default_rng(0)
    easy, hard = rng.dirichlet([0.3] * 4, 400), rng.dirichlet([2] * 4, 300)
    utility = (
        Utility.one_hot(NAMES).with_abstain(0.7).with_expert("nurse", confusion=0.75)
    )
    decider = Decider(utility).fit_budget(
        easy, easy.argmax(axis=1), budget={"total": "10%", "nurse": "4%"}
    )
    decider.save(tmp_path / "d.json")
    pq.write_table(
        pa.table(dict(zip(NAMES, hard.T, strict=True))), tmp_path / "lake" / "0.parquet"
    )
    chosen = decider.decide(hard)
    shares = {
        "total": float((chosen >= 4).mean()),
        "nurse": float((chosen == 5).mean()),
    }
    assert shares["total"] > 0.11
    words = [
        "decide",
        tmp_path / "lake",
        "--decider",
        tmp_path / "d.json",
        "--out",
        f"{tmp_path}/out",
    ]
    _, said, _ = command(monkeypatch, capsys, *words)
    assert (
        f"Budget: total 10%, handed over {shares['total']:.1%}; nurse 4%, handed over"
        f" {shares['nurse']:.1%}" in said
    )
    assert "by prices" in said
    budget = json.loads(command(monkeypatch, capsys, *words, "--json")[1])["budget"]
    assert budget["shares"] == {"total": 0.1, "nurse": 0.04}
    assert (budget["kept_by"], budget["handed_over"]) == (
        "prices",
        pytest.approx(shares),
    )


@pytest.mark.parametrize("most", [10_000, 100])
def test_prior_of_a_lake(lake, monkeypatch, most):
    """Of few rows, equal to that in memory; of more, from rows at equal distances."""
    monkeypatch.setattr(deciding, "MOST_ESTIMATED", most)
    decider = Decider(Utility.one_hot(NAMES), train_prior="uniform", target_prior=None)
    table = joined((2025, 700), (2026, 1), (2026, 250))
    scores = np.stack([table[name].to_numpy() for name in NAMES], axis=1)
    if most == 100:  # every tenth row of each unit: 300, 300, 100 rows, one, and 250
        starts = np.array([0, 300, 600, 700, 701, 951])
        scores = np.concatenate([scores[a:b:10] for a, b in pairwise(starts)])
    found = lake_prior(Lake(lake), decider)
    np.testing.assert_allclose(
        found.prior, decider.estimate_prior(scores).prior, atol=1e-7
    )


def test_killed_processes_lose_and_repeat_nothing(tmp_path):
    """kill -9, then to the end: every row once, equal to an undisturbed result; what
    was there is left alone.
    """
    source, out = tmp_path / "lake", tmp_path / "out"
    source.mkdir()
    for number in range(12):
        pq.write_table(
            pa.table(rows(number, 3000)),
            source / f"{number:02d}.parquet",
            row_group_size=500,
        )
    slow = "import time, rfdlc.lakes.decide as d; own = d.DecideTable.columns\n"
    slow += "d.DecideTable.columns = lambda *given: time.sleep(0.03) or own(*given)\n"
    slow += (
        "import sys; sys.argv = ['rfdlc', *sys.argv[1:]]; from rfdlc.cli import main;"
        " main()"
    )
    command = [
        sys.executable,
        "-c",
        slow,
        "decide",
        f"{source}/*.parquet",
        "--out",
        f"{out}/",
        "--json",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and len(list(out.glob("[0-9]*"))) < 4:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    there = {file.name: file.stat().st_mtime_ns for file in out.glob("[0-9]*")}
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["samples"] == 36_000
    assert all((out / name).stat().st_mtime_ns == time for name, time in there.items())
    assert len(there) >= 4
    assert {file.name for file in out.iterdir()} == {
        "_rfdlc.json",
        *(f"{number:02d}.parquet" for number in range(12)),
    }
    decide_lake(source, tmp_path / "undisturbed", Decider(Utility.one_hot(NAMES)))
    tables = [
        dataset.dataset(folder).to_table() for folder in (out, tmp_path / "undisturbed")
    ]
    assert tables[0].equals(tables[1])
    assert tables[0]["id"].to_pylist() == [
        f"{number}-{i}" for number in range(12) for i in range(3000)
    ]


def test_ranks_leave_what_others_are_writing(lake, tmp_path, monkeypatch):
    """A rank that is done first removes nothing; a process alone removes what killed
    ones left.
    """
    decider, out = deciders()["plain"], tmp_path / "out"
    out.mkdir()
    being_written = out / ".0.parquet.1.part"
    being_written.touch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, files in ((0, 3), (1, 6)):
        monkeypatch.setenv("RANK", str(rank))
        found = decide_lake(lake, out, decider)
        assert (found.files, found.complete, being_written.exists()) == (
            files,
            rank == 1,
            True,
        )
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "0")
    assert decide_lake(lake, out, decider).before == 6
    assert not being_written.exists()


def test_float32_tables_are_read_as_such(tmp_path):
    table = pa.table(rows(1, 10))
    pq.write_table(table, tmp_path / "p.parquet")
    values = Predictions.load(tmp_path / "p.parquet").scores.values
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values[0, :, 1], table["dog"].to_numpy())


def test_which_columns_are_classes(tmp_path, capsys, monkeypatch):
    """Those that a utility or decider names, if all are there; otherwise all, which
    must hold numbers.
    """
    from rfdlc.cli import main

    def call(*words):
        monkeypatch.setattr(
            "sys.argv", ["rfdlc", "decide", str(tmp_path / "lake"), "--out", *words]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, "".join(capsys.readouterr())

    (tmp_path / "lake").mkdir()
    table = pa.table({**rows(1, 9), "price": np.arange(9.0), "label": ["a"] * 9})
    pq.write_table(table, tmp_path / "lake" / "0.parquet")
    deciders()["plain"].utility.to_csv(tmp_path / "U.csv")
    code, said = call(
        str(tmp_path / "named"), "--utility", str(tmp_path / "U.csv"), "--keep", "price"
    )
    assert not code
    assert "1 file in" in said
    assert "1 decided now" in said
    assert "price" in pq.read_schema(tmp_path / "named" / "0.parquet").names
    code, said = call(
        str(tmp_path / "named"), "--utility", str(tmp_path / "U.csv"), "--keep", "price"
    )
    assert "all had been decided already" in said
    code, said = call(str(tmp_path / "other"))
    assert code == 2
    assert (
        "column 'label' holds string, not numbers; every column but id and target is a"
        " class" in said
    )
    assert not (tmp_path / "other").exists()


def test_a_name_that_is_not_utf8_is_told(lake, tmp_path):
    (lake / os.fsdecode(b"\xff.txt")).touch()
    with pytest.raises(InputError, match=r"whose name is not UTF-8 .*: rename it"):
        decide_lake(lake, tmp_path / "out", deciders()["plain"])


def test_a_file_that_changes_behind_its_time_is_decided_again(tmp_path):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "a.csv"
    file.write_text("id,cat,dog\n1,0.9,0.1\n2,0.8,0.2\n")
    decider = Decider(Utility.one_hot(["cat", "dog"]))
    first = decide_lake(tmp_path / "in", tmp_path / "out", decider)
    again = decide_lake(tmp_path / "in", tmp_path / "out", decider)
    before = file.stat()
    file.write_text("id,cat,dog\n1,0.1,0.9\n2,0.8,0.2\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = decide_lake(tmp_path / "in", tmp_path / "out", decider)
    assert first.actions == again.actions == {"cat": 2, "dog": 0}
    assert (first.before, again.before, other.before) == (0, 1, 0)
    assert other.actions == {"cat": 1, "dog": 1}
