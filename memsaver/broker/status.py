"""The status of a pool: its figures, and the reports of its clients."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

from memsaver import ledger
from memsaver.broker import protocol
from memsaver.broker.clients import Client, Clients
from memsaver.broker.monitor import ProcessMonitor
from memsaver.broker.pool import Pool
from memsaver.broker.protocol import BACKUPS, STATES, MalformedError, Message
from memsaver.broker.reclaim import Reclaim
from memsaver.errors import DriverError
from memsaver.process_names import process_name

log = logging.getLogger("memsaver")

REPORTS_S = 0.2  # time for which a status waits for reports
_MOST_HOLDINGS = 500


class DeviceMemory(Protocol):
    """The driver's figures of a device: csrc/driver/physical.h."""

    def holdings(self) -> list[tuple[int, int, int | None]]: ...
    def lists_all(self) -> bool: ...
    def used_bytes(self) -> int | None: ...


@dataclass(eq=False)
class StatusRequest:
    """A ``status`` that waits for reports of clients."""

    client: Client
    serial: int
    deadline: float
    awaited: set[Client]


class StatusReporter:
    """Answers requests for the status of a pool. ``device``, ``uuid``: of its memory. ``memory``: the driver's figures.

    The status is JSON::

        {"device": "cuda:0" or "cpu", "uuid": str, "pid": int,   # of the broker
         "capacity_bytes": int, "total_bytes": int, "idle_bytes": int, "leaving_bytes": int,
         "device_memory": {"used_bytes": int or None, "holdings": [[pid, bytes, imported bytes or None]],
                           "lists_all": bool},                                          # see memsaver/ledger
         "clients": [{"pid": int, "name": str, "held_bytes": int, "leaving_bytes": int,    # that it was to drop
                      "attached_bytes": int, "connected": bool,
                      "exited": bool, "kept_by": [{"pid", "name"}],   # processes that keep its memory
                      "waiting": [{"needed_bytes", "granted_bytes", "seconds"}],      # in the order of the queue
                      "unused_bytes": int or None, "unused_why": str,   # kept at the last reclaim; None: none yet
                      "report_age_s": float or None,                                  # None: no report yet
                      "regions": [{"tag", "allocated_bytes", "mapped_bytes", "backup_bytes", "state",
                                   "backup"}],
                      "ledger": {"imported_bytes": int or None, "rows": [[kind, label, state, bytes]]} or None,
                      "ledger_age_s": float or None}]}

    ``total_bytes`` counts chunks that exist. Of those, ``idle_bytes`` can be granted, and ``leaving_bytes`` return to
    the driver when clients have dropped their handles.
    """

    def __init__(
        self,
        pool: Pool,
        clients: Clients,
        monitor: ProcessMonitor,
        memory: DeviceMemory,
        device: str,
        uuid: str,
        reclaim: Reclaim,
    ) -> None:
        self._pool = pool
        self._clients = clients
        self._monitor = monitor
        self._memory = memory
        self._device = device
        self._uuid = uuid
        self._reclaim = reclaim
        self._requests: list[StatusRequest] = []

    def answer(self, now: float) -> None:
        """Answers the requests that have all reports, or that have waited for ``REPORTS_S``."""
        for request in [each for each in self._requests if not each.awaited or each.deadline <= now]:
            self._requests.remove(request)
            self._send(request)

    def deadlines(self) -> list[float]:
        return [request.deadline for request in self._requests]

    def cancel(self, client: Client) -> None:
        """Cancels the requests of a disconnected client, and the wait of others for its report."""
        self._requests = [request for request in self._requests if request.client is not client]
        for request in self._requests:
            request.awaited.discard(client)

    def _send(self, request: StatusRequest) -> None:
        rows = [self._row(client) for client in self._clients.values() if client.is_user]
        rows.sort(key=lambda row: row["pid"])
        status = {
            "device": self._device,
            "uuid": self._uuid,
            "pid": os.getpid(),
            **self._pool.describe(),
            "device_memory": self._device_memory(),
            "clients": rows,
        }
        # The status has to fit into one packet. If it is too long, the longest lists of regions are left out, with the
        # ledgers of their clients.
        while len(text := json.dumps(status, separators=(",", ":"))) > protocol.LONGEST_PACKET - 64:
            longest = max(rows, key=_length)
            if _length(longest):
                longest["regions"], longest["ledger"] = [], None
            else:
                rows.pop()
        request.client.send(Message("status", (request.serial,), text))

    def _row(self, client: Client) -> dict[str, Any]:
        reported_at = client.reported_at
        client.read_name()
        return {
            "pid": client.pid,
            "name": client.name,
            "held_bytes": client.held_bytes,
            "leaving_bytes": sum(
                chunk.size
                for chunk in client.imported.values()
                if chunk.is_leaving and client is next(iter(chunk.importers))
            ),
            "attached_bytes": self._pool.attached_bytes(client.pid),
            "connected": client.is_connected,
            "exited": client.process.has_exited,
            "kept_by": [{"pid": pid, "name": process_name(pid)} for pid in self._monitor.keepers_of(client.process)],
            "waiting": self._pool.waiting(client),
            **self._reclaim.describe(client),
            "report_age_s": None if reported_at is None else round(time.monotonic() - reported_at, 3),
            "regions": client.report,
            "ledger": client.ledger,
            "ledger_age_s": None if client.ledger_at is None else round(time.monotonic() - client.ledger_at, 3),
        }

    def _device_memory(self) -> dict[str, Any]:
        memory = self._memory
        try:
            return {
                "used_bytes": memory.used_bytes(),
                "holdings": memory.holdings()[:_MOST_HOLDINGS],
                "lists_all": memory.lists_all(),
            }
        except DriverError as error:
            log.warning("the driver's figures of %s: %s", self._device, error)
            return {"used_bytes": None, "holdings": [], "lists_all": False}

    # Messages of clients

    def usage(self, client: Client, message: Message) -> None:
        client.send(Message("usage", (message.words[0], self._pool.available_bytes(), self._pool.capacity)))

    def report(self, client: Client, message: Message) -> None:
        has_ledger, *words = message.words
        tags = message.text.split("\n") if words else []
        if len(words) != 5 * len(tags):
            raise MalformedError(f"a report has {len(words) // 5} rows and {len(tags)} tags")
        rows = []
        for at, tag in enumerate(tags):
            allocated, mapped, backed_up, state, backup = words[5 * at : 5 * at + 5]
            if state >= len(STATES) or backup >= len(BACKUPS):
                raise MalformedError(f"a report has state {state} and policy {backup}")
            rows.append({
                "tag": tag, "allocated_bytes": allocated, "mapped_bytes": mapped, "backup_bytes": backed_up,
                "state": STATES[state], "backup": BACKUPS[backup],
            })  # fmt: skip
        client.report = rows
        client.reported_at = time.monotonic()
        client.queried_at = None
        if has_ledger and client.ledger_queried_at is None:
            client.ledger_queried_at = client.reported_at
        # A client whose ledger missed the last deadline is not waited for: a thread of it may hold the GIL for long.
        announced_at = client.ledger_queried_at
        if announced_at is None or client.reported_at >= announced_at + REPORTS_S:
            self._stop_waiting(client)

    def ledger(self, client: Client, message: Message) -> None:
        try:
            client.ledger = ledger.decoded(message.text)
        except ValueError as error:
            raise MalformedError(str(error)) from None
        client.ledger_at = time.monotonic()
        client.ledger_queried_at = None
        self._stop_waiting(client)

    def _stop_waiting(self, client: Client) -> None:
        for request in self._requests:
            request.awaited.discard(client)

    def status(self, client: Client, message: Message) -> None:
        now = time.monotonic()
        awaited = set()
        for each in self._clients.values():
            if not each.is_user or not each.is_connected:
                continue
            if each.queried_at is None:
                each.queried_at = now
                each.send(Message("query"))
            if now < each.queried_at + REPORTS_S:  # a client that missed the last deadline is not waited for
                awaited.add(each)
        self._requests.append(StatusRequest(client, message.words[0], now + REPORTS_S, awaited))


def _length(row: dict[str, Any]) -> int:
    return len(row["regions"]) + (len(row["ledger"]["rows"]) if row["ledger"] is not None else 0)
