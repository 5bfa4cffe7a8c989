"""The pools from which torch allocates instead of its default pool, for one thread or for all; the end of pools."""

from __future__ import annotations

import atexit
import threading
from typing import Any

import torch

from memsaver import _core
from memsaver._torch.pools import keep_forever
from memsaver._torch.private import RELEASE, private


class Routes:
    """The routes to pools that memsaver has begun, and the end of pools.

    Up to version 2.12 torch ends the process if a pool is destroyed while any thread of the process is routed to one,
    by this library or by another: see drop().
    """

    def __init__(self) -> None:
        atexit.register(self._end_all)
        self._lock = threading.RLock()
        self._of_all: dict[int, Any] = {}  # the pool of all threads, by the number of the device
        self._dropped: list[tuple[int, Any]] = []  # with the number of the device
        self._ending = threading.RLock()  # one thread ends pools at a time; taken before _lock

    def begin(self, index: int, pool: Any) -> None:
        """Lets the calling thread allocate from a pool."""
        private("_cuda_beginAllocateCurrentThreadToPool")(index, pool.id)

    def end(self, index: int, pool: Any) -> None:
        """Ends a route that begin() or begin_for_all() made, of any thread."""
        private("_cuda_endAllocateToPool")(index, pool.id)
        private("_cuda_releasePool")(index, pool.id)

    def begin_for_all(self, index: int, pool: Any) -> None:
        """Lets all threads allocate from a pool, in place of an earlier one, if they are in no other."""
        with self._lock:
            private("_cuda_beginAllocateToPool")(index, pool.id)  # before the earlier one ends
            former = self._end_for_all(index)
            self._of_all[index] = pool
        self.drop(index, former)

    def end_for_all(self, index: int) -> None:
        """Ends the route that begin_for_all() made. Without one: no-op."""
        with self._lock:
            ended = self._end_for_all(index)
        self.drop(index, ended)

    def _end_for_all(self, index: int) -> list[Any]:
        """Returns the pool, of which the list has the only reference."""
        ended = [self._of_all.pop(index)] if index in self._of_all else []
        if ended:
            self.end(index, ended[0])
        return ended

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

    def _end_all(self) -> None:
        """Ends the routes of all threads before the interpreter destroys pools."""
        with self._lock:
            self._dropped += [(index, pool) for index in list(self._of_all) for pool in self._end_for_all(index)]
            for _, pool in self._dropped:
                keep_forever(pool)


def empty_cache() -> None:
    """As torch.cuda.empty_cache(). Does nothing during a capture, which it would break; captures begin after it."""
    _core.outside_captures(torch.cuda.empty_cache)


routes = Routes()
