"""Backups that outlive a resume (``retain_cpu_backup``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memsaver.drop_in.tms.process import switch
from memsaver.regions import Region


class Retained:
    """The contents of the last pause of each region. Held, they keep their pinned memory."""

    def __init__(self) -> None:
        self.wanted = switch("TMS_RETAIN_CPU_BACKUP")
        self._parts: dict[Region, list[tuple[int, torch.Tensor]]] = {}  # address and contents

    def keep(self, regions: Iterable[Region]) -> None:
        """Keeps the backups of paused regions, if that is wanted."""
        for region in regions if self.wanted else ():
            if region.backup == "host" and region.backup_bytes:
                self._parts[region] = [
                    (address, torch.from_dlpack(region._core.backup_view(address, nbytes)))
                    for address, nbytes in region._core.backup_parts()
                ]

    def drop(self, regions: Iterable[Region]) -> None:
        """Drops the backups of regions that are about to be paused: the next ones take the same memory."""
        for region in regions:
            self._parts.pop(region, None)

    def find(self, tensor: torch.Tensor, region: Region, clone: bool) -> torch.Tensor | None:
        """The retained contents of a contiguous tensor."""
        part = self.part(tensor.data_ptr(), tensor.numel() * tensor.element_size(), region)
        if part is None:
            return None
        found = part.view(tensor.dtype).view(tensor.shape)
        return found.clone() if clone else found

    def part(self, address: int, nbytes: int, region: Region) -> torch.Tensor | None:
        """The retained bytes of a range of device memory."""
        for begin, contents in self._parts.get(region, ()):
            if begin <= address and address + nbytes <= begin + contents.numel():
                return contents[address - begin : address - begin + nbytes]
        return None
