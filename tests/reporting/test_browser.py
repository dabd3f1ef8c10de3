"""The page in a real browser: it decides as the library does, fetches nothing, and
opens anywhere.
"""

import csv
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rfdlc
from rfdlc import Decider, Predictions, Utility
from rfdlc.evaluation.bins import bin_of
from rfdlc.probabilities.calibrators import Temperature
from rfdlc.reporting.report import STEP, quantise
from rfdlc.reporting.runs import ReportRun, as_runs
from rfdlc.statistics.intervals import calibration_gap

pytest.importorskip("selenium", reason="no Selenium: pip install selenium")
from selenium.webdriver.common.keys import Keys

from .conftest import dequantise, make_folder, make_predictions

GROUPS = {"pets": ("c1", "c3")}


class Page:
    """The report open in the browser, and what the library makes of the same quantised
    probabilities.
    """

    def __init__(self, browser: Any, path: Path, run: ReportRun) -> None:
        self.browser, self.run = browser, run
        browser.get_log("browser"), browser.get_log("performance")
        browser.get(path.as_uri())
        self.wait(lambda: self.script("return window.rfdlcReport?.ready ?? false"))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def wait(self, done: Callable[[], Any], seconds: float = 10) -> Any:
        end = time.monotonic() + seconds
        while not (result := done()) and time.monotonic() < end:
            time.sleep(0.02)
        assert result, "the page did not get there in time"
        return result

    def element(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def settle(self) -> None:
        """Wait until the page has decided again."""
        self.script("return 0")
        self.wait(lambda: self.script("return !window.rfdlcReport.workbench.waiting"))

    def write(self, selector: str, text: str) -> None:
        """Over what stands there, as a person would."""
        self.element(selector).send_keys(Keys.CONTROL + "a")
        self.element(selector).send_keys(text)
        self.settle()

    def press(self, selector: str) -> None:
        self.script("arguments[0].click()", self.element(selector))
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        change = (
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new"
            " Event('change', {bubbles: true}))"
        )
        self.script(change, self.element(selector), value)
        self.settle()

    def assign(self, true: str, decided: str, value: str) -> None:
        for side, text in (("true", true), ("decided", decided)):
            place = (
                f"return [...document.getElementById('assign-{side}').options].find(o"
                " => o.text === arguments[0]).value"
            )
            self.choose(f"#assign-{side}", self.script(place, text))
        self.write("#assign-value", value)
        self.press("#assign-set")

    @property
    def actions(self) -> list[str]:
        code = (
            "const w = window.rfdlcReport.workbench; return"
            " [...w.results[0].actions].map(a => w.problem.actions[a])"
        )
        return self.script(code)

    def metrics_of(self, run: int) -> dict[str, float | None]:
        cells = f"[...document.querySelectorAll('[data-run=\"{run}\"]')]"
        return self.script(
            f"return Object.fromEntries({cells}.map(e => [e.dataset.metric,"
            " +e.dataset.value]))"
        )

    @property
    def metrics(self) -> dict[str, float | None]:
        return self.metrics_of(0)

    def agrees_with(
        self,
        utility: Utility,
        temperature: float = 1.0,
        target: Any = None,
        carried: Any = None,
    ) -> None:
        """Decisions and metrics equal the library's on the probabilities that are in
        the page.
        """
        p = dequantise(quantise(self.run.calibrated))
        decider = Decider(
            utility,
            train_prior=carried,
            target_prior=target,
            calibrator=Temperature(temperature),
        )
        decided = decider.decide(p)
        assert self.actions == [utility.actions[a] for a in decided]
        result = rfdlc.evaluate(p, self.run.outcomes.targets, decider)
        o, expected = result.outcomes, result.flat()
        expected["ece"] = calibration_gap(
            o.confidence, o.right, bin_of(o.confidence, STEP)
        ).value
        for name, value in self.metrics.items():
            value = np.nan if value is None else value
            assert value == pytest.approx(
                expected[name], rel=1e-9, abs=1e-12, nan_ok=True
            ), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    predictions = make_predictions(300, groups=GROUPS)
    return make_folder(
        tmp_path_factory.mktemp("runs") / "a", predictions, train_prior="train"
    )


@pytest.fixture(scope="module")
def report(folder):
    return rfdlc.report(folder, None, folder / "report.html", bootstrap=20)


@pytest.fixture
def page(browser, report, folder):
    return Page(browser, report, as_runs(folder)[0])


def random_utility(rng: np.random.Generator, classes: Any) -> Utility:
    utility = Utility(rng.normal(size=(len(classes), len(classes))).round(3), classes)
    return (
        utility.with_abstain(rng.normal(size=len(classes)).round(2))
        if rng.random() < 0.5
        else utility
    )


def test_opens_without_errors_and_without_requests(page, report):
    page.script("window.rfdlcReport.page.drawWaiting()")
    assert page.browser.get_log("browser") == []
    messages = [
        json.loads(entry["message"])["message"]
        for entry in page.browser.get_log("performance")
    ]
    asked = {
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    }
    assert asked == {report.as_uri()}
    drawn = page.script(
        "return [...document.querySelectorAll('[data-chart]')].filter(h =>"
        " h.querySelector('svg')).length"
    )
    assert drawn == 9
    page.agrees_with(page.run.decider.utility)


def test_twenty_random_utilities_decide_as_the_library(page, tmp_path):
    rng = np.random.default_rng(0)
    same = []
    for i in range(20):
        utility = random_utility(rng, page.run.classes)
        file = tmp_path / f"U{i}.csv"
        utility.to_csv(file)
        page.element("#open-utility").send_keys(str(file))
        page.wait(
            lambda: page.script(
                "return document.getElementById('open-utility').files.length === 0"
            )
        )
        page.settle()
        page.agrees_with(utility)
        exact = page.run.decider.replace(utility=utility).decide(page.run.predictions)
        same += [
            action == utility.actions[a]
            for action, a in zip(page.actions, exact, strict=True)
        ]
    assert np.mean(same) > 0.999  # what the quantisation changes


def test_editing_a_cell(page):
    page.write("[aria-label='Utility of deciding c0 when c4 is true']", "-7.5")
    matrix = page.run.decider.utility.matrix.copy()
    matrix[4, 0] = -7.5
    page.agrees_with(Utility(matrix, page.run.classes))
    page.write("[aria-label='Utility of deciding c0 when c4 is true']", "-")
    assert (
        page.element(
            "[aria-label='Utility of deciding c0 when c4 is true']"
        ).get_attribute("aria-invalid")
        == "true"
    )
    page.agrees_with(Utility(matrix, page.run.classes))  # half a number changes nothing


def test_the_slider_moves_by_keys(page):
    slider = page.element("#penalty")
    slider.send_keys(*[Keys.ARROW_LEFT] * 6)  # -0.5 becomes -0.8
    page.settle()
    assert float(slider.get_attribute("value")) == pytest.approx(-0.8)
    page.agrees_with(Utility.tail_sensitive(page.run.classes, -0.8))
    changed = int(page.element("#changed-count").text)
    before = page.run.decider.decide(page.run.predictions)
    assert changed == sum(
        page.run.decider.utility.actions[b] != a
        for a, b in zip(page.actions, before, strict=True)
    )


def test_abstaining_presets_and_reset(page):
    classes = page.run.classes
    page.press("#abstain")
    page.write("#abstain-value", "0.6")
    page.agrees_with(page.run.decider.utility.with_abstain(0.6))
    assert page.metrics["abstention_rate"] > 0
    page.press("[data-preset='one-hot']")
    page.agrees_with(Utility.one_hot(classes).with_abstain(0.6))
    page.press("[data-preset='tail-sensitive']")
    page.agrees_with(Utility.tail_sensitive(classes, -1).with_abstain(0.6))
    page.press("#abstain")
    page.agrees_with(Utility.tail_sensitive(classes, -1))
    page.press("[data-preset='given']")
    page.agrees_with(page.run.decider.utility)
    assert page.element("#changed-count").text == "0"


def test_temperature_and_prior(page):
    utility, train = page.run.decider.utility, page.run.classes.prior
    page.write("#temperature-value", "2.5")
    page.agrees_with(utility, temperature=2.5)
    page.choose("#prior", "uniform")
    page.agrees_with(utility, 2.5, target="uniform", carried=train)
    page.choose("#prior", "samples")
    shares = np.bincount(page.run.outcomes.targets) / len(page.run.outcomes.targets)
    page.agrees_with(utility, 2.5, target=shares, carried=train)
    page.choose("#prior", "own")
    fields = page.browser.find_elements("css selector", "#own-prior input")
    for field, value in zip(fields, (10, 20, 30, 20, 20), strict=True):
        field.send_keys(Keys.CONTROL + "a")
        field.send_keys(str(value))
    page.settle()
    page.agrees_with(
        utility, 2.5, target=np.array([10, 20, 30, 20, 20]) / 100, carried=train
    )


def test_a_given_prior_is_corrected_and_another_rule_is_named(browser, tmp_path):
    predictions = make_predictions(200)
    utility = Utility.tail_sensitive(predictions.classes, -0.5)
    decider = Decider(
        utility, train_prior="train", target_prior="uniform", rule="argmax"
    )
    path = rfdlc.report(
        predictions, None, tmp_path / "r.html", decider=decider, bootstrap=0
    )
    page = Page(browser, path, as_runs(predictions, decider=decider)[0])
    page.agrees_with(utility, target="uniform", carried="train")
    assert "decided by the rule argmax" in page.element("#notice").text


def test_rows_columns_and_groups(page):
    matrix = page.run.decider.utility.matrix.copy()
    page.assign("c4", "anything", "-2")
    matrix[4, :4] = -2
    page.agrees_with(Utility(matrix, page.run.classes))
    page.assign("anything", "c1", "-0.25")
    matrix[[0, 2, 3, 4], 1] = -0.25
    page.agrees_with(Utility(matrix, page.run.classes))
    page.assign("any of pets", "any tail class", "-4")
    tail = page.run.classes.thirds["tail"]
    for y in (1, 3):
        matrix[y, [d for d in tail if d != y]] = -4
    page.agrees_with(Utility(matrix, page.run.classes))


def test_the_head_of_a_row_aims_at_it_and_arrows_walk(page):
    page.press("[aria-label='Set the row c2']")
    chosen = (
        "const s = document.getElementById('assign-true'); return"
        " s.options[s.value].text"
    )
    assert page.script(chosen) == "c2"
    assert page.script("return document.activeElement.id") == "assign-value"
    page.element("[aria-label='Utility of deciding c1 when c0 is true']").send_keys(
        Keys.ARROW_DOWN
    )
    label = page.script("return document.activeElement.getAttribute('aria-label')")
    assert label == "Utility of deciding c1 when c1 is true"


def downloaded(page: Page, button: str, name: str) -> Path:
    file = page.browser.downloads / name
    file.unlink(missing_ok=True)
    page.press(button)
    page.wait(lambda: file.is_file() and file.stat().st_size)
    return file


def test_downloads_reproduce_the_decisions(page, folder, tmp_path):
    from typer.testing import CliRunner

    from rfdlc.cli import app

    page.write("#penalty-value", "-2.25")
    page.press("#abstain")
    page.write("#abstain-value", "0.35")
    utility = downloaded(page, "#save-utility", "utility.csv")
    expected = Utility.tail_sensitive(page.run.classes, -2.25).with_abstain(0.35)
    assert (Utility.read_csv(utility, page.run.classes).matrix == expected.matrix).all()
    page.write("#temperature-value", "1.5")
    page.choose("#prior", "uniform")
    decider = downloaded(page, "#save-decider", "decider.json")
    listed = downloaded(page, "#save-decisions", "decisions.csv")
    with open(listed, newline="", encoding="utf-8") as file:
        assert [row["action"] for row in csv.DictReader(file)] == page.actions
    assert (
        command_actions(CliRunner(), app, folder, tmp_path, "--decider", decider)
        == page.actions
    )
    page.write("#temperature-value", "1")
    page.choose("#prior", "given")
    assert (
        command_actions(CliRunner(), app, folder, tmp_path, "--utility", utility)
        == page.actions
    )


def command_actions(
    runner: Any, app: Any, folder: Path, tmp_path: Path, option: str, file: Path
) -> list[str]:
    """What `rfdlc decide` does with the downloaded file."""
    out = tmp_path / "actions.csv"
    result = runner.invoke(
        app, ["decide", str(folder), option, str(file), "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    with open(out, newline="", encoding="utf-8") as rows:
        return [row["action"] for row in csv.DictReader(rows)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("true,c0,c1\nc0,1,0\nc1,0,1\n", "no line for the class"),
        (
            "true,c0,c1\nc0,1,0\nc1,0,1\nc2,,1\nc3,0,1\nc4,0,1\n",
            "the line of “c2” needs 2 finite numbers",
        ),
        (
            "true,c0,c1\nc0,1,0\nc1,0,1\nc2,0,1\nc3,0,1\nc4,0,1\nc4,0,2\n",
            "6 lines of classes, expected 5",
        ),
        (
            "true;c0;c1\nc0;1;0\nc1;0;1\nc2;0,5;1\nc3;0;1.000\nc4;0;1\n",
            "remove the thousands separators",
        ),
        ("c0,c1\nc0,1\nc1,0\n", "a first column that holds the true classes"),
    ],
)
def test_a_wrong_file_is_refused_in_words(page, tmp_path, text, message):
    (tmp_path / "wrong.csv").write_text(text)
    page.element("#open-utility").send_keys(str(tmp_path / "wrong.csv"))
    page.wait(lambda: message in page.element("#command").text)
    page.agrees_with(page.run.decider.utility)


def test_a_file_of_another_spreadsheet_is_read_as_the_library_reads_it(page, tmp_path):
    rows = "".join(f"c{i};{i},5;-0,25;0\n" for i in range(5))
    (tmp_path / "U.csv").write_text("\ufefftrue;c0;c1;ask\n" + rows, encoding="utf-8")
    page.element("#open-utility").send_keys(str(tmp_path / "U.csv"))
    page.wait(
        lambda: page.script(
            "return document.getElementById('open-utility').files.length === 0"
        )
    )
    page.settle()
    page.agrees_with(Utility.read_csv(tmp_path / "U.csv", page.run.classes))


def test_a_page_in_which_nothing_is_decided_for_a_class(browser, tmp_path):
    predictions = make_predictions(60)
    utility = Utility(np.eye(5), predictions.classes, [f"ask {i}" for i in range(5)])
    path = rfdlc.report(predictions, utility, tmp_path / "r.html", bootstrap=0)
    page = Page(browser, path, as_runs(predictions, utility)[0])
    page.agrees_with(utility)
    page.script("window.rfdlcReport.page.drawWaiting()")
    assert "abstained" in page.element('[data-chart="risk-coverage"]').text
    assert page.browser.get_log("browser") == []


@pytest.mark.parametrize(
    ("scale", "shown"), [(1e-9, "1.08e−8"), (1, "10.760"), (1e15, "1.08e16")]
)
def test_two_classes_and_more_actions_on_any_scale(browser, tmp_path, scale, shown):
    predictions = make_predictions(200, counts=(970, 30), names=["legit", "fraud"])
    worth = np.array([[0, -120, -35, -2, -8], [-2500, 0, -90, -300, -15]]) * scale
    utility = Utility(
        worth, predictions.classes, ["legit", "fraud", "call", "text", "block"]
    )
    path = rfdlc.report(
        {"bank": predictions}, utility, tmp_path / "r.html", bootstrap=0
    )
    page = Page(browser, path, as_runs(predictions, utility)[0])
    page.agrees_with(utility)
    assert (
        page.element('#consequences [data-metric="mean_utility"]').text == shown
    )  # costs: right decisions have none
    assert "mean cost" in page.element("#consequences").text.lower()
    drawn = (
        "return document.querySelectorAll('[data-chart=\"frontier\"] circle').length"
    )
    page.script("window.rfdlcReport.page.drawWaiting()")
    assert (
        page.script(drawn) > 8
    )  # a dot a penalty, and the report itself: the false head rate is defined


def test_hostile_names_are_shown_as_text(browser, tmp_path):
    names = [
        "</script><script>window.hit=1</script>",
        "<img src=x onerror=window.hit=1>",
        "\"a\" & 'b', c;d",
        "عربي",
        "🦎",
    ]
    predictions = make_predictions(120, names=names, groups={"<b>g</b>": names[:2]})
    utility = Utility.tail_sensitive(predictions.classes)
    path = rfdlc.report(
        {"<i>run</i>": predictions},
        utility,
        tmp_path / "r.html",
        title="</title><b>",
        bootstrap=0,
    )
    page = Page(browser, path, as_runs(predictions, utility)[0])
    page.press("#abstain")
    page.script("window.rfdlcReport.page.drawWaiting()")
    heads = (
        "return [...document.querySelectorAll('#confusion-matrix tbody th')].map(e =>"
        " e.textContent)"
    )
    assert page.script(heads) == names
    assert page.script("return window.hit ?? null") is None
    assert (
        page.script(
            "return document.querySelectorAll('script, body b, body i,"
            " img[src=x]').length"
        )
        == 2
    )
    assert page.script("return document.title") == "</title><b>"
    assert page.browser.get_log("browser") == []
    saved = downloaded(page, "#save-utility", "utility.csv")
    assert Utility.read_csv(saved).classes.names == tuple(names)


def test_many_classes_open_by_region(browser, tmp_path):
    predictions = make_predictions(600, counts=range(120, 0, -1), particles=1)
    utility = Utility.tail_sensitive(predictions.classes, -1)
    path = rfdlc.report(predictions, utility, tmp_path / "r.html", bootstrap=0)
    page = Page(browser, path, as_runs(predictions, utility)[0])
    page.write("[aria-label='Utility of deciding head when tail is true']", "-3")
    matrix = utility.matrix.copy()
    matrix[
        np.ix_(page.run.classes.thirds["tail"], page.run.classes.thirds["head"])
    ] = -3
    page.agrees_with(Utility(matrix, page.run.classes))
    page.element("[aria-label='Utility of deciding head when tail is true']").send_keys(
        Keys.ENTER
    )
    assert (
        page.script(
            "return document.querySelectorAll('#utility-matrix tbody tr').length"
        )
        == 40
    )
    page.write("[aria-label='Utility of deciding c3 when c110 is true']", "-9")
    matrix[110, 3] = -9
    page.agrees_with(Utility(matrix, page.run.classes))


def test_subsampled_pages_say_so_and_old_browsers_are_told(
    browser, tmp_path, monkeypatch
):
    monkeypatch.setattr("rfdlc.reporting.report.MOST_CELLS", 500)
    predictions = make_predictions()
    path = rfdlc.report(predictions, None, tmp_path / "r.html", bootstrap=0)
    page = Page(browser, path, as_runs(predictions)[0])
    assert "100 of the 400 samples" in page.element("#notice").text
    command = "Page.addScriptToEvaluateOnNewDocument"
    added = browser.execute_cdp_cmd(
        command, {"source": "delete window.DecompressionStream"}
    )
    try:
        browser.get(path.as_uri())
        page.wait(lambda: "too old" in page.element("#notice").text)
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_without_counts_and_without_a_known_prior(browser, tmp_path):
    predictions = make_predictions(80)
    bare = Predictions(logits=predictions.scores.values, targets=predictions.targets)
    page = Page(
        browser,
        rfdlc.report(bare, None, tmp_path / "r.html", bootstrap=0),
        as_runs(bare)[0],
    )
    assert not page.element("#penalty").is_enabled()
    page.choose("#prior", "uniform")
    assert "which prior" in page.element("#prior-hint").text
    page.agrees_with(page.run.decider.utility)
    page.choose("#carried", "uniform")
    page.choose("#prior", "samples")
    shares = np.bincount(page.run.outcomes.targets) / len(page.run.outcomes.targets)
    page.agrees_with(page.run.decider.utility, target=shares, carried="uniform")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_hangs_over_the_edge_and_colours_follow(browser, report, folder, width):
    size = {
        "width": width,
        "height": 844,
        "deviceScaleFactor": 1,
        "mobile": width < 500,
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page = Page(browser, report, as_runs(folder)[0])
        page.script("window.rfdlcReport.page.drawWaiting()")
        assert (
            page.script(
                "const e = document.documentElement; return e.scrollWidth -"
                " e.clientWidth"
            )
            == 0
        )
        colour = "return getComputedStyle(document.body).backgroundColor"
        for scheme, expected in (
            ("light", "rgb(252, 252, 250)"),
            ("dark", "rgb(21, 24, 28)"),
        ):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [feature]}
            )
            assert page.script(colour) == expected
        page.press("#theme")  # from the system's colours to light
        assert page.script(colour) == "rgb(252, 252, 250)"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_ten_thousand_by_a_hundred_are_decided_alike(browser, tmp_path):
    """How quick that is: benchmarks/report.py."""
    predictions = make_predictions(
        10_000, counts=[int(500 * 0.95**i) + 1 for i in range(100)], particles=1
    )
    utility = Utility.tail_sensitive(predictions.classes, -1)
    path = rfdlc.report(predictions, utility, tmp_path / "r.html", bootstrap=0)
    page = Page(browser, path, as_runs(predictions, utility)[0])
    for penalty in (-0.5, -4):
        page.script(
            "const s = document.getElementById('penalty'); s.value = arguments[0];"
            " s.dispatchEvent(new Event('input'))",
            penalty,
        )
        page.settle()
        page.agrees_with(Utility.tail_sensitive(page.run.classes, penalty))


def test_runs_side_by_side(browser, folder, tmp_path):
    other = make_folder(
        tmp_path / "b",
        make_predictions(250, seed=8, groups=GROUPS),
        train_prior="train",
    )
    path = rfdlc.report([folder, other], None, tmp_path / "r.html", bootstrap=20)
    page = Page(browser, path, as_runs([folder, other])[1])
    heads = page.script(
        "return [...document.querySelectorAll('#run-table thead th')].map(e =>"
        " e.textContent)"
    )
    assert heads == ["Metric", "a", "b"] * 2  # the headline, and all metrics
    page.choose("#run", "1")
    assert "250 samples" in page.element("#lead").text
    page.write("#penalty-value", "-3")
    p = dequantise(quantise(page.run.calibrated))
    expected = rfdlc.evaluate(
        p,
        page.run.outcomes.targets,
        Decider(Utility.tail_sensitive(page.run.classes, -3)),
    ).flat()
    for name, value in page.metrics_of(1).items():
        assert value == pytest.approx(expected[name], abs=1e-6), name


def test_the_slider_of_sets(browser, tmp_path):
    predictions = make_predictions(300)
    decider = Decider(Utility.one_hot(predictions.classes), calibration=None).fit_sets(
        make_predictions(300, seed=2)
    )
    file = rfdlc.report(
        predictions, None, tmp_path / "report.html", decider=decider, bootstrap=0
    )
    page = Page(browser, file, as_runs(predictions, None, decider)[0])
    page.script("document.getElementById('sets-figure').scrollIntoView()")
    page.wait(
        lambda: page.script(
            "return document.querySelector('[data-chart=sets] svg') !== null"
        )
    )
    result = rfdlc.evaluate(predictions, None, decider)
    assert (
        f"{100 * result.set_coverage['macro']:.1f} % in the mean over classes"
        in page.element("#sets-caption").text
    )
    page.element("#sets").send_keys(Keys.END)
    assert page.element("#sets-value").text.startswith("100.0 % covered, 5")
    assert page.browser.get_log("browser") == []


def test_promises_are_shown_once_by_region(page):
    result = rfdlc.evaluate(page.run.predictions, decider=page.run.decider)
    page.script("document.getElementById('promised-caption').scrollIntoView()")
    page.wait(lambda: page.element("#promised-caption").text != "")
    said, _, met = page.element("#promised-caption").text.partition(
        " Met in predicted regions: "
    )
    assert said.endswith(result.promise)
    for region, gap in result.utility_gap_by_region.items():
        low, high = result.intervals[f"utility_gap_by_region.{region}"]
        in_sentence, in_list = (
            re.search(rf"\b{region} ([^)]*)\)", text) for text in (result.promise, met)
        )
        found = in_list if low <= 0 <= high else in_sentence
        assert (in_sentence is None) != (in_list is None)
        numbers = [
            float(text.replace("−", "-"))
            for text in re.findall(r"[−-]?\d+\.\d+", found[1])
        ]
        assert numbers == pytest.approx([gap, low, high], abs=0.006)


def test_names_of_actions_do_not_lie_on_each_other(browser, tmp_path):
    """Ten actions of nearly the same worth: the names that are shown are apart, and
    inside the figure.
    """
    names = [f"a species with a long name, {i}" for i in range(10)]
    predictions = make_predictions(800, counts=[90] * 10, particles=1, names=names)
    report = rfdlc.report(
        predictions,
        Utility.one_hot(predictions.classes),
        tmp_path / "r.html",
        bootstrap=0,
    )
    page = Page(browser, report, as_runs(predictions)[0])
    page.script("document.getElementById('promised-caption').scrollIntoView()")
    page.wait(lambda: page.element("#promised-caption").text != "")
    figure = "document.querySelector('[data-chart=promised] svg')"
    boxes = page.script(
        f"""const inside = {figure}.getBoundingClientRect();
        const texts = [...{figure}.querySelectorAll('text')];
        const names = texts.filter((t) => t.textContent.startsWith('a species'));
        return names.map((t) => t.getBoundingClientRect()).map((b) => [
            b.left - inside.left, inside.right - b.right,
            b.left, b.right, b.top, b.bottom])"""
    )
    assert 0 < len(boxes) < 10
    assert all(left >= 0 and right >= 0 for left, right, *_ in boxes)
    for i, (_, _, *one) in enumerate(boxes):
        for _, _, *other in boxes[:i]:
            assert (
                one[1] <= other[0]
                or other[1] <= one[0]
                or one[3] <= other[2]
                or other[3] <= one[2]
            )


def test_the_slider_of_the_budget(browser, tmp_path):
    predictions = make_predictions(300)
    utility = Utility.one_hot(predictions.classes).with_expert("doctor", confusion=0.95)
    decider = Decider(utility, calibration=None)
    file = rfdlc.report(
        predictions, None, tmp_path / "report.html", decider=decider, bootstrap=0
    )
    page = Page(browser, file, as_runs(predictions, None, decider)[0])
    page.script("document.getElementById('budget-figure').scrollIntoView()")
    page.wait(
        lambda: page.script(
            "return document.querySelector('[data-chart=budget] svg') !== null"
        )
    )
    values = rfdlc.evaluate(predictions, None, decider).utility_by_budget
    assert f"utility {values[0.05]:.3f}" in page.element("#budget-value").text
    page.element("#budget").send_keys(Keys.HOME)
    assert (
        page.element("#budget-value").text
        == f"at most 0.0 % handed over, utility {values[0.0]:.3f}"
    )
    assert page.browser.get_log("browser") == []
