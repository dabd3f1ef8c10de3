"""The documentation is readable: no sentence over 30 words, and pages open with what their reader can do."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = {"evidence.md", "changelog.md", "conduct.md", "contributing.md", "security.md"}  # generated, or include a file
PAGES = [
    page for page in PAGES if page.name not in MADE and "gallery" not in page.parts and "generated" not in page.parts
]
HOME = {"index", "measurements"}  # the first page of the site says what the library is; the other includes a file
MOST_WORDS = 30  # up to the end of a sentence, a semicolon or a colon
NOT_PROSE = re.compile(r"^(\||```|~~~|#|!\[|<|:::|>>>|\[\^)")


def blocks(text: str) -> list[str]:
    """Paragraphs and items of lists, each on one line, without code, tables, headings and comments."""
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


def sentences(block: str) -> list[str]:
    """Sentences of a paragraph; code and targets of links count as one word."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    plain = re.sub(r"`[^`]*`", "CODE", plain).replace("**", "").replace("*", "")
    return re.split(r"(?<=[.!?:;])[\"')]?\s+(?=[A-Z0-9\"'(a-z])", plain)


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def test_sentences_are_found():
    text = (
        "# Title\n\nOne `a b c` two.\nThree four? Five.\n\n```\nnot this. nor this.\n```\n- item one\n  goes on. End.\n"
    )
    assert [sentences(block) for block in blocks(text)] == [
        ["One CODE two.", "Three four?", "Five."], ["item one goes on.", "End."]
    ]  # fmt: skip
    assert words("One CODE, two - and [3].") == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page):
    every = [s for block in blocks(page.read_text(encoding="utf-8")) for s in sentences(block)]
    assert not [f"{words(s)} words: {s}" for s in every if words(s) > MOST_WORDS]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.stem)
def test_a_page_opens_with_what_its_reader_can_do(page):
    opening = next(iter(blocks(page.read_text(encoding="utf-8"))), "")
    assert page.stem in HOME or re.search(r"\b(you can|you will|you know|You will)\b", " ".join(sentences(opening)[:2]))
