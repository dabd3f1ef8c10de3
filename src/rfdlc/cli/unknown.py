"""Options that a command does not have: near misses, and those of `rfdlc fit`."""

from typing import Any

import typer
from typer.core import TyperCommand

from rfdlc.errors import InputError, suggestion

USAGE_ERROR: Any = typer.BadParameter.__base__  # of click, which typer may bring along
FORMER = {"--save-decider": "--out"}  # of `rfdlc decide`, and what it is of `rfdlc fit`


class Command(TyperCommand):
    """A command that says which option is meant where it does not have one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            name = getattr(error, "option_name", None)
            if name is None or name in options_of(self):
                raise
            raise InputError(explained(name, ctx)) from None


def explained(name: str, ctx: Any) -> str:
    """Why the command of the context does not have an option, and what to do."""
    options = options_of(ctx.command)
    of_fit = options_of(ctx.find_root().command.commands["fit"])
    option = FORMER.get(name, name)
    if "--decider" in options and option in of_fit:
        return (
            f"{name} is not an option of `{ctx.command_path}`: it is {option} of `rfdlc"
            f" fit`. Make a decider (`rfdlc fit HELD_OUT {option} ...`), then give"
            " --decider decider.json"
        )
    hint = suggestion(name, options)
    return f"`{ctx.command_path}` has no option {name}: see its --help{hint}"


def options_of(command: Any) -> list[str]:
    """The names of the options of a command."""
    return [
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    ]
