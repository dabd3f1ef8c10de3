"""Two processes for a test: forked, which spares each the seconds in which torch is
imported.
"""

import faulthandler
import os
import socket
import sys
import traceback

import pytest
import torch

# DistributedDataParallel imports it: once, and not in every process
import torch._dynamo

from rfdlc.errors import InputError

SECONDS = 300


@pytest.fixture
def two_processes(tmp_path):
    """A function: runs `work()` in two processes as torchrun would start them; what
    each returned, or how it ended.
    """

    def run(work, results=(0, 1)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [
            _forked(work, rank, port, tmp_path / f"result-{rank}") for rank in (0, 1)
        ]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        return [
            torch.load(tmp_path / f"result-{rank}", weights_only=False)
            for rank in results
        ]

    return run


def _forked(work, rank, port, result):
    child = os.fork()
    if child:
        return child
    faulthandler.dump_traceback_later(
        SECONDS, exit=True, file=sys.__stderr__
    )  # rather than a test that never ends
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        found = work()
    except SystemExit as ended:
        found = f"exit {ended.code}"
    except InputError as error:
        found = str(error)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    torch.save(found, result)
    os._exit(0)
