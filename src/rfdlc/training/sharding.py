"""Sharded training (FSDP2): a rank has its part of the working weights, of gradients
and of the optimiser's state.

The network itself stays whole on every rank, for evaluations and checkpoints. It is
brought up to date by each epoch.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rfdlc.training.distributed import ProcessGroup, taken_gradients
from rfdlc.training.networks.particles import ParticleNet


class ShardedCopy:
    """A working copy of a network whose stages are sharded over all ranks; what is
    small, as heads are, is whole.
    """

    def __init__(self, net: ParticleNet, processes: ProcessGroup) -> None:
        self.whole, self.net, self.processes = net, deepcopy(net), processes
        self.net.single = []  # slices of weights are not taken outside of a stage
        device = net.head_weights.device.type
        for parameter in (
            self.net.parameters()
        ):  # FSDP2 takes no other memory layout, such as channels last
            parameter.data = parameter.data.contiguous()
        mesh: DeviceMesh = init_device_mesh(device, (processes.world_size,))
        for stage in (*self.net.trunk, *self.net.branches):
            fully_shard(
                stage,
                mesh=mesh,
                shard_placement_fn=partial(_longest, processes.world_size),
            )
        self.parameters: list[Tensor] = [
            p for part in self.net.parts("all") for p in part.parameters()
        ]
        self.local = [_local(parameter) for parameter in self.parameters]

    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums over all ranks, for each of `local`."""
        found = taken_gradients(self.parameters)
        self.processes.all_reduce_(
            [gradient for gradient in found if not isinstance(gradient, DTensor)]
        )
        parts = [
            _local(gradient) for gradient in found if isinstance(gradient, DTensor)
        ]
        torch._foreach_mul_(parts, self.processes.world_size)  # it has divided them
        return [_local(gradient) for gradient in found]

    @torch.no_grad()
    def begin(self) -> None:
        """Buffers as the whole network has them, after they were averaged."""
        torch._foreach_copy_(list(self.net.buffers()), list(self.whole.buffers()))

    @torch.no_grad()
    def store(self) -> None:
        """Bring the whole network up to date."""
        weights = [p for part in self.whole.parts("all") for p in part.parameters()]
        for weight, own in zip(weights, self.parameters, strict=True):
            weight.copy_(own.full_tensor() if isinstance(own, DTensor) else own)
        torch._foreach_copy_(list(self.whole.buffers()), list(self.net.buffers()))

    def gathered(
        self, groups: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, list[Tensor]]:
        """Tensors that belong to the parameters, whole; others as they are."""
        return {
            name: list(map(self._gather, own, self._owners(own)))
            for name, own in groups.items()
        }

    def _owners(self, group: Sequence[Tensor]) -> list[Tensor | None]:
        return (
            [*self.parameters]
            if len(group) == len(self.parameters)
            else [None] * len(group)
        )

    def _gather(self, part: Tensor, owner: Tensor | None) -> Tensor:
        if not isinstance(owner, DTensor):
            return part
        shape: dict[str, Any] = {"shape": owner.shape, "stride": owner.stride()}
        return DTensor.from_local(
            part, owner.device_mesh, owner.placements, run_check=False, **shape
        ).full_tensor()

    def load(
        self, groups: Mapping[str, Sequence[Tensor]], state: Mapping[str, Tensor]
    ) -> None:
        """Copy this rank's parts of a whole state into the tensors of `groups`."""
        for name, group in groups.items():
            for number, (part, owner) in enumerate(
                zip(group, self._owners(group), strict=True)
            ):
                given = state[f"{name}.{number}"].to(part.device)
                if isinstance(owner, DTensor):
                    given = distribute_tensor(
                        given, owner.device_mesh, owner.placements
                    ).to_local()
                part.copy_(given)


def _longest(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """The longest dimension that can be divided evenly: the first one, of networks, is
    short.
    """
    even = [
        (size, dim) for dim, size in enumerate(parameter.shape) if size % ranks == 0
    ]
    return Shard(max(even)[1]) if even else None


def _local(tensor: Tensor) -> Tensor:
    own: Any = tensor.detach()
    return own.to_local() if isinstance(own, DTensor) else own
