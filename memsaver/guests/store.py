"""Calls of torch.distributed's store within a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from memsaver._results import Lane
from memsaver.errors import Error

_T = TypeVar("_T")
ANSWER_S = 3.0  # for an answer after the bound of the call, as of a failure that the store has to be told
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05


class StoreLink:
    """A connection of its own to the store. Its calls end at a bound.

    torch's calls of a store end when its process answers, or after the store's own timeout of minutes, and no signal
    ends them. So a thread of its own makes them, one after the other. A call without an answer is left to its thread,
    with the connection; the next call makes another one.

    ``Store.wait()`` and ``Store.get()`` of a missing key hold the connection until they end, and write to stderr when
    their timeout passes. So callers look up keys until they exist.

    Args:
        store: The store to connect to.
        prefix: The prefix of all keys.
        direct: Whether the caller's thread makes the calls, without a bound: it is a thread for such calls.
    """

    def __init__(self, store: Store, prefix: str, *, direct: bool = False) -> None:
        self._store, self._prefix, self._direct = store, prefix, direct
        self._connected: list[Any] = []
        self._lane: Lane | None = None

    def call(self, function: Callable[[Any], _T], until: float | None = None) -> _T:
        """Calls a function with the connection.

        ``until``: by ``time.monotonic()``. None: no bound.

        Raises:
            memsaver.Error: The store cannot be reached, or has not answered by then.
        """
        if self._direct:
            return _reached(self._connected, self._store, self._prefix, function)
        if self._lane is None:
            self._connected, self._lane = [], Lane("memsaver store")
        call = partial(_reached, self._connected, self._store, self._prefix, function)
        began = time.monotonic()
        future: Future[_T] = self._lane.submit(call)
        if wait([future], None if until is None else max(0.0, until - began)).not_done:
            self._lane = None
            waited = time.monotonic() - began
            raise Error(f"torch.distributed's store has not answered within {waited:.2g} s")
        return future.result()


def _reached(connected: list[Any], store: Store, prefix: str, function: Callable[[Any], _T]) -> _T:
    try:
        if not connected:
            connected.append(PrefixStore(prefix, clone(store)))
        return function(connected[0])
    except RuntimeError as error:  # torch's DistError among them
        text = str(error).strip().partition("\n")[0]
        raise Error(
            f"torch.distributed's store cannot be reached: {text}; has the process that holds it ended?"
        ) from error


def clone(store: Store) -> Store:
    """Another connection to a store."""
    cloned: Callable[[], Store] = getattr(store, "clone", lambda: store)  # torch's types and older stores lack it
    return cloned()


class Pace:
    """Sleeps between looks at the store: a tenth of the time waited so far, 0.5 to 50 ms."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def sleep(self, until: float | None = None) -> None:
        now = time.monotonic()
        seconds = min(_LONGEST_S, max(_SHORTEST_S, (now - self._begin) / 10))
        time.sleep(seconds if until is None else max(0.0, min(seconds, until - now)))
