"""Code does not become denser: no count of `readability.json` rises."""

import ast
import json
from pathlib import Path

import pytest

from tests import readability

BASELINE = json.loads(readability.BASELINE.read_text(encoding="utf-8"))
FILES = readability.folders()


@pytest.mark.parametrize("folder", FILES)
def test_no_count_rises(folder):
    allowed = BASELINE.get(folder)
    assert allowed is not None, f"{folder}: python tests/readability.py --lower"
    now = readability.measured(FILES[folder])
    risen = {
        name: f"{value} of at most {allowed[name]}"
        for name, value in now.items()
        if value > allowed[name]
    }
    assert not risen, f"{folder}: write it plainer; what rose: {risen}"


def test_every_folder_of_the_baseline_is_there():
    assert set(BASELINE) == set(FILES)


DENSE = {
    "conditional": "x = a if b else c",
    "comprehensions": "x = [f(y) for y in z]",
    "packed": "x, y = f(a), g(b)",
    "augmented": "x |= {'k': v} if v else {}",
    "multiplied": "x = 'more' * bool(n)",
    "arguments": "def f(a, b):\n    given = a, b\n    return run(*given)",
    "messages": "def f(a):\n    told = f'{a} is wrong'\n    expect(a, told)",
    "pronouns": "def f(a):\n    found = g(a)\n\n\n\n    return found",
    "complex": "def f(a):\n" + "    if a: g()\n" * 12,
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_code_is_counted(name):
    assert readability.counts(DENSE[name])[name] == 1


def test_plain_code_is_not_counted():
    plain = "\n".join(
        [
            "def f(samples, names):",
            "    if not names:",
            "        raise InputError(f'{samples} samples have no names')",
            "    classes = sorted(names)",
            "    first, last = last, first",
            "    return select(*classes)",
        ]
    )
    counted = readability.counts(plain)
    assert not {name: counted[name] for name in DENSE if counted[name]}


def test_counts_are_of_the_whole_file():
    text = Path(readability.__file__).read_text(encoding="utf-8")
    counted = readability.counts(text)
    assert counted["nodes"] == len(list(ast.walk(ast.parse(text))))
