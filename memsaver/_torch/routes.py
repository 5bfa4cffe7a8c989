"""The pools from which torch allocates instead of its default pool, for one thread or for all; the end of pools."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

import torch

from memsaver import _core
from memsaver._torch.pools import RELEASE, free_blocks, keep_forever, private, snapshot

_FIRST_WINS = RELEASE < (2, 10)  # of two pools that a thread is routed to; else the last one


class Routes:
    """The routes of threads to pools, and the end of pools.

    Up to version 2.12 torch ends the process if a pool is destroyed while any thread of the process is routed to one,
    by this library or by another: see drop().
    """

    def __init__(self) -> None:
        atexit.register(self._keep_dropped)
        self._lock = threading.RLock()
        self._dropped: list[tuple[int, Any]] = []  # with the number of the device
        self._ending = threading.RLock()  # one thread ends pools at a time; taken before _lock

    def begin(self, index: int, pool: Any) -> None:
        """Lets the calling thread allocate from a pool."""
        private("_cuda_beginAllocateCurrentThreadToPool")(index, pool.id)

    def end(self, index: int, pool: Any) -> None:
        """Ends a route of any thread, or that of all threads."""
        private("_cuda_endAllocateToPool")(index, pool.id)
        private("_cuda_releasePool")(index, pool.id)

    def drop(self, index: int, pools: list[Any]) -> None:
        """Drops pools of a device, and empties the list, which has the only references. torch frees free segments.

        During a capture the pools stay until the next call without one: torch waits for the device before it frees.

        Up to torch 2.12 the object of a pool is never destroyed. Its destructor would give up the pool and empty it,
        and fails while a thread is routed. Both steps are made here instead, with torch's other caches.
        """
        with self._lock:
            self._dropped += [(index, pool) for pool in pools]
            pools.clear()
        _core.outside_captures(self._end_dropped)

    def _end_dropped(self) -> None:
        with self._ending:
            with self._lock:
                ended, self._dropped = self._dropped, []
            if RELEASE < (2, 13) and ended:
                for device, pool in ended:
                    keep_forever(pool)
                    private("_cuda_releasePool")(device, pool.id)
                torch.cuda.empty_cache()
            ended.clear()

    def _keep_dropped(self) -> None:
        with self._lock:
            for _, pool in self._dropped:
                keep_forever(pool)


def empty_cache() -> None:
    """As torch.cuda.empty_cache(). Does nothing during a capture, which it would break; captures begin after it."""
    _core.outside_captures(torch.cuda.empty_cache)


routes = Routes()


class SidePools:
    """The pool of each device that all threads allocate from, where there is one, in place of torch's default pool.

    torch would hand out free blocks of its default pool, also those in paused segments.
    """

    def __init__(self) -> None:
        atexit.register(self._end_all)
        self.lock = threading.RLock()  # also the router's: no thread enters a region while another one holds it
        self._begun: dict[int, tuple[Any, Any]] = {}  # each pool and its allocator, by the number of the device
        self.ids: dict[int, list[tuple[int, int]]] = {}  # of pools with segments, by the number of the device
        # Called with the number of a device when a pool began there that comes before those that the thread is in.
        self.took_precedence: Callable[[int], object] = lambda index: None

    def has_begun(self, index: int) -> bool:
        return index in self._begun

    def begin(self, index: int, allocator: Any = None) -> bool:
        """Lets all threads allocate from a new pool if they are in no other. Again: from another new one.

        Returns False during a capture: the pool would take precedence over that of the graph. Captures begin after it.
        ``allocator``: of the pool's segments. None: torch's own, by cudaMalloc.
        """

        def begin() -> None:
            with self.lock:
                self._route(index, allocator)
            if not _FIRST_WINS:
                self.took_precedence(index)

        return bool(_core.outside_captures(begin))

    def end(self, index: int) -> None:
        """Lets them allocate from torch's default pool again. Without begin(): no-op."""
        with self.lock:
            routes.drop(index, self._end(index))

    def return_free_blocks(self, index: int) -> None:
        """Returns the memory that the pool of a device caches: all threads move to a new one. Not during a capture.

        torch frees no cached blocks of a pool that all threads allocate from.
        """
        with self.lock:
            if index in self._begun and any(free_blocks(self.ids[index][0])):
                self.begin(index, self._begun[index][1])

    def make_last(self, index: int) -> None:
        """Lets pools that a thread was routed to since begin() come first for that thread."""
        with self.lock:
            if index in self._begun and _FIRST_WINS:
                self._route(index, self._begun[index][1])

    def _route(self, index: int, allocator: Any) -> None:
        with torch.cuda.device(index):
            pool = torch.cuda.MemPool(allocator)
        self.ids[index] = [pool.id, *(each for each in self.ids.get(index, ()) if snapshot(each))]
        private("_cuda_beginAllocateToPool")(index, pool.id)  # before the earlier one ends
        former = self._end(index)
        self._begun[index] = pool, allocator
        routes.drop(index, former)

    def _end(self, index: int) -> list[Any]:
        """Returns the pool, of which the list has the only reference."""
        ended = [self._begun.pop(index)[0]] if index in self._begun else []
        if ended:
            routes.end(index, ended[0])
        return ended

    def _end_all(self) -> None:
        """Before the interpreter destroys pools."""
        with self.lock:
            for index in list(self._begun):
                keep_forever(self._end(index))


side_pools = SidePools()
