"""
Decide with a cost matrix
=========================

The most probable class is the best decision only if all errors cost the same. Here a
classifier for breast tumours decides for three costs of a missed tumour, without being
trained again.
"""

# %%
# A classifier
# ------------
# Naive Bayes for the 569 tumours of scikit-learn's data set. Some train it, some
# calibrate, 200 are new.
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB

import rfdlc

data = load_breast_cancer()
names = np.array(["malignant", "benign"])[data.target]
rest, x_new, y_rest, y_new = train_test_split(
    data.data, names, test_size=200, stratify=names, random_state=0
)
x_train, x_held, y_train, y_held = train_test_split(
    rest, y_rest, test_size=150, stratify=y_rest, random_state=0
)
model = GaussianNB().fit(x_train, y_train)
p_held, p_new = model.predict_proba(x_held), model.predict_proba(x_new)


# %%
# A utility for each cost
# -----------------------
# Rows are the truth, columns the decision. A false alarm costs 1, a missed tumour 1, 5
# or 25. A second look by a doctor costs 0.3: the action ``abstain`` is not a class.
def utility(cost: float) -> rfdlc.Utility:
    return rfdlc.Utility([[0, -1], [-cost, 0]], ["benign", "malignant"]).with_abstain(
        -0.3
    )


# %%
# Calibrate once, decide three times
# ----------------------------------
# ``fit`` corrects the probabilities on held-out samples: naive Bayes is far too
# certain. ``replace`` only changes the utility.
decider = rfdlc.Decider(utility(1), calibration="temperature").fit(p_held, y_held)
print(decider.model.calibrator)

decisions = {}
for cost in (1, 5, 25):
    actions = decider.replace(utility=utility(cost)).decide(p_new)
    decisions[cost] = np.array(["benign", "malignant", "abstain"])[actions]
    missed = np.sum((y_new == "malignant") & (decisions[cost] == "benign"))
    alarms = np.sum((y_new == "benign") & (decisions[cost] == "malignant"))
    second = np.sum(decisions[cost] == "abstain")
    print(
        f"a missed tumour costs {cost:2}: {missed} missed, {alarms} false alarms,"
        f" {second} second looks"
    )

# %%
# Each dot below is a tumour, ordered by the probability that it is malignant. Crosses
# are wrong decisions.
calibrated = decider.probabilities(p_new)[:, 1]
order = np.argsort(calibrated)
colours = {"benign": "#4477aa", "abstain": "#ccbb44", "malignant": "#ee6677"}
figure, axes = plt.subplots(3, 1, figsize=(8, 4.2), sharex=True)
for axis, (cost, decided) in zip(axes, decisions.items(), strict=True):
    for name, colour in colours.items():
        here = decided[order] == name
        axis.scatter(
            np.flatnonzero(here),
            calibrated[order][here],
            s=14,
            color=colour,
            label=f"decide {name}",
        )
    wrong = (decided != "abstain") & (decided != y_new)
    axis.scatter(
        np.flatnonzero(wrong[order]),
        calibrated[order][wrong[order]],
        marker="x",
        color="black",
        s=30,
    )
    axis.set_title(f"a missed tumour costs {cost}", fontsize=10, loc="left")
axes[1].set_ylabel("calibrated probability of malignant")
axes[2].set_xlabel("200 new tumours, ordered")
axes[0].legend(frameon=False, fontsize=8, loc="center left")
figure.tight_layout()
plt.show()

# %%
# What is it worth? The mean utility of the decisions, beside that of the most probable
# class, with 95% intervals:
for cost in (1, 5, 25):
    for rule in ("argmax", "expected-utility"):
        found = rfdlc.evaluate(
            p_new, y_new, decider.replace(utility=utility(cost), rule=rule)
        )
        low, high = found.intervals["mean_utility"]
        print(
            f"cost {cost:2}, {rule:16}: {found.mean_utility:6.3f}  ({low:.3f} to"
            f" {high:.3f})"
        )
