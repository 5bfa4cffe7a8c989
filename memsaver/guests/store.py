"""Calls of torch.distributed's store within a bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from memsaver._results import Lane
from memsaver.errors import Error

_T = TypeVar("_T")
ANSWER_S = 3.0  # for an answer after the bound of the call, as of a failure that the store has to be told
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05


class StoreError(Error):
    """The store cannot be reached, or has not answered in time."""


class StoreLink:
    """A connection of its own to the store. Its calls end at a bound.

    torch's calls of a store end when its process answers, or after the store's own timeout of minutes, and no signal
    ends them. So a thread of its own makes them, one after the other. A call without an answer is left to its thread,
    with the connection; the next call makes another one.

    ``Store.wait()`` and ``Store.get()`` of a missing key hold the connection until they end, and write to stderr when
    their timeout passes. So callers look up keys until they exist. Keys that exist are not deleted.

    Args:
        store: The store to connect to.
        prefix: The prefix of all keys.
        direct: Whether the caller's thread makes the calls, without a bound: it is a thread for such calls.

    Attributes:
        until: The bound of ``set()``, ``get()``, ``get_all()`` and ``exchange()``, by ``time.monotonic()``. Each call
            has a few seconds at least. None: no bound.
    """

    def __init__(self, store: Store, prefix: str, *, direct: bool = False) -> None:
        self._store, self._prefix, self._direct = store, prefix, direct
        self._connected: list[Any] = []
        self._lane: Lane | None = None
        self._existing: set[str] = set()
        self.until: float | None = None

    def call(self, function: Callable[[Any], _T], until: float | None = None) -> _T:
        """Calls a function with the connection.

        ``until``: by ``time.monotonic()``. None: no bound.

        Raises:
            StoreError: The store cannot be reached, or has not answered by then.
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
            raise StoreError(f"torch.distributed's store has not answered within {waited:.2g} s")
        return future.result()

    def set(self, key: str, value: str) -> None:
        self.call(lambda store: store.set(key, value), self._bound)

    def get(self, key: str) -> str | None:
        """None if there is no such key."""
        return self.get_all([key])[0]

    def get_all(self, keys: Iterable[str]) -> list[str | None]:
        wanted = list(keys)
        return self.call(lambda store: self._read(store, wanted), self._bound)

    def exchange(self, key: str, expected: str, wanted: str) -> str:
        """Writes ``wanted`` if the value is ``expected``; ``""``: if there is none. Returns the value afterwards."""
        return self.call(lambda store: str(store.compare_set(key, expected, wanted).decode()), self._bound)

    @property
    def _bound(self) -> float | None:
        return None if self.until is None else max(self.until, time.monotonic() + ANSWER_S)

    def _read(self, store: Any, keys: list[str]) -> list[str | None]:
        self._existing.update(key for key in keys if key not in self._existing and store.check([key]))
        there = [key for key in keys if key in self._existing]
        if len(there) > 1 and store.has_extended_api():
            found = dict(zip(there, store.multi_get(there)))
        else:
            found = {key: store.get(key) for key in there}
        return [found[key].decode() if key in found else None for key in keys]


def _reached(connected: list[Any], store: Store, prefix: str, function: Callable[[Any], _T]) -> _T:
    try:
        if not connected:
            connected.append(PrefixStore(prefix, clone(store)))
        return function(connected[0])
    except RuntimeError as error:  # torch's DistError among them
        text = str(error).strip().partition("\n")[0]
        raise StoreError(
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
