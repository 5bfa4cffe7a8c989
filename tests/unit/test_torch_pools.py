"""torch's pools over regions and its routes to pools, with calls, figures and lists of torch that are made up."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import memsaver
from memsaver import _core
from memsaver._adapter import adapter
from memsaver._torch import pools as torch_pools
from memsaver._torch import routes as torch_routes
from memsaver._torch import routing
from memsaver._torch.pools import RegionPools, private
from memsaver._torch.routes import Routes, SidePools, routes
from tests.support import MIB, Make, functions

BYTES = 10 * MIB


class MadeUpPool:
    id = (7, 7)

    def use_count(self) -> int:
        return 1


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch, tag: str) -> Iterator[memsaver.Region]:
    """A region in a pool of torch, of whose block the first 2 MiB are free."""
    region = memsaver.region(tag, device="cpu")
    held = region.empty(BYTES, torch.uint8)
    pools = RegionPools(region)
    pools._idle = [MadeUpPool()]  # type: ignore[list-item]
    router: Any = adapter()
    monkeypatch.setattr(router, "_pools", {region: pools})
    blocks = [
        {"address": held.data_ptr(), "size": 2 * MIB, "state": "inactive"},
        {"address": held.data_ptr() + 2 * MIB, "size": BYTES - 2 * MIB, "state": "active_allocated"},
    ]
    monkeypatch.setattr(torch_pools, "snapshot", lambda pool_id: [{"blocks": blocks if pool_id == (7, 7) else []}])
    monkeypatch.setattr(routing, "has_many_blocks", lambda device: False)
    yield region


def test_allocations_of_a_region_are_those_of_a_list_that_lie_in_it(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region, make: Make
) -> None:
    """The list of torch's default pool has the blocks of all pools. Free blocks are not copied."""
    assert region.pause(backup="host").copied_bytes == BYTES - 2 * MIB
    region.resume()
    others = make().empty(MIB, torch.uint8)
    [(begin, nbytes)] = region._core.live()
    blocks = [
        {"address": each.data_ptr(), "size": each.nbytes, "state": "active_allocated"}
        for each in (others, torch.empty(MIB, dtype=torch.uint8))
    ]
    blocks.append({"address": begin, "size": nbytes, "state": "active_allocated"})
    monkeypatch.setattr(torch_pools, "snapshot", lambda pool_id: [{"blocks": blocks if pool_id == (7, 7) else []}])
    assert adapter().blocks(region) == [(begin, nbytes)]
    with pytest.raises(memsaver.Error, match="has no torch._C._cuda_nothing, expected a build of torch 2.8 or newer"):
        private("_cuda_nothing")


def test_ends_of_blocks_have_no_place_in_a_common_copy(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region
) -> None:
    [(begin, nbytes)] = region._core.live()
    block = {"address": begin, "size": nbytes, "requested_size": nbytes - 5000, "state": "active_allocated"}
    monkeypatch.setattr(torch_pools, "snapshot", lambda pool_id: [{"blocks": [block] if pool_id == (7, 7) else []}])
    assert adapter().live(region) is None
    monkeypatch.setattr(region, "same_as", "model")
    assert adapter().live(region) == [(begin, nbytes - 5000)]


@pytest.mark.parametrize("capturing", [False, True])
def test_free_blocks_are_returned_outside_of_captures(
    monkeypatch: pytest.MonkeyPatch, region: memsaver.Region, capturing: bool
) -> None:
    router: Any = adapter()
    trimmed: list[Any] = []
    monkeypatch.setattr(routing._core, "capturing", lambda: capturing)
    monkeypatch.setattr(router, "trim", trimmed.append)
    assert router.return_caches("cpu") == (2 * MIB, "")
    assert trimmed == ([] if capturing else [[region]])
    router._pools[region]._lent = [router._pools[region]._idle.pop()]
    assert router.return_caches("cpu") == (2 * MIB, f"a thread is inside region {region.tag!r}")
    region.pause()
    assert router.return_caches("cpu") == (0, "")


def thread_enters(patch: pytest.MonkeyPatch, router: Any, region: memsaver.Region) -> None:
    """A thread enters the region when its pools have been dropped by a close."""
    forget = router.forget

    def drop(closing: memsaver.Region) -> bool:
        dropped: bool = forget(closing)
        patch.setattr(router, "check_pausable", refuse)
        return dropped

    def refuse(*_: object) -> None:
        raise memsaver.Error(f"region {region.tag!r} cannot be closed: a thread is inside it")

    patch.setattr(router, "forget", drop)


@pytest.mark.parametrize("has_graphs", [True, False])
def test_a_pool_that_outlives_its_region_allocates_in_no_other(
    monkeypatch: pytest.MonkeyPatch, make: Make, has_graphs: bool
) -> None:
    """A program may keep the pool that ``Region.pool`` returned. Its entry point is not that of the next region."""
    router: Any = adapter()
    monkeypatch.setattr(torch_pools, "snapshot", lambda pool_id: [])
    monkeypatch.setattr(torch_routes, "RELEASE", (2, 13))
    region = make()
    points = region._core.entry_points()
    pools = router._of(region)
    monkeypatch.setattr(pools, "_make", MadeUpPool)
    pools.take_back(pools.lend())
    if has_graphs:
        assert pools.graph.id == MadeUpPool.id
    with monkeypatch.context() as patch, pytest.raises(memsaver.Error, match="is inside it"):
        thread_enters(patch, router, region)
        region.close()
    region.close()
    following = make()
    assert (following._core.entry_points() == points) is not has_graphs
    if has_graphs:
        assert functions(points)[0](MIB, 0, None) is None
        assert "was closed" in _core.take_allocation_error()
    following.close()


@pytest.mark.parametrize("takes", [(), ("numbers",), ("numbers", "False")], ids=str)
def test_a_list_of_blocks_keeps_references(monkeypatch: pytest.MonkeyPatch, takes: tuple[str, ...]) -> None:
    def snapshot(pool_id: tuple[int, int], include_traces: bool = True) -> list[dict[str, Any]]:
        for thing in (*(pool_id if "numbers" in takes else ()), *([False] if "False" in takes else [])):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))  # as torch's binding does: pytorch/pytorch#196366
        return []

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    torch_pools._takes_references.cache_clear()
    first, second = int("300001"), int("300002")  # numbers that no other code refers to
    pool_id = first, second
    expected, of_false = (sys.getrefcount(first), sys.getrefcount(second)), sys.getrefcount(False)
    for _ in range(300):
        torch_pools.snapshot(pool_id)
    assert (sys.getrefcount(first), sys.getrefcount(second)) == expected
    assert sys.getrefcount(False) > of_false - 100  # which other threads take and release meanwhile
    torch_pools._takes_references.cache_clear()


# Routes

THREAD, ALL = "thread", "all"


class Pool:
    def __init__(self, number: int, torch_calls: TorchCalls) -> None:
        self.id = (0, number)
        # torch's destructor asserts this.
        weakref.finalize(self, torch_calls.destroyed, number)


class TorchCalls:
    """Each route by the number of its pool, and the pools that were destroyed with the routes at that time."""

    def __init__(self) -> None:
        self.routes: dict[int, str] = {}
        self.gone: list[tuple[int, dict[int, str]]] = []
        self.without_route_of_all = 0
        self.released: list[int] = []

    def begin(self, kind: str) -> object:
        def call(index: int, pool_id: tuple[int, int]) -> None:
            assert pool_id[1] not in self.routes
            self.routes[pool_id[1]] = kind

        return call

    def end(self, index: int, pool_id: tuple[int, int]) -> None:
        del self.routes[pool_id[1]]
        self.without_route_of_all += ALL not in self.routes.values()

    def destroyed(self, number: int) -> None:
        self.gone.append((number, dict(self.routes)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> TorchCalls:
    found = TorchCalls()
    replaced = {
        "_cuda_beginAllocateCurrentThreadToPool": found.begin(THREAD), "_cuda_beginAllocateToPool": found.begin(ALL),
        "_cuda_endAllocateToPool": found.end,
        "_cuda_releasePool": lambda index, pool_id: found.released.append(pool_id[1]),
    }  # fmt: skip
    for name, call in replaced.items():
        monkeypatch.setattr(torch._C, name, call, raising=False)
    monkeypatch.setattr(torch_routes, "RELEASE", (2, 13))
    return found


def test_pools_are_destroyed_beside_routes(calls: TorchCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route of all threads does not end meanwhile: a thread without the GIL would get blocks of the paused pool."""
    numbers = iter((1, 3))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: Pool(next(numbers), calls))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch_routes, "snapshot", lambda pool_id: [])
    side, thread = SidePools(), Pool(9, calls)
    routes.begin(0, thread)
    side.begin(0)
    dropped = [Pool(2, calls)]
    routes.drop(0, dropped)
    assert dropped == [] and calls.gone == [(2, {9: THREAD, 1: ALL})] and calls.without_route_of_all == 0
    side.begin(0)
    assert calls.routes == {9: THREAD, 3: ALL} and calls.without_route_of_all == 0
    routes.end(0, thread)
    side.end(0)
    assert [number for number, _ in calls.gone] == [2, 1, 3]


def test_torch_up_to_2_12_empties_pools_that_are_never_destroyed(
    calls: TorchCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the process in the destructor while any thread of the process is routed."""
    emptied: list[list[int]] = []
    _core.capture_begins()
    try:
        routes.drop(0, [Pool(9, calls)])
        assert calls.gone == []  # during a capture
    finally:
        _core.capture_ends()
    routes.drop(0, [])
    assert calls.gone == [(9, {})]
    calls.gone.clear()
    monkeypatch.setattr(torch_routes, "RELEASE", (2, 12))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(list(calls.released)))
    older = Routes()
    for first in (1, 3):
        older.drop(2, [Pool(first, calls), Pool(first + 1, calls)])
    assert calls.gone == [] and calls.routes == {}
    assert emptied == [[1, 2], [1, 2, 3, 4]]
