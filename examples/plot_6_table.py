"""
A table with a rare class
=========================

``RFDLCClassifier`` fits several kinds of models to a table, weighs them by their
out-of-fold likelihood, calibrates, and decides for a utility. Here it is compared with
the usual choices on wines, of which one kind is rare.
"""

# %%
# The data
# --------
# Wines of three growers from scikit-learn. Of the third one only every fourth wine is
# kept.
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import rfdlc

warnings.simplefilter("ignore")
X, y = load_wine(return_X_y=True)
keep = (y != 2) | (np.arange(len(y)) % 4 == 0)
X, y = X[keep], y[keep]
X = X + np.random.default_rng(0).normal(
    0, 0.8 * X.std(axis=0), X.shape
)  # noisy measurements
print("wines of each grower:", np.bincount(y))

# %%
# What errors cost
# ----------------
# A wine of the rare grower is expensive: to sell it as another one costs 10, any other
# error costs 1.
costs = np.array([[0, 1, 1], [1, 0, 1], [10, 10, 0]])
models = {
    "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
    "the same, decided": rfdlc.UtilityClassifier(
        make_pipeline(StandardScaler(), LogisticRegression()), -costs
    ),
    "random forest": RandomForestClassifier(100, random_state=0),
    "the same, decided ": rfdlc.UtilityClassifier(
        RandomForestClassifier(50, random_state=0), -costs
    ),
    "RFDLCClassifier": rfdlc.RFDLCClassifier(-costs, random_state=0),
}

# %%
# Mean cost in three folds
# ------------------------
score = rfdlc.make_utility_scorer(-costs)
spent = {name: [] for name in models}
for train, test in StratifiedKFold(3, shuffle=True, random_state=0).split(X, y):
    for name, model in models.items():
        spent[name].append(-score(model.fit(X[train], y[train]), X[test], y[test]))
for name, values in spent.items():
    print(f"{name:20} {np.mean(values):.2f} +- {np.std(values) / np.sqrt(3):.2f}")

figure, axis = plt.subplots(figsize=(7, 3))
names = list(spent)[::-1]
means, errors = (
    [np.mean(spent[n]) for n in names],
    [np.std(spent[n]) / np.sqrt(3) for n in names],
)
axis.barh(names, means, xerr=errors, color="#4477aa")
axis.set(xlabel="mean cost of a decision (bars: standard error over folds)")
figure.tight_layout()
plt.show()

# %%
# The mixture
# -----------
# Which candidates did the last fit use, and with which weights?
choice = models["RFDLCClassifier"].choice_
for name, weight in sorted(choice.weights.items(), key=lambda pair: -pair[1])[:5]:
    print(f"{name:20} weight {weight:.2f}, out-of-fold loss {choice.losses[name]:.3f}")
