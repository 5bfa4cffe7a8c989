"""Clients of the broker, and chunks of physical memory as the pool records them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memsaver import _core
from memsaver.broker.monitor import Process
from memsaver.broker.protocol import Message
from memsaver.broker.server import Connection
from memsaver.process_names import UNKNOWN, given_name, process_name

if TYPE_CHECKING:
    from memsaver.broker.queue import Demand

CLASSES: tuple[int, ...] = _core.CHUNK_CLASSES  # bytes, largest first
CLASS_NAMES = ", ".join(map(str, CLASSES))
PAGE = CLASSES[-1]
SEVERAL = -1  # no client has this id


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
    offered_bytes: int = 0  # of its chunks, those that lazy pauses offer
    inventory: set[int] | None = field(default_factory=set)  # ids in its `inventory` so far; None: it is complete
    is_user: bool = False  # of memory, unlike an admin client
    report: dict[str, Any] | None = None  # its last one: see memsaver/ledger/reports.py
    reported_at: float | None = None
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


@dataclass(slots=True, eq=False)
class Chunk:
    """Physical memory. The descriptor ``file`` keeps it allocated.

    A chunk of an earlier broker has none, and only its holder has a handle: it is lent to no other client.
    """

    id: int  # random, and the same under the next broker
    size: int
    file: int | None
    holder: Client | None = None
    demand: Demand | None = None  # the demand that this chunk was granted to, while it is held
    importers: set[Client] = field(default_factory=set)  # clients with a handle
    writer: int | None = None  # the id of the client whose bytes it holds, or SEVERAL; None: zeros of the driver
    is_leaving: bool = False  # to the driver, once no client has a handle


Clients = dict[int, Client]  # by id
