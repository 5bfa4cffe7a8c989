"""Frozen regions: one copy of contents that never change serves every pause. See also test_machines.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memsaver
from tests import controls
from tests.support import KIB, MIB, PAGE, Hooks, Make, blocks, check, descriptors, host_held_bytes, host_used_bytes

SIZES = [5 * MIB, 100, 33 * MIB, 700 * KIB + 1]


def copies(region: memsaver.Region) -> tuple[int, int]:
    """Bytes that a pause and the resume after it copied."""
    return region.pause().copied_bytes, region.resume().copied_bytes


def test_later_pauses_of_a_frozen_region_only_wait_and_unmap(make: Make) -> None:
    region = make("host", frozen=True)
    held = blocks(region, SIZES)
    copies(region)
    chunks, used, holds, files = len(region._core.chunks), host_used_bytes(), host_held_bytes(), descriptors()
    memsaver.configure(host_limit=0)
    controls.disarm()
    region.pause()
    assert controls.calls() <= 2 + chunks  # wait, unmap, and a release each
    assert (host_used_bytes(), host_held_bytes()) == (used, holds)
    region.resume()
    assert descriptors() == files
    check(held)


def test_a_copied_region_takes_no_allocations(make: Make) -> None:
    region = make("host", frozen=True)
    held = blocks(region, [3 * MIB, 40 * MIB])
    hooks = Hooks(region)
    region.pause()
    with pytest.raises(memsaver.RegionPausedError):
        region.empty(1)
    region.resume()
    uses: list[Callable[[], object]] = [
        lambda: region.empty(1), region.__enter__, lambda: region._core.allocate_array(1),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(memsaver.Error, match="thaw") as caught:
            use()
        assert repr(region.tag) in str(caught.value)
        assert not isinstance(caught.value, memsaver.RegionPausedError)
    assert hooks.alloc(PAGE) is None
    torch.empty(3)  # no thread is inside any region
    assert region.allocated_bytes == 43 * MIB
    held[0].check()
    del held[1]  # tensors can be freed
    assert copies(region) == (0, 3 * MIB)
    held[0].check()
