"""Losses of experts equal a naive loop in float64 and pass gradcheck; limiting cases
and combinations hold.
"""

import math

import numpy as np
import pytest
import torch
from scipy.special import digamma, gammaln

from rfdlc.probabilities.classes import Classes
from rfdlc.training.config import TrainConfig
from rfdlc.training.losses import mean_loss
from rfdlc.training.losses.terms import Routing, SelfDistillation, dirichlet_divergence
from rfdlc.training.methods import METHODS, integrated_gain, resolve
from rfdlc.training.networks.particles import (
    Evidential,
    GroupMean,
    Router,
    engagement,
    nested_groups,
)
from rfdlc.training.networks.stack import reset

COUNTS = (50, 12, 3, 1)
CLASSES = Classes.from_counts(list(COUNTS))
EVEN = Classes.from_counts([7, 7, 7, 7])
M, B, C = 3, 6, 4
EPOCHS = 10  # what is deferred starts after epoch 8


pytestmark = pytest.mark.usefixtures("float64")


def settings_of(method, **changes):
    return resolve(method, "", {"epochs": EPOCHS, "particles": M, **changes})[1]


def loss_of(method, classes=CLASSES, **changes):
    """The loss of a whole batch, as one number."""
    return reduced(METHODS[method].loss(settings_of(method, **changes), classes, None))


def reduced(loss):
    return lambda logits, target, epoch: mean_loss(loss(logits, target, epoch))


# -- naive formulas
# --------------------------------------------------------------------------------------


def log_softmax(z):
    total = math.log(sum(math.exp(v) for v in z))
    return [v - total for v in z]


def shifted(z, y, largest=0.5, scale=30.0):
    """LDAM: the true logit less its margin."""
    z = [float(v) for v in z]
    z[y] -= scale * largest * COUNTS[y] ** -0.25 / max(n**-0.25 for n in COUNTS)
    return z


def effective(y, beta=0.9999):
    return (1 - beta) / (1 - beta ** COUNTS[y])


def temperatures(epoch):
    if epoch <= 8:
        return [1.0] * C
    heat = [C * n / sum(COUNTS) * 0.05 + 0.95 for n in COUNTS]
    return [h / max(heat) for h in heat]


def divergence(common, z, epoch):
    """T^2 KL(common || z), both heated."""
    heat = temperatures(epoch)
    p = log_softmax([v / t for v, t in zip(common, heat, strict=True)])
    q = log_softmax([v / t for v, t in zip(z, heat, strict=True)])
    kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    return (sum(heat) / C) ** 2 * kl


def doubt(zs):
    """w_0 ... w_M of one sample by Dempster-Shafer, with the outer product of beliefs
    written out.
    """
    w, previous = [1.0], None
    for z in zs:
        alpha = [math.exp(v) + 1 for v in z]
        strength = sum(alpha)
        belief, unsure = [(a - 1) / strength for a in alpha], C / strength
        conflict = 0.0
        if previous is not None:
            conflict = sum(
                previous[j] * belief[k] for j in range(C) for k in range(C) if j != k
            )
        w.append(w[-1] * unsure / (1 - conflict))
        previous = belief
    return w


def weighed_sum(zs):
    shares = [math.exp(w / 0.2) for w in doubt(zs)[:-1]]
    return [
        sum(s * z[c] for s, z in zip(shares, zs, strict=True)) / sum(shares)
        for c in range(C)
    ]


# -- every loss against its loop
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [8, 9])
def test_ride(sample, epoch):
    logits, target = sample
    expected = 0.0
    for m in range(M):
        top = bottom = 0.0
        for i, y in enumerate(target.tolist()):
            weight = effective(y) if epoch > 8 else 1.0
            top, bottom = (
                top - weight * log_softmax(shifted(logits[m, i], y))[y],
                bottom + weight,
            )
        expected += top / bottom
        expected -= (
            0.2
            / B
            * sum(
                divergence(logits[:, i].mean(0).tolist(), logits[m, i].tolist(), epoch)
                for i in range(B)
            )
        )
    assert float(loss_of("ride")(*sample, torch.tensor(epoch))) == pytest.approx(
        expected, rel=1e-10
    )


@pytest.mark.parametrize("epoch", [8, 9])
def test_tlc(sample, epoch):
    logits, target = sample
    total = sum(effective(y) for y in range(C))
    w = [doubt(logits[:, i].tolist()) for i in range(B)]
    expected = 0.0
    for m in range(M):
        losses, largest = [], max(w[i][m] for i in range(B))
        for i, y in enumerate(target.tolist()):
            z = shifted(logits[m, i], y)
            loss = -log_softmax(z)[y] * (effective(y) * C / total if epoch > 8 else 1.0)
            alpha = np.array([1.0 if c == y else math.exp(z[c]) + 1 for c in range(C)])
            kl = gammaln(alpha.sum()) - gammaln(C) - gammaln(alpha).sum()
            kl += ((alpha - 1) * (digamma(alpha) - digamma(alpha.sum()))).sum()
            loss += epoch / ((8 + 500) / 0.05) * kl
            loss -= 0.01 * divergence(
                weighed_sum(logits[:, i].tolist()), logits[m, i].tolist(), epoch
            )
            if w[i][m] / largest > 0.54:
                losses.append(loss)
        expected += sum(losses) / len(losses)
    assert float(loss_of("tlc")(*sample, torch.tensor(epoch))) == pytest.approx(
        expected, rel=1e-10
    )


def test_ace(sample):
    logits, target = sample
    groups, expected = [{0, 1, 2, 3}, {1, 2, 3}, {2, 3}], 0.0
    for m, group in enumerate(groups):
        outside = set(range(C)) - group
        for i, y in enumerate(target.tolist()):
            if y in group:
                z = logits[m, i].tolist()
                loud = (
                    sum(z[c] ** 2 for c in outside) / len(outside) if outside else 0.0
                )
                expected += (loud - log_softmax(z)[y]) / B
    assert nested_groups(CLASSES, 3).tolist() == [
        [float(c in group) for c in range(C)] for group in groups
    ]
    assert float(loss_of("ace")(*sample, torch.tensor(1))) == pytest.approx(
        expected, rel=1e-12
    )


def test_router_loss(sample):
    logits, target = sample
    scores = torch.randn(M, B, generator=torch.Generator().manual_seed(3))
    expected = 0.0
    for i in range(B):
        right = [
            int(logits[: m + 1, i].sum(0).argmax()) == int(target[i]) for m in range(M)
        ]
        for m in range(M - 1):
            wanted, p = (
                not right[m] and any(right[m + 1 :]),
                1 / (1 + math.exp(-float(scores[m, i]))),
            )
            expected -= (100 * math.log(p) if wanted else math.log(1 - p)) / B / (M - 1)
    ours = reduced(Routing(100.0))(
        torch.cat([logits, scores[..., None]], -1), target, torch.tensor(1)
    )
    assert float(ours) == pytest.approx(expected, rel=1e-12)


def test_self_distillation():
    logits = torch.randn(
        2 * 3, B, C, generator=torch.Generator().manual_seed(4)
    )  # two particles, drawn twice
    target = torch.tensor([0, 0, 1, 2, 3, 1])
    expected = 0.0
    for row in range(6):
        expected -= (
            sum(log_softmax(logits[row, i].tolist())[int(target[i])] for i in range(B))
            / B
            / 6
        )
    for m in range(2):
        for i in range(B):
            drawn = [log_softmax(logits[row, i].tolist()) for row in (2 + m, 4 + m)]
            teacher = [sum(math.exp(d[c]) for d in drawn) / 2 for c in range(C)]
            own = log_softmax(logits[m, i].tolist())
            expected += (
                0.7
                * sum(t * (math.log(t) - o) for t, o in zip(teacher, own, strict=True))
                / B
                / 2
            )
    ours = reduced(SelfDistillation(2, 0.7))(logits, target, torch.tensor(1))
    assert float(ours) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["focal", "cb-focal"])
def test_focal(sample, method):
    logits, target = sample
    expected = 0.0
    for m in range(M):
        top = bottom = 0.0
        for i, y in enumerate(target.tolist()):
            log_p, weight = (
                log_softmax(logits[m, i].tolist())[y],
                effective(y) if method == "cb-focal" else 1.0,
            )
            top, bottom = (
                top - weight * (1 - math.exp(log_p)) ** 1.5 * log_p,
                bottom + weight,
            )
        expected += top / bottom / M
    ours = loss_of(method, focal=1.5)(*sample, torch.tensor(1))
    assert float(ours) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("epoch", [2, 9])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_gradients_of_every_method(sample, method, epoch):
    logits, target = sample
    changes = {"prior_tau": (1.0,)} if METHODS[method].settings.get("prior_tau") else {}
    for make in {
        METHODS[method].loss,
        *(s.loss for s in METHODS[method].stages if s.loss),
    }:
        loss = make(settings_of(method, head_scale=3.0, **changes), CLASSES, None)
        rows = (
            torch.cat([logits, logits[..., :1]], -1)
            if isinstance(loss, Routing)
            else logits
        )
        if isinstance(loss, SelfDistillation):
            loss.particles = 1
        check = lambda z, o=loss: mean_loss(o(z, target, torch.tensor(epoch)))  # noqa: E731
        # what is held constant by design has no gradient: the common prediction of RIDE
        # and TLC, SRepr's teacher
        if method in ("ride", "tlc", "srepr") and not isinstance(loss, Routing):
            assert_gradient_with_constants_held(loss, rows, target, epoch)
        else:
            assert torch.autograd.gradcheck(check, (rows.clone().requires_grad_(),))


def assert_gradient_with_constants_held(loss, logits, target, epoch, step=1e-6):
    """Central differences, with every `detach` answered by the values at the point
    itself.
    """
    leaf = logits.clone().requires_grad_()
    held, original = [], torch.Tensor.detach
    try:
        torch.Tensor.detach = lambda self: (
            held.append(original(self).clone()) or held[-1]
        )
        (gradient,) = torch.autograd.grad(
            mean_loss(loss(leaf, target, torch.tensor(epoch))), leaf
        )
        constants = list(held)
        for place in np.ndindex(*logits.shape):
            values = []
            for sign in (1, -1):
                answers = iter(constants)
                torch.Tensor.detach = lambda self, answers=answers: next(answers)
                moved = logits.clone()
                moved[place] += sign * step
                values.append(
                    float(mean_loss(loss(moved, target, torch.tensor(epoch))))
                )
            assert float(gradient[place]) == pytest.approx(
                (values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-7
            )
    finally:
        torch.Tensor.detach = original


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_loss_reads_a_value_on_the_host(method):
    """Tensors without data: what asks for a value, or a shape that depends on values,
    fails; so would a capture.
    """
    row = METHODS[method]
    for make in {row.loss, *(stage.loss for stage in row.stages if stage.loss)}:
        loss = make(settings_of(method), CLASSES, None).to("meta")
        logits = torch.empty(2 * M, B, C, device="meta", requires_grad=True)[
            : None if method == "srepr" else M
        ]
        target, epoch = (
            torch.empty(B, dtype=torch.long, device="meta"),
            torch.empty((), device="meta"),
        )
        (gradient,) = torch.autograd.grad(
            mean_loss(loss(logits, target, epoch)), logits
        )
        assert gradient.shape == logits.shape


# -- limiting cases
# --------------------------------------------------------------------------------------


def plain(sample):
    return float(
        mean_loss(
            integrated_gain(TrainConfig(epochs=EPOCHS), CLASSES, None)(
                *sample, torch.tensor(1)
            )
        )
    )


def test_limiting_cases(sample):
    first = torch.tensor(1)
    uniform = loss_of("balanced-softmax", EVEN)(*sample, first)
    assert float(uniform) == pytest.approx(plain(sample), rel=1e-12)
    assert float(loss_of("focal", focal=0.0)(*sample, first)) == pytest.approx(
        plain(sample), rel=1e-12
    )
    assert float(loss_of("ldam", margin=0.0)(*sample, first)) == pytest.approx(
        plain(sample), rel=1e-12
    )
    assert float(loss_of("la")(*sample, first)) == float(
        loss_of("balanced-softmax")(*sample, first)
    )


@pytest.mark.parametrize("epoch", [1, 9])
def test_ride_without_diversity_is_m_times_ldam(sample, epoch):
    one = loss_of("ldam-drw")(*sample, torch.tensor(epoch))
    ride = loss_of("ride", diversity=0.0)(*sample, torch.tensor(epoch))
    assert float(ride) == pytest.approx(M * float(one), rel=1e-12)


def test_ace_with_one_expert_is_cross_entropy(sample):
    logits, target = sample
    single = (logits[:1], target)
    assert float(
        loss_of("ace", particles=1)(*single, torch.tensor(1))
    ) == pytest.approx(plain(single), rel=1e-12)


def test_dirichlet_divergence_survives_large_evidence():
    logits = torch.tensor(
        [[[30.0, -30.0, 25.0, 30.0]]], dtype=torch.float32, requires_grad=True
    )
    value = dirichlet_divergence(logits, torch.tensor([1]))
    value.sum().backward()
    assert value.isfinite().all()
    assert logits.grad.isfinite().all()


# -- combinations
# --------------------------------------------------------------------------------------


def test_engagement_equals_dempster_shafer(sample):
    logits, _ = sample
    ours = engagement(logits[None])[0]
    for i in range(B):
        assert ours[:, i].tolist() == pytest.approx(
            doubt(logits[:, i].tolist()), rel=1e-10
        )


def test_tlc_predicts_each_sample_by_itself(sample):
    logits, _ = sample
    combine, together = Evidential(0.2), logits[None]
    for i in range(B):
        alone = together[:, :, i : i + 1]
        assert torch.allclose(
            combine(together, together)[0][:, :, i : i + 1],
            combine(alone, alone)[0],
            atol=1e-14,
        )
        assert combine(alone, alone)[0][0, 0, 0].tolist() == pytest.approx(
            weighed_sum(logits[:, i].tolist()), rel=1e-10
        )
    _, fused = combine(together, together)
    assert fused[0].tolist() == pytest.approx(
        [doubt(logits[:, i].tolist())[-1] for i in range(B)], rel=1e-10
    )


def test_ace_averages_who_speaks(sample):
    logits, _ = sample
    ours = GroupMean(nested_groups(CLASSES, M)).double()(logits[None], logits[None])[0][
        0, 0
    ]
    for c, speakers in enumerate(([0], [0, 1], [0, 1, 2], [0, 1, 2])):
        assert torch.allclose(ours[:, c], logits[speakers, :, c].mean(0))


def test_ride_asks_experts_one_after_the_other():
    generator = torch.Generator().manual_seed(5)
    logits, features = (
        torch.randn(2, 4, 9, C, generator=generator),
        torch.randn(2, 4, 9, 7, generator=generator),
    )
    router = Router(2, 4, 7, C, choices=3)
    reset(router, (0, 1))
    combined, used = router(logits, features)
    scores = router.scores(logits, features)
    for run in range(2):
        for i in range(9):
            asked = 1
            while asked < 4 and scores[run, asked - 1, i] > 0:
                asked += 1
            assert used[run, i] == asked
            assert torch.allclose(combined[run, 0, i], logits[run, :asked, i].mean(0))
    assert len(set(used.flatten().tolist())) > 1
    alone = Router(1, 4, 7, C, choices=3)
    reset(alone, (1,))
    assert torch.allclose(alone.scores(logits[1:], features[1:]), scores[1:])


def test_router_scores_by_hand():
    generator = torch.Generator().manual_seed(6)
    logits, features = (
        torch.randn(1, 3, 1, C, generator=generator),
        torch.randn(1, 3, 1, 5, generator=generator),
    )
    router = Router(1, 3, 5, C, choices=2).requires_grad_(False)
    reset(router, (0,))
    for m in range(2):
        seen = features[0, m, 0] / features[0, m, 0].norm()
        hidden = (seen @ router.hidden.weight[m] + router.hidden.bias[m, 0]).relu()
        best = logits[0, : m + 1, 0].mean(0).sort(descending=True).values[:2]
        expected = (
            torch.cat([best, hidden]) @ router.score.weight[0] + router.score.bias[0, 0]
        )
        assert float(router.scores(logits, features)[0, m, 0]) == pytest.approx(
            float(expected), rel=1e-12
        )


@pytest.mark.parametrize(
    ("method", "taus"), [("balpoe", (0, 1, 2)), ("mdcs", (-0.5, 1, 2.5))]
)
def test_experts_for_several_priors(sample, method, taus):
    logits, target = sample
    counts = np.array(CLASSES.counts)
    total = 0.0
    for m, tau in enumerate(taus):
        for i, y in enumerate(target.tolist()):
            shifted = logits[m, i].numpy() + tau * np.log(counts / counts.sum())
            total -= log_softmax(shifted.tolist())[y]
    ours = loss_of(method)(*sample, torch.tensor(1))
    assert float(ours) == pytest.approx(
        total / logits.shape[0] / len(target), rel=1e-12
    )


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_experts_that_agree(sample, share):
    """Pair by pair and class by class; classes that are not hard keep a logit of 0."""
    logits, target = sample
    counts, experts = np.array(CLASSES.counts), range(len(logits))
    hard = max(2, round(share * len(counts)))
    total = 0.0
    for i, y in enumerate(target.tolist()):
        others = sorted(
            (c for c in range(len(counts)) if c != y),
            key=lambda c: -float(logits[0, i, c]),
        )
        kept = {y, *others[: hard - 1]}
        shifted = [logits[m, i].numpy() + np.log(counts) for m in experts]
        nested = [
            [z if c in kept else 0.0 for c, z in enumerate(each)] for each in shifted
        ]
        for group in (shifted, nested):
            log_p = [np.array(log_softmax(list(z))) for z in group]
            total -= sum(each[y] for each in log_p)
            pairs = [(a, b) for a in experts for b in experts if a != b]
            total += (
                0.6
                / (len(experts) - 1)
                * sum(np.exp(log_p[b]) @ (log_p[b] - log_p[a]) for a, b in pairs)
            )
    ours = loss_of("ncl", method_options={"hard": share})(*sample, torch.tensor(1))
    assert float(ours) == pytest.approx(total / len(target), rel=1e-10)


def test_settings_of_strong_methods_are_those_of_their_authors():
    names = ("balpoe", "mdcs", "ncl", "rf-dlc-strong")
    balpoe, mdcs, ncl, ours = (resolve(name, "cifar100-lt", {})[1] for name in names)
    assert (ncl.augment, ncl.cutout, ncl.weight_decay, ncl.learning_rate) == (
        "autoaugment",
        0.5,
        2e-4,
        0.1,
    )
    assert (ncl.batch_size, ncl.shared_stages, ncl.decay, ncl.warmup, ncl.head) == (
        64,
        0,
        0.1,
        5,
        "linear",
    )
    assert [round(share * 400) for share in ncl.milestones] == [320, 360]
    for config in (balpoe, mdcs, ncl, ours):
        assert (config.backbone, config.epochs, config.particles) == (
            "resnet32",
            400,
            3,
        )
    assert (balpoe.augment, balpoe.cutout, balpoe.mixup, balpoe.weight_decay) == (
        "autoaugment",
        0,
        0.4,
        5e-4,
    )
    assert (mdcs.augment, mdcs.cutout, mdcs.mixup, mdcs.consistency) == (
        "autoaugment",
        0.5,
        0,
        0.6,
    )
    assert mdcs.learning_rate * mdcs.weight_decay == pytest.approx(0.1 * 5e-4, rel=0.01)
    assert mdcs.consistency_ramp * mdcs.epochs == 20
    assert [round(share * 400) for share in mdcs.milestones] == [200, 320, 380]
    assert (ours.augment, ours.magnitude, ours.cutout, ours.refit) == (
        "randaugment",
        1.0,
        0.5,
        True,
    )
    assert (
        resolve("rf-dlc-strong", "mine", {}, "images")[1].augment == "crop-randaugment"
    )  # no flips without evidence
    for prior, calibration in (("train", "auto"), ("uniform", "temperature")):
        assert (
            resolve("rf-dlc", "mine", {"target_prior": prior}, "features", 100)[
                1
            ].calibration
            == calibration
        )
    given = {"target_prior": "uniform", "calibration": "auto"}
    assert resolve("rf-dlc", "mine", given, "features", 100)[1].calibration == "auto"
