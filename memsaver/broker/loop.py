"""The process that owns a device's chunks and lends them. The protocol: csrc/pool/wire.h.

One thread runs one loop: read all messages, serve demands, send. No call blocks on a client. The exit of a client is
detected by a pidfd and not by its socket, which may be closed late (a forked child has a copy) or early (the client
reconnects). The chunks of a client are reclaimed when nothing that it started can run any more: see monitor.py.
"""

from __future__ import annotations

import logging
import resource
import selectors
import signal
import socket
import time
from typing import Protocol

from memsaver.broker.clients import Clients
from memsaver.broker.discovery import Listener
from memsaver.broker.lending import Lending
from memsaver.broker.monitor import ProcessMonitor
from memsaver.broker.pool import RETRY_S, Memory, Pool
from memsaver.broker.reclaim import Reclaim
from memsaver.broker.server import Server
from memsaver.broker.sessions import Sessions
from memsaver.broker.status import StatusReporter
from memsaver.errors import gib

log = logging.getLogger("memsaver")


class Device(Memory, Protocol):
    """A device as a broker uses it: csrc/driver/physical.h."""

    def uuid(self) -> str: ...
    def total_bytes(self) -> int: ...
    def compute_pids(self) -> list[int]: ...
    def holdings(self) -> list[tuple[int, int, int | None]]: ...
    def lists_all(self) -> bool: ...
    def used_bytes(self) -> int | None: ...


class BrokerLoop:
    """The broker of one device. Makes its parts and runs them.

    - ``name``: ``"cuda:0"`` or ``"cpu"``.
    - ``linger_s``: time without clients after which it ends. None: it runs until a signal.
    """

    def __init__(self, device: Device, name: str, capacity: int, listener: Listener, linger_s: float | None) -> None:
        clients: Clients = {}
        self._name = name
        self._uuid = device.uuid()
        self._listener = listener
        self._linger_s = linger_s
        self._is_stopping = False
        self._reason = "no client needs it"
        self._selector = selectors.DefaultSelector()
        self._pool = Pool(device, capacity)
        self._monitor = ProcessMonitor(self._selector, device.compute_pids)
        self._lending = Lending(self._pool)
        self._reclaim = Reclaim(self._pool, clients)
        self._status = StatusReporter(self._pool, clients, self._monitor, device, name, self._uuid, self._reclaim)
        self._sessions = Sessions(
            self._uuid, clients, self._pool, self._monitor, self._lending, self._status, self._reclaim
        )
        self._server = Server(listener, self._selector, self._sessions)

    def run(self) -> None:
        """Runs until SIGTERM, SIGINT or SIGHUP, or until there has been no client for ``linger_s``."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        self._selector.register(reader, selectors.EVENT_READ, lambda _: reader.recv(64))
        log.info("serving %s (%s), %s, at %s", self._name, self._uuid, gib(self._pool.capacity), self._listener.path)
        try:
            timeout: float | None = 0.0
            while not self._is_stopping:
                for key, mask in self._selector.select(timeout):
                    key.data(mask)
                timeout = self._step()
        finally:
            self._server.close()
            self._monitor.close()
            self._pool.close()
        log.info("stopped serving %s: %s", self._name, self._reason)

    def _stop(self, number: int, _: object) -> None:
        self._is_stopping = True
        self._reason = signal.Signals(number).name

    def _step(self) -> float | None:
        """Acts on the messages that were read. Returns the time until the next step; None: until a message arrives."""
        self._handle_exits()
        is_due, is_due_soon = self._lending.serve()
        now = time.monotonic()
        self._reclaim.step(now)
        self._status.answer(now)
        self._server.flush()
        waits = [0.0] if is_due else []
        if is_due_soon or self._server.has_unsent:
            waits.append(RETRY_S)
        waits += [
            deadline - now for part in (self._status, self._monitor, self._reclaim) for deadline in part.deadlines()
        ]
        if self._linger_s is not None and not self._has_users():
            waits.append(self._sessions.user_seen_at + self._linger_s - now)
            if waits[-1] <= 0 and not self._has_late_users():
                self._is_stopping = True
        return max(0.0, min(waits)) if waits else None

    def _handle_exits(self) -> None:
        exited = self._monitor.take_exited()
        self._server.close_ended()
        for process in exited:
            self._sessions.log_exit(process)
        torn_down = self._monitor.take_torn_down()
        for process in torn_down:
            self._sessions.reclaim(process)
        if (exited or torn_down) and not self._sessions.has_users:
            self._lending.release_idle(0)  # the next process on this device may not use the pool

    def _has_late_users(self) -> bool:
        """Whether a client connected at the last moment. A later one finds no socket, and starts another broker."""
        self._listener.hide()
        self._server.accept()
        if self._has_users():
            self._listener.show()
        return self._has_users()

    def _has_users(self) -> bool:
        """Whether a client needs this broker. A connection before its ``hello`` counts, an admin client does not."""
        return self._sessions.has_users or any(each.client is None for each in self._server.connections)


def raise_descriptor_limit() -> None:
    """Raises the limit of open files to the hard limit: the broker keeps a descriptor for each chunk."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
