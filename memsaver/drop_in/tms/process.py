"""Whole processes (``TMS_INIT_ENABLE``): each allocation by cudaMalloc in a region, from the first one on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from memsaver import _core, config
from memsaver._adapter import adapter
from memsaver._torch.pools import DEFAULT_POOL
from memsaver._torch.side_pools import side_pools
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.tagged import index_of
from memsaver.drop_in.tms.calls import Calls
from memsaver.drop_in.tms.library import Library, Settings
from memsaver.drop_in.tms.regions import saver_regions
from memsaver.drop_in.tms.routing import check_allocator
from memsaver.errors import Error
from memsaver.regions import Region

log = logging.getLogger("memsaver")

_ON: Final = ("1", "true", "TRUE", "True", "yes", "YES")
_OFF: Final = ("", "0", "false", "FALSE", "False", "no", "NO")


def switch(name: str) -> bool:
    """The value of a variable of torch_memory_saver.

    Raises DropInError if it is no boolean. The original ends the process.
    """
    value = os.environ.get(name, "")
    if value not in _ON + _OFF:
        raise DropInError(f"{name} is {value!r}, expected 1, true, yes, 0, false or no")
    return value in _ON


def initial_settings() -> Settings:
    """Tag and policy of a thread's allocations until it enters a region.

    Raises DropInError if a variable has a wrong value.
    """
    backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "") or "pinned"
    if backend not in ("pinned", "mmap"):
        raise DropInError(f"TMS_INIT_CPU_BACKUP_BACKEND is {backend!r}, expected 'pinned' or 'mmap'")
    cpu, disk = switch("TMS_INIT_ENABLE_CPU_BACKUP"), switch("TMS_INIT_ENABLE_DISK_BACKUP")
    if cpu and disk:
        raise DropInError(
            "TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP are both set, expected one at most"
        )
    return Settings(cpu_backup=cpu, disk_backup=disk, backend=backend)


def set_disk_dir(path: str | os.PathLike[str]) -> None:
    """The directory of backups on disk. It is created if it does not exist."""
    os.makedirs(path, exist_ok=True)
    config.configure(disk_dir=os.fspath(path))


def _has_disk_dir() -> bool:
    return "disk_dir" in config.options()


def prepare() -> None:
    """Readies a process for its first allocation, when torch has been imported."""
    if not switch("TMS_INIT_ENABLE"):
        return
    settings = initial_settings()
    check_allocator()
    Library.preloaded().serve(Calls())
    if directory := os.environ.get("TMS_DISK_BACKUP_DIR"):
        set_disk_dir(directory)
    elif settings.disk_backup and not _has_disk_dir():
        set_disk_dir("/tmp")  # as the original

    def ready() -> None:
        check_allocator()
        # torch calls this within its first set_device(N), while the current device is another one: a region there would
        # make a context on a device that the process does not use. The core makes regions as allocations come.
        if _core.cuda_device_count() == 1:
            saver_regions.by_settings(settings)
        adapter()  # observes captures from now on
        log.info("memsaver manages the whole process, with the policy %r", settings.policy)

    if torch.version.cuda is not None:
        torch.cuda._lazy_call(ready)  # type: ignore[attr-defined]


class DefaultPool:
    """torch's default pool in regions of the tag ``default``, where the whole process is managed.

    While one of them is paused, all threads allocate from another pool, whose segments are in another region of the
    tag. So torch hands out no block of a paused segment.
    """

    def __init__(self) -> None:
        self._initial = initial_settings()
        self._tag = self._initial.tag
        self._is_managed = switch("TMS_INIT_ENABLE")

    @contextmanager
    def leaving(self, regions: Iterable[Region]) -> Iterator[None]:
        """Moves all threads to other pools, before the with statement pauses these regions."""
        mine = self._of(regions)
        if mine:
            check_allocator()  # code may have made torch's default pool a region of its own
        if mine and _core.capturing():
            raise Error("a graph is being captured: its process cannot be paused")
        saver_regions.set_aside(mine, True)
        try:
            on_gpus = [region for region in mine if region.device != "cpu"]
            for index in {index_of(region) for region in on_gpus}:
                side_pools.begin(index)
            for region in on_gpus:
                self._adopt(region)
            if self._initial.backend == "mmap":
                saver_regions.return_backups_of(mine)
            yield
        finally:
            self.return_threads()

    def return_threads(self) -> None:
        """Moves the threads back where all regions of the tag are active."""
        all_mine = self._of(saver_regions.of(self._tag))
        paused = {index_of(region) for region in all_mine if region.state != "active"}
        back = [region for region in all_mine if index_of(region) not in paused]
        saver_regions.set_aside(back, False)
        for region in back:
            if region.device != "cpu":
                side_pools.end(index_of(region))

    def _of(self, regions: Iterable[Region]) -> list[Region]:
        if not self._is_managed:
            return []
        tagged = set(saver_regions.of(self._tag))
        return [each for each in regions if each in tagged]

    def _adopt(self, region: Region) -> None:
        for pool_id in (DEFAULT_POOL, *side_pools.ids.get(index_of(region), ())):
            adapter().adopt_pool(region, pool_id)
