"""The allocations that a region of torch_memory_saver serves: torch's, or all calls of cudaMalloc by a thread."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from memsaver import _core
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.tagged import index_of
from memsaver.regions import Region, outside

LIBRARIES: Final = Path(_core.__file__).parent / "drop_in" / "tms" / "packages"


class Routing(Protocol):
    """A hook mode of torch_memory_saver."""

    def into(self, region: Region) -> AbstractContextManager[Any]: ...
    def outside(self) -> AbstractContextManager[Any]: ...
    def set_margin(self, nbytes: int) -> None: ...


class TorchRouting:
    """Hook mode ``"torch"``: torch's allocations by the thread."""

    def into(self, region: Region) -> AbstractContextManager[Any]:
        return region

    def outside(self) -> AbstractContextManager[None]:
        return outside()

    def set_margin(self, nbytes: int) -> None:
        raise DropInError("memory_margin_bytes needs the hook mode 'preload' in memsaver")


class PreloadRouting:
    """Hook mode ``"preload"``: calls of cudaMalloc by the thread, with segments of torch's own allocator.

    torch's allocator keeps its segments in a pool for each region, and so hands out no free block of a paused one.
    """

    def __init__(self) -> None:
        check_allocator()
        self.cdll = loaded = ctypes.CDLL(None)
        try:
            self._set, self._set_margin = loaded.memsaver_preload_route, loaded.memsaver_preload_margin
        except AttributeError:
            raise DropInError(
                "the hook mode 'preload' needs memsaver's library in LD_PRELOAD, which is "
                f"{os.environ.get('LD_PRELOAD', '')!r}: start the process within "
                "torch_memory_saver.configure_subprocess(), or set torch_memory_saver.hook_mode = 'torch'"
            ) from None
        self._set.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        self._set_margin.argtypes = [ctypes.c_size_t]
        self._pools: dict[Region, Any] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def into(self, region: Region) -> Iterator[None]:
        check_allocator()  # code may have changed the setting
        with self._entered(region, None if region.device == "cpu" else (index_of(region), self._pool(region))):
            yield

    @contextmanager
    def calls_into(self, region: Region) -> Iterator[None]:
        """Routes cudaMalloc of this thread to a region. torch allocates from the pool that it has."""
        with self._entered(region, None):
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        # The pool of a region has blocks of its segments, and this one has none.
        on_gpu = torch.cuda.is_initialized()
        with self._entered(None, (torch.cuda.current_device(), torch.cuda.MemPool()) if on_gpu else None):
            yield

    def set_margin(self, nbytes: int) -> None:
        self._set_margin(nbytes)

    @contextmanager
    def _entered(self, region: Region | None, pool: tuple[int, Any] | None) -> Iterator[None]:
        entered = self._thread.__dict__.setdefault("entered", [])
        entered.append((region, pool))
        try:
            self._apply(entered)
            yield
        finally:
            entered.pop()
            self._apply(entered)

    def _apply(self, entered: list[tuple[Region | None, tuple[int, Any] | None]]) -> None:
        region = entered[-1][0] if entered else None
        if region is None:
            self._set(None, None, 0)
        else:
            self._set(*region._core.entry_points(), index_of(region))
        # One pool at a time: torch versions differ in which of two routed pools wins.
        wanted = next((pool for _, pool in reversed(entered) if pool is not None), None)
        routed = self._thread.__dict__.get("routed")
        if routed is not None and routed is not wanted:
            index, pool = routed
            torch._C._cuda_endAllocateToPool(index, pool.id)
            torch._C._cuda_releasePool(index, pool.id)
            self._thread.routed = None
        if wanted is not None and routed is not wanted:
            torch._C._cuda_beginAllocateCurrentThreadToPool(wanted[0], wanted[1].id)
            self._thread.routed = wanted

    def _pool(self, region: Region) -> Any:
        with self._lock:
            if region not in self._pools:
                with torch.cuda.device(region.device):
                    self._pools[region] = torch.cuda.MemPool()
            return self._pools[region]


def check_allocator() -> None:
    """Raises DropInError if torch's allocator is set to take memory without cudaMalloc."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "expandable_segments:True" in value or "cudaMallocAsync" in value:
            raise DropInError(
                f"{name} is {value!r}: torch then takes memory without cudaMalloc, which hook mode 'preload' cannot "
                "see. Unset expandable_segments and the backend, or set torch_memory_saver.hook_mode = 'torch'"
            )
