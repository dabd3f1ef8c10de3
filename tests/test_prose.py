"""The documentation is readable: no sentence over 30 words, and pages open with what
their reader can do.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MADE = {
    "evidence.md",
    "changelog.md",
    "conduct.md",
    "contributing.md",
    "security.md",
}  # generated, or include a file
PAGES = [
    page
    for page in PAGES
    if page.name not in MADE
    and "gallery" not in page.parts
    and "generated" not in page.parts
]
HOME = {
    "index",
    "measurements",
}  # the first page of the site says what the library is; the other includes a file
PAGES.append(ROOT / "CHANGELOG.md")
GALLERY = sorted((ROOT / "examples").glob("*.py"))
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MOST_WORDS = 30  # up to the end of a sentence; semicolons and colons do not end one
NOT_PROSE = re.compile(r"^(\||```|~~~|#|!\[|<|:::|>>>|\[\^|\([\w-]+\)=|={3}|-{3})")


def blocks(text: str) -> list[str]:
    """Paragraphs and items of lists, each on one line, without code, tables, headings
    and comments.
    """
    text = re.sub(r"<!--.*?-->|^---\n.*?\n---\n", "", text, flags=re.S)
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "\n", text, flags=re.S | re.M)
    found, lines = list[str](), list[str]()
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        item = re.match(r"([-*]|\d+\.) ", stripped)
        if not stripped or item or NOT_PROSE.match(stripped):
            found += [" ".join(lines)] if lines else []
            lines = []
        if stripped and not NOT_PROSE.match(stripped):
            lines.append(stripped[item.end() :] if item else stripped)
    return found


def cells(text: str) -> list[str]:
    """Cells of tables."""
    rows = [
        line.strip().strip("|")
        for line in text.splitlines()
        if line.strip().startswith("|")
    ]
    return [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]


def gallery(text: str) -> str:
    """The prose of a program of the gallery: its docstring and the comments below `#
    %%`.
    """
    cells = re.findall(r"^# %%\n((?:#.*\n)*)", text, flags=re.M)
    return "\n\n".join(
        [
            ast.get_docstring(ast.parse(text)) or "",
            *(re.sub("^# ?", "", c, flags=re.M) for c in cells),
        ]
    )


def summaries(text: str) -> list[str]:
    """First paragraphs of the docstrings of a module and its public classes and
    functions.
    """
    found, waiting = list[str](), list[ast.AST]([ast.parse(text)])
    while waiting:
        node = waiting.pop()
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            found.append((ast.get_docstring(node) or "").split("\n\n")[0])
        if isinstance(node, ast.Module | ast.ClassDef):
            waiting += [
                c for c in node.body if not getattr(c, "name", "_").startswith("_")
            ]
    return [" ".join(each.split()) for each in found]


def sentences(block: str) -> list[str]:
    """Sentences of a paragraph; code and targets of links count as one word."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    plain = (
        re.sub(r"`[^`]*`", "CODE", plain)
        .replace("**", "")
        .replace("*", "")
        .replace("et al. ", "et al ")
    )
    return re.split(r"(?<=[.!?])[\"')]?\s+(?=[A-Z0-9\"'(a-z])", plain)


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def test_sentences_are_found():
    text = (
        "# Title\n\nOne `a b c` two.\nThree four? Five.\n\n```\nnot this. nor"
        " this.\n```\n- item one\n  goes on. End.\n"
    )
    assert [sentences(block) for block in blocks(text)] == [
        ["One CODE two.", "Three four?", "Five."],
        ["item one goes on.", "End."],
    ]
    assert words("One CODE, two - and [3].") == 5


def too_long(found: list[str]) -> list[str]:
    return [
        f"{words(s)} words: {s}"
        for block in found
        for s in sentences(block)
        if words(s) > MOST_WORDS
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page):
    text = page.read_text(encoding="utf-8")
    assert not too_long(blocks(text) + cells(text))


@pytest.mark.parametrize("program", GALLERY, ids=lambda program: program.stem)
def test_no_sentence_of_the_gallery_is_too_long(program):
    assert not too_long(blocks(gallery(program.read_text(encoding="utf-8"))))


def test_no_summary_of_a_docstring_is_too_long():
    found = {
        path.name: too_long(summaries(path.read_text(encoding="utf-8")))
        for path in SOURCES
    }
    assert not {name: long for name, long in found.items() if long}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.stem
)
def test_a_page_opens_with_what_its_reader_can_do(page):
    opening = next(iter(blocks(page.read_text(encoding="utf-8"))), "")
    assert page.stem in HOME or re.search(
        r"\b(you can|you will|you know|You will)\b", " ".join(sentences(opening)[:2])
    )
