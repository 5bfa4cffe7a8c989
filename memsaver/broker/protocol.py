"""Messages between brokers and clients, and between the owners and receivers of sent tensors: csrc/pool/wire.h."""

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
FOREIGN: int = _core.FOREIGN

_NAMES = {number: name for name, number in KINDS.items()}
_REFUSAL_NAMES = {number: name for name, number in REFUSALS.items()}
_HEAD = struct.Struct("<II")
_WORD_BYTES = 8
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_KERNEL_MOST_DESCRIPTORS = 253
_ANCILLARY_BYTES = socket.CMSG_SPACE(_KERNEL_MOST_DESCRIPTORS * array.array("i").itemsize)

# Words of each message of a client: fixed words, words of a group, and the least number of groups.
_SHAPES = {
    "hello": (3, 0, 0), "inventory": (0, 2, 0), "demand": (1, 3, 1), "exchange": (1, 3, 1),
    "close": (1, 0, 0), "give_back": (0, 2, 0), "dropped": (0, 1, 0), "usage": (1, 0, 0), "status": (1, 0, 0),
    "report": (0, 0, 0), "trim": (2, 0, 0), "reclaimed": (2, 0, 0), "offers": (1, 0, 0), "descriptors": (1, 1, 1),
    "receive": (3, 0, 0), "chunks": (3, 0, 0), "release": (1, 0, 0),
}  # fmt: skip
_WITH_TEXT = {"hello", "report", "reclaimed", "receive"}


class RefusedError(Exception):
    """A message or a connection that the server refuses. ``code``: a key of ``REFUSALS``."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class MalformedError(RefusedError):
    """A packet that is not a message, or a message with impossible contents. The text names the expectation."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "malformed")


@dataclass(slots=True)
class Message:
    """One message. Its receiver closes the files, or takes them out of the list."""

    kind: str  # a key of KINDS; of a received message also "kind NUMBER"
    words: Sequence[int] = ()
    text: str = ""
    files: list[int] = field(default_factory=list)

    def encode(self) -> bytes:
        head = _HEAD.pack(KINDS[self.kind], len(self.words))
        return head + struct.pack(f"<{len(self.words)}Q", *self.words) + self.text.encode()

    def close(self) -> None:
        close(self.files)


def close(files: list[int]) -> None:
    """Closes descriptors, and empties the list."""
    while files:
        os.close(files.pop())


def check_shape(message: Message) -> None:
    """Raises MalformedError if the words, text or files of a client's message do not fit its kind."""
    kind, count = message.kind, len(message.words)
    if kind not in _SHAPES:
        raise MalformedError(f"{kind!r} is not a message that a client sends")
    first, group, least = _SHAPES[kind]
    groups, rest = divmod(count - first, group) if group else (0, count - first)
    if rest or groups < least:
        expected = f"{first} words" + (f" and {least} or more groups of {group}" if group else "")
        raise MalformedError(f"{kind!r} has {count} words, expected {expected}")
    if message.text and kind not in _WITH_TEXT:
        raise MalformedError(f"{kind!r} has {len(message.text)} characters of text, expected none")
    most = int(kind == "hello")
    if len(message.files) > most:
        raise MalformedError(f"{kind!r} has {len(message.files)} descriptors, expected {most} at most")


def refusal(code: str, request: int, text: str) -> Message:
    room = LONGEST_PACKET - _HEAD.size - 2 * _WORD_BYTES
    return Message("refused", (REFUSALS[code], request), text.encode()[:room].decode(errors="ignore"))


def refusal_name(code: int) -> str:
    return _REFUSAL_NAMES.get(code, str(code))


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def peer(channel: socket.socket) -> tuple[int, int]:
    """The pid and the user of the process at the other end. The pid is 0 if it is in another pid namespace."""
    pid, user, _ = _CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def send(channel: socket.socket, packet: bytes, files: Sequence[int] = ()) -> None:
    """Sends one packet with descriptors. Sends all of it or raises OSError."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    channel.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> Message | None:
    """Receives the next message. None: the peer has closed its end (an empty packet reads the same).

    Raises RefusedError, and the errors of recvmsg(). No descriptor is left open then.
    """
    packet, ancillary, flags, _ = channel.recvmsg(LONGEST_PACKET, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    message = None
    try:
        if flags & socket.MSG_CTRUNC:  # not for lack of room: _ANCILLARY_BYTES holds the most that the kernel allows
            raise RefusedError("there is no free descriptor to receive another", "exhausted")
        if flags & socket.MSG_TRUNC:
            raise MalformedError(f"a packet is longer than {LONGEST_PACKET} bytes")
        message = _decode(packet) if packet else None
    finally:
        if message is None:
            close(list(files))
    if message is not None:
        message.files = list(files)
    return message


def _decode(packet: bytes) -> Message:
    if len(packet) < _HEAD.size:
        raise MalformedError(f"a packet has {len(packet)} bytes, expected at least {_HEAD.size}")
    number, count = _HEAD.unpack_from(packet)
    kind = _NAMES.get(number, f"kind {number}")
    text_at = _HEAD.size + count * _WORD_BYTES
    if text_at > len(packet):
        raise MalformedError(f"{kind!r} announces {count} words in a packet of {len(packet)} bytes")
    try:
        text = packet[text_at:].decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"the text of {kind!r} is not UTF-8: {error}") from None
    return Message(kind, struct.unpack_from(f"<{count}Q", packet, _HEAD.size), text)
