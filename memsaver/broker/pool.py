"""The pool: records which chunks exist and which client holds them, and decides which demand is served next.

The pool uses no sockets and never waits. ``serve()`` returns the messages that follow from a step as a ``ServeResult``.

A chunk is in one of these states::

    idle ──serve──> held ──give_back──> idle
     │               └─reclaim─┐
     └─release─────────────────┴> leaving ──drop──> deleted   its bytes count until no client has a handle

A chunk of an earlier broker is adopted as held, without a descriptor, and leaves when it is given back.

Demands are served in the order in which they were opened, and only the first one collects chunks: so no two demands can
each hold half of the memory that the other one needs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memsaver.broker.clients import CLASS_NAMES, CLASSES, SEVERAL, Chunk, Client
from memsaver.broker.protocol import FOREIGN, HAS_DESCRIPTOR, MalformedError
from memsaver.broker.queue import Demand, DemandQueue, Part
from memsaver.errors import DriverError

log = logging.getLogger("memsaver")

RETRY_S = 0.02  # time until the next creation after the driver had no memory, and until the next step for a demand
PATIENCE_S = 0.02  # time for which a large demand waits for large chunks while small ones are idle
DROP_GRACE_S = 0.5  # time that clients have to answer a drop before a demand is reported as stalled


class Memory(Protocol):
    """A device's memory: csrc/driver/physical.h."""

    def create(self, size: int) -> int: ...
    def close(self, file: int) -> None: ...
    def free_bytes(self) -> int: ...


@dataclass(slots=True)
class ServeResult:
    """The messages to send after a step of the pool, and when the next step is due."""

    grants: list[tuple[Demand, Chunk, int]] = field(default_factory=list)  # with flags; a demand's grants in a row
    completed: list[Demand] = field(default_factory=list)  # demands that are complete without a further grant
    stalled: list[Demand] = field(default_factory=list)
    has_more: bool = False  # the next step is due now
    retry: bool = False  # the next step is due after RETRY_S


class Pool:
    """The chunks of a device. ``capacity``: the most bytes to create. Adopted chunks may exceed it while in use."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        self.memory = memory
        self.capacity = capacity
        self.queue = DemandQueue(capacity)
        self.chunks: dict[int, Chunk] = {}
        self.total_bytes = 0  # created or adopted, and not deleted
        self.idle_bytes = 0
        self.leaving_bytes = 0
        self.is_moving = False  # the first demand gets memory now, or waits a moment for large chunks on their way
        self._idle: dict[int, dict[int, Chunk]] = {size: {} for size in CLASSES}
        self._ceiling = CLASSES[0]  # the driver has no memory for larger chunks until then
        self._ceiling_until = 0.0
        self._has_failed = False  # the driver's last creation
        self._dropped_at = -DROP_GRACE_S
        self._drops: list[tuple[Client, Chunk]] = []  # handles that clients have to release, not yet taken

    # Clients

    def reclaim(self, client: Client) -> None:
        """Takes all chunks of a client back. Nothing of its process may be able to run any more.

        The chunks that it held are released: a process to which the client had lent memory may still use them, and the
        driver gives their memory to nobody meanwhile.
        """
        held, client.held = client.held, {}
        self._forget_handles(client, list(client.imported.values()))
        for chunk in held.values():
            self._return(chunk, SEVERAL, leaves=True)
        self.queue.close_all(client)

    def adopt(self, client: Client, chunk_id: int, size: int) -> None:
        """Records a chunk that a client holds, of this broker or of an earlier one."""
        if size not in CLASSES:
            raise MalformedError(f"a chunk of {size} bytes, expected one of {CLASS_NAMES}")
        chunk = self.chunks.get(chunk_id)
        if chunk is not None:
            if chunk.holder is not client or chunk.size != size:
                raise MalformedError(f"chunk {chunk_id} of {size} bytes is not held by this client")
            return
        chunk = Chunk(chunk_id, size, None)
        self.chunks[chunk_id] = chunk
        self.total_bytes += size
        self._hand(chunk, client)

    def keep_only(self, client: Client, ids: set[int]) -> None:
        """Takes all other chunks of a client back, and records that it has no handles of other chunks."""
        self._forget_handles(client, [chunk for chunk in client.imported.values() if chunk.id not in ids])
        for chunk in [chunk for chunk in client.held.values() if chunk.id not in ids]:
            del client.held[chunk.id]
            self._return(chunk, SEVERAL)

    # Chunks

    def give_back(self, client: Client, ids: Sequence[int], foreign: Container[int] = ()) -> None:
        """Takes chunks back. Those in `foreign` may still hold bytes of other clients."""
        for chunk_id in ids:
            chunk = client.held.pop(chunk_id, None)
            if chunk is None:
                raise MalformedError(f"chunk {chunk_id} is not held by this client")
            self._return(chunk, SEVERAL if chunk_id in foreign else client.id)

    def drop(self, client: Client, ids: Sequence[int]) -> None:
        """Records that a client has released its handles of these chunks, with or without a request.

        Unknown ids are ignored: a chunk may be deleted between two such messages.
        """
        self._forget_handles(client, [client.imported[chunk_id] for chunk_id in ids if chunk_id in client.imported])

    def take_drops(self) -> list[tuple[Client, Chunk]]:
        """The handles that clients have to release, since the last call."""
        drops, self._drops = self._drops, []
        return drops

    def release_idle(self, keep_bytes: int) -> int:
        """Releases idle chunks to the driver, small ones first, until at most ``keep_bytes`` are idle.

        Returns the released bytes.
        """
        released = 0
        for size in reversed(CLASSES):
            for chunk in list(self._idle[size].values()):
                if self.idle_bytes <= keep_bytes:
                    return released
                released += size
                self._release(chunk)
        return released

    def available_bytes(self) -> int:
        """Idle bytes, and bytes that the driver can provide."""
        return self.idle_bytes + max(0, min(self.capacity - self.total_bytes, self.memory.free_bytes()))

    def close(self) -> None:
        """Closes the descriptors at the end of the broker. Clients keep the chunks that they hold."""
        for chunk in self.chunks.values():
            if chunk.file is not None:
                self.memory.close(chunk.file)
        self.chunks.clear()

    def _return(self, chunk: Chunk, writer: int, leaves: bool = False) -> None:
        chunk.holder = None
        if chunk.demand is not None:
            chunk.demand.granted -= chunk.size
            chunk.demand = None
        chunk.writer = writer
        self._idle[chunk.size][chunk.id] = chunk
        self.idle_bytes += chunk.size
        if leaves or chunk.file is None:  # without a descriptor no other client can get it
            self._release(chunk)

    def _remove_idle(self, chunk: Chunk) -> None:
        del self._idle[chunk.size][chunk.id]
        self.idle_bytes -= chunk.size

    def _hand(self, chunk: Chunk, client: Client) -> None:
        chunk.holder = client
        chunk.importers.add(client)
        client.held[chunk.id] = client.imported[chunk.id] = chunk

    def _release(self, chunk: Chunk) -> None:
        self._remove_idle(chunk)
        chunk.is_leaving = True
        self.leaving_bytes += chunk.size
        if chunk.importers:
            self._dropped_at = time.monotonic()
            self._drops += [(client, chunk) for client in chunk.importers]
        else:
            self._delete(chunk)

    def _forget_handles(self, client: Client, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            client.imported.pop(chunk.id, None)
            chunk.importers.discard(client)
            if chunk.is_leaving and not chunk.importers:
                self._delete(chunk)

    def _delete(self, chunk: Chunk) -> None:
        del self.chunks[chunk.id]
        self.leaving_bytes -= chunk.size
        self.total_bytes -= chunk.size
        if chunk.file is not None:
            self.memory.close(chunk.file)
        self._ceiling = CLASSES[0]

    # Serving demands

    def serve(self) -> ServeResult:
        """Performs one step: grants idle chunks, creates at most one chunk, and finds stalled demands."""
        result = ServeResult(completed=self.queue.take_completed())
        self.is_moving = False
        waiting = self.queue.waiting
        while waiting and self._collect(waiting[0], result):
            waiting.pop(0)
        if not waiting:
            # Clients of an earlier broker may have brought more than the capacity, each at its own time.
            excess = self.total_bytes - self.leaving_bytes - self.capacity
            if excess > 0 and self.idle_bytes:
                self.release_idle(max(0, self.idle_bytes - excess))
            return result
        head = waiting[0]
        result.has_more = self._create(head, result)
        # Small chunks given to a large demand are missing where only small ones fit. Large chunks would have to be
        # broken up for those, more of them in each switch. So a large demand waits a moment for the large chunks that
        # are usually on their way.
        is_patient = head.remaining >= CLASSES[0] and time.monotonic() < head.granted_at + PATIENCE_S
        if not result.has_more and not is_patient:
            result.has_more = self._collect(head, result, smaller=True) or self._break_up(head)
        self.is_moving = result.has_more or is_patient
        for demand in waiting:
            # The demands behind the first one may be first in a moment.
            if demand.stall_reported < demand.messages and not self.may_proceed:
                demand.stall_reported = demand.messages
                result.stalled.append(demand)
        if not head.parts:
            waiting.pop(0)
        result.retry = self.leaving_bytes > 0 or self._ceiling == 0 or is_patient
        return result

    def _collect(self, demand: Demand, result: ServeResult, smaller: bool = False) -> bool:
        """Grants idle chunks to a demand. ``smaller``: also chunks below the preferred size.

        Returns whether the demand is complete.
        """
        client = demand.client
        candidates: dict[int, list[Chunk]] = {}
        for part in list(demand.parts):
            best, *others = _preference(min(part.fresh, part.remaining))
            for size in (best, *others):
                if not self._idle[size] or size > part.limit or (size < best and not smaller):
                    continue
                if size not in candidates:  # taken from the end: there are the chunks of which the client has a handle
                    candidates[size] = sorted(self._idle[size].values(), key=lambda chunk: client in chunk.importers)
                chunks = candidates[size]
                while chunks and size <= part.remaining:
                    chunk = chunks.pop()
                    self._remove_idle(chunk)
                    self._grant(chunk, demand, part, result)
        return not demand.parts

    def _grant(self, chunk: Chunk, demand: Demand, part: Part, result: ServeResult) -> None:
        client = demand.client
        flags = (0 if client in chunk.importers else HAS_DESCRIPTOR) | (
            0 if chunk.writer in (None, client.id) else FOREIGN
        )
        self._hand(chunk, client)
        result.grants.append((demand, chunk, flags))
        chunk.demand = demand
        demand.granted += chunk.size
        demand.granted_at = time.monotonic()
        part.remaining -= chunk.size
        if not part.remaining:
            demand.parts.remove(part)

    def _create(self, demand: Demand, result: ServeResult) -> bool:
        """Creates the largest chunk that the first part of a demand can use. Returns whether there is a new chunk."""
        if time.monotonic() >= self._ceiling_until:
            self._ceiling = CLASSES[0]
        part = demand.parts[0]
        most = min(part.fresh, part.remaining, self.capacity - self.total_bytes)
        for size in CLASSES:
            if size > min(most, self._ceiling):
                continue
            try:
                file = self.memory.create(size)
            except DriverError as error:
                # In most cases the device is full. After any error the pool continues with the chunks that it has.
                if not self._has_failed:
                    log.info("no memory now: %s", error)
                self._has_failed = True
                self._ceiling = next((smaller for smaller in CLASSES if smaller < size), 0)
                self._ceiling_until = time.monotonic() + RETRY_S
                continue
            if self._has_failed:
                log.info("the driver has memory again")
            self._has_failed = False
            chunk = Chunk(int.from_bytes(os.urandom(8), "little") >> 1, size, file)
            self.chunks[chunk.id] = chunk
            self.total_bytes += size
            self._grant(chunk, demand, part, result)
            return True
        return False

    def _break_up(self, demand: Demand) -> bool:
        """Releases idle chunks that are too large for a demand, as all idle ones are at this point.

        Returns whether bytes became free at once.
        """
        before = self.total_bytes
        lacking = demand.remaining - (0 if self._ceiling == 0 else self.capacity - self.total_bytes)
        if self._has_recent_drops():  # an older drop may never be answered
            lacking -= self.leaving_bytes
        while lacking > 0 and self.idle_bytes:
            sizes = [size for size in CLASSES if self._idle[size]]
            size = min((size for size in sizes if size >= lacking), default=sizes[0])
            self._release(min(self._idle[size].values(), key=_release_cost))
            lacking -= size
        return self.total_bytes < before

    def _has_recent_drops(self) -> bool:
        return self.leaving_bytes > 0 and time.monotonic() < self._dropped_at + DROP_GRACE_S

    @property
    def may_proceed(self) -> bool:
        """Whether the first demand may get memory by the next steps, without messages of clients about it."""
        return self.is_moving or self._has_recent_drops()

    @property
    def lacks_memory(self) -> bool:
        """Whether the driver has no memory for chunks. It is asked again after ``RETRY_S``."""
        return self._ceiling == 0


def _preference(nbytes: int) -> list[int]:
    """Classes in order of preference for so many bytes: the class to create, then larger ones, then smaller ones."""
    best = next(size for size in CLASSES if size <= nbytes)
    return [best, *sorted(size for size in CLASSES if size > best), *(size for size in CLASSES if size < best)]


def _release_cost(chunk: Chunk) -> tuple[bool, int]:
    """Sorts chunks by the wait for their handles: a disconnected client does not answer."""
    return any(not client.is_connected for client in chunk.importers), len(chunk.importers)
