"""vLLM's view of the allocations: ``CuMemAllocator.pointer_to_data``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from memsaver.drop_in.tagged import index_of
from memsaver.errors import BackupError
from memsaver.regions import Region

if TYPE_CHECKING:
    from memsaver.drop_in.vllm.allocator import RegionAllocator

Handle = tuple[int, int, int, int]  # device, bytes, address, handle of the driver (0: chunks are the region's)


def is_offloaded(region: Region) -> bool:
    """Whether a region sleeps and its contents are kept."""
    return region.state != "active" and region.backup_bytes > 0


class Segments(Mapping[int, Any]):
    """The segments that torch has allocated, by address, as ``AllocationData``. Read from the regions at each access.

    A value is a copy: writing to its attributes changes nothing.
    """

    def __init__(self, allocator: RegionAllocator, data: type) -> None:
        self._allocator = allocator
        self._data = _segment_data(data)

    def _found(self) -> Iterator[tuple[str, Region, int, int]]:
        for tag, region in self._allocator.regions():
            for address, nbytes in region._core.segments():
                yield tag, region, address, nbytes

    def __iter__(self) -> Iterator[int]:
        return (address for _, _, address, _ in self._found())

    def __len__(self) -> int:
        return sum(1 for _ in self._found())

    def __getitem__(self, wanted: int) -> Any:
        for tag, region, address, nbytes in self._found():
            if address == wanted:
                return self._data(tag, region, address, nbytes)
        raise KeyError(wanted)

    # Mapping's own looks each key up again: quadratic.
    def values(self) -> Any:
        return [data for _, data in self.items()]

    def items(self) -> Any:
        return [(address, self._data(*rest, address, n)) for *rest, address, n in self._found()]


@cache
def _segment_data(original: type) -> type:
    """A subclass of ``AllocationData`` that reads the backup of a sleeping segment when it is asked for."""

    class SegmentData(original):  # type: ignore[misc]
        def __init__(self, tag: str, region: Region, address: int, nbytes: int) -> None:
            self.handle: Handle = (index_of(region), nbytes, address, 0)
            self.tag = tag
            self.is_asleep = region.state != "active"
            self._region = region if is_offloaded(region) else None

        @property
        def cpu_backup_tensor(self) -> Any:
            """The contents in host memory, uint8 [bytes]. None if awake, discarded, or in part free in torch's pool."""
            if self._region is None:
                return None
            import torch

            try:
                return torch.from_dlpack(self._region._core.backup_view(self.handle[2], self.handle[1]))
            except BackupError:
                return None

    return SegmentData
