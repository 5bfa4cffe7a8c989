"""Reclaim on demand: while a demand waits, the clients return the memory that they cache and do not use.

A round asks every client, and ends when all have answered, or have left, or are late. Then the broker asks one client
after the other for chunks that it offers (lazy pauses), for as many bytes as the demand still lacks. While there are
offers, the client of the demand is asked for its caches after them: it would fill them again, by further demands. At
last it gets the holders of the rest. The next round follows after a pause, since caches fill again, captures end, and
threads leave their regions.
"""

from __future__ import annotations

import time

from memsaver import _core
from memsaver.broker.clients import Client, Clients
from memsaver.broker.pool import RETRY_S, Pool
from memsaver.broker.protocol import MalformedError, Message
from memsaver.broker.queue import Demand

UNKNOWN: int = _core.UNKNOWN_BYTES
FIRST_PAUSE_S = 0.02  # between the end of a round and the next one
LONGEST_ROUND_S = 2.0  # for clients that do not answer, or whose device works for long; the next round asks them again
LONGEST_COPY_S = 10.0  # of the offered chunks of a client, between two reports
LONGEST_PAUSE_S = 2.0  # doubled after each round for the same demand, up to this
_LONGEST_TEXT = 300  # characters of a client's reasons
_MOST_HOLDERS = 100  # in a message


class Reclaim:
    """Asks the clients of a pool for the memory that they cache, in rounds, while its first demand waits."""

    def __init__(self, pool: Pool, clients: Clients) -> None:
        self.answers: dict[int, tuple[int, str]] = {}  # the last ones by client id: unused bytes, and why
        self._pool = pool
        self._clients = clients
        self._asked: dict[int, Client] = {}  # of the round under way, without their last answer; by id
        self._offering: tuple[Client, int] | None = None  # asked for offered chunks, and its offers before
        self._exhausted: set[int] = set()  # clients that could give none in this round, by id
        self._begun_at = self._ended_at = 0.0  # the last round
        self._answered_at = 0.0  # the last client
        self._next_at: float | None = None  # the next step
        self._pause_s = FIRST_PAUSE_S
        self._head: tuple[Demand, int] | None = None  # the first demand, and its messages, when it was seen last
        self._has_round = False  # a round has begun, or was under way, since the head waits
        self._own_asked = False  # the client of the head, in this round
        # What clients were told of their demands: the messages of a demand, and whether more comes. Without the head
        # after an answer.
        self._told: dict[Demand, tuple[int, bool]] = {}

    def step(self, now: float) -> None:
        """Begins and ends rounds. Called after each step of the pool."""
        self._next_at = None
        is_over = now >= self._begun_at + self._longest_s
        self._asked = {number: each for number, each in self._asked.items() if each.is_connected and not is_over}
        if self._offering is not None and self._offering[0].id not in self._asked:
            client, before = self._offering
            if client.offered_bytes >= before:
                self._exhausted.add(client.id)
            self._offering = None
        waiting = self._pool.queue.waiting
        self._told = {demand: told for demand, told in self._told.items() if demand in waiting}
        if not waiting:
            self._head = None
            return
        head, *others = waiting
        for demand in others:  # returned memory goes to the first demand
            if demand.stall_reported == demand.messages:
                self._tell(demand, more=self._may_give)
        if self._pool.is_moving:
            return
        if self._head != (head, head.messages):
            self._head = (head, head.messages)
            self._pause_s = FIRST_PAUSE_S
            if self._offering is None or self._offering[0] is not head.client:
                self._asked.pop(head.client.id, None)  # its thread that waits for the demand may hold the GIL
            self._has_round = bool(self._asked) and self._offering is None
            self._exhausted.clear()
            self._own_asked = False
            self._told.pop(head, None)
        is_told = self._told.get(head) == (head.messages, False)
        if not self._asked and (is_told or not self._has_round) and now >= self._ended_at + self._pause_s:
            self._begin(head, now)
            is_told = False
        if self._has_round and not is_told:
            # Memory that the clients have returned may still be on its way through the pool, or through the driver.
            is_late = now < self._answered_at + 2 * RETRY_S and self._pool.lacks_memory
            is_stalled = head.stall_reported == head.messages and not self._pool.may_proceed
            more = bool(self._asked) or is_late or not is_stalled
            more = more or self._ask_for_offers(head, now) or self._ask_own(head, now)
            self._tell(head, more)
            if not more:
                self._ended_at = now
        if self._asked:
            self._next_at = self._begun_at + self._longest_s
        elif self._told.get(head) == (head.messages, False):
            self._next_at = self._ended_at + self._pause_s
        else:
            self._next_at = now + RETRY_S

    def deadlines(self) -> list[float]:
        return [] if self._next_at is None else [self._next_at]

    def _begin(self, head: Demand, now: float) -> None:
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._has_round = True
        self._exhausted.clear()
        self._own_asked = not self._may_give
        self._told.pop(head, None)
        for client in self._clients.values():
            if client.is_user and client.is_connected and (self._own_asked or client is not head.client):
                self._ask(client, now)

    @property
    def _longest_s(self) -> float:
        return LONGEST_ROUND_S if self._offering is None else LONGEST_COPY_S

    @property
    def _may_give(self) -> bool:
        return any(each.offered_bytes and each.id not in self._exhausted for each in self._clients.values())

    def _ask_for_offers(self, head: Demand, now: float) -> bool:
        """Asks the next client for what the demand lacks. False: none has anything left to give."""
        for client in self._clients.values():
            if client.is_connected and client.offered_bytes and client.id not in self._exhausted:
                self._offering = client, client.offered_bytes
                self._ask(client, now, head.remaining, head.request if client is head.client else 0)
                return True
        return False

    def _ask_own(self, head: Demand, now: float) -> bool:
        """Asks the client of the demand for its caches. False: it was asked in this round."""
        if self._own_asked or not head.client.is_user:
            return False
        self._own_asked = True
        self._ask(head.client, now)
        return True

    def _ask(self, client: Client, now: float, offered: int = 0, own: int = 0) -> None:
        """Asks for offered bytes, or for caches. The regions of the client's demand ``own`` keep their chunks."""
        self._begun_at = now
        self._asked[client.id] = client
        client.send(Message("reclaim", (offered, own)))

    def _tell(self, demand: Demand, more: bool) -> None:
        """Sends the holders and their bytes to the client of a demand, unless it has them."""
        if self._told.get(demand) == (demand.messages, more):
            return
        self._told[demand] = (demand.messages, more)
        words, lines = [demand.request, int(more)], []
        for each in sorted(self._clients.values(), key=lambda each: -each.held_bytes)[:_MOST_HOLDERS]:
            if each.held_bytes:
                unused, why = self.answers.get(each.id, (UNKNOWN, ""))
                words += (each.pid, each.held_bytes, unused)
                lines.append(why)
        demand.client.send(Message("holders", words, "\n".join(lines)))

    # Messages of clients

    def reclaimed(self, client: Client, message: Message) -> None:
        more, unused = message.words
        if more not in (0, 1):
            raise MalformedError(f"'more' of 'reclaimed' is {more}, expected 0 or 1")
        self.answers[client.id] = unused, " ".join(message.text[:_LONGEST_TEXT].split())
        # The client of the demand is not waited for: the others may wait for one of its threads that allocates.
        offers = self._offering is not None and self._offering[0] is client
        if not more or (self._head is not None and self._head[0].client is client and not offers):
            self._asked.pop(client.id, None)
        self._answered_at = time.monotonic()
        if offers:
            self._begun_at = self._answered_at
        if self._head is not None and self._told.get(self._head[0], (0, False))[1]:
            del self._told[self._head[0]]  # the client has the holders as they were

    def offers(self, client: Client, message: Message) -> None:
        if message.words[0] > client.offered_bytes:
            self._ended_at = 0.0  # the next round begins now: a client that resumes soon takes its chunks back
        client.offered_bytes = message.words[0]
