"""
When the class mix changes
==========================

A classifier learns how frequent the classes are. Where they are more or less frequent,
its probabilities are wrong. The new mix can be estimated without labels, and corrected.
"""

# %%
# A classifier for one mix, new data with another
# -----------------------------------------------
# In the training data digit 0 is five times as frequent as digit 9. In the new data it
# is the other way round.
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import rfdlc

rng = np.random.default_rng(0)
X, y = load_digits(return_X_y=True)
X = X / 16 + rng.normal(0, 0.25, X.shape)  # noise, so that the task is not too easy
X_old, X_new, y_old, y_new = train_test_split(
    X, y, test_size=0.4, stratify=y, random_state=0
)
keep = rng.random(len(y_old)) < 5 ** (-y_old / 9)
X_old, y_old = X_old[keep], y_old[keep]
keep = rng.random(len(y_new)) < 5 ** (-(9 - y_new) / 9)
X_new, y_new = X_new[keep], y_new[keep]
X_train, X_held, y_train, y_held = train_test_split(
    X_old, y_old, test_size=0.4, stratify=y_old, random_state=0
)
model = LogisticRegression(max_iter=500, C=0.3).fit(X_train, y_train)
p_held, p_new = model.predict_proba(X_held), model.predict_proba(X_new)

# %%
# Estimate the new mix
# --------------------
# ``train_prior="train"`` says that the scores carry the class frequencies of the
# training data. The estimate uses the new samples without their labels, and has 95%
# intervals.
classes = rfdlc.Classes.from_labels(y_train)
decider = rfdlc.Decider(rfdlc.Utility.one_hot(classes), train_prior="train").fit(
    p_held, y_held
)
estimate = decider.estimate_prior(p_new)
low, high = estimate.interval()
true_mix = np.bincount(y_new, minlength=10) / len(y_new)

figure, axis = plt.subplots(figsize=(8, 3.4))
place = np.arange(10)
axis.bar(
    place - 0.27,
    np.bincount(y_train) / len(y_train),
    0.25,
    color="#bbbbbb",
    label="training data",
)
around = [estimate.prior - low, high - estimate.prior]
axis.bar(place, estimate.prior, 0.25, color="#4477aa", label="estimated", yerr=around)
axis.bar(place + 0.27, true_mix, 0.25, color="#ee6677", label="true")
axis.set(xlabel="digit", ylabel="share", xticks=place)
axis.legend(frameon=False)
figure.tight_layout()
plt.show()

# %%
# Decide for it
# -------------
for name, prior in {
    "as trained": "train",
    "estimated": estimate,
    "true": true_mix,
}.items():
    found = rfdlc.evaluate(p_new, y_new, decider.replace(target_prior=prior))
    low, high = found.intervals["accuracy"]
    print(
        f"{name:10}: accuracy {found.accuracy:.1%} ({low:.1%} to {high:.1%}),"
        f" calibration error {found.ece:.1%}"
    )

# %%
# This corrects frequencies only. If the samples of a class look different, the two
# estimates of the library disagree, and a warning says so:
print(f"disagreement of the two estimates: {estimate.disagreement:.2f}")
