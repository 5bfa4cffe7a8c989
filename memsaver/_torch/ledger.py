"""torch's memory outside of regions, for the ledger of a device."""

from __future__ import annotations

import bisect
from typing import Any

import torch

from memsaver import _core
from memsaver._torch.pools import DEFAULT_POOL, has_many_blocks, snapshot

Part = tuple[str, str, str, int]  # as in memsaver/ledger/rows.py


def parts(device: str) -> list[Part]:
    """torch's memory outside of regions: in tensors, and in blocks that torch keeps for later tensors.

    torch counts bytes over all of its pools. If there are segments in regions, a list of torch's segments tells the two
    apart. It takes time for each block, so with many blocks there is one row for both.
    """
    stats = _stats(device)
    if stats is None:
        return []
    inside = _segments(device)
    reserved, allocated = _current(stats, "reserved_bytes"), _current(stats, "allocated_bytes")
    if inside:
        reserved -= sum(size for _, size in inside)
        if reserved <= 0:
            return []
        if has_many_blocks(torch.device(device)):
            return [("torch", "", "", reserved)]
        allocated = min(reserved, _allocated_outside(torch.device(device), inside))
    return [("torch allocated", "", "", allocated), ("torch cached", "", "", reserved - allocated)]


def _allocated_outside(device: torch.device, inside: list[tuple[int, int]]) -> int:
    """Bytes of torch's blocks in use that lie in no region. ``inside``: the parts of regions in use, by address.

    An expandable segment may have pieces in a region and others outside, so each block counts by its own address.
    """
    begins = [begin for begin, _ in inside]

    def is_inside(address: int) -> bool:
        at = bisect.bisect_right(begins, address) - 1
        return at >= 0 and address < inside[at][0] + inside[at][1]

    return sum(
        block["size"]
        for segment in snapshot(DEFAULT_POOL)
        if segment["device"] == device.index
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and not is_inside(block["address"])
    )


def _stats(device: str) -> dict[str, Any] | None:
    """torch's figures of a device. None: torch has not used it."""
    if not device.startswith("cuda:") or not torch.cuda.is_initialized():
        return None
    return dict(torch.cuda.memory_stats_as_nested_dict(torch.device(device))) or None


def _current(stats: dict[str, Any], name: str) -> int:
    return int(stats[name]["all"]["current"])


def _segments(device: str) -> list[tuple[int, int]]:
    """(address, bytes) of the segments in regions on a device, by address; neighbours are joined."""
    return sorted(each for region in _core.regions() if region.device == device for each in region.live())
