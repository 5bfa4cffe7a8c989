"""Arguments that several calls take: tags, devices and bounds. All of them are checked here."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

READERS_S = 60.0
_LONGEST_TAG = 200
_LONGEST_S = 86400.0 * 365  # the core's clock adds it without overflow


def seconds(value: object, name: str = "timeout") -> float:
    """A bound as a float that the core can take. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, expected seconds")
    if not value >= 0:
        raise ValueError(f"{name} is {value!r}, expected seconds of 0 or more")
    return float(min(value, _LONGEST_S))


@dataclass(frozen=True)
class Bounds:
    """The bounds of one call, in seconds. The earliest bound that applies to a wait ends it.

    Attributes:
        timeout: Bound of the whole call up to its commit, from its beginning. It includes the waits for earlier
            transitions on the same regions, for guarded replays, the device, memory and attached processes.
            None: no bound.
        memory_timeout: Bound of the wait for memory that others hold. None: that of ``configure(memory_timeout=...)``.
        reader_timeout: Bound of the wait for other processes that are attached to regions that pause.

    Raises:
        TypeError: A bound is not a number.
        ValueError: A bound is negative or NaN.
    """

    timeout: float | None = None
    memory_timeout: float | None = None
    reader_timeout: float = READERS_S

    def __post_init__(self) -> None:
        for name in ("timeout", "memory_timeout", "reader_timeout"):
            if name == "reader_timeout" or getattr(self, name) is not None:
                object.__setattr__(self, name, seconds(getattr(self, name), name))

    def left(self, since: float) -> Bounds:
        """The bounds of a part that begins now, of a call that began at ``since`` by ``time.monotonic()``."""
        if self.timeout is None:
            return self
        return replace(self, timeout=max(0.0, since + self.timeout - time.monotonic()))


def check_tag(tag: object) -> None:
    """Raises TypeError or ValueError unless the value can be the tag of a region."""
    if not isinstance(tag, str):
        raise TypeError(f"tag is {tag!r}, expected a string")
    if not tag:
        raise ValueError("tag is '', expected a name")
    if len(tag) > _LONGEST_TAG or not tag.isprintable():
        raise ValueError(f"tag is {tag!r}, expected at most {_LONGEST_TAG} printable characters")


def several(tags: object, name: str) -> list[str]:
    """Tags as a list. ``name`` is the argument's name in an error.

    Raises TypeError for all other values, a single string included.
    """
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise TypeError(f"{name} is {tags!r}, expected a list of tags")
    found = list(tags)
    for tag in found:
        if not isinstance(tag, str):
            raise TypeError(f"{name} has {tag!r}, expected a string")
    return found


def device_name(device: object) -> str:
    """``"cpu"`` or ``"cuda:N"`` from a torch-style string or a ``torch.device``. Raises ValueError otherwise."""
    name = str(device)
    if name == "cpu":
        return name
    kind, colon, index = name.partition(":")
    if kind == "cuda" and (not colon or (index.isascii() and index.isdecimal() and len(index) < 5)):
        if index:
            return f"cuda:{int(index)}"
        torch = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0}"
    raise ValueError(f"device is {device!r}, expected 'cpu', 'cuda' or 'cuda:N'")
