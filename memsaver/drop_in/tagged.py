"""Regions by the tags of another library."""

from __future__ import annotations

import itertools
import threading

from memsaver.regions import Region, default_device, region


def index_of(region: Region) -> int:
    """The number of a region's device; 0 for the host driver."""
    return int(region.device.partition(":")[2] or 0)


class TaggedRegions:
    """The regions of each tag.

    Their own tags are ``{prefix}.{tag}``: the same process may have regions of its own with these tags. A tag that is
    allocated in while its region is paused gets another, ``{prefix}.{tag}.2``, which is active.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._by_tag: dict[str, list[Region]] = {}
        self._lock = threading.Lock()

    def active(self, tag: str, backup: str = "none") -> Region:
        """The active region of a tag with this policy, on the current device. Makes one if there is none."""
        device = default_device()
        with self._lock:
            several = self._by_tag.setdefault(tag, [])
            for each in reversed(several):
                if (each.device, each.state, each.backup) == (device, "active", backup):
                    return each
            used = {each.tag for _, each in self._rows() if each.backup == backup}
            whole = f"{self._prefix}.{tag}"
            names = itertools.chain([whole], (f"{whole}.{number}" for number in itertools.count(2)))
            several.append(region(next(name for name in names if name not in used), device, backup))
            return several[-1]

    def of(self, tag: str) -> list[Region]:
        """All regions of a tag."""
        with self._lock:
            return list(self._by_tag.get(tag, ()))

    def all(self) -> list[tuple[str, Region]]:
        """Tag and region of each region."""
        with self._lock:
            return self._rows()

    def _rows(self) -> list[tuple[str, Region]]:
        return [(tag, each) for tag, several in self._by_tag.items() for each in several]
