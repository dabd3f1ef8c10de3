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
# What each layer may import besides itself and the shared modules.
MAY_IMPORT = {
    "decide": set(),
    "data": {"decide"},
    "training": {"decide", "data"},
    "integrations": {"decide", "data", "training"},
    "cli": {"decide", "data", "training", "integrations"},
}
SHARED = {
    "dates",
    "errors",
    "files",
    "identity",
    "imports",
    "progress",
    "style",
    "table_cells",
    "table_writing",
    "tables",
}
# The order inside `training`: a module imports only modules and packages of earlier
# rows.
ORDER_OF_TRAINING = (
    {"distributed", "hub", "trial_plan"},
    {"networks"},
    {"losses", "optimisation", "embedding", "sharding", "skewed"},
    {"config"},
    {"factories"},
    {"methods"},
    {"step", "familiarity"},
    {"execution"},
    {"loop", "run"},
    {"model"},
    {"_stacking", "early_stopping", "profiling", "sinks", "tabular"},
    {"trainer"},
    {"measuring"},
    {"tuning"},
    {"train"},
    {"cross_validation", "plans"},
    {"sweep"},
)
# Modules that implement one interface several times, and commands, which are named
# after the functions that they call.
SAME_INTERFACE = (
    "cli/",
    "data/sources/",
    "integrations/ray.py",
    "training/networks/fused/",
)


def imported(file: Path, package: str = "rfdlc") -> set[str]:
    """The first names below `package` that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import: write the whole path"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    inside = [
        name.removeprefix(f"{package}.")
        for name in names
        if name.startswith(f"{package}.")
    ]
    return {name.split(".")[0] for name in inside}


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_layers_import_in_one_direction(layer):
    allowed = MAY_IMPORT[layer] | SHARED | {layer, "__version__"}
    wrong = {
        (str(file.relative_to(SOURCE)), other)
        for file in (SOURCE / layer).rglob("*.py")
        for other in imported(file) - allowed
    }
    assert not wrong


@pytest.mark.parametrize("row", range(len(ORDER_OF_TRAINING)))
def test_modules_of_training_import_only_earlier_ones(row):
    earlier = set().union(*ORDER_OF_TRAINING[:row])
    wrong = {
        (str(file.relative_to(SOURCE)), other)
        for name in ORDER_OF_TRAINING[row]
        for file in files_of(SOURCE / "training" / name)
        for other in imported(file, "rfdlc.training") - earlier - {name}
    }
    assert not wrong


def files_of(place: Path) -> list[Path]:
    """Of a package, or of the module of this name."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def test_every_module_of_training_has_its_place_in_the_order():
    modules, packages = (
        (SOURCE / "training").glob("*.py"),
        (SOURCE / "training").glob("*/__init__.py"),
    )
    there = {module.stem for module in modules} - {"__init__"} | {
        package.parent.name for package in packages
    }
    assert sorted(name for row in ORDER_OF_TRAINING for name in row) == sorted(there)


def test_a_wrong_import_would_be_found(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from rfdlc.training import many\ndef f():\n    from rfdlc.training.loop import"
        " epochs\n    import rfdlc.cli.decide\n"
    )
    assert imported(file) == {"training", "cli"}
    assert imported(file, "rfdlc.training") == {"many", "loop"}


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
