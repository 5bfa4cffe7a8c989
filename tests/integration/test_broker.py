"""The broker and its clients: demands, invalid messages, ended connections, starts and ends, and the command line."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memsaver import _core, cli, errors, process_names
from memsaver.broker import caller, clients, daemon, discovery, protocol, status
from memsaver.broker.protocol import Message
from memsaver.errors import gib
from tests.broker_support import APART, PATIENCE_S, Client, Local, Running, granted, is_possible
from tests.nursery import Fork
from tests.pool_support import Worker
from tests.support import GIB, MIB, PAGE, descriptors, run_clean, run_program, until

LARGE = 256 * MIB
MEDIUM = 32 * MIB


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    """A broker of this process, with this process's environment pointing there."""
    with Local() as local:
        monkeypatch.setenv("MEMSAVER_POOL_DIR", str(local.directory))
        yield local
        assert local.client().look()[1] == GIB, "the broker did not survive"


@pytest.fixture
def elsewhere() -> Iterator[Running]:
    """A broker in a process of its own."""
    with Running() as running:
        yield running


@pytest.fixture
def empty(elsewhere: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The place of a broker that has gone, with this process's environment pointing there."""
    elsewhere.kill()
    for name in ("MEMSAVER_POOL_DIR", "MEMSAVER_HOST_DEVICE", "PYTHONPATH"):
        monkeypatch.setenv(name, elsewhere.environment[name])
    return elsewhere


def contents(client: Client, chunk: int, size: int = PAGE) -> mmap.mmap:
    return mmap.mmap(client.files[chunk], size)


# Lending


def test_the_last_packet_of_a_grant_has_the_place_in_the_queue(broker: Local) -> None:
    """Also if the packet is full: the client reads there how many of its messages the broker has served."""
    one, two = broker.client(), broker.client()
    for count in (protocol.MOST_CHUNKS, protocol.MOST_CHUNKS + 1):
        one.give(one.borrow(count * PAGE, PAGE))
        request = one.want(count * PAGE, PAGE)
        messages = [one.hear("grant") for _ in range(-(-count // protocol.MOST_CHUNKS))]
        heads = [list(message.words[:3]) for message in messages]
        assert heads == [[request, 0, 0]] * (len(heads) - 1) + [[request, 1, 0]]
        one.give([chunk for message in messages for chunk, *_ in granted(message)])
        one.say("close", request)
    chunks = one.borrow(GIB, PAGE)
    two.want(260 * PAGE, GIB, PAGE)
    assert two.hear("stalled").words[1] == 1
    one.give(chunks[:251])  # one hand-over in two packets
    sizes = []
    for words in ([0, 0], [1, 1, GIB, 9 * PAGE]):
        message = two.hear("grant")
        assert list(message.words[1 : 1 + len(words)]) == words
        assert len(message.files) == len(granted(message))
        sizes.append(len(message.files))
        message.close()
    assert sizes == [250, 1]


# Figures


def test_a_status_longer_than_a_packet_leaves_regions_out(broker: Local) -> None:
    regions = [["tag" * 30, "active", "none", 1, 1, 1, 0]] * 200
    for client in [broker.client() for _ in range(3)]:
        client.say("report", text=REPORT % ("", json.dumps(regions)[1:-1]))
        client.look()
    rows = broker.status()["clients"]
    assert len(rows) == 3 and min(len(row["regions"]) for row in rows) == 0


def test_a_status_waits_for_reports(broker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "REPORTS_S", 60.0)
    one, two, third = broker.client(), broker.client(), broker.client()
    rows, regions = [["context", "", "", PAGE]], [["kv cache", "paused", "host", 5, 4, 3, 2]]
    text = json.dumps({"imported_bytes": None, "host_held_bytes": 7, "rows": rows, "regions": regions})
    third.say("status", 7)
    for each in (one, two, third):
        each.hear("query")
        each.say("report", text=text)
    found = json.loads(third.hear("status").text)
    assert [row["ledger"]["rows"] for row in found["clients"]] == [rows] * 3
    assert all(row["report_age_s"] >= 0 and row["is_current"] for row in found["clients"])
    assert [row["host_held_bytes"] for row in found["clients"]] == [7] * 3
    assert [list(region.values()) for row in found["clients"] for region in row["regions"]] == regions * 3


# Ended connections


def test_a_client_that_rejoins_is_asked_for_its_report_again(broker: Local) -> None:
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


def test_a_client_with_many_chunks_rejoins_in_several_packets(broker: Local) -> None:
    one = broker.client()
    chunks = one.borrow(501 * PAGE, PAGE)
    broker.stop()
    broker.start()
    again = broker.client(one.number, bring=False)
    again.files, one.files = one.files, {}
    for at in (0, 250, 500):
        again.bring(*((chunk, PAGE) for chunk in chunks[at : at + 250]))
    assert again.look()[0] == GIB - 501 * PAGE
    again.bring()
    assert again.is_refused()[0] == "malformed"


def test_a_pool_with_more_than_its_capacity_has_nothing_free(broker: Local) -> None:
    """Clients of an earlier broker, whose capacity was larger, bring more memory than this broker's capacity."""
    client = broker.client(bring=False)
    client.bring(*((number, LARGE) for number in range(1, 6)))
    client.look()
    assert broker.status()["total_bytes"] == 5 * LARGE > GIB
    assert caller.free_bytes(broker.status()) == 0


def test_chunks_of_an_earlier_broker_are_lent_to_no_other_client(broker: Local) -> None:
    """They count until the client has dropped its handles. Then the memory is created anew."""
    one = broker.client()
    chunks = one.borrow(3 * LARGE, LARGE)
    broker.stop()
    broker.start()
    again, other = broker.client(one.number, bring=False), broker.client()
    again.files, one.files = one.files, {}
    again.bring(*((chunk, LARGE) for chunk in chunks))
    until(lambda: broker.row(os.getpid())["held_bytes"] == 3 * LARGE)
    other.want(GIB, LARGE)
    [first] = other.take(LARGE)
    assert other.hear("stalled").words[3:] == (LARGE, 3 * LARGE)
    [wait] = [each for row in broker.status()["clients"] for each in row["waiting"]]
    assert (wait["needed_bytes"], wait["granted_bytes"]) == (GIB, LARGE)
    again.give(chunks[:2])
    assert list(again.hear("drop").words) == chunks[:2]
    assert other.look()[0] == 0 and broker.status()["leaving_bytes"] == 2 * LARGE
    again.drop(chunks[0])
    made = [first, *other.take(LARGE)]
    again.drop(chunks[1])
    made += other.take(LARGE)
    replacing = broker.client(again.number, bring=False)  # without its last chunk
    assert again.is_left()
    replacing.bring()
    made += other.take(LARGE)
    assert not {chunk for chunk, *_ in made} & set(chunks)
    assert {flags for *_, flags in made} == {protocol.HAS_DESCRIPTOR}


def test_a_client_gets_descriptors_of_the_chunks_that_it_holds(broker: Local) -> None:
    one, other = broker.client(), broker.client()
    mine, returned = one.borrow(2 * PAGE, PAGE)
    [theirs] = other.borrow(PAGE, PAGE)
    before = descriptors()
    one.say("descriptors", 5, mine, returned)
    answer = one.hear("descriptors")
    assert answer.words == (5,)
    assert [os.fstat(file).st_ino for file in answer.files] == [
        os.fstat(one.files[chunk]).st_ino for chunk in (mine, returned)
    ]
    answer.close()
    one.give([returned])
    for serial, chunk in ((6, returned), (7, theirs), (8, _UNKNOWN)):
        one.say("descriptors", serial, mine, chunk)
        code, request, text = one.refusal()
        assert (code, request) == ("no_descriptor", serial) and "not held" in text
    assert descriptors() == before
    broker.stop()
    broker.start()
    again = broker.client(one.number, bring=False)
    again.bring((mine, PAGE))
    [fresh] = again.borrow(PAGE, PAGE)
    again.say("descriptors", 1, fresh, mine)
    code, request, text = again.refusal()
    assert (code, request) == ("no_descriptor", 1) and "from a broker that has ended" in text and "send" in text
    again.say("descriptors", 2, fresh)
    answer = again.hear("descriptors")
    assert len(answer.files) == 1
    answer.close()
    again.say("descriptors", 3, *[fresh] * 251)
    assert again.is_refused()[0] == "malformed"


def test_a_client_that_never_reads_does_not_block_the_others(broker: Local) -> None:
    deaf, one = broker.client(), broker.client()
    deaf.give(deaf.borrow(LARGE, PAGE))
    for number in range(3000):
        deaf.say("usage", number)
        if number % 100 == 0:
            one.give(one.borrow(3 * LARGE))
            one.say("trim", 1, 0)  # drops pile up
            while (message := one.hear("drop", "trim")).kind == "drop":
                one.drop(*message.words)
    assert broker.status()["leaving_bytes"] >= LARGE  # whose handles it has
    for number in range(3000):
        while (message := deaf.hear("usage", "drop")).kind == "drop":
            deaf.drop(*message.words)
        assert message.words[0] == number
    until(lambda: broker.status()["leaving_bytes"] == 0)


# Clients that misbehave

_UNKNOWN = 1 << 40
REPORT = '{"imported_bytes": 0, "host_held_bytes": 0, "rows": [%s], "regions": [%s]}'
MALFORMED = {
    "too short": b"abc",
    "unknown kind": struct.pack("<II", 77, 0),
    "a broker's word": Message("welcome", (1, 2)).encode(),
    "a receiver's word": Message("release", (1,)).encode(),
    "hello again": Message("hello", (1, 2, 3)).encode(),
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
    "inventory late": Message("inventory").encode(),
    "report without regions": Message("report", (), '{"imported_bytes": 0, "host_held_bytes": 0, "rows": []}').encode(),
    "report of short rows": Message("report", (), REPORT % ('["a"]', "")).encode(),
    "report that is nested": Message("report", (), "[" * 10_000).encode(),
    "answer to reclaim": Message("reclaimed", (2, 0)).encode(),
    "longest": b"\0" * (protocol.LONGEST_PACKET + 1),
}


def test_a_malformed_message_ends_its_connection_alone(broker: Local) -> None:
    bystander = broker.client()
    for name, packet in MALFORMED.items():
        client = broker.client()
        client.borrow(PAGE, PAGE)
        client.say_raw(packet)
        code, text = client.is_refused()
        assert (code, bool(text)) == ("malformed", True), name
        bystander.give(bystander.borrow(PAGE, PAGE))
    rows = broker.status()["clients"]
    assert sorted(row["connected"] for row in rows) == [False] * len(MALFORMED) + [True]
    assert sum(row["held_bytes"] for row in rows) == len(MALFORMED) * PAGE


def test_a_client_proves_its_end_before_it_gets_memory(broker: Local) -> None:
    """The read end of a pipe comes before any message about memory, and the inventory before the others."""
    read, write = os.pipe()
    client = broker.client(bring=False, proves=False)
    assert client.look()[1] == GIB  # as tools do
    client.say("inventory")
    assert client.is_refused() == ("malformed", "'inventory' comes from a process without a sentinel")
    for files in ((write,), (0,), (read, read)):
        channel = discovery.connect(broker.path)
        protocol.send(channel, Message("hello", (protocol.VERSION, 1, os.getpid()), broker.uuid).encode(), files)
        message = protocol.receive(channel)
        assert message is not None and message.kind == "refused" and "descriptor" in message.text, files
        channel.close()
    client = broker.client(bring=False)
    client.want(PAGE)
    assert "inventory" in client.is_refused()[1]
    os.close(read)
    os.close(write)


def test_invalid_inventories_are_refused_and_leave_no_descriptors(broker: Local) -> None:
    one = broker.client()
    [chunk] = one.borrow(PAGE, PAGE)
    before = descriptors()
    for kind, words, files in (
        ("give_back", (), (0, 0, 0)),  # descriptors where none belong
        ("inventory", (_UNKNOWN, PAGE), (0,)),
        ("inventory", (_UNKNOWN,), ()),
        ("inventory", (_UNKNOWN, PAGE + 1), ()),
        ("inventory", tuple([_UNKNOWN, PAGE] * 251), ()),
        ("inventory", (chunk, PAGE), ()),  # another's
    ):
        thief = broker.client(bring=False)
        thief.say(kind, *words, files=files)
        assert thief.is_refused()[0] == "malformed", (kind, words, files)
        thief.close()
    until(lambda: descriptors() == before)
    one.hang_up()
    for brought in ([(chunk, PAGE)] * 2, [(chunk, MEDIUM)]):
        again = broker.client(one.number, bring=False)
        again.bring(*brought)
        code, text = again.is_refused()
        assert (code, str(chunk) in text) == ("malformed", True)


def test_another_device_version_or_process_is_refused(broker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(*words: int, text: str = broker.uuid, kind: str = "hello") -> tuple[str, str]:
        stranger = Client.__new__(Client)
        stranger.channel = discovery.connect(broker.path)
        stranger.say(kind, *words, text=text)
        try:
            return stranger.is_refused()
        finally:
            stranger.channel.close()

    own, me = protocol.VERSION, os.getpid()
    code, text = greet(own, 5, me, text="GPU-of-another")
    assert code == "device" and broker.uuid in text and "GPU-of-another" in text
    assert greet(1, kind="usage", text="")[0] == greet()[0] == "malformed"
    code, text = greet(own, 5, 1)
    assert code == "pid_namespace" and f"process {me} " in text and "process 1 in its own" in text
    with Fork({}, "tests.broker_support") as peer:
        peer.run(f"client = Client({str(broker.path)!r}, 77)")
        code, text = greet(own, 77, me)
    assert code == "malformed" and str(peer.pid) in text
    for version in (own - 1, own + 1):
        code, text = greet(version, 5, me)
        assert code == "version" and f"version {own} " in text and f"version {version}: upgrade memsaver" in text
    monkeypatch.setattr(discovery, "_checked", lambda path: path)
    with monkeypatch.context() as other:
        words = Message.encode
        other.setattr(Message, "encode", lambda self: words(Message(self.kind, (own + 1, *self.words[1:]), self.text)))
        with pytest.raises(errors.BrokerError, match=f"version {own} .* version {own + 1}"):
            broker.status()


JOIN = "import memsaver; memsaver.configure(pool='shared'); memsaver.region('r', device='cpu')"


@pytest.mark.skipif(not is_possible(APART), reason="no pid namespace can be made here")
def test_a_broker_in_a_pid_namespace_of_its_own_refuses(empty: Running) -> None:
    empty.prefix = APART
    empty.start()
    with pytest.raises(AssertionError, match="'refused'.*another pid namespace"):
        empty.client()
    done = run_program([sys.executable, "-c", JOIN], env=empty.environment)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("memsaver.errors.BrokerError: ") and "another pid namespace" in last


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused(broker: Local) -> None:
    program = f"""
        import os, socket
        os.setgid(65534); os.setuid(65534)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect({str(broker.path)!r})
            print(b"expected user" in channel.recv(1000))
        except PermissionError:
            print("kept out")
    """
    assert run_clean(program) == "kept out\n"
    broker.directory.chmod(0o755)
    assert run_clean(program) == "kept out\n"
    broker.path.chmod(0o777)
    assert run_clean(program) == "True\n"


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
                code = str(error)
        assert "refused" in code and "descriptor" in code
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


def test_a_broker_exits_cleanly_on_a_signal(elsewhere: Running) -> None:
    """One that is killed leaves its socket, which the next one replaces."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
        client = elsewhere.client()
        client.borrow(PAGE, PAGE)
        elsewhere.kill(number)
        assert client.is_left()
        killed = number == signal.SIGKILL
        assert (elsewhere.process.returncode, elsewhere.path.exists()) == (-number if killed else 0, killed)
        with pytest.raises(errors.BrokerError, match="no broker") as caught:
            discovery.connect(elsewhere.path)
        assert caught.value.path == str(elsewhere.path)
        elsewhere.start()
    elsewhere.client()


def test_a_lingering_broker_exits_after_its_last_client() -> None:
    with Local(linger_s=0.2) as broker:
        client = broker.client()
        time.sleep(0.5)
        client.borrow(PAGE, PAGE)
        client.hang_up()  # this process still has the chunk
        time.sleep(0.5)
        assert broker.thread.is_alive()
        broker.client(client.number).hang_up()
        broker.thread.join(PATIENCE_S)
        assert not broker.thread.is_alive() and not broker.path.exists()


def broker_pid(path: Path) -> int:
    return int(path.with_suffix(".lock").read_text())


def is_broker(process: psutil.Process, directory: Path) -> bool:
    with suppress(psutil.Error):
        if "broker" in process.cmdline():
            return process.environ().get("MEMSAVER_POOL_DIR") == str(directory)
    return False


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_processes_that_need_a_broker_at_once_get_one_that_outlives_them(empty: Running) -> None:
    with ExitStack() as stack:
        starters = [stack.enter_context(Fork(empty.environment, "memsaver.broker.daemon")) for _ in range(3)]
        for starter in starters:
            starter.send(f"print(ensure({empty.uuid!r}, 'cpu', 1 << 29))")
        assert [starter.answer() for starter in starters] == [str(empty.path)] * 3
    pid = broker_pid(empty.path)
    assert os.getsid(pid) not in (os.getsid(0), *(starter.pid for starter in starters))
    log = empty.path.with_suffix(".log")
    until(lambda: "serving cpu" in log.read_text())  # it accepts clients before it writes this
    assert log.read_text().count("serving cpu") == 1
    assert daemon.ensure(empty.uuid, "cpu") == empty.path
    assert empty.client().capacity == 1 << 29
    assert broker_pid(empty.path) == pid
    while left := [each.pid for each in psutil.process_iter() if is_broker(each, empty.directory)]:
        for each in left:  # the broker, and those of the other starters if they find out later that they are late
            end(each)


def test_a_broker_that_cannot_start_reports_the_reason(empty: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.BrokerError, match="could not be started.*900000.00 GiB"):
        daemon.ensure(empty.uuid, "cpu", 900_000 * GIB)
    with pytest.raises(errors.BrokerError, match="after 0 s"):  # it is killed, as with a call of the driver that hangs
        daemon.ensure(empty.uuid, "cpu", timeout_s=0.0)
    until(lambda: not discovery.is_locked(empty.path))
    assert not discovery.accepts(empty.path)
    for program, reason in (("/", "Permission denied"), ("/bin/false", "ended with status 1")):
        with monkeypatch.context() as patch, pytest.raises(errors.BrokerError, match=f"could not be started.*{reason}"):
            patch.setattr(sys, "executable", program)
            daemon.ensure(empty.uuid, "cpu")
    log = empty.path.with_suffix(".log")
    log.unlink()
    log.mkdir()  # as on a disk that is read-only, it cannot be opened
    with pytest.raises(errors.BrokerError, match=f"{log}, cannot be opened: Is a directory, expected a file"):
        daemon.ensure(empty.uuid, "cpu")


def test_a_broker_starts_where_the_working_directory_was_removed(
    empty: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as for python -c
    assert daemon.ensure(empty.uuid, "cpu") == empty.path
    daemon.stop(empty.path)


def test_a_detached_broker_closes_the_files_of_its_caller(empty: Running) -> None:
    """The pipes of `run` end while the broker runs, and so does one that the command inherits."""
    inherited, writer = os.pipe()
    started = empty.run("broker", "--detach", "--device", "cpu", pass_fds=(writer,))
    os.close(writer)
    pid = broker_pid(empty.path)
    log = empty.path.with_suffix(".log")
    try:
        assert started.returncode == 0, started.stderr
        assert started.stdout == f"the broker of cpu ({empty.uuid}) runs with pid {pid}, its log is {log}\n"
        assert os.read(inherited, 1) == b""
        assert [os.readlink(f"/proc/{pid}/fd/{file}") for file in range(3)] == [os.devnull, str(log), str(log)]
        assert os.getsid(pid) != os.getsid(0) and "serving cpu" in log.read_text()
        assert "has a broker already (pid " in empty.run("broker", "--detach", "--device", "cpu").stderr
        assert empty.client().borrow(MEDIUM)
    finally:
        os.close(inherited)
        stopped = empty.run("broker", "--stop", "--device", "cpu")
    assert (stopped.returncode, stopped.stdout) == (0, f"cpu ({empty.uuid}): stopped the broker with pid {pid}\n")
    assert not discovery.accepts(empty.path) and not discovery.is_locked(empty.path)
    assert "SIGTERM" in log.read_text()


def test_a_broker_whose_files_were_removed_leaves_those_of_the_next_one(broker: Local) -> None:
    for file in broker.directory.iterdir():
        file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSAVER_POOL_DIR", str(broker.directory))
        following = discovery.Listener(broker.uuid)
    broker.stop()
    assert discovery.accepts(broker.path)
    following.close()
    assert not broker.path.exists()
    broker.start()


def test_a_broker_whose_lock_file_was_removed_still_counts(elsewhere: Running) -> None:
    """A cleaner of /tmp may remove it. The broker stays the only one of its device, and can be stopped."""
    elsewhere.path.with_suffix(".lock").unlink()
    for option in ((), ("--detach",)):
        other = elsewhere.run("broker", *option, "--device", "cpu")
        assert other.returncode == 1 and f"has a broker already (pid {elsewhere.pid}, " in other.stderr
    elsewhere.path.with_suffix(".lock").unlink()
    stopped = elsewhere.run("broker", "--stop", "--device", "cpu")
    assert stopped.returncode == 0 and f"stopped the broker with pid {elsewhere.pid}\n" in stopped.stdout
    elsewhere.process.wait(PATIENCE_S)


def test_a_broker_starts_on_a_full_disk(empty: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker cannot write its pid into the lock file, which lies on this disk."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    listener = discovery.Listener(empty.uuid)
    assert discovery.accepts(empty.path) and discovery.is_locked(empty.path)
    with pytest.raises(errors.BrokerError, match=r"has a broker already \(pid \?"):
        discovery.Listener(empty.uuid)
    listener.close()


def test_the_directory_must_be_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    wrong = {
        "open": "written by others", "file": "is no directory; it comes from MEMSAVER_POOL_DIR",
        "link": "is no directory", "no/such": "No such file",
    }  # fmt: skip
    if os.getuid() == 0:
        (tmp_path / "others").mkdir()
        os.chown(tmp_path / "others", 65534, 65534)
        wrong["others"] = "belongs to user 65534"
    for name, text in wrong.items():
        monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{tmp_path}/{name}")
        with pytest.raises(errors.ConfigError, match=text):
            discovery.directory()
    monkeypatch.setenv("MEMSAVER_POOL_DIR", "/tmp/\udcff")
    with pytest.raises(errors.ConfigError, match=r"MEMSAVER_POOL_DIR is '/tmp/\\udcff', expected an absolute path in"):
        discovery.directory()
    monkeypatch.setenv("MEMSAVER_POOL_DIR", "relative")
    with pytest.raises(errors.ConfigError, match="MEMSAVER_POOL_DIR is 'relative', expected an absolute path"):
        discovery.directory()
    monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{tmp_path}/new")
    assert discovery.directory() == tmp_path / "new"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("MEMSAVER_POOL_DIR", f"{tmp_path}/{'long' * 20}")
    with pytest.raises(errors.ConfigError, match="107"):
        discovery.socket_path("GPU-" + "0" * 32)


# The command line


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The status, and the texts of stdout and stderr, of a command in this process."""
    capsys.readouterr()
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = int(str(error.code))
    return code, *capsys.readouterr()


def test_a_broker_that_must_not_start_says_why(
    broker: Local, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, code, *texts in (
        (("--device", "cpu"), 1, "has a broker already (pid "),
        (("--device", "cpu", "--capacity", "900TiB"), 1, "921600.00 GiB", os.environ["MEMSAVER_HOST_DEVICE"]),
        (("--device", "cpu", "--capacity", "1MiB"), 1, "expected 2097152 to "),
        (("--device", "cuda:99"), 1, "memsaver: there is no device 'cuda:99'; the devices are: cpu"),
        (("--capacity", "much"), 2, "much"),
        (("--linger", "-1"), 2, "-1"),
    ):
        found, out, err = command(capsys, "broker", *arguments)
        assert (found, out) == (code, "") and all(text in err for text in texts), err
    monkeypatch.setattr(_core.PhysicalMemory, "under_mps", lambda self: True, raising=True)
    assert "under MPS" in command(capsys, "broker", "--device", "cpu")[2]


def test_top_and_trim_show_and_release_the_memory_of_pools(
    broker: Local, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = broker.client()
    chunks = client.borrow(3 * MEDIUM, MEDIUM)
    for arguments in ((), ("--device", "cpu")):
        [pool] = json.loads(command(capsys, "top", "--json", *arguments)[1])["pools"]
        assert (pool["device"], pool["uuid"], pool["capacity_bytes"]) == ("cpu", broker.uuid, GIB)
        assert [(row["pid"], row["held_bytes"]) for row in pool["clients"]] == [(os.getpid(), 3 * MEDIUM)]
    client.give(chunks)
    given = f"cpu ({broker.uuid}): %.1f MiB given back\n"
    assert command(capsys, "trim", "--keep", "64MiB") == (0, given % 32, "")
    client.drop(*client.hear("drop").words)
    assert command(capsys, "trim", "--device", broker.uuid) == (0, given % 64, "")
    client.drop(*client.hear("drop").words)
    until(lambda: broker.status()["total_bytes"] == 0)
    # The device `cpu` depends on MEMSAVER_HOST_DEVICE of the shell.
    other = SimpleNamespace(uuid=lambda: "HOST-of-another")
    monkeypatch.setattr(_core, "open_host_memory", lambda: other)
    code, _, err = command(capsys, "trim", "--device", "cpu")
    assert code == 1 and "no broker of cpu" in err and "MEMSAVER_HOST_DEVICE" in err
    assert f"running: cpu ({broker.uuid})" in err


def test_a_broker_that_does_not_answer_keeps_no_command_from_the_others(
    broker: Local, capsys: pytest.CaptureFixture[str]
) -> None:
    path = broker.directory / "GPU-of-another.sock"  # before the other one in the order of the paths
    commands = (("top", "--json"), ("top",), ("trim",))

    def end() -> None:
        for _ in range(2 * len(commands)):
            listener.accept()[0].close()

    with protocol.new_socket() as listener:
        listener.bind(str(path))
        listener.listen()
        ends = threading.Thread(target=end, daemon=True)
        ends.start()
        for arguments in commands:
            code, out, err = command(capsys, *arguments)
            assert code == 1 and broker.uuid in out, out
            assert err.startswith(f"memsaver: the broker at {path} ") and len(err.splitlines()) == 1
        ends.join(PATIENCE_S)


def test_top_shows_the_device_and_the_seconds_since_a_pause(broker: Local, capsys: pytest.CaptureFixture[str]) -> None:
    with Worker(broker, f"held = hold('a', {64 * MIB})", "held.region.pause()", "other = hold('b', 4)") as worker:
        until(lambda: any(each["paused_s"] for each in broker.row(worker.pid)["regions"]))
        text = command(capsys, "top")[1]
        assert re.search(r"region a \(paused for [1-9]\d* s\) ", text) and "region b (active) " in text
        [pool] = json.loads(command(capsys, "top", "--json")[1])["pools"]
    used, total = pool["ledger"]["used_bytes"], pool["device_bytes"]
    assert f"  in use on the device: {gib(used)} of {gib(total)}, free {gib(total - used)}\n" in text and used < total


def test_a_broker_of_another_version_is_stopped(
    elsewhere: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSAVER_POOL_DIR", str(elsewhere.directory))
    other = protocol.VERSION + 1
    monkeypatch.setattr(caller, "Message", lambda kind, words, *more: Message(kind, (other, *words[1:]), *more))
    assert f"version {other}" in command(capsys, "top")[2]
    out = f"{elsewhere.uuid}: stopped the broker with pid {elsewhere.process.pid}\n"
    assert command(capsys, "broker", "--stop") == (0, out, "")
    elsewhere.process.wait(PATIENCE_S)
    assert not discovery.is_locked(elsewhere.path)


def test_commands_without_a_broker(empty: Running) -> None:
    done = empty.run("broker", "--stop")
    assert done.returncode == 1 and "no broker" in done.stderr
    table = r"^ +pid  process +memory +bytes$"
    assert not re.search(table, empty.run("top").stdout, re.MULTILINE)
    with Worker(empty, f"held = hold('a', {64 * MIB})", MEMSAVER_POOL="process") as worker:
        pid = worker.pid
        text = empty.run("top", "--device", "cpu").stdout
        assert "no broker of a shared pool runs" in text and "without a shared pool" in text
        assert re.search(table, text, re.MULTILINE)
        rows = [line.split() for line in text.splitlines()]
        assert [row for row in rows if row[:1] == [str(pid)] and row[-2:] == ["64.0", "MiB"]], text
        found = json.loads(empty.run("top", "--json").stdout)
    assert found["pools"] == []
    [device] = found["devices"]
    assert [(row["pid"], row["bytes"]) for row in device["ledger"]["rows"] if row["pid"]] == [(pid, 64 * MIB)]


def test_memory_that_the_driver_keeps_is_shown_as_such(
    broker: Local, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []
    monkeypatch.setattr(broker.loop._server.monitor, "_compute_pids", lambda: listed)
    with Fork({}, "tests.broker_support") as peer:
        peer.run(f"client = Client({str(broker.path)!r})")
        peer.run(f"chunks = client.borrow({GIB})")
        listed += [1, peer.pid]
        other = broker.client()
        other.want(GIB)
        other.hear("stalled")
        peer.kill()
    until(lambda: broker.row(peer.pid)["exited"])
    assert other.look() == (0, GIB)
    assert "has exited; its memory is kept by the driver" in command(capsys, "top")[1]
    listed.clear()
    other.take(GIB)


# Names of processes


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
        (["/usr/bin/python3.11", "-u", "-O", "train.py"], "train.py"),
        (["python3", "-W", "ignore", "train.py"], "sleep"),
        (["python", "-m", "examples.x", "secret"], "examples.x"),
        (["python", "-um", "examples.x"], "examples.x"),
        (["python", "a/folder/"], "folder"),
        (["python", "-c", "password = 'secret'"], "sleep"),
        (["python", "-Ic", "password = 'secret'"], "sleep"),
        (["python", "-", "secret"], "sleep"),
        (["python"], "sleep"),
        (["serve", "train.py"], "sleep"),
        (["python", "\udcff" + 200 * "x"], "?" + 99 * "x"),
        (["python", "two\nlines \x1b[31m"], "two?lines ?[31m"),
    ],
)
def test_name_of_python_process_is_its_script_or_module(arguments: list[str], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil.Process, "cmdline", lambda self: arguments)
        patch.setattr(process_names, "_program", lambda pid: "sleep")
        assert process_names.process_name(os.getpid()) == name
