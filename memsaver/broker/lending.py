"""Messages about chunks: parses requests of clients, passes them to the pool, and sends the pool's answers."""

from __future__ import annotations

import itertools
import os

from memsaver.broker import protocol
from memsaver.broker.clients import Chunk, Client
from memsaver.broker.pool import Pool
from memsaver.broker.protocol import MOST_CHUNKS, MalformedError, Message
from memsaver.broker.queue import Demand, OverCapacityError


class Lending:
    """Lends the chunks of a pool to clients."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def serve(self) -> tuple[bool, bool]:
        """Performs one step of the pool. Returns whether another step is due now, and whether one is due soon."""
        result = self._pool.serve()
        for demand, grants in itertools.groupby(result.grants, key=lambda grant: grant[0]):
            _send_grants(demand, [(chunk, flags) for _, chunk, flags in grants])
        for demand in (*result.completed, *result.stalled):
            words = (demand.request, demand.messages, *demand.remaining_by_limit)
            demand.client.send(Message("stalled", words))
        send_drops(result.drops)
        return result.has_more, result.retry

    # Messages of clients

    def inventory(self, client: Client, message: Message) -> None:
        words = message.words
        if client.inventory is None:
            raise MalformedError("'inventory' comes right after 'welcome'")
        if len(words) != 2 * len(message.files) or len(message.files) > MOST_CHUNKS:
            raise MalformedError(
                f"'inventory' has {len(words) // 2} chunks and {len(message.files)} descriptors, expected one of each, "
                f"at most {MOST_CHUNKS}"
            )
        for chunk, size in zip(words[::2], words[1::2]):
            if chunk in client.inventory:
                raise MalformedError(f"chunk {chunk} is in the inventory twice")
            taken = self._pool.adopt(client, chunk, size, message.files[0])
            file = message.files.pop(0)
            if not taken:
                os.close(file)
            client.inventory.add(chunk)
        client.is_user = True
        if len(words) // 2 < MOST_CHUNKS:  # a full packet may be followed by another
            listed, client.inventory = client.inventory, None
            self._pool.keep_only(client, listed)

    def demand(self, client: Client, message: Message) -> None:
        request = message.words[0]
        try:
            self._pool.queue.open(client, request, message.words[1:])
        except OverCapacityError as error:
            client.send(protocol.refusal("over_capacity", request, str(error)))

    def exchange(self, client: Client, message: Message) -> None:
        self._pool.queue.exchange(client, message.words[0], message.words[1:])

    def close(self, client: Client, message: Message) -> None:
        self._pool.queue.close(client, message.words[0])

    def give_back(self, client: Client, message: Message) -> None:
        words = message.words
        self._pool.give_back(client, words[::2], {chunk for chunk, foreign in zip(words[::2], words[1::2]) if foreign})

    def dropped(self, client: Client, message: Message) -> None:
        self._pool.drop(client, message.words)

    def trim(self, client: Client, message: Message) -> None:
        serial, keep = message.words
        released, drops = self._pool.release_idle(keep)
        send_drops(drops)
        client.send(Message("trim", (serial, released)))


def _send_grants(demand: Demand, grants: list[tuple[Chunk, int]]) -> None:
    for at in range(0, len(grants), MOST_CHUNKS):
        is_last = at + MOST_CHUNKS >= len(grants)
        remaining = demand.remaining_by_limit if is_last else []
        words = [demand.request, demand.messages if is_last else 0, len(remaining) // 2, *remaining]
        files = []
        for chunk, flags in grants[at : at + MOST_CHUNKS]:
            words += (chunk.id, chunk.size, flags)
            if flags & protocol.HAS_DESCRIPTOR:
                files.append(chunk.file)
        demand.client.send(Message("grant", words), files)


def send_drops(drops: list[tuple[Client, Chunk]]) -> None:
    """Requests clients to release their handles of chunks."""
    by_client: dict[Client, list[int]] = {}
    for client, chunk in drops:
        by_client.setdefault(client, []).append(chunk.id)
    for client, ids in by_client.items():
        for at in range(0, len(ids), MOST_CHUNKS):
            client.send(Message("drop", ids[at : at + MOST_CHUNKS]))
