"""The paper's values, against constants typed by hand from its tables."""

import math

import pytest

from paper.published import published, published_values

TYPED = [
    ("fhr", "cifar10-lt", "RF-DLC", "fhr25", 4.99, 0.32),
    ("fhr", "cifar100-lt", "CE", "fhr", 69.95, 1.40),
    ("fhr", "cifar100-lt", "RF-DLC", "fhr75", 49.51, 1.45),
    ("fhr", "imagenet-lt", "TLC", "fhr50", 11.49, 0.13),
    ("class-sensitive", "cifar10-lt", "bird-plane", "rate_utility", 3.80, None),
    ("class-sensitive", "cifar10-lt", "vehicle-mammal", "rate_change", -75.5, None),
    ("accuracy-tail", "imagenet-lt", "LA", "acc", 55.11, None),
    ("accuracy", "imagenet-lt", "LA", "acc", 51.11, None),
    ("accuracy", "cifar100-lt", "RF-DLC", "acc", 50.24, 0.70),
    ("accuracy", "inaturalist18", "RIDE", "head", 76.71, None),
    ("uncertainty", "cifar100-lt", "Bayesian", "ece", 10.35, 0.28),
    ("uncertainty-regions", "cifar100-lt", "Evidential", "auc_tail", 67.63, None),
    ("dermamnist", "dermamnist", "RF-DLC", "fhr75", 30.77, None),
    ("utility", "cifar100-lt", "tail-sensitive", "acc", 49.89, 0.19),
    ("weights", "cifar100-lt", "sqrt", "acc", 47.03, 0.30),
    ("repulsion", "cifar100-lt", "5e-3", "auc", 81.80, None),
    ("ensembles", "cifar100-lt", "3 x CB Loss", "fhr50", 45.41, None),
    ("cost", "cifar100-lt", "RF-DLC", "parameters", 1408784, None),
    ("cost-sensitive", "cifar100-lt", "Reweighting + Elkan", "fhr75", 65.36, None),
    ("utility-values", "cifar100-lt", "-0.7", "acc", 49.32, None),
    ("inference", "cifar100-lt", "LDAM + Eq. 12", "fhr", 40.90, None),
    ("settings", "all", "ImageNet-LT", "alpha", 50, None),
]


@pytest.mark.parametrize(
    ("table", "data", "row", "metric", "value", "deviation"), TYPED
)
def test_values_are_as_printed(table, data, row, metric, value, deviation):
    found = published(table, data, row, metric)
    assert (found.value, found.deviation) == (value, deviation)


def test_every_table_is_there():
    assert (
        len({value.label for value in published_values().values()}) == 16
    )  # of the LaTeX source
    assert len(published_values()) == 572


def test_empty_cells_have_no_figure_and_copied_ones_say_so():
    assert published("accuracy", "cifar10-lt", "LA", "tail") is None
    assert published("accuracy", "cifar10-lt", "LA", "acc").copied
    assert not published("accuracy", "cifar10-lt", "CE", "acc").copied


def test_a_value_that_two_tables_print_has_one_deviation():
    assert (
        published_values()["inference", "cifar100-lt", "RF-DLC", "fhr"].deviation
        is None
    )  # as printed
    assert published("inference", "cifar100-lt", "RF-DLC", "fhr").deviation == 0.78
    assert published("ensembles", "cifar100-lt", "RF-DLC", "tail").deviation == 1.49
    assert (
        published("cost-sensitive", "cifar100-lt", "RF-DLC", "fhr").deviation is None
    )  # 32.31: of another run


def test_averages_are_those_of_their_parts():
    for (table, data, row, metric), value in published_values().items():
        if metric == "fhr":
            parts = [
                published(table, data, row, f"fhr{share}").value
                for share in (25, 50, 75)
            ]
            assert value.value == pytest.approx(sum(parts) / 3, abs=0.02), (
                table,
                data,
                row,
            )


def test_the_papers_last_class_had_six_images():
    """Its weight values are those of 500 and 6 images: the data were not at
    factor 100.
    """
    forms = {
        "linear": lambda n: n,
        "effective number": lambda n: (1 - 0.9999**n) / 1e-4,
        "sqrt": math.sqrt,
        "log": math.log,
    }
    for row, f in forms.items():
        last = published("weights", "cifar100-lt", row, "last_class").value
        assert last == pytest.approx(1 / f(6), rel=2e-3), row
