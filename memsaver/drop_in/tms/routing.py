"""The allocations that a region of torch_memory_saver serves: torch's, or all calls of cudaMalloc by a thread."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memsaver import _core, config
from memsaver._adapter import adapter
from memsaver._torch.pools import keep_forever
from memsaver._torch.routes import routes, side_pools
from memsaver.drop_in import DropInError
from memsaver.drop_in.tms.library import Library, Settings
from memsaver.drop_in.tms.regions import check_allocator, saver_regions
from memsaver.regions import Region, outside

log = logging.getLogger("memsaver")


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
        with self.library.applied(dataclasses.replace(self.library.settings(), interesting=False)), outside():
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
        self._idle: dict[Region, list[torch.cuda.MemPool]] = {}  # that no thread has: torch routes one thread to each
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def into(self, settings: Settings) -> Iterator[None]:
        check_allocator()  # code may have changed the setting
        region = saver_regions.by_settings(settings)
        pool = None if region.device == "cpu" else self._take(region)
        try:
            with self.library.applied(settings), self._routed(None if pool is None else (region._index, pool)):
                yield
        finally:
            if pool is not None:
                self._idle[region].append(pool)
                # Without segments it was forgotten if the region has adopted another pool meanwhile.
                adapter().adopt_pool(region, pool.id)

    @contextmanager
    def calls_into(self, settings: Settings) -> Iterator[None]:
        """Routes cudaMalloc of this thread to a region. torch allocates from the pool that it has."""
        saver_regions.by_settings(settings)  # made before a capture, which its making would break
        with self.library.applied(settings):
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        with self.library.applied(dataclasses.replace(self.library.settings(), interesting=False)):
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

    def _take(self, region: Region) -> torch.cuda.MemPool:
        with self._lock:
            idle = self._idle.setdefault(region, [])
            if idle:
                return idle.pop()
        with torch.cuda.device(region.device):
            pool = torch.cuda.MemPool()
        keep_forever(pool)
        adapter().adopt_pool(region, pool.id)
        return pool


def set_disk_dir(path: str | os.PathLike[str]) -> None:
    """The directory of backups on disk. It is created if it does not exist."""
    os.makedirs(path, exist_ok=True)
    config.configure(disk_dir=os.fspath(path))


def set_initial_disk_dir(initial: Settings) -> None:
    """Sets the directory that the variables name, or the default of torch_memory_saver where backups need one."""
    directory = os.environ.get("TMS_DISK_BACKUP_DIR")
    if directory or (initial.disk_backup and config.options().get("disk_dir") is None):
        set_disk_dir(directory or "/tmp")


def manage() -> None:
    """Readies a process that is managed whole (``TMS_INIT_ENABLE``), when torch has been imported."""
    if not Library.beside().initial.interesting:
        return
    initial = Library.preloaded().initial
    check_allocator()
    set_initial_disk_dir(initial)

    def ready() -> None:
        check_allocator()
        # torch calls this within its first set_device(N), while the current device is another one: a region there would
        # make a context on a device that the process does not use. The core makes regions as allocations come.
        if _core.cuda_device_count() == 1:
            saver_regions.by_settings(initial)
        adapter()  # observes captures from now on
        log.info("memsaver manages the whole process, with the policy %r", initial.policy)

    if torch.version.cuda is not None:
        torch.cuda._lazy_call(ready)  # type: ignore[attr-defined]
