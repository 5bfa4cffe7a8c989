"""What a pool writes down: who there is, which chunks, who wants what, who is attached."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from memsaver import _core

CLASSES: tuple[int, ...] = _core.CHUNK_CLASSES  # bytes, largest first
CLASS_NAMES = ", ".join(map(str, CLASSES))
PAGE = CLASSES[-1]


@dataclass(slots=True, eq=False)
class Member:
    """A client as the pool sees it."""

    id: int
    scrub: bool = False  # its chunks are to be zeroed for the next owner, and those it gets from others
    connected: bool = True  # whether a drop would reach it
    held: dict[int, Chunk] = field(default_factory=dict)
    known: dict[int, Chunk] = field(default_factory=dict)  # of which it has a handle


@dataclass(slots=True, eq=False)
class Chunk:
    """Physical memory, kept by a descriptor."""

    id: int  # drawn at random, so that it stays the same under the next broker
    size: int
    file: int
    holder: Member | None = None
    demand: Demand | None = None  # that brought it to its holder
    limit: int = 0  # of the part of that demand
    handles: set[Member] = field(default_factory=set)
    last: int | None = None  # id of who held it last; None: as the driver made it, all zeros
    secret: bool = False  # one of those who held it asked for scrubbing. Stays: nobody says that a scrub was done
    flagged: bool = False  # who has it, or had it last, was told to scrub it
    leases: int = 0
    leaving: bool = False


@dataclass(slots=True)
class Entry:
    """A part of a demand."""

    limit: int  # the largest chunk that it can use
    fresh: int  # the largest to make for it
    left: int  # bytes


@dataclass(slots=True, eq=False)
class Demand:
    """What a client asked for with one request."""

    member: Member
    request: int
    order: int
    since: float
    moved_at: float  # when it last got something
    entries: deque[Entry] = field(default_factory=deque)
    count: int = 0  # messages of it so far
    told: int = 0  # the count at which its client was last told that it is stuck
    granted: int = 0  # bytes that it got, and that its client still holds
    refused: bool = False

    @property
    def left(self) -> int:
        return sum(entry.left for entry in self.entries)


@dataclass(slots=True, eq=False)
class Lease:
    """Another process's attachment to chunks of their holder."""

    id: int
    owner: Member
    pid: int  # of the process that is attached
    chunks: list[Chunk]
    owed: bool = False  # made by an earlier broker
