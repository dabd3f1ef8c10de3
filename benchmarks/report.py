"""The report of 10,000 samples x 100 classes is under 5 MB, opens in 2 s, and follows a
slider within 100 ms.

    python benchmarks/report.py        writes benchmarks/results/report.csv

Needs Chromium with its driver (on Debian: apt-get install chromium chromium-driver) and
Selenium.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import rfdlc
from recording import write

SLIDER = """
const done = arguments[arguments.length - 1];
const slider = document.getElementById(arguments[0]);
const start = performance.now();
slider.value = arguments[1];
slider.dispatchEvent(new Event("input"));
// The first frame decides and draws; the message after it comes when that frame has
// been painted.
requestAnimationFrame(() => {
  const channel = new MessageChannel();
  channel.port1.onmessage = () => done(performance.now() - start);
  channel.port2.postMessage(0);
});
"""


def predictions(samples: int, classes: int) -> rfdlc.Predictions:
    """A long-tailed model with an accuracy of about one half: nothing of it is easy to
    compress.
    """
    rng = np.random.default_rng(0)
    counts = [int(500 * 100 ** (-i / (classes - 1))) for i in range(classes)]
    targets = rng.integers(0, classes, samples)
    logits = rng.normal(size=(samples, classes)).astype(np.float32) * 2
    logits[np.arange(samples), targets] += 4
    return rfdlc.Predictions(
        logits=logits, targets=targets, classes=rfdlc.Classes.from_counts(counts)
    )


def chromium() -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    return webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )


def opened(browser: Any, path: Path) -> float:
    """Seconds from the start of the navigation until everything in sight is drawn."""
    browser.get(path.as_uri())
    while not browser.execute_script("return window.rfdlcReport?.ready ?? false"):
        time.sleep(0.02)
    return float(browser.execute_script("return window.rfdlcReport.openTime")) / 1000


def repaint(browser: Any, slider: str, values: list[float]) -> float:
    """Median milliseconds from moving the slider to the painted frame, with the editor
    in sight.
    """
    browser.execute_script("document.getElementById('strip').scrollIntoView()")
    times = [
        float(browser.execute_async_script(SLIDER, slider, value)) for value in values
    ]
    return statistics.median(times[1:])


def row(what: str, value: float, unit: str, required: str) -> dict[str, object]:
    return {
        "what": what,
        "value": f"{value:.3g}" if value < 1000 else f"{value:.0f}",
        "unit": unit,
        "reference": "",
        "ratio": "",
        "required": required,
    }


def rows(folder: Path) -> Iterator[dict[str, object]]:
    browser = chromium()
    try:
        for samples, classes, bound in ((10_000, 100, True), (50_000, 1_000, False)):
            size = f"{samples:,} x {classes:,}"
            known = predictions(samples, classes)
            utility = rfdlc.Utility.tail_sensitive(known.classes, -1)
            start = time.perf_counter()
            path = rfdlc.report(known, utility, folder / "report.html", bootstrap=0)
            yield row(
                f"{size}: write the report, no intervals",
                time.perf_counter() - start,
                "s",
                "",
            )
            yield row(
                f"{size}: size of the file",
                path.stat().st_size / 1e6,
                "MB",
                "< 5" if bound else "",
            )
            yield row(
                f"{size}: open the page",
                opened(browser, path),
                "s",
                "< 2" if bound else "opens",
            )
            inside = browser.execute_script(
                "return window.rfdlcReport.workbench.runs[0].size"
            )
            yield row(
                f"{size}: samples in the editor",
                inside,
                "samples",
                "" if bound else "sub-sampled",
            )
            moves = [-0.1 * i for i in range(1, 12)]
            yield row(
                f"{size}: move the penalty slider",
                repaint(browser, "penalty", moves),
                "ms",
                "< 100" if bound else "",
            )
            hotter = [0.1 * i for i in range(1, 12)]
            yield row(
                f"{size}: move the temperature slider",
                repaint(browser, "temperature", hotter),
                "ms",
                "",
            )
    finally:
        browser.quit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write("report", rows(Path(name)), ["rfdlc", "numpy", "selenium"])
