"""The ledger of a device: every byte that is in use by the driver's figure, once, by process and kind.

A process that runs memsaver knows its regions, retained chunks, torch's memory and its guests. The driver lists bytes
by process. The broker knows the holder of each chunk of a shared pool. ``account()`` joins these figures: memory that
no row explains is ``"unknown"`` in a process whose bytes the driver lists, else ``"unlisted"``.
"""

from __future__ import annotations

from memsaver.ledger.accounts import Ledger, LedgerRow, described, lines, of_device, of_pool
from memsaver.ledger.reports import REGION_FIELDS, decoded, encoded, for_error, read

__all__ = [
    "REGION_FIELDS", "Ledger", "LedgerRow", "decoded", "described", "encoded", "for_error", "lines", "of_device",
    "of_pool", "read",
]  # fmt: skip
