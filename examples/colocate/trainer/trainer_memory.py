"""The regions of the trainer's tensors, one for each lifetime, and the shards of FSDP2 that lie in them.

A tensor that FSDP2 shards is a DTensor. Its local part has the memory, and is placed here. `Region.empty` works in the
same way on every device, and keeps temporaries of torch's initialisers out of the regions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import memsaver


class TrainerMemory:
    """The trainer's regions on one device.

    params     the shards of the parameters, in fp32, backed up on the host
    optimizer  both moments of AdamW and its step counters, backed up on the host
    grads      the shards of the gradients, without backup: undefined after a resume, and zeroed before they are used
    torch      on a GPU: torch's default pool, with activations and gathered parameters
    """

    BACKUPS = {"params": "host", "optimizer": "host", "grads": "none"}

    def __init__(self, device: torch.device, region: Any) -> None:
        """`region`: makes one of a tag, a device and a backup: `memsaver.region`, or that of another saver."""
        regions: dict[str, Any] = {}
        if region is memsaver.region and device.type == "cuda":  # before torch's first allocation there
            regions["torch"] = memsaver.default_pool(device=device)
        regions |= {tag: region(tag, device=str(device), backup=kept) for tag, kept in self.BACKUPS.items()}
        self.tags = list(regions)
        self.params, self.optimizer, self.grads = (regions[tag] for tag in self.BACKUPS)

    def place_params(self, model: nn.Module) -> None:
        """Give a sharded model on the meta device its memory."""
        with self.params:  # where FSDP2 pads a shard
            model._apply(lambda parameter: zeros_in(self.params, parameter))

    def place_state(self, optimizer: torch.optim.AdamW) -> None:
        """Make zero gradients, to which backward adds where they are, and the state of AdamW's first step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = zeros_in(self.grads, parameter)
                optimizer.state[parameter] = {
                    "step": self.optimizer.empty((), torch.float32).zero_(),
                    "exp_avg": zeros_in(self.optimizer, parameter),
                    "exp_avg_sq": zeros_in(self.optimizer, parameter),
                }


@torch.no_grad()
def zeros_in(region: Any, like: Tensor) -> Tensor:
    """Zeros in a region, of the shape and dtype of a parameter, and sharded as it is."""
    assert isinstance(like, DTensor)
    made, mesh, shape = region.empty(tuple(local(like).shape), like.dtype).zero_(), like.device_mesh, like.shape
    return DTensor.from_local(made, mesh, like.placements, run_check=False, shape=shape, stride=like.stride())


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, without its history."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()


def own_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """The rows of a parameter that this rank holds, and the number of the first.

    FSDP2 shards as torch.chunk() does: the last ranks may have fewer rows, or none.
    """
    assert isinstance(parameter, DTensor) and tuple(parameter.placements) == (Shard(0),)
    chunk = -(-len(parameter) // parameter.device_mesh.size())
    return local(parameter), min(parameter.device_mesh.get_local_rank() * chunk, len(parameter))
