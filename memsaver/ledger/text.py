"""A ledger as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memsaver.errors import gib
from memsaver.ledger.rows import Ledger, LedgerRow


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
