"""A connection to torch.distributed's store, and one-way channels of messages over it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch.distributed import Store

from memsaver.distributed.messages import dumps, loads
from memsaver.guests.store import ANSWER_S, StoreLink


class Link:
    """A connection of its own to the store. All calls raise memsaver.Error if the store cannot be reached.

    ``until``: the bound of the calls, by ``time.monotonic()``. Each call has a few seconds at least. None: no bound.
    ``direct``: as for ``StoreLink``.
    """

    def __init__(self, store: Store, prefix: str, *, direct: bool = False, until: float | None = None) -> None:
        self._link = StoreLink(store, prefix, direct=direct)
        self._existing: set[str] = set()
        self.until = until

    def set(self, key: str, value: str) -> None:
        self._link.call(lambda store: store.set(key, value), self._bound)

    def get(self, key: str) -> bytes | None:
        """None if there is no such key. Keys are never deleted."""
        return self.get_all([key])[0]

    def get_all(self, keys: Iterable[str]) -> list[bytes | None]:
        wanted = list(keys)
        return self._link.call(lambda store: self._read(store, wanted), self._bound)

    def exchange(self, key: str, expected: str, wanted: str) -> str:
        """Writes ``wanted`` if the value is ``expected``. Returns the value afterwards."""
        return self._link.call(lambda store: str(store.compare_set(key, expected, wanted).decode()), self._bound)

    def count(self, key: str) -> int:
        """Adds 1 to a number. Returns the sum."""
        return self._link.call(lambda store: int(store.add(key, 1)), self._bound)

    @property
    def _bound(self) -> float | None:
        return None if self.until is None else max(self.until, time.monotonic() + ANSWER_S)

    def _read(self, store: Any, keys: list[str]) -> list[bytes | None]:
        self._existing.update(key for key in keys if key not in self._existing and store.check([key]))
        there = [key for key in keys if key in self._existing]
        if len(there) > 1 and store.has_extended_api():
            found = dict(zip(there, store.multi_get(there)))
        else:
            found = {key: store.get(key) for key in there}
        return [found.get(key) for key in keys]


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
