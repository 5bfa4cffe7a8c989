"""A broker's counter for chunks: hears what clients ask for and hand back, and tells them what the pool decides."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence

from memsaver import protocol
from memsaver.clients import Client, Clients, Handler
from memsaver.demands import NoRoomError
from memsaver.pool import Pool
from memsaver.protocol import MOST_CHUNKS, MalformedError, Message
from memsaver.records import Chunk, Demand, Member

log = logging.getLogger("memsaver")


class Lender:
    """The pool's chunks, lent to these clients."""

    def __init__(self, pool: Pool, clients: Clients) -> None:
        self._pool = pool
        self._clients = clients
        self._failure: str | None = None
        self.handlers: dict[str, Handler] = {
            "bring": self._bring,
            "want": self._want,
            "more": self._more,
            "close": self._close,
            "give": self._give,
            "dropped": self._dropped,
            "scrub": self._scrub,
            "trim": self._trim,
        }

    def serve(self) -> tuple[bool, bool]:
        """One step of the pool. Returns whether there is more to do now, and whether it is worth another try soon."""
        served = self._pool.serve()
        self._grant(served.grants)
        for demand in (*served.done, *served.stalled):
            self._client_of(demand.member).send(Message("stalled", (demand.request, demand.count, demand.left)))
        self._drop(served.drops)
        if self._pool.failure != self._failure:
            self._failure = self._pool.failure
            log.info("the driver gives memory again" if self._failure is None else f"no memory now: {self._failure}")
        return served.again, served.retry

    def trim(self, keep_bytes: int) -> int:
        """Lets idle chunks go until at most so many bytes of them are kept. Returns the bytes that go."""
        gone, drops = self._pool.trim(keep_bytes)
        self._drop(drops)
        return gone

    def _grant(self, grants: list[tuple[Demand, Chunk, int]]) -> None:
        for demand, group in itertools.groupby(grants, key=lambda grant: grant[0]):
            chunks = list(group)
            for at in range(0, len(chunks), MOST_CHUNKS):
                words = [demand.request]
                files = []
                for _, chunk, flags in chunks[at : at + MOST_CHUNKS]:
                    words += (chunk.id, chunk.size, flags, chunk.limit)
                    if flags & protocol.HAS_DESCRIPTOR:
                        files.append(chunk.file)
                self._client_of(demand.member).send(Message("grant", words), files)

    def _drop(self, drops: list[tuple[Member, Chunk]]) -> None:
        by_member: dict[Member, list[int]] = {}
        for member, chunk in drops:
            by_member.setdefault(member, []).append(chunk.id)
        for member, ids in by_member.items():
            for at in range(0, len(ids), MOST_CHUNKS):
                self._client_of(member).send(Message("drop", ids[at : at + MOST_CHUNKS]))

    def _client_of(self, member: Member) -> Client:
        return self._clients[member.id]

    # What clients say

    def _bring(self, client: Client, message: Message) -> None:
        words = message.words
        if client.bringing is None:
            raise MalformedError("'bring' comes right after 'welcome'")
        if len(words) != 2 * len(message.files) or len(message.files) > MOST_CHUNKS:
            raise MalformedError(
                f"'bring' has {len(words) // 2} chunks and {len(message.files)} descriptors, expected one of each, "
                f"at most {MOST_CHUNKS}"
            )
        files, message.files = message.files, []
        try:
            for chunk, size in zip(words[::2], words[1::2]):
                if chunk in client.bringing:
                    raise MalformedError(f"chunk {chunk} is brought twice")
                if self._pool.bring(client.member, chunk, size, files[0]):
                    files.pop(0)
                else:
                    os.close(files.pop(0))
                client.bringing.add(chunk)
        finally:
            message.files = files
        client.is_user = True
        if len(words) // 2 < MOST_CHUNKS:  # a full packet may be followed by another
            client.settle(self._pool)

    def _want(self, client: Client, message: Message) -> None:
        client.settle(self._pool)
        self._ask(client, message, self._pool.want)

    def _more(self, client: Client, message: Message) -> None:
        client.settle(self._pool)
        self._ask(client, message, self._pool.more)

    def _ask(self, client: Client, message: Message, ask: Callable[[Member, int, Sequence[int]], None]) -> None:
        request = message.words[0]
        try:
            ask(client.member, request, message.words[1:])
        except NoRoomError as error:
            client.send(protocol.refusal("no_room", request, str(error)))

    def _close(self, client: Client, message: Message) -> None:
        self._pool.close(client.member, message.words[0])

    def _give(self, client: Client, message: Message) -> None:
        client.settle(self._pool)
        self._pool.give(client.member, message.words)

    def _dropped(self, client: Client, message: Message) -> None:
        client.settle(self._pool)
        self._pool.dropped(client.member, message.words)

    def _scrub(self, client: Client, message: Message) -> None:
        if message.words[0] not in (0, 1):
            raise MalformedError(f"scrub is {message.words[0]}, expected 0 or 1")
        client.member.scrub = bool(message.words[0])

    def _trim(self, client: Client, message: Message) -> None:
        serial, keep = message.words
        client.send(Message("trimmed", (serial, self.trim(keep))))
