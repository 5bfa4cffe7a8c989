"""A client for administration: requests the status of a broker, or the release of its idle memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memsaver.broker.caller import Caller, CallError
from memsaver.broker.protocol import Message
from memsaver.errors import BrokerError

_TIMEOUT_S = 10.0


class AdminClient:
    """A connection to the broker at ``path``. It uses no memory of the pool. All methods raise BrokerError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._caller = Caller(str(path), path.stem, _TIMEOUT_S)
        except CallError as error:
            raise self._error(error) from None

    def status(self) -> dict[str, Any]:
        """The status of the pool: see ``StatusReporter``."""
        answer: dict[str, Any] = json.loads(self._call("status").text)
        return answer

    def release_idle(self, keep_bytes: int = 0) -> int:
        """Releases idle chunks to the driver until at most ``keep_bytes`` are idle. Returns the released bytes."""
        return self._call("trim", keep_bytes).words[1]

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._caller.close()

    def _call(self, kind: str, *words: int) -> Message:
        try:
            return self._caller.call(kind, *words)
        except CallError as error:
            self._caller.close()
            raise self._error(error) from None

    def _error(self, error: CallError) -> BrokerError:
        return BrokerError(f"the broker at {self.path} {error}", path=str(self.path))
