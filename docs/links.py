"""Check the links of a built site: every page, file and anchor that a page of the site
refers to exists.

python docs/links.py build/site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {"", "top"}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken(site: Path) -> list[str]:
    """'page: link' for every link inside of the site that leads nowhere."""
    pages = {
        file.resolve(): Page(file)
        for file in sorted(site.rglob("*.html"))
        if "_static" not in file.parts
    }
    found = []
    for file, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                (file.parent / unquote(parts.path)).resolve() if parts.path else file
            )
            if not target.exists() or (
                target in pages and unquote(parts.fragment) not in pages[target].anchors
            ):
                found.append(f"{file.relative_to(site.resolve())}: {link}")
    return found


if __name__ == "__main__":
    lost = broken(Path(sys.argv[1]))
    print("\n".join(lost) or "Every link inside of the site resolves.")
    sys.exit(bool(lost))
