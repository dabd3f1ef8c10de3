"""`rfdlc predict`: predictions of any number of samples."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from rfdlc.cli.request import JsonOption, UtilityRequest, folder_decider, takes_request
from rfdlc.cli.train import Root, RunFolder, Source, ready
from rfdlc.cli.writing import check_writable, print_json


@takes_request
def predict(
    run: RunFolder,
    source: Source,
    request: UtilityRequest,
    out: Annotated[
        Path, Option("--out", "-o", help="Probabilities as .parquet or .csv; logits of the particles as .npz.")
    ] = Path("predictions.npz"),
    root: Root = None,
    split: Annotated[str | None, Option(help="train, val or test; by default the last that exists.")] = None,
    raw: Annotated[bool, Option("--raw", help="Write the model's own probabilities, not corrected.")] = False,
    skip_broken: Annotated[bool, Option("--skip-broken", help="Leave out and list unreadable images.")] = False,
    json: JsonOption = False,
) -> None:
    """Predict a data set with a trained model; `rfdlc decide`, `evaluate` and `report` read the result.

    The source is a folder of images (with or without class folders), a list of images, one image, a table, arrays, or a
    data set by name. Tables are written in parts, in constant memory: after an interruption the same command continues.
    Under torchrun each process predicts a share. Tables have one column per class with the calibrated and corrected
    probabilities (with `--raw` the model's own), `id` and `target` if they are known, and with `--utility` also
    `action` and `expected_utility`. An .npz file contains the logits of every particle and is made in memory.

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
            done = predict_it(
                run, source, out, split=split, root=root, utility=chosen, raw=raw, skip_broken=skip_broken
            )
        except KeyboardInterrupt:
            if out.suffix.lower() != ".npz":
                print(f"rfdlc: interrupted; the same command continues with {out}.parts", file=sys.stderr)
            raise
    if json:
        skipped = {"skipped": done.skipped, "skipped_file": done.skipped_file and str(done.skipped_file)}
        print_json({"out": str(out), "samples": done.samples, "complete": done.complete, **skipped, "run": str(run)})
    elif not done.complete:
        print("this process has finished its share; the last one to finish writes the file")
    else:
        print(f"{done.samples:,} samples: {out}")
        if done.skipped:
            print(f"{done.skipped:,} broken ones were left out{f': {done.skipped_file}' if done.skipped_file else ''}")
