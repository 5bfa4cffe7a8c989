"""The report of a process as a message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from memsaver import _core
from memsaver.ledger.own import own

MOST_ROWS = 100  # of one process in a message
_LONGEST_TEXT = 100  # characters of a kind, a label or a state in a message
_LARGEST = 1 << 62
_LONGEST_REPORT = _core.LONGEST_PACKET // 2  # characters of a message


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
