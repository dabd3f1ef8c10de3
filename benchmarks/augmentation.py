"""What augmentation takes of an epoch on a GPU: by kernels, an image per program, and
by operations of torch.

    python benchmarks/augmentation.py --data DIR
        results/augmentation.csv; half a minute

Five runs of `rf-dlc-strong` on CIFAR100-LT as one stack, 15 ResNet-32. DIR holds
cifar-100-python/. All batches of an epoch are drawn, augmented and normalised, and
nothing else; beside it stands an epoch of the training. And a checkpoint of one run,
which is written every 20 seconds.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from recording import write
from rfdlc.data import augment, policy
from rfdlc.data.load import load
from rfdlc.training.building import method_net
from rfdlc.training.loop import PreparedStage, build_stages, epochs
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.run import checksummed

METHOD, SOURCE, RUNS, REPEATED = "rf-dlc-strong", "cifar100-lt", 5, 7


def trained(parts: list[PreparedStage], net: ParticleNet) -> float:
    """Seconds of an epoch."""
    times = []
    for epoch in epochs(net, parts, {}):
        times.append(epoch.seconds)
        if epoch.epoch == REPEATED:
            break
    return median(times[2:])


def prepared(stage: PreparedStage) -> float:
    """Seconds in which the batches of an epoch are there, without training on them."""
    times = []
    for epoch in range(1, REPEATED + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in stage.loader.epoch(epoch):
            pass
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[2:])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--commit", default="", help="commit to record, where there is no git"
    )
    options = parser.parse_args()
    device, data, rows = (
        torch.device("cuda"),
        load(SOURCE, root=options.data),
        list[dict[str, object]](),
    )
    for shared in (0, 2):
        row, (_, chosen) = (
            METHODS[METHOD],
            resolve(METHOD, SOURCE, {"shared_stages": shared}),
        )
        net = place(
            method_net(row, chosen, data.input_shape, data.classes, range(RUNS)), device
        )
        stages = build_stages(row, chosen, data, range(RUNS), device)
        whole = trained(stages, net)
        title = (
            f"an epoch of {RUNS} runs of {chosen.particles} ResNet-32, {shared} stages"
            " shared"
        )
        rows.append({"what": title, "value": f"{1000 * whole:.1f}", "unit": "ms"})
        for how, kernels in (
            ("kernels", policy.kernels),
            ("torch", lambda images: None),
        ):
            stage = build_stages(row, chosen, data, range(RUNS), device)[0]
            with (
                patch.object(policy, "kernels", kernels),
                patch.object(augment, "kernels", kernels),
            ):
                own = prepared(stage)
            share = {
                "reference": "of the epoch",
                "ratio": f"{own / whole:.3f}",
                "required": "<= 0.1",
            }
            rows.append(
                {
                    "what": f"its batches by {how}",
                    "value": f"{1000 * own:.1f}",
                    "unit": "ms",
                    **share,
                }
            )
        began = time.perf_counter()
        size = len(checksummed(net.state_dict()))
        taken = (time.perf_counter() - began) / RUNS
        told = {"reference": f"{size / RUNS / 2**20:.1f} MiB"}
        rows.append(
            {
                "what": "weights of a run as a file",
                "value": f"{1000 * taken:.1f}",
                "unit": "ms",
                **told,
            }
        )
    write("augmentation", rows, ("torch", "triton"), options.commit)


if __name__ == "__main__":
    main()
