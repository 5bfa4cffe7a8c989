"""Brokers and clients of different versions of the protocol."""

from __future__ import annotations

import os
import struct
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memsaver import BrokerError
from memsaver.broker import protocol
from memsaver.broker.admin import AdminClient
from memsaver.broker.protocol import Message
from tests.broker_support import Client, Running, granted
from tests.pool_support import Worker
from tests.support import GIB, PAGE, until

V = protocol.VERSION
UNKNOWN_KIND, UNKNOWN_FIELD = 60_000, 60_001


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running() as running:
        yield running
        assert running.process.poll() is None, "the broker did not survive"


# A broker whose version differs. If it is newer, it adds an unknown field to each message, and sends a message of an
# unknown kind after each welcome. If it is older, its protocol has no `status` and no `trim`.
OTHER_VERSION = """
import os, sys
from pathlib import Path
from memsaver import _core
CHANGE = {change}
_core.PROTOCOL_VERSION += CHANGE
if CHANGE > 0:
    _core.MESSAGES["added"] = {kind}
    _core.FIELDS["added"] = {field}
if CHANGE < 0:
    del _core.MESSAGES["status"], _core.MESSAGES["trim"]
from memsaver.broker import connection, protocol, sessions
send, refused = connection.Connection.send, sessions.Sessions._refused

def send_more(self, message, files=()):
    if CHANGE > 0:
        message.fields = {{**message.fields, "added": 1}}
    send(self, message, files)
    if CHANGE > 0 and message.kind == "welcome":
        send(self, protocol.Message("added", (5, 6), "text"), [0])

def record(self, client, message):
    refused(self, client, message)
    with open(Path(os.environ["MEMSAVER_POOL_DIR"], "refused"), "a") as file:
        print(client.pid, message.words[1], message.text, file=file)

connection.Connection.send, sessions.Sessions._refused = send_more, record
from memsaver import cli
sys.exit(cli.main())
"""


@contextmanager
def running(change: int) -> Iterator[Running]:
    """A broker of which the version differs by ``change``."""
    with Running() as broker:
        broker.kill()
        program = textwrap.dedent(OTHER_VERSION).format(change=change, kind=UNKNOWN_KIND, field=UNKNOWN_FIELD)
        broker.program = ["-c", program]
        broker.start()
        yield broker
        assert broker.process.poll() is None, "the broker did not survive"


def with_unknown_field(message: Message) -> bytes:
    """The packet of a message that has an optional field more than this version defines."""
    text = message.text.encode()
    head, words = struct.unpack_from("<III", message.encode()), message.encode()[12:]
    body, text = words[: len(words) - len(text)], text
    return struct.pack("<III", head[0], head[1], head[2] + 1) + body + struct.pack("<QQ", UNKNOWN_FIELD, 7) + text


# Clients of other versions, and a broker of this one


def test_client_of_previous_version_is_served(broker: Running) -> None:
    client = Client(broker.path, version=V - 1)
    broker.clients.append(client)
    assert client.welcome.words[0] == V - 1
    assert client.welcome.fields == {"newest": V}
    client.give(client.borrow(GIB))


def test_client_of_next_version_is_served(broker: Running) -> None:
    client = Client(broker.path, version=V + 1, oldest=V)
    broker.clients.append(client)
    assert client.welcome.words[0] == V
    client.give(client.borrow(GIB))


def test_unknown_field_is_ignored(broker: Running) -> None:
    client = Client(broker.path, version=V + 1, bring=False)
    broker.clients.append(client)
    client.say_raw(with_unknown_field(Message("inventory")))
    client.say_raw(with_unknown_field(Message("demand", (1, PAGE, PAGE, PAGE))))
    [(chunk, size, _)] = granted(client.hear("grant"))
    assert size == PAGE
    client.say_raw(with_unknown_field(Message("report", (5, 4, 3, 2, 1), "kv cache")))
    client.say_raw(with_unknown_field(Message("give_back", (chunk,))))
    assert client.look()[2] == {}
    assert [region["tag"] for region in broker.row(os.getpid())["regions"]] == ["kv cache"]


def test_unknown_message_of_newer_client_is_refused_and_client_stays_connected(broker: Running) -> None:
    client = Client(broker.path, version=V + 1)
    broker.clients.append(client)
    client.look()  # the broker has read the messages before
    before = broker.descriptors()
    client.say_raw(struct.pack("<IIIQQQQ", UNKNOWN_KIND, 2, 1, 77, 1, UNKNOWN_FIELD, 7) + b"text", (0, 0))
    code, request, text = client.refusal()
    assert (code, request) == ("unsupported", 77)
    assert f"version {V} " in text and str(UNKNOWN_KIND) in text
    client.give(client.borrow(PAGE, PAGE))
    until(lambda: broker.descriptors() == before + 1)  # of the chunk


@pytest.mark.parametrize("version", [V - 1, V])
def test_unknown_message_of_client_that_is_not_newer_is_malformed(broker: Running, version: int) -> None:
    client = Client(broker.path, version=version)
    broker.clients.append(client)
    client.say_raw(struct.pack("<III", UNKNOWN_KIND, 0, 0))
    assert client.is_refused()[0] == "malformed"


@pytest.mark.parametrize(
    ("version", "oldest", "upgraded"),
    [
        (V - 2, None, "client"),
        (V + 2, None, "broker"),
        (V + 2, V, "broker"),
        (V + 1, V + 1, "broker"),
        (0, 0, "client"),
    ],
)
def test_client_without_common_version_is_refused(
    broker: Running, version: int, oldest: int | None, upgraded: str
) -> None:
    with pytest.raises(AssertionError) as error:
        Client(broker.path, version=version, oldest=oldest)
    text = str(error.value)
    assert f"words=({protocol.REFUSALS['version']}, 0)" in text
    assert f"version {V} " in text and f"version {version}" in text and f"upgrade memsaver in the {upgraded}" in text
    broker.client().look()


# Brokers of other versions, and clients of this one


@pytest.mark.parametrize("change", [-1, 1])
def test_process_uses_broker_of_adjacent_version(change: int) -> None:
    with running(change) as broker, Worker(broker, f"held = hold('a', {PAGE}, 'host', 1)") as worker:
        worker.run("memsaver.pause(); memsaver.resume(memory_timeout=60); held.check()")
        assert worker.run("print(_core.pool_figures('cpu')[1])") == f"[({worker.pid}, {PAGE})]"
        if change > 0:
            refused = broker.directory / "refused"
            until(refused.exists)
            kind = f"version {V} of the protocol has no message of kind {UNKNOWN_KIND}"
            assert refused.read_text() == f"{worker.pid} 5 {kind}\n"


def test_call_that_older_broker_does_not_define_raises_and_process_stays_connected() -> None:
    with running(-1) as broker, Worker(broker, f"held = hold('a', {PAGE}, 'host', 1)") as worker:
        text = worker.fails("own_status()")
        assert text.startswith("BrokerError: ") and f"version {V - 1} " in text
        worker.run("memsaver.pause(); memsaver.resume(); held.check()")


def test_ledger_is_not_sent_to_older_broker() -> None:
    program = textwrap.dedent(OTHER_VERSION).format(change=-1, kind=UNKNOWN_KIND, field=UNKNOWN_FIELD)
    program = program.replace(
        'del _core.MESSAGES["status"], _core.MESSAGES["trim"]', 'del _core.MESSAGES["ledger"], _core.FIELDS["ledger"]'
    )
    record = """
handle = sessions.Sessions.handle
def note(self, connection, message):
    if not message.is_defined:
        Path(os.environ["MEMSAVER_POOL_DIR"], "unknown").write_text(message.kind)
    return handle(self, connection, message)
sessions.Sessions.handle = note
from memsaver import cli
"""
    program = program.replace("from memsaver import cli\n", record)
    with Running() as broker:
        broker.kill()
        broker.program = ["-c", program]
        broker.start()
        with Worker(broker, f"held = hold('a', {PAGE}, 'host', 1)") as worker:
            until(lambda: [each["tag"] for each in broker.row(worker.pid)["regions"]] == ["a"])
            assert broker.row(worker.pid)["ledger"] is None
            worker.run("memsaver.pause(); memsaver.resume(memory_timeout=60); held.check()")
            assert broker.row(worker.pid)["held_bytes"] == PAGE
            assert not (broker.directory / "unknown").exists()
        assert broker.process.poll() is None


@pytest.mark.parametrize(("change", "upgraded"), [(-2, "broker"), (2, "client")])
def test_process_is_refused_by_broker_without_common_version(change: int, upgraded: str) -> None:
    with running(change) as broker:
        program = "import memsaver; memsaver.configure(pool='shared'); memsaver.region('r', device='cpu')"
        broker.program = ["-c", program]
        done = broker.run()
        last = done.stderr.splitlines()[-1]
        assert last.startswith("memsaver.errors.BrokerError: ")
        assert f"version {V + change} " in last and f"version {V}" in last
        assert f"upgrade memsaver in the {upgraded}" in last


def test_admin_client_uses_newer_broker() -> None:
    with running(1) as broker:
        with AdminClient(broker.path) as admin:
            assert admin.status()["capacity_bytes"] == GIB
            assert admin.release_idle() == 0
        refused = broker.directory / "refused"
        until(refused.exists)
        assert refused.read_text().startswith(f"{os.getpid()} 5 version {V} ")


def test_admin_client_reports_call_that_older_broker_does_not_define() -> None:
    with running(-1) as broker, AdminClient(broker.path) as admin:
        with pytest.raises(BrokerError, match=f"refuses: version {V - 1} of the protocol has no message"):
            admin.status()


@pytest.mark.parametrize("change", [-2, 2])
def test_admin_client_is_refused_without_common_version(change: int) -> None:
    with running(change) as broker, pytest.raises(BrokerError, match=f"version {V + change} .* version {V}"):
        AdminClient(broker.path)
