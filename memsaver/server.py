"""The sockets of a broker: takes connections, reads what comes, sends what waits. Nothing here waits for a client."""

from __future__ import annotations

import errno
import logging
import os
import selectors
from typing import Protocol

from memsaver.connection import Connection
from memsaver.protocol import ExhaustedError, MalformedError, Message
from memsaver.sockets import Listener

log = logging.getLogger("memsaver")

MOST_MESSAGES = 256  # of one client in one turn, so that one that never stops is not the only one heard


class Host(Protocol):
    """Whom a server hears messages for."""

    def admit(self, connection: Connection) -> None:
        """Raises OSError where it cannot be served; ProcessLookupError: it is gone."""

    def hear(self, connection: Connection, message: Message) -> None:
        """Raises MalformedError or ExhaustedError, which end the connection."""

    def lose(self, connection: Connection) -> None:
        """Its socket is closed."""


class Server:
    """The connections of a listener, all watched by one selector whose keys' data is called with the events."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector, host: Host) -> None:
        self.connections: dict[Connection, None] = {}  # in the order in which they came
        self._listener = listener
        self._selector = selector
        self._host = host
        self._writing: set[Connection] = set()  # to be told when their socket takes more
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # to turn a client away when there is no other
        selector.register(listener.channel, selectors.EVENT_READ, lambda _: self.accept())

    @property
    def has_unsent(self) -> bool:
        """Whether packets wait for a socket, by the last flush()."""
        return bool(self._writing)

    def accept(self) -> None:
        """Takes all who wait."""
        while True:
            try:
                channel, _address = self._listener.channel.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                    return
                if error.errno != errno.ECONNABORTED:
                    log.warning("accept failed: %s", error)
                    return
                continue
            connection = Connection(channel)
            try:
                self._host.admit(connection)
            except ProcessLookupError:
                connection.close()
                continue
            except OSError as error:
                code = "exhausted" if error.errno in (errno.EMFILE, errno.ENFILE) else "user"
                connection.refuse(code, f"the broker cannot watch process {connection.pid}: {error.strerror}")
                connection.close()
                continue
            self.connections[connection] = None
            self._selector.register(channel, selectors.EVENT_READ, lambda mask, c=connection: self._ready(c, mask))

    def flush(self) -> None:
        """Asks to be told about sockets with unsent packets, and no longer about the others."""
        for connection in self.connections:
            if connection.has_unsent != (connection in self._writing):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
                self._selector.modify(connection.channel, events, self._selector.get_key(connection.channel).data)
                (self._writing.add if connection.has_unsent else self._writing.discard)(connection)

    def refuse(self, connection: Connection, code: str, text: str) -> None:
        log.warning("process %d is refused (%s): %s", connection.pid, code, text)
        connection.refuse(code, text)
        self.hang_up(connection)

    def hang_up(self, connection: Connection) -> None:
        del self.connections[connection]
        self._writing.discard(connection)
        self._selector.unregister(connection.channel)
        connection.close()
        self._host.lose(connection)

    def close(self) -> None:
        """The end of this broker; nobody is told."""
        self._listener.close()
        for connection in self.connections:
            connection.close()

    def _turn_away(self) -> None:
        """Out of descriptors: tells one that waits so, and keeps serving the others."""
        os.close(self._spare)
        try:
            connection = Connection(self._listener.channel.accept()[0])
            connection.refuse("exhausted", "the broker is out of file descriptors")
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
        if not mask & selectors.EVENT_READ:
            return
        for _ in range(MOST_MESSAGES):
            if connection not in self.connections or not self._read(connection):
                return

    def _read(self, connection: Connection) -> bool:
        """Takes one message; whether there may be another."""
        kind = "message"
        try:
            message = connection.receive()
            if message is None:
                self.hang_up(connection)
                return False
            kind = message.kind
            try:
                self._host.hear(connection, message)
            finally:
                message.close()
        except (BlockingIOError, InterruptedError):
            return False
        except MalformedError as error:
            self.refuse(connection, "malformed", str(error))
        except ExhaustedError as error:
            self.refuse(connection, "exhausted", str(error))
        except ConnectionError:
            self.hang_up(connection)
        except Exception as error:  # one client's message must not end all others' broker
            log.exception("%r of process %d failed", kind, connection.pid)
            self.refuse(connection, "malformed", f"{kind!r} failed in the broker: {error!r}")
        return True
