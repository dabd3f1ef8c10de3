"""Distributed training as `torchrun` starts it: rendezvous, reductions over all ranks, and shards of the global batch.

With one process every method returns what it was given, so that the loop reads the same for one and for many.
Tensors on GPUs are reduced by NCCL, all others by gloo.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
from torch import Tensor
from torch import distributed as dist

from rfdlc.errors import InputError

BUCKET = 2**25  # bytes per all-reduce: enough for the full bandwidth; several are under way at once
TIMEOUT = timedelta(minutes=30)  # machines of a large job start minutes apart
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ProcessGroup:
    """This process among `world_size` processes, `local_world_size` of them on this machine. Rank 0 is the main one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def single(self) -> bool:
        return self.world_size == 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    # -- values: none of these is differentiated ---------------------------------------------------------------

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over all ranks."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.single:
            return values
        result = values.detach().clone()
        dist.all_reduce(result, how)
        return result

    def all_gather(self, values: Tensor) -> Tensor:
        """(world_size, ...): the values of every rank, all of the same shape."""
        if self.single:
            return values[None]
        found = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(found, values)
        return torch.stack(found)

    def all_min(self, number: int) -> int:
        """The smallest number that any rank has."""
        return int(self._all_reduce(torch.tensor(number), dist.ReduceOp.MIN))

    def all_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. All ranks wait for one another."""
        return bool(self.all_max(torch.tensor(int(flag))))

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_any(False)

    # -- tensors in place --------------------------------------------------------------------------------------

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one type by their sums over all ranks, in buckets."""
        if self.single:
            return
        pending = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            pending.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in pending:
            work.wait()
            for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(summed.view(tensor.shape))

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace floating-point tensors by their mean over all ranks; counters are equal on all ranks already."""
        real = [tensor for tensor in tensors if tensor.is_floating_point()]
        if self.single or not real:
            return
        self.all_reduce_(real)
        torch._foreach_div_(real, self.world_size)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of rank 0."""
        for tensor in () if self.single else tensors:
            dense = tensor.contiguous()
            dist.broadcast(dense, 0)
            tensor.copy_(dense)

    # -- results and errors ------------------------------------------------------------------------------------

    def gather(self, shard: Tensor | None, dim: int) -> Tensor | None:
        """On rank 0 the shards of all ranks (on the CPU), concatenated in order; a rank may have none."""
        if self.single:
            return shard
        shapes: list[torch.Size | None] = [None] * self.world_size
        dist.all_gather_object(shapes, None if shard is None else shard.shape)
        if not self.main:
            if shard is not None:
                dist.send(shard.contiguous(), 0)
            return None
        found = [shard] if shard is not None else []
        for rank, shape in enumerate(shapes):
            if rank > 0 and shape is not None:
                received = torch.empty(shape)
                dist.recv(received, rank)
                found.append(received)
        return torch.cat(found, dim) if found else None

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """An InputError of any rank stops all of them, and rank 0 reports it. All wait at the end."""
        if self.single:
            yield
            return
        wrong: str | None = None
        try:
            yield
        except InputError as error:
            wrong = str(error)
        found: list[str | None] = [None] * self.world_size
        dist.all_gather_object(found, wrong)
        rank, first = next(((r, text) for r, text in enumerate(found) if text), (0, None))
        if first is None:
            return
        if not self.main:
            raise SystemExit(2)
        raise InputError(first if rank == 0 else f"process {rank}: {first}")

    def local_device(self, device: torch.device) -> torch.device:
        """The device of this rank: each has a GPU of its own."""
        if self.single or device.type == "cpu":
            return device
        if device != torch.device("cuda"):
            raise InputError(
                f"device={device} would be shared by {self.local_world_size} processes: use device=cuda for one each"
            )
        gpus = torch.cuda.device_count()
        if self.local_world_size > gpus:
            raise InputError(
                f"{self.local_world_size} processes on this machine, but {gpus} GPUs: start one process per GPU "
                f"(--nproc-per-node {gpus}), or use device=cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def shard_size(self, batch_size: int, accumulate: int) -> int:
        """The number of samples of a global batch that this rank has."""
        size, left = divmod(batch_size, self.world_size)
        if left:
            near = max(size, 1) * self.world_size
            raise InputError(
                f"batch_size {batch_size} cannot be divided among {self.world_size} processes: it is the size of the "
                f"global batch and must be a multiple of {self.world_size}, for example {near}"
            )
        if accumulate > size:
            raise InputError(f"accumulate {accumulate} is more than the {size} samples per step and process: use less")
        return size


SINGLE = ProcessGroup()


def under_torchrun() -> bool:
    """Whether `torchrun` started this process: it starts the same command again after a worker has died."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def started_processes() -> int:
    """The number of processes that were started to work together."""
    return _variable("WORLD_SIZE", 1) if "MASTER_ADDR" in os.environ else 1


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """The processes that `torchrun` started, connected; otherwise this process alone."""
    if started_processes() == 1:
        yield SINGLE
        return
    group = ProcessGroup(
        _variable("RANK"), _variable("WORLD_SIZE", 1), _variable("LOCAL_RANK"), _variable("LOCAL_WORLD_SIZE", 1)
    )
    opened = not dist.is_initialized()
    if opened:
        on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
        rendezvous("cpu:gloo,cuda:nccl" if on_gpus else "gloo", group.rank, group.world_size)
    yield group  # after an error the group stays open: other ranks may never come to close it
    if opened:
        dist.destroy_process_group()


def rendezvous(backend: str, rank: int, world_size: int) -> None:
    """Open the process group.

    torchrun keeps one store for all its attempts, with the addresses of dead workers in it, and the count of restarts
    differs between machines. So the ranks of an attempt first agree on a new name, and keep their addresses under it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)
    name = _offer_name(store, world_size) if rank == 0 else _accept_name(store, rank)
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=world_size)


def _offer_name(store: dist.Store, world_size: int) -> str:
    """Rank 0 answers every caller until all live ranks have accepted its name; calls of dead workers do no harm."""
    name, others = uuid4().hex, [str(rank) for rank in range(1, world_size)]
    began = time.monotonic()
    while not store.check([f"{name}/{rank}" for rank in others]):
        for rank in others:
            if store.check([f"caller/{rank}"]):
                store.set(f"answer/{store.get(f'caller/{rank}').decode()}", name)
        time.sleep(POLL_SECONDS)
        if time.monotonic() - began > TIMEOUT.total_seconds():
            raise TimeoutError(f"not all of {world_size} processes started within {TIMEOUT}")
    return name


def _accept_name(store: dist.Store, rank: int) -> str:
    """Call under a unique name, and take the answer."""
    caller = uuid4().hex
    store.set(f"caller/{rank}", caller)
    name = store.get(f"answer/{caller}").decode()
    store.set(f"{name}/{rank}", "accepted")
    return name


def _variable(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, about `BUCKET` bytes each."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(t.numel() * t.element_size() for t in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
