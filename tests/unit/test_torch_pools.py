"""The bytes of a region that are copied, by the figures and lists of torch's allocator, which are made up here."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memsaver
from memsaver._adapter import adapter
from memsaver._torch import pools as torch_pools
from memsaver._torch import routing
from memsaver._torch.pools import RegionPools
from tests.support import MIB, functions

Make = Callable[..., memsaver.Region]
BYTES = 100 * MIB


class MadeUpPool:
    id = (7, 7)


@pytest.fixture(params=[BYTES, 2 * MIB], ids=["large segment", "small segments"])
def region(monkeypatch: pytest.MonkeyPatch, tag: str, request: pytest.FixtureRequest) -> Iterator[memsaver.Region]:
    """A region of one large segment or of segments for small blocks, in a made-up torch pool with free bytes in it."""
    region = memsaver.region(tag, device="cpu")
    held = [region.empty(request.param, torch.uint8) for _ in range(BYTES // request.param)]
    region.held = held  # type: ignore[attr-defined]
    pools = RegionPools(region, {})
    pools._idle = [MadeUpPool()]  # type: ignore[list-item]
    monkeypatch.setitem(adapter()._pools, region, pools)  # type: ignore[attr-defined]
    yield region
    held.clear()  # regions live as long as the process


def kind_of(region: memsaver.Region) -> str:
    """torch's name for the blocks of the region's segments."""
    return "small_pool" if len(region.held) > 1 else "large_pool"  # type: ignore[attr-defined]


def free_in_torch(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region, listed: int, anywhere: dict[str, int]
) -> list[Any]:
    """``listed`` bytes free in the region's pool, ``anywhere`` by kind in all pools. Returns the lists made."""
    made: list[Any] = []
    address = region.held[0].data_ptr()  # type: ignore[attr-defined]

    def snapshot(pool_id: Any) -> list[dict[str, Any]]:
        made.append(pool_id)
        blocks = [{"address": address, "size": listed, "state": "inactive"}] if listed else []
        blocks.append({"address": address + listed, "size": BYTES - listed, "state": "active_allocated"})
        return [{"blocks": blocks}]

    def stats(device: Any) -> dict[str, Any]:
        kinds = ("small_pool", "large_pool")
        reserved = {kind: {"current": 3 * BYTES} for kind in kinds}
        active = {kind: {"current": 3 * BYTES - anywhere.get(kind, 0)} for kind in kinds}
        return {"reserved_bytes": reserved, "active_bytes": active}

    monkeypatch.setattr(torch_pools, "snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    return made


def test_free_blocks_are_not_copied(monkeypatch: pytest.MonkeyPatch, region: memsaver.Region) -> None:
    made = free_in_torch(monkeypatch, region, listed=2 * MIB, anywhere={kind_of(region): 2 * MIB})
    assert region.pause(backup="host").copied_bytes == BYTES - 2 * MIB
    assert made == [MadeUpPool.id]


def test_few_free_bytes_are_copied_without_listing_blocks(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region
) -> None:
    made = free_in_torch(monkeypatch, region, listed=MIB, anywhere={kind_of(region): MIB})
    assert region.pause(backup="host").copied_bytes == BYTES
    assert made == []


def test_free_blocks_are_listed_if_any_pool_may_have_some(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region
) -> None:
    made = free_in_torch(monkeypatch, region, listed=0, anywhere={kind_of(region): BYTES})
    assert region.pause(backup="host").copied_bytes == BYTES
    assert made == [MadeUpPool.id]


def test_free_bytes_of_other_kinds_than_the_regions_do_not_count(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region
) -> None:
    other = {"small_pool": "large_pool", "large_pool": "small_pool"}[kind_of(region)]
    made = free_in_torch(monkeypatch, region, listed=0, anywhere={other: 3 * BYTES})
    assert region.pause(backup="host").copied_bytes == BYTES
    assert made == []


@pytest.mark.parametrize("takes", [(), ("numbers",), ("numbers", "False")], ids=str)
def test_a_list_of_blocks_keeps_references(monkeypatch: pytest.MonkeyPatch, takes: tuple[str, ...]) -> None:
    def snapshot(pool_id: tuple[int, int], include_traces: bool = True) -> list[dict[str, Any]]:
        for thing in (*(pool_id if "numbers" in takes else ()), *([False] if "False" in takes else [])):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))  # as torch's binding does: pytorch/pytorch#196366
        return []

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    torch_pools._references_taken.cache_clear()
    first, second = int("300001"), int("300002")  # numbers that no other code refers to
    pool_id = first, second
    expected, of_false = (sys.getrefcount(first), sys.getrefcount(second)), sys.getrefcount(False)
    for _ in range(300):
        torch_pools.snapshot(pool_id)
    assert (sys.getrefcount(first), sys.getrefcount(second)) == expected
    assert abs(sys.getrefcount(False) - of_false) < 100
    torch_pools._references_taken.cache_clear()


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_a_pool_that_outlives_its_region_allocates_in_no_other(
    monkeypatch: pytest.MonkeyPatch, make: Make, keeps: bool
) -> None:
    """A program may keep the pool that ``Region.pool`` returned. Its entry point is not that of the next region."""
    router: Any = adapter()
    monkeypatch.setattr(torch_pools, "snapshot", lambda pool_id: [])
    region = make()
    points = region._core.entry_points()
    pools = router._of(region)
    monkeypatch.setattr(pools, "_make", lambda: type("Pool", (), {"id": (0, 1), "use_count": lambda self: 1})())
    pool = pools.graph
    if not keeps:
        del pool
    region.close()
    following = make()
    assert (following._core.entry_points() == points) is not keeps
    if keeps:
        assert functions(points)[0](MIB, 0, None) is None
    following.close()


@pytest.mark.parametrize(("capturing", "trims"), [(False, True), (True, False)], ids=["idle", "capture"])
def test_free_blocks_are_returned_outside_of_captures(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region, capturing: bool, trims: bool
) -> None:
    router: Any = adapter()
    trimmed: list[Any] = []
    free_in_torch(monkeypatch, region, listed=2 * MIB, anywhere={})
    monkeypatch.setattr(routing._core, "capturing", lambda: capturing)
    monkeypatch.setattr(routing, "has_many_blocks", lambda device: False)
    monkeypatch.setattr(router, "_pools", {region: router._pools[region]})
    monkeypatch.setattr(router, "trim", trimmed.append)
    assert router.return_caches("cpu") == (2 * MIB, "")
    assert trimmed == ([[region]] if trims else [])
    router._pools[region]._lent = [router._pools[region]._idle.pop()]
    assert router.return_caches("cpu") == (2 * MIB, f"a thread is inside region {region.tag!r}")
    region.pause()
    assert router.return_caches("cpu") == (0, "")
