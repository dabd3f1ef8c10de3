"""Distributed training as `torchrun` starts it: rendezvous, reductions over all ranks,
and shards of the global batch.

With one process every method returns what it was given. Tensors on GPUs are reduced by
NCCL, all others by gloo.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from rfdlc.errors import InputError, end_with_parent, expect, listing

TIMEOUT = timedelta(minutes=30)  # machines of a large job start minutes apart
UNREACHABLE = re.compile(r"[Tt]imed out|[Tt]imeout|Connection (closed|reset|refused)")
PARALLEL = ("auto", "sum", "ddp", "fsdp")
BUCKET = 25  # megabytes of gradients that are summed at once
AGAIN = "start the same command again to continue the run"


@dataclass(frozen=True)
class ProcessGroup:
    """This process among `world_size` processes, `local_world_size` of them on this
    machine. Rank 0 is the main one.
    """

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

    def all_sum(
        self, values: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """The sum over all ranks, or another reduction; it is not differentiated."""
        if self.single:
            return values
        result = values.detach().clone()
        dist.all_reduce(result, how)
        return result

    def all_max(self, values: Tensor) -> Tensor:
        return self.all_sum(values, dist.ReduceOp.MAX)

    def all_min(self, number: int) -> int:
        return -int(self.all_max(torch.tensor(-number)))

    def all_any(self, flag: bool) -> bool:
        return bool(self.all_max(torch.tensor(int(flag))))

    def barrier(self) -> None:
        self.all_any(False)

    def all_gather(self, values: Tensor) -> Tensor:
        """(world_size, ...): the values of every rank, all of the same shape."""
        if self.single:
            return values[None]
        found = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(found, values)
        return torch.stack(found)

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one type by their sums over all ranks, in one
        reduction.
        """
        if self.single:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, summed in zip(
            tensors, flat.split([t.numel() for t in tensors]), strict=True
        ):
            tensor.copy_(summed.view(tensor.shape))

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace floating-point tensors by their mean over all ranks; counters are
        equal on all ranks already.
        """
        real = (
            []
            if self.single
            else [tensor for tensor in tensors if tensor.is_floating_point()]
        )
        if real:
            self.all_reduce_(real)
            torch._foreach_div_(real, self.world_size)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of rank 0."""
        for tensor in () if self.single else tensors:
            dense = tensor.contiguous()
            dist.broadcast(dense, 0)
            tensor.copy_(dense)

    def gather(self, shard: Tensor | None, dim: int) -> Tensor | None:
        """On rank 0 the shards of all ranks (on the CPU), concatenated in order; a rank
        may have none.
        """
        if self.single:
            return shard
        shards: list[Tensor | None] = [None] * self.world_size
        dist.gather_object(shard, shards if self.main else None)
        found = [tensor for tensor in shards if tensor is not None]
        return torch.cat(found, dim) if found else None

    @contextmanager
    def raising_together(self) -> Iterator[None]:
        """An InputError of any rank stops all of them, and rank 0 reports it. All wait
        at the end.
        """
        if self.single:
            yield
            return
        wrong: str | None = None
        try:
            yield
        except InputError as error:
            wrong = f"process {self.rank}: {error}" if self.rank else str(error)
        found: list[str | None] = [None] * self.world_size
        dist.all_gather_object(found, wrong)
        for message in filter(None, found):
            raise InputError(message) if self.main else SystemExit(2)

    def expect_same(self, values: Mapping[str, Any]) -> None:
        """Stop all ranks where they differ: they would train different things, or wait
        for each other forever.
        """
        if self.single:
            return
        found: list[dict[str, str]] = [{}] * self.world_size
        dist.all_gather_object(
            found, {key: str(value) for key, value in values.items()}
        )
        different = [
            key
            for key in found[0]
            if any(own.get(key) != found[0][key] for own in found)
        ]
        if different:
            each = ", ".join(
                f"{key} ({listing(dict.fromkeys(own.get(key) for own in found))})"
                for key in different
            )
            message = (
                f"the processes were started with different {each}: give all of them"
                " the same command and data"
            )
            raise InputError(message) if self.main else SystemExit(2)

    def local_device(self, device: torch.device) -> torch.device:
        """The device of this rank: each has a GPU of its own."""
        if self.single or device.type == "cpu":
            return device
        local, gpus = self.local_world_size, torch.cuda.device_count()
        shared = (
            f"device={device} would be shared by {local} processes: use device=cuda for"
            " one each"
        )
        expect(device == torch.device("cuda"), shared)
        few = (
            f"{local} processes on this machine, but {gpus} GPUs: start one process"
            " per GPU"
        )
        expect(local <= gpus, f"{few} (--nproc-per-node {gpus}), or use device=cpu")
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def shard_size(self, batch_size: int, accumulate: int) -> int:
        """The number of samples of a global batch that this rank has."""
        count, size = self.world_size, batch_size // self.world_size
        fix = (
            f"the global batch must be a multiple of {count}, for example"
            f" {max(size, 1) * count}"
        )
        expect(
            size * count == batch_size,
            f"batch_size {batch_size} cannot be divided among {count} processes: {fix}",
        )
        few = (
            f"accumulate {accumulate} is more than the {size} samples per step and"
            f" process: use at most {size}"
        )
        expect(accumulate <= size, few)
        return size


SINGLE = ProcessGroup()


def taken_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """What a backward pass has left in the parameters, which is removed from them."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


class _Called(nn.Module):
    """A network, called by a function of it."""

    def __init__(self, net: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.function = net, function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def overlapped(
    net: nn.Module, function: Callable[[Tensor], Tensor], some_unused: bool
) -> DistributedDataParallel:
    """The function, after which a backward pass sums gradients over all ranks, bucket
    by bucket, while it goes on.

    Losses are divided by sums over the global batch, so gradients are summed and not
    averaged. Buffers stay local.
    """
    called = _Called(net, function)
    local = [name for name, _ in called.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(called, local)
    options: dict[str, Any] = {
        "gradient_as_bucket_view": True,
        "init_sync": False,
        "bucket_cap_mb": BUCKET,
    }
    found = DistributedDataParallel(
        called, find_unused_parameters=some_unused, **options
    )
    found.register_comm_hook(None, _summed)
    return found


def _summed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def under_torchrun() -> bool:
    """Whether `torchrun` started this process: it starts the same command again after a
    worker has died.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def started_processes() -> int:
    """The number of processes that were started to work together."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "MASTER_ADDR" in os.environ else 1


# for as long as this process lives: the next group may begin before rank 0 has left the
# last one
@cache
def _store(rank: int) -> TCPStore:
    """Where the ranks find each other: the store of torchrun, else one that rank 0
    keeps.
    """
    kept = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=kept,
        timeout=TIMEOUT,
    )


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """The processes that `torchrun` started, connected; otherwise this process
    alone.
    """
    if started_processes() == 1:
        yield SINGLE
        return
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    group = ProcessGroup(
        *(int(os.environ.get(name, default)) for name, default in names.items())
    )
    opened = not dist.is_initialized()
    try:
        if opened:
            if (
                under_torchrun()
            ):  # nobody else would end this process, which may wait for the others
                end_with_parent(
                    f"rfdlc: process {group.rank} ends, because torchrun has ended:"
                    f" {AGAIN}"
                )
            on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
            rendezvous(
                "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
                group.rank,
                group.world_size,
            )
        # after an error the group stays open: other ranks may never come to close it
        yield group
    except (RuntimeError, TimeoutError) as error:  # of gloo, NCCL and the store
        if isinstance(error, RuntimeError) and not UNREACHABLE.search(str(error)):
            raise
        raise InputError(
            f"the other processes no longer answer ({str(error).splitlines()[0]}):"
            f" {AGAIN}"
        ) from None
    if opened:
        dist.destroy_process_group()


def rendezvous(backend: str, rank: int, world_size: int) -> None:
    """Open the process group.

    One store serves all groups of a process, and torchrun's all its attempts, with the
    addresses of dead workers in it; the count of restarts differs between machines. So
    the ranks first agree on a new name, and keep their addresses under it: rank 0
    answers every caller until all live ranks have accepted its name; calls of dead
    workers do no harm.
    """
    store = _store(rank)
    name = own = uuid4().hex
    if rank > 0:
        store.set(f"caller/{rank}", own)
        name = store.get(f"answer/{own}").decode()
        store.set(f"{name}/{rank}", "accepted")
    others, began = range(1, world_size) if rank == 0 else (), time.monotonic()
    while others and not store.check([f"{name}/{other}" for other in others]):
        for caller in (
            f"caller/{other}" for other in others if store.check([f"caller/{other}"])
        ):
            store.set(f"answer/{store.get(caller).decode()}", name)
        time.sleep(0.02)
        if time.monotonic() - began > TIMEOUT.total_seconds():
            raise TimeoutError(
                f"not all of {world_size} processes started within {TIMEOUT}"
            )
    dist.init_process_group(
        backend,
        store=PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    dist.all_reduce(
        torch.zeros(1)
    )  # of all ranks: one that leaves at once must not close while others still connect
