"""The books of a shared pool: which chunks there are, who holds them, who waits, and who is served next.

No sockets and no waiting here. What has to be told to clients comes back to the caller (``Served``).

A chunk is in one of these places::

    idle ──serve──> held ──give, leave──> idle      back only when its leases have ended
     └─let go─> leaving ──dropped by all──> gone    its bytes count until nobody has a handle of it

Demands are served in the order in which they were opened, and only the first of them collects: two that each hold half
of what the other lacks cannot be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from memsaver.demands import Demands
from memsaver.errors import DriverError
from memsaver.protocol import HAS_DESCRIPTOR, SCRUB, MalformedError
from memsaver.records import CLASS_NAMES, CLASSES, Chunk, Demand, Entry, Lease, Member

RETRY_S = 0.02  # how long a driver that was full is not asked again, and a demand that waits is not looked at
PATIENCE_S = 0.02  # how long a large demand waits for large chunks while small ones are idle
DROP_GRACE_S = 0.5  # how long a demand counts on clients to answer a drop, before it is told that it is stuck


class Memory(Protocol):
    """A device's memory, as csrc/physical.h has it."""

    def create(self, size: int) -> int: ...
    def adopt(self, file: int, size: int) -> None: ...
    def close(self, file: int) -> None: ...
    def free_bytes(self) -> int: ...


@dataclass(slots=True)
class Served:
    """What there is to tell after a step."""

    grants: list[tuple[Demand, Chunk, int]] = field(default_factory=list)  # with flags
    done: list[Demand] = field(default_factory=list)  # nothing of it is left
    stalled: list[Demand] = field(default_factory=list)
    drops: list[tuple[Member, Chunk]] = field(default_factory=list)
    again: bool = False  # there is more to do now
    retry: bool = False  # worth another try soon


class Pool:
    """The books. ``capacity``: bytes that it may have made at any time; adopted chunks may exceed it while in use."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        self.memory = memory
        self.capacity = capacity
        self.chunks: dict[int, Chunk] = {}
        self.members: dict[int, Member] = {}
        self.leases: dict[int, Lease] = {}
        self.total_bytes = 0  # made or adopted, and not gone
        self.idle_bytes = 0
        self.leaving_bytes = 0
        self.failure: str | None = None  # of the driver, while it makes nothing
        self._idle: dict[int, dict[int, Chunk]] = {size: {} for size in CLASSES}
        self._demands = Demands(capacity)
        self._ceiling = CLASSES[0]  # larger chunks are not to be had from the driver until then
        self._ceiling_until = 0.0
        self._dropped_at = -DROP_GRACE_S

    # Members

    def join(self, client: int) -> Member:
        """A client comes, or comes again; what it held before stays its."""
        member = self.members.get(client)
        if member is None:
            member = self.members[client] = Member(client)
        member.connected = True
        return member

    def disconnect(self, member: Member) -> None:
        """Its socket broke. The process may go on, so what it holds stays its; it asks again when it is back."""
        member.connected = False
        self._demands.leave(member)
        if not member.held and not member.known:
            self.members.pop(member.id, None)

    def leave(self, member: Member) -> None:
        """Its process has exited."""
        member.held, held = {}, member.held
        for chunk in held.values():
            self._return(chunk, member)
        self._forget_handles(member, list(member.known.values()))
        self.disconnect(member)

    def bring(self, member: Member, chunk_id: int, size: int, file: int) -> bool:
        """A chunk that a client still uses. Returns whether the pool took the descriptor; a known one needs it not."""
        if size not in CLASSES:
            raise MalformedError(f"a chunk of {size} bytes, expected one of {CLASS_NAMES}")
        chunk = self.chunks.get(chunk_id)
        if chunk is not None:
            if chunk.holder is not member or chunk.size != size:
                raise MalformedError(f"chunk {chunk_id} of {size} bytes is not one that this client holds")
            return False
        try:
            self.memory.adopt(file, size)
        except DriverError as error:
            raise MalformedError(f"chunk {chunk_id} of {size} bytes cannot be adopted: {error}") from None
        chunk = Chunk(chunk_id, size, file)
        self.chunks[chunk_id] = chunk
        self.total_bytes += size
        self._hand(chunk, member)
        return True

    def keep_only(self, member: Member, brought: set[int]) -> None:
        """After all was brought: what it held beside that is free, and it has handles of nothing else."""
        for chunk in [chunk for chunk in member.held.values() if chunk.id not in brought]:
            del member.held[chunk.id]
            self._return(chunk, member)
        self._forget_handles(member, [chunk for chunk in member.known.values() if chunk.id not in brought])

    # Demands

    def want(self, member: Member, request: int, entries: Sequence[int]) -> None:
        """See Demands.want(); so are the next two."""
        self._demands.want(member, request, entries)

    def more(self, member: Member, request: int, entries: Sequence[int]) -> None:
        self._demands.more(member, request, entries)

    def close(self, member: Member, request: int) -> None:
        self._demands.close(member, request)

    # Chunks

    def give(self, member: Member, ids: Sequence[int]) -> None:
        for chunk_id in ids:
            chunk = member.held.pop(chunk_id, None)
            if chunk is None:
                raise MalformedError(f"chunk {chunk_id} is not one that this client holds")
            self._return(chunk, member)

    def dropped(self, member: Member, ids: Sequence[int]) -> None:
        """It has no handle of these any more, asked or not. What is unknown here was said twice, and is gone."""
        self._forget_handles(member, [member.known[chunk_id] for chunk_id in ids if chunk_id in member.known])

    def trim(self, keep_bytes: int) -> tuple[int, list[tuple[Member, Chunk]]]:
        """Lets idle chunks go, small ones first. Returns the bytes that go, and whom to tell."""
        gone = 0
        drops: list[tuple[Member, Chunk]] = []
        for size in reversed(CLASSES):
            for chunk in list(self._idle[size].values()):
                if self.idle_bytes <= keep_bytes:
                    return gone, drops
                gone += size
                self._let_go(chunk, drops)
        return gone, drops

    def available_bytes(self) -> int:
        """Idle, or to be had from the driver."""
        return self.idle_bytes + max(0, min(self.capacity - self.total_bytes, self.memory.free_bytes()))

    def close_all(self) -> None:
        """The end of this broker. Clients keep what they hold."""
        for chunk in self.chunks.values():
            self.memory.close(chunk.file)
        self.chunks.clear()

    def _return(self, chunk: Chunk, member: Member) -> None:
        chunk.holder = None
        if chunk.demand is not None:
            chunk.demand.granted -= chunk.size
            chunk.demand = None
        chunk.last = member.id
        chunk.secret = chunk.secret or member.scrub
        if not chunk.leases:
            self._shelve(chunk)

    def _shelve(self, chunk: Chunk) -> None:
        self._idle[chunk.size][chunk.id] = chunk
        self.idle_bytes += chunk.size

    def _unshelve(self, chunk: Chunk) -> None:
        del self._idle[chunk.size][chunk.id]
        self.idle_bytes -= chunk.size

    def _hand(self, chunk: Chunk, member: Member) -> None:
        chunk.holder = member
        chunk.handles.add(member)
        member.held[chunk.id] = member.known[chunk.id] = chunk

    def _let_go(self, chunk: Chunk, drops: list[tuple[Member, Chunk]]) -> None:
        self._unshelve(chunk)
        chunk.leaving = True
        self.leaving_bytes += chunk.size
        if chunk.handles:
            self._dropped_at = time.monotonic()
            drops += [(member, chunk) for member in chunk.handles]
        else:
            self._gone(chunk)

    def _forget_handles(self, member: Member, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            member.known.pop(chunk.id, None)
            chunk.handles.discard(member)
            if chunk.leaving and not chunk.handles:
                self._gone(chunk)

    def _gone(self, chunk: Chunk) -> None:
        del self.chunks[chunk.id]
        self.leaving_bytes -= chunk.size
        self.total_bytes -= chunk.size
        self.memory.close(chunk.file)
        self._ceiling = CLASSES[0]

    # Leases

    def lend(self, lease: int, owner: Member, pid: int, ids: Sequence[int]) -> Lease:
        """Enters an attachment to chunks of their holder; the same again replaces it."""
        known = self.leases.get(lease)
        if known is not None and known.owner is not owner:
            raise MalformedError(f"lease {lease} is another client's")
        missing = [chunk_id for chunk_id in ids if chunk_id not in owner.held]
        if missing:
            raise MalformedError(f"chunk {missing[0]} is not one that the owner of lease {lease} holds")
        chunks = [owner.held[chunk_id] for chunk_id in dict.fromkeys(ids)]
        for chunk in chunks:
            chunk.leases += 1
        if known is not None:
            self.end_lease(lease)
        self.leases[lease] = Lease(lease, owner, pid, chunks)
        return self.leases[lease]

    def end_lease(self, lease: int) -> Lease | None:
        ended = self.leases.pop(lease, None)
        for chunk in ended.chunks if ended is not None else ():
            chunk.leases -= 1
            if not chunk.leases and chunk.holder is None:
                self._shelve(chunk)
        return ended

    # Serving

    def serve(self) -> Served:
        """One step: hands out what is idle, makes at most one chunk, and says who is stuck."""
        served = Served(done=self._demands.take_ended())
        queue = self._demands.queue
        while queue and self._collect(queue[0], served):
            queue.pop(0)
        if not queue:
            # Clients of an earlier broker may have brought more than there should be, each in its own time.
            excess = self.total_bytes - self.leaving_bytes - self.capacity
            if excess > 0 and self.idle_bytes:
                served.drops += self.trim(max(0, self.idle_bytes - excess))[1]
            return served
        head = queue[0]
        served.again = self._make(head, served)
        # Small chunks would be missed where only small ones fit, and large ones be broken up for them, more of them in
        # each turn. The large ones are on their way then: a moment's patience lets them come first.
        is_patient = head.left >= CLASSES[0] and time.monotonic() < head.moved_at + PATIENCE_S
        if not served.again and not is_patient:
            served.again = self._collect(head, served, smaller=True) or self._break_up(head, served)
        for demand in queue:
            has_hope = served.again or is_patient or self._drops_are_young()  # those behind may be next in a moment
            if demand.told < demand.count and not has_hope:
                demand.told = demand.count
                served.stalled.append(demand)
        if not head.entries:
            queue.pop(0)
        served.retry = self.leaving_bytes > 0 or self._ceiling == 0 or is_patient
        return served

    def _collect(self, demand: Demand, served: Served, smaller: bool = False) -> bool:
        """Gives a demand what is idle, also chunks smaller than wished for; whether that is all of it."""
        member = demand.member
        shelves: dict[int, list[Chunk]] = {}
        for entry in list(demand.entries):
            best, *others = _preference(min(entry.fresh, entry.left))
            for size in (best, *others):
                if not self._idle[size] or size > entry.limit or (size < best and not smaller):
                    continue
                if size not in shelves:  # those last that the client has a handle of: they are taken from the end
                    shelves[size] = sorted(self._idle[size].values(), key=lambda chunk: member in chunk.handles)
                shelf = shelves[size]
                while shelf and size <= entry.left:
                    chunk = shelf.pop()
                    self._unshelve(chunk)
                    self._grant(chunk, demand, entry, served)
        return not demand.entries

    def _grant(self, chunk: Chunk, demand: Demand, entry: Entry, served: Served) -> None:
        member = demand.member
        if chunk.last is None:
            chunk.flagged = False
        elif chunk.last != member.id:
            chunk.flagged = chunk.secret or member.scrub
        flags = (0 if member in chunk.handles else HAS_DESCRIPTOR) | (SCRUB if chunk.flagged else 0)
        self._hand(chunk, member)
        served.grants.append((demand, chunk, flags))
        chunk.limit = entry.limit
        chunk.demand = demand
        demand.granted += chunk.size
        demand.moved_at = time.monotonic()
        entry.left -= chunk.size
        if not entry.left:
            demand.entries.remove(entry)
        if not demand.entries:
            served.done.append(demand)

    def _make(self, demand: Demand, served: Served) -> bool:
        """Makes one chunk, the largest that the first part of a demand can have; whether there was one."""
        if time.monotonic() >= self._ceiling_until:
            self._ceiling = CLASSES[0]
        entry = demand.entries[0]
        most = min(entry.fresh, entry.left, self.capacity - self.total_bytes)
        for size in CLASSES:
            if size > min(most, self._ceiling):
                continue
            try:
                file = self.memory.create(size)
            except DriverError as error:
                # Full in most cases. Whatever it was, the pool goes on with what it has.
                self.failure = str(error)
                self._ceiling = next((smaller for smaller in CLASSES if smaller < size), 0)
                self._ceiling_until = time.monotonic() + RETRY_S
                continue
            self.failure = None
            chunk = Chunk(int.from_bytes(os.urandom(8), "little") >> 1, size, file)
            self.chunks[chunk.id] = chunk
            self.total_bytes += size
            self._grant(chunk, demand, entry, served)
            return True
        return False

    def _break_up(self, demand: Demand, served: Served) -> bool:
        """Lets chunks go that are too large for a demand, which all idle ones are now; whether memory came free."""
        before = self.total_bytes
        lacking = demand.left - (0 if self._ceiling == 0 else self.capacity - self.total_bytes)
        if self._drops_are_young():  # what a client did not answer yet, it may never answer
            lacking -= self.leaving_bytes
        while lacking > 0 and self.idle_bytes:
            sizes = [size for size in CLASSES if self._idle[size]]
            size = min((size for size in sizes if size >= lacking), default=sizes[0])
            self._let_go(min(self._idle[size].values(), key=_trouble), served.drops)
            lacking -= size
        return self.total_bytes < before

    def _drops_are_young(self) -> bool:
        return self.leaving_bytes > 0 and time.monotonic() < self._dropped_at + DROP_GRACE_S

    # Figures

    def describe(self) -> dict[str, Any]:
        """The pool's part of the status, ready for JSON. The broker adds what it knows of processes::

            {"device": "cuda:0" or "cpu", "uuid": str,
             "capacity_bytes": int, "total_bytes": int, "idle_bytes": int, "leaving_bytes": int,
             "clients": [{"pid": int, "name": str, "held_bytes": int, "attached_bytes": int, "connected": bool,
                          "waiting": [{"needed_bytes", "granted_bytes", "seconds"}],      # in order of the queue
                          "report_age_s": float or None,                                  # None: never heard of
                          "regions": [{"tag", "allocated_bytes", "mapped_bytes", "backup_bytes", "state", "backup"}]}]}

        ``total_bytes``: made so far; of that ``idle_bytes`` can be had at once, and ``leaving_bytes`` are on the way
        back to the driver.
        """
        return {
            "capacity_bytes": self.capacity,
            "total_bytes": self.total_bytes,
            "idle_bytes": self.idle_bytes,
            "leaving_bytes": self.leaving_bytes,
        }

    def waiting(self, member: Member) -> list[dict[str, Any]]:
        rows = []
        for demand in self._demands.of(member):
            needed, seconds = demand.granted + demand.left, round(time.monotonic() - demand.since, 3)
            rows.append({"needed_bytes": needed, "granted_bytes": demand.granted, "seconds": seconds})
        return rows

    def held_bytes(self, member: Member) -> int:
        return sum(chunk.size for chunk in member.held.values())

    def kept_bytes(self, member: Member) -> int:
        """Held, and what it was asked to drop and has not."""
        return self.held_bytes(member) + sum(chunk.size for chunk in member.known.values() if chunk.leaving)

    def attached_bytes(self, pid: int) -> int:
        attached = {chunk for lease in self.leases.values() if lease.pid == pid for chunk in lease.chunks}
        return sum(chunk.size for chunk in attached)


def _preference(nbytes: int) -> list[int]:
    """Classes in the order in which idle chunks serve best: the one to make for so many bytes, larger, smaller."""
    best = next(size for size in CLASSES if size <= nbytes)
    return [best, *sorted(size for size in CLASSES if size > best), *(size for size in CLASSES if size < best)]


def _trouble(chunk: Chunk) -> tuple[bool, int]:
    """How little one would like to wait for a chunk's handles."""
    return any(not member.connected for member in chunk.handles), len(chunk.handles)
