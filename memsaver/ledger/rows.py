"""A ledger, its rows, and their lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memsaver.errors import gib

_MOST_KINDS = 8  # of one process
Part = tuple[str, str, str, int]  # kind, label, state, bytes


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
