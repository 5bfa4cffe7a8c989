"""The broker as clients meet it: processes that come, wait, misbehave, hang, die and come back."""

from __future__ import annotations

import json
import mmap
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from memsaver import __version__, errors, protocol, sockets
from memsaver.protocol import Message
from tests.broker_support import PATIENCE_S, Client, Running, until
from tests.support import GIB, MIB, PAGE, ROOT, Peer, run_python

LARGE = 256 * MIB
MEDIUM = 32 * MIB


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running() as running:
        yield running
        assert running.process.poll() is None, "the broker did not survive"


@pytest.fixture
def peer(broker: Running) -> Iterator[Peer]:
    """A client in another process, as ``client`` there."""
    with Peer(MEMSAVER_HOST_DEVICE=broker.environment["MEMSAVER_HOST_DEVICE"]) as process:
        process.run(f"import os; from tests.broker_support import Client; client = Client({str(broker.path)!r})")
        yield process


def contents(client: Client, chunk: int, size: int = PAGE) -> mmap.mmap:
    return mmap.mmap(client.files[chunk], size)


# Lending


def test_one_memory_goes_from_client_to_client(broker):
    one, two = broker.client(), broker.client()
    assert one.capacity == GIB
    [chunk] = one.borrow(PAGE, PAGE)
    with contents(one, chunk) as memory:
        memory[:5] = b"hello"
    one.give([chunk])
    assert two.borrow(PAGE, PAGE) == [chunk]
    with contents(two, chunk) as memory:
        assert memory[:5] == b"hello"
    two.give([chunk])
    one.want(PAGE, PAGE)
    assert one.take(PAGE) == [(chunk, PAGE, 0)]  # of which it has the descriptor
    assert len(one.files) == len(two.files) == 1


def test_a_hand_over_of_many_chunks_comes_in_one_packet(broker):
    one, two = broker.client(), broker.client()
    chunks = one.borrow(GIB, GIB, PAGE)
    assert len(chunks) == 512
    two.want(500 * PAGE, GIB, PAGE)
    assert two.hear("stalled").words[1] == 1
    one.say_raw(Message("give", chunks[:300]).encode())
    until(lambda: broker.row(os.getpid()) and sum(row["held_bytes"] for row in broker.status()["clients"]) == GIB)
    message = two.hear("grant")
    assert len(message.files) == (len(message.words) - 1) // 4 == 250
    message.close()
    two.hear("grant").close()


def test_waiting_is_first_come_first_served_and_only_the_head_collects(broker):
    one, two, three = broker.client(), broker.client(), broker.client()
    chunks = one.borrow(GIB, LARGE)
    two.want(3 * LARGE)
    assert two.hear("stalled").words[1] == 1
    three.want(LARGE)
    assert three.hear("stalled").words[1] == 1
    for chunk in chunks[:3]:
        one.give([chunk])
        two.take(LARGE)
    assert three.hears_nothing()
    one.give(chunks[3:])
    three.take(LARGE)


def test_a_grant_says_what_it_was_asked_for_and_when_it_was_the_last(broker):
    one, two = broker.client(), broker.client()
    chunks = one.borrow(GIB, LARGE)
    request = two.want(LARGE, GIB, PAGE)
    assert list(two.hear("stalled").words) == [request, 1, LARGE]
    two.say("more", request, MEDIUM, MEDIUM, MEDIUM)  # instead of as much of the rest
    assert list(two.hear("stalled").words) == [request, 2, LARGE]
    one.give(chunks[:1])
    one.drop(*one.hear("drop").words)
    limits = []
    while not limits or MEDIUM + len(limits[1:]) * PAGE < LARGE:
        message = two.hear("grant")
        limits += message.words[4::4]
        message.close()
    assert limits == [MEDIUM] + [GIB] * 112
    message = protocol.receive(two.channel)
    assert message is not None
    assert (message.kind, list(message.words)) == ("stalled", [request, 2, 0])


def test_closing_a_demand_lets_the_next_one_collect(broker):
    one, two, three = broker.client(), broker.client(), broker.client()
    one.borrow(3 * LARGE, LARGE)
    request = two.want(2 * LARGE)
    [(mine, *_)] = two.take(LARGE)
    two.hear("stalled")
    three.want(LARGE)
    three.hear("stalled")
    two.give([mine])
    two.say("close", request)
    three.take(LARGE)


def test_a_demand_beyond_the_capacity_is_refused_and_its_client_goes_on(broker):
    client = broker.client()
    request = client.want(GIB + PAGE)
    code, refused, text = client.refusal()
    assert (code, refused) == ("no_room", request)
    assert str(GIB + PAGE) in text and str(GIB) in text
    client.borrow(GIB)


def test_large_chunks_are_broken_up_for_small_demands(broker):
    one, two = broker.client(), broker.client()
    [chunk] = one.borrow(GIB)
    one.give([chunk])
    two.want(3 * PAGE, PAGE)
    assert list(one.hear("drop").words) == [chunk]
    assert broker.status()["leaving_bytes"] == GIB
    one.drop(chunk)
    two.take(3 * PAGE)
    assert broker.status()["total_bytes"] == 3 * PAGE


def test_a_client_that_never_drops_is_not_waited_for(broker):
    one, two = broker.client(), broker.client()
    one.give(one.borrow(GIB))
    two.want(PAGE, PAGE)
    one.hear("drop")
    assert two.hear("stalled").words[1] == 1


def test_scrubbing_is_asked_for_when_a_chunk_changes_hands(broker):
    one, two = broker.client(), broker.client(scrub=1)
    chunks = one.borrow(PAGE, PAGE)
    one.give(chunks)
    two.want(PAGE, PAGE)
    [(_, _, flags)] = two.take(PAGE)
    assert flags == protocol.HAS_DESCRIPTOR | protocol.SCRUB
    two.say("scrub", 0)
    [fresh] = two.borrow(PAGE, PAGE)
    two.give([fresh])
    one.want(PAGE, PAGE)
    assert one.take(PAGE) == [(fresh, PAGE, protocol.HAS_DESCRIPTOR)]


# Figures


def test_figures(broker):
    one, two = broker.client(), broker.client()
    chunks = one.borrow(3 * MEDIUM, MEDIUM)
    one.give(chunks[:1])
    assert two.look() == (GIB - 2 * MEDIUM, GIB, {os.getpid(): 2 * MEDIUM})
    two.say("trim", 5, 0)
    assert list(two.hear("trimmed").words) == [5, MEDIUM]
    assert list(one.hear("drop").words) == chunks[:1]


def test_status_tells_what_clients_report(broker, peer):
    peer.run("chunks = client.borrow(96 << 20, 32 << 20)")
    row = broker.row(peer.pid)
    assert (row["held_bytes"], row["connected"], row["waiting"], row["regions"]) == (3 * MEDIUM, True, [], [])
    assert row["report_age_s"] is None
    peer.run("client.hear('query'); client.say('report', 5, 4, 3, 2, 1, 50, 40, 30, 0, 2, text='kv cache\\nweights')")
    row = broker.row(peer.pid)
    assert row["report_age_s"] >= 0
    fields = ("tag", "allocated_bytes", "mapped_bytes", "backup_bytes", "state", "backup")
    assert row["regions"] == [
        dict(zip(fields, ("kv cache", 5, 4, 3, "paused", "host"))),
        dict(zip(fields, ("weights", 50, 40, 30, "active", "disk"))),
    ]
    other = broker.client()
    other.want(GIB)
    other.take(3 * LARGE)
    other.take(5 * MEDIUM)
    other.hear("stalled")
    [waiting] = broker.row(os.getpid())["waiting"]
    assert (waiting["needed_bytes"], waiting["granted_bytes"]) == (GIB, GIB - 3 * MEDIUM)
    assert broker.status()["idle_bytes"] == 0


def test_a_status_longer_than_a_packet_leaves_regions_out(broker):
    clients = [broker.client() for _ in range(3)]
    for client in clients:
        client.say("report", *[1, 1, 1, 0, 0] * 500, text="\n".join(["tag" * 5] * 500))
    rows = broker.status()["clients"]
    assert sorted(len(row["regions"]) for row in rows)[0] == 0
    assert len(rows) == 3


# Clients that go


def test_what_a_killed_client_held_returns(broker, peer):
    peer.run("chunks = client.borrow(1 << 30)")
    other = broker.client()
    other.want(GIB)
    other.hear("stalled")
    peer.kill()
    other.take(GIB)
    assert broker.row(os.getpid())["held_bytes"] == GIB
    assert len(broker.status()["clients"]) == 1


def test_also_while_a_forked_child_holds_its_socket(broker, peer):
    """No hang-up comes then."""
    child = int(
        peer.run("chunks = client.borrow(1 << 30); child = os.fork() or (__import__('time').sleep(600)); print(child)")
    )
    try:
        other = broker.client()
        other.want(GIB)
        other.hear("stalled")
        peer.kill()
        other.take(GIB)
    finally:
        os.kill(child, signal.SIGKILL)


def test_demands_of_a_killed_client_do_not_hold_up_the_others(broker, peer):
    one, other = broker.client(), broker.client()
    chunks = one.borrow(GIB)
    peer.run("client.want(1 << 30); client.hear('stalled')")
    other.want(GIB)
    other.hear("stalled")
    peer.kill()
    one.give(chunks)
    other.take(GIB)


def test_a_hang_up_alone_returns_nothing(broker, peer):
    peer.run("chunks = client.borrow(1 << 30); client.hang_up()")
    until(lambda: not broker.row(peer.pid)["connected"])
    other = broker.client()
    other.want(GIB)
    assert other.hear("stalled").words[1] == 1
    assert broker.row(peer.pid)["held_bytes"] == GIB
    peer.kill()
    other.take(GIB)


def test_who_comes_back_brings_what_it_uses(broker):
    one = broker.client()
    chunks = one.borrow(4 * LARGE, LARGE)
    one.hang_up()
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    again.bring((chunks[0], LARGE), (chunks[1], LARGE))
    assert again.look() == (2 * LARGE, GIB, {os.getpid(): 2 * LARGE})
    for chunk in chunks[2:]:
        os.close(again.files.pop(chunk))
    again.want(LARGE)
    [(_, _, flags)] = again.take(LARGE)
    assert flags == protocol.HAS_DESCRIPTOR  # it had let go of all others
    again.give(chunks[:2])


def test_who_comes_back_takes_the_place_of_its_old_socket(broker):
    one = broker.client()
    chunks = one.borrow(GIB)
    again = broker.client(one.number, bring=False)
    assert one.is_left()
    again.say("bring")
    assert again.look()[0] == GIB
    assert chunks


def test_a_new_broker_adopts_what_clients_bring(broker, peer):
    one = broker.client()
    mine = one.borrow(3 * LARGE, LARGE)
    with contents(one, mine[0]) as memory:
        memory[:5] = b"whole"
    idle = one.borrow(LARGE, LARGE)
    one.give(idle)
    peer.kill()
    broker.kill()
    broker.start()
    assert broker.status()["total_bytes"] == 0
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    again.bring(*((chunk, LARGE) for chunk in mine))
    assert again.look()[2] == {os.getpid(): 3 * LARGE}
    assert broker.status()["total_bytes"] == 3 * LARGE
    again.give(mine[:1])
    two = broker.client()
    assert two.borrow(LARGE) == mine[:1]
    with contents(two, mine[0]) as memory:
        assert memory[:5] == b"whole"
    two.borrow(LARGE)


def test_bringing_goes_on_while_packets_are_full(broker):
    one = broker.client()
    chunks = one.borrow(501 * PAGE, PAGE)
    broker.kill()
    broker.start()
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    for at in (0, 250, 500):
        again.bring(*((chunk, PAGE) for chunk in chunks[at : at + 250]))
    assert again.look()[2] == {os.getpid(): 501 * PAGE}
    again.bring()
    assert again.is_refused()[0] == "malformed"


def test_more_than_the_capacity_may_be_brought(broker):
    one = broker.client()
    chunks = one.borrow(GIB, LARGE)
    broker.kill()
    broker.arguments = ("--device", "cpu", "--capacity", "512MiB")
    broker.start()
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    again.bring(*((chunk, LARGE) for chunk in chunks))
    assert again.look() == (0, 2 * LARGE, {os.getpid(): GIB})
    two = broker.client()
    two.want(PAGE, PAGE)
    two.hear("stalled")
    again.give(chunks[:3])
    for _ in range(3):  # only below the capacity something is made
        again.drop(*again.hear("drop").words)
        if broker.status()["leaving_bytes"] == 0:
            break
    two.take(PAGE)


def test_a_client_that_hangs_stops_nobody(broker, peer):
    peer.run("chunks = client.borrow(256 << 20, 2 << 20); client.give(chunks)")
    until(lambda: broker.status()["idle_bytes"] == LARGE)
    os.kill(peer.pid, signal.SIGSTOP)
    one = broker.client()
    for _ in range(50):  # status asks it each time, and drops and grants pile up
        assert broker.row(peer.pid)["connected"]
        chunks = one.borrow(3 * LARGE)
        one.give(chunks)
        one.say("trim", 1, 0)
        going = one.hear("drop", "trimmed")
        while going.kind == "drop":
            one.drop(*going.words)
            going = one.hear("drop", "trimmed")
    assert broker.status()["leaving_bytes"] >= LARGE  # whose handles it has
    os.kill(peer.pid, signal.SIGCONT)
    peer.kill()
    until(lambda: broker.status()["leaving_bytes"] == 0)


def test_a_client_that_reads_nothing_stops_nobody(broker):
    deaf, one = broker.client(), broker.client()
    for number in range(20_000):
        deaf.say("look", number)  # which waits where the broker is slow, not where answers are unread
        if number % 1000 == 0:
            one.look()
    for number in range(20_000):
        assert deaf.hear("figures").words[0] == number


# Leases


def lend(owner: Client, attacher: Client, *rows: tuple[int, int, int], lease: int = 99) -> None:
    """``attacher`` asks, and ``owner`` lends."""
    attacher.say("attach", 5, owner.number, os.getpid(), 3, text="tag\nnone\n0\n2097152")
    asked = owner.hear("lease")
    assert list(asked.words[1:]) == [os.getpid(), 3]
    assert asked.text == "tag\nnone\n0\n2097152"
    parts = [rows[at : at + 250] for at in range(0, len(rows), 250)]
    for at, part in enumerate(parts):
        more = int(at + 1 < len(parts))
        owner.say("leased", asked.words[0], lease, more, *(word for row in part for word in row))


def test_a_lease_is_the_owners_memory(broker):
    owner, attacher = broker.client(), broker.client()
    chunks = owner.borrow(2 * PAGE, PAGE)
    lend(owner, attacher, (0, chunks[1], PAGE), (PAGE, chunks[0], PAGE))
    answer = attacher.hear("attached")
    assert list(answer.words) == [5, 99, 0, 0, chunks[1], PAGE, PAGE, chunks[0], PAGE]
    with mmap.mmap(answer.files[0], PAGE) as theirs, contents(owner, chunks[1]) as mine:
        theirs[:3] = b"new"
        assert mine[:3] == b"new"
    answer.close()
    assert {row["attached_bytes"] for row in broker.status()["clients"]} == {2 * PAGE}
    attacher.say("detach", 99)
    assert list(owner.hear("unlease").words) == [99]


def test_a_lease_of_many_chunks_comes_in_several_packets(broker):
    owner, attacher = broker.client(), broker.client()
    chunks = owner.borrow(GIB, PAGE)
    lend(owner, attacher, *((at * PAGE, chunk, PAGE) for at, chunk in enumerate(chunks)))
    rows = []
    for more in (1, 1, 0):
        answer = attacher.hear("attached")
        assert list(answer.words[:3]) == [5, 99, more]
        rows += list(zip(*[iter(answer.words[3:])] * 3))
        assert len(answer.files) == (len(answer.words) - 3) // 3
        answer.close()
    assert [chunk for _, chunk, _ in rows] == chunks


def test_a_lease_may_be_refused(broker):
    owner, attacher = broker.client(), broker.client()
    attacher.say("attach", 6, owner.number, os.getpid(), 3, text="x")
    owner.say("leased", owner.hear("lease").words[0], 0, 0, text="of an earlier residence")
    assert attacher.refusal() == ("no_lease", 6, "of an earlier residence")
    attacher.say("attach", 7, 1, 999, 3, text="x")
    code, serial, text = attacher.refusal()
    assert (code, serial) == ("no_lease", 7)
    assert "999" in text


def test_an_owner_that_dies_refuses(broker, peer):
    number = int(peer.run("print(client.number)"))
    attacher = broker.client()
    attacher.say("attach", 8, number, peer.pid, 3, text="x")
    peer.run("client.hear('lease')")
    peer.kill()
    code, serial, text = attacher.refusal()
    assert (code, serial) == ("no_lease", 8)
    assert str(peer.pid) in text


def test_a_lease_ends_with_the_process_that_is_attached(broker, peer):
    owner = broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    peer.run(f"client.say('attach', 5, {owner.number}, {os.getpid()}, 3, text='x')")
    asked = owner.hear("lease")
    assert asked.words[1] == peer.pid
    owner.say("leased", asked.words[0], 99, 0, 0, chunk, PAGE)
    peer.run("client.hear('attached'); client.hang_up()")
    assert owner.hears_nothing()  # it may still write
    peer.kill()
    assert list(owner.hear("unlease").words) == [99]


def test_chunks_of_a_dead_owner_wait_for_who_is_attached(broker, peer):
    attacher = broker.client()
    number, chunk = map(int, peer.run("[chunk] = client.borrow(1 << 30); print(client.number, chunk)").split())
    attacher.say("attach", 5, number, peer.pid, 3, text="x")
    peer.run(f"client.say('leased', client.hear('lease').words[0], 99, 0, 0, {chunk}, 1 << 30)")
    attacher.hear("attached").close()
    peer.kill()
    until(lambda: len(broker.status()["clients"]) == 1)
    other = broker.client()
    other.want(GIB)
    other.hear("stalled")
    attacher.say("detach", 99)
    assert [taken for taken, *_ in other.take(GIB)] == [chunk]


def test_leases_go_on_under_a_new_broker(broker, peer):
    """The owner owes them; what was detached meanwhile ends, in whatever order the two come back."""
    owner = broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    gone = subprocess.Popen(["true"])
    gone.wait()
    broker.kill()
    broker.start()
    peer.run(f"client = Client({str(broker.path)!r}); client.say('detach', 71)")
    peer.run("client.look()")
    again = broker.client(owner.number, bring=False)
    again.files, owner.files = owner.files, {}
    again.bring((chunk, PAGE))
    for lease, pid in ((70, peer.pid), (71, peer.pid), (72, gone.pid)):
        again.say("owed", lease, pid, chunk)
    assert [again.hear("unlease").words[0] for _ in range(2)] == [71, 72]
    assert broker.row(peer.pid)["attached_bytes"] == PAGE
    peer.run("client.say('detach', 70)")
    assert list(again.hear("unlease").words) == [70]


def test_who_leaves_before_it_is_told_of_its_lease_has_none(broker):
    owner, attacher = broker.client(), broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    attacher.say("attach", 5, owner.number, os.getpid(), 3, text="x")
    asked = owner.hear("lease")
    attacher.hang_up()
    until(lambda: len(broker.status()["clients"]) == 1)
    owner.say("leased", asked.words[0], 99, 0, 0, chunk, PAGE)
    assert list(owner.hear("unlease").words) == [99]


# Clients that misbehave

_UNKNOWN = 1 << 40
MALFORMED = {
    "too short": b"abc",
    "unknown kind": struct.pack("<II", 77, 0),
    "a broker's word": Message("welcome", (1, 2)).encode(),
    "hello again": Message("hello", (1, 2)).encode(),
    "more words announced": struct.pack("<II", protocol.KINDS["give"], 1 << 30),
    "text that is none": struct.pack("<IIQ", protocol.KINDS["look"], 1, 1) + b"\xff\xfe",
    "text without need": Message("look", (1,), "why").encode(),
    "too few words": Message("want", (1,)).encode(),
    "half a group": Message("want", (1, PAGE, PAGE)).encode(),
    "too many words": Message("close", (1, 2)).encode(),
    "no class": Message("want", (1, PAGE + 1, PAGE, PAGE)).encode(),
    "no pages": Message("want", (1, PAGE, PAGE, 5)).encode(),
    "nothing": Message("want", (1, PAGE, PAGE, 0)).encode(),
    "more of nothing": Message("more", (1, PAGE, PAGE, PAGE)).encode(),
    "another's chunk": Message("give", (_UNKNOWN,)).encode(),
    "bring without descriptors": Message("bring", (_UNKNOWN, PAGE)).encode(),
    "bring late": Message("bring").encode(),
    "owed of another": Message("owed", (1, 2, _UNKNOWN)).encode(),
    "scrub": Message("scrub", (2,)).encode(),
    "report without tags": Message("report", (1, 2, 3, 0, 0, 1, 2, 3, 0, 0), "one").encode(),
    "report of no state": Message("report", (1, 2, 3, 9, 0), "one").encode(),
    "leased unasked": Message("leased", (1, 2, 0)).encode(),
    "longest": b"\0" * (protocol.LONGEST_PACKET + 1),
}


@pytest.mark.parametrize("packet", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_ends_its_connection_alone(broker, packet):
    bystander, client = broker.client(), broker.client()
    client.borrow(PAGE, PAGE)
    bystander.want(PAGE, PAGE)
    bystander.take(PAGE)
    client.say_raw(packet)
    code, text = client.is_refused()
    assert code == "malformed"
    assert text
    bystander.borrow(PAGE, PAGE)
    until(lambda: sorted(row["connected"] for row in broker.status()["clients"]) == [False, True])
    assert sum(row["held_bytes"] for row in broker.status()["clients"]) == 3 * PAGE


def test_descriptors_where_none_belong_are_refused_and_closed(broker):
    before = broker.descriptors()
    for kind, words, count in (("give", (), 3), ("bring", (_UNKNOWN, PAGE), 2), ("bring", (_UNKNOWN, PAGE), 1)):
        client = broker.client(bring=False)
        client.say(kind, *words, files=(0,) * count)
        assert client.is_refused()[0] == "malformed"
    until(lambda: broker.descriptors() <= before)


@pytest.mark.parametrize("sizes", [(PAGE, PAGE + 1), (PAGE, MEDIUM)], ids=["no class", "another size"])
def test_a_chunk_that_is_not_what_is_said_cannot_be_brought(broker, sizes):
    file = os.memfd_create("test")
    try:
        os.ftruncate(file, sizes[0])
        client = broker.client(bring=False)
        client.say("bring", 5, sizes[1], files=(file,))
        assert client.is_refused()[0] == "malformed"
    finally:
        os.close(file)


def test_a_chunk_is_brought_once_and_by_its_holder(broker):
    one = broker.client()
    chunks = one.borrow(PAGE, PAGE)
    thief = broker.client(bring=False)
    thief.say("bring", chunks[0], PAGE, files=(one.files[chunks[0]],))
    assert thief.is_refused()[0] == "malformed"
    one.hang_up()
    again = broker.client(one.number, bring=False)
    again.say("bring", *(chunks[0], PAGE) * 2, files=(one.files[chunks[0]],) * 2)
    code, text = again.is_refused()
    assert (code, str(chunks[0]) in text) == ("malformed", True)


def test_random_bytes_leave_the_broker_up(broker):
    draw = random.Random(1)
    bystander = broker.client()
    before = broker.descriptors()
    for _ in range(300):
        client = broker.client(bring=False)
        for _ in range(draw.randint(1, 5)):
            kind = draw.choice([draw.getrandbits(32), *protocol.KINDS.values()])
            words = [draw.choice([0, 1, PAGE, draw.getrandbits(64)]) for _ in range(draw.randint(0, 9))]
            packet = struct.pack(f"<II{len(words)}Q", kind, draw.choice([len(words), draw.getrandbits(4)]), *words)
            client.say_raw(packet + draw.randbytes(draw.choice([0, 0, 0, 5])), (0,) * draw.choice([0, 0, 0, 2]))
        client.close()
    assert bystander.look()[1] == GIB
    until(lambda: broker.descriptors() == before)
    bystander.borrow(bystander.look()[0], GIB)


def greet(broker: Running, *words: int, text: str = "", kind: str = "hello") -> tuple[str, str]:
    stranger = Client.__new__(Client)
    stranger.channel = sockets.connect(broker.path)
    stranger.channel.settimeout(PATIENCE_S)
    stranger.say(kind, *words, text=text)
    try:
        return stranger.is_refused()
    finally:
        stranger.channel.close()


def test_another_version_or_device_is_refused(broker):
    code, text = greet(broker, 0, 5, text=broker.uuid)
    assert code == "version"
    assert f"version {protocol.VERSION} " in text and "version 0" in text
    assert greet(broker, protocol.VERSION + 1, text="whatever that one says")[0] == "version"
    code, text = greet(broker, protocol.VERSION, 5, text="GPU-of-another")
    assert code == "device"
    assert broker.uuid in text and "GPU-of-another" in text
    assert greet(broker, 1, kind="look")[0] == "malformed"
    assert greet(broker)[0] == "malformed"


def test_a_client_number_belongs_to_one_process(broker, peer):
    number = int(peer.run("print(client.number)"))
    code, text = greet(broker, protocol.VERSION, number, text=broker.uuid)
    assert code == "malformed"
    assert str(peer.pid) in text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused(broker):
    program = f"""
        import os, socket, struct
        os.setgid(65534); os.setuid(65534)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect({str(broker.path)!r})
        except PermissionError:
            print("kept out")
        else:
            uuid = {broker.uuid!r}.encode()
            channel.send(struct.pack("<IIQQQ", 1, 3, 1, 5, 0) + uuid)
            packet = channel.recv(65536)
            print(struct.unpack_from("<IIQQ", packet), packet[24:].decode(), channel.recv(10))
    """
    assert run_bare(program) == "kept out\n"
    broker.directory.chmod(0o755)
    assert run_bare(program) == "kept out\n"
    broker.path.chmod(0o666)
    said = run_bare(program)
    assert said.startswith(f"({protocol.KINDS['refused']}, 2, {protocol.REFUSALS['user']}, 0)")
    assert "65534" in said
    assert broker.client().look()[1] == GIB


def run_bare(program: str) -> str:
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_many_connections_leak_nothing(broker):
    bystander = broker.client()
    before = broker.descriptors()
    for number in range(1000):
        client = Client(broker.path)
        if number % 10 == 0:
            client.give(client.borrow(PAGE, PAGE))
            client.hears_nothing()
        client.close()
    bystander.say("trim", 1, 0)
    until(lambda: broker.descriptors() <= before + 1)


def test_out_of_descriptors_is_said_and_passes():
    with Running(limit_files=64) as broker:
        one = broker.client()
        others = []
        code = ""
        while not code:
            try:
                others.append(broker.client())
            except AssertionError as error:
                assert "refused" in str(error)
                code = str(error)
        assert "out of file descriptors" in code
        assert one.look()[1] == GIB
        one.want(GIB, PAGE)  # not as many chunks as that
        message = one.hear("grant", "stalled")
        while message.kind == "grant":
            message.close()
            message = one.hear("grant", "stalled")
        for client in others:
            client.close()
        one.hear("grant").close()


# Starting and ending


def test_a_device_has_one_broker(broker):
    done = broker.run("broker", "--device", "cpu")
    assert done.returncode == 1
    assert f"has a broker already (pid {broker.process.pid}" in done.stderr
    assert broker.client().look()[1] == GIB


def test_a_capacity_larger_than_the_device_is_refused(broker):
    done = broker.run("broker", "--device", "cpu", "--capacity", "900TiB")
    assert done.returncode == 1
    assert "921600.00 GiB" in done.stderr and broker.environment["MEMSAVER_HOST_DEVICE"] in done.stderr
    assert broker.run("broker", "--device", "cpu", "--capacity", "1MiB").returncode == 1
    assert broker.run("broker", "--device", "cuda:77").returncode == 1
    assert broker.run("broker", "--capacity", "much").returncode == 2
    assert broker.run("broker", "--linger", "-1").returncode == 2
    assert broker.run().returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_broker_ends_cleanly_when_told(broker, number):
    client = broker.client()
    client.borrow(PAGE, PAGE)
    broker.kill(number)
    assert broker.process.returncode == 0
    assert not broker.path.exists()
    assert client.is_left()
    broker.start()


def test_a_socket_that_a_dead_broker_left_is_replaced(broker):
    broker.kill()
    assert broker.path.exists()
    with pytest.raises(errors.BrokerError, match="no broker") as caught:
        sockets.connect(broker.path)
    assert caught.value.path == str(broker.path)
    broker.start()
    broker.client()


def test_a_lingering_broker_ends_when_nobody_is_left():
    with Running("1GiB", "--linger", "0.2") as broker:
        client = broker.client()
        time.sleep(0.5)
        client.borrow(PAGE, PAGE)
        client.hang_up()  # this process still has the chunk
        time.sleep(0.5)
        assert broker.process.poll() is None
        again = broker.client(client.number)
        again.hang_up()
        assert broker.process.wait(PATIENCE_S) == 0
        assert not broker.path.exists()


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The place of a broker that has gone, with this process's environment pointing there."""
    with Running() as broker:
        broker.kill()
        for name in ("MEMSAVER_POOL_DIR", "MEMSAVER_HOST_DEVICE", "PYTHONPATH"):
            monkeypatch.setenv(name, broker.environment[name])
        yield broker


def broker_pid(path: Path) -> int:
    return int(path.with_suffix(".lock").read_text())


def end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(gone)


def test_processes_that_need_a_broker_at_once_get_one(empty):
    program = f"from memsaver import sockets; print(sockets.ensure({empty.uuid!r}, 'cpu', 1 << 29))"
    starters = [
        subprocess.Popen([sys.executable, "-c", program], env=empty.environment, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    for starter in starters:
        assert starter.communicate(timeout=PATIENCE_S)[0].strip() == str(empty.path)
        assert starter.returncode == 0
    pid = broker_pid(empty.path)
    assert empty.path.with_suffix(".log").read_text().count("serving cpu") == 1
    assert sockets.ensure(empty.uuid, "cpu") == empty.path
    assert empty.client().capacity == 1 << 29
    assert broker_pid(empty.path) == pid
    end(pid)
    assert not empty.path.exists()


def test_a_started_broker_outlives_who_asked_for_it(empty):
    with Peer(**{name: empty.environment[name] for name in ("MEMSAVER_HOST_DEVICE", "MEMSAVER_POOL_DIR")}) as peer:
        peer.run(f"from memsaver import sockets; sockets.ensure({empty.uuid!r}, 'cpu')")
        group = int(peer.run("import os; print(os.getpgid(0))"))
        pid = broker_pid(empty.path)
        assert os.getpgid(pid) != group
        assert str(pid) not in peer.run("print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read())")
    empty.client()
    end(pid)


def test_a_broker_that_cannot_start_says_why(empty):
    with pytest.raises(errors.BrokerError, match="could not be started.*900000.00 GiB"):
        sockets.ensure(empty.uuid, "cpu", 900_000 * GIB)
    with pytest.raises(errors.BrokerError, match="after 0 s"):
        sockets.ensure(empty.uuid, "cpu", timeout_s=0.0)
    until(lambda: sockets.accepts(empty.path) or not sockets._is_locked(empty.path))
    if sockets.accepts(empty.path):
        end(broker_pid(empty.path))


def test_the_directory_must_be_this_users_alone(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ms") as name:
        monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/new")
        assert sockets.directory() == Path(name) / "new"
        assert (Path(name) / "new").stat().st_mode & 0o777 == 0o700
        (Path(name) / "new").chmod(0o770)
        with pytest.raises(errors.ConfigError, match="written by others"):
            sockets.directory()
        (Path(name) / "file").touch()
        (Path(name) / "link").symlink_to(name)
        for wrong in ("file", "link"):
            monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/{wrong}")
            with pytest.raises(errors.ConfigError, match="is no directory"):
                sockets.directory()
        monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/no/such")
        with pytest.raises(errors.ConfigError, match="No such file"):
            sockets.directory()
        monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/{'long' * 20}")
        with pytest.raises(errors.ConfigError, match="107"):
            sockets.socket_path("GPU-" + "0" * 32)
        if os.getuid() == 0:
            os.chown(name, 65534, 65534)
            monkeypatch.setenv("MEMSAVER_POOL_DIR", name)
            with pytest.raises(errors.ConfigError, match="belongs to user 65534"):
                sockets.directory()


# The command line


def test_top_prints_all_pools_once(broker, peer):
    peer.run("chunks = client.borrow(96 << 20, 32 << 20)")
    done = broker.run("top", "--json")
    assert done.returncode == 0, done.stderr
    [pool] = json.loads(done.stdout)["pools"]
    assert (pool["device"], pool["uuid"], pool["capacity_bytes"]) == ("cpu", broker.uuid, GIB)
    assert [(row["pid"], row["held_bytes"]) for row in pool["clients"]] == [(peer.pid, 3 * MEDIUM)]
    assert json.loads(broker.run("top", "--json", "--device", "cpu").stdout)["pools"][0]["uuid"] == broker.uuid


def test_top_shows_processes_and_regions(broker):
    shown = show_a_client(broker)
    done = broker.run("top")  # into a pipe, hence once
    assert done.returncode == 0
    assert all(part in done.stdout for part in shown), done.stdout


def test_top_goes_on_in_a_terminal_until_interrupted(broker):
    shown = show_a_client(broker)
    terminal, end = pty.openpty()
    top = subprocess.Popen(
        [sys.executable, "-m", "memsaver", "top"],
        env=broker.environment,
        stdout=end,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    os.close(end)
    text = ""
    while text.count(shown[0]) < 3:
        text += os.read(terminal, 1 << 16).decode()
    top.send_signal(signal.SIGINT)
    with suppress(OSError):  # how a terminal says that its other end is closed
        while os.read(terminal, 1 << 16):
            pass
    assert top.wait(PATIENCE_S) == 0
    os.close(terminal)
    assert all(part in text for part in shown), text


def show_a_client(broker) -> list[str]:
    """Has a client hold and report something. Returns what `top` says of it."""
    client = broker.client()
    client.say("report", 5 * GIB, 4 * MIB, 3 * GIB, 2, 1, text="kv cache")
    client.want(2 * MEDIUM, MEDIUM)
    client.take(2 * MEDIUM)
    return [
        "capacity 1.00 GiB, free 960.0 MiB", str(os.getpid()), "holds 64.0 MiB", "kv cache", "paused", "host",
        "5.00 GiB",
    ]  # fmt: skip


def test_trim_gives_idle_memory_back(broker):
    client = broker.client()
    chunks = client.borrow(2 * MEDIUM, MEDIUM)
    client.give(chunks)
    done = broker.run("trim", "--keep", "32MiB")
    assert (done.returncode, done.stdout) == (0, f"cpu ({broker.uuid}): 32.0 MiB given back\n")
    client.drop(*client.hear("drop").words)
    assert broker.run("trim").returncode == 0
    client.drop(*client.hear("drop").words)
    until(lambda: broker.status()["total_bytes"] == 0)


def test_commands_say_when_there_is_no_broker(empty):
    for command in (["top"], ["top", "--json"], ["trim"], ["trim", "--device", "cpu"]):
        done = empty.run(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert "no broker" in done.stderr


def test_the_command_tells_its_version(empty):
    done = empty.run("--version")
    assert done.returncode == 0 and done.stdout.split() == ["memsaver", __version__]


def test_importing_memsaver_loads_no_broker():
    program = "import sys, memsaver; print([name for name in sys.modules if name.startswith('memsaver.')])"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for module in (
        "broker", "server", "lender", "leases", "reports", "clients", "watches", "pool", "demands", "records",
        "connection", "cli", "visitor",
    ):  # fmt: skip
        assert f"memsaver.{module}'" not in loaded
