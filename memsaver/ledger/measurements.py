"""Memory that was measured as the growth in a block, and the context of a device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from memsaver import _core
from memsaver.ledger import torch_memory
from memsaver.ledger.rows import Part

_lock = threading.Lock()
_measured: dict[tuple[str, str, str], int] = {}  # bytes by device, kind and label
_CONTEXT = "context"
_STACKS = "stacks"
_seen: set[str] = set()  # devices of which the context was measured
_stacks_within: dict[str, int] = {}  # by device, the stacks that its measured context has


class Measurement:
    """The result of ``measured()``: a part of a row, until ``release()``.

    Attributes:
        bytes: The growth in the block. 0 before its end, and after ``release()``.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> with memsaver.ledger.measured("library", "kernels", "cpu") as taken:
        ...     cache = kv.empty((1 << 20,), torch.uint8)
        >>> taken.bytes
        0
    """

    bytes: int

    def __init__(self, device: str, kind: str, label: str) -> None:
        self._key = device, kind, label
        self.bytes = 0

    def _add(self, nbytes: int) -> None:
        with _lock:
            self.bytes += nbytes
            _measured[self._key] = _measured.get(self._key, 0) + nbytes
            if not _measured[self._key]:
                del _measured[self._key]

    def release(self) -> None:
        """Ends the attribution, as the memory has been freed. A repeated call does nothing."""
        self._add(-self.bytes)


@contextmanager
def measured(kind: str, label: str, device: str) -> Iterator[Measurement]:
    """Attributes the memory that a block takes, and that no other row has, to a row of a kind.

    The driver's bytes of this process are read before and after the block, without regions, retained chunks, torch's
    memory and other measurements. Other threads must not take other memory meanwhile. An error of the block is raised,
    and nothing is attributed.

    Args:
        kind: The kind of the row.
        label: The label of the row. Measurements of one kind and label share a row.
        device: The device, as ``"cuda:0"``.

    Yields:
        The measurement. Its ``bytes`` are 0 if the driver does not list this process.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> with memsaver.ledger.measured("library", "kernels", "cpu") as taken:
        ...     cache = kv.empty((1 << 20,), torch.uint8)  # memory of a region has its own row
        >>> taken.bytes
        0
        >>> taken.release()
    """
    made = Measurement(device, kind, label)
    before = _unattributed_bytes(device)
    yield made
    after = _unattributed_bytes(device)
    if before is not None and after is not None:
        made._add(after - before)


def parts(device: str) -> list[Part]:
    """The measured memory of a device."""
    with _lock:
        return [(kind, label, "", nbytes) for (on, kind, label), nbytes in _measured.items() if on == device]


def measure_context(device: str) -> None:
    """Attributes the memory of this process without a row to its context on the device. The first call counts."""
    with _lock:
        if device in _seen:
            return
        _seen.add(device)
    _stacks_within[device] = _core.ledger_figures(device)["stack_bytes"]
    Measurement(device, _CONTEXT, "")._add(_unattributed_bytes(device) or 0)


def stacks(device: str, stack_bytes: int) -> list[Part]:
    """The growth of the stacks of a device's threads since its context was measured."""
    if device not in _stacks_within:
        return []
    return [(_CONTEXT, _STACKS, "", max(0, stack_bytes - _stacks_within[device]))]


def has_context(device: str) -> bool:
    with _lock:
        return (device, _CONTEXT, "") in _measured


def reduce_context(device: str, nbytes: int) -> None:
    with _lock:
        left = _measured.pop((device, _CONTEXT, ""), 0) - nbytes
        if left > 0:
            _measured[device, _CONTEXT, ""] = left


def _unattributed_bytes(device: str) -> int | None:
    figures = _core.ledger_figures(device)
    missing = (os.getpid(), 0, 0) if figures["lists_all"] else (os.getpid(), None, None)
    _, nbytes, elsewhere = next((each for each in figures["holdings"] if each[0] == os.getpid()), missing)
    if nbytes is None or elsewhere is None:
        return None
    known = figures["retained_bytes"] + sum(row["mapped_bytes"] for row in figures["regions"])
    known += torch_memory.nbytes(device)
    known += sum(nbytes for *_, nbytes in parts(device) + stacks(device, figures["stack_bytes"]))
    return int(nbytes - elsewhere + figures["pooled_bytes"] - known)
