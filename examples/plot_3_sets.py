"""
Prediction sets on a long tail
==============================

A prediction set names several classes, and promises that the true one is among them in
90% of the cases. With the usual sets, rare classes pay for the promise. Macro sets
treat classes alike.
"""

# %%
# Simulated scores
# ----------------
# Ten classes; the first is 30 times as frequent as the last. The model is too certain
# by a factor of two.
import matplotlib.pyplot as plt
import numpy as np

import rfdlc

rng = np.random.default_rng(0)
prior = 30.0 ** -(np.arange(10) / 9)
prior /= prior.sum()
centres = rng.normal(0, 1.1, (10, 6))


def model(samples):
    y = rng.choice(10, samples, p=prior)
    x = centres[y] + rng.normal(size=(samples, 6))
    log_p = -0.5 * ((x[:, None] - centres) ** 2).sum(-1) + np.log(prior)
    scores = np.exp(2 * (log_p - log_p.max(axis=1, keepdims=True)))
    return scores / scores.sum(axis=1, keepdims=True), y


(p_held, y_held), (p_new, y_new) = model(2000), model(20000)

# %%
# Three kinds of sets
# -------------------
# All have the same promise and the same probabilities. They differ in the threshold
# above which a class is in the set.
classes = rfdlc.Classes.from_counts((10000 * prior).astype(int))
one_hot = rfdlc.Utility.one_hot(classes)
decider = rfdlc.Decider(one_hot, train_prior="train", calibration="temperature").fit(
    p_held, y_held
)
kinds = {
    kind: decider.fit_sets(p_held, y_held, kind=kind, coverage=0.9)
    for kind in ("marginal", "macro", "class")
}
for kind, each in kinds.items():
    found = rfdlc.evaluate(p_new, y_new, each)
    coverage = {name: f"{value:.2f}" for name, value in found.set_coverage.items()}
    print(
        f"{kind:8} sets have {found.set_size['all']:.2f} classes on average; coverage"
        f" {coverage}"
    )

# %%
# Coverage of each class, from the most frequent one to the rarest:
colours = {"marginal": "#ee6677", "macro": "#4477aa", "class": "#ccbb44"}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for kind, each in kinds.items():
    inside = each.decide_sets(p_new)
    covered = [inside[y_new == c, c].mean() for c in range(10)]
    left.plot(range(1, 11), covered, "o-", color=colours[kind], label=kind)
    sizes = np.bincount(inside.sum(axis=1), minlength=7)[:7] / len(inside)
    right.plot(range(7), sizes, "o-", color=colours[kind])
left.axhline(0.9, color="#444444", lw=1, ls=":")
left.set(xlabel="class, by frequency", ylabel="coverage", ylim=(0, 1.02))
left.legend(frameon=False)
right.set(xlabel="classes in a set", ylabel="share of samples")
figure.tight_layout()
plt.show()

# %%
# Marginal sets cover 90% of all samples by covering the frequent classes. Macro sets
# keep the promise for all samples, too, and cover rare classes nearly as often, at a
# moderate size. Class-conditional sets promise 90% for each class.
#
# For ten of the samples of the rarest class:
rare = np.flatnonzero(y_new == 9)[:10]
answers = {kind: each.decide_sets(p_new[rare]) for kind, each in kinds.items()}
for row in range(10):
    print(
        "  ".join(
            f"{kind}: {np.flatnonzero(inside[row])}" for kind, inside in answers.items()
        )
    )
