"""The report of this process on its memory, for its own ledger and as a message for brokers."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from memsaver import _core, _guests
from memsaver.errors import BrokerError
from memsaver.ledger.accounts import Device, Ledger, Own, Part, Report, account, lines, of_pool
from memsaver.process_names import process_name

log = logging.getLogger("memsaver")

STATUS_S = 1.0  # the longest wait for the broker's part
MOST_ROWS = 200  # of one process in a message, and as many regions
_LONGEST_TEXT = 100  # characters of a kind, a label or a state in a message
_LARGEST = 1 << 62
_LONGEST_REPORT = _core.LONGEST_PACKET // 2  # characters of a message
# Of a region in a message.
REGION_FIELDS = ("tag", "state", "backup", "allocated_bytes", "mapped_bytes", "backup_bytes", "paused_s")


def own(device: str) -> Own:
    """Reads the driver's figures of a device, and the report of this process."""
    figures = _core.ledger_figures(device)
    pid, holdings = os.getpid(), figures["holdings"]
    parts: list[Part] = [("region", row["tag"], row["state"], row["mapped_bytes"]) for row in figures["regions"]]
    parts += [("offered", row["tag"], "", row["offered_bytes"]) for row in figures["regions"]]
    parts.append(("retained", "", "", figures["retained_bytes"]))
    parts.append(("torch", "", "", _torch_bytes(device, sum(row["allocated_bytes"] for row in figures["regions"]))))
    if _core.device_names() == [device]:  # a guest does not tell the device of its bytes
        parts += [("guest", row["name"], row["state"], row["nbytes"] or 0) for row in _guests.rows()]
    imported = next((each[2] for each in holdings if each[0] == pid), 0)
    known = [part for part in parts if part[-1]]
    report = Report(pid, process_name(pid), known, imported, figures["pooled_bytes"])
    return Device(figures["used_bytes"], holdings, figures["lists_all"]), report


def _torch_bytes(device: str, inside: int) -> int:
    """torch's memory outside of regions, without loading torch. ``inside``: its segments in regions.

    Some versions and allocators do not tell their memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or device == "cpu":
        return 0
    try:
        # During a transition a region still has segments that torch has unmapped.
        return max(0, int(torch.cuda.memory_reserved(device)) - inside) if torch.cuda.is_initialized() else 0
    except Exception as error:
        log.debug("torch does not tell its memory on %s: %r", device, error)
        return 0


def read(device: str) -> Ledger:
    """The ledger of a device, by the figures of this process and its pool's broker. Read again once if inconsistent."""
    found = _read(device)
    return found if found.is_consistent else _read(device)


def _read(device: str) -> Ledger:
    status = None
    if _core.in_pool(device):
        try:
            status = json.loads(_core.pool_status(device, STATUS_S))
        except BrokerError as error:
            log.debug("the ledger of %s is without its pool: %s", device, error)
    figures, report = own(device)  # after the status, which may wait for the reports of other processes
    return account(figures, [report], None) if status is None else of_pool(status, (figures, report))


def for_error(device: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the ledger for an error, and its lines."""
    found = read(device)
    return [asdict(row) for row in found.rows], lines(found)


def encoded(device: str) -> str:
    """The report of this process for a broker: its rows, and its regions with their other figures.

    The smallest rows are joined if there are too many, or if their text is too long for a packet.
    """
    found = own(device)[1]
    rows = sorted(([*_cut(part[:3]), part[3]] for part in found.parts or ()), key=_bytes_of)
    figures = _core.ledger_figures(device)
    regions = [
        [*_cut((row["tag"], row["state"], row["backup"])), *(int(row[name]) for name in REGION_FIELDS[3:])]
        for row in figures["regions"]
    ]
    held = figures["host_held_bytes"]
    most = MOST_ROWS
    while True:
        if len(rows) > most:
            joined = sum(map(_bytes_of, rows[: len(rows) - most + 1]))
            rows = [["other", "", "", joined], *rows[len(rows) - most + 1 :]]
        report = {
            "imported_bytes": found.imported, "host_held_bytes": held, "rows": rows[::-1], "regions": regions[:most]
        }  # fmt: skip
        text = json.dumps(report, separators=(",", ":"))
        if len(text) <= _LONGEST_REPORT:
            return text
        most //= 2


def _cut(texts: Iterable[str]) -> list[str]:
    return [text[:_LONGEST_TEXT] for text in texts]


def _bytes_of(row: Sequence[Any]) -> int:
    return int(row[3])


def decoded(text: str) -> dict[str, Any]:
    """Checks a report of another process. Raises ValueError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("a ledger is nested too deeply") from None
    if not isinstance(found, dict) or set(found) != {"imported_bytes", "host_held_bytes", "rows", "regions"}:
        raise ValueError("a report is no object with imported_bytes, host_held_bytes, rows and regions")
    if not _is_size(found["host_held_bytes"]):
        raise ValueError(f"host_held_bytes is {found['host_held_bytes']!r}, expected an integer")
    imported = found["imported_bytes"]
    if imported is not None and not _is_size(imported):
        raise ValueError(f"imported_bytes is {imported!r}, expected an integer or null")
    for name, sizes in (("rows", 1), ("regions", len(REGION_FIELDS) - 3)):
        rows = found[name]
        if not isinstance(rows, list) or len(rows) > MOST_ROWS:
            raise ValueError(f"{name} is no list of at most {MOST_ROWS}")
        for row in rows:
            if not isinstance(row, list) or len(row) != 3 + sizes or not all(map(_is_size, row[3:])):
                raise ValueError(f"{row!r} is in {name}, expected three texts, and then integers ({sizes})")
            if not all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in row[:3]):
                raise ValueError(f"{row!r} is in {name}, expected texts of at most {_LONGEST_TEXT} characters")
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST
