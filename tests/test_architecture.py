"""The arrows between the rooms point one way, and importing the package is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rfdlc

SOURCE = Path(rfdlc.__file__).parent
# What each room may import besides itself and the ground floor (errors, files, progress).
MAY_IMPORT = {
    "decide": set(),
    "data": {"decide"},
    "learn": {"decide", "data"},
    "evidence": {"decide", "data", "learn"},
    "apps": {"decide", "data", "learn"},
    "cli": {"decide", "data", "learn", "evidence", "apps"},
}
GROUND_FLOOR = {"errors", "files", "progress", "style"}


def rooms_imported(file: Path) -> set[str]:
    """The rooms of rfdlc that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" if node.module == "rfdlc" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        found |= {module.split(".")[1] for module in modules if module.startswith("rfdlc.")}
    return found


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if (SOURCE / room).is_dir()])
def test_arrows_point_one_way(room):
    allowed = MAY_IMPORT[room] | GROUND_FLOOR | {room, "__version__"}
    wrong = {
        (str(file.relative_to(SOURCE)), imported)
        for file in (SOURCE / room).rglob("*.py")
        for imported in rooms_imported(file) - allowed
    }
    assert not wrong


def test_a_wrong_arrow_would_be_found(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def f():\n    from rfdlc.learn.training import train\n    import rfdlc.cli.decide\n")
    assert rooms_imported(file) == {"learn", "cli"}


@pytest.mark.parametrize("heavy", ["torch", "pandas", "matplotlib", "pyarrow", "sklearn", "scipy", "rich", "typer"])
def test_import_loads_nothing_heavy(heavy):
    code = f"import sys, rfdlc; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_deciding_needs_no_torch_and_no_pandas():
    code = (
        "import sys, rfdlc; d = rfdlc.Decider(rfdlc.Utility([[1, 0], [-5, 1]])).fit([[.9, .1], [.4, .6]], [0, 1]);"
        "rfdlc.evaluate([[.9, .1], [.4, .6]], [0, 1], d);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_loads():
    for name in rfdlc.__all__:
        assert getattr(rfdlc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rfdlc.nothing
