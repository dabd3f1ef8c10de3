"""The command line. Heavy imports happen when a command runs."""

import os
import re
import sys
import warnings
from typing import Annotated, Any

import typer

from rfdlc import __version__
from rfdlc.cli import data, decide, demo, deploy, fit, sweep, train, utility, watch
from rfdlc.cli.unknown import Command
from rfdlc.errors import InputError, printable
from rfdlc.imports import import_own
from rfdlc.progress import shown, speaks

OUT_OF_MEMORY = re.compile(r"out of memory|(not enough|allocate) memory")

app = typer.Typer(
    name="rfdlc",
    help=(
        "Reliable decisions on long-tailed data: train once, calibrate, decide for any"
        " utility."
    ),
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=True,
)
IMPORT = (
    "Import a module (a name, or a .py file) that registers methods, metrics,"
    " calibrators or formats; repeatable."
)
VERSION = "Print the version and exit."
COMMANDS = {
    fit: ("fit",),
    decide: ("decide", "evaluate", "report", "compare", "mislabelled"),
    data: ("inspect",),
    demo: ("demo",),
    train: ("methods", "train", "resume", "fork"),
    sweep: ("sweep",),
    deploy: ("embed", "predict", "export", "serve"),
    watch: ("watch", "recalibrate"),
}
for _module, _names in COMMANDS.items():
    for _name in _names:
        app.command(cls=Command)(getattr(_module, _name))
app.add_typer(utility.app, name="utility")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"rfdlc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help=VERSION),
    ] = False,
    modules: Annotated[
        list[str] | None, typer.Option("--import", metavar="MODULE", help=IMPORT)
    ] = None,
) -> None:
    import_own(modules or ())


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if speaks():
        print(f"rfdlc: warning: {printable(message)}", file=sys.stderr)


def main() -> None:
    """Run a command. Bad input is one clear line on standard error and exit code 2."""
    try:
        with warnings.catch_warnings(), shown():
            warnings.showwarning = _print_warning
            app()
    except InputError as error:
        who = (
            "" if speaks() else f"process {os.environ['RANK']}: "
        )  # the first process reports an error of all
        print(f"rfdlc: {who}{printable(' '.join(str(error).split()))}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        fix = "use less data, smaller inputs or a smaller batch"
        print(
            f"rfdlc: there is not enough memory ({printable(error)}): {fix}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
