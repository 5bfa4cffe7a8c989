"""The process that owns a device's chunks and lends them. The protocol: csrc/pool/wire.h.

One thread runs one loop: read all messages, serve demands, send. A client's chunks survive its connection, since it may
reconnect. They are reclaimed when nothing that its process started can run any more: see monitor.py.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from memsaver import trace
from memsaver.broker.clients import Client, Clients
from memsaver.broker.discovery import Listener
from memsaver.broker.lending import Lending
from memsaver.broker.monitor import Process
from memsaver.broker.pool import RETRY_S, Pool
from memsaver.broker.protocol import MalformedError, Message, RefusedError
from memsaver.broker.reclaim import Reclaim
from memsaver.broker.server import Connection, Server
from memsaver.broker.status import StatusReporter
from memsaver.broker.timeline import Timeline
from memsaver.errors import gib

log = logging.getLogger("memsaver")


class BrokerLoop:
    """The broker of one device, and the service of its server.

    - ``device``: its memory, see csrc/driver/physical.h.
    - ``name``: ``"cuda:0"`` or ``"cpu"``.
    - ``linger_s``: time without clients after which it ends. None: it runs until a signal.
    """

    def __init__(self, device: Any, name: str, capacity: int, listener: Listener, linger_s: float | None) -> None:
        self._name = name
        self._uuid = device.uuid()
        self._listener = listener
        self._linger_s = linger_s
        self._user_seen_at = time.monotonic()  # when a client that may use memory was disconnected last
        self._end = ""  # the reason to stop
        self._clients: Clients = {}
        self._pool = Pool(device, capacity)
        self._server = Server(listener.channel, self, device.compute_pids)
        self._lending = lending = Lending(self._pool, self._clients)
        self._reclaim = Reclaim(self._pool, self._clients)
        self._status = status = StatusReporter(
            self._pool, self._clients, self._server.monitor, device, name, self._uuid, self._reclaim
        )
        self._timeline = Timeline(self._pool, self._clients, device, f"{name} {self._uuid}")
        self._of_anybody: dict[str, Callable[[Client, Message], None]] = {
            "usage": status.usage, "status": status.status, "trim": lending.trim,
        }  # fmt: skip
        self._of_users: dict[str, Callable[[Client, Message], None]] = {
            "demand": lending.demand, "exchange": lending.exchange, "close": lending.close,
            "give_back": lending.give_back, "dropped": lending.dropped, "report": status.report,
            "reclaimed": self._reclaim.reclaimed, "offers": self._reclaim.offers, "descriptors": lending.descriptors,
        }  # fmt: skip

    def stop_on_signals(self) -> None:
        """Makes SIGTERM, SIGINT and SIGHUP end ``run()``."""
        signal.set_wakeup_fd(self._server.waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.stop(signal.Signals(number).name))

    def stop(self, reason: str) -> None:
        """Ends ``run()``, from any thread."""
        self._end = reason
        with contextlib.suppress(OSError):  # the loop is awake, or has ended
            self._server.waker.send(b"1")

    def run(self) -> None:
        """Runs until ``stop()``, or until there has been no client for ``linger_s``."""
        log.info("serving %s (%s), %s, at %s", self._name, self._uuid, gib(self._pool.capacity), self._listener.path)
        try:
            wait_s: float | None = 0.0
            while not self._end:
                self._server.turn(wait_s)
                wait_s = self._step()
        finally:
            self._listener.close()
            self._server.close()
            self._pool.close()
        log.info("stopped serving %s: %s", self._name, self._end)

    def _step(self) -> float | None:
        """One step of each part after the messages of a turn. Returns the seconds until the next one."""
        is_due, is_due_soon = self._lending.serve()
        now = time.monotonic()
        if trace.active is not None:
            self._timeline.step(trace.active, now)
        self._reclaim.step(now)
        self._status.answer(now)
        waits = [0.0] if is_due else [RETRY_S] if is_due_soon else []
        waits += [deadline - now for part in (self._status, self._reclaim) for deadline in part.deadlines()]
        if self._linger_s is not None and not self._has_users():
            waits.append(self._user_seen_at + self._linger_s - now)
            if waits[-1] <= 0:  # a client that connects now sees the end of its connection, and starts another broker
                self._end = "no client needs it"
        return min(waits, default=None)

    def _has_users(self) -> bool:
        """Whether a client needs this broker. A connection before its ``hello`` counts, an admin client does not."""
        is_user = any(client.is_user for client in self._clients.values())
        return is_user or any(each.session is None for each in self._server.connections)

    # Of Service

    def begin(self, connection: Connection, number: int, subject: str) -> int:
        if subject != self._uuid:
            raise RefusedError(f"this broker serves device {self._uuid}, not {subject}", "device")
        client = self._clients.get(number)
        if client is not None and client.process is not connection.process:
            raise MalformedError(f"client {number} is process {client.pid}, not {connection.pid}")
        if client is not None and client.connection is not None:
            client.connection.is_ended = True
            self._end_session(client)  # which may forget the client
            client = self._clients.get(number)
        if client is None:
            client = self._clients[number] = Client(number, connection.process)
            self._server.monitor.retain(client.process)
            client.read_name()
        client.connection = connection
        client.inventory = set()
        connection.session = client
        return self._pool.capacity

    def handle(self, connection: Connection, message: Message) -> None:
        client: Client = connection.session
        handler = self._of_anybody.get(message.kind)
        if handler is None:
            if not client.process.has_sentinel:
                raise MalformedError(f"{message.kind!r} comes from a process without a sentinel")
            if client.inventory is not None:
                if message.kind != "inventory":
                    raise MalformedError(f"{message.kind!r} comes before the end of the inventory")
                handler = self._lending.inventory
            else:
                handler = self._of_users.get(message.kind)
        if handler is None:
            raise MalformedError(f"{message.kind!r} is not a message that a client sends now")
        handler(client, message)

    def end(self, connection: Connection) -> None:
        client: Client | None = connection.session
        if client is None or client.is_user:
            self._user_seen_at = time.monotonic()
        if client is not None and client.connection is connection:
            self._end_session(client)

    def exited(self, process: Process) -> None:
        self._user_seen_at = time.monotonic()
        for client in self._clients_of(process):
            if client.held:
                log.info("process %d has exited, and held %s", process.pid, gib(client.held_bytes))
        self._release_unneeded()

    def gone(self, process: Process) -> None:
        self._user_seen_at = time.monotonic()
        for client in self._clients_of(process):
            if client.held:
                log.info("nothing of process %d can run any more, %s are free", process.pid, gib(client.held_bytes))
            self._pool.reclaim(client)
            self._forget(client)
        self._release_unneeded()

    def _end_session(self, client: Client) -> None:
        """Ends the demands, requests and reports of a client. It keeps its chunks."""
        client.connection = None
        client.queried_at = None
        self._pool.queue.close_all(client)
        self._status.cancel(client)
        # A client drops its handle of a chunk before it gives the chunk back.
        if not client.imported and not client.held:
            self._forget(client)

    def _forget(self, client: Client) -> None:
        del self._clients[client.id]
        self._reclaim.answers.pop(client.id, None)
        self._server.monitor.release(client.process)

    def _clients_of(self, process: Process) -> list[Client]:
        return [client for client in self._clients.values() if client.process is process]

    def _release_unneeded(self) -> None:
        """Without users, idle chunks are released: the next process on this device may not use the pool."""
        if not any(client.is_user for client in self._clients.values()):
            self._pool.release_idle(0)


def raise_descriptor_limit() -> None:
    """Raises the limit of open files to the hard limit: the broker keeps a descriptor for each chunk."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
