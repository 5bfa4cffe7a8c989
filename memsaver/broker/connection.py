"""The broker's end of a socket. No call blocks: packets that the socket does not take are kept and sent later."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memsaver.broker import protocol
from memsaver.broker.protocol import Message

if TYPE_CHECKING:
    from memsaver.broker.clients import Client
    from memsaver.broker.monitor import Process

_UNREAD_BYTES = 64 << 20  # kept for a client that does not read, until it is disconnected
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """A connected socket, its peer, and its unsent packets."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.channel = channel
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, _, _ = _CREDENTIALS.unpack(credentials)
        self.client: Client | None = None  # None: no `hello` yet, or its session has ended
        self.process: Process  # of the peer, set when the server accepts it
        self.is_ended = False  # the server closes it in this turn of the loop, and reads no more messages
        self.is_lost = False  # no more packets can be sent
        self._unsent: deque[tuple[bytes, list[int]]] = deque()  # with descriptors that this object owns
        self._unsent_bytes = 0

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) and not self.is_lost

    def receive(self) -> Message | None:
        """The next message: see protocol.receive(). Raises BlockingIOError if there is none now."""
        return protocol.receive(self.channel)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Sends a message now or later, with copies of ``files``. No error if the peer has closed its end."""
        packet = message.encode()
        if self.is_lost or (not self._unsent and self._try(packet, files)):
            return
        self._unsent_bytes += len(packet)
        # Copies, since a chunk's descriptor may be closed, and its number reused, before the packet is sent.
        copies: list[int] = []
        self._unsent.append((packet, copies))
        try:
            copies.extend(map(os.dup, files))
        except OSError:
            self.shut_down()
        if self._unsent_bytes > _UNREAD_BYTES:
            self.shut_down()

    def flush(self) -> None:
        while self._unsent and not self.is_lost:
            packet, files = self._unsent[0]
            if not self._try(packet, files):
                return
            self._unsent.popleft()
            self._unsent_bytes -= len(packet)
            _close(files)

    def refuse(self, code: str, text: str) -> None:
        """Sends a refusal, if the socket takes it now, and shuts the socket down so that the peer can still read it."""
        if not self._unsent and not self.is_lost:
            self._try(protocol.refusal(code, 0, text).encode(), ())
        with contextlib.suppress(OSError):
            # If unread packets were left at close(), the peer would get a reset before it could read the refusal.
            self.channel.shutdown(socket.SHUT_RDWR)
            while self.channel.recv(1):
                pass

    def shut_down(self) -> None:
        """Shuts the socket of a peer that does not read down. The peer may reconnect."""
        self.is_lost = True
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_lost = True
        while self._unsent:
            _close(self._unsent.popleft()[1])
        self.channel.close()

    def _try(self, packet: bytes, files: Sequence[int]) -> bool:
        try:
            protocol.send(self.channel, packet, files)
        except OSError as error:
            # ETOOMANYREFS: too many sent descriptors have not been read.
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS):
                return False
            self.is_lost = True
        return True


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())
