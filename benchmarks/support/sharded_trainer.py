"""A trainer with FSDP2 on a mesh of two dimensions, and the device of a rank."""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2
_RATE = 1e-3


class Trainer:
    """FSDP2 with hybrid sharding on a mesh of one replica and two shards."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        mesh = init_device_mesh(device.type, (1, RANKS), mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(0)
        width = options.width
        dtype = dtype_of(device)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(options.layers)]
        self.model = nn.Sequential(*layers).to(device, dtype)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_RATE)
        self.dtype = dtype

    def step(self, number: int) -> float:
        generator = torch.Generator(self.device).manual_seed(RANKS * number + dist.get_rank())
        shape = (self.options.batch, self.options.width)
        batch = torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)
        loss = (self.model(batch) - batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def prefetch(self) -> Any:
        """Begins to gather the parameters of the first layer. Returns a handle with ``wait()``."""
        return self.model[0].unshard(async_op=True)  # type: ignore[operator]  # fully_shard() adds the method


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def place(rank: int, device: str) -> torch.device:
    """Chooses the device of a rank."""
    if device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def init_fake(rank: int) -> None:
    """Makes a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)


def free_caches() -> None:
    """Releases the memory that torch and cuBLAS keep for later."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
