"""The figures of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from memsaver import _core, _guests
from memsaver.ledger import measurements, torch_memory
from memsaver.ledger.accounts import Device, Report, unexplained_bytes
from memsaver.ledger.rows import Part
from memsaver.process_names import process_name


@dataclass
class Own:
    """The figures of this process on a device."""

    device: Device
    report: Report


def own(device: str) -> Own:
    """Reads the driver's figures of a device, and the report of this process.

    The measurement of the context may include other memory, which was freed or got a row since. So the
    context becomes smaller if the rows of this process have more than the driver lists, twice in a row.
    """
    found = _own(device)
    if _rest(found) < 0 and measurements.has_context(device):
        found = _own(device)
        if (rest := _rest(found)) < 0:
            measurements.reduce_context(device, -rest)
            found = _own(device)
    return found


def _rest(found: Own) -> int:
    return unexplained_bytes(found.device, found.report) or 0


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
    return Own(Device(figures["used_bytes"], holdings, figures["lists_all"]), report)


def _other_parts(device: str, figures: dict[str, Any]) -> list[Part]:
    """The parts of this process beside its regions."""
    parts: list[Part] = [("retained", "", "", figures["retained_bytes"])]
    parts += torch_memory.parts(device)
    if _core.device_names() == [device]:  # a guest does not tell the device of its bytes
        parts += [("guest", row["name"], row["state"], row["nbytes"] or 0) for row in _guests.rows()]
    parts += measurements.parts(device) + measurements.stacks(device, figures["stack_bytes"])
    return [part for part in parts if part[-1]]
