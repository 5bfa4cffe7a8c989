"""The ledger of a device for this process: for a result, and as a table of several moments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import memsaver

Account = dict[str, Any]

_MIB = 1 << 20


def account_of(device: str) -> Account:
    """The memory in use on a device that memsaver has opened: the rows of this process, and the other bytes.

    ``listed_bytes`` is None where the driver does not list the process. Then no row is ``"unknown"``, and memory that
    no row has is in ``unlisted_bytes``.
    """
    figures = memsaver.stats().devices[device]
    ledger = figures.ledger
    mine = [row for row in ledger.rows if row.pid == os.getpid()]
    return {
        "used_bytes": ledger.used_bytes,
        "listed_bytes": figures.own_bytes,
        "rows": [{"kind": row.kind, "label": row.label, "state": row.state, "bytes": row.bytes} for row in mine],
        "unlisted_bytes": sum(row.bytes for row in ledger.rows if row.pid is None),
        "other_processes_bytes": sum(row.bytes for row in ledger.rows if row.pid not in (None, os.getpid())),
        "is_consistent": ledger.is_consistent,
    }


def bytes_of(account: Account, *kinds: str) -> int:
    """The sum of the rows of some kinds."""
    return sum(row["bytes"] for row in account["rows"] if row["kind"] in kinds)


def table(accounts: Mapping[str, Account]) -> list[str]:
    """Lines with a column for each account, in MiB. ``unknown`` has a line in any case; ``-`` where it is not known."""
    columns = {name: _cells(account) for name, account in accounts.items()}
    names = list(dict.fromkeys(name for cells in columns.values() for name in cells))
    last = ["unknown", "other processes", "unlisted", "in use"]
    names = [name for name in names if name not in last] + last
    width = max(map(len, names))
    lines = [f"{'MiB':<{width}}" + "".join(f"{name:>11}" for name in columns)]
    for name in names:
        lines.append(f"{name:<{width}}" + "".join(f"{_text(cells.get(name, 0)):>11}" for cells in columns.values()))
    return lines


def _cells(account: Account) -> dict[str, int | None]:
    cells: dict[str, int | None] = {}
    for row in account["rows"]:
        name = f"{row['kind']} {row['label']}".strip()
        cells[name] = (cells.get(name) or 0) + row["bytes"]
    if account["listed_bytes"] is None:
        cells["unknown"] = None
    cells["other processes"] = account["other_processes_bytes"]
    cells["unlisted"] = account["unlisted_bytes"]
    cells["in use"] = account["used_bytes"]
    return cells


def _text(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _MIB:.1f}"
