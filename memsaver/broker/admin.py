"""A client for administration: requests the status of a broker, or the release of its idle memory."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from memsaver.broker import discovery, protocol
from memsaver.broker.protocol import Message, RefusedError
from memsaver.errors import BrokerError, Error

_TIMEOUT_S = 10.0


class AdminClient:
    """A connection to the broker at ``path``. It uses no memory of the pool. All methods raise BrokerError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._channel = discovery.connect(path)
        self._channel.settimeout(_TIMEOUT_S)
        self._serial = 0
        hello = Message("hello", (protocol.VERSION, secrets.randbits(63), os.getpid()), path.stem)
        welcome = self._exchange(hello, "welcome")
        try:
            protocol.check_welcome(welcome)
        except ValueError as error:
            raise self._error(str(error)) from None

    def status(self) -> dict[str, Any]:
        """The status of the pool: see ``StatusReporter``."""
        answer: dict[str, Any] = json.loads(self._request("status").text)
        return answer

    def release_idle(self, keep_bytes: int = 0) -> int:
        """Releases idle chunks to the driver until at most ``keep_bytes`` are idle. Returns the released bytes."""
        return self._request("trim", keep_bytes).words[1]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, kind: str, *words: int) -> Message:
        self._serial += 1
        answer = {"trim": "trimmed"}.get(kind, kind)
        return self._exchange(Message(kind, (self._serial, *words)), answer)

    def _exchange(self, message: Message, expected: str) -> Message:
        try:
            protocol.send(self._channel, message.encode())
        except BrokenPipeError:
            pass  # the packets that it sent before its end can still be read
        except OSError as error:
            raise self._error(f"does not receive: {error}") from None
        answer = self._receive()
        if answer.kind != expected:
            refused = answer.kind == "refused"
            raise self._error(f"refuses: {answer.text}" if refused else f"sent {answer.kind!r}, expected {expected!r}")
        return answer

    def _receive(self) -> Message:
        try:
            answer = protocol.receive(self._channel)
        except (OSError, RefusedError) as error:
            raise self._error(f"does not answer: {error}") from None
        if answer is None:
            raise self._error("has ended the connection")
        answer.close()
        return answer

    def _error(self, text: str) -> Error:
        self.close()
        return BrokerError(f"the broker at {self.path} {text}", path=str(self.path))
