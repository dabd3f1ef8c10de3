"""`rfdlc export`: a run folder as one file that decides."""

from pathlib import Path
from typing import Annotated

import typer

from rfdlc.cli.reading import folder_decider
from rfdlc.cli.request import JsonOption, UtilityRequest, takes_request
from rfdlc.cli.train import RunFolder, ready
from rfdlc.cli.writing import check_writable, print_json
from rfdlc.errors import InputError


@takes_request
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="`model.onnx`, or `model.pt2` for torch.export.")],
    request: UtilityRequest,
    utility_input: Annotated[
        bool, typer.Option("--utility-input", help="The utility is an input of the graph: costs may change later.")
    ] = False,
    resize: Annotated[bool, typer.Option("--resize", help="The graph takes images of any size.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Networks in 16 bits.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Weights in 8 bits (ONNX only).")] = False,
    json: JsonOption = False,
) -> None:
    """Write preprocessing, particles, calibration, prior, expected utility and action as one graph.

    The graph is compared with the run before it is written, and refused where it differs. A model card is written
    beside it.

    **Examples**

    - `rfdlc export runs/a model.onnx --utility U.csv`
    - `rfdlc export runs/a model.onnx --utility-input --resize`
    - `rfdlc export runs/a model.onnx --int8 --json`
    - `rfdlc export runs/a model.pt2`
    """
    check_writable(out)
    if half and int8:
        raise InputError("--half and --int8 exclude each other: give one of them")
    with ready():
        from rfdlc.integrations.onnx.exporting import export as export_it
        from rfdlc.training.run import Run

        chosen = request.read_utility(lambda: Run(run).classes, lambda: folder_decider(run))
        precision = "half" if half else "int8" if int8 else "float32"
        done = export_it(run, out, utility=chosen, utility_input=utility_input, resize=resize, precision=precision)
    parity, size = done.parity, done.path.stat().st_size
    if json:
        cards = [str(card) for card in done.cards]
        print_json({"out": str(out), "bytes": size, "precision": precision, "cards": cards, **parity.to_dict()})
        return
    print(f"{out}: {size:,} bytes, {precision}")
    print(
        f"parity on {parity.samples:,} {parity.inputs}: {parity.decisions_changed} decisions changed, "
        f"probabilities within {parity.largest_difference:.2g}{parity.rounding or ''}"
    )
    print(f"model card: {done.cards[0]}")
    if out.suffix == ".onnx":
        print(f"next: rfdlc serve {out}")
