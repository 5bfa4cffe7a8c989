"""torch's memory pools over regions: made, lent to threads, looked into, and kept as long as torch points to them."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from memsaver import _core
from memsaver.errors import Error
from memsaver.regions import Region


def keep_forever(thing: object) -> None:
    """torch holds plain pointers to allocators and pools, also while the interpreter goes down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def new_pool(hooks: tuple[str, str], device: torch.device, allocators: dict[str, Any]) -> torch.cuda.MemPool:
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise Error(f"this build of torch ({torch.__version__}) has no CUDA: regions on {device} cannot serve it")
    if hooks[0] not in allocators:
        allocators[hooks[0]] = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, *hooks)
        keep_forever(allocators[hooks[0]])
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocators[hooks[0]].allocator())


class RegionPools:
    """torch's pools over one region: one per thread that is inside it, reused, and one for graphs.

    torch refuses to route two threads to one pool, hence several. The graph pool is apart, because what a graph holds
    in it looks free to torch. Guarded by the Router's lock.
    """

    def __init__(self, region: Region, allocators: dict[str, Any]) -> None:
        self.region = region
        self.device = torch.device(region.device)
        self._allocators = allocators
        self._idle: list[torch.cuda.MemPool] = []
        self._lent: list[torch.cuda.MemPool] = []
        self._retired_ids: list[tuple[int, int]] = []
        self._graph: torch.cuda.MemPool | None = None
        self._spent: list[torch.cuda.MemPool] = []  # graph pools that a failed capture left unfit for another

    def _make(self) -> torch.cuda.MemPool:
        return new_pool(self.region._core.hooks(), self.device, self._allocators)

    def lend(self) -> torch.cuda.MemPool:
        pool = self._idle.pop() if self._idle else self._make()
        self._lent.append(pool)
        return pool

    def take_back(self, pool: torch.cuda.MemPool) -> None:
        self._lent.remove(pool)
        self._idle.append(pool)

    @property
    def graph(self) -> torch.cuda.MemPool:
        if self._graph is None:
            self._graph = self._make()
        return self._graph

    def has(self, pool_id: tuple[int, int]) -> bool:
        return self._graph is not None and self._graph.id == pool_id

    def replace_graph(self) -> None:
        if self._graph is not None:
            self._spent.append(self._graph)
        self._graph = None

    def free_blocks(self) -> list[tuple[int, int]]:
        """(address, bytes) of what these pools hold free, by address. The graph pool has none: graphs use it all."""
        ids = [pool.id for pool in (*self._idle, *self._lent)] + self._retired_ids
        return sorted(block for pool_id in ids for block in _free_blocks(pool_id))

    def retire_idle(self) -> list[torch.cuda.MemPool]:
        """Pools with free blocks, out of use from now on: once the caller lets go of them, torch frees what it can."""
        keep: list[torch.cuda.MemPool] = []
        retired: list[torch.cuda.MemPool] = []
        for pool in self._idle:
            (retired if any(_free_blocks(pool.id)) else keep).append(pool)
        self._idle = keep
        self._retired_ids = [pool_id for pool_id in self._retired_ids if _snapshot(pool_id)]  # the others are gone
        self._retired_ids += [pool.id for pool in retired]
        return retired

    def keep_forever(self) -> None:
        for pool in (*self._idle, *self._lent, *self._spent, *([self._graph] if self._graph else [])):
            keep_forever(pool)


if "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters:

    def _snapshot(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
        return torch.cuda.memory_snapshot(pool_id, include_traces=False)  # type: ignore[no-any-return]
else:

    def _snapshot(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
        return torch.cuda.memory_snapshot(pool_id)  # type: ignore[no-any-return]


def _free_blocks(pool_id: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of what torch holds free in a pool."""
    for segment in _snapshot(pool_id):
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield block["address"], block["size"]
