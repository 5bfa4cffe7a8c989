"""Messages about chunks: parses requests of clients, passes them to the pool, and sends the pool's answers."""

from __future__ import annotations

import itertools

from memsaver.broker import protocol
from memsaver.broker.clients import Chunk, Client, Clients
from memsaver.broker.pool import Pool
from memsaver.broker.protocol import MOST_CHUNKS, MOST_DESCRIPTORS, MalformedError, Message
from memsaver.broker.queue import Demand, OverCapacityError

_NOT_HELD = "the memory is not held by this process any more"
_OF_AN_EARLIER_BROKER = (
    "the memory came from a broker that has ended: pause and resume the region, then send the tensor again"
)


class Lending:
    """Lends the chunks of a pool to clients."""

    def __init__(self, pool: Pool, clients: Clients) -> None:
        self._pool, self._clients = pool, clients

    def serve(self) -> tuple[bool, bool]:
        """Performs one step of the pool. Returns whether another step is due now, and whether one is due soon."""
        result = self._pool.serve()
        for demand, grants in itertools.groupby(result.grants, key=lambda grant: grant[0]):
            _send_grants(demand, [(chunk, flags) for _, chunk, flags in grants])
        for demand in (*result.completed, *result.stalled):
            offers = sum(each.offered_bytes for each in self._clients.values() if each.is_connected)
            words = (demand.request, demand.messages, offers, *demand.remaining_by_limit)
            demand.client.send(Message("stalled", words))
        self._send_drops()
        return result.has_more, result.retry

    # Messages of clients

    def inventory(self, client: Client, message: Message) -> None:
        words = message.words
        assert client.inventory is not None, "the loop has refused it"
        if len(words) > 2 * MOST_CHUNKS:
            raise MalformedError(f"'inventory' has {len(words) // 2} chunks, expected at most {MOST_CHUNKS}")
        for chunk, size in zip(words[::2], words[1::2]):
            if chunk in client.inventory:
                raise MalformedError(f"chunk {chunk} is in the inventory twice")
            self._pool.adopt(client, chunk, size)
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
        foreign = {chunk for chunk, is_foreign in zip(words[::2], words[1::2]) if is_foreign}
        self._pool.give_back(client, words[::2], foreign)

    def dropped(self, client: Client, message: Message) -> None:
        self._pool.drop(client, message.words)

    def descriptors(self, client: Client, message: Message) -> None:
        serial, *ids = message.words
        if len(ids) > MOST_DESCRIPTORS:
            raise MalformedError(f"'descriptors' has {len(ids)} chunks, expected at most {MOST_DESCRIPTORS}")
        files: list[int] = []
        for chunk_id in ids:
            chunk = client.held.get(chunk_id)
            if chunk is None or chunk.file is None:
                text = _NOT_HELD if chunk is None else _OF_AN_EARLIER_BROKER
                client.send(protocol.refusal("no_descriptor", serial, text))
                return
            files.append(chunk.file)
        client.send(Message("descriptors", (serial,)), files)

    def trim(self, client: Client, message: Message) -> None:
        serial, keep = message.words
        released = self._pool.release_idle(keep)
        self._send_drops()
        client.send(Message("trim", (serial, released)))

    def _send_drops(self) -> None:
        """Requests clients to release their handles of chunks."""
        by_client: dict[Client, list[int]] = {}
        for client, chunk in self._pool.take_drops():
            by_client.setdefault(client, []).append(chunk.id)
        for client, ids in by_client.items():
            for at in range(0, len(ids), MOST_CHUNKS):
                client.send(Message("drop", ids[at : at + MOST_CHUNKS]))


def _send_grants(demand: Demand, grants: list[tuple[Chunk, int]]) -> None:
    for at in range(0, len(grants), MOST_CHUNKS):
        is_last = at + MOST_CHUNKS >= len(grants)
        remaining = demand.remaining_by_limit if is_last else []
        words = [demand.request, demand.messages if is_last else 0, len(remaining) // 2, *remaining]
        files: list[int] = []
        for chunk, flags in grants[at : at + MOST_CHUNKS]:
            words += (chunk.id, chunk.size, flags)
            if flags & protocol.HAS_DESCRIPTOR:
                assert chunk.file is not None, "a chunk of an earlier broker is granted"
                files.append(chunk.file)
        demand.client.send(Message("grant", words), files)
