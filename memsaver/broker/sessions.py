"""Sessions of clients: begins one at ``hello``, passes each message to its handler, and ends it at the disconnect.

A client's chunks survive its session: see ``Client``. They are reclaimed when nothing of its process can run any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from memsaver.broker import protocol
from memsaver.broker.clients import Client, Clients
from memsaver.broker.connection import Connection
from memsaver.broker.lending import Lending
from memsaver.broker.monitor import Process, ProcessMonitor
from memsaver.broker.pool import Pool
from memsaver.broker.protocol import MalformedError, Message, RefusedError
from memsaver.broker.reclaim import Reclaim
from memsaver.broker.status import StatusReporter
from memsaver.errors import gib

log = logging.getLogger("memsaver")

# Messages of admin clients, which use no memory.
_WITHOUT_SENTINEL = {"sentinel", "usage", "status", "report", "ledger", "trim", "refused"}


class Sessions:
    """The sessions of a broker's clients. ``uuid``: of the device."""

    def __init__(
        self,
        uuid: str,
        clients: Clients,
        pool: Pool,
        monitor: ProcessMonitor,
        lending: Lending,
        status: StatusReporter,
        reclaim: Reclaim,
    ) -> None:
        self.user_seen_at = time.monotonic()  # when a client that may use memory was disconnected last
        self._uuid = uuid
        self._clients = clients
        self._pool = pool
        self._monitor = monitor
        self._lending = lending
        self._status = status
        self._reclaim = reclaim
        self._handlers: dict[str, Callable[[Client, Message], None]] = {
            "sentinel": self._sentinel,
            "inventory": lending.inventory, "demand": lending.demand, "exchange": lending.exchange,
            "close": lending.close, "give_back": lending.give_back, "dropped": lending.dropped,
            "trim": lending.trim,
            "usage": status.usage, "report": status.report, "ledger": status.ledger, "status": status.status,
            "reclaimed": reclaim.reclaimed,
        }  # fmt: skip

    @property
    def has_users(self) -> bool:
        """Whether a client uses memory, or may after a reconnect. An admin client does not."""
        return any(client.is_user for client in self._clients.values())

    def connect(self, connection: Connection) -> None:
        """Watches the process of a new connection. Raises OSError; ProcessLookupError if it has exited."""
        connection.process = self._monitor.watch(connection.pid)

    def handle(self, connection: Connection, message: Message) -> None:
        """Handles a message. Raises RefusedError, upon which the connection has to be closed."""
        client = connection.client
        if client is None:
            self._begin(connection, message)
            return
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MalformedError(f"{message.kind!r} is not a message that a client sends now")
        protocol.check_shape(message)
        if not client.process.has_sentinel and message.kind not in _WITHOUT_SENTINEL:
            raise MalformedError(f"{message.kind!r} comes before 'sentinel'")
        handler(client, message)

    def disconnect(self, connection: Connection) -> None:
        """Ends the session of a closed connection, if it has one."""
        client = connection.client
        if client is None or client.is_user:
            self.user_seen_at = time.monotonic()
        self._end(connection)
        self._monitor.release(connection.process)

    def log_exit(self, process: Process) -> None:
        """Logs the chunks of an exited process. It keeps them, since its kernels may still run."""
        self.user_seen_at = time.monotonic()
        for client in self._clients_of(process):
            if client.held:
                log.info("process %d has exited, and held %s", process.pid, gib(client.held_bytes))

    def reclaim(self, process: Process) -> None:
        """Takes all memory of a process back. Nothing of it can run any more."""
        self.user_seen_at = time.monotonic()
        for client in self._clients_of(process):
            if client.held:
                log.info("nothing of process %d can run any more, %s are free", process.pid, gib(client.held_bytes))
            self._lending.reclaim(client)
            self._forget(client)

    def _begin(self, connection: Connection, message: Message) -> None:
        """Begins a session with its first message."""
        if message.kind != "hello" or not message.words:
            raise MalformedError(f"the first message is {message.kind!r}, expected 'hello' with its words")
        # Before the other words, which may be those of a protocol that this broker does not define.
        protocol.check_version(message.words[0])
        protocol.check_shape(message)
        _, client_id, pid = message.words
        if message.text != self._uuid:
            raise RefusedError(f"this broker serves device {self._uuid}, not {message.text}", "device")
        if pid != connection.pid:
            raise RefusedError(
                f"process {connection.pid} of this broker's pid namespace is process {pid} in its own, and the two "
                "have to be one: run both in one, or give each a job of its own (MEMSAVER_JOB)",
                "pid_namespace",
            )
        client = self._clients.get(client_id)
        if client is not None and client.process is not connection.process:
            raise MalformedError(f"client {client_id} is process {client.pid}, not {pid}")
        if client is not None and client.connection is not None:
            client.connection.is_ended = True
            self._end(client.connection)  # which may forget the client
            client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = Client(client_id, connection.process)
            self._monitor.retain(client.process)
            client.read_name()
        client.connection = connection
        client.inventory = set()
        connection.client = client
        client.send(Message("welcome", (protocol.VERSION, self._pool.capacity)))

    def _end(self, connection: Connection) -> None:
        """Ends a session: its demands, requests and reports. The client keeps its chunks."""
        client, connection.client = connection.client, None
        if client is None:
            return
        client.connection = None
        client.queried_at = client.ledger_queried_at = None
        self._pool.queue.close_all(client)
        self._status.cancel(client)
        if (
            not client.imported and not client.held
        ):  # a client drops its handle of a chunk before it gives the chunk back
            self._forget(client)

    def _forget(self, client: Client) -> None:
        del self._clients[client.id]
        self._reclaim.forget(client)
        self._monitor.release(client.process)

    def _clients_of(self, process: Process) -> list[Client]:
        return [client for client in self._clients.values() if client.process is process]

    def _sentinel(self, client: Client, message: Message) -> None:
        self._monitor.add_descriptors(client.process, message.files)
        if not client.process.has_sentinel:
            raise MalformedError("'sentinel' has no read end of a pipe")
