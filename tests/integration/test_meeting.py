"""Ranks agree on rounds through torch's stores. Each rank is a thread with a connection of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed import FileStore, HashStore, Store, TCPStore

import memsaver
from memsaver.guests import store as store_module
from memsaver.guests.agreement import Agreement
from memsaver.guests.meeting import Meeting

LONG_S = 60.0  # for what succeeds
SHORT_S = 0.1  # for what fails
_T = TypeVar("_T")


@pytest.fixture
def store() -> Store:
    return HashStore()


@pytest.fixture(params=["hash", "file", "tcp"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made: dict[str, Callable[[], Store]] = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: TCPStore("127.0.0.1", 0, 1, True),
    }
    return made[request.param]()


def meetings(store: Store, size: int) -> list[Meeting]:
    return [Meeting(store, "test", rank, size, SHORT_S) for rank in range(size)]


def within(seconds: float) -> float:
    return time.monotonic() + seconds


def started(*functions: Callable[[], _T]) -> list[Future[_T]]:
    pool = ThreadPoolExecutor(len(functions))
    found = [pool.submit(function) for function in functions]
    pool.shutdown(wait=False)
    return found


def together(*functions: Callable[[], _T]) -> list[_T]:
    return [each.result(2 * LONG_S) for each in started(*functions)]


def gather(ranks: list[Meeting]) -> int:
    (number,) = set(together(*(lambda each=each: each.gather(within(LONG_S)) for each in ranks)))  # type: ignore[misc]
    return number


def settle(ranks: list[Meeting]) -> None:
    together(*(lambda each=each: each.settle(within(LONG_S)) for each in ranks))  # type: ignore[misc]


def opened(ranks: list[Meeting]) -> int:
    number = gather(ranks)
    settle(ranks)
    assert all(each.is_intact(within(LONG_S)) for each in ranks)
    return number


def close(ranks: list[Meeting]) -> None:
    for each in ranks:
        each.close(within(LONG_S))


def test_all_ranks_open_in_the_same_round_again_and_again(any_store: Store) -> None:
    ranks = meetings(any_store, 3)
    numbers = []
    for _ in range(3):
        close(ranks)
        numbers.append(opened(ranks))
        if not isinstance(any_store, FileStore):  # it deletes no keys
            assert not [key for key in any_store.list_keys() if "key of torch" in key]  # type: ignore[attr-defined]
        ranks[0].store_of_round(within(LONG_S)).set("key of torch", "")
    assert numbers == sorted(set(numbers))


# Ranks that give up


def test_groups_stay_open_on_no_rank_if_one_is_late(store: Store) -> None:
    ranks = meetings(store, 2)
    for _ in range(2):  # the second time, both have opened groups in an earlier round
        gather(ranks)
        with pytest.raises(memsaver.Error, match="the ranks 1 have not opened their groups in time"):
            ranks[0].settle(within(SHORT_S))
        with pytest.raises(memsaver.Error, match="the ranks 1 have not opened their groups in time"):
            ranks[1].settle(within(LONG_S))
        opened(ranks)


class Trial:
    """Ranks that fail and are interrupted at random. ``ends``: by round, what each rank's attempt in it came to."""

    def __init__(self, store: Store, size: int) -> None:
        self.ranks = meetings(store, size)
        self.ends: dict[int, set[bool]] = {}
        self._lock = threading.Lock()

    def attempts(self, each: Meeting, chance: random.Random) -> None:
        for _ in range(8):
            interrupts = chance.random() < 0.2
            if interrupts:
                each._agreement.wait = _interrupted  # type: ignore[method-assign, assignment]
            try:
                number = each.gather(within(chance.choice([0, 0.01, 0.1])))
            except (TimeoutError, KeyboardInterrupt):
                continue
            finally:
                each._agreement.__dict__.pop("wait", None)
            end = chance.random()
            if end < 0.3:
                done = each.give_up(OSError("random"))
            else:
                try:
                    each.check(within(LONG_S))
                    each.settle(within(chance.choice([0, 0.1])))
                    done = True
                except memsaver.Error:
                    done = False
            with self._lock:
                self.ends.setdefault(number, set()).add(done)
            if done and end < 0.8:
                each.close(within(LONG_S))


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_after_random_failures_all_ranks_open_together(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ANSWER_S", LONG_S)  # a rank that does not reach the store knows no decision
    for seed in range(4 if isinstance(any_store, HashStore) else 1):
        trial = Trial(any_store, 4)
        chances = [random.Random(10 * seed + rank) for rank in range(4)]
        together(*(lambda t=trial, e=e, c=c: t.attempts(e, c) for e, c in zip(trial.ranks, chances)))  # type: ignore[misc]
        assert all(len(done) == 1 for done in trial.ends.values()), trial.ends  # on all ranks, or on none
        opened(trial.ranks)


# Stores that fail


class Silent:
    """The connection of a rank to a store, whose calls named in `silent` do not end before the end of the test."""

    def __init__(self, rank: Meeting, end: threading.Event, *silent: str) -> None:
        link = rank._agreement.link
        self._store, self._end, self._silent = link.call(lambda store: store, within(LONG_S)), end, silent
        link._connected[:] = [self]

    def __getattr__(self, name: str) -> Any:
        if name in self._silent:
            self._end.wait()
            raise OSError("the end of the test")
        return getattr(self._store, name)


def test_store_that_does_not_answer_is_an_error_within_a_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ANSWER_S", SHORT_S)
    (rank,) = meetings(store, 1)
    end = threading.Event()
    try:
        for call in (rank.gather, rank.is_intact):
            Silent(rank, end, "check", "get")
            with pytest.raises(memsaver.Error, match="torch.distributed's store has not answered within"):
                call(within(SHORT_S))
        Silent(rank, end, "set")
        rank.close(within(SHORT_S))  # a pause does not need the store
        opened([rank])  # by a new connection
        Silent(rank, end, "compare_set")  # after it has joined a round
        with pytest.raises(memsaver.Error, match="has not answered"):
            rank.gather(within(SHORT_S))
        reason = Agreement(store, "test", 0, 1).last()[0].reason
        assert reason.startswith("rank 0 gave up: StoreError")  # by a new connection
    finally:
        end.set()
