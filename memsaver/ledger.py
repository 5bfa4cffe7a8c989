"""The account of a device's memory: every byte that the driver says is in use, once, by process and kind.

A process that runs memsaver knows its regions, retained chunks, torch's memory and its guests. The driver lists bytes
by process. The broker knows the holder of each chunk of a shared pool. ``account()`` joins these figures: memory that
no row explains is ``"unknown"`` in a process whose bytes the driver lists, else ``"unlisted"``.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from memsaver import _core, _guests
from memsaver.errors import BrokerError, gib, process_name

log = logging.getLogger("memsaver")

STATUS_S = 1.0  # the longest wait for the broker's part
MOST_ROWS = 100  # of one process in a message
_LONGEST_TEXT = 100  # characters of a kind, a label or a state in a message
_LARGEST = 1 << 62
_LONGEST_REPORT = _core.LONGEST_PACKET // 2  # characters of a message

Part = tuple[str, str, str, int]  # kind, label, state, bytes
Holding = tuple[int, int, int | None]  # pid, bytes, the part of them that belongs to another process (None: unknown)


@dataclass(frozen=True)
class LedgerRow:
    """Device memory of one process and kind.

    Attributes:
        pid: The process. None for memory of no process that is known.
        name: Its name, or ``"?"`` if the system does not return it. Empty without a process.
        kind: ``"region"``, ``"retained"``, ``"torch allocated"``, ``"torch cached"``, ``"torch"`` (either of the two),
            ``"guest"``, ``"context"``, ``"graphs"`` or another kind that was measured, ``"unknown"``, ``"process"``
            (all of a process that reports nothing), ``"pool held"`` (chunks of a client of the pool that reports
            nothing, or that has exited), ``"pool idle"`` or ``"unlisted"``.
        label: The tag of the region, the name of the guest, or the name of the measurement. Else empty.
        state: The state of the region or guest. Else empty.
        bytes: Bytes of device memory.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> cache = kv.empty((1 << 20,), torch.uint8)
        >>> rows = memsaver.stats().devices["cpu"].ledger.rows
        >>> [(row.kind, row.state) for row in rows if row.label == "kv_cache"]
        [('region', 'active')]
    """

    pid: int | None
    name: str
    kind: str
    label: str
    state: str
    bytes: int


@dataclass(frozen=True)
class Ledger:
    """The account of a device's memory. The sum of the rows is ``used_bytes``.

    The figures of several processes are not read at one moment. If one of them changes meanwhile, a row ``"unknown"``
    or ``"unlisted"`` may be negative. It is read again once, and then reported as it is.

    Attributes:
        used_bytes: The memory of the whole device in use, by the driver. None if a call of the driver fails.
        rows: By process.
        is_consistent: Whether no row is negative.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> ledger = memsaver.stats().devices["cpu"].ledger
        >>> sum(row.bytes for row in ledger.rows) == ledger.used_bytes
        True
    """

    used_bytes: int | None
    rows: list[LedgerRow]
    is_consistent: bool


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


# This process


def _no_torch(device: str) -> list[Part]:
    return []


def _no_torch_bytes(device: str) -> int:
    return 0


# memsaver/__init__.py sets these, because only that file imports both sides. They must not load torch.
torch_parts: Callable[[str], list[Part]] = _no_torch
torch_bytes: Callable[[str], int] = _no_torch_bytes  # the sum of torch_parts(), without making a list of blocks


@dataclass
class _Own:
    """The figures of this process on a device."""

    device: Device
    report: Report


def own(device: str) -> _Own:
    """Reads the driver's figures of a device, and the report of this process.

    What was measured as the context may have been other memory in part, which was freed or got a row since. So the
    context becomes smaller if the rows of this process have more than the driver lists, twice in a row.
    """
    found = _own(device)
    if _rest(found) < 0 and _has_context(device):
        found = _own(device)
        if (rest := _rest(found)) < 0:
            _reduce_context(device, -rest)
            found = _own(device)
    return found


def _rest(found: _Own) -> int:
    """The bytes of this process that it has no row for. 0 if they are unknown."""
    ledger = account(found.device, [found.report], None)
    return sum(row.bytes for row in ledger.rows if row.pid == found.report.pid and row.kind == "unknown")


def _own(device: str) -> _Own:
    figures = _core.ledger_figures(device)
    pid = os.getpid()
    parts: list[Part] = [
        ("region", row["tag"], row["state"], row["mapped_bytes"]) for row in figures["regions"] if row["mapped_bytes"]
    ]
    parts += _other_parts(device, figures["retained_bytes"])
    holdings = figures["holdings"]
    imported = next((each[2] for each in holdings if each[0] == pid), 0)
    report = Report(pid, process_name(pid), parts, imported, figures["pooled_bytes"])
    return _Own(Device(figures["used_bytes"], holdings, figures["lists_all"]), report)


def _other_parts(device: str, retained_bytes: int) -> list[Part]:
    """The parts of this process beside its regions."""
    parts: list[Part] = [("retained", "", "", retained_bytes)]
    parts += _torch(torch_parts, device, [])
    if _core.device_names() == [device]:  # a guest does not tell the device of its bytes
        parts += [("guest", row["name"], row["state"], row["nbytes"] or 0) for row in _guests.rows()]
    with _lock:
        parts += [(kind, label, "", nbytes) for (on, kind, label), nbytes in _measured.items() if on == device]
    return [part for part in parts if part[-1]]


def _torch(read: Callable[[str], Any], device: str, missing: Any) -> Any:
    """Figures of torch. Versions and allocators of torch differ in what they can tell: ``missing`` if it raises."""
    try:
        return read(device)
    except Exception as error:
        log.debug("torch does not tell its memory on %s: %r", device, error)
        return missing


# Measurements

_lock = threading.Lock()
_measured: dict[tuple[str, str, str], int] = {}  # bytes by device, kind and label
_CONTEXT = "context"
_seen: set[str] = set()  # devices of which the context was measured


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


def measure_context(device: str) -> None:
    """Attributes what this process has on a device beside the known rows to its context. The first call counts."""
    with _lock:
        if device in _seen:
            return
        _seen.add(device)
    Measurement(device, _CONTEXT, "")._add(_unattributed_bytes(device) or 0)


def _has_context(device: str) -> bool:
    with _lock:
        return (device, _CONTEXT, "") in _measured


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
    known += _torch(torch_bytes, device, 0)
    with _lock:
        known += sum(measured for (on, *_), measured in _measured.items() if on == device)
    return int(nbytes - elsewhere + figures["pooled_bytes"] - known)


# Messages


def encoded(device: str) -> str:
    """The report of this process for a broker, without its regions, which the broker has from ``report``.

    The smallest rows are joined if there are too many, or if their text is too long for a packet.
    """
    found = own(device).report
    rows = sorted(([*_cut(part[:3]), part[3]] for part in found.parts or () if part[0] != "region"), key=_bytes_of)
    most = MOST_ROWS
    while True:
        if len(rows) > most:
            joined = sum(map(_bytes_of, rows[: len(rows) - most + 1]))
            rows = [["other", "", "", joined], *rows[len(rows) - most + 1 :]]
        text = json.dumps({"imported_bytes": found.imported, "rows": rows[::-1]}, separators=(",", ":"))
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
    if not isinstance(found, dict) or set(found) != {"imported_bytes", "rows"}:
        raise ValueError("a ledger is no object with imported_bytes and rows")
    imported, rows = found["imported_bytes"], found["rows"]
    if imported is not None and not _is_size(imported):
        raise ValueError(f"imported_bytes is {imported!r}, expected an integer or null")
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        raise ValueError(f"rows is no list of at most {MOST_ROWS}")
    for row in rows:
        if not isinstance(row, list) or len(row) != 4 or not _is_size(row[3]):
            raise ValueError(f"a row is {row!r}, expected kind, label, state and bytes")
        if not all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in row[:3]):
            raise ValueError(f"a row is {row!r}, expected texts of at most {_LONGEST_TEXT} characters")
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def of_pool(status: Mapping[str, Any], mine: _Own | None = None) -> Ledger:
    """The account of a shared pool's device by the broker's status: see memsaver/broker/status.py.

    ``mine``: the figures of this process, which take the place of its report and of the broker's own reading of the
    device.
    """
    reports = [_report(client) for client in status["clients"] if mine is None or client["pid"] != mine.report.pid]
    if mine is not None:
        known = [client["name"] for client in status["clients"] if client["pid"] == mine.report.pid]
        mine.report.name = next(iter(known), mine.report.name)
        reports.append(mine.report)
        device = mine.device
    else:
        listed = status.get("device_memory") or {"used_bytes": None, "holdings": [], "lists_all": False}
        device = Device(listed["used_bytes"], [tuple(each) for each in listed["holdings"]], listed["lists_all"])
    pool = PoolTotal(status["pid"], "memsaver broker", status["total_bytes"])
    return account(device, reports, pool)


def _report(client: Mapping[str, Any]) -> Report:
    if client["exited"]:
        keeper = next(iter(client["kept_by"]), client)
        return Report(keeper["pid"], keeper["name"], None, None, client["held_bytes"], exited=client["pid"])
    known = client.get("ledger")
    report = Report(client["pid"], client["name"], None, None, client["held_bytes"])
    if known is not None:
        regions = [("region", row["tag"], row["state"], row["mapped_bytes"]) for row in client["regions"]]
        report.parts = [*regions, *(tuple(row) for row in known["rows"])]
        report.imported = known["imported_bytes"]
    return report


def read(device: str) -> Ledger:
    """The account of a device, as this process and the broker of its pool know it. Read again once if inconsistent."""
    found = _read(device)
    return found if found.is_consistent else _read(device)


def _read(device: str) -> Ledger:
    status = None
    if _core.in_pool(device):
        try:
            status = json.loads(_core.pool_status(device, STATUS_S))
        except BrokerError as error:
            log.debug("the account of %s is without its pool: %s", device, error)
    mine = own(device)  # after the status, which may wait for the reports of other processes
    return account(mine.device, [mine.report], None) if status is None else of_pool(status, mine)


def serve() -> None:
    """Sends the report of this process to brokers that query it. Returns at the exit of the interpreter."""
    while (device := _core.next_ledger_query()) is not None:
        try:
            _core.send_ledger(device, encoded(device))
        except Exception as error:  # the broker is answered without a report
            log.debug("no ledger of %s was sent: %r", device, error)


# Text


def for_error(device: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the account for an error, and its lines."""
    found = read(device)
    return [asdict(row) for row in found.rows], lines(found)


def lines(ledger: Ledger, most: int = 10) -> list[str]:
    """A line for each process, with its kinds, the largest first. Processes beyond ``most`` share the last line."""
    by_process: dict[tuple[int | None, str], list[LedgerRow]] = {}
    for row in ledger.rows:
        by_process.setdefault((row.pid, row.name), []).append(row)
    groups = sorted(by_process.items(), key=lambda group: -_sum(group[1]))
    shown = groups if len(groups) <= most else groups[: most - 1]
    found = [f"{_process(*key)} {gib(_sum(rows))}: {', '.join(_kinds(rows))}" for key, rows in shown]
    if len(groups) > len(shown):
        found.append(f"{len(groups) - len(shown)} more {gib(sum(_sum(rows) for _, rows in groups[len(shown) :]))}")
    return found


def _process(pid: int | None, name: str) -> str:
    return "no listed process" if pid is None else f"{name} (pid {pid})"


def _kinds(rows: Sequence[LedgerRow], most: int = 8) -> list[str]:
    ranked = sorted(rows, key=lambda row: -row.bytes)
    shown = ranked if len(ranked) <= most else ranked[: most - 1]
    texts = [f"{described(row)} {gib(row.bytes)}" for row in shown]
    if len(ranked) > len(shown):
        texts.append(f"{len(ranked) - len(shown)} more {gib(_sum(ranked[len(shown) :]))}")
    return texts


def described(row: LedgerRow) -> str:
    """A row's kind, label and state: ``region kv_cache (active)``."""
    return " ".join(filter(None, [row.kind, row.label, row.state and f"({row.state})"]))


def _sum(rows: Iterable[LedgerRow]) -> int:
    return sum(row.bytes for row in rows)
