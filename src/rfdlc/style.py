"""How every figure looks: settings for matplotlib's `rc_context`."""

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4de",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, so that it can be searched and edited
    "svg.hashsalt": "rfdlc",  # the same figure gives the same file
    "pdf.fonttype": 42,
}
