"""Commands on decisions in service: `rfdlc watch`, `recalibrate`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import rfdlc
from rfdlc.cli.request import JsonOption
from rfdlc.cli.writing import check_writable, output
from rfdlc.errors import choose

SOURCE = (
    "The folder of `rfdlc serve --log-decisions`, or predictions (CSV, Parquet, `.npz`)"
    " in the order they came."
)
REFERENCE = (
    "Held-out predictions with `target`, or a run folder: what decisions promised."
)
WINDOW = (
    "Samples of a window, or its time (`6h`, `1d`, `1w`); by default a twentieth, at"
    " least 1,000 samples."
)
TRAFFIC = (
    "Samples per month, for the rate of false alarms; by default as the times of the"
    " log say."
)
ALARMED = 3  # the exit code: 1 is a program that failed, 2 wrong input
DECIDER = (
    "Decider of predictions (file or run); or which one of a log (by default its last):"
    " `LOG/deciders/V.json`."
)
KIND = "`prior`, `calibration` or `both`; by default what gains most."
LABELLED = (
    "How decisions were chosen for labels, unless these were sent with it: `random`,"
    " `random:10%`, `by-action:review=100%,others=5%`, `by-confidence:0.9=20%,1=2%`, or"
    " `propensity`."
)
FORCE = "Write the decider although it is not shown to pay."


def watch(
    source: Annotated[Path, Argument(metavar="LOG", help=SOURCE)],
    reference: Annotated[Path, Option("--reference", "-r", help=REFERENCE)],
    out: Annotated[Path, Option("--out", "-o", help="The HTML file to write.")] = Path(
        "watch.html"
    ),
    decider: Annotated[Path | None, Option(help=DECIDER)] = None,
    window: Annotated[str | None, Option(help=WINDOW)] = None,
    per_month: Annotated[int | None, Option(min=1000, help=TRAFFIC)] = None,
    logits: Annotated[
        bool, Option("--logits", help="The tables hold logits, not probabilities.")
    ] = False,
    labelled: Annotated[str | None, Option(help=LABELLED)] = None,
    json: JsonOption = False,
) -> None:
    """Estimate without labels what decisions in service are still worth, and test for
    changes.

    The exit code is 0 if no test has raised an alarm, and 3 if one has: then a program
    should act. Without labels, 0 means no change in class mix, scores and unfamiliar
    input alone: whether labels still mean the same cannot be seen. Labels of a stated
    design are tested against what decisions promised. `--json` has `seen` and `unseen`.

    **Examples**

    - `rfdlc watch decisions/ --reference runs/a -o watch.html`
    - `rfdlc watch decisions/ -r held-out.parquet --window 1d --json`
    - `rfdlc watch scored.parquet --decider decider.json -r held-out.npz`
    """
    check_writable(out, endings=(".html", ".htm"))
    own = decider
    if (
        own is None
        and (reference / "decider.json").is_file()
        and not (source / "deciders").is_dir()
    ):
        own = reference
    from rfdlc.reporting.watch_page import write_page

    found = rfdlc.watch(
        source,
        reference,
        decider=own,
        window=window,
        per_month=per_month,
        logits=logits,
        labelled=labelled,
    )
    write_page(found, out, str(source))
    output(
        json,
        found.to_dict() | {"out": str(out)},
        *found.verdict,
        f"Written to {out}: open it in a browser.",
    )
    if any(when is not None for when in found.alarms.values()):
        raise SystemExit(ALARMED)


def recalibrate(
    source: Annotated[
        Path,
        Argument(metavar="LOG", help="The folder of `rfdlc serve --log-decisions`."),
    ],
    out: Annotated[
        Path,
        Option(
            "--out", "-o", help="The decider to write (JSON); a server takes it up."
        ),
    ],
    kind: Annotated[str | None, Option("--kind", help=KIND)] = None,
    decider: Annotated[
        Path | None, Option(help="Of which decisions; by default the last of the log.")
    ] = None,
    force: Annotated[bool, Option("--force", help=FORCE)] = False,
    labelled: Annotated[str | None, Option(help=LABELLED)] = None,
    json: JsonOption = False,
) -> None:
    """Calibrate a decider again, or change its prior, from logged decisions and labels
    sent to POST /feedback.

    The file is written if the interval of the gain is above 0, and with `--force`.
    Intervals are 95% ones of the three options together: with nothing to gain, a run
    writes in about 2.5% of cases at most. If not, the file stays as it is and the exit
    code is 0: more labels may show a gain. `--json` has `written`.

    Labels must stand for all decisions: whoever chose them must not have looked at the
    outcome. `--labelled` says how they were chosen, unless POST /feedback did, and what
    can be checked of it is. Others are refused, unless every decision has a label.

    **Examples**

    - `rfdlc recalibrate decisions/ -o decider.json --labelled random`
    - `rfdlc recalibrate decisions/ -o decider.json --labelled
      by-action:review=100%,others=5%`
    - `rfdlc recalibrate decisions/ -o decider.json --kind prior --json`
    """
    from rfdlc.evaluation.metrics import readable
    from rfdlc.monitoring.feedback import decider_version

    check_writable(out, endings=(".json",))
    if kind is not None:
        choose("kind", kind, ("prior", "calibration", "both"))
    chosen, found, realised = rfdlc.recalibrate(
        source, out, kind=kind, decider=decider, force=force, labelled=labelled
    )
    version = decider_version(chosen.decider)
    each = {
        o.name: {"gain": o.gain, "interval": o.interval, "pays": o.pays} for o in found
    }
    written = chosen.pays or force
    advice = (
        "the interval is above 0: it pays"
        if chosen.pays
        else "not shown to pay yet: the interval is not above 0"
    )
    done = f"Written to {out} ({chosen.name}, decider {version}); {advice}."
    left = (
        f"Not written, {out} is as before: {chosen.name} is {advice}. Send more labels,"
        " or write it with --force."
    )
    table = {
        "out": str(out),
        "decider": version,
        "kind": chosen.name,
        "options": each,
        "written": written,
    }
    lines = [
        f"{realised.chosen}: {realised.words}; {realised.promise}.",
        "Gains per sample (95% intervals of all three together):",
        *(
            f"{o.name}: {readable(o.gain)} ({' to '.join(map(readable, o.interval))})"
            for o in found
        ),
        done if written else left,
    ]
    output(json, table | realised.to_dict(), *lines)
