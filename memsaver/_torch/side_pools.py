"""Pools that take the place of torch's default pool, for all threads, while segments of it are paused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from memsaver._torch.pools import RELEASE, free_blocks, snapshot
from memsaver._torch.routes import routes

_FIRST_WINS = RELEASE < (2, 10)  # of two pools that a thread is routed to; else the last one


class SidePools:
    """The pool of each device that all threads allocate from, where there is one.

    torch would hand out free blocks of its default pool, also those in paused segments.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, Any] = {}  # the allocators of the pools, by the number of the device
        self.ids: dict[int, list[tuple[int, int]]] = {}  # of pools with segments, by the number of the device
        # Called with the number of a device when a pool began there that comes before those that the thread is in.
        self.took_precedence: Callable[[int], object] = lambda index: None

    def has_begun(self, index: int) -> bool:
        return index in self._begun

    def begin(self, index: int, allocator: Any = None) -> None:
        """Lets all threads allocate from a new pool. Again: from another new one.

        ``allocator``: of the pool's segments. None: torch's own, by cudaMalloc.
        """
        with self._lock:
            self._route(index, allocator)
            self._begun[index] = allocator
        if not _FIRST_WINS:
            self.took_precedence(index)

    def end(self, index: int) -> None:
        """Lets them allocate from torch's default pool again. Without begin(): no-op."""
        with self._lock:
            if index in self._begun:
                del self._begun[index]
                routes.end_for_all(index)

    def return_free_blocks(self, index: int) -> None:
        """Returns the memory that the pool of a device caches: all threads move to a new one. Not during a capture.

        torch frees no cached blocks of a pool that all threads allocate from.
        """
        with self._lock:
            if index in self._begun and any(free_blocks(self.ids[index][0])):
                self._route(index, self._begun[index])

    def make_last(self, index: int) -> None:
        """Lets pools that a thread was routed to since begin() come first for that thread."""
        with self._lock:
            if index in self._begun and _FIRST_WINS:
                self._route(index, self._begun[index])

    def _route(self, index: int, allocator: Any) -> None:
        with torch.cuda.device(index):
            pool = torch.cuda.MemPool(allocator)
        self.ids[index] = [pool.id, *(each for each in self.ids.get(index, ()) if snapshot(each))]
        routes.begin_for_all(index, pool)


side_pools = SidePools()
