"""A connection to torch.distributed's store, and one-way channels of messages over it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from memsaver.distributed.messages import dumps, loads
from memsaver.errors import Error

_T = TypeVar("_T")
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05


class Link:
    """A connection of its own to the store. Its calls do not wait for keys, and do not print.

    ``Store.wait()`` and ``Store.get()`` of a missing key hold the connection until they end, and write to stderr when
    their timeout passes. So keys are looked up until they exist.

    Raises memsaver.Error if the store cannot be reached.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        clone: Callable[[], Store] = getattr(store, "clone", lambda: store)  # torch's types and older stores lack it
        self._store: Any = PrefixStore(prefix, _reached(clone))
        self._extended = bool(_reached(lambda: self._store.has_extended_api()))
        self._existing: set[str] = set()

    def set(self, key: str, value: str) -> None:
        _reached(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes | None:
        """None if there is no such key. Keys are never deleted."""
        return self.get_all([key])[0]

    def get_all(self, keys: Iterable[str]) -> list[bytes | None]:
        keys = list(keys)
        for key in keys:
            if key not in self._existing and _reached(lambda key=key: self._store.check([key])):  # type: ignore[misc]
                self._existing.add(key)
        there = [key for key in keys if key in self._existing]
        if self._extended and len(there) > 1:
            found = dict(zip(there, _reached(lambda: self._store.multi_get(there))))
        else:
            found = {key: _reached(lambda key=key: self._store.get(key)) for key in there}  # type: ignore[misc]
        return [found.get(key) for key in keys]

    def exchange(self, key: str, expected: str, wanted: str) -> str:
        """Writes ``wanted`` if the value is ``expected``. Returns the value afterwards."""
        return _reached(lambda: self._store.compare_set(key, expected, wanted)).decode()


def count(store: Store, key: str) -> int:
    """Adds 1 to a number in the store. Returns the sum. Raises memsaver.Error if the store cannot be reached."""
    return int(_reached(lambda: store.add(key, 1)))


class Outbox:
    """Sends messages to one reader, in one key: those that the reader has not yet acknowledged."""

    def __init__(self, link: Link, key: str) -> None:
        self._link, self._key = link, key
        self._unread: deque[Any] = deque()
        self._sent = 0

    def send(self, message: Any, read: int) -> None:
        """``read``: the number of messages that this side has read from the other's outbox."""
        self._unread.append(message)
        self._sent += 1
        self._link.set(self._key, dumps([self._sent - len(self._unread), read, list(self._unread)]))

    def acknowledged(self, count: int) -> None:
        """The reader has read so many messages since the beginning."""
        while self._unread and self._sent - len(self._unread) < count:
            self._unread.popleft()


class Inbox:
    """Reads the messages of one outbox. ``answers``: the outbox in the other direction."""

    def __init__(self, key: str, answers: Outbox) -> None:
        self.key, self._answers = key, answers
        self._last: bytes | None = None
        self.read = 0

    def take(self, content: bytes | None) -> list[Any]:
        """The messages in the value of the key that were not taken before."""
        if content is None or content == self._last:
            return []
        self._last = content
        first, acknowledged, messages = loads(content)
        self._answers.acknowledged(acknowledged)
        new = messages[max(0, self.read - first) :]
        self.read = first + len(messages)
        return list(new)


class Pace:
    """Sleeps between looks at the store: a tenth of the time waited so far, 0.5 to 50 ms."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def sleep(self, until: float | None = None) -> None:
        now = time.monotonic()
        seconds = min(_LONGEST_S, max(_SHORTEST_S, (now - self._begin) / 10))
        time.sleep(seconds if until is None else max(0.0, min(seconds, until - now)))


def _reached(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except RuntimeError as error:  # torch's DistError among them
        text = str(error).strip().partition("\n")[0]
        raise Error(
            f"torch.distributed's store cannot be reached: {text}; has the process that holds it ended?"
        ) from error
