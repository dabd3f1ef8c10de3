"""Code blocks of the documentation run as doctests, or they are commands that exist, or
a comment says why not.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from rfdlc.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if not {"gallery", "generated"} & set(page.parts)
]
FENCED = re.compile(r"^( *)(```|~~~)([^\n{]*)\n(.*?)^\1\2[ ]*$", re.S | re.M)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S[^\n]*\n)+")
NOT_RUN = re.compile(r"<!-- not run: [^>]+ -->\s*\Z")
# Commands of others. Those of rfdlc, paper, benchmarks and make are checked, but not
# run: they need data of the reader.
WHY_NOT = {
    "pip": "installs packages",
    ".venv/bin/pip": "installs packages",
    ".venv/bin/python": "waits for input",
    "curl": "needs a running server",
    "openssl": "not ours",
    "srun": "needs a cluster",
    "#!/bin/bash": "needs a cluster",
    "head=$(scontrol": "needs a cluster",
}
COMMANDS: Any = typer.main.get_command(app)
OURS = ("rfdlc", "torchrun", "python", "make")


def blocks(text: str) -> list[tuple[str, str, str]]:
    """(language, code, text before) of every block that is not a directive."""
    found = [(m[3].strip(), m[4], text[: m.start()]) for m in FENCED.finditer(text)]
    rest = FENCED.sub("", text)
    return found + [("", m[0], rest[: m.start()]) for m in INDENTED.finditer(rest)]


def commands(code: str) -> list[list[str]]:
    """The words of each command; none where the block is data or output."""
    lines = re.sub(r"\\\n", " ", code).splitlines()
    lines = [
        line.strip()
        for line in lines
        if line.strip() and not line.strip().startswith("#SBATCH")
    ]
    split = [
        [line] if line.startswith(("#!", "head=")) else shlex.split(line, comments=True)
        for line in lines
    ]
    first = [words[0].split()[0] for words in split if words]
    known = (*OURS, *WHY_NOT)
    return [words for words in split if words] if first and first[0] in known else []


def unknown(words: list[str]) -> str:
    """What of a command does not exist; empty if all does."""
    if words[0].split()[0] in WHY_NOT and words[0] != "srun":
        return ""
    if "-m" in words and words[words.index("-m") + 1] == "rfdlc":
        words = ["rfdlc", *words[words.index("-m") + 2 :]]
    if words[0] == "rfdlc":
        return unknown_to_rfdlc(words[1:])
    if words[:3] == ["python", "-m", "paper"]:
        return (
            ""
            if f'"{words[3]}"'
            in (ROOT / "paper/__main__.py").read_text(encoding="utf-8")
            else words[3]
        )
    if words[0] == "python" and words[1].endswith(".py"):
        script = ROOT / words[1]
        text = script.read_text(encoding="utf-8") if script.is_file() else ""
        return (
            " ".join(
                word for word in words[1:] if word.startswith("--") and word not in text
            )
            if text
            else words[1]
        )
    if words[0] == "make":
        rules = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M
        )
        return " ".join(word for word in words[1:] if word not in rules)
    return "" if words[:3] == ["python", "-m", "venv"] else words[0]


def unknown_to_rfdlc(words: list[str]) -> str:
    command = COMMANDS
    while hasattr(command, "commands"):
        while words[0] == "--import":
            words = words[2:]
        name, *words = words
        if name not in command.commands:
            return f"rfdlc {name}"
        command = command.commands[name]
    options = {
        each
        for parameter in command.params
        for each in (*parameter.opts, *parameter.secondary_opts)
    }
    return " ".join(
        word
        for word in words
        if re.match(r"--?[a-z]", word) and word.split("=")[0] not in options
    )


def test_commands_that_do_not_exist_are_found():
    assert [
        unknown(words)
        for words in commands("rfdlc decide a.csv --costs c.csv  # text\nrfdlc fly\n")
    ] == [
        "",
        "rfdlc fly",
    ]
    assert unknown(["rfdlc", "decide", "a.csv", "--nothing", "-o"]) == "--nothing"
    assert (
        unknown(
            [
                "torchrun",
                "--nproc-per-node",
                "8",
                "-m",
                "rfdlc",
                "train",
                "x",
                "--nothing",
            ]
        )
        == "--nothing"
    )
    assert unknown(["python", "benchmarks/nothing.py"]) == "benchmarks/nothing.py"
    assert (
        unknown(["python", "benchmarks/watch.py", "--streams", "1", "--nothing"])
        == "--nothing"
    )
    assert unknown(["make", "docs", "nothing"]) == "nothing"
    assert unknown(["python", "-m", "paper", "nothing"]) == "nothing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs_and_commands_exist(page):
    found = []
    for language, code, before in blocks(page.read_text(encoding="utf-8")):
        if ">>>" in code or NOT_RUN.search(before):
            continue
        if language == "python":
            found.append(
                "neither a doctest nor marked <!-- not run: why -->:"
                f" {code.strip().splitlines()[0]}"
            )
        found += [
            f"{' '.join(words)}: no {lost}"
            for words in commands(code)
            if (lost := unknown(words))
        ]
    assert not found
