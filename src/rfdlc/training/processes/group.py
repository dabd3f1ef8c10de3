"""The names of `rfdlc.training.distributed` before it was one file, until the last module uses the new ones."""

from typing import Any

from rfdlc.training.distributed import SINGLE as ALONE
from rfdlc.training.distributed import ProcessGroup, process_group, started_processes, under_torchrun

Processes: Any = ProcessGroup
joined, started = process_group, started_processes
for old, new in {
    "alone": "single", "writes": "main", "total": "all_sum", "largest": "all_max", "everyones": "all_gather",
    "least": "all_min", "any": "all_any", "wait": "barrier", "total_": "all_reduce_", "mean_": "average_",
    "same_": "broadcast_", "gathered": "gather", "together": "raising_together", "own_device": "local_device",
    "share": "shard_size",
}.items():  # fmt: skip
    setattr(Processes, old, getattr(ProcessGroup, new))
Processes.world = property(lambda group: group.world_size)
Processes.local = property(lambda group: group.local_world_size)
__all__ = ["ALONE", "Processes", "joined", "started", "under_torchrun"]
