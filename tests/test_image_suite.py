"""The sets, rivals and statistics of benchmarks/images.py."""

import argparse
import csv
import pickle
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy import stats

import rfdlc

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def suite(pytestconfig):
    """The modules of the benchmark."""
    names = ("images", "image_drawn", "image_recipes", "image_rivals", "image_scores")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(pytestconfig.rootpath / "benchmarks"))
        modules = {name: import_module(name) for name in (*names, "image_sets")}
        yield SimpleNamespace(
            **{name.removeprefix("image_"): module for name, module in modules.items()}
        )


def colours(suite, counts=(60, 20, 8), side=8):
    """Classes that differ in their colour."""
    rng = np.random.default_rng(0)

    def split(counts):
        labels = np.repeat(np.arange(len(counts)), counts)
        images = rng.integers(0, 120, (len(labels), side, side, 3))
        images[np.arange(len(labels)), :, :, labels] += 100
        return images.astype(np.uint8), labels

    train = split(counts)
    test = split([20] * len(counts))
    held_out = suite.sets.marked(train[1], 0)
    return suite.sets.ImageSet("colours", *train, held_out, *test, True)


# -- sets


@pytest.mark.parametrize("kind", ["letter", "spectrogram", "tissue", "land"])
def test_drawn_images_are_a_function_of_their_seed(suite, kind):
    paint = getattr(suite.drawn, f"paint_{kind}")
    images, labels = suite.drawn.painted(paint, [3, 0, 2], 16, seed=4)
    assert images.shape == (5, 16, 16, 3)
    assert images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [3, 0, 2]
    assert len(np.unique(images.reshape(5, -1), axis=0)) == 5

    again, same = suite.drawn.painted(paint, [3, 0, 2], 16, seed=4, workers=2)
    assert (images == again).all()
    assert (labels == same).all()
    other, _ = suite.drawn.painted(paint, [3, 0, 2], 16, seed=5)
    assert (images != other).any()


def test_every_kind_of_sound_and_land_is_drawn(suite):
    for paint, classes in (
        (suite.drawn.paint_spectrogram, 12),
        (suite.drawn.paint_tissue, len(suite.drawn.TISSUES)),
        (suite.drawn.paint_land, len(suite.drawn.LANDS)),
    ):
        images, _ = suite.drawn.painted(paint, [1] * classes, 16, seed=0)
        assert images.reshape(classes, -1).std(axis=1).min() > 1


def test_a_fifth_of_every_class_is_held_out(suite):
    labels = np.repeat([0, 1, 2, 3], [100, 11, 2, 1])
    mask = suite.sets.marked(labels, 0)
    assert np.bincount(labels[mask], minlength=4).tolist() == [20, 2, 1, 0]
    assert (mask == suite.sets.marked(labels, 0)).all()
    assert (mask != suite.sets.marked(labels, 1)).any()


def test_the_digits_are_disjoint_long_tailed_and_kept(suite, tmp_path):
    digits = suite.sets.load("digits", tmp_path)
    assert digits.side == 8
    assert digits.counts.tolist() == suite.sets.profile(110, 10, 20)
    assert np.bincount(digits.test_y).tolist() == [60] * 10
    assert digits.balanced_test
    assert not digits.flips

    flat = {image.tobytes() for image in digits.train_x}
    assert not flat & {image.tobytes() for image in digits.test_x}
    kept = (tmp_path / "image-sets" / "digits.npz").stat().st_mtime_ns
    again = suite.sets.load("digits", tmp_path)
    assert (again.train_x == digits.train_x).all()
    assert (tmp_path / "image-sets" / "digits.npz").stat().st_mtime_ns == kept


def test_suites_have_enough_families_of_sets(suite):
    for name, least in (("cpu", 8), ("gpu", 6)):
        families = {suite.sets.family(key) for key in suite.sets.suite(name)}
        assert len(families) >= least
    assert suite.sets.family("cifar10-few") == suite.sets.family("cifar100-lt")
    assert suite.sets.family("sounds-32") == "sounds"


def test_choices_never_see_the_test_images(suite):
    images = colours(suite)
    chosen = images.for_choices()
    assert (chosen.test_x == images.train_x[images.held_out]).all()
    assert (chosen.train_x == images.train_x[~images.held_out]).all()
    assert len(chosen.held_out) == len(chosen.train_y)
    assert chosen.counts.tolist() == [48, 16, 6]
    seen = {image.tobytes() for image in chosen.train_x}
    assert not seen & {image.tobytes() for image in (*chosen.test_x, *images.test_x)}


def test_cifar_pickles_are_read_as_rows_columns_and_colours(suite, tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    flat = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    for name, rows in (("train", slice(3)), ("test", slice(3, 4))):
        batch = {"data": flat[rows], "fine_labels": [2, 0, 1, 1][rows]}
        (folder / name).write_bytes(pickle.dumps(batch))
    (train_x, train_y), (test_x, test_y) = suite.sets.cifar100(tmp_path)
    assert train_y.tolist() == [2, 0, 1]
    assert test_y.tolist() == [1]
    assert train_x[1, 5, 7, 2] == flat[1, 2 * 1024 + 5 * 32 + 7]
    assert test_x.shape == (1, 32, 32, 3)


def test_photographs_become_squares_of_their_middle(suite, tmp_path):
    for split in ("train", "test"):
        for label, name in enumerate("abcd"):
            folder = tmp_path / "zoo" / split / name
            folder.mkdir(parents=True)
            picture = np.full((20, 60, 3), 250, np.uint8)
            picture[:, 20:40] = 50 * label
            Image.fromarray(picture).save(folder / "1.png")
    (images, labels), (test_x, _) = suite.sets.photographs(tmp_path, "zoo", 16, every=2)
    assert labels.tolist() == [0, 1]
    assert images.shape == test_x.shape == (2, 16, 16, 3)
    assert [set(image.ravel().tolist()) for image in images] == [{0}, {100}]


def test_folders_without_a_test_split_are_split_once(suite, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("glass", "paper"):
        (tmp_path / "trashnet" / name).mkdir(parents=True)
        for number in range(60):
            picture = rng.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(picture).save(
                tmp_path / "trashnet" / name / f"{number}.png"
            )
    (train_x, train_y), (test_x, test_y) = suite.sets.trash(tmp_path, 64)
    assert np.bincount(train_y).tolist() == [35, 1]
    assert np.bincount(test_y).tolist() == [25, 25]
    seen = {image.tobytes() for image in train_x}
    assert not seen & {image.tobytes() for image in test_x}
    (again, _), _ = suite.sets.trash(tmp_path, 64)
    assert (again == train_x).all()


def test_sets_are_written_as_folders_that_rfdlc_loads(suite, tmp_path):
    images = colours(suite, counts=(6, 4, 3))
    suite.sets.write_folders(images, tmp_path)
    data = rfdlc.load(tmp_path)
    assert dict(zip(data.classes.names, data.classes.counts, strict=True)) == {
        "000": 6,
        "001": 4,
        "002": 3,
    }


def test_packed_sets_keep_labels_and_nearly_the_pixels(suite, tmp_path):
    images = colours(suite)
    smooth = np.repeat(images.train_x[:, :1, :1], 8, 1).repeat(8, 2)
    tests = np.repeat(images.test_x[:, :1, :1], 8, 1).repeat(8, 2)
    images = suite.sets.ImageSet(
        "digits", smooth, images.train_y, images.held_out, tests, images.test_y, True
    )
    suite.recipes.pack(images, tmp_path / "digits.npz", quality=95)
    packed = suite.recipes.unpack("digits", tmp_path / "digits.npz")
    assert (packed.train_y == images.train_y).all()
    assert (packed.held_out == images.held_out).all()
    assert (packed.test_y == images.test_y).all()
    assert not packed.flips
    gap = packed.train_x.astype(int) - images.train_x
    assert np.abs(gap).max() < 10


# -- rivals


class Clock:
    """One second later at every look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.mark.parametrize("method", ["cross-entropy", "sampler", "logit-adjustment"])
def test_rivals_learn_colours_before_their_deadline(suite, method):
    images = colours(suite)
    clock = Clock()
    trained = suite.rivals.train(images, method, 25, seed=0, clock=clock)

    # 24 steps of 64 from 70 images, then two looks around the test images
    assert trained.epochs == pytest.approx(24 * 64 / 70)
    assert clock.now == 1 + 25 + 2
    assert trained.held_out.shape == (int(images.held_out.sum()), 3)

    scores, _ = suite.scores.calibrated(
        trained.held_out,
        images.train_y[images.held_out],
        trained.test,
        images.counts,
        uniform=method != "cross-entropy",
    )
    assert (scores.argmax(axis=1) == images.test_y).mean() > 0.9


def test_a_training_without_a_step_is_no_rival(suite):
    with pytest.raises(SystemExit, match="no step within"):
        suite.rivals.train(colours(suite), "sampler", 0.5, seed=0, clock=Clock())


def test_the_rate_rises_then_falls_to_zero_at_the_deadline(suite):
    rates = [suite.rivals.rate_at(step / 100) for step in range(101)]
    assert rates[0] == 0.01
    assert rates[5] == 1
    assert rates[-1] == pytest.approx(0)
    assert (np.diff(rates[5:]) < 0).all()


def test_batches_show_each_image_once_or_classes_alike(suite):
    labels = np.repeat([0, 1], [90, 10])
    rng = np.random.default_rng(0)
    stream = suite.rivals.batches(labels, 20, False, rng)
    epoch = np.concatenate([next(stream) for _ in range(5)])
    assert sorted(epoch) == list(range(100))

    stream = suite.rivals.batches(labels, 100, True, rng)
    drawn = np.concatenate([labels[next(stream)] for _ in range(50)])
    assert drawn.mean() == pytest.approx(0.5, abs=0.03)


def test_crops_are_those_of_a_reflected_image(suite):
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    torch.manual_seed(0)
    pixels = torch.from_numpy(image[None])
    crops = suite.rivals.cropped(pixels, torch.zeros(40).long(), True)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect") / 255
    candidates = [
        turned[top : top + 16, left : left + 16]
        for turned in (padded, padded[:, ::-1])
        for top in range(5)
        for left in range(5)
    ]
    for crop in crops.numpy().transpose(0, 2, 3, 1):
        dark = crop < 0.999  # brighter pixels are cut off at 1
        ratios = [
            (crop[dark] / np.maximum(candidate[dark], 1e-6)) for candidate in candidates
        ]
        assert min(np.nanstd(ratio[ratio > 0]) for ratio in ratios) < 1e-3


def test_networks_keep_or_shrink_images_as_they_say(suite):
    for side, shrink, expected in ((8, 1, 8), (64, 2, 32), (96, 4, 24), (224, 8, 28)):
        network = suite.rivals.residual(5, (4, 8), 1, shrink)
        seen = []
        first = next(m for m in network if type(m).__name__ == "Block")
        first.register_forward_hook(
            lambda *parts, seen=seen: seen.append(parts[2].shape)
        )
        assert network(torch.zeros(2, 3, side, side)).shape == (2, 5)
        assert tuple(seen[0][2:]) == (expected, expected)
    assert suite.rivals.four_convolutions(7, 8)(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


@pytest.mark.parametrize("sgd", [False, True])
def test_the_captured_optimiser_steps_as_that_of_torch(suite, sgd):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 4)), torch.nn.Parameter(torch.randn(4))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimiser = suite.recipes.Optimiser(ours, sgd)
    rate = optimiser.largest_rate
    optimiser.rate.fill_(rate)
    if sgd:
        optimiser.decayed = [torch.zeros(1)]  # torch decays through the momentum
        reference = torch.optim.SGD(theirs, rate, momentum=0.9, nesterov=True)
    else:
        groups = [
            {"params": theirs[:1], "weight_decay": optimiser.weight_decay},
            {"params": theirs[1:], "weight_decay": 0.0},
        ]
        reference = torch.optim.AdamW(groups, rate)
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimiser.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_strong_changes_stay_within_the_range_of_images(suite):
    torch.manual_seed(0)
    images = torch.rand(16, 3, 12, 12)
    changed = suite.recipes.strongly_changed(images)
    assert changed.shape == images.shape
    assert changed.min() >= 0
    assert changed.max() <= 1
    differ = (changed - images).abs().amax((1, 2, 3)) > 0.01
    assert differ.float().mean() > 0.8


# -- statistics


def posterior(seed, samples, classes=4):
    """Scores, and labels that are drawn from their softmax."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 2, (samples, classes))
    probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    labels = (probabilities.cumsum(1) < rng.uniform(size=(samples, 1))).sum(1)
    return scores, probabilities, labels


def test_calibration_finds_the_temperature_and_the_prior(suite):
    counts = np.array([800, 100, 60, 40])
    log_prior = np.log(counts / 1000)
    scores, _, labels = posterior(0, 4000)
    trained, temperature = suite.scores.calibrated(
        2.5 * scores, labels, 2.5 * scores, counts, uniform=False
    )
    assert temperature == pytest.approx(2.5, rel=0.05)
    assert np.allclose(trained, 2.5 / temperature * scores - log_prior)

    adjusted, temperature = suite.scores.calibrated(
        2.5 * (scores - log_prior), labels, scores, counts, uniform=True
    )
    assert temperature == pytest.approx(2.5, rel=0.05)
    assert np.allclose(adjusted, scores / temperature)


def test_the_calibration_error_is_that_of_a_naive_loop(suite):
    _, probabilities, labels = posterior(1, 500)
    error = 0.0
    for low in range(15):
        rows = [
            i for i, p in enumerate(probabilities) if min(int(p.max() * 15), 14) == low
        ]
        right = sum(probabilities[i].argmax() == labels[i] for i in rows)
        error += abs(sum(probabilities[i].max() for i in rows) - right) / 500
    measured = suite.scores.expected_calibration_error(probabilities, labels)
    assert measured == pytest.approx(error)


def test_calibrated_probabilities_are_within_their_range(suite):
    inside = 0
    for seed in range(40):
        scores, probabilities, labels = posterior(seed, 400)
        low, high = suite.scores.calibrated_range(probabilities)
        error = suite.scores.expected_calibration_error(probabilities, labels)
        inside += low <= error <= high
        sharp = np.exp(suite.scores.log_softmax(3 * scores))
        _, high = suite.scores.calibrated_range(sharp)
        assert suite.scores.expected_calibration_error(sharp, labels) > high
    assert inside >= 35


def test_the_utility_is_the_tail_sensitive_one(suite):
    counts = [50, 7, 20, 7]
    classes = rfdlc.Classes([*"abcd"], counts)
    expected = rfdlc.Utility.tail_sensitive(classes).matrix
    assert (suite.scores.tail_sensitive(np.array(counts)) == expected).all()


@pytest.mark.parametrize("balanced", [True, False])
def test_metrics_are_those_of_naive_loops(suite, balanced):
    counts = np.array([70, 20, 10])
    prior = counts / 100
    scores, _, labels = posterior(3, 300, classes=3)
    judged = suite.scores.Judged(counts, labels, balanced)
    metrics = judged.scores(scores)

    uniform = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    trained = uniform * prior / (uniform * prior).sum(1, keepdims=True)

    def recall(probabilities, label):
        rows = np.flatnonzero(labels == label)
        return np.mean([probabilities[i].argmax() == label for i in rows])

    recalls = [recall(uniform, label) for label in range(3)]
    accuracy = sum(prior[label] * recall(trained, label) for label in range(3))
    assert metrics["accuracy"] == pytest.approx(accuracy)
    assert metrics["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    assert [metrics[k] for k in ("head", "medium", "tail")] == pytest.approx(recalls)

    served = uniform if balanced else trained
    matrix = [[1, 0, 0], [-1, 1, 0], [-1, -1, 1]]
    worth = 0.0
    for row, label in zip(served, labels, strict=True):
        gains = [sum(row[y] * matrix[y][d] for y in range(3)) for d in range(3)]
        worth += matrix[label][int(np.argmax(gains))] / 300
    assert metrics["utility"] == pytest.approx(worth)
    loss = -np.mean(np.log(served[np.arange(300), labels]))
    assert metrics["nll"] == pytest.approx(loss)


def test_differences_are_paired_over_sets_after_seeds(suite):
    rng = np.random.default_rng(0)
    rows = []
    means = {}
    for name in "abcde":
        for method in ("ours", "plain"):
            values = rng.uniform(size=3)
            means[name, method] = values.mean()
            rows += [{"set": name, "method": method, "ece": str(v)} for v in values]
    rows.append({"set": "f", "method": "ours", "ece": "0.5"})  # without a partner
    gains = [means[name, "ours"] - means[name, "plain"] for name in "abcde"]
    expected = stats.ttest_1samp(gains, 0).confidence_interval(0.95)

    difference = suite.scores.paired(rows, "ece", "ours", "plain")
    assert difference.count == 5
    assert difference.mean == pytest.approx(np.mean(gains))
    assert (difference.low, difference.high) == pytest.approx(tuple(expected))
    assert difference.better == sum(gain < 0 for gain in gains)
    merged = suite.scores.paired(rows, "ece", "ours", "plain", lambda n: min(n, "c"))
    units = [gains[0], gains[1], np.mean(gains[2:])]
    expected = stats.ttest_1samp(units, 0).confidence_interval(0.95)
    assert (merged.low, merged.high) == pytest.approx(tuple(expected))
    with pytest.raises(ValueError, match="no set has both 'ours' and 'sampler'"):
        suite.scores.paired(rows, "ece", "ours", "sampler")


# -- the command


def test_probabilities_are_read_by_the_number_of_the_class(suite, tmp_path):
    path = tmp_path / "probabilities.csv"
    path.write_text("2,0,1,action\n0.1,0,0.9,1\n0.5,0.25,0.25,2\n")
    values = suite.images.probabilities(path, 3)
    assert values.tolist() == [[1e-12, 0.9, 0.1], [0.25, 0.25, 0.5]]


def test_measuring_goes_on_where_it_was_interrupted(suite, tmp_path, monkeypatch):
    metrics = dict.fromkeys(suite.images.METRICS, 0.5)
    extra = {"seconds_taken": 2.0, "ece_low": 0, "ece_high": 0.6}
    calls = []

    def measured(images, method, seconds, seed, settings):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append((images.name, len(images.test_y), method, seed))
        return metrics | extra

    monkeypatch.setattr(suite.images, "measured", measured)
    options = argparse.Namespace(
        sets=["digits"],
        suite=None,
        data=tmp_path,
        methods=["cross-entropy", "rfdlc"],
        seeds=[0, 1],
        seconds=2.0,
        set=["epochs=2"],
        choose=True,
        out=tmp_path / "images.csv",
        commit="abc",
        reference=None,
    )
    with pytest.raises(KeyboardInterrupt):
        suite.images.measure(options)
    assert len(suite.images.read(options.out)) == 3
    first = list(calls)
    calls.clear()
    suite.images.measure(options)
    assert not {call[2:] for call in first} & {call[2:] for call in calls}

    with options.out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("cross-entropy", "0"),
        ("rfdlc epochs=2", "0"),
        ("cross-entropy", "1"),
        ("rfdlc epochs=2", "1"),
    ]
    assert {row["split"] for row in rows} == {"held-out"}
    digits = suite.sets.load("digits", tmp_path)
    assert first[0][1] == digits.held_out.sum()

    assert suite.images.selected(rows, options) == rows
    options.choose = False
    assert suite.images.selected(rows, options) == []
    text = "\n".join(suite.images.over_time(rows))
    assert "cross-entropy: seconds over those asked, median +0%, most +0%" in text
    assert "ECE above its 95% range in 0 of 2" in "\n".join(suite.images.outside(rows))
    table = "\n".join(suite.images.lines(rows, "cross-entropy"))
    assert "rfdlc epochs=2, utility" in table
