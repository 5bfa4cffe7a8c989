"""The queue of demands: requests for memory that wait for chunks, in the order in which they were opened."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memsaver.broker.clients import CLASS_NAMES, CLASSES, PAGE, Client
from memsaver.broker.protocol import MalformedError
from memsaver.errors import gib


class OverCapacityError(Exception):
    """A demand exceeds the capacity of the pool."""


@dataclass(slots=True)
class Part:
    """A part of a demand: bytes that have the same limits of chunk size."""

    limit: int  # the largest usable chunk
    fresh: int  # the largest chunk to create
    remaining: int  # bytes


@dataclass(slots=True, eq=False)
class Demand:
    """The memory that a client requested under one request number."""

    client: Client
    request: int
    order: int  # position in the queue
    opened_at: float
    granted_at: float  # time of the last grant; at first, of the opening
    parts: deque[Part] = field(default_factory=deque)
    messages: int = 0  # received for this demand
    stall_reported: int = 0  # value of `messages` at the last `stalled` sent
    granted: int = 0  # bytes granted, and still held by the client
    needed: int = 0  # bytes of the demand when it was opened

    @property
    def remaining(self) -> int:
        return sum(part.remaining for part in self.parts)

    @property
    def remaining_by_limit(self) -> list[int]:
        """Limit and remaining bytes, in turn, ordered by limit. A part of the answers to the client."""
        by_limit: Counter[int] = Counter()
        for part in self.parts:
            by_limit[part.limit] += part.remaining
        return [word for pair in sorted(by_limit.items()) for word in pair]


class DemandQueue:
    """All open demands. ``capacity``: bytes of the whole pool."""

    def __init__(self, capacity: int) -> None:
        self.waiting: list[Demand] = []  # open demands with remaining bytes, first in first out
        self.on_close: Callable[[Demand], object] = lambda demand: None
        self._capacity = capacity
        self._open: dict[tuple[int, int], Demand] = {}  # by client id and request, until closed
        self._opened = itertools.count()
        self._completed: list[Demand] = []  # completed by a message of the client, which has no answer yet

    def take_completed(self) -> list[Demand]:
        """Demands that a client's message completed since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def open(self, client: Client, request: int, words: Sequence[int]) -> None:
        """Opens a demand for parts of (limit, fresh, bytes). Raises OverCapacityError if it exceeds the capacity."""
        parts = _parse(words)
        if (client.id, request) in self._open:
            raise MalformedError(f"request {request} is open already")
        needed = sum(part.remaining for part in parts)
        if needed > self._capacity:
            raise OverCapacityError(
                f"{gib(needed)} ({needed} bytes) needed, the pool's capacity is "
                f"{gib(self._capacity)} ({self._capacity} bytes)"
            )
        now = time.monotonic()
        demand = Demand(client, request, next(self._opened), now, now, deque(parts), messages=1, needed=needed)
        self._open[client.id, request] = demand
        self.waiting.append(demand)

    def exchange(self, client: Client, request: int, words: Sequence[int]) -> None:
        """Replaces remaining bytes of a demand by the given parts, which are served first.

        Bytes with the largest limit are replaced first. A demand that was complete returns to its place in the queue.
        """
        parts = _parse(words)
        demand = self._open.get((client.id, request))
        if demand is None:
            raise MalformedError(f"there is no open request {request}")
        demand.messages += 1
        was_waiting = bool(demand.parts)
        _take_out(demand, sum(part.remaining for part in parts))
        # Grants that were sent before this message arrived count as well: a demand cannot exceed the capacity.
        room = self._capacity - demand.granted - demand.remaining
        for part in parts:
            part.remaining = min(part.remaining, max(room, 0))
            room -= part.remaining
        demand.parts.extendleft(part for part in reversed(parts) if part.remaining)
        if demand.parts and not was_waiting:
            bisect.insort(self.waiting, demand, key=lambda each: each.order)
        elif was_waiting and not demand.parts:
            self.waiting.remove(demand)
        if not demand.parts:
            self._completed.append(demand)

    def close(self, client: Client, request: int) -> None:
        """Closes a demand. A request that is not open is ignored: the demand may have been closed before."""
        demand = self._open.get((client.id, request))
        if demand is not None:
            self._close(demand)

    def close_all(self, client: Client) -> None:
        for demand in [demand for demand in self._open.values() if demand.client is client]:
            self._close(demand)

    def _close(self, demand: Demand) -> None:
        if demand.parts:
            self.waiting.remove(demand)
        del self._open[demand.client.id, demand.request]
        self.on_close(demand)
        self._completed = [each for each in self._completed if each is not demand]  # the client may be disconnected


def _take_out(demand: Demand, nbytes: int) -> None:
    """Removes so many bytes from a demand, those with the largest limit first."""
    while nbytes and demand.parts:
        limit = max(part.limit for part in demand.parts)
        part = next(part for part in demand.parts if part.limit == limit)
        taken = min(nbytes, part.remaining)
        part.remaining -= taken
        nbytes -= taken
        if not part.remaining:
            demand.parts.remove(part)


def _parse(words: Sequence[int]) -> list[Part]:
    parts = [Part(*words[at : at + 3]) for at in range(0, len(words), 3)]
    for part in parts:
        if part.limit not in CLASSES or part.fresh not in CLASSES or part.fresh > part.limit:
            raise MalformedError(
                f"chunks of at most {part.limit} bytes, created with at most {part.fresh} bytes; expected two of "
                f"{CLASS_NAMES}, the second not above the first"
            )
        if part.remaining <= 0 or part.remaining % PAGE:
            raise MalformedError(f"{part.remaining} bytes are requested, expected a multiple of {PAGE}")
    return parts
