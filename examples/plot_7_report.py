"""
A report that readers can edit
==============================

``rfdlc.report`` writes one HTML file that opens offline in any browser. Readers can
edit the utility in it and see at once what changes.
"""

# %%
# Train two models
# ----------------
# Long-tailed digits that come with the library: 129 images of digit 0, six of digit 9.
# Cross-entropy and the library's default method, an ensemble of three networks (called
# particles).
import html
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import rfdlc

folder = Path(tempfile.mkdtemp())
runs = {"cross-entropy": "ce", "rf-dlc": "rf-dlc"}
models = {
    name: rfdlc.train("digits-lt", method, out=folder / method)
    for name, method in runs.items()
}

# %%
# Write the report
# ----------------
# A right decision is worth 1. Taking a digit for a more frequent one costs 1.
classes = models["rf-dlc"].classes
utility = rfdlc.Utility.tail_sensitive(classes, penalty=-1)
page = rfdlc.report(
    {name: folder / method for name, method in runs.items()},
    utility,
    folder / "report.html",
)
print(f"{page.name}: {page.stat().st_size / 1e6:.1f} MB")


# %%
# Here it is, inside of this page. Scroll to *What if the utility were different?* and
# edit a number.
class Frame:
    def _repr_html_(self) -> str:
        text = html.escape(page.read_text(encoding="utf-8"), quote=True)
        return (
            f'<iframe srcdoc="{text}" title="the report" width="100%"'
            ' height="700"></iframe>'
        )


Frame()

# %%
# The same numbers in Python
# --------------------------
# ``evaluate`` gives every metric of the report, with its interval.
figure, axis = plt.subplots(figsize=(7, 3))
for name, model in models.items():
    predictions = rfdlc.Predictions.load(model.path / "predictions.npz")
    penalties = np.linspace(0, -3, 13)
    found = [
        rfdlc.evaluate(
            predictions,
            decider=model.decider.replace(
                utility=rfdlc.Utility.tail_sensitive(classes, p)
            ),
        )
        for p in penalties
    ]
    axis.plot(
        [100 * f.false_head_rate for f in found],
        [100 * f.accuracy for f in found],
        "o-",
        label=name,
    )
axis.set(xlabel="rare digits taken for more frequent ones (%)", ylabel="accuracy (%)")
axis.legend(frameon=False)
figure.tight_layout()
plt.show()
# sphinx_gallery_thumbnail_path = 'figures/report.png'
