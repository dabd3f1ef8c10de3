"""Microseconds of the kernels of fused stages, by shape and by how the work is cut:
what their tables were chosen by.

    python benchmarks/kernels.py            on a GPU; a minute, most of it compilation
    python benchmarks/kernels.py --brief    the choices in use alone

Every kernel is captured ten times in a CUDA graph, so that launches cost nothing. A
result that is wrong stops it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recording import write
from rfdlc.data.loader import capture
from rfdlc.training.networks.fused import convolutions, kernels
from rfdlc.training.networks.fused.convolutions import Rows, Tiles

sys.path.append(str(Path(__file__).parents[1] / "tests/training"))
import plain_kernels as plain  # type: ignore[import-not-found]

BATCH, AT_ONCE, REPLAYS = 128, 10, 3
TRIED: dict[str, dict[int, list[Rows | Tiles]]] = {
    "ROWS": {
        16: [Rows(2, 400, 4, 3), Rows(2, 400, 4, 4), Rows(4, 400, 4, 3)],
        32: [Rows(2, 200, 4, 2), Rows(2, 200, 4, 3), Rows(1, 250, 4, 3)],
    },
    "TILES": {
        32: [Tiles(128, 4, 3), Tiles(256, 8, 3)],
        64: [
            Tiles(64, 4, 3),
            Tiles(128, 4, 2),
            Tiles(128, 4, 3),
            Tiles(128, 8, 3),
            Tiles(256, 8, 2),
        ],
    },
    "GRADIENT_ROWS": {
        16: [Rows(2, 200, 4, 4), Rows(2, 200, 4, 4, tallest=128), Rows(4, 400, 4, 3)],
        32: [Rows(1, 200, 8, 4), Rows(1, 200, 8, 4, tallest=128), Rows(2, 250, 8, 3)],
    },
    "GRADIENT_TILES": {
        64: [Tiles(32, 4, 3), Tiles(64, 4, 2), Tiles(64, 4, 3), Tiles(128, 4, 2)]
    },
}


def microseconds(function: Callable[[], Any]) -> float:
    def several() -> None:
        for _ in range(AT_ONCE):
            function()

    graph, _ = capture(several)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / (AT_ONCE * REPLAYS)


def check(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error < 0.01, f"wrong by {error:.3f} of the largest value"


def measure(options: argparse.Namespace) -> None:
    rows: list[dict[str, object]] = []
    for networks in (3, 15):
        for table, by_channels in TRIED.items():
            for channels, variants in by_channels.items():
                used = getattr(convolutions, table).get(channels)
                for variant in [used] if options.brief and used else variants:
                    for operation, time in timed(
                        table, networks, channels, variant
                    ).items():
                        what = (
                            f"{operation}, {networks} networks, {channels} channels:"
                            f" {variant}"
                        )
                        rows.append(
                            {"what": what, "value": f"{time:.1f}", "unit": "us"}
                        )
                        print(what, f"{time:.1f} us", flush=True)
    write("kernels", rows, ("torch", "triton"), options.commit)


def timed(table: str, networks: int, channels: int, variant: Any) -> dict[str, float]:
    """One table of the module changed for one number of channels; row tables are
    emptied to try tiles.
    """
    size, shape = (
        512 // channels,
        (networks, BATCH, 512 // channels, 512 // channels, channels),
    )
    x, dy = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    w = (
        torch.randn(networks * channels, channels, 3, 3, device="cuda")
        .div_(3 * channels**0.5)
        .bfloat16()
    )
    w = w.contiguous(memory_format=torch.channels_last)
    before = {name: getattr(convolutions, name) for name in TRIED}
    for name in before:
        setattr(
            convolutions,
            name,
            (
                {channels: variant}
                if name == table
                else {}
                if "ROWS" in name
                else before[name]
            ),
        )
    try:
        if "GRADIENT" in table:
            check(
                kernels.weight_gradient(dy, x, 1),
                plain.weight_gradient(dy.float(), x.float(), 1),
            )
            return {
                "weight gradient": microseconds(
                    lambda: kernels.weight_gradient(dy, x, 1)
                )
            }
        check(kernels.convolve(x, w, 1)[0], plain.convolve(x.float(), w.float(), 1)[0])
        check(
            kernels.input_gradient(dy, w, 1),
            plain.input_gradient(dy.float(), w.float(), 1),
        )
        return {
            f"convolution of {size} x {size}": microseconds(
                lambda: kernels.convolve(x, w, 1)
            ),
            f"its input gradient of {size} x {size}": microseconds(
                lambda: kernels.input_gradient(dy, w, 1)
            ),
        }
    finally:
        for name, table_before in before.items():
            setattr(convolutions, name, table_before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--commit", default="", help="commit to record, where there is no git"
    )
    parser.add_argument("--brief", action="store_true")
    measure(parser.parse_args())
