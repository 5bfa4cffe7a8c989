"""A client of the broker: its connection, its process, its chunks, and its last report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memsaver.broker.chunks import Chunk
from memsaver.broker.connection import Connection
from memsaver.broker.monitor import Process
from memsaver.broker.protocol import Message
from memsaver.process_names import UNKNOWN, given_name, process_name


@dataclass(eq=False)
class Client:
    """A client, from its first ``hello`` until it is disconnected and has no chunk.

    After a disconnect it keeps its chunks: its process may reconnect, and its kernels may still write to them.
    """

    id: int  # drawn by the client, and the same after a reconnect
    process: Process
    connection: Connection | None = None  # None: disconnected
    held: dict[int, Chunk] = field(default_factory=dict)
    imported: dict[int, Chunk] = field(default_factory=dict)  # chunks of which it has a handle, held or not
    name: str = ""  # of its process, when it was last read
    inventory: set[int] | None = None  # ids of chunks in its `inventory` messages so far; None: it is complete
    attachments: set[int] | None = None  # ids that it has from an earlier broker; None: not reported
    is_user: bool = False  # of memory, unlike an admin client
    report: list[dict[str, Any]] = field(default_factory=list)
    reported_at: float | None = None
    ledger: dict[str, Any] | None = None  # its last one, as decoded
    ledger_at: float | None = None
    ledger_queried_at: float | None = None  # when a ledger was announced; None: none is outstanding
    queried_at: float | None = None  # when a report was requested; None: none is outstanding

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_connected(self) -> bool:
        return self.connection is not None

    @property
    def held_bytes(self) -> int:
        return sum(chunk.size for chunk in self.held.values())

    def read_name(self) -> None:
        """Reads the name of its process again, since a title may change. It cannot be read while the process exits."""
        if self.process.has_exited:
            self.name = self.name or UNKNOWN
        else:
            self.name = given_name(self.pid) or self.name or process_name(self.pid)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Sends a message with copies of ``files``. A disconnected client gets nothing."""
        if self.connection is not None:
            self.connection.send(message, files)


Clients = dict[int, Client]  # by id
