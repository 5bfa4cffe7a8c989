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
SEVERAL = -1  # no client has this id


@dataclass(slots=True, eq=False)
class Chunk:
    """Physical memory. The descriptor ``file`` keeps it allocated."""

    id: int  # random, and the same under the next broker
    size: int
    file: int
    holder: Client | None = None
    demand: Demand | None = None  # the demand that this chunk was granted to, while it is held
    importers: set[Client] = field(default_factory=set)  # clients with a handle
    writer: int | None = None  # the id of the client whose bytes it holds, or SEVERAL; None: zeros of the driver
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
