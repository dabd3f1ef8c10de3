"""A lake is decided file by file: equal to the same rows in memory bit for bit, whatever happens meanwhile."""

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
from rfdlc.data import lake as lakes
from rfdlc.data.lake import Lake
from rfdlc.integrations import deciding
from rfdlc.integrations.deciding import DecideTable, decide_lake, lake_prior

NAMES = ["cat", "dog", "newt", "owl"]


def rows(seed, count, kind=np.float32):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet([4, 2, 1, 0.5], count).astype(kind)
    return {"id": [f"{seed}-{i}" for i in range(count)], **dict(zip(NAMES, p.T, strict=True))}


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
    """Partitions, several row groups and units, a file of one row and one without rows."""
    monkeypatch.setattr(lakes, "UNIT_ROWS", 300)
    for year, counts in ((2025, (700, 1)), (2026, (250, 0))):
        folder = tmp_path / "lake" / f"year={year}"
        folder.mkdir(parents=True)
        for number, count in enumerate(counts):
            pq.write_table(pa.table(rows(year + number, count)), folder / f"{number}.parquet", row_group_size=100)
    (tmp_path / "lake" / "_log").mkdir()
    (tmp_path / "lake" / "_log" / "0.csv").write_text("not a table of scores")
    return tmp_path / "lake"


def joined(*seeds_and_counts, kind=np.float32):
    return pa.concat_tables(pa.table(rows(seed, count, kind)) for seed, count in seeds_and_counts)


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
    np.testing.assert_array_equal(written["expected_utility"].to_numpy(), found.value.astype(np.float32))
    assert written["year"].to_pylist() == [2025] * 701 + [2026] * 250
    if "reason" in written.column_names:
        assert written["reason"].to_pylist() == found.reason.tolist()
    if found.sets is not None:
        assert written["set_size"].to_pylist() == found.sets.sum(axis=1).tolist()
    assert (result.samples, result.files) == (951, 6)
    assert result.actions == {action: actions.count(action) for action in decider.utility.actions}
    assert result.mean_expected_utility == pytest.approx(found.value.mean(), abs=1e-6)


def test_layouts_and_batches_decide_alike():
    """By columns or by rows, alone or among others: the same actions and values, and those of `decide`."""
    decider = deciders()["corrected"]
    table = joined((1, 3000))
    scores = np.stack([table[name].to_numpy() for name in NAMES], axis=1)
    actions, values = decider.decide_values(scores)
    np.testing.assert_array_equal(actions, decider.decide(scores))
    expected = decider.expected_utility(scores)
    np.testing.assert_allclose(values, expected[np.arange(3000), actions], atol=1e-6)
    np.testing.assert_allclose(values, expected.max(axis=1), atol=1e-6)
    for some in (slice(5, 6), slice(7, 9), slice(11, 2000)):
        for piece in (scores[some], np.asfortranarray(scores[some])):
            for whole, own in zip((actions, values), decider.decide_values(piece), strict=True):
                np.testing.assert_array_equal(own, whole[some])


def test_ties_take_the_first_action_in_both_layouts():
    from rfdlc.decide.rules import largest

    gains = np.random.default_rng(0).integers(0, 3, (500, 200)).astype(np.float32)
    np.testing.assert_array_equal(largest(np.asfortranarray(gains)), gains.argmax(axis=1))


@pytest.mark.parametrize("kind", ["csv", "arrow", "parquet"])
def test_every_format_through_a_url(tmp_path, kind):
    """In memory:// of fsspec, source and result; the numbers are 64-bit, as people write them."""
    fsspec = pytest.importorskip("fsspec")
    system, decider = fsspec.filesystem("memory"), deciders()["corrected"]
    for number in range(2):
        table, path = pa.table(rows(number, 40, np.float64)), tmp_path / f"{number}.{kind}"
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
    """Only new and changed files are decided; another decider, foreign files and lost sources are refused."""
    decider, out, decided = deciders()["plain"], tmp_path / "out", []
    own = deciding._decide
    monkeypatch.setattr(deciding, "_decide", lambda *given: decided.append(given[3].name) or own(*given))
    decide_lake(lake, out, decider)
    assert len(decided) == 6
    first = decide_lake(lake, out, decider)
    assert len(decided) == first.before == 6
    pq.write_table(pa.table(rows(3, 5)), lake / "year=2026" / "new.parquet")
    pq.write_table(pa.table(rows(4, 7)), lake / "year=2025" / "1.parquet")
    assert decide_lake(lake, out, decider).samples == first.samples + 5 + 6
    assert sorted(decided[6:]) == ["year=2025/1.parquet", "year=2026/new.parquet"]
    with pytest.raises(InputError, match="another decider"):
        decide_lake(lake, out, deciders()["argmax"])
    (lake / "year=2026" / "new.parquet").unlink()
    with pytest.raises(InputError, match=r"files that are gone \(year=2026/new.parquet\)"):
        decide_lake(lake, out, decider)
    with pytest.raises(InputError, match="cannot be written, it holds other files"):
        decide_lake(lake, lake, decider)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "download.part").touch()
    with pytest.raises(InputError, match=r"holds other files \(download.part\)"):
        decide_lake(lake, tmp_path / "mine", decider)
    assert (tmp_path / "mine" / "download.part").exists()


def test_columns_of_classes_can_be_kept(lake, tmp_path):
    decide_lake(lake, tmp_path / "out", deciders()["plain"], keep=["owl"])
    found, given = (pq.read_table(folder / "year=2025" / "1.parquet") for folder in (tmp_path / "out", lake))
    assert found.column_names == ["id", "owl", "action", "expected_utility"]
    assert found["owl"].equals(given["owl"])


def test_a_changed_object_of_the_same_size_is_decided_again(tmp_path):
    system = pytest.importorskip("fsspec").filesystem("memory")
    for seed in (0, 1):
        pq.write_table(pa.table(rows(seed, 40)), tmp_path / f"{seed}.parquet", compression="none", use_dictionary=False)
    contents = [(tmp_path / f"{seed}.parquet").read_bytes() for seed in (0, 1, 1)]
    assert len(contents[0]) == len(contents[1])
    for number, content in enumerate(contents):
        if number < 2:
            system.pipe("/changed/a.parquet", content)
        found = decide_lake("memory://changed", "memory://changed-out", deciders()["plain"])
        assert found.before == (number == 2)
    assert pq.read_table(pa.BufferReader(system.cat("/changed-out/a.parquet")))["id"][0].as_py() == "1-0"


def test_decisions_inside_of_the_lake_are_not_decided(lake):
    first, again = (decide_lake(lake, lake / "actions", deciders()["plain"]) for _ in range(2))
    assert (again.before, again.samples) == (first.files, first.samples)
    assert Lake(lake / "actions").rows == first.samples


def test_errors_name_the_file(lake, tmp_path):
    decider = deciders()["plain"]
    pq.write_table(pa.table({**rows(1, 20), "owl": np.ones(20)}), lake / "bad.parquet")
    with pytest.raises(InputError, match=r"bad.parquet, rows from 0 on: row 0 of the probabilities sums to"):
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
    np.testing.assert_allclose(found.prior, decider.estimate_prior(scores).prior, atol=1e-7)


def test_killed_processes_lose_and_repeat_nothing(tmp_path):
    """kill -9, then to the end: every row once, equal to an undisturbed result; what was there is left alone."""
    source, out = tmp_path / "lake", tmp_path / "out"
    source.mkdir()
    for number in range(12):
        pq.write_table(pa.table(rows(number, 3000)), source / f"{number:02d}.parquet", row_group_size=500)
    slow = "import time, rfdlc.integrations.deciding as d; own = d.DecideTable.columns\n"
    slow += "d.DecideTable.columns = lambda *given: time.sleep(0.03) or own(*given)\n"
    slow += "import sys; sys.argv = ['rfdlc', *sys.argv[1:]]; from rfdlc.cli import main; main()"
    command = [sys.executable, "-c", slow, "decide", f"{source}/*.parquet", "--out", f"{out}/", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(out.glob("[0-9]*"))) < 4:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    there = {file.name: file.stat().st_mtime_ns for file in out.glob("[0-9]*")}
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["samples"] == 36_000
    assert all((out / name).stat().st_mtime_ns == time for name, time in there.items())
    assert len(there) >= 4
    assert {file.name for file in out.iterdir()} == {"_rfdlc.json", *(f"{number:02d}.parquet" for number in range(12))}
    decide_lake(source, tmp_path / "undisturbed", Decider(Utility.one_hot(NAMES)))
    tables = [dataset.dataset(folder).to_table() for folder in (out, tmp_path / "undisturbed")]
    assert tables[0].equals(tables[1])
    assert tables[0]["id"].to_pylist() == [f"{number}-{i}" for number in range(12) for i in range(3000)]


def test_ranks_leave_what_others_are_writing(lake, tmp_path, monkeypatch):
    """A rank that is done first removes nothing; a process alone removes what killed ones left."""
    decider, out = deciders()["plain"], tmp_path / "out"
    out.mkdir()
    being_written = out / ".0.parquet.1.part"
    being_written.touch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, files in ((0, 3), (1, 6)):
        monkeypatch.setenv("RANK", str(rank))
        found = decide_lake(lake, out, decider)
        assert (found.files, found.complete, being_written.exists()) == (files, rank == 1, True)
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
    """Those that a utility or decider names, if all are there; otherwise all, which must hold numbers."""
    from rfdlc.cli import main

    def call(*words):
        monkeypatch.setattr("sys.argv", ["rfdlc", "decide", str(tmp_path / "lake"), "--out", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, "".join(capsys.readouterr())

    (tmp_path / "lake").mkdir()
    table = pa.table({**rows(1, 9), "price": np.arange(9.0), "label": ["a"] * 9})
    pq.write_table(table, tmp_path / "lake" / "0.parquet")
    deciders()["plain"].utility.to_csv(tmp_path / "U.csv")
    code, said = call(str(tmp_path / "named"), "--utility", str(tmp_path / "U.csv"), "--keep", "price")
    assert not code
    assert "1 file in" in said
    assert "1 decided now" in said
    assert "price" in pq.read_schema(tmp_path / "named" / "0.parquet").names
    code, said = call(str(tmp_path / "named"), "--utility", str(tmp_path / "U.csv"), "--keep", "price")
    assert "all had been decided already" in said
    code, said = call(str(tmp_path / "other"))
    assert code == 2
    assert "column 'label' holds string, not numbers; every column but id and target is a class" in said
    assert not (tmp_path / "other").exists()
