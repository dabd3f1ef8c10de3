"""A few inputs of the fuzzer in benchmarks/fuzzing.py for every parser: nothing but
InputError, and no crash.
"""

import json
import subprocess
import sys

import pytest

for _package in ("fastapi", "onnx", "PIL"):
    pytest.importorskip(_package)

CODE = """
import json, sys, tempfile, time
from pathlib import Path
from fuzzing import PARSERS, alone, fuzz

# A parser that waits is slow, whatever else the machine does.
assert alone(lambda: time.sleep(0.05)) > 0.045
with tempfile.TemporaryDirectory() as place:
    names = [name for name in PARSERS if name not in ("onnx", "run")]
    kept = Path(sys.argv[1])
    print(json.dumps([fuzz(name, 20, 7, 1, Path(place), kept) for name in names]))
"""


def test_no_parser_breaks(tmp_path, pytestconfig):
    folder = pytestconfig.rootpath / "benchmarks"
    words = [sys.executable, "-c", CODE, str(tmp_path / "kept")]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    broken = [row for row in rows if not row["holds"]]
    kept = (
        "\n".join(file.read_text()[-600:] for file in (tmp_path / "kept").glob("*.txt"))
        if broken
        else ""
    )
    assert not broken, kept
    assert all(row["inputs"] == 20 and row["refused"] > 2 for row in rows)
    assert sum(row["accepted"] > 0 for row in rows) >= len(rows) - 1
