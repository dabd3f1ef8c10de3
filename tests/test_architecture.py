"""Layers import in one direction, importing is cheap, and names are unique."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import rfdlc

SOURCE = Path(rfdlc.__file__).parent
# What every room may import.
SHARED = {"errors", "formats", "imports", "progress", "style", "__version__"}
# The rooms in their order, and what each may import besides.
MAY_IMPORT = {
    "formats": set(),
    "statistics": set(),
    "probabilities": {"statistics"},
    "decisions": {"statistics", "probabilities"},
    "evaluation": {"statistics", "probabilities", "decisions"},
    "monitoring": {"statistics", "probabilities", "decisions", "evaluation"},
    # classes of a data set, and how its rows repeat
    "data": {"statistics", "probabilities"},
}
BELOW = set(MAY_IMPORT)
MAY_IMPORT["training"] = BELOW
MAY_IMPORT["predicting"] = BELOW | {"training"}
SIDE_BY_SIDE = ("estimators", "exporting", "serving", "reporting", "lakes")
for _room in SIDE_BY_SIDE:
    MAY_IMPORT[_room] = BELOW | {"training", "predicting"}
MAY_IMPORT["cli"] = BELOW | {"training", "predicting", *SIDE_BY_SIDE}
# Modules that implement one interface several times, and commands, which are named
# after the functions that they call.
SAME_INTERFACE = (
    "cli/",
    "data/readers/",
    "lakes/ray.py",
    "training/networks/fused/",
)


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """The files of the package by the dotted names of their modules."""
    named = {}
    for file in sorted(source.rglob("*.py")):
        parts = (source.name, *file.relative_to(source).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts = parts[:-1]
        named[".".join(parts)] = file
    return named


def imported(file: Path) -> set[str]:
    """The dotted names that a file imports, anywhere in it, for types alone too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import: write the whole path"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """The modules that each module imports."""
    files = modules(source)
    graph = {}
    for name, file in files.items():
        graph[name] = set()
        for target in imported(file):
            module = target if target in files else target.rpartition(".")[0]
            if module in files and module != name:
                graph[name].add(module)
    return graph


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_rooms_import_in_one_direction():
    wrong = set()
    for module, targets in imports().items():
        room = room_of(module)
        allowed = MAY_IMPORT.get(room, set()) | SHARED | {room, ""}
        if room in MAY_IMPORT:
            wrong |= {(module, t) for t in targets if room_of(t) not in allowed}
    assert not wrong


def test_every_room_has_its_place():
    rooms = {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert rooms == set(MAY_IMPORT)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, directly or by others."""
    reached = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            for target in graph[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        reached[start] = seen
    found = {
        tuple(sorted(other for other in reached[m] if m in reached[other]))
        for m in graph
        if m in reached[m]
    }
    return [list(circle) for circle in sorted(found)]


def test_no_modules_import_each_other():
    assert circles(imports()) == []


def test_a_circle_and_a_wrong_import_would_be_found(tmp_path):
    package = tmp_path / "rfdlc"
    for room, text in {
        "formats": "from rfdlc.cli import ask",
        "cli": "def f():\n    from rfdlc.data import load",
        "data": "if TYPE_CHECKING:\n    from rfdlc.formats import x",
    }.items():
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text(text)
    graph = imports(package)
    assert graph["rfdlc.formats"] == {"rfdlc.cli"}
    assert circles(graph) == [["rfdlc.cli", "rfdlc.data", "rfdlc.formats"]]


def test_no_package_has_the_name_of_a_public_function():
    packages = {file.parent.name for file in SOURCE.rglob("__init__.py")}
    assert not packages & set(rfdlc.__all__)


def test_the_study_is_not_imported():
    assert not [
        file
        for file in SOURCE.rglob("*.py")
        if re.search(r"^\s*(from|import) paper\b", file.read_text(), re.M)
    ]


ENGINES = ("ray", "dask", "fsspec")
HEAVY = (
    "torch",
    "pandas",
    "matplotlib",
    "pyarrow",
    "pydantic",
    "sklearn",
    "scipy",
    "rich",
    "typer",
    *ENGINES,
)


def test_import_loads_nothing_heavy():
    code = (
        f"import sys, rfdlc; print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_deciding_needs_no_torch_and_no_pandas():
    code = (
        "import sys, rfdlc; d = rfdlc.Decider(rfdlc.Utility([[1, 0], [-5,"
        " 1]])).fit([[.9, .1], [.4, .6]], [0, 1]);rfdlc.evaluate([[.9, .1], [.4, .6]],"
        " [0, 1], d);sys.exit(any(m in sys.modules for m in ('torch', 'pandas',"
        " 'matplotlib', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_loads():
    for name in rfdlc.__all__:
        assert getattr(rfdlc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rfdlc.nothing


def test_no_two_public_names_are_the_same():
    homes = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        place = str(file.relative_to(SOURCE))
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            public = isinstance(
                node, ast.ClassDef | ast.FunctionDef
            ) and not node.name.startswith("_")
            if public and not place.startswith(SAME_INTERFACE):
                homes[node.name].append(place)
    assert not {name: places for name, places in homes.items() if len(places) > 1}
