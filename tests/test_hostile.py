"""Files of strangers: formulas, control characters, bombs and nonsense; none ends in a
traceback.
"""

import csv
import io
import os
import subprocess
import sys
import zipfile

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

import rfdlc
from rfdlc.cli import main
from rfdlc.errors import printable
from rfdlc.formats import files
from rfdlc.formats.table_writing import write_table
from rfdlc.formats.tables import open_table

FORMULAS = [
    "=cmd|'/c calc'!A1",
    "+1+1",
    "-2+3",
    "@SUM(1)",
    "\t=1",
    "'=1",
    "''@x",
    "＝1+1",
]
PLAIN = ["-1", "+1.5e3", "a=b", "'quoted'", "", "it's"]


def run(capsys, monkeypatch, *words):
    """Exit code, standard output and standard error of a command."""
    monkeypatch.setattr(sys, "argv", ["rfdlc", *map(str, words)])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


def cells_of(path):
    return [
        cell
        for row in csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))
        for cell in row
    ]


def test_no_spreadsheet_computes_what_is_written_and_our_readers_undo_it(
    tmp_path, monkeypatch
):
    path, texts = tmp_path / "t.csv", FORMULAS + PLAIN
    write_table(path, {"=name": texts, "number": np.arange(len(texts)) - 3.5})
    assert not [
        cell
        for cell in cells_of(path)
        if cell[:1] in tuple("=+@\t＝") and cell not in PLAIN
    ]
    assert cells_of(path)[::2][1:] == [f"'{text}" for text in FORMULAS] + PLAIN
    read = open_table(path)
    assert read.names == ["=name", "number"]
    assert [
        cell for batch in read.batches() for cell in batch.column("=name").to_pylist()
    ] == texts
    assert [row[0] for _, row in read.rows()] == texts
    monkeypatch.setenv("RFDLC_KEEP_FORMULAS", "1")
    write_table(path, {"=name": texts})
    assert cells_of(path) == ["=name", *texts]


def test_formulas_in_names_go_round(tmp_path, capsys, monkeypatch):
    scores, out = tmp_path / "scores.csv", tmp_path / "out.csv"
    scores.write_text('id,"=cmd|x!A1",-1\n"=1+1",.9,.1\n@x,.2,.8\n')
    utility = rfdlc.Utility([[1, 0], [0, 1]], ["=cmd|x!A1", "-1"])
    utility.to_csv(tmp_path / "U.csv")
    assert cells_of(tmp_path / "U.csv")[1:3] == ["'=cmd|x!A1", "-1"]
    assert rfdlc.Utility.read_csv(tmp_path / "U.csv") == utility
    assert (
        run(
            capsys,
            monkeypatch,
            "decide",
            scores,
            "-u",
            tmp_path / "U.csv",
            "--out",
            out,
        )[0]
        == 0
    )
    assert cells_of(out)[7:9] == ["'=1+1", "'=cmd|x!A1"]
    columns = {
        name: column.to_pylist()
        for name, column in rfdlc.formats.tables.read_columns(out).items()
    }
    assert columns["id"] == ["=1+1", "@x"]
    assert columns["action"] == ["=cmd|x!A1", "-1"]


@pytest.mark.parametrize(
    "name", ["a\x1b[31m", "a\nrfdlc: done", "a\rb", "a\x07", "a\x9b1m"]
)
def test_control_characters_never_reach_a_terminal(tmp_path, capsys, monkeypatch, name):
    scores = tmp_path / "scores.csv"
    scores.write_text(f'id,"{name}",b\n1,.9,.1\n', encoding="utf-8", newline="")
    code, out, error = run(capsys, monkeypatch, "decide", scores, "-u", "one-hot")
    line = (out + error).removesuffix("\n")
    assert (code, printable(line)) == (2, line)
    with pytest.raises(rfdlc.InputError, match="without control characters"):
        rfdlc.Utility([[1, 0], [0, 1]], ["a", "b"], ["a", name])


def test_line_separators_and_turned_letters_are_shown_as_escapes(
    tmp_path, capsys, monkeypatch
):
    scores = tmp_path / "scores.csv"
    scores.write_text("id,a\u202eb,c\u2028d\n1,.9,.1\n", encoding="utf-8")
    code, out, error = run(capsys, monkeypatch, "decide", scores, "-u", "one-hot")
    assert code == 0
    assert r"a\u202eb" in out
    assert not {"\u202e", "\u2028"} & {*out, *error}


def test_control_characters_in_names_of_rows_and_files(tmp_path, capsys, monkeypatch):
    table = tmp_path / "t\x1b[31m.csv"
    table.write_text(
        "colour,x\x1b[2J,y\n" + "".join(f"{i % 3},{i},{i % 2}\n" for i in range(40))
    )
    for words in (
        ("inspect", table, "--target", "y"),
        ("inspect", tmp_path / "not\x1b[31m there"),
    ):
        _, out, error = run(capsys, monkeypatch, *words)
        assert out + error
        assert "\x1b" not in out + error


def npy(shape, kind="<f4", content=b""):
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    header = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def test_nonsense_is_one_line(tmp_path, capsys, monkeypatch):
    """Deep JSON, 10^15 rows, structured arrays, links in a circle, huge networks."""
    scores = tmp_path / "scores.csv"
    scores.write_text("a,b\n.9,.1\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "object.json").write_text('{"names":' * 100_000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"a":' * 100_000)
    (tmp_path / "loop").symlink_to("loop")
    np.savez(tmp_path / "structured.npz", x=np.zeros(4, [("a", "f4")]), y=[0, 1, 0, 1])
    np.savez(
        tmp_path / "named.npz", probabilities=np.eye(2), classes=np.array("[" * 100_000)
    )
    with zipfile.ZipFile(tmp_path / "rows.npz", "w") as archive:
        archive.writestr("x.npy", npy((10**15, 4)))
        archive.writestr("probabilities.npy", npy((10**15, 4)))
    commands = [
        ("decide", scores, "--decider", tmp_path / "deep.json"),
        ("decide", scores, "-u", "one-hot", "--classes", tmp_path / "object.json"),
        ("decide", tmp_path / "rows.npz", "-u", "one-hot"),
        ("decide", tmp_path / "named.npz", "-u", "one-hot"),
        *(
            ("inspect", tmp_path / name)
            for name in ("structured.npz", "rows.npz", "loop")
        ),
        *((command, tmp_path / "run") for command in ("resume", "serve")),
        (
            "train",
            "digits-lt",
            "--out",
            tmp_path / "a",
            "backbone=mlp",
            "widths=1000000000,1000000000",
        ),
        (
            "train",
            "digits-lt",
            "--out",
            tmp_path / "a",
            "backbone=mlp",
            f"widths={'8,' * 100}8",
        ),
    ]
    for words in commands:
        code, out, error = run(capsys, monkeypatch, *words)
        assert (code, out) == (2, ""), words
        assert error.splitlines()[-1].startswith("rfdlc: "), error
        assert "Traceback" not in error


def test_not_enough_memory_is_one_line(capsys, monkeypatch):
    for kind in (MemoryError, RuntimeError):
        monkeypatch.setattr(
            rfdlc.cli,
            "app",
            lambda kind=kind: (_ for _ in ()).throw(kind("not enough memory")),
        )
        code, _, error = run(capsys, monkeypatch)
        assert code == 2
        assert error.startswith("rfdlc: there is not enough memory (not enough memory)")
    for bug in ("a bug", "CUDA error: an illegal memory access was encountered"):
        monkeypatch.setattr(
            rfdlc.cli, "app", lambda bug=bug: (_ for _ in ()).throw(RuntimeError(bug))
        )
        with pytest.raises(RuntimeError, match=bug):
            run(capsys, monkeypatch)


def test_bombs(tmp_path, monkeypatch):
    """A limit on what is unpacked, named with the option that raises it; memory is not
    used before it is checked.
    """
    monkeypatch.setattr(files, "ALWAYS_UNPACKED", 2**20)
    rows = 40_000
    np.savez_compressed(
        tmp_path / "x.npz", x=np.zeros((rows, 50), np.float32), y=np.arange(rows) % 2
    )
    np.savez_compressed(
        tmp_path / "p.npz", probabilities=np.zeros((rows, 50), np.float32)
    )
    zeros = pyarrow.array(np.zeros(rows))
    pyarrow.parquet.write_table(
        pyarrow.table({f"c{i}": zeros for i in range(50)}), tmp_path / "t.parquet"
    )
    texts = pyarrow.array(["x" * 1000, "y" * 1000]).take(
        pyarrow.array(np.arange(rows) % 2)
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"a": texts, "y": np.arange(rows) % 2}), tmp_path / "s.parquet"
    )
    lists = pyarrow.FixedSizeListArray.from_arrays(np.zeros(50 * rows), 50)
    columns = {"c": lists, "y": np.arange(rows) % 2}
    pyarrow.feather.write_feather(
        pyarrow.table(columns), tmp_path / "l.feather", "zstd", chunksize=rows
    )
    pyarrow.feather.write_feather(
        pyarrow.table({f"c{i}": zeros for i in range(50)}), tmp_path / "t.arrow", "zstd"
    )
    readers = {
        "l.feather": lambda path: rfdlc.load(path, target="y"),
        "t.arrow": rfdlc.Predictions.load,
        "x.npz": rfdlc.load,
        "p.npz": rfdlc.Predictions.load,
        "t.parquet": rfdlc.Predictions.load,
        "s.parquet": lambda path: rfdlc.load(path, target="y"),
    }
    for name, read in readers.items():
        with pytest.raises(
            rfdlc.InputError,
            match=r"unpacks to .* GiB, over 200 times .*RFDLC_MAX_EXPANSION",
        ):
            read(tmp_path / name)
    monkeypatch.setenv("RFDLC_MAX_EXPANSION", "100000")
    assert len(rfdlc.load(tmp_path / "x.npz").train) == 0.8 * rows


def arrow(path, table, **options):
    with pyarrow.ipc.new_file(
        path, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)
    ) as writer:
        writer.write_table(table, max_chunksize=300)


def test_sizes_of_arrow_files_are_known_before_they_are_decompressed(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "t.arrow"
    words = pyarrow.array([f"word {i}" for i in range(1000)])
    table = pyarrow.table(
        {
            "a": rng.normal(size=1000),
            "b": words,
            "c": words.take([0] * 1000).dictionary_encode(),
        }
    )
    old = {
        "metadata_version": pyarrow.ipc.MetadataVersion.V4,
        "use_legacy_format": True,
    }
    sizes = []
    for options in ({}, {"compression": "zstd"}, {"compression": "lz4"}, old):
        arrow(path, table, **options)
        sizes.append(files.ipc_size(path))
        assert (
            rfdlc.formats.tables.read_columns(path)["b"].to_pylist()
            == words.to_pylist()
        )
    assert sizes == sizes[:1] * 4
    assert 0 <= sizes[0] - table.nbytes < 200  # the ends of texts, once more per batch
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(rfdlc.InputError, match="cannot be read as Arrow"):
        open_table(path)


def test_rows_that_show_the_same_values_are_counted(tmp_path, monkeypatch):
    """Dictionaries, views and runs are small for any number of rows."""
    monkeypatch.setattr(files, "ALWAYS_UNPACKED", 2**20)
    path, labels = tmp_path / "t.arrow", np.arange(20_000) % 2
    text = pyarrow.DictionaryArray.from_arrays(
        np.zeros(20_000, np.int32), ["x" * 10**5]
    )
    views = pyarrow.array(["x" * 1000] * 20_000, pyarrow.string_view())
    for column in (text, views):
        arrow(path, pyarrow.table({"a": column, "y": labels}), compression="zstd")
        with pytest.raises(rfdlc.InputError, match="over 200 times its size"):
            rfdlc.load(path, target="y")
    runs = pyarrow.RunEndEncodedArray.from_arrays(
        pyarrow.array([10**7], pyarrow.int64()), pyarrow.array(["x"])
    )
    arrow(path, pyarrow.table({"y": runs}))
    with pytest.raises(rfdlc.InputError, match="column 'y' holds run_end_encoded"):
        rfdlc.load(path, target="y")


def test_one_long_text_that_all_rows_repeat(tmp_path):
    """20,000 rows of a million letters in a small file: refused before they are all in
    memory.
    """
    words = [
        "-c",
        (
            "import resource, sys, rfdlc\nresource.setrlimit(resource.RLIMIT_AS, (6 *"
            " 2**30, 6 * 2**30))\ntry:\n    rfdlc.load(sys.argv[1], target='y')\nexcept"
            " rfdlc.InputError as error:\n    print(error)"
        ),
    ]
    texts = pyarrow.DictionaryArray.from_arrays(
        np.zeros(20_000, np.int32), ["x" * 10**6]
    )
    table = pyarrow.table({"a": texts, "y": np.arange(20_000) % 2})
    for kept in (False, True):  # whether the file says that the column is a dictionary
        pyarrow.parquet.write_table(
            table, tmp_path / "t.parquet", store_schema=kept, compression="zstd"
        )
        assert (tmp_path / "t.parquet").stat().st_size < 100_000
        path = [tmp_path / "t.parquet"]
        done = subprocess.run(
            [sys.executable, *words, *path], capture_output=True, text=True, check=False
        )
        assert "unpacks to 18.6 GiB, over 200 times its size" in done.stdout, (
            done.stderr
        )


def test_what_is_replaced_is_on_the_disk_first(tmp_path, monkeypatch):
    """The file, then its name, then the folder: after a crash of the machine the old or
    the new one is there.
    """
    done, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda place: (
            done.append(os.readlink(f"/proc/self/fd/{place}")),
            fsync(place),
        ),
    )
    monkeypatch.setattr(
        os, "replace", lambda *paths: (done.append("renamed"), rename(*paths))
    )
    (tmp_path / "new").write_text("new")
    (tmp_path / "file").write_text("old")
    files.replace_durably(tmp_path / "new", tmp_path / "file")
    assert done == [str(tmp_path / "new"), "renamed", str(tmp_path)]
    assert (tmp_path / "file").read_text() == "new"


def test_the_source_distribution_can_be_tested(pytestconfig):
    """It has the conftest.py that the tests need."""
    text = (pytestconfig.rootpath / "pyproject.toml").read_text()
    listed = text[text.index("[tool.hatch.build.targets.sdist]") :].splitlines()[1]
    needed = {
        "src",
        "tests",
        "conftest.py",
        "docs",
        "paper",
        "README.md",
        "constraints.txt",
        "SECURITY.md",
        "conda",
        "uv.lock",
    }
    assert needed <= set(listed.replace('"', " ").replace(",", " ").split())
