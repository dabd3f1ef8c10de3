"""Ctrl-C before a training has begun: one line that says so, no run folder, and what
was there stays.
"""

import numpy as np
import pytest
from PIL import Image

from rfdlc.data import images


@pytest.fixture
def photos(tmp_path):
    for i in range(12):
        place = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), 20 * i, np.uint8)).save(place)
    return tmp_path / "photos"


@pytest.mark.parametrize("words", [(), ("--cv", 3), ("--force",)])
def test_while_images_are_decoded(run, photos, tmp_path, monkeypatch, words):
    def pressed(*_):
        raise KeyboardInterrupt

    kept = tmp_path / "run" / "config.json"
    if "--force" in words:
        kept.parent.mkdir()
        kept.write_text("{}")
    monkeypatch.setattr(images, "attempt", pressed)
    code, out, err = run("train", photos, "--out", tmp_path / "run", *words)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1].startswith(
        "rfdlc: stopped before the training began, nothing was written: "
    )
    assert err.endswith("run the same command\n")
    assert kept.exists() == ("--force" in words)
