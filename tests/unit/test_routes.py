"""torch's routes to pools, with calls of torch that are made up."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from memsaver import _core
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


def test_pool_is_dropped_at_once_without_routes(calls: TorchCalls) -> None:
    Routes().drop([Pool(1, calls)])
    assert calls.gone == [(1, {})]


def test_pool_is_dropped_after_the_last_route_of_a_thread(calls: TorchCalls) -> None:
    routes, outer, inner = Routes(), Pool(1, calls), Pool(2, calls)
    routes.begin(0, outer)
    routes.begin(0, inner)
    dropped = [Pool(3, calls)]
    routes.drop(dropped)
    assert dropped == [] and calls.gone == []
    routes.end(0, inner)
    assert calls.gone == []
    routes.end(0, outer)
    assert calls.gone == [(3, {})]


def test_pool_is_dropped_between_two_routes_of_all_threads(calls: TorchCalls) -> None:
    routes = Routes()
    routes.begin_for_all(0, Pool(1, calls))
    routes.drop([Pool(2, calls)])
    assert calls.gone == [(2, {})] and calls.routes == {1: ALL}
    routes.end_for_all(0)
    assert calls.gone == [(2, {}), (1, {})] and calls.routes == {}


def test_another_pool_of_all_threads_begins_before_the_former_ends(calls: TorchCalls) -> None:
    routes, thread = Routes(), Pool(9, calls)
    routes.begin(0, thread)  # so that the former is not dropped meanwhile
    routes.begin_for_all(0, Pool(1, calls))
    routes.begin_for_all(0, Pool(2, calls))
    assert calls.routes == {9: THREAD, 2: ALL} and calls.without_route_of_all == 0
    assert calls.gone == []
    routes.end(0, thread)
    assert [number for number, _ in calls.gone] == [1]
    routes.end_for_all(0)


def test_no_pool_is_dropped_during_a_capture(calls: TorchCalls) -> None:
    routes = Routes()
    _core.capture_begins()
    try:
        routes.drop([Pool(1, calls)])
        assert calls.gone == []
    finally:
        _core.capture_ends()
    routes.drop([])
    assert calls.gone == [(1, {})]
