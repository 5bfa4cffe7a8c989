"""The memory pools from which torch allocates instead of its default pool: for one thread, or for all."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from memsaver import _core
from memsaver._torch.pools import keep_forever
from memsaver._torch.versions import RELEASE


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
        self._dummies: dict[int, Any] = {}  # pools without memory, by the number of the device

    def begin(self, index: int, pool: Any) -> None:
        """Lets the calling thread allocate from a pool."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool.id)

    def end(self, index: int, pool: Any) -> None:
        """Ends a route that begin() made."""
        _end(index, pool)

    def begin_for_all(self, index: int, pool: Any) -> None:
        """Lets all threads allocate from a pool, in place of an earlier one, if they are in no other."""
        with self._lock:
            torch._C._cuda_beginAllocateToPool(index, pool.id)  # before the earlier one ends
            former = [self._of_all.pop(index)] if index in self._of_all else []
            self._of_all[index] = pool
            for each in former:
                _end(index, each)
            each = None  # which is a reference to the last pool
        self.drop(index, former)

    def end_for_all(self, index: int) -> None:
        """Ends the route that begin_for_all() made. Without one: no-op."""
        with self._lock:
            ended = [self._of_all.pop(index)] if index in self._of_all else []
            for each in ended:
                _end(index, each)
            each = None  # which is a reference to the last pool
        self.drop(index, ended)

    def drop(self, index: int, pools: list[Any]) -> None:
        """Drops pools of a device, and empties the list, which has the only references. torch frees free segments.

        During a capture the pools stay until the next call without one: torch waits for the device before it frees.

        Up to torch 2.12 the object of a pool is never destroyed. Its destructor would give up the pool and empty it,
        and fails while a thread is routed. Both steps are made here instead: torch empties pools that were given up
        together with the default pool, and passes over the default pool while a thread is routed.
        """
        with self._lock:
            self._dropped += [(index, pool) for pool in pools]
            pools.clear()
        _core.outside_captures(self._end_dropped)

    def _end_dropped(self) -> None:
        with self._ending:
            with self._lock:
                ended, self._dropped = self._dropped, []
            if RELEASE >= (2, 13) or not ended:
                ended.clear()
                return
            for device, pool in ended:
                keep_forever(pool)
                torch._C._cuda_releasePool(device, pool.id)
            self._empty_dropped()

    def empty_dropped(self) -> None:
        """Frees segments of dropped pools whose tensors have gone since, but not in a capture.

        From torch 2.13 on it empties the other caches as well.
        """
        _core.outside_captures(self._empty_dropped)

    def _empty_dropped(self) -> None:
        with self._ending, nullcontext() if RELEASE >= (2, 13) else self._routed_to_dummies():
            torch.cuda.empty_cache()

    @contextmanager
    def _routed_to_dummies(self) -> Iterator[None]:
        """Routes this thread to a pool on each device on which torch has memory."""
        begun = []
        try:
            for index in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(index) == 0:
                    continue
                if index not in self._dummies:
                    with torch.cuda.device(index):
                        self._dummies[index] = torch.cuda.MemPool()
                    keep_forever(self._dummies[index])
                self.begin(index, self._dummies[index])
                begun.append(index)
            yield
        finally:
            for index in begun:
                self.end(index, self._dummies[index])

    def _end_all(self) -> None:
        """Ends the routes of all threads before the interpreter destroys pools."""
        with self._lock:
            for index, pool in self._of_all.items():
                _end(index, pool)
                keep_forever(pool)
            self._of_all.clear()
            for _, pool in self._dropped:
                keep_forever(pool)


def empty_cache() -> None:
    """As torch.cuda.empty_cache(). Does nothing during a capture, which it would break; captures begin after it."""
    _core.outside_captures(torch.cuda.empty_cache)


def _end(index: int, pool: Any) -> None:
    torch._C._cuda_endAllocateToPool(index, pool.id)
    torch._C._cuda_releasePool(index, pool.id)


routes = Routes()
