"""Messages between broker and clients as packets of a Unix socket. csrc/wire.h says what each of them means."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from memsaver import _core

KINDS: dict[str, int] = _core.MESSAGES
REFUSALS: dict[str, int] = _core.REFUSALS
VERSION: int = _core.PROTOCOL_VERSION
LONGEST_PACKET: int = _core.LONGEST_PACKET
MOST_DESCRIPTORS: int = _core.MOST_DESCRIPTORS
MOST_CHUNKS: int = _core.MOST_CHUNKS
HAS_DESCRIPTOR: int = _core.HAS_DESCRIPTOR
SCRUB: int = _core.SCRUB
STATES: tuple[str, ...] = _core.STATES  # as reports number them
BACKUPS: tuple[str, ...] = _core.BACKUPS

_NAMES = {number: name for name, number in KINDS.items()}
_REFUSAL_NAMES = {number: name for name, number in REFUSALS.items()}
_HEAD = struct.Struct("<II")
_WORD_BYTES = 8
_KERNEL_MOST_DESCRIPTORS = 253
_ANCILLARY_BYTES = socket.CMSG_SPACE(_KERNEL_MOST_DESCRIPTORS * array.array("i").itemsize)

# Words of each message of a client: how many come first, how many a group has, and how many groups at least.
_SHAPES = {
    "hello": (2, 0, 0), "want": (1, 3, 1), "more": (1, 3, 1), "close": (1, 0, 0), "give": (0, 1, 0),
    "dropped": (0, 1, 0), "bring": (0, 2, 0), "owed": (2, 1, 0), "scrub": (1, 0, 0), "look": (1, 0, 0),
    "status": (1, 0, 0), "report": (0, 5, 0), "attach": (4, 0, 0), "leased": (3, 3, 0), "detach": (1, 0, 0),
    "trim": (2, 0, 0), "holds": (0, 1, 0),
}  # fmt: skip
_WITH_TEXT = {"hello", "report", "attach", "leased"}


class MalformedError(Exception):
    """A packet that is no message, or a message that cannot be meant. The text says what was expected."""


class ExhaustedError(Exception):
    """The kernel kept descriptors of a packet back, because this process has no free ones."""


@dataclass(slots=True)
class Message:
    """One message. Whoever receives it closes its files, or takes them out of the list."""

    kind: str
    words: Sequence[int] = ()
    text: str = ""
    files: list[int] = field(default_factory=list)

    def encode(self) -> bytes:
        words = self.words
        return struct.pack(f"<II{len(words)}Q", KINDS[self.kind], len(words), *words) + self.text.encode()

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())


def check_shape(message: Message) -> None:
    """Raises MalformedError where a client's message has other words than its kind says. What they mean is not seen."""
    kind, count = message.kind, len(message.words)
    first, group, least = _SHAPES[kind]
    groups, rest = divmod(count - first, group) if group else (0, count - first)
    if rest or groups < least:
        expected = f"{first} words" + (f" and {least} or more groups of {group}" if group else "")
        raise MalformedError(f"{kind!r} has {count} words, expected {expected}")
    if message.text and kind not in _WITH_TEXT:
        raise MalformedError(f"{kind!r} has {len(message.text)} characters of text, expected none")
    if message.files and kind != "bring":
        raise MalformedError(f"{kind!r} has {len(message.files)} descriptors, expected none")


def refusal(code: str, request: int, text: str) -> Message:
    room = LONGEST_PACKET - _HEAD.size - 2 * _WORD_BYTES
    return Message("refused", (REFUSALS[code], request), text.encode()[:room].decode(errors="ignore"))


def refusal_name(code: int) -> str:
    return _REFUSAL_NAMES.get(code, str(code))


def send(channel: socket.socket, packet: bytes, files: Sequence[int] = ()) -> None:
    """Sends one packet, with descriptors beside it; all of it or an OSError."""
    if files:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        channel.sendmsg([packet], [rights], socket.MSG_NOSIGNAL)
    else:
        channel.send(packet, socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> Message | None:
    """The next message, or None where the other side has hung up (an empty packet reads the same).

    Raises MalformedError and ExhaustedError, and what recvmsg() raises; no descriptor is left open then.
    """
    packet, ancillary, flags, _ = channel.recvmsg(LONGEST_PACKET, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    try:
        if flags & socket.MSG_CTRUNC:  # there was room for as many as the kernel allows in one packet
            raise ExhaustedError("there is no free descriptor to receive another")
        if flags & socket.MSG_TRUNC:
            raise MalformedError(f"a packet is longer than {LONGEST_PACKET} bytes")
        message = _decode(packet) if packet else None
    except BaseException:
        _close(files)
        raise
    if message is None:
        _close(files)
    else:
        message.files = list(files)
    return message


def _close(files: array.array[int]) -> None:
    for file in files:
        os.close(file)


def _decode(packet: bytes) -> Message:
    if len(packet) < _HEAD.size:
        raise MalformedError(f"a packet has {len(packet)} bytes, expected at least {_HEAD.size}")
    number, count = _HEAD.unpack_from(packet)
    kind = _NAMES.get(number)
    if kind is None:
        raise MalformedError(f"there is no message of kind {number}")
    text_at = _HEAD.size + count * _WORD_BYTES
    if text_at > len(packet):
        raise MalformedError(f"{kind!r} announces {count} words in a packet of {len(packet)} bytes")
    try:
        text = packet[text_at:].decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"the text of {kind!r} is not UTF-8: {error}") from None
    return Message(kind, struct.unpack_from(f"<{count}Q", packet, _HEAD.size), text)
