"""The documentation site: `make docs` builds it into build/site, without a network."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

project = "rfdlc"
author = "The rfdlc developers"
copyright = author
version = release = re.findall(
    '__version__ = "(.+)"', (ROOT / "src/rfdlc/__init__.py").read_text()
)[0]

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["gallery/*.ipynb", "gallery/*.py"]

# Pages are Markdown that GitHub shows as well: links go to files, anchors are those of
# headings.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

# The reference: numpydoc sections, `names` in docstrings become links where there is
# such a name.
default_role = "py:obj"
highlight_language = "none"  # blocks say if they are Python
autosummary_generate = True
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "/",
    "within_subsection_order": "FileNameSortKey",
    "write_computation_times": False,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
    "capture_repr": ("_repr_html_", "__repr__"),
}

html_theme = "pydata_sphinx_theme"
html_title = "rfdlc"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 5,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "show_prev_next": True,
    "secondary_sidebar_items": {
        "**": ["page-toc"],
        "leaderboard": [],
    },  # whose tables are wide
    "footer_start": ["copyright"],
    "footer_end": [],
}
# Pages without pages below them have nothing to show there.
ALONE = (
    "architecture",
    "changelog",
    "concepts",
    "conduct",
    "contributing",
    "glossary",
    "releasing",
    "start",
)
html_sidebars: dict[str, list[str]] = {page: [] for page in ALONE}


# Files outside of this folder that have a page here: links to them, and from them, are
# those of the repository.
PAGES = {
    "](../benchmarks/README.md": "](measurements.md",
    "](../../benchmarks/README.md": "](../measurements.md",
    "](../docs/": "](",
    "](CODE_OF_CONDUCT.md": "](conduct.md",
    "](SECURITY.md": "](security.md",
    "](docs/": "](",
    "](benchmarks/": "](../benchmarks/",
}


def with_links_to_pages(*event: Any) -> None:
    """Change the text of a page or of an included file: the last argument of the event,
    a list.
    """
    for file, page in PAGES.items():
        event[-1][0] = event[-1][0].replace(file, page)


def skip_metadata_routing(app: Any, what: str, name: str, *rest: Any) -> bool | None:
    """scikit-learn adds `set_fit_request` and the like, whose docstrings link to its
    own pages.
    """
    return (
        True
        if re.fullmatch(r"(set_\w+_request|get_metadata_routing|model_\w+)", name)
        else None
    )


def setup(app: Any) -> None:
    app.connect("source-read", with_links_to_pages)
    app.connect("include-read", with_links_to_pages)
    app.connect("autodoc-skip-member", skip_metadata_routing)
