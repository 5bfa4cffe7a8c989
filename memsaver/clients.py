"""The processes that speak with a broker, as all parts of it know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memsaver.connection import Connection
from memsaver.pool import Pool
from memsaver.protocol import Message
from memsaver.records import Member


@dataclass(eq=False)
class Client:
    """A process that speaks the protocol, with or without a socket now."""

    member: Member
    pid: int
    connection: Connection | None
    bringing: set[int] | None = field(default_factory=set)  # None: it has said what it uses
    leases: set[int] | None = None  # of other clients' memory, that it has from an earlier broker; None: not said
    is_user: bool = False  # of memory, unlike a tool that asks for figures
    report: list[dict[str, Any]] = field(default_factory=list)
    reported_at: float | None = None
    asked_at: float | None = None  # for a report, which it has not sent yet

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        if self.connection is not None:
            self.connection.send(message, files)

    def settle(self, pool: Pool) -> None:
        """Before it asks for anything, a client has said what it uses."""
        self.is_user = True
        if self.bringing is not None:
            brought, self.bringing = self.bringing, None
            pool.keep_only(self.member, brought)


Clients = dict[int, Client]  # by their own number, which is their member's
Handler = Callable[[Client, Message], None]  # of one kind of message
