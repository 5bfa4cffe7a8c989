"""The broker's end of one client's socket. Nothing here waits for the client: what its socket does not take is kept."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

from memsaver import protocol
from memsaver.protocol import Message

_UNREAD_BYTES = 64 << 20  # kept for a client that reads nothing, before it is given up
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """A connected socket, its peer, and what is still to be sent."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.channel = channel
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(credentials)
        self.lost = False  # nothing more can be sent
        self._unsent: deque[tuple[bytes, list[int]]] = deque()  # with descriptors of our own
        self._unsent_bytes = 0

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) and not self.lost

    def receive(self) -> Message | None:
        """See protocol.receive(); raises BlockingIOError where there is nothing now."""
        return protocol.receive(self.channel)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Sends, now or later, with copies of ``files``. A client that is gone gets nothing, which is no error."""
        packet = message.encode()
        if self.lost or (not self._unsent and self._try(packet, files)):
            return
        self._unsent_bytes += len(packet)
        # The chunk may be gone, and its number another file's, when the packet leaves: so these are copies.
        copies: list[int] = []
        self._unsent.append((packet, copies))
        try:
            copies.extend(map(os.dup, files))
        except OSError:
            self.give_up()
        if self._unsent_bytes > _UNREAD_BYTES:
            self.give_up()

    def flush(self) -> None:
        while self._unsent and not self.lost:
            packet, files = self._unsent[0]
            if not self._try(packet, files):
                return
            self._unsent.popleft()
            self._unsent_bytes -= len(packet)
            _close(files)

    def refuse(self, code: str, text: str) -> None:
        """Says why, if the client listens, and lets it read that before it meets a closed socket."""
        if not self._unsent and not self.lost:
            self._try(protocol.refusal(code, 0, text).encode(), ())
        with contextlib.suppress(OSError):
            # Closing with packets unread would make the client see a reset before our last words.
            self.channel.shutdown(socket.SHUT_RDWR)
            while self.channel.recv(1):
                pass

    def give_up(self) -> None:
        """The client does not read. It sees a hang-up, and may come again."""
        self.lost = True
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.lost = True
        while self._unsent:
            _close(self._unsent.popleft()[1])
        self.channel.close()

    def _try(self, packet: bytes, files: Sequence[int]) -> bool:
        try:
            protocol.send(self.channel, packet, files)
        except OSError as error:
            # ETOOMANYREFS: too many descriptors are on their way to clients that have not read them.
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS):
                return False
            self.lost = True
        return True


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())
