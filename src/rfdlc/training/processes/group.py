"""Several processes that train one run, as `torchrun` starts them: who this one is, and sums over all of them.

With one process everything here is what it was given, so that the loop reads the same for one and for many.
Numbers of the device travel by NCCL on GPUs, all else by gloo.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch import distributed as dist

from rfdlc.errors import InputError
from rfdlc.training.processes.meeting import connect

BUCKET = 2**25  # bytes that are summed in one go: large enough for the full bandwidth, several are under way at once


@dataclass(frozen=True)
class Processes:
    """This process among `world` ones, `local` of them on this machine. Process 0 writes and speaks."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local: int = 1

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def writes(self) -> bool:
        return self.rank == 0

    # -- numbers: nothing here is differentiated ---------------------------------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The maximum over all processes, number by number."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.alone:
            return values
        result = values.detach().clone()
        dist.all_reduce(result, how)
        return result

    def everyones(self, values: Tensor) -> Tensor:
        """(world, ...): the numbers of every process, all of the same shape."""
        if self.alone:
            return values[None]
        found = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(found, values)
        return torch.stack(found)

    def least(self, number: int) -> int:
        """The smallest number that any process has."""
        return int(self._reduced(torch.tensor(number), dist.ReduceOp.MIN))

    def any(self, mark: bool) -> bool:
        """Whether any process says so. All of them wait for one another here."""
        return bool(self.largest(torch.tensor(int(mark))))

    def wait(self) -> None:
        """Until all processes have come here."""
        self.any(False)

    # -- tensors in place --------------------------------------------------------------------------------------

    def total_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one type by their sums over all processes, many at a time."""
        if self.alone:
            return
        waiting = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            waiting.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in waiting:
            work.wait()
            for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(summed.view(tensor.shape))

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace what is a real number by its mean over all processes; counters are the same everywhere already."""
        real = [tensor for tensor in tensors if tensor.is_floating_point()]
        if self.alone or not real:
            return
        self.total_(real)
        torch._foreach_div_(real, self.world)

    def same_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of process 0."""
        for tensor in () if self.alone else tensors:
            dense = tensor.contiguous()
            dist.broadcast(dense, 0)
            tensor.copy_(dense)

    # -- results and errors ------------------------------------------------------------------------------------

    def gathered(self, part: Tensor | None, dim: int) -> Tensor | None:
        """On process 0 all processes' parts (on the CPU) put together in turn, some of which may be missing."""
        if self.alone:
            return part
        shapes: list[torch.Size | None] = [None] * self.world
        dist.all_gather_object(shapes, None if part is None else part.shape)
        if not self.writes:
            if part is not None:
                dist.send(part.contiguous(), 0)
            return None
        found = [part] if part is not None else []
        for rank, shape in islice(enumerate(shapes), 1, None):
            if shape is not None:
                received = torch.empty(shape)
                dist.recv(received, rank)
                found.append(received)
        return torch.cat(found, dim) if found else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """What any process finds wrong in here stops all of them, and process 0 says it. All wait at the end."""
        wrong: str | None = None
        try:
            yield
        except InputError as error:
            if self.alone:
                raise
            wrong = str(error)
        if self.alone:
            return
        found: list[str | None] = [None] * self.world
        dist.all_gather_object(found, wrong)
        rank, first = next(((r, text) for r, text in enumerate(found) if text), (0, None))
        if first is None:
            return
        if not self.writes:
            raise SystemExit(2)
        raise InputError(first if rank == 0 else f"process {rank}: {first}")

    def own_device(self, device: torch.device) -> torch.device:
        """The device of this process, of those on its machine: each has a GPU of its own."""
        if self.alone or device.type == "cpu":
            return device
        if device != torch.device("cuda"):
            raise InputError(f"device={device} would be that of {self.local} processes: use device=cuda for one each")
        gpus = torch.cuda.device_count()
        if self.local > gpus:
            raise InputError(
                f"{self.local} processes on this machine, but {gpus} GPUs: start one process a GPU "
                f"(--nproc-per-node {gpus}), or use device=cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def share(self, batch_size: int, accumulate: int) -> int:
        """Samples of a batch that this process has, of all processes' `batch_size`."""
        if batch_size % self.world:
            near = batch_size // self.world * self.world or self.world
            raise InputError(
                f"batch_size {batch_size} cannot be shared by {self.world} processes: it counts the samples of all "
                f"of them and must be a multiple of {self.world}, for example {near}"
            )
        if accumulate > batch_size // self.world:
            raise InputError(
                f"accumulate {accumulate} is more than the {batch_size // self.world} samples that a process has of "
                f"a batch: use at most {batch_size // self.world}"
            )
        return batch_size // self.world


ALONE = Processes()


def under_torchrun() -> bool:
    """Whether `torchrun` started this process: it starts the same command again after a worker has died."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def started() -> int:
    """How many processes were started to work together."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that `torchrun` started, connected; this one alone where there are no others."""
    number = {name: int(os.environ.get(name, default)) for name, default in _VARIABLES.items()}
    if started() == 1:
        yield ALONE
        return
    mine = Processes(number["RANK"], number["WORLD_SIZE"], number["LOCAL_RANK"], number["LOCAL_WORLD_SIZE"])
    began = not dist.is_initialized()
    if began:
        on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
        connect("cpu:gloo,cuda:nccl" if on_gpus else "gloo", mine.rank, mine.world)
    yield mine  # after an error the group is left as it is: the others may never come to close it
    if began:
        dist.destroy_process_group()


_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, about `BUCKET` bytes each."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
