"""The memory pools from which torch allocates instead of its default pool: for one thread, or for all."""

from __future__ import annotations

import atexit
import threading
from typing import Any

import torch

from memsaver import _core
from memsaver._torch.pools import keep_forever


class Routes:
    """The routes to pools that memsaver has begun.

    torch ends the process if a pool is destroyed while any route or capture exists (an assertion in the destructor). So
    pools are dropped here: at once if no thread is routed and none captures, else after the last route of a thread has
    ended.
    """

    def __init__(self) -> None:
        atexit.register(self._end_all)
        self._lock = threading.RLock()
        self._threads = 0  # routes of threads
        self._of_all: dict[int, Any] = {}  # the pool of all threads, by the number of the device
        self._dropped: list[Any] = []

    def begin(self, index: int, pool: Any) -> None:
        """Lets the calling thread allocate from a pool."""
        with self._lock:
            torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool.id)
            self._threads += 1

    def end(self, index: int, pool: Any) -> None:
        """Ends a route that begin() made."""
        with self._lock:
            _end(index, pool)
            self._threads -= 1
            self._clear()

    def begin_for_all(self, index: int, pool: Any) -> None:
        """Lets all threads allocate from a pool, in place of an earlier one, if they are in no other."""
        with self._lock:
            torch._C._cuda_beginAllocateToPool(index, pool.id)  # before the earlier one ends
            former = [self._of_all.pop(index)] if index in self._of_all else []
            self._of_all[index] = pool
            for each in former:
                _end(index, each)
            each = None  # which is a reference to the last pool
            self.drop(former)

    def end_for_all(self, index: int) -> None:
        """Ends the route that begin_for_all() made. Without one: no-op."""
        with self._lock:
            ended = [self._of_all.pop(index)] if index in self._of_all else []
            for each in ended:
                _end(index, each)
            each = None  # which is a reference to the last pool
            self.drop(ended)

    @property
    def any(self) -> bool:
        """Whether a thread, or all threads, are routed to a pool of this library."""
        return bool(self._threads or self._of_all)

    def drop(self, pools: list[Any]) -> None:
        """Drops pools, and empties the list, which has the only references. torch frees their free segments."""
        with self._lock:
            self._dropped += pools
            pools.clear()
            self._clear()

    def _end_all(self) -> None:
        """Ends the routes of all threads before the interpreter destroys pools."""
        with self._lock:
            for index, pool in self._of_all.items():
                _end(index, pool)
                keep_forever(pool)
            self._of_all.clear()
            for pool in self._dropped:
                keep_forever(pool)

    def _clear(self) -> None:
        if self._threads or not self._dropped or _core.capturing():
            return
        for index, pool in self._of_all.items():
            torch._C._cuda_endAllocateToPool(index, pool.id)
        try:
            self._dropped.clear()
        finally:
            for index, pool in self._of_all.items():
                torch._C._cuda_beginAllocateToPool(index, pool.id)
                torch._C._cuda_releasePool(index, pool.id)  # the reference of the route before


def _end(index: int, pool: Any) -> None:
    torch._C._cuda_endAllocateToPool(index, pool.id)
    torch._C._cuda_releasePool(index, pool.id)


routes = Routes()
