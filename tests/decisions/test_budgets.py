"""Budgets and experts against brute force, and shares that are kept in batches, on
held-out data and in streams.
"""

import itertools

import numpy as np
import pytest

from rfdlc import Classes, Decider, InputError, PerDay, Predictions, Utility, evaluate
from rfdlc.cli.decisions import share_line
from rfdlc.decisions.budgets import Budget, Worth, assign
from rfdlc.decisions.streams import StreamController


def probabilities(n, classes, seed, sharpness=2.0):
    z = sharpness * np.random.default_rng(seed).normal(size=(n, classes))
    p = np.exp(z)
    return p / p.sum(axis=1, keepdims=True)


def total(gains, choice):
    return sum(gains[i, k] for i, k in enumerate(choice) if k >= 0)


def keeps(choice, groups, counts):
    return all(
        sum(k >= 0 and g[k] for k in choice) <= c
        for g, c in zip(groups, counts, strict=True)
    )


@pytest.mark.parametrize("decimals", [1, 8], ids=["ties", "distinct"])
def test_assignment_is_the_best_of_all(decimals):
    rng = np.random.default_rng(decimals)
    for _ in range(80):
        n, actions = int(rng.integers(2, 6)), int(rng.integers(1, 4))
        gains = np.round(rng.normal(0.2, 1, (n, actions)), decimals)
        groups = [row for row in np.eye(actions, dtype=bool) if rng.random() < 0.7]
        groups = np.array(
            groups
            if groups and rng.random() < 0.4
            else [*groups, np.ones(actions, dtype=bool)]
        )
        counts = rng.integers(0, n, len(groups)).astype(float)
        choice, prices = assign(gains, groups, counts)
        everything = itertools.product(range(-1, actions), repeat=n)
        best = max(
            total(gains, other) for other in everything if keeps(other, groups, counts)
        )
        assert keeps(choice, groups, counts)
        assert total(gains, choice) == pytest.approx(best, abs=1e-9)
        # Prices prove it: by duality no assignment is worth more than this.
        bound = (
            np.maximum(gains - prices @ groups, 0).max(axis=1).sum() + prices @ counts
        )
        if len(groups) > 1 or not prices.any():
            assert bound == pytest.approx(best, abs=1e-6)


def test_many_samples_are_assigned_as_a_linear_program_says():
    rng = np.random.default_rng(0)
    gains, groups = (
        rng.normal(0.2, 1, (9000, 3)),
        np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]], dtype=bool),
    )
    counts = np.array([450.0, 180.0, 900.0])
    choice, prices = assign(gains, groups, counts)
    assert keeps(choice, groups, counts)
    bound = np.maximum(gains - prices @ groups, 0).max(axis=1).sum() + prices @ counts
    assert total(gains, choice) == pytest.approx(bound, rel=1e-9)


def test_expert_is_worth_what_the_answers_are_worth():
    rng = np.random.default_rng(0)
    utility = Utility(rng.normal(size=(4, 4)), list("abcd"))
    confusion, cost = rng.dirichlet(np.ones(4), 4), 0.3
    p, asked = (
        probabilities(50, 4, 1),
        utility.with_expert("doctor", confusion=confusion, cost=cost),
    )
    decider = Decider(asked)
    for row, action, values in zip(
        p,
        decider.decide(p),
        decider.utility.gains(decider.probabilities(p)),
        strict=True,
    ):
        answers = itertools.product(range(4), range(4))
        ask = (
            sum(row[y] * confusion[y, a] * utility.matrix[y, a] for y, a in answers)
            - cost
        )
        each = [*(row @ utility.matrix), ask]
        assert values == pytest.approx(each)
        assert action == int(np.argmax(each))


def test_perfect_expert_gets_everything_and_a_useless_one_nothing():
    p, utility = probabilities(2000, 5, 0), Utility.one_hot(5)
    perfect = Decider(utility.with_expert("expert", confusion=1.0)).decide(p)
    assert (perfect == 5).all()
    guessing = utility.with_expert("expert", confusion=np.full((5, 5), 0.2))
    fixed = utility.with_expert("expert", confusion=np.tile([0.0, 0, 1, 0, 0], (5, 1)))
    assert not (Decider(guessing).decide(p) == 5).any()
    assert not (Decider(fixed).decide(p) == 5).any()
    assert not (
        Decider(utility.with_expert("expert", confusion=1.0, cost=1.0)).decide(p) == 5
    ).any()


@pytest.mark.parametrize(
    ("confusion", "cost", "message"),
    [
        (
            [[0.9, 0.2], [0, 1]],
            0,
            "'healthy' is 0.9, 0.2, with sum 1.1: expected shares of answers",
        ),
        ([[1.1, -0.1], [0, 1]], 0, "0 or more, that sum to 1"),
        ([[1.0, 0]], 0, r"has shape \(1, 2\): expected \(2, 2\)"),
        (1.2, 0, "0 or more, that sum to 1"),
        (0.9, float("nan"), "cost of expert 'doctor' is nan: expected finite numbers"),
        ("good", 0, "must be numbers"),
    ],
)
def test_wrong_experts_are_named(confusion, cost, message):
    utility = Utility([[1, 0], [-5, 1]], ["healthy", "ill"])
    with pytest.raises(InputError, match=message):
        utility.with_expert("doctor", confusion=confusion, cost=cost)


def test_budget_is_exact_in_a_batch_and_near_by_prices():
    utility = Utility.one_hot(10).with_expert("person", confusion=0.95, cost=0.05)
    held, new = probabilities(10_000, 10, 0), probabilities(10_000, 10, 1)
    decider = Decider(utility).fit_budget(held, np.arange(10_000) % 10, budget="5%")
    batch = decider.decide(new, batch=True)
    assert (batch == 10).sum() == 500
    assert abs((decider.decide(new) == 10).mean() - 0.05) < 0.005
    worth = Worth.of(utility, new)
    assert (
        worth.gains[batch == 10].min() >= worth.gains[batch != 10].max()
    )  # those for which it is worth most
    assert (batch[batch < 10] == new.argmax(axis=1)[batch < 10]).all()


def test_budgets_of_several_experts_are_kept_at_once():
    right = np.diag([0.95, 0.9, 0.8, 0.7, 0.6, 0.5])  # what is left is spread evenly
    nurse = (
        right
        + (np.ones((6, 6)) - np.eye(6)) * (1 - right.sum(axis=1, keepdims=True)) / 5
    )
    utility = Utility.one_hot(6).with_expert("nurse", confusion=nurse, cost=0.02)
    utility = utility.with_expert("doctor", confusion=0.98, cost=0.1)
    held, shares = (
        probabilities(4000, 6, 0),
        {"nurse": 0.1, "doctor": 0.03, "total": 0.12},
    )
    decider = Decider(utility).fit_budget(held, np.arange(4000) % 6, budget=shares)
    for batch in (True, False):
        found = (
            np.bincount(
                decider.decide(probabilities(4000, 6, 1), batch=batch), minlength=8
            )[6:]
            / 4000
        )
        assert found[0] <= 0.1 + 0.01 * (not batch)
        assert found[1] == pytest.approx(0.03, abs=1e-9 if batch else 0.005)
        assert found.sum() == pytest.approx(0.12, abs=1e-9 if batch else 0.01)


def test_a_budget_is_never_spent_on_what_is_worth_nothing():
    decider = Decider(Utility.one_hot(3).with_abstain(0.4)).fit_budget(
        probabilities(900, 3, 0), [0, 1, 2] * 300, budget=0.9
    )
    p = probabilities(500, 3, 1)
    assert decider.deferral.budget == Budget({"total": 0.9}, {"total": 0.0})
    assert (decider.decide(p, batch=True) == Decider(decider.utility).decide(p)).all()


def test_prices_are_for_the_prior_that_is_decided_for():
    """Held-out samples have equal classes, samples to decide 90% of the first: the
    share is kept for these.
    """
    rng, utility = (
        np.random.default_rng(0),
        Utility.one_hot(2).with_expert("person", confusion=1.0),
    )

    def scores(y):
        z = rng.normal(size=len(y)) + np.where(y == 1, 1, -1)
        p = 1 / (1 + np.exp(-2 * z))
        return np.stack([1 - p, p], axis=1)

    y, new = np.arange(20_000) % 2, (rng.random(20_000) < 0.1).astype(int)
    decider = Decider(
        utility, calibration=None, train_prior=[0.5, 0.5], target_prior=[0.9, 0.1]
    )
    share = (
        decider.fit_budget(scores(y), y, budget=0.1).decide(scores(new)) == 2
    ).mean()
    assert share == pytest.approx(0.1, abs=0.006)


def test_corrected_probabilities_need_no_targets_for_a_budget():
    decider, p = (
        Decider(Utility.one_hot(3).with_abstain(0.9)),
        probabilities(1000, 3, 0),
    )
    table = Predictions(probabilities=p, corrected=True)
    priced = decider.fit_budget(table, budget="5%")
    gains = np.sort(0.9 - p.max(axis=1))[::-1]
    assert priced.deferral.budget.prices["total"] == pytest.approx(
        (gains[49] + gains[50]) / 2
    )
    assert (
        (priced.decide(table) == 3).sum()
        == (priced.decide(table, batch=True) == 3).sum()
        == 50
    )
    with pytest.raises(
        InputError, match="a budget needs the rule 'expected-utility', not 'argmax'"
    ):
        decider.replace(rule="argmax").fit_budget(table, budget="5%")
    with pytest.raises(InputError, match="no targets"):
        decider.fit_budget(p, budget="5%")


def test_reasons_say_why_samples_were_handed_over_or_kept():
    utility = Utility([[1, 0], [0, 1]], ["a", "b"]).with_abstain(0.8)
    p = np.array([[0.99, 0.01], [0.55, 0.45], [0.3, 0.7], [0.9, 0.1]])
    found = Decider(utility).explain(p)
    assert found.reason.tolist() == ["", "expected utility", "expected utility", ""]
    decider = Decider(utility).fit_budget(p, [0, 0, 1, 0], budget=0.25)
    for batch in (False, True):
        found = decider.explain(p, batch=batch)
        assert found.reason.tolist() == ["", "expected utility", "over budget", ""]
        assert [found.actions[a] for a in found.action] == ["a", "abstain", "b", "a"]
        assert found.value == pytest.approx([0.99, 0.8, 0.7, 0.9])


def test_a_budget_is_saved_and_belongs_to_its_utility(tmp_path):
    utility = Utility.one_hot(3).with_abstain(0.9)
    decider = Decider(utility).fit_budget(
        probabilities(300, 3, 0), [0, 1, 2] * 100, budget=0.1
    )
    decider.save(tmp_path / "decider.json")
    loaded, p = Decider.load(tmp_path / "decider.json"), probabilities(200, 3, 1)
    assert loaded.deferral.budget == decider.deferral.budget
    assert (loaded.decide(p) == decider.decide(p)).all()
    assert decider.replace(utility=utility).deferral.budget == decider.deferral.budget
    with pytest.raises(
        InputError,
        match="fitted with another utility, prior or calibration: fit it again",
    ):
        decider.replace(utility=Utility.one_hot(3).with_abstain(0.8))
    bare = decider.replace(utility=Utility.one_hot(3), budget=None)
    assert bare.deferral.budget is None


def test_batches_too_small_for_their_share_go_by_prices():
    """One sample at a time is handed over as in a stream; a share of 0 hands
    over none.
    """
    p, utility = probabilities(2000, 3, 0), Utility.one_hot(3).with_abstain(0.9)
    decider = Decider(utility).fit_budget(p[:1000], np.arange(1000) % 3, budget=0.1)
    alone = np.concatenate([decider.decide(row[None], batch=True) for row in p[1000:]])
    assert alone.tolist() == decider.decide(p[1000:]).tolist()
    assert 0.05 < (alone == 3).mean() < 0.15
    assert (decider.decide(p[1000:1010], batch=True) == 3).sum() <= 1  # enough for one
    assert [decider.deferral.budget.too_few(count) for count in (1, 9, 10, 11)] == [
        True,
        True,
        False,
        False,
    ]
    told = share_line(decider.deferral.budget, {"total": 1.0}, False, 9)
    price = (  # said where something is decided by it
        f"(a gain of total {decider.deferral.budget.prices['total']:.4f} or more)"
    )
    assert told.endswith(
        f"; by its prices {price}, as 9 samples are too few for the share to be one of"
        " them."
    )
    assert f"by prices of held-out samples {price}," in share_line(
        decider.deferral.budget, {"total": 0.1}, False
    )
    assert share_line(decider.deferral.budget, {"total": 0.1}, False, 10).endswith(
        "; of all samples as one batch."
    )
    none = Decider(utility).fit_budget(p[:1000], np.arange(1000) % 3, budget=0)
    assert not none.deferral.budget.too_few(1)
    assert not (
        np.concatenate([none.decide(row[None], batch=True) for row in p[1000:1100]])
        == 3
    ).any()


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            1.5,
            (
                "budget 1.5: expected a share of the samples from 0 to 1, such as 0.05,"
                " 5%, or 30/600 for 30 of 600"
            ),
        ),
        ("30/0", "budget '30/0': expected a share"),
        ("30/20", "budget '30/20': expected a share"),
        ("1%/10", "budget '1%/10': expected a share"),
        ("1/", "budget '1/': expected a share"),
        ("many", "budget 'many': expected a share"),
        ({"surgeon": 0.1}, "budget of surgeon: expected total, abstain"),
    ],
)
def test_wrong_budgets_are_named(budget, message):
    with pytest.raises(InputError, match=message):
        Decider(Utility.one_hot(2).with_abstain(0.5)).fit_budget(
            [[0.5, 0.5]], [0], budget=budget
        )


def test_budget_needs_something_to_limit_and_labels():
    with pytest.raises(InputError, match="every action decides for a class: add one"):
        Decider(Utility.one_hot(2)).fit_budget([[0.5, 0.5]], [0], budget=0.1)
    with pytest.raises(InputError, match="no targets"):
        Decider(Utility.one_hot(2).with_abstain(0.5)).fit_budget(
            [[0.5, 0.5]], budget=0.1
        )


def drifting(n, seed):
    """Samples whose class prior turns around while the model keeps the first one;
    halfway, all become harder.
    """
    rng, prior = np.random.default_rng(seed), np.geomspace(1, 0.01, 5)
    share = np.linspace(0, 1, n)[:, None]
    current = np.cumsum((1 - share) * prior + share * prior[::-1], axis=1)
    y = (rng.random((n, 1)) * current[:, -1:] > current).sum(axis=1)
    z = (
        rng.normal(size=(n, 5))
        + 2.0 * np.eye(5)[y] * np.where(np.arange(n) % 5000 < 2500, 1, 0.3)[:, None]
    )
    p = np.exp(z) * prior
    return p / p.sum(axis=1, keepdims=True), y


def shares_of_windows(handed, window=2000):
    total = np.concatenate([[0], np.cumsum(handed)])
    return (total[window:] - total[:-window]) / window


def test_streams_keep_the_share_in_every_window_while_the_prior_drifts():
    p, y = drifting(12_000, 0)
    utility = Utility.one_hot(5).with_expert("person", confusion=0.97)
    decider = Decider(utility).fit_budget(p[:2000], y[:2000], budget="5%")
    by_price = shares_of_windows(decider.decide(p) == 5)
    assert by_price.max() > 0.07  # a fixed price does not
    controller = StreamController(decider)
    handed = (
        np.concatenate([controller.decide(part) for part in np.array_split(p, 7)]) == 5
    )
    shares = shares_of_windows(handed)
    assert shares.min() >= 0.045
    assert shares.max() <= 0.055
    worth = Worth.of(utility, p).gains[:, 0]
    best = worth[decider.decide(p, batch=True) == 5].sum()
    assert (
        worth[handed].sum() > 0.8 * best
    )  # in hindsight, and without limits on windows
    assert worth[handed].mean() > 1.5 * worth.mean()


def test_streams_never_hand_over_what_is_worth_nothing_and_count_days():
    utility = Utility.one_hot(5).with_abstain(0.5)
    p, y = drifting(3000, 1)
    decider = Decider(utility).fit_budget(p, y, budget={"abstain": 0.1})
    controller = StreamController(decider, window=500, tolerance=0.02, per_day=20)
    days = np.repeat(["mon", "tue", "wed"], 1000)
    handed = controller.decide(p, days=days) == 5
    assert (p[handed].max(axis=1) < 0.5).all()
    assert shares_of_windows(handed, 500).max() <= 0.12
    counted = {
        day: {"samples": 1000, "handed_over": int(handed[days == day].sum())}
        for day in ("mon", "tue", "wed")
    }
    assert controller.counts == counted
    assert max(each["handed_over"] for each in counted.values()) == 20


def test_streams_of_two_experts_keep_both_shares():
    rng = np.random.default_rng(0)
    skills = rng.dirichlet(np.ones(5), 5) * 0.3 + 0.7 * np.eye(5)
    utility = Utility.one_hot(5).with_expert("nurse", confusion=skills)
    utility = utility.with_expert("doctor", confusion=0.97, cost=0.05)
    p, y = drifting(6000, 2)
    decider = Decider(utility).fit_budget(p, y, budget={"doctor": 0.03, "total": 0.1})
    actions = StreamController(decider).decide(p)
    assert shares_of_windows(actions == 6).max() <= 0.035
    assert np.abs(shares_of_windows(actions >= 5) - 0.1).max() <= 0.005


def test_streams_need_a_budget_and_a_window():
    decider = Decider(Utility.one_hot(2).with_abstain(0.9))
    with pytest.raises(InputError, match="has no budget: fit one on held-out data"):
        StreamController(decider)
    decider = decider.fit_budget([[0.5, 0.5], [0.9, 0.1]], [0, 1], budget=0.5)
    with pytest.raises(InputError, match="less than 2 samples"):
        StreamController(decider, window=100)
    with pytest.raises(InputError, match="per_day needs the day of each sample"):
        StreamController(decider, per_day=3).decide([[0.5, 0.5]])


def test_a_number_per_day_alone_hands_over_where_it_pays_until_it_is_reached():
    """Against a loop: each sample that is worth more with its best expert, in order,
    until the day has its number.
    """
    skills = 0.6 * np.eye(5) + 0.08 + np.diag([0, 0, -0.3, -0.3, 0])
    utility = Utility.one_hot(5).with_expert(
        "nurse", confusion=skills / skills.sum(axis=1, keepdims=True)
    )
    utility = utility.with_expert("doctor", confusion=0.97, cost=0.3)
    p, _ = drifting(900, 4)
    days = np.repeat([5, 6, 7], 300)
    controller = StreamController(Decider(utility), per_day=25)
    actions = np.concatenate(
        [
            controller.decide(p[a : a + 90], days=days[a : a + 90])
            for a in range(0, 900, 90)
        ]
    )
    values, used, expected = p @ utility.matrix, dict.fromkeys([5, 6, 7], 0), []
    for value, day in zip(values, days.tolist(), strict=True):
        hand_over = value.argmax() >= 5 and used[day] < 25
        used[day] += hand_over
        expected.append(value.argmax() if hand_over else value[:5].argmax())
    assert actions.tolist() == expected
    assert set(used.values()) == {25}
    seconds = np.arange(900) % 300 * np.timedelta64(200, "s")  # times instead of days
    times = np.datetime64("2026-03-01") + days * np.timedelta64(1, "D") + seconds
    for given in (times, [f"{time}+02:00" for time in times]):
        again = StreamController(Decider(utility), per_day=25)
        assert again.decide(p, days=given).tolist() == expected
        assert list(again.counts) == ["2026-03-06", "2026-03-07", "2026-03-08"]
    assert {*actions.tolist()} >= {5, 6}
    with pytest.raises(InputError, match="every action decides for a class"):
        StreamController(Decider(Utility.one_hot(5)), per_day=25)


def test_utility_against_budget_is_that_of_the_exact_batches():
    p, y = drifting(2000, 3)
    utility = Utility.tail_sensitive(
        Classes.from_counts([50, 40, 30, 20, 10])
    ).with_expert("doctor", confusion=0.9)
    result = evaluate(p, y, Decider(utility))
    decider = Decider(utility).fit_budget(p, y, budget=0.0)
    for share in (0.0, 0.05, 0.3):
        exact = decider.replace(budget=Budget({"total": share}, {"total": 0.0})).decide(
            p, batch=True
        )
        assert result.utility_by_budget[share] == pytest.approx(
            utility.matrix[y, exact].mean()
        )
    low, high = result.intervals["utility_by_budget.0.05"]
    assert low < result.utility_by_budget[0.05] < high
    assert evaluate(p, y, utility=Utility.one_hot(5)).utility_by_budget == {}


def test_nothing_is_over_budget_without_a_budget():
    p = probabilities(200, 3, 0)
    decider = Decider(Utility.one_hot(3).with_abstain(0.95), rule="argmax")
    assert set(decider.explain(p).reason) == {""}


def test_an_action_may_not_have_the_name_of_all():
    p = probabilities(200, 3, 0)
    with pytest.raises(
        InputError,
        match="an action is called 'total', the name of the budget of all: rename",
    ):
        Decider(Utility.one_hot(3).with_abstain(0.5, "total")).fit_budget(
            p, p.argmax(axis=1), budget="5%"
        )


def test_on_each_day_the_samples_that_are_worth_most_are_handed_over():
    rng, p = np.random.default_rng(0), probabilities(9, 3, 0)
    utility = (
        Utility.one_hot(3)
        .with_expert("doctor", confusion=0.9, cost=0.1)
        .with_expert("nurse", confusion=0.8)
    )
    days = rng.permutation([1, 1, 1, 1, 2, 2, 2, 3, 3])
    decider, worth = Decider(utility), Worth.of(utility, p)
    for counts in (2, {"doctor": 1}, {"doctor": 1, "total": 2}, 0):
        found = decider.decide(p, batch=PerDay(counts, days))
        limits = counts if isinstance(counts, dict) else {"total": counts}
        for day in (1, 2, 3):
            rows = np.flatnonzero(days == day)

            def kept(choice, limits=limits):
                handed = {
                    "doctor": choice.count(0),
                    "total": len(choice) - choice.count(-1),
                }
                return all(handed[name] <= most for name, most in limits.items())

            every = (
                choice
                for choice in itertools.product((-1, 0, 1), repeat=len(rows))
                if kept(choice)
            )
            best = max(
                sum(
                    worth.gains[i, k]
                    for i, k in zip(rows, choice, strict=True)
                    if k >= 0
                )
                for choice in every
            )
            mine = (
                decider.utility.gains(decider.probabilities(p))[rows, found[rows]]
                - decider.utility.gains(decider.probabilities(p))[
                    rows, worth.kept[rows]
                ]
            )
            assert mine.sum() == pytest.approx(best)
    explained = decider.explain(p, batch=PerDay(1, days))
    wanted = decider.decide(p) >= 3
    assert (
        (explained.reason == "over budget").sum()
        == wanted.sum() - (explained.action >= 3).sum()
        > 0
    )


def test_unfamiliar_samples_count_per_day():
    p, held = (probabilities(n, 3, seed, 0.5) for n, seed in ((40, 1), (2000, 2)))
    decider = Decider(Utility.one_hot(3).with_abstain(0.99))
    decider = decider.fit_unfamiliar(
        held, held.argmax(axis=1), score="entropy", false_alarm=0.1
    )
    days, strange = np.repeat([0, 1], 20), decider.explain(p).reason == "unfamiliar"
    assert all(0 < strange[days == day].sum() < 8 for day in (0, 1))
    found = decider.explain(p, batch=PerDay(8, days))
    handed = found.action == 3
    assert [int(handed[days == day].sum()) for day in (0, 1)] == [8, 8]
    assert handed[strange].all()


def test_unfamiliar_samples_count_for_the_action_that_they_get():
    p, held = (probabilities(n, 3, seed, 0.5) for n, seed in ((40, 1), (2000, 2)))
    decider = Decider(
        Utility.one_hot(3).with_expert("doctor", confusion=0.99).with_abstain(0.7)
    )
    decider = decider.fit_unfamiliar(
        held, held.argmax(axis=1), score="entropy", false_alarm=0.1
    )
    strange = decider.explain(p).reason == "unfamiliar"
    limit = int(strange.sum()) + 2
    found = decider.decide(p, batch=PerDay({"doctor": limit}, np.zeros(40)))
    assert (found[strange] == 3).all()
    assert (found == 3).sum() == limit < (decider.decide(p) == 3).sum()


@pytest.mark.parametrize(
    ("counts", "days", "message"),
    [
        (
            5,
            ["2026-03-01", "2026-03-0x"],
            (
                "sample 1 .counted from 0. is '2026-03-0x': expected 2026-03-01, .* for"
                " every"
            ),
        ),
        (5, ["night", None], "sample 1 .* is 'None': expected"),
        (5, ["night", float("nan")], "sample 1 .* is 'nan': expected"),
        (
            5,
            np.array(["2026-03-01", "NaT"], dtype="datetime64[D]"),
            "sample 1 .* is 'NaT': expected",
        ),
        (
            5,
            ["03/01/2026 09:30", "03/01/2026 09:31"],
            "sample 0 .* is '03/01/2026 09:30': expected",
        ),
        (5, [1774653000, 1774653001], "sample 0 .* is '1774653000': expected"),
        (5, [1], "1 days for 2 samples: expected one per sample"),
        (-1, [1, 1], "total -1 per day: expected a number of samples, 0 or more"),
        (0.5, [1, 1], "total 0.5 per day: expected a number of samples"),
        ({"doctor": 5}, [1, 1], "budget of doctor: expected total, abstain"),
    ],
)
def test_limits_per_day_that_cannot_be(counts, days, message):
    with pytest.raises(InputError, match=message):
        Decider(Utility.one_hot(2).with_abstain(0.9)).decide(
            [[0.5, 0.5]] * 2, batch=PerDay(counts, days)
        )
    with pytest.raises(InputError, match="add one"):
        Decider(Utility.one_hot(2)).decide([[0.5, 0.5]] * 2, batch=PerDay(1, [1, 1]))
    with pytest.raises(InputError, match="a budget needs the rule"):
        Decider(Utility.one_hot(2).with_abstain(0.9), rule="argmax").decide(
            [[0.5, 0.5]], batch=PerDay(1, [1])
        )


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("budget", [0.05, {"total": 0.05, "abstain": 0.04}])
def test_samples_that_share_the_price_are_not_handed_over_together(kind, budget):
    """As a tree scores them: few different probabilities, and most samples at the
    price.
    """
    utility = Utility.one_hot(3).with_abstain(0.9)
    leaves = np.array(
        [[0.34, 0.33, 0.33], [0.7, 0.2, 0.1], [0.95, 0.03, 0.02]], dtype=kind
    )
    p, y = leaves[np.repeat([0, 1, 2], [20, 600, 380])], np.arange(1000) % 3
    decider = Decider(utility).fit_budget(p, y, budget=budget)
    other = leaves[np.repeat([0, 1, 2], [18, 612, 370])] * (
        1 + 1e-7 * np.random.default_rng(0).normal(size=(1000, 1))
    )
    for samples in (p, other.astype(kind), p[:, ::-1].copy()):
        assert (decider.decide(samples) == 3).sum() in (0, 18, 20)


def test_evaluation_of_a_batch_keeps_to_the_budget_though_scores_have_moved():
    utility, y = Utility.one_hot(3).with_abstain(0.9), np.arange(400) % 3
    decider = Decider(utility).fit_budget(probabilities(400, 3, 0), y, budget=0.05)
    p = probabilities(400, 3, 1, sharpness=1.0)
    assert (decider.decide(p) == 3).mean() > 0.15
    found = evaluate(p, y, decider)
    assert found.abstention_rate == 0.05
    assert (found.outcomes.actions == decider.decide(p, batch=True)).all()


def test_shares_that_chance_does_not_explain_get_a_warning(recwarn):
    utility, y = Utility.one_hot(3).with_abstain(0.9), np.arange(1000) % 3
    quiet = 0
    for seed in range(200):
        decider = Decider(utility).fit_budget(
            probabilities(1000, 3, 2 * seed), y, budget=0.05
        )
        counts = np.bincount(
            decider.decide(probabilities(500, 3, 2 * seed + 1)), minlength=4
        ).tolist()
        recwarn.clear()
        decider.deferral.warn_of_share(
            dict(zip(utility.actions, counts, strict=True)), utility
        )
        quiet += not recwarn
    assert quiet == 200
    counts = np.bincount(
        decider.decide(probabilities(400, 3, 1, sharpness=1.0)), minlength=4
    ).tolist()
    with pytest.warns(
        UserWarning,
        match=r"% of 400 samples were handed over, where the budget \(total\) is 5%",
    ):
        decider.deferral.warn_of_share(
            dict(zip(utility.actions, counts, strict=True)), utility
        )


def test_a_price_is_found_with_the_calibration_that_decides():
    """Which gave classes the same weight; those of folds would be others."""
    rng = np.random.default_rng(0)
    counts = np.geomspace(200, 4, 20).astype(int)
    y = np.repeat(np.arange(20), counts)
    z = rng.normal(size=(len(y), 20)) + np.log(counts)
    z[np.arange(len(y)), y] += 1
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    classes = Classes(tuple(map(str, range(20))), tuple(map(int, counts)))
    decider = Decider(
        Utility.one_hot(classes).with_abstain(1.0),
        calibration="bias-corrected-temperature",
        train_prior="train",
        target_prior="uniform",
    ).fit(p, y, balanced=True)
    weights = 1 / (20 * counts[y])
    for share in (0.05, 0.2):
        limited = decider.fit_budget(p, y, budget=share)
        handed = decider.utility.decided_class[limited.decide(p)] < 0
        assert share - 2 * weights.max() <= weights @ handed <= share + 1e-9
