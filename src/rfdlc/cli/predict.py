"""`rfdlc predict`: what a trained model says of any number of samples."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rfdlc.cli.request import JsonOption, UtilityRequest, folder_decider, takes_request
from rfdlc.cli.train import Root, RunFolder, Source, ready
from rfdlc.cli.writing import check_writable, print_json


@takes_request
def predict(
    run: RunFolder,
    source: Source,
    request: UtilityRequest,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Calibrated probabilities as .parquet or .csv; particle logits as .npz."),
    ] = Path("predictions.npz"),
    root: Root = None,
    split: Annotated[
        str | None, typer.Option("--split", help="train, val or test; by default the last there is.")
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out images that cannot be read, count and list them.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """What a trained model says of a data set; `rfdlc decide`, `evaluate` and `report` read the file.

    It reads a folder of images (in class folders or not), a list of them, one image, a table, arrays, or a data set by
    name. Tables are written part by part, in constant memory: after a kill, the same command goes on where it was.
    Under torchrun each process does its share. They hold the calibrated probabilities of the run's decider, one column
    a class, with `id` and `target` where they are known, and with `--utility` also `action` and `expected_utility`. An
    .npz file holds every particle's logits, and is made in memory.

    **Examples**

    - `rfdlc predict runs/a photos/ --out predictions.parquet --utility U.csv`
    - `rfdlc predict runs/a list.txt --out predictions.parquet --skip-broken`
    - `torchrun --nproc-per-node 8 -m rfdlc predict runs/a photos/ --out predictions.parquet`
    - `rfdlc predict runs/a patients.csv --out probabilities.csv`
    - `rfdlc predict runs/a digits-lt --out predictions.npz`
    """
    check_writable(out)
    with ready():
        from rfdlc.integrations.predict.predicting import predict as predict_it
        from rfdlc.training.run import Run

        chosen = request.read_utility(lambda: Run(run).classes, lambda: folder_decider(run))
        try:
            done = predict_it(run, source, out, split=split, root=root, utility=chosen, skip_broken=skip_broken)
        except KeyboardInterrupt:
            if out.suffix.lower() != ".npz":
                print(f"rfdlc: interrupted; the same command goes on with what is in {out}.parts", file=sys.stderr)
            raise
    if json:
        told = {"out": str(out), "samples": done.samples, "skipped": done.skipped, "complete": done.complete}
        print_json({**told, "skipped_file": done.skipped_file and str(done.skipped_file), "run": str(run)})
        return
    if not done.complete:
        print("this process has done its share; the one that ends last writes the file")
        return
    print(f"{done.samples:,} samples: {out}")
    if done.skipped:
        print(f"{done.skipped:,} broken ones were left out{f': {done.skipped_file}' if done.skipped_file else ''}")
