"""The ranks of the trainer, and how they find each other."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def join(
    device: str, rank: int = 0, world_size: int = 1, init_method: str | None = None, sharers: int = 1
) -> DeviceMesh:
    """Join the process group and return its mesh of one dimension: gloo on the CPU, NCCL on CUDA.

    `device` is "cpu" or "cuda" (the current one). `sharers`: ranks on the same device; NCCL refuses more than one, and
    gloo then serves CUDA as well. `init_method` is torch's, such as "tcp://host:port"; one rank alone
    needs none. Can be called again.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; expected 'cpu' or 'cuda'")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; expected 0 to {world_size - 1}")
    if init_method is None and world_size > 1:
        raise ValueError(f"init_method is None; expected an address where {world_size} ranks meet")
    # Buffers of captured graphs must not be registered with NCCL: after a pause their memory is another.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if not dist.is_initialized():
        where = {"store": dist.HashStore()} if init_method is None else {"init_method": init_method}
        backend = "nccl" if device == "cuda" and sharers == 1 else "gloo"
        device_id = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device_id, **where)
    return init_device_mesh(device, (world_size,))
