"""The regions of torch_memory_saver's tags in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from memsaver._adapter import adapter
from memsaver._torch.pools import DEFAULT_POOL
from memsaver._torch.routes import side_pools
from memsaver.drop_in import DropInError
from memsaver.drop_in.tagged import TaggedRegions
from memsaver.drop_in.tms.library import Settings
from memsaver.errors import Error, checked
from memsaver.regions import Region


class SaverRegions(TaggedRegions):
    """Regions by tag, and those whose host memory returns to the system after a resume (``"mmap"``)."""

    def __init__(self) -> None:
        super().__init__("tms")
        self.unpinned: set[Region] = set()

    def by_settings(self, settings: Settings) -> Region:
        """The active region for allocations with these settings. Makes one if there is none."""
        region = self.active(settings.tag, settings.policy)
        if settings.backend == "mmap" and settings.cpu_backup:
            self.unpinned.add(region)
        return region


saver_regions = SaverRegions()


class Retained:
    """The contents of the last pause of each region (``retain_cpu_backup``). Held, they keep their pinned memory."""

    def __init__(self) -> None:
        self._parts: dict[Region, list[tuple[int, torch.Tensor]]] = {}  # address and contents

    def keep(self, regions: Iterable[Region]) -> None:
        """Keeps the backups of paused regions."""
        for region in regions:
            if region.backup == "host" and region.backup_bytes:
                self._parts[region] = [
                    (address, torch.from_dlpack(region._core.backup_view(address, nbytes)))
                    for address, nbytes in region._core.backup_parts()
                ]

    def drop(self, regions: Iterable[Region]) -> None:
        """Drops the backups of regions that are about to be paused: the next ones take the same memory."""
        for region in regions:
            self._parts.pop(region, None)

    def find(self, tensor: torch.Tensor, region: Region) -> torch.Tensor | None:
        """The retained contents of a contiguous tensor. None if there are none."""
        nbytes = tensor.numel() * tensor.element_size()
        for address, contents in self._parts.get(region, ()):
            begin = tensor.data_ptr() - address
            if 0 <= begin <= contents.numel() - nbytes:
                return contents[begin : begin + nbytes].view(tensor.dtype).view(tensor.shape)
        return None


class DefaultPool:
    """torch's default pool in regions of the tag ``default``, where the whole process is managed.

    While one of them is paused, all threads allocate from another pool, whose segments are in another region of the
    tag. So torch hands out no block of a paused segment.
    """

    def __init__(self, initial: Settings) -> None:
        self._initial = initial

    @contextmanager
    def leaving(self, regions: Iterable[Region]) -> Iterator[None]:
        """Moves all threads to other pools, before the with statement pauses these regions."""
        tagged = self._all()
        mine = [each for each in regions if each in tagged]
        if mine:
            check_allocator()  # code may have made torch's default pool a region of its own
        saver_regions.set_aside(mine, True)
        try:
            on_gpus = [region for region in mine if region.device != "cpu"]
            for index in {region._index for region in on_gpus}:
                if not side_pools.begin(index):
                    raise Error("a graph is being captured: its process cannot be paused")
            for region in on_gpus:
                for pool_id in (DEFAULT_POOL, *side_pools.ids.get(region._index, ())):
                    adapter().adopt_pool(region, pool_id)
            if self._initial.backend == "mmap":
                saver_regions.unpinned.update(mine)
            yield
        finally:
            self.return_threads()

    def return_threads(self) -> None:
        """Moves the threads back where all regions of the tag are active."""
        paused = {region._index for region in self._all() if region.state != "active"}
        back = [region for region in self._all() if region._index not in paused]
        saver_regions.set_aside(back, False)
        for region in back:
            if region.device != "cpu":
                side_pools.end(region._index)

    def _all(self) -> list[Region]:
        return saver_regions.of(self._initial.tag) if self._initial.interesting else []


def check_allocator() -> None:
    """Raises DropInError if torch's allocator is set to take memory without cudaMalloc."""
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # also those of memsaver.default_pool()
    values = {name: os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    values["torch's allocator settings"] = settings() if settings is not None else ""
    for name, value in values.items():
        if "expandable_segments:true" in value.replace(" ", "").lower() or "cudaMallocAsync" in value:
            text = (
                f"{name} is {value!r}: torch then takes memory without cudaMalloc, which hook mode 'preload' cannot "
                "see. Unset expandable_segments and the backend, or set torch_memory_saver.hook_mode = 'torch'"
            )
            raise DropInError(checked(text))
