"""The sockets of a broker: accepts connections, reads messages, and flushes unsent packets. No call blocks."""

from __future__ import annotations

import errno
import logging
import os
import selectors

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
_MOST_ACCEPTED = 128  # in a turn of the loop


class Server:
    """The connections of a listener. The data of each key in ``selector`` is a function that takes the events."""

    def __init__(self, listener: Listener, selector: selectors.BaseSelector, sessions: Sessions) -> None:
        self.connections: dict[Connection, None] = {}  # in the order in which they were accepted
        self._listener = listener
        self._selector = selector
        self._sessions = sessions
        self._writing: set[Connection] = set()  # with unsent packets: watched for EVENT_WRITE as well
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # closed to accept one when descriptors run out
        selector.register(listener.channel, selectors.EVENT_READ, lambda _: self.accept())

    @property
    def has_unsent(self) -> bool:
        """Whether packets waited for a socket at the last flush()."""
        return bool(self._writing)

    def accept(self) -> None:
        """Accepts waiting connections, ``_MOST_ACCEPTED`` at most."""
        for _ in range(_MOST_ACCEPTED):
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
            self._selector.register(channel, selectors.EVENT_READ, lambda mask, c=connection: self._ready(c, mask))

    def flush(self) -> None:
        """Watches the sockets with unsent packets for EVENT_WRITE, and the others no longer."""
        for connection in self.connections:
            if connection.has_unsent != (connection in self._writing):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
                key = self._selector.get_key(connection.channel)
                self._selector.modify(connection.channel, events, key.data)
                (self._writing.add if connection.has_unsent else self._writing.discard)(connection)

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
        self._writing.discard(connection)
        self._selector.unregister(connection.channel)
        connection.close()
        self._sessions.disconnect(connection)

    def _refuse(self, connection: Connection, code: str, text: str) -> None:
        log.warning("process %d is refused (%s): %s", connection.pid, code, text)
        connection.refuse(code, text)
        self._close(connection)

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
