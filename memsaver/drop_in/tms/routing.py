"""The allocations that a region of torch_memory_saver serves: torch's, or all calls of cudaMalloc by a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from memsaver._adapter import adapter
from memsaver._torch.pools import keep_forever
from memsaver._torch.routes import routes
from memsaver._torch.side_pools import side_pools
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.tagged import index_of
from memsaver.drop_in.tms.library import Library, Settings
from memsaver.drop_in.tms.regions import saver_regions
from memsaver.regions import Region, outside


class Routing(Protocol):
    """A hook mode of torch_memory_saver."""

    library: Library

    def into(self, settings: Settings) -> AbstractContextManager[Any]: ...
    def outside(self) -> AbstractContextManager[Any]: ...
    def set_margin(self, nbytes: int) -> None: ...


class TorchRouting:
    """Hook mode ``"torch"``: torch's allocations by the thread."""

    def __init__(self) -> None:
        self.library = Library.beside()

    @contextmanager
    def into(self, settings: Settings) -> Iterator[None]:
        with self.library.applied(settings), saver_regions.by_settings(settings):
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        with self.library.applied(self.library.settings, interesting=False), outside():
            yield

    def set_margin(self, nbytes: int) -> None:
        raise DropInError("memory_margin_bytes needs the hook mode 'preload' in memsaver")


class PreloadRouting:
    """Hook mode ``"preload"``: calls of cudaMalloc by the thread, with segments of torch's own allocator.

    torch's allocator keeps its segments in a pool for each region, and so hands out no free block of a paused one.
    """

    def __init__(self) -> None:
        check_allocator()
        self.library = Library.preloaded()
        self._pools: dict[Region, torch.cuda.MemPool] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def into(self, settings: Settings) -> Iterator[None]:
        check_allocator()  # code may have changed the setting
        region = saver_regions.by_settings(settings)
        pool = None if region.device == "cpu" else (index_of(region), self._pool(region))
        with self.library.applied(settings), self._routed(pool):
            yield

    @contextmanager
    def calls_into(self, settings: Settings) -> Iterator[None]:
        """Routes cudaMalloc of this thread to a region. torch allocates from the pool that it has."""
        saver_regions.by_settings(settings)  # made before a capture, which its making would break
        with self.library.applied(settings):
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        with self.library.applied(self.library.settings, interesting=False):
            if not torch.cuda.is_initialized():
                yield
                return
            # The pools of regions have blocks of their segments, and this one has none.
            index = torch.cuda.current_device()
            own = (index, torch.cuda.MemPool())
            try:
                with self._routed(own):
                    yield
            finally:
                dropped = [own[1]]
                del own
                routes.drop(index, dropped)

    def set_margin(self, nbytes: int) -> None:
        self.library.cdll.set_memory_margin_bytes(nbytes)

    @contextmanager
    def _routed(self, pool: tuple[int, Any] | None) -> Iterator[None]:
        entered = self._thread.__dict__.setdefault("entered", [])
        entered.append(pool)
        try:
            self._apply(entered)
            yield
        finally:
            entered.pop()
            self._apply(entered)

    def _apply(self, entered: list[tuple[int, Any] | None]) -> None:
        # One pool at a time: torch versions differ in which of two routed pools wins.
        wanted = next((pool for pool in reversed(entered) if pool is not None), None)
        routed = self._thread.__dict__.get("routed")
        if routed is not None and routed is not wanted:
            self._thread.routed = None
            routes.end(*routed)
        if wanted is not None and routed is not wanted:
            routes.begin(*wanted)
            self._thread.routed = wanted
            side_pools.make_last(wanted[0])

    def _pool(self, region: Region) -> torch.cuda.MemPool:
        with self._lock:
            if region not in self._pools:
                with torch.cuda.device(region.device):
                    self._pools[region] = torch.cuda.MemPool()
                keep_forever(self._pools[region])
                adapter().adopt_pool(region, self._pools[region].id)
            return self._pools[region]


def check_allocator() -> None:
    """Raises DropInError if torch's allocator is set to take memory without cudaMalloc."""
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # also those of memsaver.default_pool()
    values = {name: os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    values["torch's allocator settings"] = settings() if settings is not None else ""
    for name, value in values.items():
        if "expandable_segments:true" in value.replace(" ", "").lower() or "cudaMallocAsync" in value:
            raise DropInError(
                f"{name} is {value!r}: torch then takes memory without cudaMalloc, which hook mode 'preload' cannot "
                "see. Unset expandable_segments and the backend, or set torch_memory_saver.hook_mode = 'torch'"
            )
