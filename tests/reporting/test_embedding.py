"""Quantised probabilities are near the true ones, packed arrays come back, sub-samples
keep the shares of classes.
"""

import base64
import zlib

import numpy as np

from rfdlc.reporting.curves import stratified
from rfdlc.reporting.report import LEVELS, STEP, pack, quantise

from .conftest import dequantise


def random_probabilities(samples, classes, seed=0):
    scores = np.random.default_rng(seed).normal(scale=3, size=(samples, classes))
    p = np.exp(scores)
    return p / p.sum(axis=1, keepdims=True)


def test_every_probability_keeps_its_relative_precision():
    p = random_probabilities(200, 50)
    back = np.exp(-STEP * quantise(p).astype(float))
    assert np.abs(back / p - 1).max() <= STEP / 2 * 1.01 < 2.2e-4


def test_certainty_and_impossibility_are_kept():
    assert quantise(np.array([[1.0, 0.0]])).tolist() == [[0, LEVELS]]
    assert dequantise(np.array([[0, LEVELS]], dtype=np.uint16))[0, 1] < 1e-11


def test_dequantised_rows_sum_to_one():
    assert np.allclose(dequantise(quantise(random_probabilities(20, 7))).sum(axis=1), 1)


def test_packed_bytes_lie_in_planes():
    array = np.array([[1, 2], [258, 65535]], dtype=np.uint16)
    planes = zlib.decompress(base64.b64decode(pack(array)))
    assert list(planes) == [1, 2, 2, 255, 0, 0, 1, 255]


def test_subsample_keeps_the_share_of_every_class():
    targets = np.repeat(np.arange(4), [4000, 2000, 300, 100])
    rows = stratified(targets, 640, seed=3)
    assert len(np.unique(rows)) == 640
    assert (np.abs(np.bincount(targets[rows]) - [400, 200, 30, 10]) <= 1).all()


def test_subsample_is_seeded_and_sorted_and_takes_all_of_few():
    targets = np.random.default_rng(0).integers(0, 5, 1000)
    assert (stratified(targets, 100, seed=1) == stratified(targets, 100, seed=1)).all()
    assert (stratified(targets, 100, seed=1) != stratified(targets, 100, seed=2)).any()
    assert (np.diff(stratified(targets, 100, seed=1)) > 0).all()
    assert stratified(targets, 2000, seed=1).tolist() == list(range(1000))
