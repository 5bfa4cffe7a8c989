"""The choices of a shared pool, over memory that is only counted: sizes, order, patience. test_pool_machine.py has the
bookkeeping.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest

from memsaver.broker import pool as pools
from memsaver.broker.clients import CLASSES, Chunk, Client
from memsaver.broker.pool import Pool, ServeResult
from memsaver.broker.protocol import FOREIGN, HAS_DESCRIPTOR, Message
from memsaver.broker.reclaim import FIRST_PAUSE_S, LONGEST_COPY_S, LONGEST_PAUSE_S, LONGEST_ROUND_S, Reclaim
from tests.broker_support import CountedMemory, made

GIB, LARGE, MEDIUM, SMALL = CLASSES
CAPACITY = 4 * GIB


@pytest.fixture
def memory() -> CountedMemory:
    return CountedMemory(CAPACITY)


@pytest.fixture
def pool(memory: CountedMemory, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(pools, "RETRY_S", 0.0)  # a full driver is asked again each time
    monkeypatch.setattr(pools, "PATIENCE_S", 0.0)
    monkeypatch.setattr(pools, "DROP_GRACE_S", 3600.0)  # unless a test says otherwise, clients answer
    return Pool(memory, CAPACITY)


@pytest.fixture
def one() -> Client:
    return made(1)


@pytest.fixture
def two() -> Client:
    return made(2)


def drops_of(pool: Pool) -> list[tuple[Client, Chunk]]:
    settle(pool)
    return pool.take_drops()


def settle(pool: Pool) -> ServeResult:
    """Serves until there is nothing to do now. Returns all that happened."""
    everything = ServeResult()
    while True:
        served = pool.serve()
        everything.grants += served.grants
        everything.stalled += served.stalled
        everything.completed += served.completed
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
    pool.give_back(two, list(two.held))
    want(pool, one, (MEDIUM, MEDIUM, LARGE))  # not above the limit
    assert granted(settle(pool)) == [MEDIUM] * 8


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


def test_a_stalled_demand_is_reported_once_for_each_message_and_an_exchanged_part_comes_first(
    pool: Pool, one: Client, two: Client
) -> None:
    held = borrow(pool, one, GIB, GIB, GIB, LARGE, LARGE, LARGE, LARGE)
    request = want(pool, two, (SMALL, SMALL, SMALL), (GIB, GIB, 2 * LARGE))
    assert [(demand.request, demand.messages) for demand in settle(pool).stalled] == [(request, 1)]
    assert settle(pool).stalled == []
    pool.queue.exchange(two, request, [LARGE, LARGE, LARGE])
    found = [(demand.remaining, demand.messages) for demand in settle(pool).stalled]
    assert found == [(SMALL + 2 * LARGE, 2)] and settle(pool).stalled == []
    give(pool, held[-2:])
    served = settle(pool)
    assert granted(served) == [LARGE, LARGE]
    [demand] = {demand for demand, *_ in served.grants}
    assert (demand.remaining_by_limit, served.completed) == ([SMALL, SMALL], [])
    pool.queue.exchange(two, request, [SMALL, SMALL, 3 * SMALL])  # one of them was to come anyway
    give(pool, held[3:4])
    pool.drop(one, [held[3].id])
    served = settle(pool)
    pool.drop(one, [chunk.id for _, chunk in pool.take_drops()])
    assert granted(served) + granted(settle(pool)) == [SMALL] * 3
    assert two.held_bytes == 2 * LARGE + 3 * SMALL


def test_the_smallest_sufficient_chunk_is_broken_up(
    pool: Pool, one: Client, two: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(pool, borrow(pool, one, GIB, GIB, GIB, *[LARGE] * 3, *[MEDIUM] * 8))
    want(pool, two, (SMALL, SMALL, 10 * SMALL))
    served = settle(pool)
    assert served.grants == [] and served.stalled == []  # there is hope
    [(member, chunk)] = pool.take_drops()
    assert (member, chunk.size, pool.leaving_bytes) == (one, MEDIUM, MEDIUM)
    assert drops_of(pool) == []  # one is enough
    with monkeypatch.context() as patch:
        patch.setattr(pools, "DROP_GRACE_S", 0.0)  # the client does not answer
        assert [demand.client for demand in settle(pool).stalled] == [two]
        assert len(pool.take_drops()) == 1  # another one is tried
    pool.drop(one, [chunk.id])  # its bytes are free when nobody has a handle
    assert granted(settle(pool)) == [SMALL] * 10
    assert pool.total_bytes == CAPACITY - MEDIUM + 10 * SMALL
    gone, drops = pool.release_idle(3 * GIB), pool.take_drops()  # small chunks first
    assert gone == 3 * LARGE + 6 * MEDIUM and pool.idle_bytes == 3 * GIB
    assert {each.size for _, each in drops} == {LARGE, MEDIUM}
    assert pool.release_idle(3 * GIB) == 0 and pool.take_drops() == []


def test_a_full_driver_leads_to_smaller_chunks_and_to_idle_ones(
    pool: Pool, memory: CountedMemory, one: Client, two: Client
) -> None:
    memory.room = LARGE + MEDIUM
    want(pool, one, (GIB, GIB, GIB))
    served = settle(pool)
    assert granted(served) == [LARGE, MEDIUM]
    assert served.retry and len(served.stalled) == 1
    memory.room += LARGE
    assert granted(settle(pool)) == [LARGE]
    pool.queue.close_all(one)
    give(pool, list(one.held.values()))
    pool.keep_only(one, set())  # no handle delays it
    want(pool, two, (SMALL, SMALL, 2 * SMALL))  # below the capacity, and the driver has nothing
    assert granted(settle(pool)) == [SMALL, SMALL]


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
    pauses = []
    for _ in range(12):
        assert is_asked()
        [after] = reclaim.deadlines()
        pauses.append(after - now)
        now = after
    assert pauses == sorted(pauses) and pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    now -= LONGEST_PAUSE_S / 2
    assert not is_asked()
    pool.queue.close(two, request)
    want(pool, two, (GIB, GIB, GIB))
    settle(pool)
    assert is_asked()
    now += FIRST_PAUSE_S
    assert not is_asked()  # from here on the pauses grow again
    [after] = reclaim.deadlines()
    assert after - now == pytest.approx(FIRST_PAUSE_S)
    now = after
    assert is_asked()


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
            for member, chunk in drops_of(pool):
                pool.drop(member, [chunk.id])
        with monkeypatch.context() as later:
            later.setattr(pools, "PATIENCE_S", 0.0)  # a moment has passed
            while drops := drops_of(pool):
                for member, chunk in drops:
                    pool.drop(member, [chunk.id])
        assert taker.held_bytes == sum(nbytes for _, _, nbytes in plans[taker])
        pool.queue.close(taker, request)
        counts.append(len(pool.chunks))
    assert len(set(counts[6:])) == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, one: Client, two: Client) -> list[tuple[Client, int]]:
    """The requests of clients: for offers of so many bytes, or 0, for caches."""
    found: list[tuple[Client, int]] = []

    def send(client: Client, message: Message) -> None:
        if message.kind == "reclaim":
            found.append((client, message.words[0]))

    monkeypatch.setattr(Client, "send", send)
    one.is_user = two.is_user = True
    return found


def test_a_demand_asks_its_own_client_last_and_does_not_wait_for_its_gil(
    pool: Pool, one: Client, two: Client, asked: list[tuple[Client, int]]
) -> None:
    reclaim, now = Reclaim(pool, {1: one, 2: two}), time.monotonic() + 3600.0
    chunks = borrow(pool, one, *[GIB] * 4)
    reclaim.offers(one, Message("offers", (GIB,)))
    want(pool, two, (GIB, GIB, 2 * GIB))
    for request in ((one, 0), (one, 2 * GIB)):
        settle(pool)
        reclaim.step(now)
        assert asked.pop() == request and not asked
        reclaim.reclaimed(one, Message("reclaimed", (0, 0)))
    give(pool, chunks[:1])
    reclaim.offers(one, Message("offers", (0,)))
    settle(pool)
    reclaim.step(now)
    assert asked.pop() == (two, 0) and not asked
    give(pool, chunks[1:2])  # serves the demand
    settle(pool)
    reclaim.step(now)
    reclaim.reclaimed(two, Message("reclaimed", (1, GIB)))  # its GIL is held until the next demand is served
    want(pool, two, (GIB, GIB, GIB))
    settle(pool)
    reclaim.step(now)
    assert asked == [(one, 0), (two, 0)]


def test_a_round_after_an_answer_about_offers_ends_in_time(
    pool: Pool, one: Client, two: Client, asked: list[tuple[Client, int]]
) -> None:
    reclaim, now = Reclaim(pool, {1: one, 2: two}), time.monotonic() + 3600.0
    chunks = borrow(pool, one, *[GIB] * 4)
    reclaim.offers(one, Message("offers", (4 * GIB,)))
    want(pool, two, (GIB, GIB, GIB))
    settle(pool)
    reclaim.step(now)
    reclaim.reclaimed(one, Message("reclaimed", (0, 0)))
    reclaim.step(now)
    assert asked == [(one, 0), (one, GIB)]
    assert reclaim.deadlines() == [now + LONGEST_COPY_S]
    reclaim.offers(one, Message("offers", (3 * GIB,)))
    give(pool, chunks[:1])
    settle(pool)
    want(pool, two, (GIB, GIB, GIB))
    settle(pool)
    now += 1.0
    reclaim.step(now)
    assert not asked[2:]
    reclaim.reclaimed(one, Message("reclaimed", (0, 0)))
    reclaim.step(now)
    assert asked[2:] == [(one, 0)]  # caches of others come before offers for this demand, too
    assert reclaim.deadlines() == [now + LONGEST_ROUND_S]
