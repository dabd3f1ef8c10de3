"""The server with logged decisions and metrics, beside the same server without: 10,000
requests, 64 at a time.

    python benchmarks/watched_serve.py [--requests 10000]
        writes benchmarks/results/watched_serve.csv

Rounds alternate, so that whatever else the machine does slows both alike; metrics of
the logging server are read once per round. At the end logged decisions are compared
with the answers. Then a decider is replaced ten times under load: no request may fail,
and every answer must be that of the decider that it names.
"""

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from load import Reply, load, server
from load import request as post
from recording import write
from rfdlc.data.load import load as load_data
from rfdlc.monitoring.feedback import decider_version
from rfdlc.monitoring.watch import read_log
from rfdlc.training.model import Model
from rfdlc.training.train import train

ROUNDS, CONCURRENCY, SWAPS = 20, 64, 10
Row = dict[str, Any]


def logged(folder: Path, requests: list[bytes], place: Path) -> list[Row]:
    """Time with a log and metrics, and without."""
    seconds: dict[str, list[float]] = {"plain": [], "log": []}
    replies: list[Reply] = []
    each = len(requests) // ROUNDS
    with (
        server(folder) as (_, plain),
        server(folder, "--log-decisions", str(place / "log")) as (_, port),
    ):
        for warm_up in (plain, port):
            load(warm_up, requests[:300], 8)
        for round_ in range(ROUNDS):
            some = requests[round_ * each : (round_ + 1) * each]
            order = ("plain", "log") if round_ % 2 else ("log", "plain")
            for kind in order:
                found, taken = load(
                    {"plain": plain, "log": port}[kind], some, CONCURRENCY
                )
                seconds[kind].append(taken)
                replies += found if kind == "log" else []
            urllib.request.urlopen(
                f"http://127.0.0.1:{port}/metrics", timeout=10
            ).read()
    answers = [json.loads(reply.body) for reply in replies if reply.status == 200]
    log = read_log(place / "log")
    actions = [log.decider.utility.actions[i] for i in log.decisions.actions]
    files = len(list((place / "log").glob("*.parquet")))
    what = f"digits, {len(requests):,} requests, {CONCURRENCY} at a time"
    with_log, without = (np.array(seconds[kind]) for kind in ("log", "plain"))
    ratio = round(float(np.median(with_log / without)), 3)
    row = {
        "value": round(with_log.sum(), 2),
        "unit": "s",
        "reference": round(without.sum(), 2),
        "ratio": ratio,
    }
    same = sorted(actions) == sorted(
        [each["action"][0] for each in answers] + actions_of(folder, requests[:300])
    )
    return [
        {"what": f"{what}: answered", "value": len(answers), "required": len(requests)},
        {
            "what": (
                f"{what}: time with a log and metrics against without (ratio: median of"
                " rounds)"
            ),
            **row,
            "required": "ratio at most 1.1",
        },
        {
            "what": f"{what}: logged decisions, in {files} files",
            "value": len(actions),
            "required": len(requests) + 300,
        },
        {
            "what": f"{what}: actions in the log are those that were answered",
            "value": int(same),
            "required": 1,
        },
    ]


def actions_of(folder: Path, requests: list[bytes]) -> list[str]:
    """The actions that the library decides for the samples of the warm-up."""
    model = Model.load(folder)
    x = np.array(
        [json.loads(body.partition(b"\r\n\r\n")[2])["arrays"][0] for body in requests],
        dtype=np.uint8,
    )
    return [model.decider.utility.actions[i] for i in model.decide(x)]


def replaced(folder: Path, requests: list[bytes], place: Path) -> list[Row]:
    """A decider that is replaced while clients ask."""
    model, file = Model.load(folder), place / "decider.json"
    rng, classes = np.random.default_rng(0), len(model.decider.utility.classes)
    deciders = [
        model.decider.replace(target_prior=rng.dirichlet(np.full(classes, 5.0)))
        for _ in range(SWAPS)
    ]
    known = {decider_version(each): each for each in (model.decider, *deciders)}
    replies: list[Reply] = []
    done = threading.Event()
    with server(folder, "--decider", str(file)) as (_, port):

        def ask() -> None:
            while not done.is_set():
                replies.extend(load(port, requests[:500], CONCURRENCY)[0])

        thread = threading.Thread(target=ask)
        thread.start()
        for decider in deciders:
            decider.save(place / "beside.json")
            (place / "beside.json").rename(file)
            time.sleep(1.3)
        done.set()
        thread.join()
    x = np.array(
        [
            json.loads(body.partition(b"\r\n\r\n")[2])["arrays"][0]
            for body in requests[:500]
        ],
        dtype=np.uint8,
    )
    predicted = model.predict(x)
    values = {
        version: decider.explain(predicted).value for version, decider in known.items()
    }
    failed, wrong, seen = 0, 0, set()
    for reply in replies:
        if reply.status != 200:
            failed += 1
            continue
        told = json.loads(reply.body)
        seen.add(told["decider"])
        wrong += (
            abs(told["expected_utility"][0] - values[told["decider"]][reply.index])
            > 1e-4
        )
    what = (
        f"a decider replaced {SWAPS} times under load, {len(replies):,} requests,"
        f" {CONCURRENCY} at a time"
    )
    return [
        {"what": f"{what}: failed requests", "value": failed, "required": 0},
        {
            "what": f"{what}: answers that are not those of the decider that they name",
            "value": wrong,
            "required": 0,
        },
        {"what": f"{what}: deciders seen", "value": len(seen), "required": SWAPS + 1},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = place / "digits"
        train("digits-lt", out=folder, device="cpu", epochs=20)
        data = load_data("digits-lt").test
        assert data is not None
        bodies = [
            post(json.dumps({"arrays": sample[None].tolist()}).encode())
            for sample in data.array
        ]
        requests = [bodies[i % len(bodies)] for i in range(given.requests)]
        rows = [*logged(folder, requests, place), *replaced(folder, requests, place)]
    write(
        "watched_serve",
        rows,
        ["rfdlc", "torch", "fastapi", "uvicorn", "pyarrow", "prometheus_client"],
    )


if __name__ == "__main__":
    main()
