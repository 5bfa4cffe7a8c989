"""Chunks of physical memory as the pool records them, and attachments to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memsaver import _core

if TYPE_CHECKING:
    from memsaver.broker.clients import Client
    from memsaver.broker.queue import Demand

CLASSES: tuple[int, ...] = _core.CHUNK_CLASSES  # bytes, largest first
CLASS_NAMES = ", ".join(map(str, CLASSES))
PAGE = CLASSES[-1]


@dataclass(slots=True, eq=False)
class Chunk:
    """Physical memory. The descriptor ``file`` keeps it allocated."""

    id: int  # random, and the same under the next broker
    size: int
    file: int
    holder: Client | None = None
    demand: Demand | None = None  # the demand that this chunk was granted to, while it is held
    importers: set[Client] = field(default_factory=set)  # clients with a handle
    last_holder: int | None = None  # a client's id; None: the chunk is as the driver created it, all zeros
    is_sensitive: bool = False  # a holder requested scrubbing. Stays set, since no message reports a scrub
    is_scrub_requested: bool = False  # the present or last holder got the flag SCRUB with it
    attachments: int = 0
    is_leaving: bool = False  # to the driver, once no client has a handle


@dataclass(slots=True, eq=False)
class Attachment:
    """The use of an owner's chunks by another process."""

    id: int
    owner: Client
    pid: int  # of the attached process
    chunks: list[Chunk]
    is_restored: bool = False  # made under an earlier broker
