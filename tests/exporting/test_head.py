"""DecisionHead is Decider's twin: equal on random scores, whatever was fitted."""

import numpy as np
import pytest
import torch
from PIL import Image

import rfdlc
from rfdlc.data.images import Resizing, fitted, planes
from rfdlc.exporting.graph import DecisionHead, as_squares
from rfdlc.probabilities.calibrators import Temperature
from rfdlc.probabilities.scores import softmax
from rfdlc.probabilities.uncertainty import entropy, mutual_information

CLASSES = rfdlc.Classes(("a", "b", "c", "d"), (40, 20, 9, 3))
RESIZINGS = [
    Resizing(),
    Resizing(centre=0.875),
    Resizing("pad"),
    Resizing("stretch"),
    Resizing("crop", "bicubic"),
]
RESIZINGS.append(Resizing("pad", "bicubic"))


def scores(particles, samples=500, seed=0):
    return (
        np.random.default_rng(seed)
        .normal(0, 3, (particles, samples, 4))
        .astype(np.float32)
    )


def head_of(decider, logits):
    return [
        output.numpy()
        for output in DecisionHead(decider, len(logits))(torch.from_numpy(logits))
    ]


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("combine", ["mean-probabilities", "mean-logits"])
@pytest.mark.parametrize(
    "calibration",
    [None, "temperature", "power-temperature", "bias-corrected-temperature"],
)
@pytest.mark.parametrize("target", [None, [0.1, 0.2, 0.3, 0.4]])
def test_equal_to_the_decider(particles, combine, calibration, target):
    utility = rfdlc.Utility.tail_sensitive(CLASSES).with_abstain(0.3)
    decider = rfdlc.Decider(
        utility,
        combine=combine,
        calibration=calibration,
        train_prior="train",
        target_prior=target,
    )
    labels = scores(1, seed=2)[0].argmax(axis=1) * np.random.default_rng(1).integers(
        0, 2, 500
    )  # half of them right
    if calibration:
        decider = decider.fit(scores(particles, seed=2), labels, logits=True)
    logits = scores(particles)
    probabilities, expected, action, uncertainty, disagreement = head_of(
        decider, logits
    )
    reference = np.asarray(decider.probabilities(logits, logits=True))
    np.testing.assert_allclose(probabilities, reference, atol=2e-6)
    np.testing.assert_allclose(
        expected,
        decider.utility.gains(decider.probabilities(logits, logits=True)),
        atol=5e-6,
    )
    assert (action == decider.decide(logits, logits=True)).all()
    np.testing.assert_allclose(
        uncertainty, entropy(reference, normalised=True), atol=5e-6
    )
    np.testing.assert_allclose(
        disagreement, mutual_information(softmax(logits)), atol=5e-6
    )


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("combine", ["mean-probabilities", "mean-logits"])
@pytest.mark.parametrize(("scale", "temperature"), [(100, 20.0), (1000, 200.0)])
def test_very_sure_particles(particles, combine, scale, temperature):
    """Logits so far apart that probabilities are 0 in 32 bits, and a temperature that
    brings them near again.
    """
    decider = rfdlc.Decider(
        rfdlc.Utility.one_hot(CLASSES),
        combine=combine,
        calibrator=Temperature(temperature),
    )
    logits = scale * scores(particles)
    reference = decider.probabilities(logits, logits=True)
    np.testing.assert_allclose(head_of(decider, logits)[0], reference, atol=1e-5)


def test_weighted_particles():
    decider = rfdlc.Decider(
        rfdlc.Utility.one_hot(CLASSES), weights=[1, 2, 5], calibration=None
    )
    logits = scores(3)
    np.testing.assert_allclose(
        head_of(decider, logits)[0],
        decider.probabilities(logits, logits=True),
        atol=1e-6,
    )


def test_a_tie_goes_to_the_first_action():
    decider = rfdlc.Decider(
        rfdlc.Utility([[1, 1, 0]] * 4, CLASSES, ["x", "y", "z"]), calibration=None
    )
    assert (head_of(decider, scores(1))[2] == 0).all()


def test_other_rules_are_refused():
    decider = rfdlc.Decider(rfdlc.Utility.one_hot(CLASSES), rule="argmax")
    with pytest.raises(rfdlc.InputError, match="one-hot"):
        DecisionHead(decider, 1)


@pytest.mark.parametrize(
    "shape", [(3, 40, 40), (3, 31, 57), (1, 64, 20), (3, 5, 7), (1, 8, 8)]
)
@pytest.mark.parametrize("resizing", RESIZINGS, ids=str)
def test_resize_is_pillows(shape, resizing):
    images = np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8)
    ours = as_squares(torch.from_numpy(images).float(), 8, resizing).numpy()
    difference = np.abs(ours - _by_pillow(images, resizing))
    assert (
        difference.max() <= 1
    )  # a level, where pillow's fixed-point numbers round a tie the other way
    assert (difference > 0).mean() < 0.25


def _by_pillow(images, resizing):
    pictures = [
        Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
        for image in images
    ]
    resizing = Resizing() if images.shape[2:] == (8, 8) else resizing  # samples already
    return np.stack(
        [planes(fitted(picture, 8, images.shape[1], resizing)) for picture in pictures]
    )


def test_a_forbidden_action_does_not_make_ties_of_all_others():
    """What must never happen is worth -1e6: that must not blur what the other actions
    are worth.
    """
    matrix = np.eye(4)
    matrix[3, 0] = -1e6
    logits = scores(1) - np.array([0, 0, 0, 40], dtype=np.float32)
    decider = rfdlc.Decider(rfdlc.Utility(matrix, list("abcd")), calibration=None)
    action = head_of(decider, logits)[2]
    np.testing.assert_array_equal(action, decider.decide(logits, logits=True))
    assert len(set(action.tolist())) == 3
