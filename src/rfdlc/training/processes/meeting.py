"""Where the processes of `torchrun` find one another, again after a worker has died.

torchrun keeps one store for all its attempts, and what dead workers wrote stays in it: a new worker that looks for its
peers there finds the addresses of dead ones. (A count of restarts does not help: each machine has its own.) So the
processes of an attempt first agree on a name that was never used, and keep theirs under it.
"""

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore, init_process_group  # type: ignore[attr-defined]

PATIENCE = timedelta(minutes=30)  # machines of a large job start minutes apart
PAUSE = 0.02  # seconds


def connect(backend: str, rank: int, world: int) -> None:
    """Open the process group of all processes that torchrun, or whoever else set its variables, has started."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        init_process_group(backend)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    kept = TCPStore(address, port, is_master=False, timeout=PATIENCE)
    name = _offered_name(kept, world) if rank == 0 else _agreed_name(kept, rank)
    init_process_group(backend, store=PrefixStore(name, kept), rank=rank, world_size=world)


def _offered_name(store: Store, world: int) -> str:
    """Process 0 answers whoever calls, until all who live have taken its name; calls of the dead do no harm."""
    name, others = uuid4().hex, [str(rank) for rank in range(1, world)]
    began = time.monotonic()
    while not store.check([f"{name}/{rank}" for rank in others]):
        for rank in others:
            if store.check([f"caller/{rank}"]):
                store.set(f"answer/{store.get(f'caller/{rank}').decode()}", name)
        time.sleep(PAUSE)
        if time.monotonic() - began > PATIENCE.total_seconds():
            raise TimeoutError(f"not all of {world} processes came within {PATIENCE}")
    return name


def _agreed_name(store: Store, rank: int) -> str:
    """Call under a name of one's own, and take the answer."""
    caller = uuid4().hex
    store.set(f"caller/{rank}", caller)
    name = store.get(f"answer/{caller}").decode()
    store.set(f"{name}/{rank}", "taken")
    return name
