"""The regions of the trainer's tensors: one for each lifetime.

A tensor that FSDP2 shards is a DTensor. Its local part has the memory, and is placed here. `Region.empty` works in the
same way on every device, and keeps temporaries of torch's initialisers out of the regions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memsaver


class TrainerMemory:
    """The trainer's regions on one device.

    params     the shards of the parameters, in fp32, backed up on the host
    optimizer  both moments of AdamW and its step counters, backed up on the host
    grads      the shards of the gradients, without backup: undefined after a resume, and zeroed before they are used
    """

    def __init__(self, device: torch.device) -> None:
        self.params: Any = memsaver.region("params", device=str(device), backup="host")
        self.optimizer: Any = memsaver.region("optimizer", device=str(device), backup="host")
        self.grads: Any = memsaver.region("grads", device=str(device))

    def place_params(self, model: nn.Module) -> None:
        """Give a sharded model on the meta device its memory. Tied weights share it, and have to be tied again."""
        made: dict[Tensor, Tensor] = {}

        def place(tensor: Tensor) -> Tensor:
            if tensor not in made:  # tied weights come twice
                made[tensor] = zeros_in(self.params, tensor)
            return made[tensor]

        with self.params:  # where FSDP2 pads a shard
            model._apply(place)

    def place_grads(self, model: nn.Module) -> None:
        """Preset zero gradients: backward then adds to them where they are."""
        for parameter in model.parameters():
            parameter.grad = zeros_in(self.grads, parameter)

    def place_optimizer(self, optimizer: torch.optim.AdamW) -> None:
        """Make the state that AdamW would make in its first step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                step = self.optimizer.empty((), torch.float32)
                optimizer.state[parameter] = {
                    "step": step.zero_(),
                    "exp_avg": zeros_in(self.optimizer, parameter),
                    "exp_avg_sq": zeros_in(self.optimizer, parameter),
                }


@torch.no_grad()
def zeros_in(region: Any, like: Tensor) -> Tensor:
    """Zeros in a region, of the shape and dtype of a parameter, and sharded as it is."""
    shard = local(like)
    made: Tensor = region.empty(tuple(shard.shape), shard.dtype).zero_()
    if not isinstance(like, DTensor):
        return made
    return DTensor.from_local(
        made, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, without its history."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()
