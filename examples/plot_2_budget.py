"""
Abstain with a budget
=====================

A person can look at 5% of the cases. Which ones? Those for which a second look is worth
most, given what errors cost. Here handwritten digits are classified; the digits 5 to 9
are rare, and taking them for a frequent digit is costly.
"""

# %%
# A classifier for imbalanced digits
# ----------------------------------
# Digit 0 is ten times as frequent as digit 9 in all samples: training, held-out and new
# ones.
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import rfdlc

rng = np.random.default_rng(0)
X, y = load_digits(return_X_y=True)
X = X / 16 + rng.normal(0, 0.25, X.shape)  # noise, so that the task is not too easy
keep = rng.random(len(y)) < 10 ** (-y / 9)
X, y = X[keep], y[keep]
X_rest, X_new, y_rest, y_new = train_test_split(
    X, y, test_size=0.4, stratify=y, random_state=0
)
X_train, X_held, y_train, y_held = train_test_split(
    X_rest, y_rest, test_size=0.4, stratify=y_rest, random_state=0
)
model = LogisticRegression(max_iter=500).fit(X_train, y_train)
p_held, p_new = model.predict_proba(X_held), model.predict_proba(X_new)

# %%
# A utility with one more action
# ------------------------------
# A right decision is worth 1, and taking a digit for a more frequent one costs 2. A
# person is right in 98% of the cases and costs 0.1 per case.
classes = rfdlc.Classes.from_labels(y_train)
utility = rfdlc.Utility.tail_sensitive(classes, penalty=-2).with_expert(
    "person", confusion=0.98, cost=0.1
)
decider = rfdlc.Decider(utility, train_prior="train").fit(p_held, y_held)

# %%
# Without a budget, every case goes to the person for which that is worth more than
# deciding:
person = utility.actions.index("person")
free = decider.decide(p_new)
print(f"{np.mean(free == person):.0%} of the new digits would be handed over")

# %%
# The budget
# ----------
# ``fit_budget`` finds the price of a hand-over on held-out samples. A batch then keeps
# the budget exactly.
limited = decider.fit_budget(p_held, y_held, budget="5%")
actions = limited.decide(p_new, batch=True)
print(f"{np.sum(actions == person)} of {len(actions)} are handed over")

# %%
# What would another budget bring? The curve is the mean utility on new samples. The
# bars compare three ways to spend a budget of 5%: the samples for which asking is worth
# most, the least certain ones, and random ones.
curve = rfdlc.evaluate(p_new, y_new, decider).utility_by_budget
alone = decider.replace(
    utility=rfdlc.Utility.tail_sensitive(classes, penalty=-2)
).decide(p_new)
worth = utility.matrix[y_new, alone]
asked = 0.98 + 0.02 * worth.mean() - 0.1
few = np.sum(actions == person)


def spent_on(rows) -> float:
    chosen = worth.copy()
    chosen[rows] = asked
    return chosen.mean()


ways = {
    "worth most": spent_on(np.flatnonzero(actions == person)),
    "least certain": spent_on(
        np.argsort(decider.probabilities(p_new).max(axis=1))[:few]
    ),
    "at random": np.mean(
        [spent_on(rng.choice(len(worth), few, replace=False)) for _ in range(200)]
    ),
    "nobody": worth.mean(),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
left.plot([100 * share for share in curve], list(curve.values()), "o-", color="#4477aa")
left.set(xlabel="at most so many % are handed over", ylabel="mean utility")
right.barh(list(ways)[::-1], list(ways.values())[::-1], color="#4477aa")
right.set(xlabel="mean utility, 5% handed over", xlim=(min(ways.values()) - 0.03, None))
figure.tight_layout()
plt.show()

# %%
# Which digits are handed over? Rare ones more often, because errors on them are
# expensive.
for digit in range(10):
    here = y_new == digit
    print(
        f"digit {digit}: {np.sum(here):3} new samples,"
        f" {np.mean(actions[here] == person):5.1%} handed over"
    )
