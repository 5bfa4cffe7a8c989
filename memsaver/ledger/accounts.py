"""Makes the ledger of a device: the driver's figures joined with the reports of processes. Its rows and lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsaver.errors import gib
from memsaver.process_names import process_name

_MOST_KINDS = 8  # of one process
Part = tuple[str, str, str, int]  # kind, label, state, bytes
Holding = tuple[int, int, int | None]  # pid, bytes, the part of them that belongs to another process (None: unknown)


@dataclass(frozen=True)
class LedgerRow:
    """Device memory of one process and kind.

    Attributes:
        pid: The process. None for memory of no process that is known.
        name: Its name, or ``"?"`` if the system does not return it. Empty without a process.
        kind: ``"region"``, ``"offered"`` (by a lazy pause), ``"retained"``, ``"torch"`` (its memory beside regions),
            ``"guest"``, ``"unknown"`` (the rest of a process: its context, graphs, NCCL), ``"process"`` (all of a
            process that reports nothing), ``"pool held"`` (chunks of a client of the pool that reports nothing, or that
            has exited), ``"pool idle"`` or ``"unlisted"``.
        label: The tag of the region, or the name of the guest. Else empty.
        state: The state of the region or guest. Else empty.
        bytes: Bytes of device memory.
    """

    pid: int | None
    name: str
    kind: str
    label: str
    state: str
    bytes: int


@dataclass(frozen=True)
class Ledger:
    """The ledger of a device. The sum of the rows is ``used_bytes``, and no row is negative.

    The figures of several processes are not read at one moment. If one of them changes meanwhile, the rows may exceed
    the driver's figures. They are read again once. Then a process whose rows exceed its listed bytes has no row
    ``"unknown"``, and rows that exceed ``used_bytes`` are reduced.

    Attributes:
        used_bytes: The memory of the whole device in use, by the driver. None if a call of the driver fails.
        rows: By process.
        is_consistent: Whether no rows exceed the driver's figures.
    """

    used_bytes: int | None
    rows: list[LedgerRow]
    is_consistent: bool


@dataclass
class Report:
    """The figures of a process about its memory.

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


Own = tuple[Device, Report]  # the driver's figures, and the report of this process
_BROKER = "memsaver broker"
_COUNTED = {"region", "offered", "retained", "pool held", "pool idle"}  # kinds of rows that memsaver counts itself


def account(device: Device, reports: Iterable[Report], pool: tuple[int, int] | None) -> Ledger:
    """Joins the driver's figures of a device with the reports of processes.

    ``pool``: the pid of the broker of a shared pool, and the bytes of its chunks, held or not.

    Figures that contradict each other leave no negative row: a process with more in its rows than the driver lists has
    no row ``"unknown"``, and rows that exceed the driver's figure of the device are reduced.
    """
    listed = {pid: (nbytes, imported) for pid, nbytes, imported in device.holdings}
    rows: list[LedgerRow] = []
    pooled = 0
    contradicts = False
    for report in reports:
        pooled += report.pooled
        if report.exited is not None:
            # The driver may list it until it is torn down. Its list has no row: it may have chunks of the pool in it.
            listed.pop(report.exited, None)
            if report.pooled:
                label = f"of pid {report.exited}, which has exited"
                rows.append(LedgerRow(report.pid, report.name, "pool held", label, "", report.pooled))
            continue
        own = [("pool held", "", "", report.pooled)] if report.parts is None else report.parts
        found = listed.pop(report.pid, (0, 0) if device.lists_all else None)
        imported = found[1] if report.imported is None and found is not None else report.imported
        unexplained = 0  # also if the driver does not tell
        if found is not None and imported is not None:
            unexplained = found[0] - imported + report.pooled - sum(part[-1] for part in own if part[-1] > 0)
        parts = [*own, ("unknown", "", "", unexplained)]
        contradicts |= any(part[-1] < 0 for part in parts)
        rows += [LedgerRow(report.pid, report.name, *part) for part in parts if part[-1] > 0]
    if pool is not None:
        broker, total = pool
        idle = total - pooled
        contradicts |= idle < 0
        if idle > 0:
            rows.append(LedgerRow(broker, _BROKER, "pool idle", "", "", idle))
        # The host driver lists the chunks of the pool for its broker.
        beside = max(0, listed.pop(broker, (0, None))[0] - total)
        if beside:
            rows.append(LedgerRow(broker, _BROKER, "unknown", "", "", beside))
    for pid, (nbytes, _) in listed.items():
        if nbytes:
            rows.append(LedgerRow(pid, process_name(pid), "process", "", "", nbytes))
    if device.used_bytes is not None:
        rest = device.used_bytes - sum(row.bytes for row in rows)
        contradicts |= rest < 0
        if rest > 0:
            rows.append(LedgerRow(None, "", "unlisted", "", "", rest))
        rows = _reduced(rows, -rest)
    return Ledger(device.used_bytes, rows, not contradicts)


def _reduced(rows: list[LedgerRow], excess: int) -> list[LedgerRow]:
    """The rows with so many bytes less: first rows that memsaver does not count itself, the largest first."""
    left = list(rows)
    for at in sorted(range(len(rows)), key=lambda at: (rows[at].kind in _COUNTED, -rows[at].bytes)):
        taken = max(0, min(excess, rows[at].bytes))
        left[at] = replace(rows[at], bytes=rows[at].bytes - taken)
        excess -= taken
    return [row for row in left if row.bytes]


def of_pool(status: Mapping[str, Any], mine: Own | None = None) -> Ledger:
    """The ledger of a shared pool's device by the broker's status: see memsaver/broker/status.py.

    ``mine``: the figures of this process, which take the place of its report and of the broker's own reading of the
    device.
    """
    reports = [_report(client) for client in status["clients"] if mine is None or client["pid"] != mine[1].pid]
    if mine is not None:
        known = [client["name"] for client in status["clients"] if client["pid"] == mine[1].pid]
        mine[1].name = next(iter(known), mine[1].name)
        reports.append(mine[1])
        device = mine[0]
    else:
        listed = status.get("device_memory") or {"used_bytes": None, "holdings": [], "lists_all": False}
        device = Device(listed["used_bytes"], [tuple(each) for each in listed["holdings"]], listed["lists_all"])
    return account(device, reports, (status["pid"], status["total_bytes"]))


def of_device(used_bytes: int | None, holdings: Sequence[Holding], lists_all: bool) -> Ledger:
    """The ledger of a device without a shared pool, by the driver's figures alone."""
    return account(Device(used_bytes, holdings, lists_all), [], None)


def _report(client: Mapping[str, Any]) -> Report:
    leaving = client["leaving_bytes"]
    held_bytes = client["held_bytes"] + leaving
    if client["exited"]:
        keeper = next(iter(client["kept_by"]), client)
        return Report(keeper["pid"], keeper["name"], None, None, held_bytes, exited=client["pid"])
    known = client["ledger"] if client["is_current"] else None  # else its memory may be another one now
    if known is None:
        return Report(client["pid"], client["name"], None, None, held_bytes)
    parts: list[Part] = [("pool held", "not dropped yet", "", leaving), *(tuple(row) for row in known["rows"])]
    return Report(client["pid"], client["name"], parts, known["imported_bytes"], held_bytes)


def lines(ledger: Ledger, most: int = 10) -> list[str]:
    """A line for each process, with its kinds, the largest first. Processes beyond ``most`` share the last line."""
    by_process: dict[tuple[int | None, str], list[LedgerRow]] = {}
    for row in ledger.rows:
        by_process.setdefault((row.pid, row.name), []).append(row)
    found = []
    for (pid, name), rows in by_process.items():
        process = "no listed process" if pid is None else f"{name} (pid {pid})"
        kinds = _largest([(described(row), row.bytes, "") for row in rows], _MOST_KINDS)
        found.append((process, sum(row.bytes for row in rows), f": {', '.join(kinds)}"))
    return _largest(found, most)


def _largest(parts: Iterable[tuple[str, int, str]], most: int) -> list[str]:
    """Texts before and after bytes, the largest first. Those beyond ``most`` share the last text."""
    ranked = sorted(parts, key=lambda part: -part[1])
    shown = ranked if len(ranked) <= most else ranked[: most - 1]
    texts = [f"{before} {gib(nbytes)}{after}" for before, nbytes, after in shown]
    if rest := [nbytes for _, nbytes, _ in ranked[len(shown) :]]:
        texts.append(f"{len(rest)} more {gib(sum(rest))}")
    return texts


def described(row: LedgerRow) -> str:
    """A row's kind, label and state: ``region kv_cache (active)``."""
    return " ".join(filter(None, [row.kind, row.label, row.state and f"({row.state})"]))
