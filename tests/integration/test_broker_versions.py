"""Brokers and clients of different versions of the protocol."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from memsaver import BrokerError
from memsaver.broker import protocol
from memsaver.broker.admin import AdminClient
from memsaver.broker.protocol import Message
from tests.broker_support import Client, Running, granted
from tests.support import PAGE

V = protocol.VERSION
UNKNOWN_KIND, UNKNOWN_FIELD = 60_000, 60_001


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running() as running:
        yield running
        assert running.process.poll() is None, "the broker did not survive"


def with_unknown_field(message: Message) -> bytes:
    """The packet of a message that has an optional field more than this version defines."""
    text = message.text.encode()
    head, words = struct.unpack_from("<III", message.encode()), message.encode()[12:]
    body, text = words[: len(words) - len(text)], text
    return struct.pack("<III", head[0], head[1], head[2] + 1) + body + struct.pack("<QQ", UNKNOWN_FIELD, 7) + text


def test_unknown_field_is_ignored(broker: Running) -> None:
    client = Client(broker.path, bring=False)
    broker.clients.append(client)
    client.say_raw(with_unknown_field(Message("inventory")))
    client.say_raw(with_unknown_field(Message("demand", (1, PAGE, PAGE, PAGE))))
    [(chunk, size, _)] = granted(client.hear("grant"))
    assert size == PAGE
    client.say_raw(with_unknown_field(Message("report", (5, 4, 3, 2, 1), "kv cache")))
    client.say_raw(with_unknown_field(Message("give_back", (chunk, 0))))
    assert client.look()[2] == {}
    assert [region["tag"] for region in broker.row(os.getpid())["regions"]] == ["kv cache"]


def test_unknown_message_is_malformed(broker: Running) -> None:
    client = Client(broker.path)
    broker.clients.append(client)
    client.say_raw(struct.pack("<III", UNKNOWN_KIND, 0, 0))
    assert client.is_refused()[0] == "malformed"


@pytest.mark.parametrize(("version", "upgraded"), [(V - 1, "client"), (V + 1, "broker"), (0, "client")])
def test_client_of_another_version_is_refused(broker: Running, version: int, upgraded: str) -> None:
    with pytest.raises(AssertionError) as error:
        Client(broker.path, version=version)
    text = str(error.value)
    assert f"words=({protocol.REFUSALS['version']}, 0)" in text
    assert f"version {V} " in text and f"version {version}" in text and f"upgrade memsaver in the {upgraded}" in text
    broker.client().look()


@pytest.mark.parametrize("version", [V - 1, V + 1])
def test_admin_client_of_another_version_is_refused(
    broker: Running, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(protocol, "VERSION", version)
    with pytest.raises(BrokerError, match=f"version {V} .* version {version}"):
        AdminClient(broker.path)
