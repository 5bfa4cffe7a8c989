"""The books of a shared pool, over a memory that is only counted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from memsaver import pool as pools
from memsaver.demands import NoRoomError
from memsaver.errors import DriverError
from memsaver.pool import Pool, Served
from memsaver.protocol import HAS_DESCRIPTOR, SCRUB, MalformedError
from memsaver.records import CLASSES, PAGE, Chunk, Member

GIB, LARGE, MEDIUM, SMALL = CLASSES
CAPACITY = 4 * GIB


class FakeMemory:
    """Descriptors are numbers; ``room`` is what other programs leave."""

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


def settle(pool: Pool) -> Served:
    """Serves until there is nothing to do now. Returns all that happened."""
    everything = Served()
    while True:
        served = pool.serve()
        everything.grants += served.grants
        everything.stalled += served.stalled
        everything.done += served.done
        everything.drops += served.drops
        everything.retry = served.retry
        if not served.again:
            return everything


def granted(served: Served, member: Member | None = None) -> list[int]:
    return [chunk.size for demand, chunk, _ in served.grants if member in (None, demand.member)]


_requests = itertools.count(1)


def want(pool: Pool, member: Member, *entries: tuple[int, int, int]) -> int:
    request = next(_requests)
    pool.want(member, request, [word for entry in entries for word in entry])
    return request


def borrow(pool: Pool, member: Member, *sizes: int) -> list[Chunk]:
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
        pool.give(chunk.holder, [chunk.id])


def joined(pool: Pool, client: int, scrub: bool) -> Member:
    member = pool.join(client)
    member.scrub = scrub
    return member


@pytest.fixture
def one(pool: Pool) -> Member:
    return pool.join(1)


@pytest.fixture
def two(pool: Pool) -> Member:
    return pool.join(2)


@pytest.mark.parametrize(
    ("entry", "sizes"),
    [
        ((GIB, GIB, 2 * GIB), [GIB, GIB]),
        ((GIB, LARGE, GIB), [LARGE] * 4),
        ((GIB, GIB, GIB + LARGE + MEDIUM + 2 * SMALL), [GIB, LARGE, MEDIUM, SMALL, SMALL]),
        ((SMALL, SMALL, 3 * SMALL), [SMALL] * 3),
    ],
)
def test_chunks_are_made_of_the_largest_class_that_is_allowed(pool, one, entry, sizes):
    want(pool, one, entry)
    assert granted(settle(pool)) == sizes
    assert pool.total_bytes == pool.held_bytes(one) == sum(sizes)


def test_one_chunk_is_made_in_each_step(pool, memory, one):
    want(pool, one, (GIB, GIB, 3 * GIB))
    for made in (1, 2, 3):
        served = pool.serve()
        assert (memory.calls, granted(served), served.again) == (made, [GIB], True)
    assert not pool.serve().again


def test_of_idle_chunks_the_fitting_class_comes_first_then_larger_then_smaller(pool, one, two):
    give(pool, borrow(pool, one, GIB, LARGE, MEDIUM, SMALL))
    want(pool, two, (GIB, LARGE, GIB + LARGE))
    # LARGE is what would be made, the rest of 1 GiB is one larger chunk.
    assert granted(settle(pool)) == [LARGE, GIB]
    want(pool, two, (GIB, LARGE, MEDIUM + 2 * SMALL))
    assert granted(settle(pool)) == [MEDIUM, SMALL, SMALL]


def test_an_idle_chunk_that_is_larger_than_the_limit_is_not_taken(pool, one, two):
    give(pool, borrow(pool, one, LARGE))
    want(pool, two, (MEDIUM, MEDIUM, LARGE))
    assert granted(settle(pool)) == [MEDIUM] * 8
    assert pool.idle_bytes == LARGE


def test_of_equal_chunks_those_come_first_that_the_client_knows(pool, one, two):
    mine = borrow(pool, one, MEDIUM, MEDIUM)
    theirs = borrow(pool, two, MEDIUM, MEDIUM)
    give(pool, [theirs[0], mine[0], theirs[1], mine[1]])
    want(pool, one, (MEDIUM, MEDIUM, 2 * MEDIUM))
    served = settle(pool)
    assert {chunk for _, chunk, _ in served.grants} == set(mine)
    assert [flags for *_, flags in served.grants] == [0, 0]
    want(pool, one, (MEDIUM, MEDIUM, 2 * MEDIUM))
    assert [flags for *_, flags in settle(pool).grants] == [HAS_DESCRIPTOR] * 2


def test_only_the_head_of_the_queue_collects(pool, one, two):
    three = pool.join(3)
    held = borrow(pool, one, GIB, GIB, GIB, GIB)
    want(pool, two, (GIB, GIB, 3 * GIB))
    want(pool, three, (GIB, GIB, GIB))
    served = settle(pool)
    assert [demand.member for demand in served.stalled] == [two, three]
    for chunk in held[:3]:
        give(pool, [chunk])
        assert granted(settle(pool), three) == []
    assert pool.held_bytes(two) == 3 * GIB
    give(pool, held[3:])
    assert granted(settle(pool), three) == [GIB]


def test_who_waits_is_told_once_for_each_of_its_messages(pool, one, two):
    borrow(pool, one, GIB, GIB, GIB, GIB)
    request = want(pool, two, (GIB, GIB, GIB))
    assert [(demand.request, demand.count) for demand in settle(pool).stalled] == [(request, 1)]
    assert settle(pool).stalled == []
    pool.more(two, request, [MEDIUM, MEDIUM, MEDIUM])
    assert [demand.count for demand in settle(pool).stalled] == [2]
    assert settle(pool).stalled == []


def test_what_was_asked_for_later_is_served_before_the_rest_and_instead_of_as_much_of_it(pool, one, two):
    held = borrow(pool, one, GIB, GIB, GIB, LARGE, LARGE, LARGE, LARGE)
    request = want(pool, two, (SMALL, SMALL, SMALL), (GIB, GIB, 2 * LARGE))
    settle(pool)
    pool.more(two, request, [LARGE, LARGE, LARGE])
    assert [demand.left for demand in settle(pool).stalled] == [SMALL + 2 * LARGE]
    give(pool, held[-2:])
    served = settle(pool)
    assert [(chunk.size, chunk.limit) for _, chunk, _ in served.grants] == [(LARGE, LARGE), (LARGE, GIB)]
    assert served.done == []
    pool.more(two, request, [SMALL, SMALL, 3 * SMALL])  # one of them was to come anyway
    give(pool, held[3:4])
    pool.dropped(one, [held[3].id])
    served = settle(pool)
    pool.dropped(one, [chunk.id for _, chunk in served.drops])
    assert granted(served) + granted(settle(pool)) == [SMALL] * 3
    assert pool.held_bytes(two) == 2 * LARGE + 3 * SMALL


def test_the_end_of_a_demand_is_told(pool, one):
    request = want(pool, one, (GIB, GIB, 2 * GIB))
    [demand] = settle(pool).done
    assert (demand.request, demand.count, demand.left) == (request, 1, 0)
    assert settle(pool).done == []
    pool.more(one, request, [SMALL, SMALL, SMALL])
    assert [demand.count for demand in settle(pool).done] == [2]


def test_a_served_demand_that_asks_for_more_is_back_in_its_place(pool, one, two):
    """Behind one that waits for its chunks it would wait for ever."""
    request = want(pool, one, (GIB, GIB, 3 * GIB))
    settle(pool)
    want(pool, two, (GIB, GIB, 4 * GIB))
    settle(pool)
    assert pool.held_bytes(two) == GIB
    pool.more(one, request, [GIB, GIB, GIB])
    settle(pool)
    pool.give(two, list(two.held))
    assert granted(settle(pool)) == [GIB]
    assert pool.held_bytes(one) == 4 * GIB


def test_closing_keeps_what_was_granted(pool, one, two):
    borrow(pool, one, GIB, GIB, GIB)
    request = want(pool, two, (GIB, GIB, 2 * GIB))
    three = pool.join(3)
    want(pool, three, (GIB, GIB, GIB))
    settle(pool)
    pool.close(two, request)
    pool.close(two, request)  # it may have been closed or served before
    assert pool.held_bytes(two) == GIB
    pool.give(two, list(two.held))
    assert granted(settle(pool), three) == [GIB]


def test_what_can_never_be_served_is_refused(pool, one):
    with pytest.raises(NoRoomError, match=f"5.00 GiB .{5 * GIB} bytes. needed, .* 4.00 GiB .{CAPACITY} bytes"):
        want(pool, one, (GIB, GIB, 5 * GIB))
    assert settle(pool).grants == []
    request = want(pool, one, (GIB, GIB, 4 * GIB))
    settle(pool)
    pool.more(one, request, [SMALL, SMALL, SMALL])  # said before it heard of the last grant
    served = settle(pool)
    assert served.grants == [] and [demand.left for demand in served.done] == [0]
    assert pool.held_bytes(one) == 4 * GIB


def test_who_stands_behind_one_that_collects_is_not_told_that_it_is_stuck(pool, one, two):
    want(pool, one, (SMALL, SMALL, 4 * SMALL))
    want(pool, two, (SMALL, SMALL, SMALL))
    served = pool.serve()
    assert served.again and served.stalled == []
    assert sorted(settle(pool).grants, key=id) and pool.held_bytes(two) == SMALL


def test_what_a_demand_gave_back_it_can_ask_for_again(pool, one):
    """As with a large chunk that comes back to be had in small ones."""
    request = want(pool, one, (GIB, GIB, 4 * GIB))
    settle(pool)
    for _ in range(3):
        pool.give(one, list(one.held)[:1])
        pool.more(one, request, [LARGE, LARGE, GIB])
        drops = settle(pool).drops
        pool.dropped(one, [chunk.id for _, chunk in drops])
        settle(pool)
        assert pool.held_bytes(one) == 4 * GIB


def test_chunks_too_large_for_the_head_are_broken_up(pool, memory, one, two):
    give(pool, borrow(pool, one, GIB, GIB, GIB, GIB))
    want(pool, two, (SMALL, SMALL, 2 * SMALL))
    served = settle(pool)
    assert served.grants == []
    assert served.stalled == []  # there is hope
    [(member, chunk)] = served.drops
    assert (member, chunk.size, pool.leaving_bytes) == (one, GIB, GIB)
    assert pool.serve().drops == []  # one is enough
    assert len(memory.sizes) == 4  # its bytes are not free while somebody has a handle
    pool.dropped(one, [chunk.id])
    assert granted(settle(pool)) == [SMALL, SMALL]
    assert pool.total_bytes == 3 * GIB + 2 * SMALL


def test_the_smallest_sufficient_chunk_is_broken_up(pool, one, two):
    held = borrow(pool, one, GIB, GIB, GIB, *[LARGE] * 3, *[MEDIUM] * 8)
    give(pool, held)
    pool.leave(one)
    want(pool, two, (SMALL, SMALL, 10 * SMALL))
    assert granted(settle(pool)) == [SMALL] * 10
    assert pool.total_bytes == CAPACITY - MEDIUM + 10 * SMALL


def test_a_client_that_exits_has_dropped_everything(pool, one, two):
    give(pool, borrow(pool, one, GIB, GIB, GIB, GIB))
    want(pool, two, (SMALL, SMALL, SMALL))
    assert settle(pool).grants == []
    pool.leave(one)
    assert granted(settle(pool)) == [SMALL]


def test_who_does_not_drop_is_not_counted_on(pool, one, two, monkeypatch):
    give(pool, borrow(pool, one, GIB, GIB, GIB, GIB))
    want(pool, two, (SMALL, SMALL, SMALL))
    assert settle(pool).stalled == []
    monkeypatch.setattr(pools, "DROP_GRACE_S", 0.0)
    served = settle(pool)
    assert [demand.member for demand in served.stalled] == [two]
    assert len(served.drops) == 1  # another one is tried


def test_a_handle_that_is_dropped_unasked_is_sent_again(pool, one):
    [chunk] = borrow(pool, one, MEDIUM)
    pool.dropped(one, [chunk.id])
    give(pool, [chunk])
    pool.dropped(one, [chunk.id, 12345])
    want(pool, one, (MEDIUM, MEDIUM, MEDIUM))
    [(_, again, flags)] = settle(pool).grants
    assert (again, flags) == (chunk, HAS_DESCRIPTOR)


def test_a_full_driver_is_asked_for_less(pool, memory, one):
    memory.room = LARGE + MEDIUM
    want(pool, one, (GIB, GIB, GIB))
    served = settle(pool)
    assert granted(served) == [LARGE, MEDIUM]
    assert served.retry
    assert len(served.stalled) == 1
    memory.room += LARGE
    assert granted(settle(pool)) == [LARGE]


def test_idle_chunks_go_where_the_driver_is_full_below_the_capacity(pool, memory, one, two):
    memory.room = GIB
    give(pool, borrow(pool, one, GIB))
    pool.leave(one)
    want(pool, two, (MEDIUM, MEDIUM, MEDIUM))
    assert granted(settle(pool)) == [MEDIUM]


def test_trim_lets_small_ones_go_first_and_keeps_what_was_said(pool, memory, one):
    give(pool, borrow(pool, one, GIB, LARGE, SMALL, SMALL))
    gone, drops = pool.trim(GIB)
    assert gone == LARGE + 2 * SMALL
    assert pool.idle_bytes == GIB
    assert {chunk.size for _, chunk in drops} == {LARGE, SMALL}
    assert pool.trim(GIB) == (0, [])
    pool.dropped(one, [chunk.id for _, chunk in drops])
    assert pool.total_bytes == sum(memory.sizes.values()) == GIB


def test_a_chunk_on_its_way_out_is_not_granted(pool, one):
    give(pool, borrow(pool, one, MEDIUM))
    pool.trim(0)
    want(pool, one, (MEDIUM, MEDIUM, MEDIUM))
    [(_, chunk, _)] = settle(pool).grants
    assert chunk.last is None


# who wants it: (who had it, who gets it) -> whether it is to be scrubbed
@pytest.mark.parametrize(("first", "second", "due"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
def test_a_chunk_is_scrubbed_when_it_changes_hands_and_one_of_both_asks(pool, first, second, due):
    one, two = joined(pool, 1, bool(first)), joined(pool, 2, bool(second))
    want(pool, one, (MEDIUM, MEDIUM, MEDIUM))
    [(_, chunk, flags)] = settle(pool).grants
    assert flags == HAS_DESCRIPTOR  # the driver zeroed it
    for member, expected in ((one, 0), (two, due)):
        give(pool, [chunk])
        want(pool, member, (MEDIUM, MEDIUM, MEDIUM))
        [(_, again, flags)] = settle(pool).grants
        assert again is chunk
        assert bool(flags & SCRUB) == bool(expected)


def test_a_scrub_that_nobody_confirmed_stays_due(pool):
    """A client that gives a chunk back untouched has not scrubbed it."""
    one, two, three = joined(pool, 1, scrub=True), pool.join(2), pool.join(3)
    [chunk] = borrow(pool, one, MEDIUM)
    for member in (two, two, three, two):
        give(pool, [chunk])
        want(pool, member, (MEDIUM, MEDIUM, MEDIUM))
        [(_, _, flags)] = settle(pool).grants
        assert flags & SCRUB


def test_the_dead_owners_wish_for_scrubbing_counts(pool, two):
    one = joined(pool, 1, scrub=True)
    borrow(pool, one, MEDIUM)
    pool.leave(one)
    want(pool, two, (MEDIUM, MEDIUM, MEDIUM))
    [(_, _, flags)] = settle(pool).grants
    assert flags == HAS_DESCRIPTOR | SCRUB


def test_a_leased_chunk_stays_out_until_its_leases_end(pool, one, two):
    [chunk] = borrow(pool, one, GIB)
    for lease in (7, 8):
        pool.lend(lease, one, 100 + lease, [chunk.id])
    assert pool.attached_bytes(107) == GIB
    pool.leave(one)
    assert pool.idle_bytes == 0
    pool.end_lease(7)
    pool.end_lease(7)
    assert (pool.idle_bytes, pool.attached_bytes(107)) == (0, 0)
    pool.end_lease(8)
    assert pool.idle_bytes == GIB
    want(pool, two, (GIB, GIB, GIB))
    assert granted(settle(pool)) == [GIB]


def test_leases_are_of_chunks_of_their_owner(pool, one, two):
    [chunk] = borrow(pool, one, GIB)
    with pytest.raises(MalformedError, match="holds"):
        pool.lend(7, two, 100, [chunk.id])
    pool.lend(7, one, 100, [chunk.id])
    pool.lend(7, one, 100, [chunk.id, chunk.id])  # said again after the owner came back
    assert chunk.leases == 1
    with pytest.raises(MalformedError, match="another"):
        pool.lend(7, two, 100, [])


def test_a_broken_socket_returns_nothing_but_ends_demands(pool, one, two):
    borrow(pool, one, GIB, GIB)
    want(pool, one, (GIB, GIB, GIB))
    pool.disconnect(one)
    assert settle(pool).grants == []
    assert pool.held_bytes(one) == 2 * GIB
    assert pool.idle_bytes == 0
    assert pool.join(1) is one


def test_who_comes_back_has_what_it_brings(pool, one):
    chunks = borrow(pool, one, GIB, LARGE, MEDIUM)
    give(pool, chunks[2:])
    pool.disconnect(one)
    again = pool.join(1)
    assert pool.bring(again, chunks[0].id, GIB, 5) is False
    pool.keep_only(again, {chunks[0].id})
    assert set(again.held) == set(again.known) == {chunks[0].id}
    assert pool.idle_bytes == LARGE + MEDIUM


def test_chunks_of_an_earlier_broker_are_adopted_even_beyond_the_capacity(pool, memory, one, two):
    for number in range(5):
        assert pool.bring(one, 900 + number, GIB, number) is True
    pool.keep_only(one, {900 + number for number in range(5)})
    assert (pool.total_bytes, pool.held_bytes(one)) == (5 * GIB, 5 * GIB)
    want(pool, two, (GIB, GIB, GIB))
    assert settle(pool).grants == []
    pool.give(one, [900])
    [(_, chunk, flags)] = settle(pool).grants
    assert (chunk.id, flags) == (900, HAS_DESCRIPTOR)
    assert pool.available_bytes() == 0
    with pytest.raises(MalformedError, match="adopted"):
        pool.bring(two, 1000, GIB, -1)
    with pytest.raises(MalformedError, match="not one that this client holds"):
        pool.bring(two, 901, GIB, 50)
    with pytest.raises(MalformedError, match="not one that this client holds"):
        pool.bring(one, 901, LARGE, 50)
    with pytest.raises(MalformedError, match="expected one of"):
        pool.bring(one, 1001, GIB + 1, 50)
    with pytest.raises(MalformedError, match="not one that this client holds"):
        pool.give(two, [901])


def test_what_exceeds_the_capacity_goes_once_it_is_idle(pool, memory, one, two):
    """A client makes what the new broker can have, and then another brings what it had of the old one."""
    chunks = borrow(pool, one, GIB, GIB, GIB, GIB)
    for number in range(3):
        pool.bring(two, 900 + number, GIB, number)
    pool.keep_only(two, {900, 901, 902})
    assert pool.total_bytes == 7 * GIB
    want(pool, one, (GIB, GIB, GIB))
    pool.give(two, [900])
    assert granted(settle(pool), one) == [GIB]  # who waits comes first
    pool.give(two, [901, 902])
    served = settle(pool)
    assert [(member, chunk.size) for member, chunk in served.drops] == [(two, GIB)] * 2
    assert (pool.idle_bytes, pool.leaving_bytes) == (0, 2 * GIB)
    assert settle(pool).drops == []
    pool.dropped(two, [901, 902])
    give(pool, chunks)
    [(member, chunk)] = settle(pool).drops
    pool.dropped(member, [chunk.id])
    assert settle(pool).drops == []
    assert (pool.total_bytes, pool.idle_bytes, pool.leaving_bytes) == (CAPACITY, 3 * GIB, 0)
    check_books(pool, memory)


@pytest.mark.parametrize(
    "entry",
    [(GIB + 1, GIB, GIB), (GIB, 3, GIB), (LARGE, GIB, GIB), (GIB, GIB, 0), (GIB, GIB, PAGE + 1), (0, 0, PAGE)],
)
def test_what_cannot_be_meant_is_malformed(pool, one, entry):
    with pytest.raises(MalformedError):
        want(pool, one, entry)
    assert settle(pool).stalled == []


def test_requests_have_numbers_of_their_own(pool, one, two):
    borrow(pool, one, GIB, GIB, GIB, GIB)
    pool.want(two, 1, [GIB, GIB, GIB])
    with pytest.raises(MalformedError, match="open already"):
        pool.want(two, 1, [GIB, GIB, GIB])
    with pytest.raises(MalformedError, match="no open request"):
        pool.more(two, 2, [GIB, GIB, GIB])
    pool.close(one, 1)
    assert pool.waiting(two)[0]["needed_bytes"] == GIB


def check_books(pool: Pool, memory: FakeMemory) -> None:
    chunks = list(pool.chunks.values())
    assert sorted(chunk.file for chunk in chunks) == sorted(memory.sizes)
    assert sum(chunk.size for chunk in chunks) == pool.total_bytes <= pool.capacity
    idle = [chunk for chunk in chunks if chunk.holder is None and not chunk.leaving and not chunk.leases]
    assert sum(chunk.size for chunk in idle) == pool.idle_bytes
    assert sum(chunk.size for chunk in chunks if chunk.leaving) == pool.leaving_bytes
    for member in pool.members.values():
        assert all(chunk.holder is member for chunk in member.held.values())
        assert all(member in chunk.handles for chunk in member.known.values())
    assert sum(len(member.held) for member in pool.members.values()) == sum(
        chunk.holder is not None for chunk in chunks
    )
    assert sum(len(member.known) for member in pool.members.values()) == sum(len(chunk.handles) for chunk in chunks)


@pytest.mark.parametrize("seed", range(20))
def test_the_books_are_right_after_anything(memory, monkeypatch, seed):
    """Random clients that want, give, drop, hang up, come back and die: nothing lost, doubled, or granted unasked."""
    monkeypatch.setattr(pools, "RETRY_S", 0.0)
    draw = random.Random(seed)
    pool = Pool(memory, GIB)
    memory.room = draw.choice([GIB, GIB * 3 // 4, 1 << 60])
    members = [joined(pool, number, draw.random() < 0.3) for number in range(5)]
    asked: dict[tuple[int, int], int] = {}
    owed: list[tuple[Member, Chunk]] = []
    leases: list[int] = []
    for _ in range(400):
        at = draw.randrange(len(members))
        member = members[at]
        act = draw.choice(
            ["want", "want", "more", "give", "give", "drop", "drop", "close", "trim", "lose", "die", "lend"]
        )
        mine = [request for number, request in asked if number == member.id]
        if act in ("want", "more"):
            limit = draw.choice(CLASSES)
            entry = (limit, draw.choice([size for size in CLASSES if size <= limit]), draw.randint(1, 200) * PAGE)
            try:
                if act == "want":
                    asked[member.id, want(pool, member, entry)] = entry[2]
                elif mine:
                    request = draw.choice(mine)
                    asked[member.id, request] = max(asked[member.id, request], entry[2])
                    pool.more(member, request, entry)
            except NoRoomError:
                pass
        elif act == "give" and member.held:
            pool.give(member, draw.sample(list(member.held), draw.randint(1, len(member.held))))
        elif act == "drop":
            draw.shuffle(owed)
            for _ in range(len(owed) // 2):
                who, chunk = owed.pop()
                pool.dropped(who, [chunk.id])
        elif act == "close" and mine:
            request = draw.choice(mine)
            del asked[member.id, request]
            pool.close(member, request)
        elif act == "trim":
            owed += pool.trim(draw.randint(0, GIB))[1]
        elif act == "lend" and member.held:
            leases.append(draw.getrandbits(60))
            pool.lend(leases[-1], member, 1, draw.sample(list(member.held), 1))
        elif act in ("lose", "die"):
            for request in mine:
                del asked[member.id, request]
            owed = [(who, chunk) for who, chunk in owed if who is not member]
            if act == "die":
                pool.leave(member)
            else:
                pool.disconnect(member)
            members[at] = joined(pool, member.id, draw.random() < 0.3)
            pool.keep_only(members[at], set(draw.sample(list(members[at].held), len(members[at].held) // 2)))
        if leases and draw.random() < 0.2:
            pool.end_lease(leases.pop())
        served = settle(pool)
        owed += served.drops
        for demand, chunk, _ in served.grants:
            assert chunk.holder is demand.member
            asked[demand.member.id, demand.request] -= chunk.size
        assert all(left >= 0 for left in asked.values())
        check_books(pool, memory)
    for lease in list(pool.leases):
        pool.end_lease(lease)
    for member in list(pool.members.values()):
        pool.leave(member)
    settle(pool)
    assert pool.idle_bytes == pool.total_bytes
    pool.trim(0)
    assert (pool.total_bytes, memory.sizes, pool.chunks) == (0, {}, {})


def test_turns_on_a_full_pool_do_not_break_it_up(pool, one, two, monkeypatch):
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
            pool.give(giver, [chunk_id])
            dropped = settle(pool).drops
            for member, chunk in dropped:
                pool.dropped(member, [chunk.id])
        with monkeypatch.context() as later:
            later.setattr(pools, "PATIENCE_S", 0.0)  # a moment has passed
            while drops := settle(pool).drops:
                for member, chunk in drops:
                    pool.dropped(member, [chunk.id])
        assert pool.held_bytes(taker) == sum(nbytes for _, _, nbytes in plans[taker])
        pool.close(taker, request)
        counts.append(len(pool.chunks))
    assert len(set(counts[6:])) == 1
