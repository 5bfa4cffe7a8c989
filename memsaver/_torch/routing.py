"""Routes torch's allocations to regions: by memory pools (CUDA), or after torch's factory functions (host driver).

The pool of an allocation determines its region: each region has its own pair of entry points, and a pool is bound to
one pair. The state of each thread here only chooses the pool.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memsaver import _core
from memsaver._torch import stale
from memsaver._torch.default_pool import default_pools
from memsaver._torch.graphs import observe_captures
from memsaver._torch.host_mode import HostMode, extent
from memsaver._torch.ipc import patches
from memsaver._torch.pools import RegionPools, has_many_blocks, keep_forever, new_pool, private
from memsaver._torch.routes import empty_cache, routes, side_pools
from memsaver.broker import queries
from memsaver.errors import Error, RegionPausedError, add_ledger
from memsaver.regions import Ranges, Region, owning

log = logging.getLogger("memsaver")


class Life:
    """An object of one thread, which goes away with the thread."""


class Entry:
    """A with statement of a region, or of outside(): None. Inside an event loop no other coroutine may run in it.

    If the coroutine awaits in it, the loop calls the function that ``call_soon()`` got before its end.
    """

    def __init__(self, region: Region | None) -> None:
        self.region = region
        self.awaited: list[None] = []
        asyncio = sys.modules.get("asyncio")
        loop = None if asyncio is None or region is None else asyncio._get_running_loop()
        self.ends: Callable[[], object] = lambda: None
        if loop is not None:
            self.ends = loop.call_soon(self.awaited.append, None).cancel


class Inside:
    """The regions that one thread has entered, innermost last (None: outside), and the pools of its allocations."""

    def __init__(self, life: Life) -> None:
        self.life = weakref.ref(life)
        self.ident = threading.get_ident()  # a new thread may have the number of one that has ended
        self.entered: list[Entry] = []
        self.pools: dict[Region, torch.cuda.MemPool] = {}  # lent to this thread
        self.routed: dict[torch.device, torch.cuda.MemPool] = {}
        self.refusing: dict[torch.device, torch.cuda.MemPool] = {}
        self.modes: dict[str, Any] = {}  # of torch, that this thread is in

    def innermost(self) -> dict[str, Region]:
        """The region that allocations on each device go to."""
        found: dict[str, Region] = {}
        for each in self.entered:
            if each.region is None:
                found.clear()
            else:
                found[each.region.device] = each.region
        return found

    @property
    def regions(self) -> list[Region]:
        entered = list(self.entered)  # its thread changes it without a lock
        return [each.region for each in entered if each.region is not None]


class Thread(threading.local):
    def __init__(self) -> None:
        self.life = Life()
        self.inside = Inside(self.life)


class Router:
    """The calls that regions and transitions make into torch.

    It records the regions that each thread has entered, and sets the pools from which torch allocates.
    """

    def __init__(self) -> None:
        self._thread = Thread()
        self._lock = side_pools.lock
        self._pools: dict[Region, RegionPools] = {}
        self._inside: dict[int, Inside] = {}  # of threads that have entered a region, by the id of the object
        self._patched: set[str] = set()
        self.expect_pause = default_pools.expect_pause
        self.withdraw = patches.withdraw
        side_pools.took_precedence = self._prefer_regions
        queries.start()
        atexit.register(self._keep_pools)

    @property
    def thread(self) -> Inside:
        return self._thread.inside

    # Entering and leaving

    def enter(self, region: Region) -> None:
        # Order matters: enter() registers the thread, then checks the state; a pause sets the state, then checks for
        # threads inside. So at least one of two racing threads sees the other.
        self._end_ended()
        entry = Entry(region)
        try:
            self._push(entry)
            region._check_fillable("be entered")
            _core.refresh_peers()
            self.refresh()
        except BaseException:
            self._leave(entry)
            raise

    def leave(self, region: Region, error: BaseException | None) -> None:
        # The newest one: others may be newer than it, as with regions that overlap in coroutines.
        left = next((each for each in reversed(self.thread.entered) if each.region is region), None)
        if left is None:
            text = "this thread is not inside it; leave it in the thread that entered it"
            raise Error(f"region {region.tag!r} cannot be left: {text}")
        self._leave(left)
        reason = _core.take_allocation_error()
        if left.awaited and error is None:
            raise Error(
                f"region {region.tag!r} was entered during an await, so other coroutines may have allocated in it: "
                "expected a with statement without await, such as one in a function that the coroutine calls"
            )
        if not isinstance(error, torch.OutOfMemoryError) or not _first_of(error, [region.device]):
            return
        if reason:
            error.add_note(reason)
        add_ledger(error, region.device)
        if region.state != "active":
            text = f"region {region.tag!r} is {region.state}: it was entered before, and cannot take allocations now"
            raise RegionPausedError(text, tag=region.tag, state=region.state) from error
        if region._core.sealed:
            raise Error(f"region {region.tag!r} is frozen and was copied meanwhile: it takes no allocations") from error

    @contextmanager
    def outside(self) -> Iterator[None]:
        entry = Entry(None)
        try:
            self._push(entry)
            self.refresh()
            yield
        except torch.OutOfMemoryError as error:
            _first_of(error, [each.device for each in self.thread.regions])
            raise
        finally:
            self._leave(entry)

    def _push(self, entry: Entry) -> None:
        thread = self.thread
        thread.entered.append(entry)
        with self._lock:
            self._inside[id(thread)] = thread

    def _leave(self, entry: Entry) -> None:
        """Ends an entry. An interrupt may have come before or in its push."""
        try:
            self._pop(entry)
            self.refresh()
        except BaseException:  # an interrupt
            self._pop(entry)
            self.refresh()
            raise

    def _pop(self, entry: Entry) -> None:
        """A second call changes nothing."""
        thread = self.thread
        if entry in thread.entered:
            thread.entered.remove(entry)
        entry.ends()
        if not thread.entered:
            with self._lock:
                self._inside.pop(id(thread), None)

    def _end_ended(self) -> None:
        """Takes threads that have ended out of the regions that they have not left, and ends torch's routes of them.

        torch ends the route of any thread, by its pool. Until then a new thread with the same number has this route.
        """
        with self._lock:
            ended = [self._inside.pop(key) for key in [key for key, each in self._inside.items() if not each.life()]]
        for each in ended:
            tags = ", ".join(repr(region.tag) for region in each.regions)
            log.warning("thread %d has ended inside %s: it counts as having left", each.ident, tags or "outside()")
            for device, pool in each.routed.items():
                try:
                    routes.end(device.index, pool)
                except Exception as error:  # of torch: the other routes end all the same
                    log.warning("the route of thread %d on %s has not ended: %s", each.ident, device, error)
            with self._lock:
                for region, pool in each.pools.items():
                    if region in self._pools:  # it has not been closed meanwhile
                        self._pools[region].take_back(pool)

    def refresh(self) -> None:
        """Makes torch's routing of this thread follow the entered regions and their states.

        One pool at a time: torch versions differ in which of two routed pools wins.
        """
        thread = self.thread
        entered = thread.regions
        on_host = any(region.device == "cpu" for region in entered)
        self._set_mode("host", on_host, partial(HostMode, self._allocate_on_host))
        wanted = {
            torch.device(device): self._pool_for(region)
            for device, region in thread.innermost().items()
            if device != "cpu"
        }
        for device, pool in list(thread.routed.items()):
            if wanted.get(device) is not pool:
                del thread.routed[device]
                routes.end(device.index, pool)
        for device, pool in wanted.items():
            if device not in thread.routed:
                routes.begin(device.index, pool)
                thread.routed[device] = pool
                side_pools.make_last(device.index)
        default_pools.move_threads_back()
        with self._lock:
            for region in [region for region in thread.pools if region not in entered]:
                self._pools[region].take_back(thread.pools.pop(region))
        # Backward passes stay on this thread while it is routed. The threads of autograd are not routed.
        on_gpu = any(region.device != "cpu" for region in entered)
        self._set_mode("autograd", on_gpu, lambda: torch.autograd.set_multithreading_enabled(False))

    def _pool_for(self, region: Region) -> torch.cuda.MemPool:
        thread = self.thread
        if region.state != "active" or region._core.sealed:
            device = torch.device(region.device)
            if device not in thread.refusing:
                thread.refusing[device] = new_pool(_core.refusing_entry_points(), device)
                keep_forever(thread.refusing[device])
            return thread.refusing[device]
        if region not in thread.pools:
            with self._lock:
                thread.pools[region] = self._of(region).lend()
        return thread.pools[region]

    def _set_mode(self, name: str, is_wanted: bool, make: Callable[[], Any]) -> None:
        """Enters a mode of torch in this thread, or leaves it."""
        modes = self.thread.modes
        if is_wanted and name not in modes:
            modes[name] = make()
            modes[name].__enter__()
        elif not is_wanted and name in modes:
            modes.pop(name).__exit__(None, None, None)

    def _allocate_on_host(self, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        region = self.thread.innermost().get("cpu")
        return None if region is None else self.empty(region, (count,), dtype)

    # Calls of regions and transitions

    def _of(self, region: Region) -> RegionPools:
        if region not in self._pools:
            self._pools[region] = RegionPools(region)
        return self._pools[region]

    def empty(self, region: Region, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {dtype!r}, expected a torch.dtype")
        count = math.prod(shape)
        if region.device != "cpu" and count:
            with region:
                return torch.empty(tuple(shape), dtype=dtype, device=region.device)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype, device=region.device)
        nbytes = min(count * dtype.itemsize, sys.maxsize)  # no device has more
        made = torch.from_dlpack(region._core.allocate_array(nbytes))
        stale.allocated(region, made.data_ptr())
        return made.view(dtype).view(tuple(shape))

    def cpu_backup(self, tensor: torch.Tensor, clone: bool) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "__tensor_flatten__"):
            raise TypeError(f"tensor is a {type(tensor).__name__}, expected a plain torch.Tensor")
        if tensor.layout != torch.strided or tensor.is_nested or torch.nn.parameter.is_lazy(tensor):
            kind = "nested" if tensor.is_nested else "lazy" if tensor.layout == torch.strided else str(tensor.layout)
            raise TypeError(f"tensor is a {type(tensor).__name__} ({kind}), expected one with strides")
        address = tensor.data_ptr()
        region = owning(address)
        if region is None:
            raise ValueError(f"the tensor, of shape {tuple(tensor.shape)} on {tensor.device}, is in no region")
        nbytes = extent(tensor) * tensor.dtype.itemsize
        if clone:
            with self.outside():
                found = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            region._core.backup_read(address, nbytes, found.data_ptr())
        else:
            found = torch.from_dlpack(region._core.backup_view(address, nbytes))
        found = found.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        found = found.conj() if tensor.is_conj() else found
        return torch._neg_view(found) if tensor.is_neg() else found

    def pool(self, region: Region) -> torch.cuda.MemPool:
        if region.device == "cpu":
            raise Error(f"region {region.tag!r} is on the host driver, and torch has memory pools on CUDA only")
        region._check_own("have another pool")
        with self._lock:
            return self._of(region).graph

    def adopt_pool(self, region: Region, pool_id: tuple[int, int]) -> None:
        """Tells of a pool whose segments lie in the region, and whose free blocks need no copy."""
        with self._lock:
            self._of(region).adopt(pool_id)

    def graph_region(self, pool_id: tuple[int, int]) -> Region | None:
        """The region whose graph pool this is."""
        with self._lock:
            return next((region for region, pools in self._pools.items() if pools.has(pool_id)), None)

    def live(self, region: Region) -> Ranges | None:
        """The ranges of the region in use: its segments without the free blocks of its pools. None: all segments.

        Of a region with ``same_as``, without the ends of blocks, which have old bytes and belong to no tensor.
        """
        with self._lock:
            pools = self._pools.get(region)
            free = pools.free_blocks() if pools is not None else []
            if pools is not None and region.same_as is not None:
                free = sorted(free + pools.ends())
        if not free:
            return None
        return _subtract(region._core.live(), free)

    def blocks(self, region: Region) -> Ranges | None:
        """The allocations of torch in the region, those of graphs apart. None: it has no pool of torch."""
        with self._lock:
            pools = self._pools.get(region)
            used = None if pools is None else pools.used_blocks()
        # A list of torch's default pool has the blocks of all pools.
        return None if used is None else [each for each in used if region.owns(each[0])]

    def check_pausable(self, regions: Sequence[Region], thread: int | None, purpose: str = "paused") -> None:
        """Raises Error if another thread than this is inside a region: torch could allocate there during the pause.

        A thread inside any region on the device of a default pool would allocate from the pool that takes its place.
        ``purpose``: the word for the pause in the error.
        """
        self._end_ended()
        defaults = {each.device: each for each in default_pools.among(regions)}
        with self._lock:
            for inside in self._inside.values():
                if inside.ident == thread:
                    continue
                for held in inside.regions:
                    if held in regions:
                        raise Error(
                            f"region {held.tag!r} cannot be {purpose}: {_thread(inside.ident)} is inside it; "
                            "it must leave first"
                        )
                    if held.device in defaults:
                        raise Error(
                            f"region {defaults[held.device].tag!r}, torch's default pool, cannot be {purpose}: "
                            f"{_thread(inside.ident)} is inside region {held.tag!r}; it must leave first"
                        )

    def _prefer_regions(self, index: int) -> None:
        """Lets the region that this thread is inside take precedence over a pool of all threads that has begun."""
        pool = self.thread.routed.get(torch.device("cuda", index))
        if pool is not None:
            routes.end(index, pool)
            routes.begin(index, pool)

    def trim(self, regions: Sequence[Region], all_pools: bool = False) -> None:
        """Drops idle pools with free blocks; with ``all_pools`` also those without, and graph pools without graphs.

        torch frees segments with the pools, and in empty_cache() those whose tensors have gone since.
        """
        retired: dict[int, list[torch.cuda.MemPool]] = {}
        with self._lock:
            for region in regions:
                if (pools := self._pools.get(region)) is not None:
                    retired.setdefault(pools.device.index, []).extend(pools.retire_idle(all_pools))
        for index, dropped in retired.items():
            routes.drop(index, dropped)  # outside the lock
        if retired:
            empty_cache()

    def return_caches(self, device: str) -> tuple[int, str]:
        """Returns free blocks of torch in active regions of a device, as trim() does.

        Returns the bytes of free blocks that stay, and why.
        """
        self._end_ended()
        with self._lock:
            regions = [each for each in self._pools if each.device == device and each.state == "active"]
        if not _core.capturing():
            with self._lock:  # no thread enters a region meanwhile: the next pool would take its allocations
                if not any(held.device == device for inside in self._inside.values() for held in inside.regions):
                    side_pools.return_free_blocks(torch.device(device).index)
            self.trim(regions)
        if not regions or has_many_blocks(torch.device(device)):
            return 0, ""
        with self._lock:
            found = [self._pools[region].cached() for region in regions if region in self._pools]
        return sum(nbytes for nbytes, _ in found), ", ".join(reason for _, reason in found if reason)

    def check_unused(self, region: Region) -> None:
        """Raises Error while a thread is inside the region, or a tensor or a graph has memory of it."""
        self.check_pausable([region], None, "closed")
        with self._lock:
            pools = self._pools.get(region)
            idle = pools.unused_blocks() if pools is not None else []
        used = sum(size for _, size in _subtract(region._core.live(), idle))
        if used:
            raise Error(
                f"region {region.tag!r} cannot be closed: {used} bytes of it are allocated; "
                "free its tensors and graphs first"
            )

    def forget(self, region: Region) -> bool:
        """Drops the pools of a region that is about to be closed. torch releases their free segments.

        Returns whether the program may allocate from one of them later: it got the pool from ``Region.pool``. Raises
        Error while a thread is inside the region, or leaves it and still has a pool.
        """
        with self._lock:
            if (pools := self._pools.get(region)) is not None and pools.is_lent:
                raise Error(f"region {region.tag!r} cannot be closed: a thread is inside it, or leaves it")
            self._pools.pop(region, None)
        if pools is None:
            return False
        had_graphs = pools.had_graphs
        routes.drop(pools.device.index, pools.take_all())  # outside the lock
        empty_cache()
        return had_graphs

    def _keep_pools(self) -> None:
        for pools in self._pools.values():
            for pool in pools.all():
                keep_forever(pool)

    # Changes of torch, and captures

    def patch(self, names: Collection[str]) -> None:
        """Replaces functions of torch: see docs/what-it-touches.md. Again: no-op."""
        changes: dict[str, Callable[[], None]] = {
            "captures": partial(observe_captures, self.capture_failed), "multiprocessing": patches.install
        }  # fmt: skip
        with self._lock:
            for name in set(names) - self._patched:
                self._patched.add(name)
                changes[name]()

    def capture_failed(self, graph: torch.cuda.CUDAGraph, pool_id: tuple[int, int]) -> None:
        """Stops torch's routing to the pool of a capture that could not end.

        torch's allocator of pinned host memory has no call for that, and refuses the pool from now on. So the next
        capture uses a new pool. That allocator also keeps a pointer to the graph, so the graph is kept.
        """
        region = self.graph_region(pool_id)
        if region is None:
            return
        index = region._index
        try:
            private("_cuda_endAllocateToPool")(index, pool_id)
        except RuntimeError as error:
            if "not currently recording" not in str(error):  # from 2.13 on torch has ended it
                raise
        private("_cuda_releasePool")(index, pool_id)
        keep_forever(graph)
        with self._lock:
            self._of(region).replace_graph()


def _first_of(error: BaseException, devices: Sequence[str]) -> bool:
    """Whether an error comes from the innermost with statement for a device: the outer ones have not caused it."""
    left = error.__dict__.setdefault("_memsaver_left", set())
    is_first = left.isdisjoint(devices)
    left.update(devices)
    return is_first


def _thread(ident: int) -> str:
    """The number of a thread, and its name if it has one that readers know."""
    name = next((each.name for each in threading.enumerate() if each.ident == ident), None)
    return f"thread {ident}" + (f" ({name!r})" if name else "")


def _subtract(ranges: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]]) -> Ranges:
    """The parts of ``ranges`` not covered by ``holes``; both are sorted (address, bytes) without overlaps."""
    left: Ranges = []
    position = 0
    for begin, size in ranges:
        end = begin + size
        while position < len(holes) and holes[position][0] + holes[position][1] <= begin:
            position += 1
        at = begin
        for each in range(position, len(holes)):
            offset, nbytes = holes[each]
            if offset >= end:
                break
            if offset > at:
                left.append((at, offset - at))
            at = max(at, offset + nbytes)
        if at < end:
            left.append((at, end - at))
    return left


router = Router()
