"""A small long-tailed problem with several particles, and a browser where there
is one.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rfdlc import Classes, Decider, Predictions, Utility
from rfdlc.reporting.report import STEP

NO_BROWSER = (
    "no Chromium with its driver: on Debian run apt-get install chromium"
    " chromium-driver (make browser does)"
)


def make_predictions(
    samples=400,
    counts=(90, 40, 12, 12, 3),
    particles=2,
    seed=0,
    names=None,
    groups=None,
    ids=True,
):
    """Logits that know the truth with some noise, so that rare classes are confused
    with frequent ones.
    """
    rng = np.random.default_rng(seed)
    classes = Classes.from_counts(
        list(counts), names or [f"c{i}" for i in range(len(counts))], groups
    )
    targets = rng.integers(0, len(counts), samples)
    logits = rng.normal(size=(particles, samples, len(counts))) + 0.5 * np.log(
        np.array(counts) + 1.0
    )
    logits[:, np.arange(samples), targets] += 2
    names_of_samples = [f"sample-{i}" for i in range(samples)] if ids else None
    return Predictions(
        logits=logits.astype(np.float32),
        targets=targets,
        ids=names_of_samples,
        classes=classes,
    )


def dequantise(levels):
    """The probabilities that the page computes: exp(-STEP level), each row divided by
    its sum.
    """
    p = np.exp(levels.astype(np.float64) * -STEP)
    return p / p.sum(axis=1, keepdims=True)


def make_folder(
    folder: Path, predictions: Predictions, seed: int = 1, **decider: Any
) -> Path:
    """A run folder as training writes it, with a fitted decider."""
    folder.mkdir(parents=True)
    predictions.save(folder / "predictions.npz")
    predictions.classes.to_json(folder / "classes.json")
    utility = Utility.tail_sensitive(predictions.classes, -0.5)
    held_out = make_predictions(
        300, predictions.classes.counts, len(predictions.scores.values), seed
    )
    chosen: dict[str, Any] = {
        "calibration": "temperature"
    } | decider  # leaves the class prior as it is
    fitted = Decider(utility, **chosen).fit(
        held_out.scores.values, held_out.targets, logits=True
    )
    fitted.save(folder / "decider.json")
    (folder / "config.json").write_text(
        '{"method": "rf-dlc", "optimiser": {"rate": 0.1, "decay": Infinity}}'
    )
    (folder / "environment.json").write_text('{"torch": "2.13"}')
    (folder / "history.csv").write_text("epoch,loss\n1,2.5\n2,1.5\n3,nan\n")
    return folder


@pytest.fixture
def predictions() -> Predictions:
    return make_predictions()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium that keeps its console and the requests it makes, and downloads
    into `browser.downloads`.
    """
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no Selenium: pip install selenium"
    )
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip(NO_BROWSER)
    downloads = tmp_path_factory.mktemp("downloads")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument(
            "--no-sandbox"
        )  # Chromium refuses to run as root inside its sandbox
    several = (  # more than one download a page
        "profile.default_content_setting_values.automatic_downloads"
    )
    options.add_experimental_option(
        "prefs", {"download.default_directory": str(downloads), several: 1}
    )
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    running.downloads = downloads
    running.set_script_timeout(30)
    yield running
    running.quit()
