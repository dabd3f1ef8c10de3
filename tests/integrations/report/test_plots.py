"""Each kind of plot is drawn for one run and for several, in every format."""

import builtins

import numpy as np
import pytest

from rfdlc import Classes, Decider, InputError, Predictions, Utility
from rfdlc.cli import app
from rfdlc.integrations.report import plots
from rfdlc.integrations.report.runs import ReportRun

from .conftest import make_folder, make_predictions


def make_run(name="a", **options):
    predictions = make_predictions(**options)
    return ReportRun(
        name,
        predictions,
        Decider(Utility.tail_sensitive(predictions.classes).with_abstain(0.3)),
    )


@pytest.mark.parametrize("kind", plots.KINDS)
def test_one_run_and_two(tmp_path, kind):
    out = tmp_path / "figure.svg"
    plots.draw([make_run()], kind, out)
    assert "</svg>" in out.read_text()
    plots.draw([make_run("first <&>"), make_run("second", seed=4)], kind, out)
    assert "second" in out.read_text()
    assert "first &lt;&amp;&gt;" in out.read_text()


def test_many_classes_are_confused_by_region(tmp_path):
    plots.draw(
        [make_run(counts=range(60, 0, -1))], "confusion", tmp_path / "figure.svg"
    )
    text = (tmp_path / "figure.svg").read_text()
    assert all(f">{region}<" in text for region in ("head", "med", "tail", "abstain"))


@pytest.mark.parametrize(
    ("name", "start"),
    [("figure.png", b"\x89PNG"), ("figure.pdf", b"%PDF"), ("f.SVG", b"<?xml")],
)
def test_formats(tmp_path, name, start):
    plots.draw([make_run()], "risk-coverage", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_same_figure_gives_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        plots.draw([make_run()], "frontier", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"kind 'reliabilty' is unknown.*did you mean 'reliability'"
    ):
        plots.check("reliabilty", tmp_path / "f.svg")
    with pytest.raises(InputError, match="expected svg, pdf, png"):
        plots.check("tail", tmp_path / "f.docx")
    bare = Classes(make_predictions().classes.names)
    run = ReportRun(
        "a", make_predictions().with_classes(bare), Decider(Utility.one_hot(bare))
    )
    for kind in ("tail", "frontier"):
        with pytest.raises(InputError, match="needs training counts"):
            plots.draw([run], kind, tmp_path / "f.svg")


def test_names_are_drawn_as_they_are_unless_they_are_long(tmp_path):
    names = ["$5-$10", "a$_{$", "<b>", "x" * 99, "c4"]
    for kind in ("tail", "confusion"):
        plots.draw(
            [make_run("$run$", names=names), make_run("b", names=names)],
            kind,
            tmp_path / "f.svg",
        )
        text = (tmp_path / "f.svg").read_text()
        assert all(
            f">{name}<" in text for name in ("$5-$10", "a$_{$", "$run$", "x" * 23 + "…")
        )


def test_a_frontier_needs_tail_samples(tmp_path):
    run = make_run(samples=60, counts=(90, 10))
    plots.draw([run], "frontier", tmp_path / "f.svg")
    head = Predictions(
        logits=run.predictions.scores.values, targets=[0] * 60, classes=run.classes
    )
    with pytest.raises(InputError, match="needs samples of rare classes"):
        plots.draw(
            [ReportRun("head", head, run.decider)], "frontier", tmp_path / "f.svg"
        )


def test_risk_and_coverage_need_decisions(tmp_path):
    run = make_run(samples=60)
    handed = run.decider.replace(
        utility=Utility(np.eye(5), run.classes, [f"ask {i}" for i in range(5)])
    )
    with pytest.raises(InputError, match="every sample was abstained on"):
        plots.draw(
            [ReportRun("a", run.predictions, handed)],
            "risk-coverage",
            tmp_path / "f.svg",
        )


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r'pip install "rfdlc\[plots\]"'):
        plots.check("tail", tmp_path / "f.svg")


def test_command_line(tmp_path):
    from typer.testing import CliRunner

    folder, out = make_folder(tmp_path / "a", make_predictions()), tmp_path / "tail.svg"
    result = CliRunner().invoke(
        app, ["plot", str(folder), "--kind", "tail", "-o", str(out), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert out.is_file()


def test_an_interrupted_figure_leaves_the_old_one(tmp_path, monkeypatch):
    def interrupted(figure, path, **_):
        path.write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "x.svg").write_text("old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plots.draw([make_run()], "tail", tmp_path / "x.svg")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("x.svg", "old")
    ]
