"""The client's end of a connection to a server (``server.py``) that answers questions, also of an administrator."""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memsaver.broker import protocol
from memsaver.broker.protocol import MalformedError, Message, RefusedError
from memsaver.errors import BrokerError, checked

_ADMIN_S = 10.0


class Caller:
    """A connection, for one thread at a time. Each call and the constructor take ``timeout_s`` at most.

    - ``address``: a path, or a name in the system's abstract namespace, which begins with a zero byte.
    - ``subject``, ``files``: the text and the descriptor of ``hello``.

    All methods raise RefusedError, whose ``code`` is also ``"timeout"``, ``"exited"``, or ``"exhausted"`` for this
    process's descriptors. Its text has no subject: ``"did not answer within 10 s"``. After any but ``"timeout"`` and
    the refusal of one message, the connection is closed.
    """

    def __init__(self, address: str, subject: str, timeout_s: float, files: Sequence[int] = ()) -> None:
        self.timeout_s = timeout_s
        self._serial = 0
        try:
            self._channel = protocol.new_socket()
        except OSError as error:
            raise RefusedError(
                f"cannot be reached: {error.strerror}, expected a free descriptor", "exhausted"
            ) from None
        try:
            self._channel.settimeout(timeout_s)
            self._channel.connect(address)
            user = protocol.peer(self._channel)[1]
            if user != os.geteuid():  # the name of a process that has exited is free for other users
                raise RefusedError(f"belongs to user {user}, expected user {os.geteuid()}", "user")
            words = protocol.VERSION, secrets.randbits(63), os.getpid()
            self._send(Message("hello", words, subject, list(files)))
            self.answer("welcome", None)
        except OSError as error:
            self.close()
            late = isinstance(error, TimeoutError | BlockingIOError)
            raise self._late() if late else RefusedError(f"cannot be reached ({error.strerror})", "exited") from None
        except BaseException:
            self.close()
            raise

    def call(self, kind: str, *words: int, text: str = "", answer: str = "") -> Message:
        """Asks a question, and waits for the answer of this kind, by default that of the question.

        Answers to earlier ones, for which no caller waits any more, are skipped.
        """
        self._serial += 1
        self._send(Message(kind, (self._serial, *words), text))
        return self.answer(answer or kind, self._serial)

    def tell(self, kind: str, *words: int, timeout_s: float | None = None) -> None:
        """Sends a message without an answer."""
        self._send(Message(kind, words), timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether the connection is closed. Closes that to a server that has exited."""
        if self._channel.fileno() >= 0:
            poll = select.poll()
            poll.register(self._channel, 0)  # POLLHUP is always reported
            if not poll.poll(0):
                return False
            self.close()
        return True

    def close(self) -> None:
        self._channel.close()

    def _send(self, message: Message, timeout_s: float | None = None) -> None:
        try:
            self._channel.settimeout(self.timeout_s if timeout_s is None else timeout_s)
            protocol.send(self._channel, message.encode(), message.files)
        except (TimeoutError, BlockingIOError):  # it has stopped, with many unread messages
            raise self._late() from None
        except OSError:
            self.answer("", None)  # raises the refusal that ended the connection, or its end

    def answer(self, kind: str, serial: int | None) -> Message:
        """The next message of a kind; of all with a serial, the one with this serial. No kind: refusals alone."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            message = self._receive(deadline)
            if message.kind == "refused":
                code, request = message.words
                if request in (0, serial):
                    if not request:
                        self.close()
                    raise RefusedError(message.text, protocol.refusal_name(code))
            elif kind and (serial is None or (message.words and message.words[0] == serial)):
                if message.kind == kind:
                    return message
                self.close()
                message.close()
                raise MalformedError(f"sent {message.kind!r}, expected {kind!r}")
            message.close()

    def _receive(self, deadline: float) -> Message:
        message = None
        try:
            # At least a moment: with a timeout of 0 the socket would not wait at all.
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            message = protocol.receive(self._channel)
        except (TimeoutError, BlockingIOError):
            raise self._late() from None
        except RefusedError as error:
            self.close()
            raise RefusedError(f"sent a message that cannot be read: {error}", error.code) from None
        except OSError:
            pass
        if message is None:
            self.close()
            raise RefusedError("has ended the connection", "exited")
        return message

    def _late(self) -> RefusedError:
        return RefusedError(f"did not answer within {self.timeout_s:g} s", "timeout")


def status(path: Path, timeout_s: float = _ADMIN_S) -> dict[str, Any]:
    """The status of the pool of the broker at ``path``: see ``StatusReporter``. Raises BrokerError."""
    found: dict[str, Any] = json.loads(_asked(path, "status", timeout_s=timeout_s).text)
    return found


def free_bytes(pool: Mapping[str, Any]) -> int:
    """The part of a pool's capacity that no client has, by its status."""
    # Clients of an earlier broker may have brought more than the capacity.
    return max(0, int(pool["capacity_bytes"] - pool["total_bytes"] + pool["idle_bytes"]))


def release_idle(path: Path, keep_bytes: int = 0) -> int:
    """Releases idle chunks to the driver until at most ``keep_bytes`` are idle. Returns the released bytes.

    Raises BrokerError.
    """
    return _asked(path, "trim", keep_bytes).words[1]


def _asked(path: Path, kind: str, *words: int, timeout_s: float = _ADMIN_S) -> Message:
    try:
        caller = Caller(str(path), path.stem, timeout_s)
        try:
            return caller.call(kind, *words)
        finally:
            caller.close()
    except RefusedError as error:
        if error.code == "version":
            raise BrokerError(checked(f"the broker at {path} refuses: {error}"), path=str(path)) from None
        raise BrokerError(f"the broker at {path} {error}", path=str(path)) from None
