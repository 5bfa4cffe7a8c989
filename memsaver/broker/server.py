"""A server on a Unix socket, for processes that it watches: of a broker, or of the owner of sent tensors.

One thread calls ``turn()``. No call blocks on a client: packets that a socket does not take are kept and sent later.
The exit of a client is detected by a pidfd and not by its socket, which may be closed late (a forked child has a copy)
or early (the client reconnects).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from memsaver.broker import protocol
from memsaver.broker.monitor import Process, ProcessMonitor
from memsaver.broker.protocol import MalformedError, Message, RefusedError

log = logging.getLogger("memsaver")

_UNREAD_BYTES = 64 << 20  # kept for a client that does not read, until it is disconnected
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
# ETOOMANYREFS: too many sent descriptors have not been read.
_LATER = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
_PID_NAMESPACE = (
    "this process is in another pid namespace than process {}, which cannot watch it: run both in one, or give each a "
    "job of its own (MEMSAVER_JOB)"
)


class Connection:
    """A connected socket, its peer, and its unsent packets."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.channel = channel
        self.pid, self.user = protocol.peer(channel)
        self.process: Process  # of the peer, set when the server accepts it
        self.session: Any = None  # of the service, set at `hello`
        self.is_ended = False  # the server closes it in this turn, and reads no more messages
        self.watch_writes: Callable[[bool], None] = lambda wanted: None  # set when the server accepts it
        self._is_lost = False  # no more packets can be sent
        self._unsent: deque[tuple[bytes, list[int]]] = deque()  # with descriptors that this object owns
        self._unsent_bytes = 0

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Sends a message now or later, with copies of ``files``. No error if the peer has closed its end."""
        packet = message.encode()
        if self._is_lost or (not self._unsent and self._try(packet, files)):
            return
        if not self._unsent:
            self.watch_writes(True)
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
        while self._unsent and self._try(*self._unsent[0]):
            packet, files = self._unsent.popleft()
            self._unsent_bytes -= len(packet)
            protocol.close(files)
        if not self._unsent:
            self.watch_writes(False)

    def refuse(self, code: str, text: str) -> None:
        """Sends a refusal, if the socket takes it now, and shuts the socket down so that the peer can still read it."""
        if not self._unsent and not self._is_lost:
            self._try(protocol.refusal(code, 0, text).encode(), ())
        with contextlib.suppress(OSError):
            # If unread packets were left at close(), the peer would get a reset before it could read the refusal.
            self.channel.shutdown(socket.SHUT_RDWR)
            while self.channel.recv(1):
                pass

    def shut_down(self) -> None:
        """Shuts the socket of a peer that does not read down. The peer may reconnect."""
        self._is_lost = True
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_lost = True
        while self._unsent:
            protocol.close(self._unsent.popleft()[1])
        self.channel.close()

    def _try(self, packet: bytes, files: Sequence[int]) -> bool:
        try:
            protocol.send(self.channel, packet, files)
        except OSError as error:
            if error.errno in _LATER:
                return False
            self._is_lost = True
        return True


class Service(Protocol):
    """The user of a server. ``begin()`` and ``handle()`` raise RefusedError, upon which the connection is closed."""

    def begin(self, connection: Connection, number: int, subject: str) -> int:
        """Begins the session of a client, at its ``hello``. Returns the second word of ``welcome``."""

    def handle(self, connection: Connection, message: Message) -> None: ...
    def end(self, connection: Connection) -> None:
        """The connection is closed. It has no session if it was closed before its ``hello``."""

    def exited(self, process: Process) -> None:
        """A process has exited, and its connections are closed. Its kernels may still run."""

    def gone(self, process: Process) -> None:
        """Nothing of an exited process can run any more."""


class Server:
    """The connections of a listening socket. ``compute_pids``: returns the pids that the driver lists now."""

    def __init__(self, listener: socket.socket, service: Service, compute_pids: Callable[[], Iterable[int]]) -> None:
        self.connections: dict[Connection, None] = {}  # in the order in which they were accepted
        self._listener = listener
        self._service = service
        self._selector = selectors.DefaultSelector()
        self.monitor = ProcessMonitor(self._selector, compute_pids)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # closed to accept one when descriptors run out
        self._wakes, self.waker = socket.socketpair()
        for channel in (listener, self._wakes, self.waker):
            channel.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept())
        self._selector.register(self._wakes, selectors.EVENT_READ, lambda _: self._wakes.recv(64))

    def turn(self, wait_s: float | None) -> None:
        """Waits for events, up to ``wait_s``, and handles them. A byte that is sent to ``waker`` ends the wait."""
        ends = [] if wait_s is None else [wait_s]
        ends += [deadline - time.monotonic() for deadline in self.monitor.deadlines()]
        # The data of each key takes the events.
        for key, mask in self._selector.select(max(0.0, min(ends)) if ends else None):
            key.data(mask)
        exited = self.monitor.take_exited()
        for connection in [each for each in self.connections if each.is_ended or each.process.has_exited]:
            self._close(connection)
        for process in exited:
            self._service.exited(process)
        for process in self.monitor.take_torn_down():
            self._service.gone(process)

    def close(self) -> None:
        """Closes all connections, without a message, and watches no process any more."""
        for channel in self.channels():
            channel.close()
        self.monitor.close()
        self._selector.close()
        os.close(self._spare)

    def channels(self) -> list[socket.socket]:
        return [self._listener, self._wakes, self.waker, *(each.channel for each in self.connections)]

    def _accept(self) -> None:
        try:
            connection = Connection(self._listener.accept()[0])
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self._refuse_one()
            elif error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                log.warning("accept failed: %s", error)
            return
        try:
            self._watch(connection)
        except RefusedError as error:
            connection.refuse(error.code, str(error))
            connection.close()
        except ProcessLookupError:
            connection.close()

    def _watch(self, connection: Connection) -> None:
        if connection.user != os.geteuid():
            text = f"process {connection.pid} belongs to user {connection.user}, expected user {os.geteuid()}"
            raise RefusedError(text, "user")
        if connection.pid == 0:
            raise RefusedError(_PID_NAMESPACE.format(os.getpid()), "pid_namespace")
        try:
            connection.process = self.monitor.watch(connection.pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            text = f"process {os.getpid()} cannot watch process {connection.pid}: {error.strerror}"
            raise RefusedError(text, "exhausted") from None
        self.connections[connection] = None

        def ready(mask: int) -> None:
            self._ready(connection, mask)

        def watch_writes(wanted: bool) -> None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(connection.channel, events, ready)

        connection.watch_writes = watch_writes
        self._selector.register(connection.channel, selectors.EVENT_READ, ready)

    def _close(self, connection: Connection) -> None:
        del self.connections[connection]
        self._selector.unregister(connection.channel)
        connection.watch_writes = lambda wanted: None
        connection.close()
        self._service.end(connection)
        self.monitor.release(connection.process)

    def _refuse(self, connection: Connection, code: str, text: str) -> None:
        log.warning("process %d is refused (%s): %s", connection.pid, code, text)
        connection.refuse(code, text)
        self._close(connection)

    def _refuse_one(self) -> None:
        """Refuses one waiting connection because there are no free descriptors. The others are still served."""
        os.close(self._spare)
        try:
            connection = Connection(self._listener.accept()[0])
            connection.refuse("exhausted", f"process {os.getpid()} is out of file descriptors")
            connection.close()
        except OSError as error:
            log.warning("out of descriptors: %s", error)
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _ready(self, connection: Connection, mask: int) -> None:
        if connection not in self.connections:
            return  # closed earlier in this turn
        if mask & selectors.EVENT_WRITE:
            connection.flush()
        if mask & selectors.EVENT_READ and not connection.is_ended:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        """Reads and handles one message. Others are read in the next turns, so that no client holds up the others."""
        kind = "message"
        try:
            message = protocol.receive(connection.channel)
            if message is None:
                self._close(connection)
                return
            kind = message.kind
            try:
                self._handle(connection, message)
            finally:
                message.close()
        except (BlockingIOError, InterruptedError):
            pass
        except RefusedError as error:
            self._refuse(connection, error.code, str(error))
        except ConnectionError:
            self._close(connection)
        except Exception as error:  # a message of one client must not end the server of all clients
            log.exception("%r of process %d failed", kind, connection.pid)
            self._refuse(connection, "malformed", f"{kind!r} failed in process {os.getpid()}: {error!r}")

    def _handle(self, connection: Connection, message: Message) -> None:
        if connection.session is None:
            self._greet(connection, message)
            return
        protocol.check_shape(message)
        self._service.handle(connection, message)

    def _greet(self, connection: Connection, message: Message) -> None:
        if message.kind != "hello" or not message.words:
            raise MalformedError(f"the first message is {message.kind!r}, expected 'hello' with its words")
        # Before the other words, which may be those of a protocol that this server does not define.
        if (version := message.words[0]) != protocol.VERSION:
            older = os.getpid() if version > protocol.VERSION else connection.pid
            raise RefusedError(
                f"process {os.getpid()} speaks version {protocol.VERSION} of the protocol and process {connection.pid} "
                f"version {version}: upgrade memsaver in process {older}",
                "version",
            )
        protocol.check_shape(message)
        _, number, pid = message.words
        if pid != connection.pid:
            raise RefusedError(
                f"process {connection.pid} of the server's pid namespace is process {pid} in its own, and the two "
                "have to be one: run both in one, or give each a job of its own (MEMSAVER_JOB)",
                "pid_namespace",
            )
        if message.files:
            self.monitor.add_sentinel(connection.process, message.files)
        word = self._service.begin(connection, number, message.text)
        connection.send(Message("welcome", (protocol.VERSION, word)))
