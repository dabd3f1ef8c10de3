"""Settings: presets, overrides, errors that help."""

from importlib.resources import files

import pytest

from rfdlc.errors import InputError
from rfdlc.probabilities.classes import Classes
from rfdlc.training.config import TrainConfig, parse_pairs, preset
from rfdlc.training.methods import METHODS, carried_prior, resolve

PRESETS = sorted(
    file.name.removesuffix(".toml")
    for file in (files("rfdlc.training") / "presets").iterdir()
)


@pytest.mark.parametrize("data", PRESETS)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_preset_and_method_resolve(data, method):
    _, settings = resolve(method, data, {})
    assert (
        TrainConfig(**settings.to_dict()) == settings
    )  # what config.json holds gives the same again


def test_the_paper_for_cifar100():
    _, settings = resolve("rf-dlc-paper", "cifar100-lt", {})
    assert (
        settings.epochs,
        settings.batch_size,
        settings.learning_rate,
        settings.weight_decay,
    ) == (
        200,
        128,
        0.1,
        5e-4,
    )
    assert (
        settings.particles,
        settings.shared_stages,
        settings.head_scale,
        settings.margin,
    ) == (3, 1, 30, 0.5)
    assert (settings.deferred_epoch, settings.alpha, settings.repulsion_tau) == (
        160,
        0.3,
        40,
    )
    assert resolve("rf-dlc-paper", "cifar10-lt", {})[1].alpha == 0.002


@pytest.mark.parametrize(
    "name", ["imagenet-lt", "ImageNet_LT", "iNaturalist18", "iNaturalist2018"]
)
def test_lists_have_their_presets_by_the_names_they_come_with(name):
    settings = resolve("rf-dlc", name, {}, "images")[1]
    assert settings.backbone.startswith("resnet50")
    assert settings.compile


def test_later_wins():
    assert (
        resolve("ce", "digits-lt", {})[1].epochs == preset("digits-lt", "ce")["epochs"]
    )
    assert resolve("ce", "digits-lt", {"epochs": "7"})[1].epochs == 7
    assert resolve("ce", "unheard-of", {})[1].epochs == TrainConfig().epochs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epohcs": 3}, "did you mean 'epochs'"),
        (
            {"test_fraction": 3},
            (
                "an option of the data and not a setting: write data.test_fraction=...,"
                " in Python"
            ),
        ),
        (
            {"epochs": "many"},
            "epochs='many' is not possible: input should be a valid integer",
        ),
        (
            {"epochs": 2.5},
            "epochs=2.5 is not possible: input should be a valid integer",
        ),
        ({"epochs": float("inf")}, "input should be a finite number"),
        (
            {"epochs": 0},
            "epochs=0 is not possible: input should be greater than or equal to 1",
        ),
        ({"momentum": 1.5}, "input should be less than or equal to 1"),
        ({"learning_rate": "nan"}, "input should be a finite number"),
        ({"head": "cosin"}, "did you mean 'cosine'"),
        ({"refit": "perhaps"}, "input should be a valid boolean"),
        ({"prior_tau": "0,1"}, "prior_tau has 2 values for 1 particles"),
        ({"widths": "0"}, "widths=.0. is not possible"),
        (
            {"milestones": "0.5,x"},
            "milestones='x' is not possible: input should be a valid number",
        ),
        ({"mixup": 0.4, "cutmix": 1.0}, "cannot be used together"),
        ({"compile": True, "checkpoint_activations": True}, "cannot be used together"),
        ({"accumulate": 0}, "accumulate=0 is not possible"),
        ({"batch_norm": "synch"}, "did you mean 'sync'"),
    ],
)
def test_wrong_settings_say_what_is_right(given, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(**given)


def test_a_small_cnn_that_is_asked_for_trains_as_one_that_a_budget_chooses():
    small = {
        "optimiser": "adamw",
        "learning_rate": 3e-3,
        "weight_decay": 1e-2,
        "warmup": 1,
        "mixup": 0.0,
    }
    _, found = resolve("rf-dlc", "", {"backbone": "cnn"}, "images", 500)
    assert {name: getattr(found, name) for name in small} == small
    _, kept = resolve(
        "rf-dlc", "", {"backbone": "cnn", "learning_rate": 0.05}, "images", 500
    )
    assert (kept.optimiser, kept.learning_rate, kept.mixup) == ("sgd", 0.05, 0.0)
    assert (
        resolve("rf-dlc", "", {"backbone": "cnn", "mixup": 0.2}, "images", 500)[1].mixup
        == 0.2
    )
    for method in ("mixup", "balpoe"):  # which are what they are by it
        assert (
            resolve(method, "", {"backbone": "cnn"})[1].mixup
            == resolve(method, "", {})[1].mixup
            > 0
        )


@pytest.mark.parametrize(
    ("epochs", "warmup"), [(1, 1), (3, 1), (6, 2), (14, 5), (15, 5), (100, 5)]
)
def test_warmup_takes_a_third_of_the_epochs_at_most_unless_it_is_set(epochs, warmup):
    assert resolve("ce", "", {"epochs": epochs})[1].warmup == warmup
    assert resolve("ce", "", {"epochs": epochs, "warmup": 5})[1].warmup == 5
    assert resolve("balpoe", "cifar100-lt", {"epochs": epochs}, "images")[
        1
    ].warmup <= max(warmup, epochs / 3 + 1)


@pytest.mark.parametrize("name", PRESETS)
def test_the_warmup_of_a_preset_is_as_its_file_says(name):
    for method in METHODS:
        settings = resolve(
            method, "", {"preset": name, "backbone": "mlp"}, samples=500
        )[1]
        assert settings.warmup == preset(name, method)["warmup"], method


def test_unknown_method():
    with pytest.raises(InputError, match="did you mean 'rf-dlc'"):
        resolve("rf-dcl", "digits-lt", {})


def test_pairs():
    assert parse_pairs(["batch-size=3", "utility=a=b.csv"]) == {
        "batch_size": "3",
        "utility": "a=b.csv",
    }
    with pytest.raises(InputError, match="expected key=value"):
        parse_pairs(["fast"])
    assert TrainConfig(refit="yes", keep="0.5;0.8", widths="64").widths == (64,)


def test_every_setting_is_described():
    assert all(text for _, text in TrainConfig.describe().values())


def test_the_prior_that_probabilities_carry():
    classes = Classes.from_counts([80, 15, 5])

    def carried(**settings):
        return carried_prior(TrainConfig(**settings), classes).tolist()

    third, train = [1 / 3] * 3, [0.8, 0.15, 0.05]
    assert carried() == pytest.approx(train)
    assert carried(weights="linear") == pytest.approx(third)
    assert carried(sampling="balanced") == pytest.approx(third)
    assert carried(prior_tau=(1.0,)) == pytest.approx(third)
    assert carried(prior_tau=(0.0, 1.0, 2.0), particles=3) == pytest.approx(third)
    roots = [n**0.5 for n in (80, 15, 5)]
    assert carried(weights="sqrt") == pytest.approx(
        [root / sum(roots) for root in roots]
    )
    for aimed in ({"weights": "linear"}, {"prior_tau": (1.0,)}):
        assert carried(trained_prior=(0.5, 0.25, 0.25), **aimed) == pytest.approx(
            [0.5, 0.25, 0.25]
        )
    with pytest.raises(InputError, match="trained_prior has 2 numbers: expected 3"):
        carried(trained_prior=(0.5, 0.5), weights="linear")


@pytest.mark.parametrize("name", ["features", "table", "finetune", "images"])
def test_data_may_have_the_name_of_a_general_preset(name):
    assert (
        resolve("rf-dlc", name, {}, "images")[1]
        == resolve("rf-dlc", "photos", {}, "images")[1]
    )


@pytest.mark.parametrize(
    ("samples", "batch"),
    [(0, 128), (5, 32), (180, 32), (600, 64), (1023, 64), (1024, 128), (90_000, 128)],
)
def test_few_images_train_in_small_batches(samples, batch):
    assert resolve("rf-dlc", "shapes", {}, "images", samples)[1].batch_size == batch
    assert (
        resolve("rf-dlc", "shapes", {"batch_size": 50}, "images", samples)[1].batch_size
        == 50
    )
