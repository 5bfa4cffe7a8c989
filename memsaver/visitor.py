"""Asks a broker for figures, or to trim: what needs no memory of it, and no core."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from memsaver import protocol, sockets
from memsaver.errors import BrokerError, Error
from memsaver.protocol import MalformedError, Message

_PATIENCE_S = 10.0


class Visitor:
    """A connection to the broker at this socket, for one question after the other. Raises BrokerError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._channel = sockets.connect(path)
        self._channel.settimeout(_PATIENCE_S)
        self._serial = 0
        self._ask(Message("hello", (protocol.VERSION, secrets.randbits(63)), path.stem), "welcome")

    def status(self) -> dict[str, Any]:
        """See ``Pool.describe``."""
        answer: dict[str, Any] = json.loads(self._question("status").text)
        return answer

    def trim(self, keep_bytes: int = 0) -> int:
        """Lets idle chunks go until at most so many bytes of them are kept. Returns the bytes that went."""
        return self._question("trim", keep_bytes).words[1]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _question(self, kind: str, *words: int) -> Message:
        self._serial += 1
        answer = {"trim": "trimmed"}.get(kind, kind)
        return self._ask(Message(kind, (self._serial, *words)), answer)

    def _ask(self, message: Message, expected: str) -> Message:
        try:
            protocol.send(self._channel, message.encode())
        except BrokenPipeError:
            pass  # what it said before it hung up is still to be read
        except OSError as error:
            raise self._error(f"does not listen: {error}") from None
        try:
            answer = protocol.receive(self._channel)
        except (OSError, MalformedError) as error:
            raise self._error(f"does not answer: {error}") from None
        if answer is None:
            raise self._error("has gone")
        answer.close()
        if answer.kind != expected:
            raise self._error(f"refuses: {answer.text}" if answer.kind == "refused" else f"says {answer.kind!r}")
        return answer

    def _error(self, text: str) -> Error:
        self.close()
        return BrokerError(f"the broker at {self.path} {text}", path=str(self.path))
