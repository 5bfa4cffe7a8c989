"""The messages between the owner of a storage and its receivers: JSON in packets of a Unix socket, with descriptors.

    receiver -> owner
    hello     version. Descriptors: those by which the owner detects that the receiver has exited
              (csrc/pool/sentinel.h). Answer: an empty message
    receive   claim: a random number of the receiver, and token, tag, backup, residence, and ``ready``: whether the
              receiver waits for the owner's work by itself. Answer: ``first``, ``span`` and ``count`` of the chunks
    chunks    claim, at. Answer: slots, and a descriptor for each
    release   claim. Without an answer. Also for a claim that was refused

An answer repeats the ``serial`` of its message: a receiver that has stopped waiting skips it later. It may be
``error``, ``text`` and ``fields`` instead: an error of memsaver. Claims belong to the process, so they outlive a
connection.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

from memsaver import errors

VERSION: Final = 1
_LONGEST = 1 << 16
_MOST_FILES = 253
_CREDENTIALS = struct.Struct("3i")

Message = dict[str, Any]


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def bound_name(address: str) -> str:
    """The name in the system's abstract namespace, which leaves no file behind."""
    return f"\0{address}"


def send(channel: socket.socket, message: Message, files: Sequence[int] = ()) -> None:
    socket.send_fds(channel, [json.dumps(message).encode()], files, socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and its descriptors, which the caller closes. None: the peer has closed its end.

    Raises ValueError for a malformed message, and OSError. No descriptor is left open then.
    """
    packet, files, flags, _ = socket.recv_fds(channel, _LONGEST, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ValueError("a message was cut off: a descriptor limit, or more than 64 KiB")
        if not packet:
            return None, files
        message = json.loads(packet)
        if not isinstance(message, dict):
            raise ValueError(f"a message is {message!r}, expected an object")
        return message, files
    except BaseException:
        close(files)
        raise


def close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def peer(channel: socket.socket) -> tuple[int, int]:
    """The pid and the user of the process at the other end. The pid is 0 if it is in another pid namespace."""
    pid, user, _ = _CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def from_error(error: errors.Error) -> Message:
    return {"error": type(error).__name__, "text": str(error), "fields": error.__dict__}


def to_error(message: Message) -> errors.Error:
    kind = getattr(errors, str(message["error"]), errors.Error)
    if not (isinstance(kind, type) and issubclass(kind, errors.Error)):
        kind = errors.Error
    return kind(str(message["text"]), **message["fields"])
