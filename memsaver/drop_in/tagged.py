"""Regions by the tags of another library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from memsaver import _core
from memsaver.broker import pool_client
from memsaver.policies import check_tag
from memsaver.regions import Region, default_device, observe_captures, wrapper

if TYPE_CHECKING:
    import torch


class TaggedRegions:
    """The regions of each tag. See csrc/regions/tagged.h: code without Python makes regions of the same tags."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._core = _core.tagged_regions(prefix)

    def active(self, tag: str, backup: str = "none", one_handle: bool = False) -> Region:
        """The active region of a tag with this policy, on the current device. Makes one if there is none.

        Raises:
            TypeError, ValueError: The tag is no string, or too long.
        """
        check_tag(tag)
        check_tag(f"{self._prefix}.{tag}")
        device = default_device()
        pool_client.join(device)
        found = wrapper(self._core.active(tag, device, backup, one_handle))
        found.written_in_use = tag == "kv_cache"
        observe_captures(device)
        return found

    def of(self, tag: str) -> list[Region]:
        """All regions of a tag."""
        return [region for its, region in self.all() if its == tag]

    def all(self) -> list[tuple[str, Region]]:
        """Tag and region of each region."""
        return [(tag, wrapper(each)) for tag, each in self._core.all()]

    def set_aside(self, regions: Iterable[Region], is_aside: bool) -> None:
        """Whether new allocations of a tag pass over these regions, though they are active."""
        self._core.set_aside([each._core for each in regions], is_aside)

    def check_written(self, models: Callable[[], Mapping[str, torch.nn.Module]]) -> None:
        """The check of the option ``stale`` before a forward pass. ``models`` returns the models, by prefix of names.

        Tensors of these models alone are checked: runners have buffers in the same regions, which the pass writes.
        """
        from memsaver._torch import stale

        regions = [each for _, each in self.all()]
        if stale.is_pending(regions):
            for prefix, model in models().items():
                stale.name_tensors(model, prefix)
            stale.check_first_use(regions, only_named=True)
