"""Commands of several processes, in a pytest of their own (see test_processes.py)."""

from .test_processes import check


def test_commands_of_several_processes():
    check("commands.py")
