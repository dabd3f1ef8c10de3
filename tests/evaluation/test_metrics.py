"""Every metric against a naive loop or scikit-learn, on random and on
degenerate input.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import sklearn.metrics as reference
from scipy.special import softmax

from rfdlc import Classes, Decider, InputError, Predictions, Utility, evaluate
from rfdlc.cli.train import metrics_table
from rfdlc.evaluation import bins, metrics
from rfdlc.evaluation.metrics import METRICS
from rfdlc.evaluation.outcomes import Outcomes
from rfdlc.probabilities import scores, uncertainty
from rfdlc.statistics import ranking
from rfdlc.statistics.intervals import calibration_gap


def case(name):
    """(targets, decided, probabilities, classes) of a named situation."""
    rng = np.random.default_rng(CASES.index(name))
    c = 2 if name == "two classes" else 6
    n = 1 if name == "one sample" else 300
    y = rng.integers(0, c, n)
    if name == "one class absent":
        y[y == 2] = 3
    if name == "one class only":
        y[:] = 1
    p = softmax(rng.normal(size=(n, c)) * 2, axis=1)
    if name == "ties":
        p = np.full((n, c), 1 / c)
    if name == "certain":
        p = np.eye(c)[rng.integers(0, c, n)]
    decided = p.argmax(axis=1)
    if name == "all wrong":
        decided = (y + 1) % c
    if name == "all right":
        decided = y.copy()
    if name in ("some abstained", "all abstained"):
        decided = np.where(
            rng.random(n) < (0.3 if name == "some abstained" else 2), -1, decided
        )
    return y, decided, p, Classes.from_counts(rng.integers(1, 200, c))


CASES = [
    "random",
    "two classes",
    "one sample",
    "one class absent",
    "one class only",
    "ties",
    "certain",
    "all wrong",
    "all right",
    "some abstained",
    "all abstained",
]


def same(value, expected):
    return (math.isnan(value) and math.isnan(expected)) or value == pytest.approx(
        expected, abs=1e-9
    )


def value(name, y, decided, p=None, classes=None, utility=None):
    """A registered metric of given decisions."""
    utility = (utility or Utility.one_hot(classes)).with_abstain(0.0, "none")
    actions = np.where(decided < 0, len(utility.actions) - 1, decided)
    return METRICS[name].measure(Outcomes.of(utility, y, actions, p))


def error_auc(correct, confidence):
    return ranking.roc_area(correct, confidence).value


def ece(confidence, right):
    return calibration_gap(confidence, right, bins.bin_of(confidence)).value


def average(values):
    return sum(values) / len(values) if values else float("nan")


@pytest.mark.parametrize("name", CASES)
def test_decisions(name):
    y, d, _, classes = case(name)
    n, c = len(y), len(classes)
    assert same(
        value("accuracy", y, d, classes=classes),
        sum(y[i] == d[i] for i in range(n)) / n,
    )
    per_class = [[d[i] == k for i in range(n) if y[i] == k] for k in range(c)]
    assert same(
        value("balanced_accuracy", y, d, classes=classes),
        average([average(r) for r in per_class if r]),
    )
    assert same(
        value("abstention_rate", y, d, classes=classes), sum(x < 0 for x in d) / n
    )
    assert same(
        value("kept_accuracy", y, d, classes=classes),
        average([y[i] == d[i] for i in range(n) if d[i] >= 0]),
    )
    f1 = []
    for k in range(c):
        hit = sum(y[i] == k and d[i] == k for i in range(n))
        true, claimed = sum(y == k), sum(d == k)
        if true + claimed:
            f1.append(2 * hit / (true + claimed))
    found = value("macro_f1", y, d, classes=classes)
    assert same(found, average(f1))
    if (d >= 0).all():
        assert same(
            value("accuracy", y, d, classes=classes), reference.accuracy_score(y, d)
        )
        assert same(found, reference.f1_score(y, d, average="macro", zero_division=0))
        if set(d) <= set(y):
            assert same(
                value("balanced_accuracy", y, d, classes=classes),
                reference.balanced_accuracy_score(y, d),
            )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fraction", metrics.HEAD_FRACTIONS)
def test_false_head_rate(name, fraction):
    y, d, _, classes = case(name)
    by_count = sorted(range(len(classes)), key=lambda k: (-classes.counts[k], k))
    head = set(by_count[: int(len(classes) * fraction + 0.5)])
    naive = average([d[i] in head for i in range(len(y)) if y[i] not in head])
    assert same(value("false_head_rates", y, d, classes=classes)[fraction], naive)


def test_false_head_rate_is_about_the_heads_share():
    """Audit 3: at 25% the first 25% of the classes are head and the other 75%
    are tail.
    """
    classes = Classes.from_counts([8, 7, 6, 5, 4, 3, 2, 1])
    y, d = np.array([7, 6, 5, 2, 0]), np.array([0, 2, 5, 1, 7])
    assert (
        value("false_head_rates", y, d, classes=classes)[0.25] == 2 / 4
    )  # 7 -> 0 and 2 -> 1; class 0 is head itself
    assert (
        value("false_head_rates", y, d, classes=classes)[0.75] == 2 / 2
    )  # of 7 and 6 both


@pytest.mark.parametrize("name", CASES)
def test_groups_utility_and_regret(name):
    y, d, _, classes = case(name)
    true, wrong = np.array([1, 0]), np.array([len(classes) - 1])
    naive = average([d[i] in wrong for i in range(len(y)) if y[i] in true])
    outcomes = Outcomes.of(
        Utility.one_hot(classes).with_abstain(0), y, np.where(d < 0, len(classes), d)
    )
    named = Classes(
        classes.names,
        classes.counts,
        {"true": classes.select(true), "wrong": classes.select(wrong)},
    )
    outcomes = replace(
        outcomes,
        utility=outcomes.utility.with_classes(named),
        groups=[("true", "wrong")],
    )
    assert same(METRICS["group_rates"].measure(outcomes)["true as wrong"], naive)
    utility = Utility.tail_sensitive(classes, -2).with_abstain(0.3)
    actions = np.where(d < 0, len(classes), d)
    u = utility.matrix
    assert same(
        METRICS["mean_utility"].measure(Outcomes.of(utility, y, actions)),
        average([u[y[i], actions[i]] for i in range(len(y))]),
    )
    naive = average([max(u[y[i]]) - u[y[i], actions[i]] for i in range(len(y))])
    assert same(METRICS["mean_regret"].measure(Outcomes.of(utility, y, actions)), naive)


@pytest.mark.parametrize("name", CASES)
def test_detecting_errors(name):
    y, d, p, _ = case(name)
    correct, confidence = y == d, p.max(axis=1)
    pairs = [
        (
            1.0
            if confidence[i] > confidence[j]
            else 0.5
            if confidence[i] == confidence[j]
            else 0.0
        )
        for i in range(len(y))
        for j in range(len(y))
        if correct[i] and not correct[j]
    ]
    assert same(error_auc(correct, confidence), average(pairs))
    if 0 < correct.sum() < len(y):
        assert same(
            error_auc(correct, confidence), reference.roc_auc_score(correct, confidence)
        )


@pytest.mark.parametrize("name", CASES)
def test_risk_coverage(name):
    y, d, p, _ = case(name)
    correct, confidence = y == d, p.max(axis=1)
    # Naive: within a tie every order is equally likely, so a sample counts with its
    # tie's error rate.
    order = sorted(range(len(y)), key=lambda i: -confidence[i])
    errors = [
        average([not correct[j] for j in order if confidence[j] == confidence[i]])
        for i in order
    ]
    naive = [sum(errors[: k + 1]) / (k + 1) for k in range(len(y))]
    coverage, risk = ranking.risk_coverage(correct, confidence)
    assert risk == pytest.approx(naive, abs=1e-9)
    assert coverage == pytest.approx([(k + 1) / len(y) for k in range(len(y))])
    assert same(risk.mean(), average(naive))
    shuffled = np.random.default_rng(0).permutation(len(y))
    again = ranking.risk_coverage(correct[shuffled], confidence[shuffled])[1]
    assert same(again.mean(), average(naive))


def naive_ece(confidence, correct, bins):
    edges, total = np.linspace(0, 1, bins + 1), 0.0
    for b in range(bins):
        low = -1 if b == 0 else edges[b]  # 0 belongs to the first bin
        inside = [
            i for i in range(len(confidence)) if low < confidence[i] <= edges[b + 1]
        ]
        if inside:
            total += abs(
                sum(correct[i] for i in inside) - sum(confidence[i] for i in inside)
            ) / len(confidence)
    return total


@pytest.mark.parametrize("name", CASES)
def test_calibration_errors(name):
    y, _, p, classes = case(name)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    assert same(ece(confidence, right), naive_ece(confidence, right, 15))
    naive = average([naive_ece(p[:, k], y == k, 15) for k in range(len(classes))])
    assert same(value("classwise_ece", y, p.argmax(axis=1), p, classes), naive)
    onehot = np.eye(len(classes))[y]
    brier = [((p[i] - onehot[i]) ** 2).sum() for i in range(len(y))]
    assert same(value("brier", y, p.argmax(axis=1), p, classes), average(brier))
    assert same(
        scores.nll(p[np.arange(len(y)), y]).mean(),
        average([-math.log(max(p[i, y[i]], 1e-12)) for i in range(len(y))]),
    )
    if len(set(y)) > 1 and p.min() > 0:
        assert same(
            scores.nll(p[np.arange(len(y)), y]).mean(),
            reference.log_loss(y, p, labels=range(len(classes))),
        )


@pytest.mark.parametrize("edge", np.linspace(0, 1, 16))
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(edge):
    assert bins.bin_of(np.array([edge]))[0] == max(0, round(edge * 15) - 1)


@pytest.mark.parametrize("edge", range(1, 15))
def test_rounding_does_not_move_a_confidence_to_the_bin_above(edge):
    share = (
        edge / 15
    )  # as forests compute theirs: a mean over trees, in sums of several lengths
    means = [np.mean([1.0] * edge * n + [0.0] * (15 - edge) * n) for n in (1, 7, 20)]
    sums = [
        sum([1 / 15] * edge),
        edge * (1 / 15),
        np.nextafter(share, 1),
        1 - (15 - edge) / 15,
    ]
    assert {*bins.bin_of(np.array([share, *means, *sums])).tolist()} == {edge - 1}
    assert bins.bin_of(np.array([share], dtype=np.float32)).tolist() == [edge - 1]
    assert bins.bin_of(np.array([share + 1e-5])).tolist() == [edge]


def test_the_calibration_error_of_probabilities_at_edges_does_not_depend_on_rounding():
    rng = np.random.default_rng(0)
    confidence = rng.integers(1, 20, 2000) / 20
    right = rng.random(2000) < confidence
    for noise in (1 + 1e-15, 1 - 1e-15, 1 + 1e-9):
        assert ece(confidence * noise, right) == pytest.approx(
            ece(confidence, right), abs=1e-8
        )
    assert ece(confidence.astype(np.float32), right) == pytest.approx(
        ece(confidence, right), abs=1e-6
    )


@pytest.mark.parametrize("name", CASES)
def test_the_papers_ece(name):
    y, _, p, _ = case(name)
    entropy = [-sum(x * math.log(x) for x in row if x > 0) for row in p]
    right, total = p.argmax(axis=1) == y, 0.0
    for b in range(10):
        inside = [i for i in range(len(y)) if b / 10 <= 1 - entropy[i] < (b + 1) / 10]
        total += abs(
            sum(right[i] for i in inside) - sum(1 - entropy[i] for i in inside)
        ) / len(y)
    assert same(metrics.ece_paper(np.array(entropy), right), total)


def test_the_papers_ece_drops_what_is_sure_and_what_is_unsure():
    entropy = np.array([0.0, 1.5, 0.35])
    assert metrics.ece_paper(entropy, np.array([False, True, True])) == pytest.approx(
        (1 - 0.65) / 3
    )


class TestUncertainty:
    p = softmax(np.random.default_rng(0).normal(size=(4, 50, 5)), axis=2)

    def test_entropy(self):
        naive = [-sum(x * math.log(x) for x in row) for row in self.p[0]]
        assert uncertainty.entropy(self.p[0]) == pytest.approx(naive)
        assert uncertainty.entropy(self.p[0], normalised=True) == pytest.approx(
            np.array(naive) / math.log(5)
        )
        assert uncertainty.entropy(np.array([[1.0, 0.0]])).tolist() == [0]

    def test_max_probability(self):
        assert uncertainty.max_probability(self.p[0]) == pytest.approx(
            [1 - max(row) for row in self.p[0]]
        )

    def test_mutual_information(self):
        def entropy(row):
            return -sum(x * math.log(x) for x in row)

        naive = [
            entropy(self.p[:, i].mean(axis=0))
            - average([entropy(self.p[m, i]) for m in range(4)])
            for i in range(50)
        ]
        assert uncertainty.mutual_information(self.p) == pytest.approx(naive)
        assert np.isnan(
            uncertainty.mutual_information(self.p[:1])
        ).all()  # 0 would read as no doubt

    def test_evidential(self):
        z = np.array([[1.0, -2.0, 3.0]])
        assert uncertainty.evidential(z).tolist() == [3 / (4 + 3)]


class TestEvaluate:
    rng = np.random.default_rng(1)
    classes = Classes.from_counts(
        {"a": 200, "b": 50, "c": 10}, groups={"rare": ["b", "c"]}
    )
    y = rng.integers(0, 3, 5000)
    z = rng.normal(size=(2, 5000, 3)) + 1.5 * np.eye(3)[y]
    utility = Utility.tail_sensitive(classes, -1).with_abstain(0.5)

    def test_every_figure_equals_its_function(self, monkeypatch):
        """Across chunks, for several particles, with a fitted decider and
        abstention.
        """
        monkeypatch.setattr("rfdlc.probabilities.scores.CHUNK_ELEMENTS", 4321)
        monkeypatch.setattr("rfdlc.probabilities.scores.CHUNK_ROWS", 1)
        decider = Decider(
            self.utility, train_prior="uniform", target_prior=[0.2, 0.3, 0.5]
        )
        decider = decider.fit(self.z[:, :1000], self.y[:1000], logits=True)
        result = evaluate(self.z, self.y, decider, logits=True, groups=[("rare", "a")])
        p = np.asarray(decider.probabilities(self.z, logits=True))
        actions = decider.decide(self.z, logits=True)
        d = np.where(actions == 3, -1, actions)
        confidence, right, kept = p.max(axis=1), p.argmax(axis=1) == self.y, d >= 0
        y = self.y
        expected = {
            "accuracy": reference.accuracy_score(y, d),
            "balanced_accuracy": reference.recall_score(
                y, d, labels=[0, 1, 2], average="macro"
            ),
            "macro_f1": reference.f1_score(y, d, labels=[0, 1, 2], average="macro"),
            "mean_utility": self.utility.matrix[y, actions].mean(),
            "mean_regret": (
                (
                    self.utility.matrix.max(axis=1)[y] - self.utility.matrix[y, actions]
                ).mean()
            ),
            "abstention_rate": (d < 0).mean(),
            "kept_accuracy": (d == y)[kept].mean(),
            "error_auc": error_auc((d == y)[kept], p[kept, d[kept]]),
            "risk_coverage_area": (
                ranking.risk_coverage((d == y)[kept], p[kept, d[kept]])[1].mean()
            ),
            "ece": ece(confidence, right),
            "ece_paper": metrics.ece_paper(uncertainty.entropy(p), right),
            "classwise_ece": np.abs(bins.classwise_gaps(p, y)).sum() / 5000 / 3,
            "brier": ((p - np.eye(3)[y]) ** 2).sum(axis=1).mean(),
            "nll": scores.nll(p[np.arange(5000), y]).mean(),
        }
        for name, number in expected.items():
            assert getattr(result, name) == pytest.approx(number, abs=1e-9), name
        assert result.abstention_rate > 0.01
        assert result.accuracy_by_region == pytest.approx(
            {
                "head": (d == y)[y == 0].mean(),
                "med": (d == y)[y == 1].mean(),
                "tail": (d == y)[y == 2].mean(),
            }
        )
        assert result.accuracy_by_shots == pytest.approx(
            {
                "many": (d == y)[y == 0].mean(),
                "medium": (d == y)[y == 1].mean(),
                "few": (d == y)[y == 2].mean(),
            }
        )
        tail = p.argmax(axis=1) == 2
        assert result.ece_by_region["tail"] == pytest.approx(
            ece(confidence[tail], right[tail])
        )
        assert result.ece_by_true_region["tail"] == pytest.approx(
            ece(confidence[y == 2], right[y == 2])
        )
        assert result.false_head_rates == value(
            "false_head_rates", y, d, classes=self.classes
        )
        assert result.false_head_rate == pytest.approx(
            np.mean(list(result.false_head_rates.values()))
        )
        gap = (p @ self.utility.matrix)[np.arange(5000), actions] - self.utility.matrix[
            y, actions
        ]
        assert result.utility_gap == pytest.approx(gap.mean())
        assert result.utility_gap_by_region["tail"] == pytest.approx(gap[tail].mean())
        assert result.utility_gap_by_action["abstain"] == pytest.approx(
            gap[actions == 3].mean()
        )
        assert result.group_rates == {"rare as a": (d[y > 0] == 0).mean()}

    @pytest.mark.parametrize("kind", ["entropy", "mutual-information", "evidential"])
    def test_other_uncertainties(self, kind):
        result = evaluate(
            self.z,
            self.y,
            utility=Utility.one_hot(self.classes),
            logits=True,
            uncertainty=kind,
        )
        p = softmax(self.z, axis=2)
        unsure = {
            "entropy": uncertainty.entropy(p.mean(axis=0)),
            "mutual-information": uncertainty.mutual_information(p),
            "evidential": uncertainty.evidential(self.z.mean(axis=0)),
        }[kind]
        right = p.mean(axis=0).argmax(axis=1) == self.y
        assert result.error_auc == pytest.approx(
            reference.roc_auc_score(right, -unsure), abs=1e-9
        )

    def test_one_particle_has_no_mutual_information(self):
        with pytest.raises(
            InputError,
            match=(
                "'mutual-information' is the disagreement of particles, and there"
                " is one"
            ),
        ):
            evaluate(
                self.z[:1],
                self.y,
                utility=Utility.one_hot(self.classes),
                logits=True,
                uncertainty="mutual-information",
            )

    def test_all_abstained_and_one_class_still_give_a_result(self):
        everything = Utility.one_hot(self.classes).with_abstain(9)
        result = evaluate(self.z, np.zeros(5000, int), utility=everything, logits=True)
        assert result.abstention_rate == 1
        assert math.isnan(result.kept_accuracy)
        assert math.isnan(result.error_auc)
        assert math.isnan(result.accuracy_by_region["tail"])
        table = result.to_dict()
        assert table["kept_accuracy"] is None
        assert table["accuracy_by_region"]["tail"] is None
        assert "accuracy where answered" not in str(result)

    @pytest.mark.parametrize(
        ("counts", "twice"), [([900, 50, 10], True), ([900, 500, 10], False)]
    )
    def test_tables_leave_out_the_paper_and_what_they_have_shown(self, counts, twice):
        """Head, med and tail are many, medium and few, or are not; Python and JSON have
        both, and the paper's ECE.
        """
        rng = np.random.default_rng(0)
        p, y = rng.dirichlet(np.ones(3), 200), rng.integers(0, 3, 200)
        result = evaluate(p, y, classes=Classes.from_counts(counts))
        labels = [label.strip() for label, _, _ in result.rows()]
        assert {"head", "med", "tail"} <= {*labels}
        assert ("few shot" in labels) is not twice
        assert not [
            label for label in labels if "paper" in label or label.startswith("true ")
        ]
        assert {"ece_paper", "accuracy_by_shots", "ece_by_true_region"} <= {
            *result.to_dict()
        }
        assert {"ece_paper", "accuracy_by_shots.few", "ece_by_true_region.tail"} <= {
            *result.flat()
        }

    def test_tables_show_what_was_answered_beside_the_accuracy_if_not_everything_was(
        self,
    ):
        p, y = [[0.9, 0.1], [0.6, 0.4], [0.45, 0.55], [0.2, 0.8]], [0, 0, 1, 0]
        result = evaluate(p, y, utility=Utility.one_hot(("a", "b")).with_abstain(0.7))
        rows = [(label, value) for label, value, _ in result.rows()]
        assert rows[:3] == [
            ("accuracy (abstained: wrong)", "25.00%"),
            ("abstained", "50.00%"),
            ("accuracy where answered", "50.00%"),
        ]
        assert (
            "balanced accuracy (abstained: wrong)",
            "16.67%",
        ) in rows  # 1 of 3, and 0 of 1
        assert "macro F1 (abstained: wrong)" in dict(rows)
        shown = metrics_table({"test": result.to_dict()}).columns
        assert list(shown[0].cells)[:3] == [label for label, _ in rows[:3]]
        assert list(shown[1].cells)[:3] == ["0.250", "0.500", "0.500"]
        assert not {"abstained", "accuracy where answered"} & {
            row[0] for row in evaluate(p, y).rows()
        }
        assert "(abstained" not in str(evaluate(p, y))
        assert evaluate(p, y).flat()["abstention_rate"] == 0

    def test_an_action_that_is_worth_the_same_for_every_class_keeps_its_promise(self):
        p = (
            np.random.default_rng(0).dirichlet(np.full(5, 0.5), 400).astype(np.float32)
        )  # rows sum to 1 within 1e-7
        result = evaluate(
            p, p.argmax(axis=1), utility=Utility.one_hot(5).with_abstain(0.7)
        )
        assert result.utility_gap_by_action["abstain"] == 0
        assert [row[1] for row in result.rows() if row[0] == "  action abstain"] == [
            "0.0000"
        ]

    def test_false_head_rate_of_two_classes_is_the_missed_share_of_the_rare_one(self):
        p, classes = (
            [[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.1, 0.9]],
            Classes.from_counts([90, 10]),
        )
        result = evaluate(p, [0, 1, 1, 1, 0], classes=classes, bootstrap=5)
        assert result.false_head_rate == pytest.approx(2 / 3)
        assert math.isnan(result.false_head_rates[0.75])
        assert "false_head_rate" in result.intervals

    def test_utilities_of_any_scale_can_be_read(self):
        for scale, shown in ((1e-9, "2.5e-10"), (1, "0.2500"), (1e12, "2.5e+11")):
            utility = Utility([[0.25 * scale, 0], [0, scale]])
            assert shown in str(evaluate([[1, 0]], [0], utility=utility))

    def test_without_counts_there_is_no_head(self):
        result = evaluate(self.z, self.y, utility=Utility.one_hot(3), logits=True)
        assert result.accuracy_by_region == {}
        assert math.isnan(result.false_head_rate)
        assert "false head rate" not in str(result)

    def test_counts_can_come_late_and_in_another_order(self):
        decider = Decider(Utility.one_hot(["a", "b", "c"]))
        late = evaluate(
            self.z,
            self.y,
            decider,
            logits=True,
            classes=self.classes.in_order(["c", "a", "b"]),
        )
        assert (
            late.false_head_rates
            == evaluate(
                self.z, self.y, classes=self.classes, logits=True
            ).false_head_rates
        )

    def test_predictions_bring_all_they_need(self):
        predictions = Predictions(logits=self.z, targets=self.y, classes=self.classes)
        assert (
            evaluate(predictions).flat()
            == evaluate(self.z, self.y, classes=self.classes, logits=True).flat()
        )

    def test_bootstrap_intervals_cover_and_shrink(self):
        def width(n):
            result = evaluate(
                self.z[:, :n],
                self.y[:n],
                classes=self.classes,
                logits=True,
                bootstrap=200,
            )
            low, high = result.intervals["accuracy"]
            assert low <= result.accuracy <= high
            assert set(result.intervals) >= {
                "accuracy_by_region.tail",
                "false_head_rate",
                "ece",
                "nll",
            }
            return (
                high - low,
                2 * 1.96 * (result.accuracy * (1 - result.accuracy) / n) ** 0.5,
            )

        for n in (400, 4000):
            measured, normal = width(n)
            assert measured == pytest.approx(normal, rel=0.3)

    def test_the_same_seed_gives_the_same_intervals(self):
        median = metrics.register_metric(
            metrics.Metric("median", "median NLL", lambda o: float(np.median(o.nll)))
        )
        runs = [
            evaluate(self.z, self.y, logits=True, bootstrap=20, seed=s).intervals
            for s in (3, 3, 4)
        ]
        del METRICS[median.name]
        assert runs[0] == runs[1] != runs[2]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"uncertainty": "magic"}, "uncertainty 'magic' is unknown"),
            ({"bootstrap": -1}, "bootstrap is -1"),
            ({"groups": [("rare", "a")]}, "group or class 'rare' is unknown"),
            ({"classes": Classes(("x", "y"))}, "3 columns but there are 2 classes"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(InputError, match=message):
            evaluate(self.z, self.y, logits=True, **options)

    def test_evidential_needs_logits(self):
        with pytest.raises(InputError, match="needs logits"):
            evaluate([[0.5, 0.5]], [0], uncertainty="evidential")


def test_the_utility_by_budget_says_which_rule_hands_over():
    """Whatever the rule that is evaluated, and in costs where these were given."""
    p, costs = (
        [[0.6, 0.4], [0.3, 0.7]],
        Utility.from_costs([[0, 2, 1], [5, 0, 1]], actions=["0", "1", "refer"]),
    )
    labels = [
        row[0].strip()
        for row in evaluate(p, [0, 1], Decider(costs, rule="argmax")).rows()
    ]
    assert "by expected cost, at most 0% handed over" in labels


def test_promises_are_in_costs_where_these_were_given():
    """Promised minus realised cost is positive where decisions cost less than
    promised.
    """
    rng = np.random.default_rng(0)
    p = np.tile([0.7, 0.3], (400, 1)) + rng.uniform(-0.05, 0.05, (400, 1)) * [1, -1]
    result = evaluate(
        p,
        (rng.random(400) < 0.1).astype(int),
        Decider(Utility.from_costs([[0, 2], [2, 0]])),
    )
    gap = float(result.to_dict()["utility_gap"])
    assert gap == pytest.approx(0.1 * 2 - 0.3 * 2, abs=0.1)
    shown = {label.strip(): value for label, value, _ in result.rows()}
    assert float(shown["promised minus realised cost"]) == pytest.approx(-gap, abs=1e-3)
    assert f"Promised minus realised cost {-gap:.4f} (" in result.promise
    assert "decisions are worth more than promised" in result.promise


def test_tables_of_two_classes_show_the_rarer_one_and_no_regions():
    rng = np.random.default_rng(0)
    y = (rng.random(400) < 0.2).astype(int)
    p = 1 / (1 + np.exp(-rng.normal(3 * y - 2, 1.0)))
    classes = Classes.from_counts([800, 200], ["good", "bad"])
    found = evaluate(np.column_stack([1 - p, p]), y, classes=classes)
    shown = {label.strip(): value for label, value, _ in found.rows()}
    row = found.per_class()["bad"]
    for name, label in (
        ("recall",) * 2,
        ("precision",) * 2,
        ("specificity",) * 2,
        ("auroc", "AUROC"),
    ):
        assert shown[f"{label} of bad"] == f"{row[name]:.2%}"
    words = "head", "tail", "shot"
    assert not [label for label in shown if any(word in label for word in words)]
    assert not any(word in found.promise for word in words)
    assert found.to_dict()["false_head_rate"] == found.false_head_rate  # for programs
    three = evaluate(
        np.full((3, 3), 1 / 3), [0, 1, 2], classes=Classes.from_counts([9, 5, 1])
    )
    assert "false head rate" in {label for label, *_ in three.rows()}
