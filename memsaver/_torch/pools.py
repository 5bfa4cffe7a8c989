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
from memsaver._torch.versions import RELEASE
from memsaver.errors import Error
from memsaver.regions import Region

LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10_cuda.so")
MOST_BLOCKS = 20_000  # of which a list is made: some 16 ms with the GIL held (0.8 us for a block, see docs/design.md)
_LITTLE = 0.01  # of a region's bytes, in free blocks
_SMALL_SEGMENT = 2 << 20  # bytes of a segment for blocks of at most 1 MiB; torch's segments for other blocks are larger

EntryPoints = tuple[int, int]  # addresses of the C functions that allocate and free in a region


def keep_forever(thing: object) -> None:
    """Keeps an object until the process ends. torch holds plain pointers to allocators and pools, also at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def new_pool(points: EntryPoints, device: torch.device, allocators: dict[EntryPoints, Any]) -> torch.cuda.MemPool:
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise Error(f"this build of torch ({torch.__version__}) has no CUDA: regions on {device} cannot serve it")
    if RELEASE < (2, 10) and torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]:
        raise Error(
            f"torch {torch.__version__} has expandable segments on, and no regions beside them: turn them off "
            "(PYTORCH_CUDA_ALLOC_CONF), or use torch 2.10 or newer"
        )
    if points not in allocators:
        allocators[points] = torch._C._cuda_customAllocator(*points)
        keep_forever(allocators[points])
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocators[points])


@functools.cache
def plain_allocator() -> Any:
    """Of pools outside of regions, with segments that the driver allocates whole.

    torch's own allocator would use expandable segments. With them it frees a pool that was dropped as soon as a part of
    a segment is free, although tensors have the rest: later frees of these tensors corrupt its data.
    """
    allocator = torch._C._cuda_customAllocator(*_core.plain_entry_points())
    keep_forever(allocator)
    return allocator


class RegionPools:
    """torch's pools over one region: one per thread that is inside it, reused, and one for graphs.

    torch refuses to route two threads to one pool, hence several. The graph pool is separate, since torch lists memory
    that a graph holds as free. The Router's lock guards this object.
    """

    def __init__(self, region: Region, allocators: dict[EntryPoints, Any]) -> None:
        self.region = region
        self.device = torch.device(region.device)
        self._allocators = allocators
        self._idle: list[torch.cuda.MemPool] = []
        self._lent: list[torch.cuda.MemPool] = []
        self._retired_ids: list[tuple[int, int]] = []
        self._adopted_ids: list[tuple[int, int]] = []  # of pools of torch's own allocator
        self._graph: torch.cuda.MemPool | None = None
        self._spent: list[torch.cuda.MemPool] = []  # graph pools that are unusable after a failed capture

    def _make(self) -> torch.cuda.MemPool:
        return new_pool(self.region._core.entry_points(), self.device, self._allocators)

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

    @property
    def has_retired(self) -> bool:
        """Whether pools with live tensors went out of use."""
        return bool(self._retired_ids)

    @property
    def has_retired_segments(self) -> bool:
        """Whether such pools have segments whose tensors have gone since. torch frees them in empty_cache() alone."""
        segments = [segment for pool_id in self._retired_ids for segment in snapshot(pool_id)]
        return any(all(block["state"] == "inactive" for block in segment["blocks"]) for segment in segments)

    def adopt(self, pool_id: tuple[int, int]) -> None:
        """Counts the free blocks of another pool, whose segments torch takes by cudaMalloc, as free."""
        alive = [each for each in self._adopted_ids if each in (DEFAULT_POOL, pool_id) or snapshot(each)]
        self._adopted_ids = list(dict.fromkeys([*alive, pool_id]))

    def replace_graph(self) -> None:
        if self._graph is not None:
            self._spent.append(self._graph)
        self._graph = None

    def free_blocks(self) -> list[tuple[int, int]]:
        """(address, bytes) of the free blocks of these pools, by address. Graphs use all of the graph pool."""
        ids = [pool.id for pool in (*self._idle, *self._lent)] + self._retired_ids + self._adopted_ids
        return sorted(block for pool_id in ids for block in _free_blocks(pool_id))

    @property
    def have_little_free(self) -> bool:
        """Whether copying the free blocks takes less time than listing them.

        torch makes a dictionary for each block, 0.8 us on an H200, and has no figure of the free bytes of a pool. Two
        figures are upper bounds, for small blocks and for others: the free bytes of all pools on the device, and the
        region's segments.
        """
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        sizes = [size for _, size in self.region._core.segments()]
        small = sum(size for size in sizes if size == _SMALL_SEGMENT)
        segments = {"small_pool": small, "large_pool": sum(sizes) - small}

        def free(kind: str) -> int:
            return int(stats["reserved_bytes"][kind]["current"] - stats["active_bytes"][kind]["current"])

        return sum(min(free(kind), nbytes) for kind, nbytes in segments.items()) <= sum(sizes) * _LITTLE

    def unused_blocks(self) -> list[tuple[int, int]]:
        """As free_blocks(), and the free blocks of graph pools without graphs: these are freed with the pools."""
        graphs = [*self._spent, *([self._graph] if self._graph is not None else [])]
        unused = [block for pool in graphs if not _has_graphs(pool) for block in _free_blocks(pool.id)]
        return sorted(self.free_blocks() + unused)

    def retire_idle(self, all_pools: bool = False) -> list[torch.cuda.MemPool]:
        """Takes pools with free blocks out of use. torch frees their segments when the caller drops the pools."""
        keep: list[torch.cuda.MemPool] = []
        retired: list[torch.cuda.MemPool] = []
        for pool in self._idle:
            (retired if all_pools or any(_free_blocks(pool.id)) else keep).append(pool)
        self._idle = keep
        if all_pools and self._graph is not None and not _has_graphs(self._graph):
            retired.append(self._graph)
            self._graph = None
        self._retired_ids = [pool_id for pool_id in self._retired_ids if snapshot(pool_id)]  # the others are gone
        self._retired_ids += [pool.id for pool in retired]
        return retired

    def take_all(self) -> list[torch.cuda.MemPool]:
        """All pools, for a region that is about to be closed."""
        taken = [*self._idle, *self._lent, *self._spent, *([self._graph] if self._graph is not None else [])]
        self._idle, self._lent, self._spent, self._graph = [], [], [], None
        return taken

    def cached(self) -> tuple[int, str]:
        """Bytes of free blocks of these pools, and why they stay."""
        nbytes = sum(size for _, size in self.free_blocks())
        return nbytes, f"a thread is inside region {self.region.tag!r}" if self._lent else ""

    def keep_forever(self) -> None:
        for pool in (*self._idle, *self._lent, *self._spent, *([self._graph] if self._graph else [])):
            keep_forever(pool)


DEFAULT_POOL = (0, 0)  # torch's id of the pool of allocations without a pool; a list of it has all segments
_HAS_TRACES = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
_LISTED = {"include_traces": False} if _HAS_TRACES else {}  # older versions of torch make a list without traces


_PROBES = 64


@functools.cache
def _references_taken() -> tuple[bool, bool]:
    """Whether a list of torch's blocks takes a reference of each number of the id, and one of False.

    torch's binding releases references to its arguments that it does not own (pytorch/pytorch#196366). Numbers from 257
    on are freed with their last reference, while in use: Python's allocator is corrupted. False has some 17,000 on
    Python 3.11, which ends the process without any; newer versions of Python do not count them.

    No other thread has references of the numbers. Of False other threads take and release some meanwhile.
    """
    number = 1 << 40  # of no pool
    spare = [number] * (3 * _PROBES)  # each call may take two
    before = sys.getrefcount(number), sys.getrefcount(False)
    for _ in range(_PROBES):
        torch.cuda.memory_snapshot((number, number), **_LISTED)
    numbers = before[0] - sys.getrefcount(number)
    false_is_taken = before[1] - sys.getrefcount(False) > _PROBES // 2
    _give_back(number, numbers)
    _give_back(False, _PROBES * false_is_taken)
    del spare
    return numbers > 0, false_is_taken


def _give_back(thing: object, count: int = 1) -> None:
    """Adds references that a call of torch has taken."""
    for _ in range(count):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def snapshot(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    """torch's segments of a pool."""
    numbers_are_taken, false_is_taken = _references_taken()
    first, second = pool_id  # references that no call of torch takes
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot((first, second), **_LISTED)
    if numbers_are_taken:
        _give_back(first)
        _give_back(second)
    if false_is_taken:
        _give_back(False)
    return segments


def has_many_blocks(device: torch.device) -> bool:
    """Whether a list of torch's blocks would hold the GIL for long."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return sum(int(stats[name]["all"]["current"]) for name in ("allocation", "inactive_split")) > MOST_BLOCKS


def _has_graphs(pool: torch.cuda.MemPool) -> bool:
    """Whether a graph that was captured into the pool is alive. It holds a reference to the pool."""
    return pool.use_count() > 1


def _free_blocks(pool_id: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the free blocks of a pool."""
    for segment in snapshot(pool_id):
        if pool_id == DEFAULT_POOL and tuple(segment["segment_pool_id"]) != DEFAULT_POOL:
            continue
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield block["address"], block["size"]
