"""A ledger and its rows."""

from __future__ import annotations

from dataclasses import dataclass

Part = tuple[str, str, str, int]  # kind, label, state, bytes


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
        label: The tag of the region, the name of the guest, or the name of the measurement. ``"stacks"`` for the
            growth of the stacks of the device's threads since the context was measured. Else empty.
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
    """The ledger of a device. The sum of the rows is ``used_bytes``, and no row is negative.

    The figures of several processes are not read at one moment. If one of them changes meanwhile, the rows may exceed
    the driver's figures. They are read again once. Then a process whose rows exceed its listed bytes has no row
    ``"unknown"``, and rows that exceed ``used_bytes`` are reduced.

    Attributes:
        used_bytes: The memory of the whole device in use, by the driver. None if a call of the driver fails.
        rows: By process.
        is_consistent: Whether no rows exceed the driver's figures.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> ledger = memsaver.stats().devices["cpu"].ledger
        >>> sum(row.bytes for row in ledger.rows) == ledger.used_bytes
        True
    """

    used_bytes: int | None
    rows: list[LedgerRow]
    is_consistent: bool
