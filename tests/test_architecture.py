"""The arrows between the rooms point one way, and importing the package is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rfdlc

SOURCE = Path(rfdlc.__file__).parent
# What each room may import besides itself and the ground floor.
MAY_IMPORT = {
    "decide": set(),
    "data": {"decide"},
    "training": {"decide", "data"},
    "integrations": {"decide", "data", "training"},
    "cli": {"decide", "data", "training", "integrations"},
}
GROUND_FLOOR = {"errors", "files", "progress", "style", "tables"}
# The floors of learn, from the ground up: rooms, and between them modules at public paths. What is on a floor may
# import what is on those below, and knows neither its neighbours nor anything above.
FLOORS_OF_LEARN = (
    {"distributed"},
    {"networks"},
    {"losses", "optimisation"},
    {"config"},
    {"factories"},
    {"methods"},
    {"per_run"},
    {"step"},
    {"execution"},
    {"loop"},
    {"assembly", "heldout", "run"},
    {"_stacking", "model", "profiling"},
    {"trainer"},
    {"train"},
)


def imported(file: Path, package: str = "rfdlc") -> set[str]:
    """The rooms and modules of a package that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import, which says less than a whole path"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    inside = [name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")]
    return {name.split(".")[0] for name in inside}


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if (SOURCE / room).is_dir()])
def test_arrows_point_one_way(room):
    allowed = MAY_IMPORT[room] | GROUND_FLOOR | {room, "__version__"}
    wrong = {
        (str(file.relative_to(SOURCE)), room_above)
        for file in (SOURCE / room).rglob("*.py")
        for room_above in imported(file) - allowed
    }
    assert not wrong


@pytest.mark.parametrize("floor", range(len(FLOORS_OF_LEARN)))
def test_nothing_in_learn_knows_what_is_above_it(floor):
    below = set().union(*FLOORS_OF_LEARN[:floor])
    wrong = {
        (str(file.relative_to(SOURCE)), other)
        for name in FLOORS_OF_LEARN[floor]
        for file in files_of(SOURCE / "training" / name)
        for other in imported(file, "rfdlc.training") - below - {name}
    }
    assert not wrong


def files_of(place: Path) -> list[Path]:
    """Of a room, or of the module of this name."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def test_everything_in_learn_is_on_one_floor():
    modules, rooms = (SOURCE / "training").glob("*.py"), (SOURCE / "training").glob("*/__init__.py")
    there = {module.stem for module in modules} - {"__init__"} | {room.parent.name for room in rooms}
    assert sorted(name for floor in FLOORS_OF_LEARN for name in floor) == sorted(there)


def test_a_wrong_arrow_would_be_found(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from rfdlc.training import trainer\n"
        "def f():\n    from rfdlc.training.loop import epochs\n    import rfdlc.cli.decide\n"
    )
    assert imported(file) == {"training", "cli"}
    assert imported(file, "rfdlc.training") == {"trainer", "loop"}


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
