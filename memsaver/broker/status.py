"""The status of a pool: its figures, and the reports of its clients."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from memsaver import ledger
from memsaver.broker import protocol
from memsaver.broker.clients import Client, Clients
from memsaver.broker.monitor import ProcessMonitor
from memsaver.broker.pool import Pool
from memsaver.broker.protocol import MalformedError, Message
from memsaver.broker.reclaim import Reclaim
from memsaver.errors import DriverError
from memsaver.process_names import process_name

log = logging.getLogger("memsaver")

REPORTS_S = 0.2  # time for which a status waits for reports
_MOST_HOLDINGS = 500


@dataclass
class StatusReporter:
    """Answers requests for the status of a pool. ``device``, ``uuid``: of its memory. ``memory``: the driver's figures.

    The status is JSON::

        {"device": "cuda:0" or "cpu", "uuid": str, "pid": int,   # of the broker
         "capacity_bytes": int, "total_bytes": int, "idle_bytes": int, "leaving_bytes": int,
         "device_bytes": int,   # of all of its memory
         "device_memory": {"used_bytes": int or None, "holdings": [[pid, bytes, imported bytes or None]],
                           "lists_all": bool},                                          # see memsaver/ledger
         "clients": [{"pid": int, "name": str, "held_bytes": int, "leaving_bytes": int,   # that it was to drop
                      "connected": bool, "exited": bool,
                      "kept_by": [{"pid", "name"}],   # processes that keep its memory
                      "waiting": [{"needed_bytes", "granted_bytes", "seconds"}],      # in the order of the queue
                      "unused_bytes": int or None, "unused_why": str,   # kept at the last reclaim; None: none yet
                      "report_age_s": float or None,                                  # None: no report yet
                      "is_current": bool,   # it has answered the last request for a report
                      "host_held_bytes": int or None,   # pinned host memory for backups; None: no report
                      "regions": [{"tag", "allocated_bytes", "mapped_bytes", "backup_bytes", "state", "backup",
                                   "paused_s": int}],   # whole seconds since its pause; 0: it is not paused
                      "ledger": {"imported_bytes": int or None, "rows": [[kind, label, state, bytes]]} or None}]}

    ``total_bytes`` counts chunks that exist. Of those, ``idle_bytes`` can be granted, and ``leaving_bytes`` return to
    the driver when clients have dropped their handles.
    """

    pool: Pool
    clients: Clients
    monitor: ProcessMonitor
    memory: Any  # of the device: csrc/driver/physical.h
    device: str
    uuid: str
    reclaim: Reclaim
    _requests: list[tuple[Client, int]] = field(default_factory=list)  # with their serials

    def answer(self, now: float) -> None:
        """Answers the requests if all reports have come, or are late."""
        if self._requests and not self._awaited(now):
            requests, self._requests = self._requests, []
            text = self._text()
            for client, serial in requests:
                client.send(Message("status", (serial,), text))

    def deadlines(self) -> list[float]:
        """A client that missed its deadline is not waited for again until it has answered."""
        return self._awaited(time.monotonic()) if self._requests else []

    def cancel(self, client: Client) -> None:
        """Cancels the requests of a disconnected client."""
        self._requests = [request for request in self._requests if request[0] is not client]

    def _awaited(self, now: float) -> list[float]:
        """The deadlines of the reports that are waited for."""
        queried = (each.queried_at for each in self.clients.values() if each.is_connected)
        return [at + REPORTS_S for at in queried if at is not None and now < at + REPORTS_S]

    def _text(self) -> str:
        rows = [self._row(client) for client in self.clients.values() if client.is_user]
        rows.sort(key=lambda row: row["pid"])
        status = {
            "device": self.device,
            "uuid": self.uuid,
            "pid": os.getpid(),
            "capacity_bytes": self.pool.capacity,
            "total_bytes": self.pool.total_bytes,
            "idle_bytes": self.pool.idle_bytes,
            "leaving_bytes": self.pool.leaving_bytes,
            "device_bytes": self.memory.total_bytes(),
            "device_memory": self._device_memory(),
            "clients": rows,
        }
        # The status has to fit into one packet. If it is too long, the longest reports are left out.
        while len(text := json.dumps(status, separators=(",", ":"))) > protocol.LONGEST_PACKET - 64:
            longest = max(rows, key=_length)
            if _length(longest):
                longest["regions"], longest["ledger"] = [], None
            else:
                rows.pop()
        return text

    def _row(self, client: Client) -> dict[str, Any]:
        now, reported_at, report = time.monotonic(), client.reported_at, client.report or {"regions": []}
        client.read_name()
        unused, why = self.reclaim.answers.get(client.id, (None, ""))
        return {
            "pid": client.pid,
            "name": client.name,
            "held_bytes": client.held_bytes,
            "leaving_bytes": sum(
                chunk.size
                for chunk in client.imported.values()
                if chunk.is_leaving and client is next(iter(chunk.importers))
            ),
            "connected": client.is_connected,
            "exited": client.process.has_exited,
            "kept_by": [{"pid": pid, "name": process_name(pid)} for pid in self.monitor.keepers_of(client.process)],
            "waiting": [
                {
                    "needed_bytes": demand.granted + demand.remaining,
                    "granted_bytes": demand.granted,
                    "seconds": round(now - demand.opened_at, 3),
                }
                for demand in self.pool.queue.waiting
                if demand.client is client
            ],
            "unused_bytes": unused,
            "unused_why": why,
            "report_age_s": None if reported_at is None else round(now - reported_at, 3),
            "is_current": client.queried_at is None,
            "host_held_bytes": report.get("host_held_bytes"),
            "regions": [dict(zip(ledger.REGION_FIELDS, row)) for row in report["regions"]],
            "ledger": {name: report[name] for name in ("imported_bytes", "rows")} if client.report else None,
        }

    def _device_memory(self) -> dict[str, Any]:
        memory = self.memory
        try:
            return {
                "used_bytes": memory.used_bytes(),
                "holdings": memory.holdings()[:_MOST_HOLDINGS],
                "lists_all": memory.lists_all(),
            }
        except DriverError as error:
            log.warning("the driver's figures of %s: %s", self.device, error)
            return {"used_bytes": None, "holdings": [], "lists_all": False}

    # Messages of clients

    def usage(self, client: Client, message: Message) -> None:
        client.send(Message("usage", (message.words[0], self.pool.available_bytes(), self.pool.capacity)))

    def report(self, client: Client, message: Message) -> None:
        try:
            client.report = ledger.decoded(message.text)
        except ValueError as error:
            raise MalformedError(str(error)) from None
        client.reported_at = time.monotonic()
        client.queried_at = None

    def status(self, client: Client, message: Message) -> None:
        now = time.monotonic()
        for each in self.clients.values():
            if each.is_user and each.is_connected and each.queried_at is None:
                each.queried_at = now
                each.send(Message("query"))
        self._requests.append((client, message.words[0]))


def _length(row: dict[str, Any]) -> int:
    return len(row["regions"]) + (len(row["ledger"]["rows"]) if row["ledger"] is not None else 0)
