"""A simulated model in service with a known posterior, for tests of monitors and of
labels that come later.
"""

import numpy as np

from rfdlc import Classes, Utility

MIX = np.array([0.8, 0.15, 0.05])
CLASSES = Classes.from_counts([8000, 1500, 500], ["common", "seldom", "rare"])
U = Utility([[1, 0, 0], [-1, 1, 0], [-5, -2, 1]], CLASSES).with_abstain(0.2)


def model(rng, samples, mix=MIX, sharp=1.0):
    """Logits whose softmax is the posterior for the class prior MIX if `sharp` is 1,
    and true classes.
    """
    y = rng.choice(3, samples, p=mix)
    return (
        sharp * (2 * (rng.normal(size=(samples, 3)) + 2 * np.eye(3)[y]) - 2)
        + np.log(MIX),
        y,
    )
