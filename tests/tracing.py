"""Which files of the package a call passes: `python tests/tracing.py` prints them."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import rfdlc

SOURCE = Path(rfdlc.__file__).parent


def files_passed(
    call: Callable[[], Any], until: Callable[[str, str], bool] | None = None
) -> list[str]:
    """The files whose functions are entered during a call, in their order, until a
    function of a file is reached.
    """
    passed: list[str] = []
    reached = False

    def entered(frame: FrameType, event: str, _: Any) -> None:
        nonlocal reached
        file = Path(frame.f_code.co_filename)
        if event != "call" or reached or not file.is_relative_to(SOURCE):
            return
        name = file.relative_to(SOURCE).as_posix()
        if name not in passed:
            passed.append(name)
        reached = until is not None and until(name, frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(before)
    return passed


def to_an_action() -> list[str]:
    """What scores pass until they are actions."""
    decider = rfdlc.Decider(rfdlc.Utility([[1, 0], [-5, 1]], ["healthy", "ill"]))
    scores = np.array([[0.9, 0.1], [0.3, 0.7]])
    decider.decide(scores)  # what is imported on first use
    return files_passed(lambda: decider.decide(scores))


def to_a_loss() -> list[str]:
    """What data pass from `rfdlc.train` until a step computes their loss."""

    def is_step(file: str, function: str) -> bool:
        return file == "training/execution.py"

    with tempfile.TemporaryDirectory() as folder:

        def train(name: str) -> Any:
            return rfdlc.train("digits-lt", "ce", Path(folder) / name, epochs=1)

        train("first")
        return files_passed(lambda: train("second"), is_step)


def main() -> None:
    for path in (to_an_action(), to_a_loss()):
        print(len(path), *path, sep="\n  ")


if __name__ == "__main__":
    main()
