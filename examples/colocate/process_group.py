"""How ranks find each other: those of the trainer, or of an engine with tensor parallel."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def join(device: str, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> DeviceMesh:
    """Join the process group and return its mesh of one dimension: gloo on the CPU, NCCL on CUDA.

    `device` is "cpu" or "cuda" (the current one). `init_method` is torch's, such as "tcp://host:port"; one rank alone
    needs none. Can be called again.
    """
    # Buffers of captured graphs must not be registered with NCCL: after a pause their memory is another.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if not dist.is_initialized():
        where = {"store": dist.HashStore()} if init_method is None else {"init_method": init_method}
        backend, device_id = "gloo", None
        if device == "cuda":
            backend, device_id = "nccl", torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device_id, **where)
    return init_device_mesh(device, (world_size,))
