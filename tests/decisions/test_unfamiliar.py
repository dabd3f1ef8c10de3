"""Unfamiliar input: scores against naive formulas, thresholds on simulated head and
tail classes, decisions.
"""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from rfdlc import Classes, Decider, InputError, Predictions, Utility, evaluate
from rfdlc.decisions.streams import StreamController
from rfdlc.decisions.unfamiliar import (
    SHRINKAGE,
    FeatureDistance,
    Unfamiliar,
    energy,
    predictive_entropy,
)
from rfdlc.probabilities.scores import Scores, log_softmax

COUNTS = (300, 200, 100, 60, 30, 12)
CLASSES = Classes.from_counts(COUNTS)


def features(labels, rng, width=16):
    return rng.normal(size=(len(labels), width)) + 5 * np.eye(width)[labels]


@pytest.fixture(scope="module")
def world():
    """Training, held-out and test features of a long tail, and features of classes that
    were never seen.
    """
    rng = np.random.default_rng(0)
    held, test = (np.repeat(np.arange(6), n) for n in (np.array(COUNTS) // 2, 400))
    train = np.repeat(np.arange(6), COUNTS)
    new = rng.integers(6, 12, 500)
    return {
        name: (features(y, rng), y)
        for name, y in {"train": train, "held": held, "test": test, "new": new}.items()
    }


def logits_of(x):
    return 3 * x[:, :6]


def test_energy_is_minus_the_logarithm_of_the_sum():
    z = np.random.default_rng(0).normal(size=(2, 5, 3)) * 4
    each = [
        [-np.log(sum(np.exp(v) for v in row)) for row in particle] for particle in z
    ]
    assert energy(Scores(z, True)) == pytest.approx(np.mean(each, axis=0))
    assert np.isfinite(energy(Scores(z * 1e4, True))).all()
    with pytest.raises(
        InputError, match="energy needs logits, but these are probabilities"
    ):
        energy(Scores(np.full((1, 2, 2), 0.5), False))


def test_predictive_entropy_is_that_of_the_mean_probability():
    z = np.random.default_rng(0).normal(size=(2, 5, 3)) * 4
    p = np.mean(
        [[np.exp(row) / np.exp(row).sum() for row in particle] for particle in z],
        axis=0,
    )
    expected = [-sum(v * np.log(v) for v in row) for row in p]
    assert predictive_entropy(Scores(z, True)) == pytest.approx(expected)
    assert predictive_entropy(Scores(p[None], False)) == pytest.approx(expected)


def test_feature_distance_is_the_relative_mahalanobis_distance(world):
    x, y = world["train"]
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    means = np.stack([u[y == c].mean(axis=0) for c in range(6)])

    def inverse(centred):
        s = centred.T @ centred / len(centred)
        return np.linalg.inv(
            (1 - SHRINKAGE) * s + SHRINKAGE * np.trace(s) / len(s) * np.eye(len(s))
        )

    within, overall = inverse(u - means[y]), inverse(u - u.mean(axis=0))
    spread = np.mean(
        [(v - means[c]) @ within @ (v - means[c]) for v, c in zip(u, y, strict=True)]
    )
    found = FeatureDistance.fit(x, y)(world["new"][0][:5])
    for value, row in zip(found, world["new"][0][:5], strict=True):
        v = row / np.linalg.norm(row)
        each = [
            (v - means[c]) @ within @ (v - means[c]) - spread / 2 / COUNTS[c]
            for c in range(6)
        ]
        centred = v - u.mean(axis=0)
        assert value == pytest.approx(min(each) - centred @ overall @ centred)


def test_false_alarms_are_as_stated_and_alike_in_head_and_tail(world):
    distance = FeatureDistance.fit(*world["train"])
    score = {name: distance(x) for name, (x, _) in world.items()}
    likeliest = {name: logits_of(x).argmax(axis=1) for name, (x, _) in world.items()}
    targets = world["test"][1]
    found = Unfamiliar.fit(
        score["held"],
        likeliest["held"],
        world["held"][1],
        CLASSES,
        false_alarm=0.1,
        kind="given",
    )
    alarms = found.above(score["test"], likeliest["test"], CLASSES)
    assert alarms.mean() == pytest.approx(0.1, abs=0.05)
    head, tail = alarms[targets < 2].mean(), alarms[targets >= 4].mean()
    assert tail < 1.5 * head
    assert found.above(score["new"], likeliest["new"], CLASSES).mean() > 0.8


def test_unfamiliar_samples_are_handed_over_and_named(world, tmp_path):
    """Energy and entropy of logits: samples of no class have small logits."""
    utility = (
        Utility.one_hot(CLASSES)
        .with_abstain(0.2)
        .with_expert("doctor", confusion=0.9, cost=0.6)
    )
    x, y = world["held"]
    decider = Decider(utility).fit_unfamiliar(
        logits_of(x), y, logits=True, false_alarm=0.05
    )
    known = decider.deferral.unfamiliar
    new = logits_of(world["new"][0])
    found = decider.explain(new, logits=True)
    p = decider.probabilities(new, logits=True)
    assert known.kind == "energy + entropy"
    held, weights = Scores(logits_of(x)[None], True), 1 / np.array(COUNTS)[y]
    total = np.zeros(len(new))
    for term in (
        energy,
        predictive_entropy,
    ):  # each divided by its deviation, classes counting equally
        values = term(held)
        mean = np.average(values, weights=weights)
        total += term(Scores(new[None], True)) / np.sqrt(
            np.average((values - mean) ** 2, weights=weights)
        )
    flagged = known.above(total, np.asarray(p).argmax(axis=1), CLASSES)
    assert flagged.mean() > 0.5
    assert ((found.reason == "unfamiliar") == flagged).all()
    assert (found.action[flagged] == 7).all()  # 0.9 - 0.6 is more than 0.2
    assert (found.action == decider.decide(new, logits=True)).all()
    assert (
        found.action[~flagged] == Decider(utility).decide(new, logits=True)[~flagged]
    ).all()
    decider.save(tmp_path / "decider.json")
    loaded = Decider.load(tmp_path / "decider.json")
    assert loaded.deferral.unfamiliar == known
    assert (loaded.decide(new, logits=True) == found.action).all()
    named = utility.with_abstain(-1.0, "unfamiliar")
    chosen = decider.replace(utility=named).decide(new, logits=True)
    assert (chosen[flagged] == 8).all()
    assert not (chosen[~flagged] == 8).any()


def test_scores_of_features_come_with_predictions(world, tmp_path):
    distance, utility = (
        FeatureDistance.fit(*world["train"]),
        Utility.one_hot(CLASSES).with_abstain(0.0),
    )
    made = {
        name: Predictions(
            logits=logits_of(x),
            targets=y if name != "new" else None,
            unfamiliarity=distance(x),
            classes=CLASSES,
        )
        for name, (x, y) in world.items()
    }
    assert (
        Decider(utility).fit_unfamiliar(made["held"]).deferral.unfamiliar.kind
        == "given + energy + entropy"
    )
    decider = Decider(utility).fit_unfamiliar(made["held"], score="given")
    flagged = decider.deferral.unfamiliar.above(
        distance(world["new"][0]), logits_of(world["new"][0]).argmax(axis=1), CLASSES
    )
    made["new"].save(tmp_path / "new.npz")
    reasons = decider.explain(Predictions.load(tmp_path / "new.npz")).reason
    assert ((reasons == "unfamiliar") == flagged).all()
    assert flagged.mean() > 0.8
    with pytest.raises(
        InputError, match="have no 'unfamiliarity', on which the decider was fitted"
    ):
        decider.decide(logits_of(world["new"][0]), logits=True)


def test_a_given_score_weighs_as_much_as_all_other_terms(world):
    rng, (x, y) = np.random.default_rng(0), world["held"]
    held = Predictions(
        logits=logits_of(x),
        targets=y,
        unfamiliarity=rng.normal(size=len(x)),
        classes=CLASSES,
    )
    decider = Decider(Utility.one_hot(CLASSES).with_abstain(0)).fit_unfamiliar(held)
    each = {
        "given": held.unfamiliarity,
        "energy": energy(held.scores),
        "entropy": predictive_entropy(held.scores),
    }
    weights, total = 1 / np.bincount(y)[y], 0
    for name, values in each.items():
        mean = (weights * values).sum() / weights.sum()
        scale = np.sqrt((weights * (values - mean) ** 2).sum() / weights.sum())
        total += (2 if name == "given" else 1) * values / scale
    assert decider.deferral.unfamiliar.score(held.scores) == pytest.approx(total)


def mistaken(counts, rng):
    """Two classes per region; half of the tail and a tenth of the head look like each
    other, with higher scores.
    """
    y = np.repeat(np.arange(6), counts)
    wrong = rng.random(len(y)) < np.array([0.1, 0.1, 0, 0, 0.5, 0.5])[y]
    return rng.normal(size=len(y)) + 3 * wrong, np.where(wrong, (y + 4) % 8, y), y


def test_a_region_is_judged_by_its_own_samples():
    """All regions have the same rate among samples that are seen as what they are, and
    all samples the promised one.
    """
    classes, rng = (
        Classes.from_counts([1000, 1000, 20, 20, 20, 20]),
        np.random.default_rng(0),
    )
    shares = np.array([5000, 5000, 500, 500, 500, 500])
    found = Unfamiliar.fit(*mistaken(shares, rng), classes, false_alarm=0.05)
    values, likeliest, y = mistaken(10 * shares, rng)
    alarms = found.above(values, likeliest, classes)
    assert alarms.mean() == pytest.approx(0.05, abs=0.003)
    own = [
        alarms[(y // 2 == region) & (likeliest // 2 == region)].mean()
        for region in range(3)
    ]
    assert max(own) < 0.01  # most alarms are samples that look like another region
    assert (
        found.above(rng.normal(3, 1, 1000), np.full(1000, 5), classes).mean() > 0.25
    )  # of a new class
    looks_rare = likeliest > 3
    assert (
        rng.normal(3, 1, 1000) > np.quantile(values[looks_rare], 0.95)
    ).mean() < 0.1  # by all that looks rare


def test_thresholds_are_those_of_the_definition():
    rng, n, rate = np.random.default_rng(0), 150, 0.07
    classes = Classes.from_counts([90, 40, 20])
    y, likeliest, values = (
        rng.integers(0, 3, n),
        rng.integers(0, 3, n),
        rng.normal(size=n),
    )
    y[:50] = likeliest[:50]
    found = Unfamiliar.fit(values, likeliest, y, classes, false_alarm=rate)

    def share(region, value):
        """Of the own samples of a region, and of all, which count as 20 samples, that
        are not above a value.
        """
        own = [
            v for v, a, b in zip(values, likeliest, y, strict=True) if a == b == region
        ]
        return (sum(v <= value for v in own) + 20 * np.mean(values <= value)) / (
            len(own) + 20
        )

    shares = sorted(
        share(region, value) for region, value in zip(likeliest, values, strict=True)
    )
    level = shares[int(np.ceil((1 - rate) * (n + 1))) - 1]
    for region, name in enumerate(("head", "med", "tail")):
        expected = min(v for v in values if share(region, v) >= level - 1e-9)
        assert found.thresholds[name] == expected


def test_a_region_without_samples_has_the_threshold_of_all():
    classes, values = (
        Classes.from_counts([90, 40, 20]),
        np.random.default_rng(0).normal(size=99),
    )
    nobody = np.zeros(99, dtype=int)
    found = Unfamiliar.fit(values, nobody, nobody, classes, false_alarm=0.1)
    assert set(found.thresholds.values()) == {np.sort(values)[89]}


@pytest.mark.parametrize("least", [1, 10])
def test_rates_hold_with_few_samples_of_rare_classes(least):
    classes, rng, rates = (
        Classes.from_counts([1000, 100, 10]),
        np.random.default_rng(0),
        [],
    )
    shares = np.array([100, 30, least])

    def drawn(counts):
        y = np.repeat(np.arange(3), counts)
        seen = np.where(rng.random(len(y)) < 0.2, rng.integers(0, 3, len(y)), y)
        return rng.normal(size=len(y)) + (seen != y) + 0.5 * y, seen, y

    for _ in range(300):
        found = Unfamiliar.fit(*drawn(shares), classes, false_alarm=0.05)
        values, seen, _ = drawn(10 * shares)
        rates.append(found.above(values, seen, classes).mean())
    assert np.mean(rates) == pytest.approx(0.05, abs=0.006)


def test_new_samples_exceed_the_threshold_as_often_as_promised():
    classes, rng = Classes.from_counts([50, 50]), np.random.default_rng(0)
    rates = []
    for _ in range(300):
        values, y = rng.normal(size=59), np.zeros(59, dtype=int)
        found = Unfamiliar.fit(values, y, y, classes, false_alarm=0.05)
        rates.append((rng.normal(size=1000) > found.limits(classes)[0]).mean())
    assert np.mean(rates) == pytest.approx(
        0.05, abs=0.004
    )  # the 57th of 59; the 56th would give 0.067


def test_what_cannot_be_fitted_is_named(world):
    x, y = world["held"]
    with pytest.raises(InputError, match="every action decides for a class: add one"):
        Decider(Utility.one_hot(CLASSES)).fit_unfamiliar(logits_of(x), y, logits=True)
    decider = Decider(Utility.one_hot(CLASSES).with_abstain(0))
    with pytest.raises(
        InputError, match="false_alarm is 2: expected a share between 0 and 1"
    ):
        decider.fit_unfamiliar(logits_of(x), y, logits=True, false_alarm=2)
    with pytest.raises(
        InputError, match=r"10 held-out samples cannot show a false-alarm rate of 0\.01"
    ):
        decider.fit_unfamiliar(logits_of(x)[:10], y[:10], logits=True, false_alarm=0.01)
    with pytest.raises(
        InputError,
        match="score 'doubt' is not known: expected auto, or one or a sum of energy",
    ):
        decider.fit_unfamiliar(logits_of(x), y, logits=True, score="doubt")
    with pytest.raises(
        InputError, match="energy needs logits, but these are probabilities"
    ):
        decider.fit_unfamiliar(
            np.full((len(y), 6), 1 / 6), y, score="energy", logits=False
        )
    with pytest.raises(InputError, match=r"shape \(3, 2\) for 2 targets"):
        FeatureDistance.fit(np.zeros((3, 2)), [0, 1])


def test_the_energy_counts_where_it_tells_classes_that_are_left_out(world):
    """Adding a number to the logits of each sample leaves its entropy, and makes its
    energy anything.
    """
    x, y = world["held"]
    decider, z = Decider(Utility.one_hot(CLASSES).with_abstain(0)), logits_of(x)
    doubtful = predictive_entropy(Scores(z[None], True))[:, None]
    for shift, expected in (
        (-5 * doubtful, "energy + entropy"),
        (50 * doubtful, "entropy"),
    ):
        assert (
            decider.fit_unfamiliar(z + shift, y, logits=True).deferral.unfamiliar.kind
            == expected
        )
        held = Predictions(
            logits=z + shift,
            targets=y,
            unfamiliarity=np.arange(len(y)),
            classes=CLASSES,
        )
        assert (
            decider.fit_unfamiliar(held).deferral.unfamiliar.kind
            == f"given + {expected}"
        )
        gains = []
        for left in range(6):
            others, new = np.delete(z + shift, left, axis=1), y == left
            terms = [
                term(Scores(others[None], True))
                for term in (energy, predictive_entropy)
            ]
            weights = 1 / np.array(COUNTS)[y[~new]]
            centred = [
                term[~new] - np.average(term[~new], weights=weights) for term in terms
            ]
            scales = [np.sqrt(np.average(each**2, weights=weights)) for each in centred]
            both = terms[0] / scales[0] + terms[1] / scales[1]
            gains.append(roc_auc_score(new, both) - roc_auc_score(new, terms[1]))
        assert (np.mean(gains) >= 0) == (expected == "energy + entropy")


def test_scores_without_an_energy_are_judged_by_their_entropy(world):
    """Probabilities, and log-probabilities, where rounding would decide who is
    unfamiliar.
    """
    x, y = world["held"]
    decider = Decider(Utility.one_hot(CLASSES).with_abstain(0))
    normalised = log_softmax(logits_of(x).astype(np.float32))
    for given, logits in ((normalised, True), (np.exp(normalised), False)):
        found = decider.fit_unfamiliar(given, y, logits=logits)
        assert (found.deferral.unfamiliar.kind, found.deferral.unfamiliar.scales) == (
            "entropy",
            {},
        )
        flagged = found.explain(given, logits=logits).reason == "unfamiliar"
        assert predictive_entropy(Scores(given[None], logits))[flagged].min() > 0.01
    own = Predictions(
        logits=normalised, targets=y, unfamiliarity=np.arange(len(y)), classes=CLASSES
    )
    assert decider.fit_unfamiliar(own).deferral.unfamiliar.kind == "given"


@pytest.fixture(scope="module")
def watchful(world):
    """A decider with both a budget and thresholds, and a mixture of familiar and
    strange samples.
    """
    (x, y), (test, truth), (new, _) = world["held"], world["test"], world["new"]
    held = Predictions(logits=logits_of(x), targets=y, classes=CLASSES)
    decider = Decider(Utility.one_hot(CLASSES).with_abstain(0.9)).fit_unfamiliar(
        held, false_alarm=0.05
    )
    both = (
        np.concatenate([logits_of(test), logits_of(new)]),
        np.concatenate([truth, np.zeros(len(new), dtype=int)]),
    )
    order = np.random.default_rng(1).permutation(len(both[1]))
    return decider.fit_budget(held, budget="5%"), both[0][order], both[1][order]


def test_every_way_to_actions_knows_unfamiliar_samples(watchful):
    decider, z, y = watchful
    explained = decider.explain(z, logits=True)
    strange = explained.reason == "unfamiliar"
    assert strange.sum() > 300
    decided = decider.decide(z, logits=True)
    np.testing.assert_array_equal(decided, explained.action)
    np.testing.assert_array_equal(
        evaluate(z, y, decider, logits=True).outcomes.actions, decided
    )
    streamed = StreamController(decider).decide(z, logits=True)
    abstain = decider.utility.actions.index("abstain")
    assert (streamed[strange] == abstain).all()
    assert (streamed[~strange] == abstain).mean() <= 0.055


def test_unfamiliar_samples_count_among_those_of_a_day(watchful):
    decider, z, _ = watchful
    strange = decider.explain(z, logits=True).reason == "unfamiliar"
    doubtful = np.sort(z[~strange][:500], axis=1) + 100  # familiar, by their energy
    doubtful[:, -2] = doubtful[:, -1]  # equal chances of two classes
    z = np.concatenate(
        [z[strange][:2], doubtful]
    )  # the day begins with two samples that must be handed over
    controller = StreamController(decider, per_day=1)
    actions = controller.decide(z, days=["monday"] * len(z), logits=True)
    abstain = decider.utility.actions.index("abstain")
    np.testing.assert_array_equal(np.flatnonzero(actions == abstain), [0, 1])
    assert controller.counts == {"monday": {"samples": 502, "handed_over": 2}}
    more = StreamController(decider, per_day=3).decide(
        z, days=[0] * len(z), logits=True
    )
    assert (more == abstain).sum() == 3


def test_unfamiliar_samples_take_no_share_of_a_batch(watchful):
    decider, z, _ = watchful
    found = decider.explain(z, logits=True, batch=True)
    strange, abstain = (
        found.reason == "unfamiliar",
        decider.utility.actions.index("abstain"),
    )
    assert (found.action[strange] == abstain).all()
    wanted = (found.reason == "over budget").any()
    others = int((found.action[~strange] == abstain).sum())
    assert others == int(0.05 * len(z)) if wanted else others <= int(0.05 * len(z))


def test_thresholds_without_counts_serve_classes_with_counts(world):
    x, y = world["held"]
    plain = Decider(Utility.one_hot(6).with_abstain(0.5)).fit_unfamiliar(
        logits_of(x), y, logits=True
    )
    known = plain.replace(
        utility=Utility.one_hot(Classes.from_counts(COUNTS)).with_abstain(0.5)
    )
    np.testing.assert_array_equal(
        known.decide(logits_of(x), logits=True), plain.decide(logits_of(x), logits=True)
    )


def test_unfamiliarity_is_a_number():
    with pytest.raises(
        InputError, match="unfamiliarity has values that are not finite"
    ):
        Predictions(logits=np.zeros((2, 2)), unfamiliarity=[0.1, np.nan])


def test_regions_do_not_depend_on_the_prior_that_is_decided_for(world):
    """A natural prior takes unclear samples of rare classes for frequent ones: they
    still look rare.
    """
    each = {name: logits_of(x) / 12 for name, (x, _) in world.items()}
    held = Predictions(logits=each["held"], targets=world["held"][1], classes=CLASSES)
    utility = Utility.one_hot(CLASSES).with_abstain(0)
    given = {"train_prior": "uniform", "calibration": None}
    found = {
        prior: (
            Decider(utility, target_prior=prior, **given).fit_unfamiliar(
                held, false_alarm=0.1
            )
        )
        for prior in ("train", "uniform")
    }
    assert found["train"].deferral.unfamiliar.thresholds == pytest.approx(
        found["uniform"].deferral.unfamiliar.thresholds
    )
    p = {
        prior: decider.probabilities(each["test"], logits=True)
        for prior, decider in found.items()
    }
    moved = p["train"].argmax(axis=1) != p["uniform"].argmax(axis=1)
    assert moved.mean() > 0.05
    flagged = [
        decider.explain(each["test"], logits=True).reason == "unfamiliar"
        for decider in found.values()
    ]
    assert (flagged[0] == flagged[1]).all()
    assert flagged[0][moved].any()
    # with a class that cannot occur, nothing looks like it
    impossible = found["uniform"].replace(target_prior=[0, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert len(impossible.explain(each["test"], logits=True).reason) == len(
        each["test"]
    )


def test_arrays_are_probabilities_as_in_every_other_call():
    rng = np.random.default_rng(0)
    held, new = rng.dirichlet([1, 1, 1], 4000), rng.dirichlet([1, 1, 1], 4000)
    decider = Decider(Utility.one_hot(3).with_abstain(0)).fit_unfamiliar(
        held, held.argmax(axis=1), false_alarm=0.1
    )
    assert (decider.decide(new) == 3).mean() == pytest.approx(0.1, abs=0.02)
