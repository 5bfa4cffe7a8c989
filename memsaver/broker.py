"""The process that owns a device's chunks and lends them to its clients. The words between them: csrc/wire.h.

One thread, one loop: read all that has come, then serve, then send. Nothing waits for a client: sockets do not block,
and what one does not take is sent when it does. A client's exit is told by its pidfd, since its socket's hang-up may
come late (a forked child holds it) or early (the process goes on and will be back): only the exit returns its chunks.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import signal
import socket
import time
from typing import Protocol

from memsaver import protocol
from memsaver.clients import Client, Clients
from memsaver.connection import Connection
from memsaver.errors import gib
from memsaver.leases import Leases
from memsaver.lender import Lender
from memsaver.pool import RETRY_S, Memory, Pool
from memsaver.protocol import MalformedError, Message
from memsaver.reports import Reports
from memsaver.server import Server
from memsaver.sockets import Listener
from memsaver.watches import Watches

log = logging.getLogger("memsaver")


class Device(Memory, Protocol):
    """What a broker needs of csrc/physical.h beside its pool."""

    def uuid(self) -> str: ...
    def total_bytes(self) -> int: ...


class Broker:
    """Serves one device. ``name``: ``"cuda:0"`` or ``"cpu"``; ``linger_s``: None stays for ever."""

    def __init__(self, memory: Device, name: str, capacity: int, listener: Listener, linger_s: float | None) -> None:
        self.name = name
        self.uuid = memory.uuid()
        self.pool = Pool(memory, capacity)
        self._listener = listener
        self._linger_s = linger_s
        self._lonely_since = time.monotonic()
        self._stopping = False
        self._why = "nobody needs it"
        self._clients: Clients = {}
        self._speakers: dict[Connection, Client] = {}  # connections whose client has said hello
        self._selector = selectors.DefaultSelector()
        self._server = Server(listener, self._selector, self)
        self._watches = Watches(self._selector, self._exited, self._is_needed)
        self._lender = Lender(self.pool, self._clients)
        self._leases = Leases(self.pool, self._clients, self._watches, name)
        self._reports = Reports(self.pool, self._clients, name, self.uuid)
        self._handlers = {**self._lender.handlers, **self._leases.handlers, **self._reports.handlers}

    # The loop

    def run(self) -> None:
        """Until SIGTERM, SIGINT or SIGHUP, or until nobody has been there for ``linger_s``."""
        bell, rope = socket.socketpair()
        bell.setblocking(False)
        rope.setblocking(False)
        signal.set_wakeup_fd(rope.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        self._selector.register(bell, selectors.EVENT_READ, lambda _: bell.recv(64))
        log.info("serving %s (%s), %s, at %s", self.name, self.uuid, gib(self.pool.capacity), self._listener.path)
        try:
            pause: float | None = 0.0
            while not self._stopping:
                for key, mask in self._selector.select(pause):
                    key.data(mask)
                pause = self._turn()
        finally:
            self._server.close()
            self.pool.close_all()
        log.info("stopped serving %s: %s", self.name, self._why)

    def _stop(self, number: int, _: object) -> None:
        self._stopping = True
        self._why = signal.Signals(number).name

    def _turn(self) -> float | None:
        """What follows after all was read. Returns for how long there is nothing to do; None: until a client speaks."""
        again, retry = self._lender.serve()
        now = time.monotonic()
        self._reports.answer(now)
        self._server.flush()
        waits = [0.0] if again else []
        if retry or self._server.has_unsent:
            waits.append(RETRY_S)
        waits += [deadline - now for deadline in self._reports.deadlines()]
        if self._linger_s is not None and not self._has_users():
            waits.append(self._lonely_since + self._linger_s - now)
            if waits[-1] <= 0 and not self._listener_has_guests():
                self._stopping = True
        return max(0.0, min(waits)) if waits else None

    def _listener_has_guests(self) -> bool:
        """Whether somebody came at the last moment. Who comes after that finds no socket, and starts a broker."""
        self._listener.hide()
        self._server.accept()
        if self._has_users():
            self._listener.show()
        return self._has_users()

    def _has_users(self) -> bool:
        """Whether anybody needs this broker, unlike a tool that looks at it; who has not said hello yet may."""
        some_are_new = len(self._speakers) < len(self._server.connections)
        return some_are_new or any(client.is_user for client in self._clients.values())

    # Connections, as the server asks

    def admit(self, connection: Connection) -> None:
        self._watches.begin(connection.pid)

    def hear(self, connection: Connection, message: Message) -> None:
        client = self._speakers.get(connection)
        if client is None:
            self._meet(connection, message)
            return
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MalformedError(f"{message.kind!r} is not what a client sends now")
        protocol.check_shape(message)
        handler(client, message)

    def lose(self, connection: Connection) -> None:
        """What the client held stays its: its process may be there still."""
        client = self._speakers.pop(connection, None)
        if client is not None:
            client.connection = None
            client.asked_at = None
            client.leases = None
            self.pool.disconnect(client.member)
            self._end_talks(client, f"process {client.pid} lost its connection to the broker")
            if client.member.id not in self.pool.members:
                del self._clients[client.member.id]
        self._watches.end(connection.pid)
        if client is None or client.is_user:
            self._lonely_since = time.monotonic()

    def _meet(self, connection: Connection, message: Message) -> None:
        """The first message of a connection."""
        if connection.uid != os.getuid():
            text = f"this broker serves user {os.getuid()}, not {connection.uid}"
            self._server.refuse(connection, "user", text)
            return
        if message.kind != "hello" or not message.words:
            raise MalformedError(f"the first message is {message.kind!r}, expected 'hello' with its words")
        if message.words[0] != protocol.VERSION:
            text = (
                f"this broker speaks version {protocol.VERSION} of the protocol, the client version "
                f"{message.words[0]}: both must run the same memsaver"
            )
            self._server.refuse(connection, "version", text)
            return
        protocol.check_shape(message)
        _, number = message.words
        if message.text != self.uuid:
            text = f"this broker serves device {self.uuid}, not {message.text}"
            self._server.refuse(connection, "device", text)
            return
        known = self._clients.get(number)
        if known is not None and known.pid != connection.pid:
            raise MalformedError(f"client {number} is process {known.pid}, not {connection.pid}")
        if known is not None and known.connection is not None:
            self._server.hang_up(known.connection)  # which may forget it
            known = self._clients.get(number)
        member = self.pool.join(number)
        if known is None:
            known = self._clients[number] = Client(member, connection.pid, connection)
        known.connection = connection
        known.bringing = set()
        known.asked_at = None
        self._speakers[connection] = known
        known.send(Message("welcome", (protocol.VERSION, self.pool.capacity)))

    def _end_talks(self, client: Client, why: str) -> None:
        self._reports.left(client)
        self._leases.left(client, why)

    # Processes

    def _is_needed(self, pid: int) -> bool:
        """Whether somebody wants to know when this process exits."""
        return (
            any(connection.pid == pid for connection in self._server.connections)
            or any(client.pid == pid for client in self._clients.values())
            or self._leases.has_holder(pid)
        )

    def _exited(self, pid: int) -> None:
        """The kernel says that a process is no more: nothing of it can write to memory."""
        self._leases.exited(pid)
        for client in [client for client in self._clients.values() if client.pid == pid]:
            if client.member.held:
                held = gib(self.pool.held_bytes(client.member))
                log.info("process %d has exited, %s are free", pid, held)
            self._end_talks(client, f"process {pid} has exited")
            self.pool.leave(client.member)
            del self._clients[client.member.id]
        for connection in [connection for connection in self._server.connections if connection.pid == pid]:
            self._speakers.pop(connection, None)
            self._server.hang_up(connection)
        self._watches.end(pid)
        self._lonely_since = time.monotonic()
        if not self._has_users():
            self._lender.trim(0)  # who comes next may not be of this pool


def raise_descriptor_limit() -> None:
    """A chunk is a descriptor here, so as many as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
