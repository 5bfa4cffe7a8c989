"""Pools that take the place of torch's default pool, for all threads, while segments of it are paused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memsaver._results import in_thread
from memsaver._torch.pools import free_blocks, snapshot
from memsaver._torch.routes import routes

log = logging.getLogger("memsaver")


class SidePools:
    """The pool of each device that all threads allocate from, where there is one.

    torch would hand out free blocks of its default pool, also those in paused segments.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[int, Any] = {}  # the allocators of the pools, by the number of the device
        self._first_wins: bool | None = None  # of two pools that a thread is routed to. Versions of torch differ
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
            if index not in self._begun:
                self._look(index, allocator)  # before all threads are routed
            self._route(index, allocator)
            self._begun[index] = allocator
        if not self._first_wins:
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
            if index in self._begun and self._first_wins:
                self._route(index, self._begun[index])

    def _look(self, index: int, allocator: Any) -> None:
        """Looks up which of two pools wins, in a thread of its own, once.

        Without memory for the look-up the last one is taken to win, as in torch 2.11.
        """
        if self._first_wins is None:
            try:
                self._first_wins = in_thread(partial(_probe, index, allocator), "memsaver probe").result()
            except torch.OutOfMemoryError:
                log.debug("there is no memory to look up which of two pools torch takes")

    def _route(self, index: int, allocator: Any) -> None:
        with torch.cuda.device(index):
            pool = torch.cuda.MemPool(allocator)
        self.ids[index] = [pool.id, *(each for each in self.ids.get(index, ()) if snapshot(each))]
        routes.begin_for_all(index, pool)


def _probe(index: int, allocator: Any) -> bool:
    """Whether torch takes the first of two pools that the calling thread is routed to. It is routed to none before."""
    with torch.cuda.device(index):
        pools = [torch.cuda.MemPool(allocator), torch.cuda.MemPool(allocator)]
        for pool in pools:
            routes.begin(index, pool)
        try:
            block = torch.empty(1, device=f"cuda:{index}")
            first_wins = bool(snapshot(pools[0].id))
            del block
            return first_wins
        finally:
            for pool in pools:
                routes.end(index, pool)
            del pool
            routes.drop(index, pools)


side_pools = SidePools()
