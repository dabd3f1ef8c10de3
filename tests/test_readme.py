"""Figures in the README are those of the committed results."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("headline", None)
    import headline

    assert headline.table() in (ROOT / "README.md").read_text(encoding="utf-8")
