"""Figures of a pool: how much there is, and who has it, as the clients report when somebody asks."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import Any

from memsaver import protocol
from memsaver.clients import Client, Clients, Handler
from memsaver.errors import process_name
from memsaver.pool import Pool
from memsaver.protocol import BACKUPS, STATES, MalformedError, Message

REPORTS_S = 0.2  # how long a status waits for reports


@dataclass(eq=False)
class Question:
    """A status that waits for reports."""

    client: Client
    serial: int
    deadline: float
    awaited: set[Client]


class Reports:
    """What is known of a pool's clients. ``device``, ``uuid``: whose memory it is."""

    def __init__(self, pool: Pool, clients: Clients, device: str, uuid: str) -> None:
        self._pool = pool
        self._clients = clients
        self._device = device
        self._uuid = uuid
        self._questions: list[Question] = []
        self.handlers: dict[str, Handler] = {"look": self._look, "report": self._report, "status": self._status}

    def answer(self, now: float) -> None:
        """Every question that has waited long enough."""
        for question in [each for each in self._questions if not each.awaited or each.deadline <= now]:
            self._questions.remove(question)
            self._tell(question)

    def deadlines(self) -> list[float]:
        return [question.deadline for question in self._questions]

    def left(self, client: Client) -> None:
        """A client does not speak any more: it gets no answer, and nobody waits for its report."""
        self._questions = [question for question in self._questions if question.client is not client]
        for question in self._questions:
            question.awaited.discard(client)

    def _tell(self, question: Question) -> None:
        rows = [self._row(client) for client in self._clients.values() if client.is_user]
        rows.sort(key=lambda row: row["pid"])
        status = {"device": self._device, "uuid": self._uuid, **self._pool.describe(), "clients": rows}
        # One packet has to hold it: where it is too long the longest lists of regions go.
        while len(text := json.dumps(status, separators=(",", ":"))) > protocol.LONGEST_PACKET - 64:
            longest = max(rows, key=lambda row: len(row["regions"]))
            if longest["regions"]:
                longest["regions"] = []
            else:
                rows.pop()
        question.client.send(Message("status", (question.serial,), text))

    def _row(self, client: Client) -> dict[str, Any]:
        heard = client.reported_at
        return {
            "pid": client.pid,
            "name": _name(client.pid),
            "held_bytes": self._pool.held_bytes(client.member),
            "attached_bytes": self._pool.attached_bytes(client.pid),
            "connected": client.connection is not None,
            "waiting": self._pool.waiting(client.member),
            "report_age_s": None if heard is None else round(time.monotonic() - heard, 3),
            "regions": client.report,
        }

    # What clients say

    def _look(self, client: Client, message: Message) -> None:
        rows = [(each.pid, self._pool.kept_bytes(each.member)) for each in self._clients.values()]
        rows = [(pid, kept) for pid, kept in rows if kept]
        figures = itertools.chain.from_iterable(rows[: protocol.LONGEST_PACKET // 32])
        client.send(Message("figures", (message.words[0], self._pool.available_bytes(), self._pool.capacity, *figures)))

    def _report(self, client: Client, message: Message) -> None:
        words = message.words
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
        client.asked_at = None
        for question in self._questions:
            question.awaited.discard(client)

    def _status(self, client: Client, message: Message) -> None:
        now = time.monotonic()
        awaited = set()
        for each in self._clients.values():
            if not each.is_user or each.connection is None:
                continue
            if each.asked_at is None:
                each.asked_at = now
                each.send(Message("query"))
            if now < each.asked_at + REPORTS_S:  # who did not answer the last time is not waited for again
                awaited.add(each)
        self._questions.append(Question(client, message.words[0], now + REPORTS_S, awaited))


def _name(pid: int) -> str:
    """Ray gives its actors a title, which says more than their program's name."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            title = file.read(200).split(b"\0")[0].decode(errors="replace").split(" ")[0]
    except OSError:
        title = ""
    return title if title.startswith("ray::") else process_name(pid)
