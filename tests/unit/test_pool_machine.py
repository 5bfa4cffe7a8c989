"""The bookkeeping of a shared pool in random sequences of calls, over counted memory and a virtual clock.

The model sees the messages to clients: grants, the ends of demands, and drops. ``MEMSAVER_TEST_EXPLORE=20000`` runs
20,000 new sequences instead of the fixed ones. Nearly all of the time of a Hypothesis state machine would be its own.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memsaver.broker import pool as pools
from memsaver.broker import queue as demand_books
from memsaver.broker.clients import CLASSES, PAGE, Chunk, Client
from memsaver.broker.pool import Pool, ServeResult
from memsaver.broker.protocol import FOREIGN, HAS_DESCRIPTOR, MalformedError
from memsaver.broker.queue import OverCapacityError
from memsaver.broker.server import Connection
from tests.broker_support import PLENTY, CountedMemory, made
from tests.support import EXPLORED

GIB, LARGE, MEDIUM, SMALL = CLASSES
CAPACITY = GIB + LARGE + 4 * MEDIUM
CLIENTS = 3
STEPS = 5000  # of the pool, which a demand takes at most
SEQUENCES = 400


@dataclass(eq=False)
class Order:
    """A demand, as its client sees it."""

    request: int
    number: int  # by opening
    left: int
    most: int  # the largest limit so far
    chunks: set[Chunk] = field(default_factory=set)  # brought by it, and held since

    @property
    def granted(self) -> int:
        return sum(chunk.size for chunk in self.chunks)


@dataclass(eq=False)
class Model:
    """A client, as the test expects it."""

    client: Client
    connected: bool = True
    held: set[Chunk] = field(default_factory=set)
    known: set[Chunk] = field(default_factory=set)
    foreign: set[Chunk] = field(default_factory=set)  # granted with bytes of others
    to_drop: list[Chunk] = field(default_factory=list)
    orders: dict[int, Order] = field(default_factory=dict)


Wish = list[tuple[int, int, int]]


def entry(choose: random.Random) -> tuple[int, int, int]:
    fresh = choose.randint(0, 3)
    nbytes = choose.randint(0, 3) * CLASSES[fresh] + choose.randint(0, 3) * PAGE
    return CLASSES[choose.randint(0, fresh)], CLASSES[fresh], max(PAGE, nbytes)


def wish(choose: random.Random) -> Wish:
    if choose.random() < 0.2:
        return [(GIB, GIB, CAPACITY)]
    return [entry(choose) for _ in range(choose.randint(1, 3))]


def number(choose: random.Random) -> int:
    return choose.randrange(CLIENTS)


def index(choose: random.Random) -> int:
    return choose.randint(0, 11)


def some(choose: random.Random) -> set[int]:
    return {index(choose) for _ in range(choose.randint(1, 4))}


class Books:
    """All calls of a broker to its pool. Some of them are in no step of a sequence, so that others come more often."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.choose = random.Random(seed)
        self.at = 1000.0
        for module in (pools, demand_books):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.at))
        self.memory = CountedMemory(CAPACITY)
        self.pool = Pool(self.memory, CAPACITY)
        self.clients: dict[int, Model] = {}
        self.requests = itertools.count(1)
        self.numbers = itertools.count(1)
        self.made: dict[Chunk, int] = {}  # the order in which the chunks were seen first
        self.strangers = itertools.count(1 << 40)  # ids of chunks of an earlier broker
        self.uncertain: set[Chunk] = set()  # returned by the end of a connection
        self.bytes_of: dict[Chunk, set[int]] = {}  # the clients whose bytes a chunk holds
        self.dead: set[Chunk] = set()  # which a client held when it exited
        for number in range(CLIENTS):
            self.join(number)

    def run(self) -> None:
        """A sequence, and the end of all clients."""
        used = [rule for rule in RULES if self.choose.random() < 0.7]
        for rule in self.choose.choices(used or list(RULES), k=50):
            getattr(self, rule)(*(draw(self.choose) for draw in RULES[rule]))
            self.books_agree()
            self.queues_agree()
        for number in list(self.clients):
            self.leave(number)
        self.pool.release_idle(0)
        assert not self.memory.sizes, "memory is left when all have left"
        assert not self.pool.serve().grants

    # The model

    def waiting(self) -> list[tuple[Model, Order]]:
        orders = [(each, order) for each in self.clients.values() for order in each.orders.values() if order.left]
        return sorted(orders, key=lambda pair: pair[1].number)

    def returned(self, client: Model, chunk: Chunk) -> None:
        client.held.remove(chunk)
        for order in client.orders.values():
            order.chunks.discard(chunk)

    def pick(self, chunks: set[Chunk], which: set[int]) -> list[Chunk]:
        ordered = sorted(chunks, key=lambda chunk: (-chunk.size, self.made[chunk]))
        return list(dict.fromkeys(ordered[index % len(ordered)] for index in sorted(which))) if ordered else []

    def take(self, served: ServeResult) -> None:
        """Compares the messages of a step with the model."""
        for demand, chunk, flags in served.grants:
            client, order = self.waiting()[0]
            assert (demand.client, demand.request) == (client.client, order.request), "another one came first"
            assert client.connected
            assert not any(chunk in each.held for each in self.clients.values()), "a chunk has two holders"
            assert chunk not in self.dead, "a chunk was granted that a process may still use"
            assert chunk.file is not None, "a chunk of an earlier broker was granted"
            self.made.setdefault(chunk, len(self.made))
            assert chunk.size <= min(order.most, order.left)
            assert bool(flags & HAS_DESCRIPTOR) == (chunk not in client.known)
            writers = self.bytes_of.setdefault(chunk, set())
            if writers <= {client.client.id} and chunk not in self.uncertain:
                assert not flags & FOREIGN, "a chunk is to be zeroed without a reason"
            else:
                assert flags & FOREIGN, "a client is not told of the bytes of another one"
            writers.add(client.client.id)
            (client.foreign.add if flags & FOREIGN else client.foreign.discard)(chunk)
            client.held.add(chunk)
            client.known.add(chunk)
            order.chunks.add(chunk)
            order.left -= chunk.size
            assert sum(demand.remaining_by_limit[1::2]) == demand.remaining, "the remaining bytes in the message"
        for demand in served.completed:
            assert demand.client.id in self.clients, "the end of a demand is to be told to a client that has gone"
            order = self.clients[demand.client.id].orders[demand.request]
            assert order.left == 0, "a demand ended with something left"
        self.dropped_by_pool()
        for demand in served.stalled:
            assert self.clients[demand.client.id].orders[demand.request].left > 0

    def dropped_by_pool(self) -> set[Chunk]:
        drops = self.pool.take_drops()
        for member, chunk in drops:
            client = self.clients[member.id]
            assert chunk in client.known and chunk not in client.held and chunk not in client.to_drop
            if client.connected:
                client.to_drop.append(chunk)
        return {chunk for _, chunk in drops}

    # Members

    def join(self, number: int) -> None:
        if number not in self.clients:
            self.clients[number] = Model(made(number))

    def disconnect(self, number: int) -> None:
        client = self.clients.get(number)
        if client is None or not client.connected:
            return
        client.client.connection = None
        self.pool.queue.close_all(client.client)
        client.connected = False
        client.orders.clear()
        client.to_drop.clear()
        if not client.held and not client.known:
            del self.clients[number]

    def come_again(self, number: int, lost: set[int], brought: list[int]) -> None:
        """Brings most of its chunks, and chunks of an earlier broker."""
        self.disconnect(number)
        client = self.clients.get(number)
        if client is None:
            return
        client.client.connection = cast(Connection, object())
        client.connected = True
        kept = client.held - set(self.pick(client.held, lost))
        for chunk in kept:
            self.pool.adopt(client.client, chunk.id, chunk.size)
        for size in brought:
            identity = next(self.strangers)
            self.pool.adopt(client.client, identity, size)
            chunk = self.pool.chunks[identity]
            self.made[chunk] = len(self.made)
            kept.add(chunk)
            client.held.add(chunk)
        self.pool.keep_only(client.client, {chunk.id for chunk in kept})
        assert not self.pool.take_drops(), "a handle was dropped before"
        for chunk in client.held - kept:
            self.uncertain.add(chunk)  # it may not have got as far as the grant
            self.returned(client, chunk)
        client.known = set(kept)

    def ask_and_leave(self, number: int, which: int, wish: Wish) -> None:
        self.more(number, which, wish)
        self.leave(number)

    def leave(self, number: int) -> None:
        """Its process has gone."""
        client = self.clients.pop(number, None)
        if client is not None:
            self.dead |= client.held
            self.pool.reclaim(client.client)
            self.dropped_by_pool()

    def bring_a_chunk_of_another(self, number: int, taken: int) -> None:
        client = self.clients.get(number)
        others = [chunk for each in self.clients.values() if each is not client for chunk in each.held]
        if client is None or not others:
            return
        chunk = sorted(others, key=lambda chunk: self.made[chunk])[-taken]
        with pytest.raises(MalformedError):
            self.pool.adopt(client.client, chunk.id, chunk.size)

    # Demands

    def want(self, number: int, wish: Wish) -> None:
        client = self.clients.get(number)
        if client is None or not client.connected:
            return
        needed = sum(left for _, _, left in wish)
        order = Order(next(self.requests), next(self.numbers), needed, max(limit for limit, _, _ in wish))
        words = [word for entry in wish for word in entry]
        if needed > CAPACITY:
            with pytest.raises(OverCapacityError):
                self.pool.queue.open(client.client, order.request, words)
        else:
            self.pool.queue.open(client.client, order.request, words)
            client.orders[order.request] = order

    def more(self, number: int, which: int, wish: Wish) -> None:
        order = self.order(number, which)
        if order is None:
            return
        client = self.clients[number]
        self.pool.queue.exchange(client.client, order.request, [word for entry in wish for word in entry])
        needed = sum(left for _, _, left in wish)
        kept = order.left - min(needed, order.left)
        order.left = kept + min(needed, max(0, CAPACITY - order.granted - kept))
        order.most = max([order.most, *(limit for limit, _, _ in wish)])

    def close(self, number: int, which: int) -> None:
        order = self.order(number, which)
        if order is not None:
            self.pool.queue.close(self.clients[number].client, order.request)
            del self.clients[number].orders[order.request]

    def order(self, number: int, which: int) -> Order | None:
        client = self.clients.get(number)
        orders = list(client.orders.values()) if client is not None else []
        return orders[which % len(orders)] if orders else None

    # Chunks

    def give(self, number: int, which: set[int], zeroes: bool) -> None:
        client = self.clients.get(number)
        if client is not None and client.connected:
            chunks = self.pick(client.held, which)
            if zeroes:
                client.foreign -= set(chunks)
                self.bytes_of |= {chunk: {client.client.id} for chunk in chunks}
            self.pool.give_back(
                client.client, [chunk.id for chunk in chunks], {chunk.id for chunk in client.foreign & set(chunks)}
            )
            self.uncertain -= set(chunks) - client.foreign
            for chunk in chunks:
                self.returned(client, chunk)
            assert self.dropped_by_pool() == {chunk for chunk in chunks if chunk.file is None}

    def use(self, number: int, size: int, ends: str) -> None:
        """A chunk is borrowed and returned."""
        self.join(number)
        self.want(number, [(size, size, size)])
        self.settle()
        if ends == "leaves":
            self.leave(number)
        else:
            self.give(number, set(range(12)), ends == "zeroes")

    def drop_unasked(self, number: int, which: set[int]) -> None:
        client = self.clients.get(number)
        if client is not None and client.connected:
            self.drop(client, self.pick(client.known - client.held, which))

    def answer(self, number: int) -> None:
        client = self.clients.get(number)
        if client is not None and client.connected:
            self.drop(client, list(client.to_drop))

    def drop(self, client: Model, chunks: list[Chunk]) -> None:
        self.pool.drop(client.client, [chunk.id for chunk in chunks])
        client.known -= set(chunks)
        client.to_drop = [chunk for chunk in client.to_drop if chunk not in chunks]

    def trim(self, keep: int) -> None:
        before = self.pool.idle_bytes
        gone = self.pool.release_idle(keep)
        assert (before - gone, min(before, keep)) == (self.pool.idle_bytes, min(before, keep))
        assert self.pool.idle_bytes <= keep
        self.dropped_by_pool()

    # Other events

    def pass_time(self, seconds: float) -> None:
        self.at += seconds

    def others_leave(self, room: int) -> None:
        self.memory.room = room

    def serve(self) -> None:
        self.take(self.pool.serve())

    def settle(self) -> None:
        """Clients answer, time passes, and the pool serves until it has nothing to do. The first in the queue got all
        that there is."""
        for _ in range(STEPS):
            self.at += 1.0  # longer than any patience
            before = self.pool.total_bytes, self.pool.idle_bytes, self.pool.leaving_bytes, len(self.waiting())
            served = self.pool.serve()
            self.take(served)
            asked = [client for client in self.clients.values() if client.to_drop]
            for client in asked:
                self.drop(client, list(client.to_drop))
            after = self.pool.total_bytes, self.pool.idle_bytes, self.pool.leaving_bytes, len(self.waiting())
            if not served.has_more and not asked and not served.grants and before == after:
                break
        else:
            raise AssertionError(f"the pool has more to do after {STEPS} steps")
        if self.waiting():
            room = min(CAPACITY - self.pool.total_bytes, self.memory.free_bytes())
            assert self.pool.idle_bytes == 0, "a demand waits although chunks are idle"
            assert room < PAGE, "a demand waits for memory that can be made"
        elif self.pool.total_bytes - self.pool.leaving_bytes > CAPACITY:
            assert self.pool.idle_bytes == 0, "more than the capacity is idle"

    # Invariants

    def books_agree(self) -> None:
        pool, chunks = self.pool, list(self.pool.chunks.values())
        idle = [chunk for shelf in pool._idle.values() for chunk in shelf.values()]
        held = [chunk for client in self.clients.values() for chunk in client.held]
        leaving = [chunk for chunk in chunks if chunk.is_leaving]
        places = Counter(id(chunk) for group in (idle, held, leaving) for chunk in group)
        assert places == Counter(id(chunk) for chunk in chunks), "a chunk is in two places, or in none"
        assert (pool.total_bytes, pool.idle_bytes, pool.leaving_bytes) == tuple(
            sum(chunk.size for chunk in group) for group in (chunks, idle, leaving)
        )
        assert self.memory.sizes == {chunk.file: chunk.size for chunk in chunks if chunk.file is not None}
        assert not any(chunk.file is None for chunk in idle), "a chunk without a descriptor is idle"
        for client in self.clients.values():
            assert set(client.client.held.values()) == client.held <= client.known
            assert set(client.client.imported.values()) == client.known
            assert all(chunk.holder is client.client for chunk in client.held)
            assert client.client.held_bytes == sum(chunk.size for chunk in client.held)
        for chunk in chunks:
            assert chunk.importers == {client.client for client in self.clients.values() if chunk in client.known}
            assert chunk.importers or not chunk.is_leaving, "a chunk of which there is no handle has not gone"

    def queues_agree(self) -> None:
        # One that was served from the queue stays in the pool's list until the next step.
        queued = [(demand.client.id, demand.request, demand.remaining) for demand in self.pool.queue.waiting]
        expected = [(client.client.id, order.request, order.left) for client, order in self.waiting()]
        assert queued == expected
        for client, order in self.waiting():
            demands = [each for each in self.pool.queue.waiting if each.client is client.client]
            assert order.left + order.granted in [each.granted + each.remaining for each in demands]


# The calls, and how their arguments are drawn.
RULES: dict[str, list[Callable[[random.Random], Any]]] = {
    "join": [number],
    "disconnect": [number],
    "come_again": [number, some, lambda choose: choose.choices(CLASSES, k=choose.randint(0, 2))],
    "ask_and_leave": [number, index, wish],
    "leave": [number],
    "bring_a_chunk_of_another": [number, lambda choose: choose.randint(0, 1)],
    "want": [number, wish],
    "more": [number, index, wish],
    "close": [number, index],
    "give": [number, some, lambda choose: choose.random() < 0.5],
    "use": [number, lambda choose: choose.choice(CLASSES), lambda choose: choose.choice(["zeroes", "keeps", "leaves"])],
    "drop_unasked": [number, some],
    "answer": [number],
    "trim": [lambda choose: choose.choice([0, MEDIUM, LARGE, GIB])],
    "pass_time": [lambda choose: choose.choice([0.001, 0.025, 1.0])],
    "others_leave": [lambda choose: choose.choice([PLENTY, PLENTY, 0, MEDIUM, LARGE + PAGE])],
    "serve": [],
    "settle": [],
}


def test_the_pool_agrees_with_the_messages_to_clients() -> None:
    for sequence in range(EXPLORED or SEQUENCES):
        seed = random.getrandbits(64) if EXPLORED else sequence
        with pytest.MonkeyPatch.context() as patch:
            try:
                Books(seed, patch).run()
            except Exception as error:
                error.add_note(f"in the sequence of seed {seed}")
                raise
