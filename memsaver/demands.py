"""What members of a pool want and have not got, first come first. Which chunks they get is the pool's to say."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence

from memsaver.errors import gib
from memsaver.protocol import MalformedError
from memsaver.records import CLASS_NAMES, CLASSES, PAGE, Demand, Entry, Member


class NoRoomError(Exception):
    """A demand is larger than the whole pool."""


class Demands:
    """All demands that are open. ``capacity``: bytes, of the whole pool."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.queue: list[Demand] = []  # of those below, what waits
        self._open: dict[tuple[int, int], Demand] = {}  # by member and request, until closed
        self._opened = 0
        self._ended: list[Demand] = []  # by a message, and their clients are still to be told

    def take_ended(self) -> list[Demand]:
        """What has ended by itself since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def leave(self, member: Member) -> None:
        for demand in [demand for demand in self._open.values() if demand.member is member]:
            self._end(demand)

    def of(self, member: Member) -> list[Demand]:
        """What waits of a member's, in order of the queue."""
        return [demand for demand in self.queue if demand.member is member]

    def want(self, member: Member, request: int, entries: Sequence[int]) -> None:
        """Opens a demand. Raises NoRoomError where the pool can never serve it."""
        parsed = _entries(entries)
        demand = self._open.get((member.id, request))
        if demand is not None and (demand.entries or demand.refused):
            raise MalformedError(f"request {request} is open already")
        self._opened += 1
        demand = Demand(member, request, self._opened, now := time.monotonic(), now)
        self._open[member.id, request] = demand
        self._add(demand, parsed)

    def more(self, member: Member, request: int, entries: Sequence[int]) -> None:
        """Asks for something before the rest of a demand, and instead of as much of it, the largest limit first.

        One that was served is back in its place in the queue.
        """
        parsed = _entries(entries)
        demand = self._open.get((member.id, request))
        if demand is None:
            raise MalformedError(f"there is no open request {request}")
        if demand.refused:
            return
        demand.count += 1
        was_queued = bool(demand.entries)
        self._exchange(demand, sum(entry.left for entry in parsed))
        # What was granted while this was on its way counts: no demand can have more than there is.
        room = self._capacity - demand.granted - demand.left
        for entry in parsed:
            entry.left = min(entry.left, max(room, 0))
            room -= entry.left
        demand.entries.extendleft(entry for entry in reversed(parsed) if entry.left)
        if demand.entries and not was_queued:
            bisect.insort(self.queue, demand, key=lambda queued: queued.order)
        elif was_queued and not demand.entries:
            self.queue.remove(demand)
        if not demand.entries:
            self._ended.append(demand)

    def close(self, member: Member, request: int) -> None:
        demand = self._open.get((member.id, request))
        if demand is not None:
            self._end(demand)

    def _exchange(self, demand: Demand, nbytes: int) -> None:
        while nbytes and demand.entries:
            limit = max(entry.limit for entry in demand.entries)
            entry = next(entry for entry in demand.entries if entry.limit == limit)
            part = min(nbytes, entry.left)
            entry.left -= part
            nbytes -= part
            if not entry.left:
                demand.entries.remove(entry)

    def _add(self, demand: Demand, entries: list[Entry]) -> None:
        demand.count += 1
        needed = demand.granted + demand.left + sum(entry.left for entry in entries)
        if needed > self._capacity:
            self._unqueue(demand)
            demand.entries.clear()
            demand.refused = True
            raise NoRoomError(
                f"{gib(needed)} ({needed} bytes) needed, the pool's capacity is "
                f"{gib(self._capacity)} ({self._capacity} bytes)"
            )
        if not demand.entries:
            bisect.insort(self.queue, demand, key=lambda queued: queued.order)
        demand.entries.extendleft(reversed(entries))

    def _end(self, demand: Demand) -> None:
        self._unqueue(demand)
        del self._open[demand.member.id, demand.request]

    def _unqueue(self, demand: Demand) -> None:
        if demand.entries:
            self.queue.remove(demand)


def _entries(words: Sequence[int]) -> list[Entry]:
    entries = [Entry(*words[at : at + 3]) for at in range(0, len(words), 3)]
    for entry in entries:
        if entry.limit not in CLASSES or entry.fresh not in CLASSES or entry.fresh > entry.limit:
            raise MalformedError(
                f"chunks of at most {entry.limit} bytes, made of at most {entry.fresh}, expected of {CLASS_NAMES}, "
                "the second not above the first"
            )
        if entry.left <= 0 or entry.left % PAGE:
            raise MalformedError(f"{entry.left} bytes are wanted, expected a multiple of {PAGE}")
    return entries
