"""torch's memory pools over regions: their creation, use by threads, free blocks, and lifetime."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memsaver import _core
from memsaver.errors import Error, checked
from memsaver.regions import Region

LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10_cuda.so")
MOST_BLOCKS = 20_000  # of which a list is made: some 16 ms with the GIL held (0.8 us for a block, see docs/design.md)
DEFAULT_POOL = (0, 0)  # torch's id of the pool of allocations without a pool; a list of it has all segments

RELEASE = tuple(int(each) for each in torch.__version__.split(".")[:2])  # for faults and rules of torch that differ

EntryPoints = tuple[int, int]  # addresses of the C functions that allocate and free in a region


def private(name: str) -> Any:
    """A function of ``torch._C``. Raises memsaver.Error where torch lacks it."""
    found = getattr(torch._C, name, None)
    if found is None:
        text = f"this build of torch ({torch.__version__}) has no torch._C.{name}"
        raise Error(f"{text}, expected a build of torch 2.8 or newer with CUDA")
    return found


def keep_forever(thing: object) -> None:
    """Keeps an object until the process ends. torch holds plain pointers to allocators and pools, also at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@functools.cache
def _allocator(points: EntryPoints) -> Any:
    allocator = private("_cuda_customAllocator")(*points)
    keep_forever(allocator)
    return allocator


def new_pool(points: EntryPoints, device: torch.device) -> torch.cuda.MemPool:
    allocator = _allocator(points)
    if RELEASE < (2, 10) and torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]:
        text = (
            f"torch {torch.__version__} has expandable segments on, and no regions beside them: turn them off "
            "(PYTORCH_CUDA_ALLOC_CONF), or use torch 2.10 or newer"
        )
        raise Error(checked(text))
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocator)


def plain_allocator() -> Any:
    """Of pools outside of regions, with segments that the driver allocates whole.

    torch's own allocator would use expandable segments. With them it frees a pool that was dropped as soon as a part of
    a segment is free, although tensors have the rest: later frees of these tensors corrupt its data.
    """
    return _allocator(_core.plain_entry_points())


class RegionPools:
    """torch's pools over one region: one per thread that is inside it, reused, and one for graphs.

    torch refuses to route two threads to one pool, hence several. The graph pool is separate, since torch lists memory
    that a graph holds as free. The Router's lock guards this object.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.device = torch.device(region.device)
        self._idle: list[torch.cuda.MemPool] = []
        self._lent: list[torch.cuda.MemPool] = []
        self._graph: torch.cuda.MemPool | None = None
        self._spent: list[torch.cuda.MemPool] = []  # graph pools that are unusable after a failed capture
        self._retired_ids: list[tuple[int, int]] = []
        self._adopted_ids: list[tuple[int, int]] = []  # of pools of torch's own allocator

    def _make(self) -> torch.cuda.MemPool:
        return new_pool(self.region._core.entry_points(), self.device)

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
        self._spent += self._graphs()
        self._graph = None

    def _graphs(self) -> list[torch.cuda.MemPool]:
        return [] if self._graph is None else [self._graph]

    def adopt(self, pool_id: tuple[int, int]) -> None:
        """Counts the free blocks of another pool, whose segments torch takes by cudaMalloc, as free."""
        if pool_id not in self._adopted_ids:
            alive = [each for each in self._adopted_ids if each == DEFAULT_POOL or snapshot(each)]
            self._adopted_ids = [*alive, pool_id]

    @property
    def is_lent(self) -> bool:
        """Whether a thread has one of these pools."""
        return bool(self._lent)

    @property
    def had_graphs(self) -> bool:
        """Whether the graph pool was used."""
        return bool(self._spent or self._graph)

    def free_blocks(self) -> list[tuple[int, int]]:
        """(address, bytes) of the free blocks of these pools, by address. Graphs use all of the graph pool."""
        return sorted(block for pool_id in self._ids() for block in free_blocks(pool_id))

    def used_blocks(self) -> list[tuple[int, int]]:
        """(address, requested bytes) of the blocks in use, those of the graph pool apart."""
        return sorted((at, requested) for pool_id in self._ids() for at, requested, _ in used_blocks(pool_id))

    def ends(self) -> list[tuple[int, int]]:
        """(address, bytes) of the ends of blocks in use that no tensor has asked for."""
        used = [block for pool_id in self._ids() for block in used_blocks(pool_id)]
        return [(at + requested, size - requested) for at, requested, size in used if requested < size]

    def _ids(self) -> list[tuple[int, int]]:
        return [*(pool.id for pool in (*self._idle, *self._lent)), *self._retired_ids, *self._adopted_ids]

    def unused_blocks(self) -> list[tuple[int, int]]:
        """As free_blocks(), and the free blocks of graph pools without graphs: these are freed with the pools."""
        graphs = [pool for pool in (*self._spent, *self._graphs()) if not _has_graphs(pool)]
        unused = [block for pool in graphs for block in free_blocks(pool.id)]
        return sorted(self.free_blocks() + unused)

    def retire_idle(self, all_pools: bool = False) -> list[torch.cuda.MemPool]:
        """Takes pools with free blocks out of use. torch frees their segments when the caller drops the pools."""
        retired = [pool for pool in self._idle if all_pools or any(free_blocks(pool.id))]
        self._idle = [pool for pool in self._idle if pool not in retired]
        if all_pools and not any(map(_has_graphs, self._graphs())):
            retired += self._graphs()
            self._graph = None
        self._retired_ids = [pool_id for pool_id in self._retired_ids if snapshot(pool_id)]  # the others are gone
        self._retired_ids += [pool.id for pool in retired]
        return retired

    def all(self) -> list[torch.cuda.MemPool]:
        return [*self._idle, *self._lent, *self._spent, *self._graphs()]

    def take_all(self) -> list[torch.cuda.MemPool]:
        """All pools, for a region that is about to be closed."""
        taken = self.all()
        self._idle, self._lent, self._spent, self._graph = [], [], [], None
        return taken

    def cached(self) -> tuple[int, str]:
        """Bytes of free blocks of these pools, and why they stay."""
        nbytes = sum(size for _, size in self.free_blocks())
        return nbytes, f"a thread is inside region {self.region.tag!r}" if nbytes and self.is_lent else ""


_HAS_TRACES = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
_LISTED = {"include_traces": False} if _HAS_TRACES else {}  # older versions of torch make a list without traces


@functools.cache
def _takes_references() -> bool:
    """Whether a list of torch's blocks takes a reference of each number of the id (pytorch/pytorch#196366).

    Such a version may take one of False as well. Without a last reference a number is freed while in use, and False,
    which newer versions of Python do not count, ends the process.
    """
    number = 1 << 40  # of no pool, and no other thread has references of it
    spare = [number] * 3
    before = sys.getrefcount(number)
    torch.cuda.memory_snapshot((number, number), **_LISTED)
    taken = before - sys.getrefcount(number)
    for _ in range(taken):
        keep_forever(number)
    del spare
    return taken > 0


def snapshot(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    """torch's segments of a pool."""
    if _takes_references():
        for thing in (*pool_id, *_LISTED.values()):  # one too many does no harm
            keep_forever(thing)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool_id, **_LISTED)
    return segments


def has_many_blocks(device: torch.device) -> bool:
    """Whether a list of torch's blocks would hold the GIL for long."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return sum(int(stats[name]["all"]["current"]) for name in ("allocation", "inactive_split")) > MOST_BLOCKS


def _has_graphs(pool: torch.cuda.MemPool) -> bool:
    """Whether a graph that was captured into the pool is alive. It holds a reference to the pool."""
    return pool.use_count() > 1


def used_blocks(pool_id: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """(address, requested bytes, bytes) of the blocks of a pool that are in use."""
    for segment in snapshot(pool_id):
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield block["address"], block.get("requested_size") or block["size"], block["size"]


def free_blocks(pool_id: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the free blocks of a pool.

    Includes those that wait for another stream (``Tensor.record_stream``). A caller that needs the memory waits for the
    device.
    """
    for segment in snapshot(pool_id):
        if pool_id == DEFAULT_POOL and tuple(segment["segment_pool_id"]) != DEFAULT_POOL:
            continue
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                yield block["address"], block["size"]
