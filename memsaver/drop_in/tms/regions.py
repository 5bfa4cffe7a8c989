"""The regions of torch_memory_saver's tags in this process."""

from __future__ import annotations

from collections.abc import Iterable

from memsaver import _core
from memsaver.drop_in.tagged import TaggedRegions
from memsaver.drop_in.tms.library import Settings
from memsaver.regions import Region


class SaverRegions(TaggedRegions):
    """Regions by tag, and those whose host memory returns to the system after a resume (``"mmap"``)."""

    def __init__(self) -> None:
        super().__init__("tms")
        self._unpinned: set[Region] = set()

    def by_settings(self, settings: Settings) -> Region:
        """The active region for allocations with these settings. Makes one if there is none."""
        region = self.active(settings.tag, settings.policy)
        if settings.backend == "mmap" and settings.cpu_backup:
            self.return_backups_of([region])
        return region

    def return_backups_of(self, regions: Iterable[Region]) -> None:
        """Lets the host memory of these regions return to the system after each resume."""
        self._unpinned.update(regions)

    def release_backups(self, resumed: Iterable[Region]) -> None:
        """Returns the host memory of regions with ``"mmap"`` to the system."""
        if self._unpinned.intersection(resumed):
            _core.release_host_memory()


saver_regions = SaverRegions()
