"""The handle of a storage in a region. It pickles by reference to memsaver, which a receiver imports by it."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Any, Final

from memsaver._adapter import PATCHES, adapter, patch

# torch's own handles begin with a byte for their version.
_MAGIC: Final = b"memsaver-storage\0"


class Handle(bytes):
    """The bytes of a place. Equal handles name the same memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return received, (bytes(self),)


def received(data: bytes) -> Handle:
    """Makes a handle in the process that received it.

    It prepares torch there: its storages, and the observation of captures, in which no memory can be unmapped.
    """
    patch(PATCHES)
    adapter()
    return Handle(data)


@dataclass(frozen=True)
class Place:
    """Where a receiver finds a storage.

    ``address``: the name of the owner's socket. ``token``: the secret that the owner asks for. ``offset``: the
    storage's address in the owner.
    """

    address: str
    pid: int
    token: str
    device_uuid: str
    tag: str
    residence: int
    offset: int
    nbytes: int

    def handle(self) -> Handle:
        return Handle(_MAGIC + json.dumps(astuple(self)).encode())


def parsed(handle: object) -> Place | None:
    """The place of a handle, or None if it is one of torch's own."""
    # By contents: a serializer other than pickle may have made plain bytes of a handle.
    if not isinstance(handle, bytes) or not handle.startswith(_MAGIC):
        return None
    return Place(*json.loads(handle[len(_MAGIC) :]))
