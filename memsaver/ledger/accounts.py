"""The account of a device: the driver's figures joined with the reports of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memsaver.errors import process_name
from memsaver.ledger.rows import Ledger, LedgerRow, Part

Holding = tuple[int, int, int | None]  # pid, bytes, the part of them that belongs to another process (None: unknown)


@dataclass
class Report:
    """What a process knows of its memory.

    ``parts``: None if it reports nothing. ``imported``: as in ``Holding``, of the process's own list. ``pooled``: bytes
    of the shared pool that it holds. ``exited``: the process that has exited, and whose chunks ``pid`` keeps.
    """

    pid: int
    name: str
    parts: list[Part] | None
    imported: int | None = None
    pooled: int = 0
    exited: int | None = None


@dataclass(frozen=True)
class Device:
    """The driver's figures of a device. ``lists_all``: a process that ``holdings`` lacks has no memory."""

    used_bytes: int | None
    holdings: Sequence[Holding]
    lists_all: bool


@dataclass(frozen=True)
class PoolTotal:
    """The chunks of a shared pool, held or not. ``pid``: of its broker."""

    pid: int
    name: str
    total_bytes: int


def account(device: Device, reports: Iterable[Report], pool: PoolTotal | None) -> Ledger:
    """Joins the driver's figures of a device with the reports of processes."""
    listed = {pid: (nbytes, imported) for pid, nbytes, imported in device.holdings}
    rows: list[LedgerRow] = []
    pooled = 0
    for report in reports:
        if report.exited is not None:
            # The driver may list it until it is torn down. Its list has no row: it may have chunks of the pool in it.
            listed.pop(report.exited, None)
            pooled += report.pooled
            if report.pooled:
                rows.append(LedgerRow(report.pid, report.name, "pool held", "", "", report.pooled))
            continue
        nbytes, imported = listed.pop(report.pid, (0 if device.lists_all else None, 0))
        pooled += report.pooled
        parts = [("pool held", "", "", report.pooled)] if report.parts is None else report.parts
        rows += [LedgerRow(report.pid, report.name, *part) for part in parts if part[-1]]
        elsewhere = imported if report.imported is None else report.imported
        if nbytes is not None and elsewhere is not None:
            rest = nbytes - elsewhere + report.pooled - sum(part[-1] for part in parts)
            if rest:
                rows.append(LedgerRow(report.pid, report.name, "unknown", "", "", rest))
    if pool is not None:
        if pool.total_bytes != pooled:
            rows.append(LedgerRow(pool.pid, pool.name, "pool idle", "", "", pool.total_bytes - pooled))
        # The host driver lists the chunks of the pool for its broker.
        beside = max(0, listed.pop(pool.pid, (0, None))[0] - pool.total_bytes)
        if beside:
            rows.append(LedgerRow(pool.pid, pool.name, "unknown", "", "", beside))
    for pid, (nbytes, _) in listed.items():
        if nbytes:
            rows.append(LedgerRow(pid, process_name(pid), "process", "", "", nbytes))
    if device.used_bytes is not None:
        rest = device.used_bytes - sum(row.bytes for row in rows)
        if rest:
            rows.append(LedgerRow(None, "", "unlisted", "", "", rest))
    return Ledger(device.used_bytes, rows, all(row.bytes >= 0 for row in rows))
