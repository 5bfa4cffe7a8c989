"""The sockets of a broker: accepts connections, reads messages, and flushes unsent packets. No call blocks."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import selectors
import time

from memsaver.broker.connection import Connection
from memsaver.broker.discovery import Listener
from memsaver.broker.protocol import RefusedError
from memsaver.broker.sessions import Sessions

log = logging.getLogger("memsaver")

_PID_NAMESPACE = (
    "this process is in another pid namespace than the broker, which cannot watch it: run both in one, or give each a "
    "job of its own (MEMSAVER_JOB)"
)
MOST_MESSAGES = 256  # read from one client in a turn of the loop, so that no client holds up the others
MOST_STRANGERS = 256  # connections before their `hello`. They may be of another job, and must not exhaust the broker
# In a turn of the loop. A `hello` that has arrived is read in the turn after its connection was accepted, so half of
# the most strangers at once do not displace a connection whose `hello` is there.
MOST_ACCEPTED = MOST_STRANGERS // 2
STRANGER_S = 10.0  # time for the `hello`
_LOG_S = 1.0  # between two lines about strangers, which could fill the disk


class Server:
    """The connections of a listener. The data of each key in ``selector`` is a function that takes the events."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector, sessions: Sessions) -> None:
        self.connections: dict[Connection, None] = {}  # in the order in which they were accepted
        self._listener = listener
        self._selector = selector
        self._sessions = sessions
        self._strangers: dict[Connection, float] = {}  # until their `hello`, with the time of their end; oldest first
        self._unlogged = 0  # refused strangers since the last line about one
        self._logged_at = -_LOG_S
        self._writing: set[Connection] = set()  # with unsent packets: watched for EVENT_WRITE as well
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # closed to accept one when descriptors run out
        selector.register(listener.channel, selectors.EVENT_READ, lambda _: self.accept())

    @property
    def has_unsent(self) -> bool:
        """Whether packets waited for a socket at the last flush()."""
        return bool(self._writing)

    def accept(self) -> None:
        """Accepts waiting connections, ``MOST_ACCEPTED`` at most. Refuses the oldest strangers if they are too many."""
        for _ in range(MOST_ACCEPTED):
            try:
                channel, _address = self._listener.channel.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._refuse_one()
                    return
                if error.errno != errno.ECONNABORTED:
                    log.warning("accept failed: %s", error)
                    return
                continue
            connection = Connection(channel)
            if connection.pid == 0:
                connection.refuse("pid_namespace", _PID_NAMESPACE)
                connection.close()
                continue
            try:
                self._sessions.connect(connection)
            except ProcessLookupError:
                connection.close()
                continue
            except OSError as error:
                code = "exhausted" if error.errno in (errno.EMFILE, errno.ENFILE) else "user"
                connection.refuse(code, f"the broker cannot watch process {connection.pid}: {error.strerror}")
                connection.close()
                continue
            self.connections[connection] = None
            self._strangers[connection] = time.monotonic() + STRANGER_S
            self._selector.register(channel, selectors.EVENT_READ, lambda mask, c=connection: self._ready(c, mask))
            if len(self._strangers) > MOST_STRANGERS:
                text = f"{MOST_STRANGERS} later connections wait for their first message"
                self._refuse(next(iter(self._strangers)), "exhausted", text)

    def flush(self) -> None:
        """Watches the sockets with unsent packets for EVENT_WRITE, and the others no longer."""
        for connection in self.connections:
            if connection.has_unsent != (connection in self._writing):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
                key = self._selector.get_key(connection.channel)
                self._selector.modify(connection.channel, events, key.data)
                (self._writing.add if connection.has_unsent else self._writing.discard)(connection)

    def deadlines(self) -> list[float]:
        return list(itertools.islice(self._strangers.values(), 1))

    def close_late(self, now: float) -> None:
        """Refuses the strangers that have sent no ``hello`` in time."""
        for connection in [each for each, deadline in self._strangers.items() if deadline <= now]:
            self._refuse(connection, "exhausted", f"no 'hello' has come within {STRANGER_S:g} s")

    def close_ended(self) -> None:
        """Closes the connections of exited processes, and those whose sessions have been replaced."""
        for connection in [each for each in self.connections if each.is_ended or each.process.has_exited]:
            self._close(connection)

    def close(self) -> None:
        """Closes all sockets at the end of the broker, without a message."""
        self._listener.close()
        for connection in self.connections:
            connection.close()

    def _close(self, connection: Connection) -> None:
        del self.connections[connection]
        self._strangers.pop(connection, None)
        self._writing.discard(connection)
        self._selector.unregister(connection.channel)
        connection.close()
        self._sessions.disconnect(connection)

    def _refuse(self, connection: Connection, code: str, text: str) -> None:
        self._log_refusal(connection, code, text)
        connection.refuse(code, text)
        self._close(connection)

    def _log_refusal(self, connection: Connection, code: str, text: str) -> None:
        now = time.monotonic()
        if connection in self._strangers:
            if now < self._logged_at + _LOG_S:
                self._unlogged += 1
                return
            if self._unlogged:
                log.warning("%d more were refused before their first message", self._unlogged)
            self._logged_at, self._unlogged = now, 0
        log.warning("process %d is refused (%s): %s", connection.pid, code, text)

    def _refuse_one(self) -> None:
        """Refuses one waiting connection because there are no free descriptors. The others are still served."""
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
            if connection not in self.connections or connection.is_ended or not self._read(connection):
                return

    def _read(self, connection: Connection) -> bool:
        """Reads and handles one message. Returns whether there may be another one."""
        kind = "message"
        try:
            message = connection.receive()
            if message is None:
                self._close(connection)
                return False
            kind = message.kind
            try:
                self._sessions.handle(connection, message)
                self._strangers.pop(connection, None)
            finally:
                message.close()
        except (BlockingIOError, InterruptedError):
            return False
        except RefusedError as error:
            self._refuse(connection, error.code, str(error))
        except ConnectionError:
            self._close(connection)
        except Exception as error:  # a message of one client must not end the broker of all clients
            log.exception("%r of process %d failed", kind, connection.pid)
            self._refuse(connection, "malformed", f"{kind!r} failed in the broker: {error!r}")
        return True
