"""How every figure looks: settings for matplotlib's `rc_context`, and short names."""

LONGEST_NAME = 24  # letters of a class beside an axis

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4de",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,  # a class may be called $5-$10
    "svg.fonttype": "none",  # text stays text, so that it can be searched and edited
    "svg.hashsalt": "rfdlc",  # the same figure gives the same file
    "pdf.fonttype": 42,
}


def brief(name: str) -> str:
    """The name of a class beside an axis, cut where it would take the place of the
    figure itself.
    """
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
