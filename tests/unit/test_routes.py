"""torch's routes to pools, with calls of torch that are made up."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from memsaver import _core
from memsaver._torch import routes as module
from memsaver._torch.routes import Routes

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
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchCalls]:
    found = TorchCalls()
    replaced = {
        "_cuda_beginAllocateCurrentThreadToPool": found.begin(THREAD), "_cuda_beginAllocateToPool": found.begin(ALL),
        "_cuda_endAllocateToPool": found.end, "_cuda_releasePool": lambda index, pool_id: None,
    }  # fmt: skip
    for name, call in replaced.items():
        monkeypatch.setattr(torch._C, name, call, raising=False)
    yield found


def test_pools_are_destroyed_beside_routes(calls: TorchCalls) -> None:
    """The route of all threads does not end meanwhile: a thread without the GIL would get blocks of the paused pool."""
    routes, thread = Routes(), Pool(9, calls)
    routes.begin(0, thread)
    routes.begin_for_all(0, Pool(1, calls))
    dropped = [Pool(2, calls)]
    routes.drop(0, dropped)
    assert dropped == [] and calls.gone == [(2, {9: THREAD, 1: ALL})] and calls.without_route_of_all == 0
    routes.end(0, thread)
    routes.end_for_all(0)
    assert [number for number, _ in calls.gone] == [2, 1]


def test_torch_up_to_2_12_empties_pools_that_are_never_destroyed(
    calls: TorchCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the process in the destructor while any thread of the process is routed. A route keeps other caches."""
    released: list[tuple[int, int]] = []
    emptied: list[dict[int, str]] = []
    numbers = itertools.count(100)
    monkeypatch.setattr(module, "RELEASE", (2, 12))
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool_id: released.append((index, pool_id[1])))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(dict(calls.routes)))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: Pool(next(numbers), calls))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0 if index == 1 else 5)
    routes = Routes()
    for first in (1, 3):
        routes.drop(2, [Pool(first, calls), Pool(first + 1, calls)])
    assert calls.gone == [] and calls.routes == {}
    assert emptied == [{100: THREAD, 101: THREAD}] * 2, "on the devices with memory"
    assert [each for each in released if each[1] < 100] == [(2, 1), (2, 2), (2, 3), (2, 4)]


def test_another_pool_of_all_threads_begins_before_the_former_ends(calls: TorchCalls) -> None:
    routes, thread = Routes(), Pool(9, calls)
    routes.begin(0, thread)  # so that the former is not dropped meanwhile
    routes.begin_for_all(0, Pool(1, calls))
    routes.begin_for_all(0, Pool(2, calls))
    assert calls.routes == {9: THREAD, 2: ALL} and calls.without_route_of_all == 0
    assert [number for number, _ in calls.gone] == [1]
    routes.end(0, thread)
    routes.end_for_all(0)


def test_no_pool_is_dropped_during_a_capture(calls: TorchCalls) -> None:
    routes = Routes()
    _core.capture_begins()
    try:
        routes.drop(0, [Pool(1, calls)])
        assert calls.gone == []
    finally:
        _core.capture_ends()
    routes.drop(0, [])
    assert calls.gone == [(1, {})]
