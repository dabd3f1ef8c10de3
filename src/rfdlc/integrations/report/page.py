"""The HTML file: templates, styles, scripts and data put together so that nothing is fetched and nothing injected."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

STYLES = ("report.css",)
# One script in this order: what a file uses stands in an earlier one.
SCRIPTS = (
    "dom.js",
    "unpack.js",
    "decisions.js",
    "workbench.js",
    "files.js",
    "charts.js",
    "matrix.js",
    "editor.js",
    "headline.js",
    "panels.js",
    "figures.js",
    "main.js",
)


def build_page(title: str, data: Mapping[str, Any], summary: list[tuple[str, str, str]]) -> str:
    """The page with its data; `summary` (figure, value, interval) is what is read where scripts do not run."""
    style = "\n".join(_asset(name) for name in STYLES)
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS) + "})();\n"
    parts = {
        "title": html.escape(title),
        "policy": _policy(script, style),
        "style": style,
        "script": script,
        "data": as_data(data),
        "summary": "\n".join(_summary_row(row) for row in summary),
    }
    # One pass: what is put in is never looked at again, so no text of a user can stand for a part.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def as_data(data: Mapping[str, Any]) -> str:
    """JSON in which no character can end a script element or start markup."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (files("rfdlc.integrations.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """Only our own script and style run, pictures are inside the page, and no request can be made."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _summary_row(row: tuple[str, str, str]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
