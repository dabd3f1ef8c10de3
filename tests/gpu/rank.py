"""One process of a training on a GPU, as torchrun starts it: `python rank.py DATA OUT
PARALLEL BACKBONE`.

Several processes share the one GPU that a test may have, joined by gloo. One alone is
joined by NCCL, which needs a GPU for each: its sums are over itself, by the same calls
as those of many.
"""

import os
import sys

import torch
from torch import nn

import rfdlc
from rfdlc.training import distributed

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
PLAIN = {
    "precision": "float32",
    "augment": "none",
    "mixup": 0.0,
    "epochs": 3,
    "batch_size": 64,
    "calibration": "none",
}


class Convolutions(nn.Module):
    """A network of the user's own whose output does not depend on how a batch is
    divided.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu()).relu().mean((2, 3))


class Sharing(distributed.ProcessGroup):
    """Processes that use the same GPU; one alone also reduces."""

    single = False

    def local_device(self, device: torch.device) -> torch.device:
        return torch.device("cuda", 0)


def main(data: str, out: str, parallel: str, backbone: str) -> None:
    network = {
        "own": {"backbone": Convolutions},
        "stack": {"backbone": "mlp", "widths": (32,)},
    }[backbone]
    if "RANK" in os.environ:
        backend = (
            "cpu:gloo,cuda:nccl"
            if os.environ["WORLD_SIZE"] == "1"
            else "cpu:gloo,cuda:gloo"
        )
        joined = distributed.rendezvous
        distributed.rendezvous = lambda _, rank, world_size: joined(
            backend, rank, world_size
        )
        distributed.ProcessGroup = Sharing
        distributed.started_processes = lambda: 2
    rfdlc.train(data, out=out, parallel=parallel, device="cuda", **network, **PLAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
