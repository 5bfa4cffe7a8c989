"""The demands and loans of a pool, for the trace of its broker."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from memsaver import trace
from memsaver.broker.clients import Client, Clients
from memsaver.broker.pool import Pool
from memsaver.broker.queue import Demand
from memsaver.errors import DriverError
from memsaver.trace.writer import IDLE, OUTSIDE, Writer, title

_LOOK_S = 0.1  # between two looks at the driver's figure


class Timeline:
    """Writes a demand when it is closed, and loans when they change. ``device``: its name and UUID."""

    def __init__(self, pool: Pool, clients: Clients, memory: Any, device: str) -> None:
        self._pool, self._clients, self._memory, self._device = pool, clients, memory, device
        self._stalls: dict[Demand, tuple[float, list[dict[str, Any]]]] = {}  # with the other holders at that time
        self._counters: dict[str, dict[str, int]] = {}  # as they were written last
        self._outside, self._looked_at = 0, -_LOOK_S
        pool.queue.on_close = self._closed

    def step(self, writer: Writer, now: float) -> None:
        """Called after each step of the pool."""
        for demand in self._pool.queue.waiting:
            if demand.stall_reported == demand.messages and demand not in self._stalls:
                others = [each for each in self._clients.values() if each.held_bytes and each is not demand.client]
                held = [{"pid": each.pid, "name": title(each.name), "bytes": each.held_bytes} for each in others]
                self._stalls[demand] = now, held
        if now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            with suppress(DriverError):
                self._outside = max(0, (self._memory.used_bytes() or 0) - self._pool.total_bytes)
        loans = {name: 0 for name, nbytes in self._counters.get("loans", {}).items() if nbytes}
        loans |= {_name(each): each.held_bytes for each in self._clients.values() if each.is_user}
        for kind, values in (("loans", loans), ("pool", {IDLE: self._pool.idle_bytes, OUTSIDE: self._outside})):
            if values and values != self._counters.get(kind):
                self._counters[kind] = values
                writer.event("C", kind, f"{kind} {self._device}", now, values)

    def _closed(self, demand: Demand) -> None:
        stalled_at, holders = self._stalls.pop(demand, (None, []))
        if (writer := trace.active) is not None:
            until = time.monotonic() if demand.parts else demand.granted_at
            figures = {
                "pid": demand.client.pid, "bytes": demand.needed, "granted_bytes": demand.needed - demand.remaining,
                "waited_s": 0.0 if stalled_at is None else max(0.0, until - stalled_at), "holders": holders,
            }  # fmt: skip
            name, number = f"demand of {_name(demand.client)}", {"local": str(demand.order)}
            for kind, at in (("b", demand.opened_at), ("e", until)):
                writer.event(kind, "demand", name, at, figures, id2=number)


def _name(client: Client) -> str:
    return f"{title(client.name)} ({client.pid})"
