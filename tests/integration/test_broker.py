"""The broker and its clients: demands, waits, invalid messages, stopped and killed processes, and reconnection."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memsaver import BrokerError, errors, process_names
from memsaver.broker import clients, daemon, discovery, protocol
from memsaver.broker.admin import AdminClient
from memsaver.broker.protocol import Message
from tests.broker_support import PATIENCE_S, TOLD, Client, Running, granted, sentinel
from tests.pool_support import Worker
from tests.support import GIB, MIB, PAGE, ROOT, Peer, run_clean, run_python, until

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


def test_a_chunk_keeps_its_contents_between_clients(broker: Running) -> None:
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
    assert one.take(PAGE) == [(chunk, PAGE, protocol.FOREIGN)]  # of which it has the descriptor
    assert len(one.files) == len(two.files) == 1


def test_a_hand_over_of_many_chunks_comes_in_one_packet(broker: Running) -> None:
    one, two = broker.client(), broker.client()
    chunks = one.borrow(GIB, GIB, PAGE)
    assert len(chunks) == 512
    two.want(500 * PAGE, GIB, PAGE)
    assert two.hear("stalled").words[1] == 1
    one.say_raw(Message("give_back", [word for chunk in chunks[:300] for word in (chunk, 0)]).encode())
    until(lambda: broker.row(os.getpid()) and sum(row["held_bytes"] for row in broker.status()["clients"]) == GIB)
    message = two.hear("grant")
    assert len(message.files) == len(granted(message)) == 250
    assert list(message.words[1:3]) == [0, 0]  # the next message has the remaining bytes
    message.close()
    message = two.hear("grant")
    assert list(message.words[1:5]) == [1, 1, GIB, 200 * PAGE]
    message.close()


def test_a_demand_beyond_the_capacity_is_refused_and_its_client_goes_on(broker: Running) -> None:
    client = broker.client()
    request = client.want(GIB + PAGE)
    code, refused, text = client.refusal()
    assert (code, refused) == ("over_capacity", request)
    assert str(GIB + PAGE) in text and str(GIB) in text
    client.borrow(GIB)


# Figures


def test_status_shows_the_reports_of_clients(broker: Running, peer: Peer) -> None:
    peer.run("chunks = client.borrow(96 << 20, 32 << 20)")
    row = broker.row(peer.pid)
    assert (row["held_bytes"], row["connected"], row["waiting"], row["regions"]) == (3 * MEDIUM, True, [], [])
    assert row["report_age_s"] is None
    peer.run(
        "client.hear('query'); client.say('report', 0, 5, 4, 3, 2, 1, 50, 40, 30, 0, 2, text='kv cache\\nweights')"
    )
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


def test_a_status_longer_than_a_packet_leaves_regions_out(broker: Running) -> None:
    clients = [broker.client() for _ in range(3)]
    for client in clients:
        client.say("report", 0, *[1, 1, 1, 0, 0] * 500, text="\n".join(["tag" * 5] * 500))
    rows = broker.status()["clients"]
    assert sorted(len(row["regions"]) for row in rows)[0] == 0
    assert len(rows) == 3


# Clients that go


def test_memory_of_a_killed_client_returns(broker: Running, peer: Peer) -> None:
    peer.run("chunks = client.borrow(1 << 30)")
    other = broker.client()
    other.want(GIB)
    other.hear("stalled")
    peer.kill()
    other.take(GIB)
    assert broker.row(os.getpid())["held_bytes"] == GIB
    assert len(broker.status()["clients"]) == 1


def fork_in(peer: Peer) -> int:
    """A child of a client, which holds every descriptor of it."""
    return int(peer.run("child = os.fork() or __import__('time').sleep(600); print(child)"))


def test_memory_of_a_killed_client_waits_while_the_driver_lists_it(
    empty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty.program = ["-c", TOLD]
    empty.start()
    with Peer(MEMSAVER_HOST_DEVICE=empty.environment["MEMSAVER_HOST_DEVICE"]) as peer:
        peer.run(f"from tests.broker_support import Client; client = Client({str(empty.path)!r})")
        peer.run("chunks = client.borrow(1 << 30)")
        (empty.directory / "pids").write_text(f"1 {peer.pid}")
        other = empty.client()
        other.want(GIB)
        other.hear("stalled")
        peer.kill()
        until(lambda: empty.row(peer.pid)["exited"])
        assert other.look() == (0, GIB) and empty.row(peer.pid)["held_bytes"] == GIB
        assert empty.row(peer.pid)["kept_by"] == []
        assert "has exited; its memory is kept by the driver" in empty.run("top").stdout
        (empty.directory / "pids").write_text("1")
        other.take(GIB)


def test_a_broker_does_not_start_under_mps(empty: Running) -> None:
    empty.program = ["-c", TOLD]
    (empty.directory / "mps").write_text("1")
    done = empty.run("broker", "--device", "cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert "under MPS" in done.stderr
    assert empty.sockets() == []


def test_a_client_without_a_sentinel_gets_nothing(broker: Running) -> None:
    client = broker.client(bring=False, proves=False)
    assert client.look()[1] == GIB  # as tools do
    client.say("inventory")
    code, text = client.is_refused()
    assert code == "malformed" and "'sentinel'" in text


@pytest.mark.parametrize("wrong", ["none", "write end", "file", "socket"])
def test_a_sentinel_is_the_read_end_of_a_pipe(broker: Running, wrong: str) -> None:
    client = broker.client(bring=False, proves=False)
    read, write = os.pipe()
    files = {"none": (), "write end": (write,), "file": (0,), "socket": (client.channel.fileno(),)}[wrong]
    client.say("sentinel", files=files)
    assert client.is_refused()[0] == "malformed"
    os.close(read)
    os.close(write)


def test_a_disconnect_of_a_living_client_returns_no_memory(broker: Running, peer: Peer) -> None:
    peer.run("chunks = client.borrow(1 << 30); client.hang_up()")
    until(lambda: not broker.row(peer.pid)["connected"])
    other = broker.client()
    other.want(GIB)
    assert other.hear("stalled").words[1] == 1
    assert broker.row(peer.pid)["held_bytes"] == GIB
    peer.kill()
    other.take(GIB)


def test_a_rejoining_client_keeps_only_the_chunks_it_names(broker: Running) -> None:
    one = broker.client()
    chunks = one.borrow(4 * LARGE, LARGE)
    one.hang_up()
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    again.bring((chunks[0], LARGE), (chunks[1], LARGE))
    assert again.look() == (2 * LARGE, GIB)
    for chunk in chunks[2:]:
        os.close(again.files.pop(chunk))
    again.want(LARGE)
    [(_, _, flags)] = again.take(LARGE)
    assert flags == protocol.HAS_DESCRIPTOR | protocol.FOREIGN  # it had let go of all others
    again.give(chunks[:2])


def test_a_rejoining_client_replaces_its_old_connection(broker: Running) -> None:
    one = broker.client()
    chunks = one.borrow(GIB)
    again = broker.client(one.number, bring=False)
    assert one.is_left()
    again.say("inventory")
    assert again.look()[0] == GIB
    assert chunks


def test_a_client_that_rejoins_is_asked_for_its_report_again(broker: Running) -> None:
    """The answer to the earlier request has ended with the earlier connection."""
    one = broker.client()
    [chunk] = one.borrow(PAGE, PAGE)
    broker.status()
    one.hear("query")
    one.hang_up()
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    again.bring((chunk, PAGE))
    broker.status()
    again.say("usage", 7)
    again.hear("query")


def test_a_client_with_many_chunks_rejoins_in_several_packets(broker: Running) -> None:
    one = broker.client()
    chunks = one.borrow(501 * PAGE, PAGE)
    broker.kill()
    broker.start()
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    for at in (0, 250, 500):
        again.bring(*((chunk, PAGE) for chunk in chunks[at : at + 250]))
    assert again.look()[0] == GIB - 501 * PAGE
    again.bring()
    assert again.is_refused()[0] == "malformed"


def test_a_stopped_client_does_not_block_the_others(broker: Running, peer: Peer) -> None:
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


def test_a_client_that_never_reads_does_not_block_the_others(broker: Running) -> None:
    deaf, one = broker.client(), broker.client()
    for number in range(20_000):
        deaf.say("usage", number)  # which waits where the broker is slow, not where answers are unread
        if number % 1000 == 0:
            one.look()
    for number in range(20_000):
        assert deaf.hear("usage").words[0] == number


def test_the_last_packet_of_a_grant_has_the_place_in_the_queue(broker: Running) -> None:
    """Also if the packet is full: the client reads there how many of its messages the broker has served."""
    one = broker.client()
    for count in (protocol.MOST_CHUNKS, protocol.MOST_CHUNKS + 1):
        one.give(one.borrow(count * PAGE, PAGE))
        request = one.want(count * PAGE, PAGE)
        heads = [list(one.hear("grant").words[:3]) for _ in range(-(-count // protocol.MOST_CHUNKS))]
        assert heads == [[request, 0, 0]] * (len(heads) - 1) + [[request, 1, 0]]
        one.say("close", request)
        one.look()


# Leases


def lend(owner: Client, attacher: Client, *rows: tuple[int, int, int], lease: int = 99) -> None:
    """``attacher`` asks, and ``owner`` lends."""
    attacher.say("attach", 5, owner.number, os.getpid(), 3, text="tag\nnone\n0\n2097152")
    asked = owner.hear("attach_request")
    assert list(asked.words[1:]) == [os.getpid(), 3]
    assert asked.text == "tag\nnone\n0\n2097152"
    parts = [rows[at : at + 250] for at in range(0, len(rows), 250)] or [()]
    for at, part in enumerate(parts):
        more = int(at + 1 < len(parts))
        owner.say("attach_reply", asked.words[0], lease, more, *(word for row in part for word in row))


def test_a_lease_is_the_owners_memory(broker: Running) -> None:
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
    assert list(owner.hear("detached").words) == [99]


def test_a_lease_of_many_chunks_comes_in_several_packets(broker: Running) -> None:
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


def test_a_refused_lease_reaches_the_attaching_client(broker: Running) -> None:
    owner, attacher = broker.client(), broker.client()
    attacher.say("attach", 6, owner.number, os.getpid(), 3, text="x")
    owner.say("attach_reply", owner.hear("attach_request").words[0], 0, 0, text="of an earlier residence")
    assert attacher.refusal() == ("not_attached", 6, "of an earlier residence")
    attacher.say("attach", 7, 1, 999, 3, text="x")
    code, serial, text = attacher.refusal()
    assert (code, serial) == ("not_attached", 7)
    assert "999" in text


def test_the_death_of_an_owner_refuses_pending_attachments(broker: Running, peer: Peer) -> None:
    number = int(peer.run("print(client.number)"))
    attacher = broker.client()
    attacher.say("attach", 8, number, peer.pid, 3, text="x")
    peer.run("client.hear('attach_request')")
    peer.kill()
    code, serial, text = attacher.refusal()
    assert (code, serial) == ("not_attached", 8)
    assert str(peer.pid) in text


def test_a_lease_ends_with_the_process_that_is_attached(broker: Running, peer: Peer) -> None:
    owner = broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    peer.run(f"client.say('attach', 5, {owner.number}, {os.getpid()}, 3, text='x')")
    asked = owner.hear("attach_request")
    assert asked.words[1] == peer.pid
    owner.say("attach_reply", asked.words[0], 99, 0, 0, chunk, PAGE)
    peer.run("client.hear('attached'); client.hang_up()")
    assert owner.hears_nothing()  # it may still write
    peer.kill()
    assert list(owner.hear("detached").words) == [99]


def test_chunks_of_a_dead_owner_wait_for_the_attached_process(broker: Running, peer: Peer) -> None:
    attacher = broker.client()
    number, chunk = map(int, peer.run("[chunk] = client.borrow(1 << 30); print(client.number, chunk)").split())
    attacher.say("attach", 5, number, peer.pid, 3, text="x")
    peer.run(f"client.say('attach_reply', client.hear('attach_request').words[0], 99, 0, 0, {chunk}, 1 << 30)")
    attacher.hear("attached").close()
    peer.kill()
    until(lambda: len(broker.status()["clients"]) == 1)
    other = broker.client()
    other.want(GIB)
    other.hear("stalled")
    attacher.say("detach", 99)
    assert [taken for taken, *_ in other.take(GIB)] == [chunk]


def test_leases_go_on_under_a_new_broker(broker: Running, peer: Peer) -> None:
    """The owner brings them. Leases that were detached meanwhile end, in either order of reconnection."""
    owner = broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    gone = subprocess.Popen(["true"])
    gone_file = os.pidfd_open(gone.pid)
    gone.wait()
    pidfds = {peer.pid: os.pidfd_open(peer.pid), gone.pid: gone_file}
    broker.kill()
    broker.start()
    peer.run(f"client = Client({str(broker.path)!r}); client.say('detach', 71)")
    peer.run("client.look()")
    again = broker.client(owner.number, bring=False)
    again.files, owner.files = owner.files, {}
    again.bring((chunk, PAGE))
    for lease, pid in ((70, peer.pid), (71, peer.pid), (72, gone.pid)):
        again.say("restore", lease, pid, chunk, files=(pidfds[pid],))
    assert [again.hear("detached").words[0] for _ in range(2)] == [71, 72]
    assert broker.row(peer.pid)["attached_bytes"] == PAGE
    peer.run("client.say('detach', 70)")
    assert list(again.hear("detached").words) == [70]
    for file in pidfds.values():
        os.close(file)


def test_a_lease_lasts_until_forked_children_of_the_attached_process_exit(broker: Running, peer: Peer) -> None:
    """Also where both the broker and the attached process have died, and the next broker has met neither."""
    owner = broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    peer.run(f"client.say('attach', 5, {owner.number}, {os.getpid()}, 3, text='x')")
    asked = owner.hear("attach_request")
    owner.say("attach_reply", asked.words[0], 99, 0, 0, chunk, PAGE)
    peer.run("client.hear('attached').close()")
    child = fork_in(peer)
    try:
        peer.kill()
        assert owner.hears_nothing()
        broker.kill()
        broker.start()
        again = broker.client(owner.number, bring=False)
        again.files, owner.files = owner.files, {}
        again.bring((chunk, PAGE))
        again.say("restore", 99, peer.pid, chunk, files=tuple(asked.files))
        again.give([chunk])
        assert again.hears_nothing()
        assert broker.status()["idle_bytes"] == 0
    finally:
        os.kill(child, signal.SIGKILL)
    assert list(again.hear("detached").words) == [99]
    assert broker.status()["idle_bytes"] == PAGE
    asked.close()


def test_a_malformed_lease_does_not_keep_its_process_watched(broker: Running) -> None:
    one, two, attacher = broker.client(), broker.client(), broker.client()
    lend(one, attacher)
    attacher.hear("attached")
    lend(two, attacher)  # with the number of the other's
    assert attacher.refusal() == ("not_attached", 5, f"the answer of process {os.getpid()} was malformed")
    assert two.is_refused()[0] == "malformed"
    attacher.say("detach", 99)
    one.hear("detached")
    for client in (one, attacher):
        client.hang_up()
    broker.idle_descriptors(within_s=30.0)  # which waits until it watches no process


def test_an_attachment_without_a_way_to_watch_it_is_malformed(broker: Running) -> None:
    owner = broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    owner.say("restore", 99, os.getpid(), chunk, files=(sentinel(),))
    assert owner.is_refused()[0] == "malformed"


def test_a_client_that_disconnects_before_its_lease_has_none(broker: Running) -> None:
    owner, attacher = broker.client(), broker.client()
    [chunk] = owner.borrow(PAGE, PAGE)
    attacher.say("attach", 5, owner.number, os.getpid(), 3, text="x")
    asked = owner.hear("attach_request")
    attacher.hang_up()
    until(lambda: len(broker.status()["clients"]) == 1)
    owner.say("attach_reply", asked.words[0], 99, 0, 0, chunk, PAGE)
    assert list(owner.hear("detached").words) == [99]


# Clients that misbehave

_UNKNOWN = 1 << 40
MALFORMED = {
    "too short": b"abc",
    "unknown kind": struct.pack("<II", 77, 0),
    "a broker's word": Message("welcome", (1, 2)).encode(),
    "hello again": Message("hello", (1, 2)).encode(),
    "more words announced": struct.pack("<II", protocol.KINDS["give_back"], 1 << 30),
    "text that is none": struct.pack("<IIQ", protocol.KINDS["usage"], 1, 1) + b"\xff\xfe",
    "text without need": Message("usage", (1,), "why").encode(),
    "too few words": Message("demand", (1,)).encode(),
    "half a group": Message("demand", (1, PAGE, PAGE)).encode(),
    "too many words": Message("close", (1, 2)).encode(),
    "no class": Message("demand", (1, PAGE + 1, PAGE, PAGE)).encode(),
    "no pages": Message("demand", (1, PAGE, PAGE, 5)).encode(),
    "nothing": Message("demand", (1, PAGE, PAGE, 0)).encode(),
    "more of nothing": Message("exchange", (1, PAGE, PAGE, PAGE)).encode(),
    "another's chunk": Message("give_back", (_UNKNOWN, 0)).encode(),
    "inventory without descriptors": Message("inventory", (_UNKNOWN, PAGE)).encode(),
    "inventory late": Message("inventory").encode(),
    "restore of another": Message("restore", (1, 2, _UNKNOWN)).encode(),
    "report without tags": Message("report", (0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 0), "one").encode(),
    "report of no state": Message("report", (0, 1, 2, 3, 9, 0), "one").encode(),
    "attach_reply unasked": Message("attach_reply", (1, 2, 0)).encode(),
    "longest": b"\0" * (protocol.LONGEST_PACKET + 1),
}


@pytest.mark.parametrize("packet", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_ends_its_connection_alone(broker: Running, packet: bytes) -> None:
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


def test_descriptors_where_none_belong_are_refused_and_closed(broker: Running) -> None:
    before = broker.idle_descriptors()
    chunk = (_UNKNOWN, PAGE)
    for kind, words, count in (("give_back", (), 3), ("inventory", chunk, 2), ("inventory", chunk, 1)):
        client = broker.client(bring=False)
        client.say(kind, *words, files=(0,) * count)
        assert client.is_refused()[0] == "malformed"
    until(lambda: broker.descriptors() <= before)


@pytest.mark.parametrize("sizes", [(PAGE, PAGE + 1), (PAGE, MEDIUM)], ids=["no class", "another size"])
def test_a_chunk_with_a_wrong_descriptor_is_refused(broker: Running, sizes: tuple[int, int]) -> None:
    file = os.memfd_create("test")
    try:
        os.ftruncate(file, sizes[0])
        client = broker.client(bring=False)
        client.say("inventory", 5, sizes[1], files=(file,))
        assert client.is_refused()[0] == "malformed"
    finally:
        os.close(file)


def test_a_chunk_is_accepted_once_and_only_from_its_holder(broker: Running) -> None:
    one = broker.client()
    chunks = one.borrow(PAGE, PAGE)
    thief = broker.client(bring=False)
    thief.say("inventory", chunks[0], PAGE, files=(one.files[chunks[0]],))
    assert thief.is_refused()[0] == "malformed"
    one.hang_up()
    again = broker.client(one.number, bring=False)
    again.say("inventory", *(chunks[0], PAGE) * 2, files=(one.files[chunks[0]],) * 2)
    code, text = again.is_refused()
    assert (code, str(chunks[0]) in text) == ("malformed", True)


def greet(broker: Running, *words: int, text: str = "", kind: str = "hello") -> tuple[str, str]:
    stranger = Client.__new__(Client)
    stranger.channel = discovery.connect(broker.path)
    stranger.channel.settimeout(PATIENCE_S)
    stranger.say(kind, *words, text=text)
    try:
        return stranger.is_refused()
    finally:
        stranger.channel.close()


def test_another_device_is_refused(broker: Running) -> None:
    code, text = greet(broker, protocol.VERSION, 5, os.getpid(), text="GPU-of-another")
    assert code == "device"
    assert broker.uuid in text and "GPU-of-another" in text
    assert greet(broker, 1, kind="usage")[0] == "malformed"
    assert greet(broker)[0] == "malformed"


@pytest.mark.parametrize("version", [protocol.VERSION - 1, protocol.VERSION + 1])
def test_client_of_another_version_is_refused(broker: Running, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own, older = protocol.VERSION, "client" if version < protocol.VERSION else "broker"
    code, text = greet(broker, version, 5, os.getpid(), text=broker.uuid)
    assert code == "version"
    assert f"version {own} " in text and f"version {version}: upgrade memsaver in the {older}" in text
    monkeypatch.setattr(protocol, "VERSION", version)
    with pytest.raises(BrokerError, match=f"version {own} .* version {version}"):
        AdminClient(broker.path)


def test_a_client_number_belongs_to_one_process(broker: Running, peer: Peer) -> None:
    number = int(peer.run("print(client.number)"))
    code, text = greet(broker, protocol.VERSION, number, os.getpid(), text=broker.uuid)
    assert code == "malformed"
    assert str(peer.pid) in text


APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # a pid namespace of its own
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["sh", "-c", f"{' '.join(APART)} true"], check=False, capture_output=True).returncode != 0,
    reason="no pid namespace can be made here",
)


@needs_namespaces
def test_a_client_in_a_pid_namespace_of_its_own_is_refused(broker: Running) -> None:
    program = "import memsaver; memsaver.configure(pool='shared'); memsaver.region('r', device='cpu')"
    done = subprocess.run(
        [*APART, sys.executable, "-c", program], env=broker.environment, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("memsaver.errors.BrokerError: ") and "pid namespace" in last and str(broker.path) in last
    assert broker.client().look()[1] == GIB


@needs_namespaces
def test_a_broker_in_a_pid_namespace_of_its_own_refuses(empty: Running) -> None:
    empty.prefix = APART
    empty.start()
    with pytest.raises(AssertionError, match="'refused'.*another pid namespace"):
        empty.client()
    program = "import memsaver; memsaver.configure(pool='shared'); memsaver.region('r', device='cpu')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=empty.environment, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("memsaver.errors.BrokerError: ") and "another pid namespace" in last


def test_a_process_with_another_number_in_its_own_namespace_is_refused(broker: Running) -> None:
    code, text = greet(broker, protocol.VERSION, 5, 1, text=broker.uuid)
    assert code == "pid_namespace"
    assert f"process {os.getpid()} " in text and "process 1 in its own" in text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused(broker: Running) -> None:
    program = f"""
        import os, socket
        os.setgid(65534); os.setuid(65534)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect({str(broker.path)!r})
        except PermissionError:
            print("kept out")
    """
    assert run_bare(program) == "kept out\n"
    broker.directory.chmod(0o755)
    assert run_bare(program) == "kept out\n"
    assert broker.client().look()[1] == GIB


def run_bare(program: str) -> str:
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_many_connections_leak_nothing(broker: Running) -> None:
    bystander = broker.client()
    bystander.look()
    before = broker.descriptors()
    for number in range(1000):
        client = Client(broker.path)
        if number % 10 == 0:
            client.give(client.borrow(PAGE, PAGE))
            client.hears_nothing()
        client.close()
    bystander.say("trim", 1, 0)
    until(lambda: broker.descriptors() <= before + 2)  # a chunk, and its handle on the host driver


def test_a_broker_without_descriptors_reports_it_and_recovers() -> None:
    with Running(limit_files=64) as broker:
        one = broker.client()
        others = []
        code = ""
        while not code:
            try:
                others.append(broker.client())
                others[-1].look()
            except AssertionError as error:
                assert "refused" in str(error)
                code = str(error)
        assert "descriptor" in code
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


def test_a_device_has_one_broker(broker: Running) -> None:
    done = broker.run("broker", "--device", "cpu")
    assert done.returncode == 1
    assert f"has a broker already (pid {broker.process.pid}" in done.stderr
    assert broker.client().look()[1] == GIB


def test_a_capacity_larger_than_the_device_is_refused(broker: Running) -> None:
    done = broker.run("broker", "--device", "cpu", "--capacity", "900TiB")
    assert done.returncode == 1
    assert "921600.00 GiB" in done.stderr and broker.environment["MEMSAVER_HOST_DEVICE"] in done.stderr
    assert broker.run("broker", "--device", "cpu", "--capacity", "1MiB").returncode == 1
    assert broker.run("broker", "--device", "cuda:77").returncode == 1
    assert broker.run("broker", "--capacity", "much").returncode == 2
    assert broker.run("broker", "--linger", "-1").returncode == 2
    assert broker.run().returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_broker_exits_cleanly_on_a_signal(broker: Running, number: int) -> None:
    client = broker.client()
    client.borrow(PAGE, PAGE)
    broker.kill(number)
    assert broker.process.returncode == 0
    assert not broker.path.exists()
    assert client.is_left()
    broker.start()


def test_a_socket_that_a_dead_broker_left_is_replaced(broker: Running) -> None:
    broker.kill()
    assert broker.path.exists()
    with pytest.raises(errors.BrokerError, match="no broker") as caught:
        discovery.connect(broker.path)
    assert caught.value.path == str(broker.path)
    broker.start()
    broker.client()


def test_a_lingering_broker_exits_after_its_last_client() -> None:
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


def test_processes_that_need_a_broker_at_once_get_one(empty: Running) -> None:
    program = f"from memsaver.broker import daemon; print(daemon.ensure({empty.uuid!r}, 'cpu', 1 << 29))"
    starters = [
        subprocess.Popen([sys.executable, "-c", program], env=empty.environment, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    for starter in starters:
        assert starter.communicate(timeout=PATIENCE_S)[0].strip() == str(empty.path)
        assert starter.returncode == 0
    pid = broker_pid(empty.path)
    assert empty.path.with_suffix(".log").read_text().count("serving cpu") == 1
    assert daemon.ensure(empty.uuid, "cpu") == empty.path
    assert empty.client().capacity == 1 << 29
    assert broker_pid(empty.path) == pid
    end(pid)
    assert not empty.path.exists()


def test_a_started_broker_outlives_the_client_that_started_it(empty: Running) -> None:
    with Peer(**{name: empty.environment[name] for name in ("MEMSAVER_HOST_DEVICE", "MEMSAVER_POOL_DIR")}) as peer:
        peer.run(f"from memsaver.broker import daemon; daemon.ensure({empty.uuid!r}, 'cpu')")
        group = int(peer.run("import os; print(os.getpgid(0))"))
        pid = broker_pid(empty.path)
        assert os.getpgid(pid) != group
        assert str(pid) not in peer.run("print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read())")
    empty.client()
    end(pid)


def test_a_broker_that_cannot_start_reports_the_reason(empty: Running) -> None:
    with pytest.raises(errors.BrokerError, match="could not be started.*900000.00 GiB"):
        daemon.ensure(empty.uuid, "cpu", 900_000 * GIB)
    with pytest.raises(errors.BrokerError, match="after 0 s"):
        daemon.ensure(empty.uuid, "cpu", timeout_s=0.0)
    until(lambda: discovery.accepts(empty.path) or not discovery.is_locked(empty.path))
    if discovery.accepts(empty.path):
        end(broker_pid(empty.path))


def test_the_directory_must_be_this_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ms") as name:
        monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/new")
        assert discovery.directory() == Path(name) / "new"
        assert (Path(name) / "new").stat().st_mode & 0o777 == 0o700
        (Path(name) / "new").chmod(0o770)
        with pytest.raises(errors.ConfigError, match="written by others"):
            discovery.directory()
        (Path(name) / "file").touch()
        (Path(name) / "link").symlink_to(name)
        for wrong in ("file", "link"):
            monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/{wrong}")
            with pytest.raises(errors.ConfigError, match="is no directory; it comes from MEMSAVER_POOL_DIR"):
                discovery.directory()
        monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/no/such")
        with pytest.raises(errors.ConfigError, match="No such file"):
            discovery.directory()
        monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{name}/{'long' * 20}")
        with pytest.raises(errors.ConfigError, match="107"):
            discovery.socket_path("GPU-" + "0" * 32)
        monkeypatch.setenv("MEMSAVER_POOL_DIR", "relative")
        with pytest.raises(errors.ConfigError, match="MEMSAVER_POOL_DIR is 'relative', expected an absolute path"):
            discovery.directory()
        if os.getuid() == 0:
            os.chown(name, 65534, 65534)
            monkeypatch.setenv("MEMSAVER_POOL_DIR", name)
            with pytest.raises(errors.ConfigError, match="belongs to user 65534"):
                discovery.directory()


# The command line


def test_top_prints_all_pools_once(broker: Running, peer: Peer) -> None:
    peer.run("chunks = client.borrow(96 << 20, 32 << 20)")
    done = broker.run("top", "--json")
    assert done.returncode == 0, done.stderr
    [pool] = json.loads(done.stdout)["pools"]
    assert (pool["device"], pool["uuid"], pool["capacity_bytes"]) == ("cpu", broker.uuid, GIB)
    assert [(row["pid"], row["held_bytes"]) for row in pool["clients"]] == [(peer.pid, 3 * MEDIUM)]
    assert json.loads(broker.run("top", "--json", "--device", "cpu").stdout)["pools"][0]["uuid"] == broker.uuid


def test_trim_without_its_broker_lists_the_running_ones(broker: Running) -> None:
    """The device `cpu` depends on MEMSAVER_HOST_DEVICE of the shell."""
    here, broker.environment["MEMSAVER_HOST_DEVICE"] = broker.environment["MEMSAVER_HOST_DEVICE"], "1GiB"
    try:
        done = broker.run("trim", "--device", "cpu")
        assert done.returncode == 1
        assert "no broker of cpu" in done.stderr and "MEMSAVER_HOST_DEVICE" in done.stderr
        assert f"running: cpu ({broker.uuid})" in done.stderr
        done = broker.run("trim", "--device", broker.uuid)
        assert (done.returncode, done.stdout) == (0, f"cpu ({broker.uuid}): 0.0 MiB given back\n"), done.stderr
    finally:
        broker.environment["MEMSAVER_HOST_DEVICE"] = here


def test_an_error_has_the_name_that_a_process_gives_itself(broker: Running) -> None:
    settings = {"MEMSAVER_HOST_DEVICE": broker.environment["MEMSAVER_HOST_DEVICE"], "MEMSAVER_POOL": "shared"}
    settings["MEMSAVER_POOL_DIR"] = str(broker.directory)
    with Peer(**settings, MEMSAVER_NAME="rollout engine") as holder, Peer(**settings) as other:
        for each in (holder, other):
            each.run("region = memsaver.region('kv', device='cpu')")
        holder.run("held = region._core.allocate_array(4 << 20)")
        source = (
            "try: region._core.allocate_array(1 << 50)\nexcept memsaver.OutOfMemoryError as error: print(repr(error))"
        )
        text = other.run(f"exec({source!r})")
        assert text.count(f"rollout engine (pid {holder.pid})") == text.count(f"(pid {holder.pid})") == 1, text


def test_a_process_whose_main_thread_has_ended_has_no_given_name() -> None:
    """Its environment and its arguments are gone, as while it exits, and it has not exited."""
    program = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
    program += "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
    environment = {**os.environ, "MEMSAVER_NAME": "trainer"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # some sandboxes show the command line some time after the exec
            until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes() == b"")
            assert process_names.given_name(process.pid) is None
            client = clients.Client(1, SimpleNamespace(pid=process.pid, has_exited=False))  # type: ignore[arg-type]
            client.name = "trainer"
            client.read_name()
            assert client.name == "trainer"
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["python", "/home/me/train.py", "--token", "secret"], "train.py"),
        (["/usr/bin/python3.11", "-u", "-W", "ignore", "-X", "dev", "train.py"], "train.py"),
        (["python3", "-Wignore", "-Xdev", "--check-hash-based-pycs", "always", "--", "train.py"], "train.py"),
        (["python", "-m", "examples.x", "secret"], "examples.x"),
        (["python", "-um", "examples.x"], "examples.x"),
        (["python", "-mexamples.x"], "examples.x"),
        (["python", "a/folder/"], "folder"),
        (["python", "-c", "password = 'secret'"], "sleep"),
        (["python", "-Ic", "password = 'secret'"], "sleep"),
        (["python", "-", "secret"], "sleep"),
        (["python"], "sleep"),
        (["serve", "train.py"], "sleep"),
        (["python", "\udcff" + 200 * "x"], "?" + 99 * "x"),
    ],
)
def test_name_of_python_process_is_its_script_or_module(arguments: list[str], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil.Process, "cmdline", lambda self: arguments)
        patch.setattr(process_names, "_program", lambda pid: "sleep")
        assert process_names.process_name(os.getpid()) == name


def test_top_shows_the_script_of_a_process_without_its_arguments(broker: Running, tmp_path: Path) -> None:
    script = tmp_path / "train_with_a_name_of_32_letters.py"
    script.write_text(
        "import memsaver\nmemsaver.configure(pool='shared')\nmemsaver.region('kv', device='cpu')\n"
        "print(flush=True)\ninput()"
    )
    command = [sys.executable, str(script), "--token", "secret"]
    with subprocess.Popen(command, env=broker.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"\n"
            until(lambda: [row for row in broker.status()["clients"] if row["pid"] == process.pid])
            assert broker.row(process.pid)["name"] == script.name
            shown = broker.run("top").stdout
        finally:
            process.kill()
    assert f"{process.pid}  {script.name} holds" in shown and "secret" not in shown


def test_a_detached_broker_closes_the_files_of_its_caller(empty: Running) -> None:
    """The pipes of `run` end while the broker runs, and so does one that the command inherits."""
    inherited, writer = os.pipe()
    started = subprocess.run(
        [sys.executable, "-m", "memsaver", "broker", "--detach", "--device", "cpu"],
        env=empty.environment, capture_output=True, text=True, timeout=PATIENCE_S, pass_fds=(writer,), check=False,
    )  # fmt: skip
    os.close(writer)
    pid = broker_pid(empty.path)
    log = empty.path.with_suffix(".log")
    try:
        assert started.returncode == 0, started.stderr
        assert started.stdout == f"the broker of cpu ({empty.uuid}) runs with pid {pid}, its log is {log}\n"
        assert os.read(inherited, 1) == b""
        assert [os.readlink(f"/proc/{pid}/fd/{file}") for file in range(3)] == [os.devnull, str(log), str(log)]
        assert os.getsid(pid) == pid
        until(lambda: "serving cpu" in log.read_text())
        client = empty.client()
        assert client.borrow(MEDIUM)
    finally:
        os.close(inherited)
        stopped = empty.run("broker", "--stop", "--device", "cpu")
    assert (stopped.returncode, stopped.stdout) == (0, f"cpu ({empty.uuid}): stopped the broker with pid {pid}\n")
    assert not discovery.accepts(empty.path) and not discovery.is_locked(empty.path)
    assert "SIGTERM" in log.read_text()


def test_stopping_without_a_broker_is_an_error(empty: Running) -> None:
    done = empty.run("broker", "--stop")
    assert done.returncode == 1 and "no broker" in done.stderr


def test_an_unknown_device_is_refused_with_those_that_exist(empty: Running) -> None:
    done = empty.run("broker", "--device", "cuda:99")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("memsaver: there is no device 'cuda:99'; the devices are: cpu")


def test_trim_gives_idle_memory_back(broker: Running) -> None:
    client = broker.client()
    chunks = client.borrow(2 * MEDIUM, MEDIUM)
    client.give(chunks)
    done = broker.run("trim", "--keep", "32MiB")
    assert (done.returncode, done.stdout) == (0, f"cpu ({broker.uuid}): 32.0 MiB given back\n")
    client.drop(*client.hear("drop").words)
    assert broker.run("trim").returncode == 0
    client.drop(*client.hear("drop").words)
    until(lambda: broker.status()["total_bytes"] == 0)


def test_top_shows_the_processes_of_a_device_without_a_broker(empty: Running) -> None:
    with Worker(empty, f"held = hold('a', {64 * MIB})", MEMSAVER_POOL="process") as worker:
        pid = worker.pid
        for device in ([], ["--device", "cpu"]):
            text = empty.run("top", *device).stdout
            assert "no broker of a shared pool runs" in text and "without a shared pool" in text
            rows = [line.split() for line in text.splitlines()]
            assert [row for row in rows if row[:1] == [str(pid)] and row[-2:] == ["64.0", "MiB"]], text
        found = json.loads(empty.run("top", "--json").stdout)
    assert found["pools"] == []
    [device] = found["devices"]
    assert [(row["pid"], row["bytes"]) for row in device["ledger"]["rows"] if row["pid"]] == [(pid, 64 * MIB)]


def test_importing_memsaver_loads_no_broker() -> None:
    program = "import sys, memsaver; print(*sorted(name for name in sys.modules if name.startswith('memsaver.')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith(("memsaver.broker", "memsaver.cli"))}
    assert loaded == {"memsaver.broker", "memsaver.broker.caches", "memsaver.broker.pool_client"}


def test_a_broker_in_the_background_that_hangs_is_killed_at_a_bound() -> None:
    """As with a call of the driver that opens its device."""
    out = run_clean("""
        import os, time
        from memsaver.broker import daemon
        from memsaver.errors import BrokerError
        try:
            daemon.detach(lambda on_ready: time.sleep(1e6), timeout_s=0.1)
        except BrokerError as error:
            print("does not accept clients after 0.1 s, and was killed" in str(error))
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    assert out == "True\n-9\n"
