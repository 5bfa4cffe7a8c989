"""The ledger of a device, read now."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from memsaver import _core
from memsaver.errors import BrokerError
from memsaver.ledger.accounts import account
from memsaver.ledger.messages import encoded
from memsaver.ledger.own import own
from memsaver.ledger.pools import of_pool
from memsaver.ledger.rows import Ledger
from memsaver.ledger.text import lines

log = logging.getLogger("memsaver")

STATUS_S = 1.0  # the longest wait for the broker's part


def read(device: str) -> Ledger:
    """The ledger of a device, by the figures of this process and its pool's broker. Read again once if inconsistent."""
    found = _read(device)
    if not found.is_consistent:
        found = _read(device)
    return found


def _read(device: str) -> Ledger:
    status = None
    if _core.in_pool(device):
        try:
            status = json.loads(_core.pool_status(device, STATUS_S))
        except BrokerError as error:
            log.debug("the ledger of %s is without its pool: %s", device, error)
    mine = own(device)  # after the status, which may wait for the reports of other processes
    return account(mine.device, [mine.report], None) if status is None else of_pool(status, mine)


def serve() -> None:
    """Sends the report of this process to brokers that query it. Returns at the exit of the interpreter."""
    while (device := _core.next_ledger_query()) is not None:
        try:
            _core.send_ledger(device, encoded(device))
        except Exception as error:  # the broker is answered without a report
            log.debug("no ledger of %s was sent: %r", device, error)


def for_error(device: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the ledger for an error, and its lines."""
    found = read(device)
    return [asdict(row) for row in found.rows], lines(found)
