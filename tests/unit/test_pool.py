"""The bookkeeping of a shared pool, over memory that is only counted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import cast

import pytest

from memsaver.broker import pool as pools
from memsaver.broker.clients import CLASSES, PAGE, Chunk, Client
from memsaver.broker.monitor import Process
from memsaver.broker.pool import Pool, ServeResult
from memsaver.broker.protocol import FOREIGN, HAS_DESCRIPTOR, MalformedError, Message
from memsaver.broker.queue import OverCapacityError
from memsaver.broker.reclaim import FIRST_PAUSE_S, LONGEST_PAUSE_S, Reclaim
from memsaver.broker.server import Connection
from memsaver.errors import DriverError

GIB, LARGE, MEDIUM, SMALL = CLASSES
CAPACITY = 4 * GIB


class FakeMemory:
    """Descriptors are numbers; ``room``: the bytes that other programs leave free."""

    def __init__(self, room: int = 1 << 60) -> None:
        self.room = room
        self.sizes: dict[int, int] = {}
        self.calls = 0
        self._files = itertools.count(100)

    def create(self, size: int) -> int:
        self.calls += 1
        if size > self.free_bytes():
            raise DriverError("create failed with code 2: full", call="create", code=2, message="full")
        file = next(self._files)
        self.sizes[file] = size
        return file

    def adopt(self, file: int, size: int) -> None:
        if file < 0:
            raise DriverError("import failed with code 1: no", call="import", code=1, message="no")
        assert file not in self.sizes
        self.sizes[file] = size

    def close(self, file: int) -> None:
        del self.sizes[file]

    def free_bytes(self) -> int:
        return self.room - sum(self.sizes.values())


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def pool(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(pools, "RETRY_S", 0.0)  # a full driver is asked again each time
    monkeypatch.setattr(pools, "PATIENCE_S", 0.0)
    monkeypatch.setattr(pools, "DROP_GRACE_S", 3600.0)  # unless a test says otherwise, clients answer
    return Pool(memory, CAPACITY)


def settle(pool: Pool) -> ServeResult:
    """Serves until there is nothing to do now. Returns all that happened."""
    everything = ServeResult()
    while True:
        served = pool.serve()
        everything.grants += served.grants
        everything.stalled += served.stalled
        everything.completed += served.completed
        everything.drops += served.drops
        everything.retry = served.retry
        if not served.has_more:
            return everything


def granted(served: ServeResult, member: Client | None = None) -> list[int]:
    return [chunk.size for demand, chunk, _ in served.grants if member in (None, demand.client)]


_requests = itertools.count(1)


def want(pool: Pool, member: Client, *entries: tuple[int, int, int]) -> int:
    request = next(_requests)
    pool.queue.open(member, request, [word for entry in entries for word in entry])
    return request


def borrow(pool: Pool, member: Client, *sizes: int) -> list[Chunk]:
    """Chunks of these sizes, which must be there or to be made."""
    found = []
    for size in sizes:
        want(pool, member, (size, size, size))
        served = settle(pool)
        assert granted(served, member) == [size]
        found.append(served.grants[-1][1])
    return found


def give(pool: Pool, chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        assert chunk.holder is not None
        pool.give_back(chunk.holder, [chunk.id])


def client(number: int) -> Client:
    """A connected client. The pool does not use its connection."""
    return Client(number, Process(number, -1), cast(Connection, object()))


def disconnect(pool: Pool, one: Client) -> None:
    one.connection = None
    pool.queue.close_all(one)


@pytest.fixture
def one() -> Client:
    return client(1)


@pytest.fixture
def two() -> Client:
    return client(2)


@pytest.mark.parametrize(
    ("entry", "sizes"),
    [
        ((GIB, GIB, 2 * GIB), [GIB, GIB]),
        ((GIB, LARGE, GIB), [LARGE] * 4),
        ((GIB, GIB, GIB + LARGE + MEDIUM + 2 * SMALL), [GIB, LARGE, MEDIUM, SMALL, SMALL]),
        ((SMALL, SMALL, 3 * SMALL), [SMALL] * 3),
    ],
)
def test_chunks_are_made_of_the_largest_class_that_is_allowed(
    pool: Pool, one: Client, entry: tuple[int, int, int], sizes: list[int]
) -> None:
    want(pool, one, entry)
    assert granted(settle(pool)) == sizes
    assert pool.total_bytes == one.held_bytes == sum(sizes)


def test_of_idle_chunks_the_fitting_class_comes_first_then_larger_then_smaller(
    pool: Pool, one: Client, two: Client
) -> None:
    give(pool, borrow(pool, one, GIB, LARGE, MEDIUM, SMALL))
    want(pool, two, (GIB, LARGE, GIB + LARGE))
    # LARGE would be created. The rest of 1 GiB is one larger chunk.
    assert granted(settle(pool)) == [LARGE, GIB]
    want(pool, two, (GIB, LARGE, MEDIUM + 2 * SMALL))
    assert granted(settle(pool)) == [MEDIUM, SMALL, SMALL]


def test_an_idle_chunk_that_is_larger_than_the_limit_is_not_taken(pool: Pool, one: Client, two: Client) -> None:
    give(pool, borrow(pool, one, LARGE))
    want(pool, two, (MEDIUM, MEDIUM, LARGE))
    assert granted(settle(pool)) == [MEDIUM] * 8
    assert pool.idle_bytes == LARGE


def test_of_equal_chunks_those_come_first_that_the_client_knows(pool: Pool, one: Client, two: Client) -> None:
    mine = borrow(pool, one, MEDIUM, MEDIUM)
    theirs = borrow(pool, two, MEDIUM, MEDIUM)
    give(pool, [theirs[0], mine[0], theirs[1], mine[1]])
    want(pool, one, (MEDIUM, MEDIUM, 2 * MEDIUM))
    served = settle(pool)
    assert {chunk for _, chunk, _ in served.grants} == set(mine)
    assert [flags for *_, flags in served.grants] == [0, 0]
    want(pool, one, (MEDIUM, MEDIUM, 2 * MEDIUM))
    assert [flags for *_, flags in settle(pool).grants] == [HAS_DESCRIPTOR | FOREIGN] * 2


def test_only_the_head_of_the_queue_collects(pool: Pool, one: Client, two: Client) -> None:
    three = client(3)
    held = borrow(pool, one, GIB, GIB, GIB, GIB)
    want(pool, two, (GIB, GIB, 3 * GIB))
    want(pool, three, (GIB, GIB, GIB))
    served = settle(pool)
    assert [demand.client for demand in served.stalled] == [two, three]
    for chunk in held[:3]:
        give(pool, [chunk])
        assert granted(settle(pool), three) == []
    assert two.held_bytes == 3 * GIB
    give(pool, held[3:])
    assert granted(settle(pool), three) == [GIB]


def test_a_stalled_demand_is_reported_once_for_each_message(pool: Pool, one: Client, two: Client) -> None:
    borrow(pool, one, GIB, GIB, GIB, GIB)
    request = want(pool, two, (GIB, GIB, GIB))
    assert [(demand.request, demand.messages) for demand in settle(pool).stalled] == [(request, 1)]
    assert settle(pool).stalled == []
    pool.queue.exchange(two, request, [MEDIUM, MEDIUM, MEDIUM])
    assert [demand.messages for demand in settle(pool).stalled] == [2]
    assert settle(pool).stalled == []


def test_an_exchanged_part_of_a_demand_is_served_before_its_rest(pool: Pool, one: Client, two: Client) -> None:
    held = borrow(pool, one, GIB, GIB, GIB, LARGE, LARGE, LARGE, LARGE)
    request = want(pool, two, (SMALL, SMALL, SMALL), (GIB, GIB, 2 * LARGE))
    settle(pool)
    pool.queue.exchange(two, request, [LARGE, LARGE, LARGE])
    assert [demand.remaining for demand in settle(pool).stalled] == [SMALL + 2 * LARGE]
    give(pool, held[-2:])
    served = settle(pool)
    assert granted(served) == [LARGE, LARGE]
    [demand] = {demand for demand, *_ in served.grants}
    assert (demand.remaining_by_limit, served.completed) == ([SMALL, SMALL], [])
    pool.queue.exchange(two, request, [SMALL, SMALL, 3 * SMALL])  # one of them was to come anyway
    give(pool, held[3:4])
    pool.drop(one, [held[3].id])
    served = settle(pool)
    pool.drop(one, [chunk.id for _, chunk in served.drops])
    assert granted(served) + granted(settle(pool)) == [SMALL] * 3
    assert two.held_bytes == 2 * LARGE + 3 * SMALL


def test_the_end_of_a_demand_is_reported_to_its_client(pool: Pool, one: Client) -> None:
    """By its last grant, or by itself where there is none."""
    request = want(pool, one, (GIB, GIB, 4 * GIB))
    served = settle(pool)
    demand = served.grants[-1][0]
    assert (demand.request, demand.messages, demand.remaining_by_limit, served.completed) == (request, 1, [], [])
    pool.queue.exchange(one, request, [SMALL, SMALL, SMALL])  # there is no room for it
    served = settle(pool)
    assert (served.grants, [(demand.messages, demand.remaining_by_limit) for demand in served.completed]) == (
        [],
        [(2, [])],
    )
    assert settle(pool).completed == []
    pool.queue.exchange(one, request, [SMALL, SMALL, SMALL])
    pool.queue.close(one, request)
    assert settle(pool).completed == []


def test_a_served_demand_that_asks_for_more_keeps_its_place_in_the_queue(pool: Pool, one: Client, two: Client) -> None:
    """Behind one that waits for its chunks it would wait for ever."""
    request = want(pool, one, (GIB, GIB, 3 * GIB))
    settle(pool)
    want(pool, two, (GIB, GIB, 4 * GIB))
    settle(pool)
    assert two.held_bytes == GIB
    pool.queue.exchange(one, request, [GIB, GIB, GIB])
    settle(pool)
    pool.give_back(two, list(two.held))
    assert granted(settle(pool)) == [GIB]
    assert one.held_bytes == 4 * GIB


def test_closing_a_demand_keeps_granted_chunks(pool: Pool, one: Client, two: Client) -> None:
    borrow(pool, one, GIB, GIB, GIB)
    request = want(pool, two, (GIB, GIB, 2 * GIB))
    three = client(3)
    want(pool, three, (GIB, GIB, GIB))
    settle(pool)
    pool.queue.close(two, request)
    pool.queue.close(two, request)  # it may have been closed or served before
    assert two.held_bytes == GIB
    pool.give_back(two, list(two.held))
    assert granted(settle(pool), three) == [GIB]


def test_a_demand_beyond_the_capacity_of_the_pool_is_refused(pool: Pool, one: Client) -> None:
    with pytest.raises(OverCapacityError, match=f"5.00 GiB .{5 * GIB} bytes. needed, .* 4.00 GiB .{CAPACITY} bytes"):
        want(pool, one, (GIB, GIB, 5 * GIB))
    assert settle(pool).grants == []
    request = want(pool, one, (GIB, GIB, 4 * GIB))
    settle(pool)
    pool.queue.exchange(one, request, [SMALL, SMALL, SMALL])  # said before it heard of the last grant
    served = settle(pool)
    assert served.grants == [] and [demand.remaining for demand in served.completed] == [0]
    assert one.held_bytes == 4 * GIB


def test_chunks_too_large_for_the_head_are_broken_up(pool: Pool, memory: FakeMemory, one: Client, two: Client) -> None:
    give(pool, borrow(pool, one, GIB, GIB, GIB, GIB))
    want(pool, two, (SMALL, SMALL, 2 * SMALL))
    served = settle(pool)
    assert served.grants == []
    assert served.stalled == []  # there is hope
    [(member, chunk)] = served.drops
    assert (member, chunk.size, pool.leaving_bytes) == (one, GIB, GIB)
    assert pool.serve().drops == []  # one is enough
    assert len(memory.sizes) == 4  # its bytes are not free while somebody has a handle
    pool.drop(one, [chunk.id])
    assert granted(settle(pool)) == [SMALL, SMALL]
    assert pool.total_bytes == 3 * GIB + 2 * SMALL


def test_the_smallest_sufficient_chunk_is_broken_up(pool: Pool, one: Client, two: Client) -> None:
    held = borrow(pool, one, GIB, GIB, GIB, *[LARGE] * 3, *[MEDIUM] * 8)
    give(pool, held)
    pool.reclaim(one)
    want(pool, two, (SMALL, SMALL, 10 * SMALL))
    assert granted(settle(pool)) == [SMALL] * 10
    assert pool.total_bytes == CAPACITY - MEDIUM + 10 * SMALL


def test_a_new_head_of_the_queue_does_not_wait_out_the_pause_of_the_last_one(
    pool: Pool, one: Client, two: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Client, "send", lambda each, message: asked.append(message.kind) if each is one else None)
    one.is_user = True
    reclaim, now = Reclaim(pool, {1: one, 2: two}), time.monotonic() + 3600.0  # long after the answers
    borrow(pool, one, *[GIB] * 4)

    def is_asked() -> bool:
        """Whether a round begins now. It ends at once."""
        asked.clear()
        reclaim.step(now)
        reclaim.reclaimed(one, Message("reclaimed", (0, 0)))
        reclaim.step(now)
        return asked == ["reclaim"]

    request = want(pool, two, (GIB, GIB, GIB))
    settle(pool)
    for _ in range(12):
        assert is_asked()
        [now] = reclaim.deadlines()
    now -= LONGEST_PAUSE_S / 2
    assert not is_asked()
    pool.queue.close(two, request)
    want(pool, two, (GIB, GIB, GIB))
    settle(pool)
    assert is_asked()
    now += FIRST_PAUSE_S
    assert not is_asked()  # from here on the pauses grow again
    now += FIRST_PAUSE_S
    assert is_asked()


def test_a_client_that_does_not_drop_a_chunk_is_reported_as_stalled(
    pool: Pool, one: Client, two: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(pool, borrow(pool, one, GIB, GIB, GIB, GIB))
    want(pool, two, (SMALL, SMALL, SMALL))
    assert settle(pool).stalled == []
    monkeypatch.setattr(pools, "DROP_GRACE_S", 0.0)
    served = settle(pool)
    assert [demand.client for demand in served.stalled] == [two]
    assert len(served.drops) == 1  # another one is tried


def test_a_handle_that_is_dropped_unasked_is_sent_again(pool: Pool, one: Client) -> None:
    [chunk] = borrow(pool, one, MEDIUM)
    pool.drop(one, [chunk.id])
    give(pool, [chunk])
    pool.drop(one, [chunk.id, 12345])
    want(pool, one, (MEDIUM, MEDIUM, MEDIUM))
    [(_, again, flags)] = settle(pool).grants
    assert (again, flags) == (chunk, HAS_DESCRIPTOR)


def test_a_full_driver_leads_to_smaller_chunks(pool: Pool, memory: FakeMemory, one: Client) -> None:
    memory.room = LARGE + MEDIUM
    want(pool, one, (GIB, GIB, GIB))
    served = settle(pool)
    assert granted(served) == [LARGE, MEDIUM]
    assert served.retry
    assert len(served.stalled) == 1
    memory.room += LARGE
    assert granted(settle(pool)) == [LARGE]


def test_idle_chunks_go_where_the_driver_is_full_below_the_capacity(
    pool: Pool, memory: FakeMemory, one: Client, two: Client
) -> None:
    memory.room = GIB
    give(pool, borrow(pool, one, GIB))
    pool.reclaim(one)
    want(pool, two, (MEDIUM, MEDIUM, MEDIUM))
    assert granted(settle(pool)) == [MEDIUM]


def test_trim_releases_small_chunks_first_and_keeps_the_given_bytes(
    pool: Pool, memory: FakeMemory, one: Client
) -> None:
    give(pool, borrow(pool, one, GIB, LARGE, SMALL, SMALL))
    gone, drops = pool.release_idle(GIB)
    assert gone == LARGE + 2 * SMALL
    assert pool.idle_bytes == GIB
    assert {chunk.size for _, chunk in drops} == {LARGE, SMALL}
    assert pool.release_idle(GIB) == (0, [])
    pool.drop(one, [chunk.id for _, chunk in drops])
    assert pool.total_bytes == sum(memory.sizes.values()) == GIB


def test_bytes_of_another_client_are_flagged_until_a_client_has_zeroed_them(
    pool: Pool, one: Client, two: Client
) -> None:
    [chunk] = borrow(pool, one, MEDIUM)

    def flag_for(member: Client) -> bool:
        want(pool, member, (MEDIUM, MEDIUM, MEDIUM))
        [(_, again, flags)] = settle(pool).grants
        assert again is chunk
        return bool(flags & FOREIGN)

    give(pool, [chunk])
    assert not flag_for(one)
    give(pool, [chunk])
    assert flag_for(two)
    pool.give_back(two, [chunk.id], foreign={chunk.id})  # it has zeroed nothing
    assert flag_for(two)
    pool.give_back(two, [chunk.id], foreign={chunk.id})
    assert flag_for(one)  # since the other one may have written to a part of it
    give(pool, [chunk])
    assert not flag_for(one)
    pool.keep_only(one, set())  # it reconnects, and its message about the return was lost
    assert flag_for(one)


def test_chunks_of_a_dead_client_go_to_the_driver(pool: Pool, memory: FakeMemory, one: Client, two: Client) -> None:
    """Processes to which it has lent memory may still use it, and the driver waits for their handles."""
    chunks = borrow(pool, one, MEDIUM, MEDIUM)
    give(pool, chunks)
    want(pool, two, (MEDIUM, MEDIUM, 2 * MEDIUM))
    settle(pool)
    borrow(pool, one, LARGE)
    assert pool.reclaim(one) == []  # no other client has a handle
    assert pool.total_bytes == sum(memory.sizes.values()) == 2 * MEDIUM
    three = client(3)
    give(pool, chunks[:1])
    want(pool, three, (MEDIUM, MEDIUM, MEDIUM))
    settle(pool)
    assert pool.reclaim(three) == [(two, chunks[0])]
    assert (pool.idle_bytes, pool.leaving_bytes) == (0, MEDIUM)
    pool.drop(two, [chunks[0].id])
    assert pool.total_bytes == sum(memory.sizes.values()) == MEDIUM


def test_a_rejoining_client_holds_the_chunks_it_names(pool: Pool, one: Client) -> None:
    chunks = borrow(pool, one, GIB, LARGE, MEDIUM)
    give(pool, chunks[2:])
    disconnect(pool, one)
    assert pool.adopt(one, chunks[0].id, GIB, 5) is False
    pool.keep_only(one, {chunks[0].id})
    assert set(one.held) == set(one.imported) == {chunks[0].id}
    assert pool.idle_bytes == LARGE + MEDIUM


def test_chunks_of_an_earlier_broker_are_adopted_even_beyond_the_capacity(
    pool: Pool, memory: FakeMemory, one: Client, two: Client
) -> None:
    for number in range(5):
        assert pool.adopt(one, 900 + number, GIB, number) is True
    pool.keep_only(one, {900 + number for number in range(5)})
    assert (pool.total_bytes, one.held_bytes) == (5 * GIB, 5 * GIB)
    want(pool, two, (GIB, GIB, GIB))
    assert settle(pool).grants == []
    pool.give_back(one, [900])
    [(_, chunk, flags)] = settle(pool).grants
    assert (chunk.id, flags) == (900, HAS_DESCRIPTOR | FOREIGN)
    assert pool.available_bytes() == 0
    with pytest.raises(MalformedError, match="adopted"):
        pool.adopt(two, 1000, GIB, -1)
    with pytest.raises(MalformedError, match="not held by this client"):
        pool.adopt(two, 901, GIB, 50)
    with pytest.raises(MalformedError, match="not held by this client"):
        pool.adopt(one, 901, LARGE, 50)
    with pytest.raises(MalformedError, match="expected one of"):
        pool.adopt(one, 1001, GIB + 1, 50)
    with pytest.raises(MalformedError, match="not held by this client"):
        pool.give_back(two, [901])


def test_chunks_beyond_the_capacity_are_released_when_idle(
    pool: Pool, memory: FakeMemory, one: Client, two: Client
) -> None:
    """A client fills the new broker's capacity, and then another brings its chunks of the old broker."""
    chunks = borrow(pool, one, GIB, GIB, GIB, GIB)
    for number in range(3):
        pool.adopt(two, 900 + number, GIB, number)
    pool.keep_only(two, {900, 901, 902})
    assert pool.total_bytes == 7 * GIB
    want(pool, one, (GIB, GIB, GIB))
    pool.give_back(two, [900])
    assert granted(settle(pool), one) == [GIB]  # waiting demands come first
    pool.give_back(two, [901, 902])
    served = settle(pool)
    assert [(member, chunk.size) for member, chunk in served.drops] == [(two, GIB)] * 2
    assert (pool.idle_bytes, pool.leaving_bytes) == (0, 2 * GIB)
    assert settle(pool).drops == []
    pool.drop(two, [901, 902])
    give(pool, chunks)
    [(member, chunk)] = settle(pool).drops
    pool.drop(member, [chunk.id])
    assert settle(pool).drops == []
    assert (pool.total_bytes, pool.idle_bytes, pool.leaving_bytes) == (CAPACITY, 3 * GIB, 0)
    check_books(pool, memory, [one, two])


@pytest.mark.parametrize(
    "entry",
    [(GIB + 1, GIB, GIB), (GIB, 3, GIB), (LARGE, GIB, GIB), (GIB, GIB, 0), (GIB, GIB, PAGE + 1), (0, 0, PAGE)],
)
def test_invalid_demands_are_malformed(pool: Pool, one: Client, entry: tuple[int, int, int]) -> None:
    with pytest.raises(MalformedError):
        want(pool, one, entry)
    assert settle(pool).stalled == []


def check_books(pool: Pool, memory: FakeMemory, members: Sequence[Client]) -> None:
    chunks = list(pool.chunks.values())
    assert sorted(chunk.file for chunk in chunks) == sorted(memory.sizes)
    assert sum(chunk.size for chunk in chunks) == pool.total_bytes <= pool.capacity
    idle = [chunk for chunk in chunks if chunk.holder is None and not chunk.is_leaving]
    assert sum(chunk.size for chunk in idle) == pool.idle_bytes
    assert sum(chunk.size for chunk in chunks if chunk.is_leaving) == pool.leaving_bytes
    for member in members:
        assert all(chunk.holder is member for chunk in member.held.values())
        assert all(member in chunk.importers for chunk in member.imported.values())
    assert sum(len(member.held) for member in members) == sum(chunk.holder is not None for chunk in chunks)
    assert sum(len(member.imported) for member in members) == sum(len(chunk.importers) for chunk in chunks)


def test_turns_on_a_full_pool_do_not_break_it_up(
    pool: Pool, one: Client, two: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side asks before the other gives: small chunks that are idle then are not for it."""
    monkeypatch.setattr(pools, "PATIENCE_S", 3600.0)
    plans = {
        one: [(GIB, GIB, 2 * GIB), (LARGE, LARGE, 2 * LARGE), (MEDIUM, MEDIUM, 2 * MEDIUM)],
        two: [(GIB, GIB, 2 * GIB), (LARGE, LARGE, LARGE), (MEDIUM, MEDIUM, 6 * MEDIUM)],
    }
    counts = []
    for turn in range(20):
        taker, giver = (one, two) if turn % 2 == 0 else (two, one)
        request = want(pool, taker, *plans[taker])
        settle(pool)
        for chunk_id in list(giver.held):
            pool.give_back(giver, [chunk_id])
            dropped = settle(pool).drops
            for member, chunk in dropped:
                pool.drop(member, [chunk.id])
        with monkeypatch.context() as later:
            later.setattr(pools, "PATIENCE_S", 0.0)  # a moment has passed
            while drops := settle(pool).drops:
                for member, chunk in drops:
                    pool.drop(member, [chunk.id])
        assert taker.held_bytes == sum(nbytes for _, _, nbytes in plans[taker])
        pool.queue.close(taker, request)
        counts.append(len(pool.chunks))
    assert len(set(counts[6:])) == 1
