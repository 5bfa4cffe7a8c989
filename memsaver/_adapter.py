"""The interface to torch. The library works on regions; only the adapter works on tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from memsaver.regions import Region

Ranges = list[tuple[int, int]]  # (offset, bytes) within a region


class Adapter(Protocol):
    """The calls that regions and transitions make into torch. ``memsaver._torch.routing.Router`` implements them."""

    def enter(self, region: Region) -> None: ...
    def leave(self, region: Region, error: BaseException | None) -> None: ...
    def empty(self, region: Region, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor: ...
    def pool(self, region: Region) -> torch.cuda.MemPool: ...
    def live(self, region: Region) -> Ranges | None: ...
    def record_contents(self, region: Region, ranges: Ranges) -> None: ...
    def check_contents(self, region: Region) -> None: ...
    def forget_contents(self, region: Region) -> None: ...
    def check_pausable(self, regions: Sequence[Region], thread: int | None) -> None: ...
    def refresh(self) -> None: ...
    def outside(self) -> AbstractContextManager[None]: ...
    def trim(self, regions: Sequence[Region], all_pools: bool = False) -> None: ...
    def check_unused(self, region: Region) -> None: ...
    def forget(self, region: Region) -> None: ...
    def is_entered(self, region: Region) -> bool: ...
    def cpu_backup(self, tensor: torch.Tensor, clone: bool) -> torch.Tensor: ...
    def graph_region(self, pool_id: tuple[int, int]) -> Region | None: ...


# memsaver/__init__.py sets this, because only that file imports both sides. torch is loaded on the first use.
load: Callable[[], Adapter]
_adapter: Adapter | None = None
_loading = threading.Lock()


def adapter() -> Adapter:
    """The adapter; loads torch on the first call."""
    global _adapter
    with _loading:
        if _adapter is None:
            _adapter = load()  # noqa: F821
        return _adapter


def loaded() -> Adapter | None:
    """The adapter, or None before the first use of torch."""
    return _adapter
