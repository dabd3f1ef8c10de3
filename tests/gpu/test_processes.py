"""Trainings of several processes on a GPU equal that of one: gradients by DDP, weights
sharded by FSDP2, by NCCL.
"""

import os
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402

RANK = Path(__file__).parent / "rank.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """240 samples: the last batch of 64 has 48."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    labels = {
        "train": np.repeat(np.arange(4), (120, 60, 40, 20)),
        "test": np.arange(40) % 4,
    }
    colours, centres = rng.normal(128, 50, (4, 3, 1, 1)), rng.normal(0, 1, (4, 16))
    images, features = {}, {}
    for split, y in labels.items():
        noisy = colours[y] + rng.normal(0, 30, (len(y), 3, 16, 16))
        images |= {
            f"x_{split}": np.clip(noisy, 0, 255).astype(np.uint8),
            f"y_{split}": y,
        }
        features |= {
            f"x_{split}": (
                (centres[y] + rng.normal(0, 1, (len(y), 16))).astype(np.float32)
            ),
            f"y_{split}": y,
        }
    np.savez(folder / "own.npz", **images)
    np.savez(folder / "stack.npz", **features)
    return {name: folder / f"{name}.npz" for name in ("own", "stack")}


def weights(
    source: Path, out: Path, parallel: str, backbone: str, processes: int
) -> "dict[str, torch.Tensor]":
    """The weights after a training by so many processes: two by gloo, one by NCCL, with
    0 one without a group.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(RANK), str(source), str(out), parallel, backbone]
    group = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
    }
    ranks = [
        {**group, "RANK": str(rank), "LOCAL_RANK": "0"} for rank in range(processes)
    ] or [{}]
    started = [
        subprocess.Popen(
            command, env=os.environ | rank, stderr=subprocess.PIPE, text=True
        )
        for rank in ranks
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), errors
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("backbone", ["own", "stack"])
def test_equal_to_one_process(
    backbone: str, data: dict[str, Path], tmp_path: Path
) -> None:
    plain = weights(data[backbone], tmp_path / "plain", "auto", backbone, 0)
    for parallel, processes in (
        *product(("sum", "ddp"), (1, 2)),
        ("fsdp", 1),
    ):  # gloo cannot shard on a GPU
        found = weights(
            data[backbone],
            tmp_path / f"{parallel}-{processes}",
            parallel,
            backbone,
            processes,
        )
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            assert torch.allclose(found[name], tensor, atol=1e-4), (
                parallel,
                processes,
                name,
            )
