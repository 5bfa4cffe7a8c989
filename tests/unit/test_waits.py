"""Calls in threads, within a bound."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from memsaver.guests.waits import within


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    """An event for which a call waits. It is set at the end of the test."""
    made = threading.Event()
    yield made
    made.set()


def test_result_and_error_are_those_of_the_function() -> None:
    assert within(lambda: 3, 30, "no answer") == 3
    with pytest.raises(OSError, match="refused"):
        within(lambda: (_ for _ in ()).throw(OSError("refused")), 30, "no answer")


def test_call_that_takes_too_long_is_an_error_and_its_result_is_discarded(blocked: threading.Event) -> None:
    discarded: Queue[bool] = Queue()
    with pytest.raises(TimeoutError, match="no answer within 0.1 s"):
        within(lambda: blocked.wait(30), 0.1, "no answer", discard=discarded.put)
    assert discarded.empty()
    blocked.set()
    assert discarded.get(timeout=30)


def test_error_of_the_watcher_ends_the_wait(blocked: threading.Event) -> None:
    looks: list[int] = []

    def watch() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise OSError("another rank failed")

    with pytest.raises(OSError, match="another rank failed"):
        within(lambda: blocked.wait(60), 60, "no answer", watch=watch)
