"""The gallery: eight programs that sphinx-gallery can read, which use public names
alone. `make docs` runs them.
"""

import ast
from pathlib import Path

import pytest

import rfdlc

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("plot_*.py"))


def used_names(tree: ast.AST) -> set[str]:
    """What a program takes from rfdlc: imported modules by their whole name, and
    attributes of the package.
    """
    names = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and str(node.module).split(".")[0] == "rfdlc"
        ):
            names |= {
                f"{node.module}.{alias.name}".removeprefix("rfdlc.")
                for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("rfdlc.")
                for alias in node.names
                if alias.name.startswith("rfdlc.")
            }
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "rfdlc"
        ):
            names.add(node.attr)
    return names


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_uses_public_names_and_shows_a_figure(file):
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    compile(tree, file, "exec")
    assert used_names(tree) <= set(rfdlc.__all__)
    title, underline = (ast.get_docstring(tree) or "").splitlines()[:2]
    assert title
    assert underline == "=" * len(title)
    assert "plt.show()" in text


def test_there_are_eight_and_private_names_would_be_found():
    assert len(EXAMPLES) == 8
    hidden = (
        "import rfdlc.cli.decide\nfrom rfdlc.decisions.rules import"
        " largest\nrfdlc.Decider._check"
    )
    assert used_names(ast.parse(hidden)) == {
        "cli.decide",
        "decisions.rules.largest",
        "Decider",
    }
