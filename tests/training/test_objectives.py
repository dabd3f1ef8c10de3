"""Every term equals a naive loop, a sample and particle at a time, in float64;
gradients pass gradcheck.
"""

import math

import numpy as np
import pytest
import torch

from rfdlc.probabilities.classes import Classes
from rfdlc.training.config import TrainConfig
from rfdlc.training.losses import mean_loss
from rfdlc.training.losses.terms import (
    FLOORS,
    REPULSIONS,
    CompositeLoss,
    Gain,
    Margin,
    NegativeLogLikelihood,
    PriorInLikelihood,
    class_weights,
    log_prior,
    margins,
    repulsion,
)
from rfdlc.training.methods import integrated_gain
from rfdlc.training.optimisation import rate

COUNTS = (50, 12, 3, 1)
M, B, C = 3, 6, 4


pytestmark = pytest.mark.usefixtures("float64")


UTILITY = np.array([[0, 0.5, 0, 0], [-1, 0, 0, 0.2], [-1, -1, 0, 0], [-1, -1, -1, 1.0]])


def naive_log_p(row, y, prior_tau=0.0, margin=0.0, scale=30.0):
    z = [float(v) for v in row]
    n = [max(c, 1) for c in COUNTS]
    if prior_tau:
        z = [v + prior_tau * math.log(n[c] / sum(n)) for c, v in enumerate(z)]
    if margin:
        m = [c**-0.25 for c in n]
        z[y] -= scale * m[y] * margin / max(m)
    total = math.log(sum(math.exp(v) for v in z))
    return [v - total for v in z]


def naive(
    logits, target, epoch, *, after, weights, taus=(0, 0, 0), margin=0.0, term=None
):
    """Mean over particles of the weighted mean over samples."""
    value = 0.0
    for m in range(M):
        top = bottom = gain = gain_bottom = 0.0
        for i in range(B):
            y = int(target[i])
            log_p = naive_log_p(logits[m, i], y, taus[m], margin)
            w = weights[y] if epoch > after else 1.0
            top, bottom = top - w * log_p[y], bottom + w
            if term is not None:
                value_here, weight_here = term(log_p, y)
                gain, gain_bottom = (
                    gain + value_here * weight_here,
                    gain_bottom + weight_here,
                )
        value += top / bottom / M
        if term is not None and epoch > after:
            value -= gain / gain_bottom / M
    return value


@pytest.mark.parametrize("epoch", [3, 4])
@pytest.mark.parametrize(
    "form", ["constant", "linear", "sqrt", "log", "power", "effective"]
)
def test_weighted_likelihood(sample, form, epoch):
    weights = class_weights(COUNTS, form, power=0.7, beta=0.99)
    loss = CompositeLoss([], [NegativeLogLikelihood(weights, after=3)])
    expected = naive(*sample, epoch, after=3, weights=weights)
    assert float(mean_loss(loss(*sample, torch.tensor(epoch)))) == pytest.approx(
        expected, rel=1e-12
    )


def test_class_weights_by_hand():
    assert class_weights(COUNTS, "effective", beta=0.9)[2] == pytest.approx(
        (1 - 0.9) / (1 - 0.9**3)
    )
    assert class_weights(COUNTS, "log")[3] == pytest.approx(
        1 / math.log(2)
    )  # one sample: finite
    assert class_weights([0, 5], "linear").tolist() == [1.0, 0.2]
    assert class_weights(
        [10, 10], "constant", target_prior=[0.9, 0.1]
    ) == pytest.approx([1.8, 0.2])
    assert log_prior([0, 3]).tolist() == pytest.approx(
        [math.log(1 / 4), math.log(3 / 4)]
    )


def test_margin_and_prior_in_the_likelihood(sample):
    ones = np.ones(C)
    loss = CompositeLoss([Margin(margins(COUNTS), 30.0)], [NegativeLogLikelihood(ones)])
    assert float(mean_loss(loss(*sample, torch.tensor(1)))) == pytest.approx(
        naive(*sample, 1, after=0, weights=ones, margin=0.5)
    )
    taus = (0.0, 1.0, 2.0)
    loss = CompositeLoss(
        [PriorInLikelihood(log_prior(COUNTS), taus)], [NegativeLogLikelihood(ones)]
    )
    assert float(mean_loss(loss(*sample, torch.tensor(1)))) == pytest.approx(
        naive(*sample, 1, after=0, weights=ones, taus=taus)
    )


@pytest.mark.parametrize("epoch", [3, 4])
def test_utility_terms(sample, epoch):
    weights = class_weights(COUNTS)
    terms = {
        "row by sample": (
            Gain(UTILITY, 0.3, sample_weights=weights, after=3),
            lambda log_p, y: (
                sum(UTILITY[y, c] * log_p[c] for c in range(C)) / 0.3,
                weights[y],
            ),
        ),
        "authors": (
            Gain(UTILITY, 0.3, column_weights=weights, after=3),
            lambda log_p, y: (
                sum(weights[c] * UTILITY[y, c] * log_p[c] for c in range(C)) / 0.3,
                1.0,
            ),
        ),
        "bounded": (
            Gain(UTILITY, 0.3, bounded=True, sample_weights=weights, after=3),
            lambda log_p, y: (
                sum(UTILITY[y, c] * math.exp(log_p[c]) for c in range(C)) / 0.3,
                weights[y],
            ),
        ),
        "column": (
            Gain(UTILITY.T, 0.3, after=3),
            lambda log_p, y: (
                sum(UTILITY[c, y] * log_p[c] for c in range(C)) / 0.3,
                1.0,
            ),
        ),
    }
    for ours, term in terms.values():
        loss = CompositeLoss([], [NegativeLogLikelihood(weights, after=3), ours])
        expected = naive(*sample, epoch, after=3, weights=weights, term=term)
        assert float(mean_loss(loss(*sample, torch.tensor(epoch)))) == pytest.approx(
            expected, rel=1e-12
        )


def test_the_whole_of_the_paper(sample):
    """Margins inside every log p, the utility's too; weights and utility after the
    deferred epoch.
    """
    settings = TrainConfig(
        particles=3,
        weights="linear",
        margin=0.5,
        deferred=0.8,
        epochs=10,
        alpha=0.3,
        utility_weights="columns",
    )
    weights = class_weights(COUNTS)
    loss = integrated_gain(settings, Classes.from_counts(list(COUNTS)), UTILITY)

    def term(log_p, y):
        gain = sum(weights[c] * UTILITY[y, c] * log_p[c] for c in range(C))
        return gain / 0.3, 1.0

    for epoch in (8, 9):
        expected = naive(
            *sample, epoch, after=8, weights=weights, margin=0.5, term=term
        )
        assert float(mean_loss(loss(*sample, torch.tensor(epoch)))) == pytest.approx(
            expected, rel=1e-12
        )


@pytest.mark.parametrize("epoch", [1, 9])
def test_gradients_of_every_term(sample, epoch):
    logits, target = sample
    weights = class_weights(COUNTS)
    shifts = [
        Margin(margins(COUNTS), 3.0),
        PriorInLikelihood(log_prior(COUNTS), (0.0, 1.0, 2.0)),
    ]
    terms = [
        NegativeLogLikelihood(weights, 5),
        Gain(UTILITY, 0.5, sample_weights=weights, after=5),
        Gain(UTILITY, 0.5, column_weights=weights, after=5),
        Gain(UTILITY, 0.5, bounded=True, sample_weights=weights, after=5),
    ]
    for term in terms:
        loss = CompositeLoss(shifts, [term])
        leaf = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda z, o=loss: mean_loss(o(z, target, torch.tensor(epoch))), (leaf,)
        )


def test_mixed_targets_equal_soft_targets(sample):
    """Weighing the loss of both labels is cross-entropy with the mixed label, prior in
    the likelihood included.
    """
    logits, target = sample
    shift = PriorInLikelihood(log_prior(COUNTS), (1.0,))
    loss = CompositeLoss([shift], [NegativeLogLikelihood(np.ones(C))])
    other, epoch = target.roll(1), torch.tensor(1)
    mixed = 0.3 * mean_loss(loss(logits, target, epoch)) + 0.7 * mean_loss(
        loss(logits, other, epoch)
    )
    soft = 0.3 * torch.eye(C)[target] + 0.7 * torch.eye(C)[other]
    log_p = (logits + torch.as_tensor(log_prior(COUNTS))).log_softmax(-1)
    assert torch.allclose(mixed, -(soft * log_p).sum(-1).mean())


@pytest.mark.parametrize("kind", sorted(REPULSIONS))
def test_repulsion(kind):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, M, 5, C, generator=generator)
    logits = torch.randn(2, M, B, C, generator=generator)
    ours = repulsion(kind, weights, logits, torch.tensor(10.0), 40.0, 2.0)
    for run in range(2):
        per_particle = []
        for m in range(M):
            w, z = weights[run, m].numpy(), logits[run, m].numpy()
            if kind == "head":
                per_particle.append(w.ravel())
            elif kind == "head-normalised":
                per_particle.append((w / np.sqrt((w**2).sum(0))).ravel())
            else:
                per_particle.append(
                    (np.exp(z) / np.exp(z).sum(1, keepdims=True)).ravel()
                )
        values = np.stack(per_particle)
        logs = [math.log(((v - v.mean()) ** 2).mean() + FLOORS[kind]) for v in values.T]
        expected = -2.0 / 2 * math.exp(-10 / 40) * sum(logs) / len(logs)
        assert float(ours[run]) == pytest.approx(expected, rel=1e-9)
    leaf, z = weights.clone().requires_grad_(), logits.clone().requires_grad_()
    check = lambda w, z: repulsion(kind, w, z, torch.tensor(10.0), 40.0)  # noqa: E731
    assert torch.autograd.gradcheck(check, (leaf, z))


def test_repulsion_of_equal_particles_is_finite():
    weights = torch.ones(1, 2, 3, 2, requires_grad=True)
    value = repulsion("head", weights, torch.zeros(1, 2, 1, 2), torch.tensor(1.0), 40.0)
    value.sum().backward()
    assert value.isfinite().all()
    assert weights.grad.isfinite().all()


def test_schedules():
    step = [
        rate(e, 100, "step", warmup=5, milestones=(0.6, 0.8), decay=0.1)
        for e in (1, 60, 61, 80, 81, 100)
    ]
    assert step == pytest.approx([0.2, 1, 0.1, 0.1, 0.01, 0.01])
    assert rate(1, 10, "cosine") == 1
    assert rate(6, 10, "cosine") == pytest.approx(0.5)
    assert rate(10, 10, "constant") == 1
