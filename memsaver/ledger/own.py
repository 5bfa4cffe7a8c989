"""The figures of this process: its report, torch's memory, and memory that was measured as the growth in a block."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from memsaver import _core, _guests
from memsaver.ledger.accounts import Device, Own, Report, unexplained_bytes
from memsaver.ledger.rows import Part
from memsaver.process_names import process_name

log = logging.getLogger("memsaver")

_lock = threading.Lock()
_measured: dict[tuple[str, str, str], int] = {}  # bytes by device, kind and label
_CONTEXT = "context"
_seen: set[str] = set()  # devices of which the context was measured


class Measurement:
    """The growth in a block of ``measured()``: a part of a row, until ``release()``. ``bytes``: 0 before and after."""

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
        """The memory has been freed."""
        self._add(-self.bytes)


@contextmanager
def measured(kind: str, label: str, device: str) -> Iterator[Measurement]:
    """Attributes the memory that a block takes, and that no other row has, to a row of a kind.

    The driver's bytes of this process are read before and after the block, without regions, retained chunks, torch's
    memory and other measurements. Other threads must not take other memory meanwhile. An error of the block is raised,
    and nothing is attributed. 0 bytes if the driver does not list this process.
    """
    made = Measurement(device, kind, label)
    before = _unattributed_bytes(device)
    yield made
    after = _unattributed_bytes(device)
    if before is not None and after is not None:
        made._add(after - before)


def measured_parts(device: str) -> list[Part]:
    """The measured memory of a device."""
    with _lock:
        return [(kind, label, "", nbytes) for (on, kind, label), nbytes in _measured.items() if on == device]


def measure_context(device: str) -> None:
    """Attributes the memory of this process without a row to its context on the device. The first call counts."""
    with _lock:
        if device in _seen:
            return
        _seen.add(device)
    Measurement(device, _CONTEXT, "")._add(_unattributed_bytes(device) or 0)


def _reduce_context(device: str, nbytes: int) -> None:
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
    known += torchs("outside_bytes", device, 0) + sum(nbytes for *_, nbytes in measured_parts(device))
    return int(nbytes - elsewhere + figures["pooled_bytes"] - known)


def own(device: str) -> Own:
    """Reads the driver's figures of a device, and the report of this process.

    The measurement of the context may include other memory, which was freed or got a row since. So the
    context becomes smaller if the rows of this process have more than the driver lists, twice in a row.
    """
    found = _own(device)
    if _rest(found) < 0 and (device, _CONTEXT, "") in _measured:
        found = _own(device)
        if (rest := _rest(found)) < 0:
            _reduce_context(device, -rest)
            found = _own(device)
    return found


def _rest(found: Own) -> int:
    return unexplained_bytes(*found) or 0


def _own(device: str) -> Own:
    figures = _core.ledger_figures(device)
    pid = os.getpid()
    parts: list[Part] = [
        ("region", row["tag"], row["state"], row["mapped_bytes"]) for row in figures["regions"] if row["mapped_bytes"]
    ]
    parts += _other_parts(device, figures)
    holdings = figures["holdings"]
    imported = next((each[2] for each in holdings if each[0] == pid), 0)
    report = Report(pid, process_name(pid), parts, imported, figures["pooled_bytes"])
    return Device(figures["used_bytes"], holdings, figures["lists_all"]), report


def _other_parts(device: str, figures: dict[str, Any]) -> list[Part]:
    """The parts of this process beside its regions."""
    parts: list[Part] = [("retained", "", "", figures["retained_bytes"])]
    parts += torchs("parts", device, [])
    if _core.device_names() == [device]:  # a guest does not tell the device of its bytes
        parts += [("guest", row["name"], row["state"], row["nbytes"] or 0) for row in _guests.rows()]
    return [part for part in parts + measured_parts(device) if part[-1]]


def torchs(figure: str, device: str, missing: Any) -> Any:
    """A figure of torch's memory outside of regions. Some versions and allocators lack it: ``missing`` if it raises.

    ``figure``: a function of memsaver/_torch/ledger.py. torch is not loaded for it.
    """
    if "torch" not in sys.modules:
        return missing
    try:
        return getattr(import_module("memsaver._torch.ledger"), figure)(device)
    except Exception as error:
        log.debug("torch does not tell its memory on %s: %r", device, error)
        return missing
