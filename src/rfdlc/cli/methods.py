"""`rfdlc methods`: what `rfdlc train --method` can train."""

from typing import Any

from rfdlc.cli.request import JsonOption
from rfdlc.cli.train import ready
from rfdlc.cli.writing import print_json, print_rich


def methods(json: JsonOption = False) -> None:
    """List every method: what it does, whose it is, its options, particles and stages, and its relative cost.

    Options are set like settings: `rfdlc train DATA --method ride diversity=0.1`. `--json` has their meanings.

    The cost is that of a training of 200 epochs with the method's own settings, where particles share no layers.

    **Examples**

    - `rfdlc methods`
    - `rfdlc methods --json`
    """
    with ready():
        from rfdlc.training.methods import METHODS

        rows = {name: _described(row) for name, row in METHODS.items()}
    print_json({"methods": rows}) if json else print_rich(_table(rows))


def _described(row: Any) -> dict[str, Any]:
    settings = row.settings
    return {
        "summary": row.summary,
        "reference": row.reference,
        "particles": settings.get("particles", 1),
        "stages": [stage.trains for stage in row.stages],
        "cost": round(row.relative_cost(), 2),
        "options": {name: {"default": o.default, "help": o.help} for name, o in row.options.items()},
    }


def _table(rows: dict[str, dict[str, Any]]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(
        caption="M: particles. Cards with formulas and sources: docs/methods.md", caption_justify="left", box=SIMPLE
    )
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("what it does, and whose it is")
    for title in ("M", "stages", "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in rows.items():
        options = " ".join(f"{key}={option['default']:g}" for key, option in row["options"].items())
        said = Text.assemble(row["summary"], (f" ({row['reference']})", "dim"), f"\n{options}" if options else "")
        table.add_row(Text(name), said, str(row["particles"]), " + ".join(row["stages"]), f"{row['cost']:.3g}")
    return table
