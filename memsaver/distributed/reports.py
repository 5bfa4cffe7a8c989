"""The report of a turn that exceeds its deadline: the parts of all processes come through the store to one rank.

The thread of the heartbeats looks for requests, so the part of a process arrives while its main thread hangs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memsaver._results import daemon
from memsaver.distributed.link import Link
from memsaver.distributed.messages import dumps, loads
from memsaver.errors import Error
from memsaver.guests.store import Pace
from memsaver.turns import reports

log = logging.getLogger("memsaver")

_SILENT_S = 3.0  # without a heartbeat of rank 0, which sends one a second
_PARTS_S = 4.0  # bound of the wait for the parts: a process looks for requests once a second


@dataclass
class Activity:
    """The call that a process makes for its group, and its begin. One thread writes, others read."""

    process: int
    _now: tuple[str, float] = field(default_factory=lambda: ("is outside of enter()", time.monotonic()))

    def begin(self, what: str) -> None:
        self._now = what, time.monotonic()

    def __str__(self) -> str:
        what, since = self._now
        return f"{what} since {time.monotonic() - since:.1f} s"


class Reporter:
    """Answers the requests for the part of this process."""

    def __init__(self, connect: Callable[[], Link], activity: Activity) -> None:
        self._connect, self._activity = connect, activity
        self._seen: bytes | None = None

    def look(self, link: Link) -> None:
        """Starts a thread that sends the part, if there is a new request. Raises memsaver.Error without the store."""
        request = link.get("report")
        if request is not None and request != self._seen:
            self._seen = request
            try:
                daemon(partial(self._answer, request.decode()), "memsaver report")
            except RuntimeError as error:  # the heartbeats go on
                log.warning("no part of a report was sent: %s", error)

    def _answer(self, request: str) -> None:
        with contextlib.suppress(Error):  # without the store no process reads it
            link, doing, stage = self._connect(), str(self._activity), reports.stage()
            sent = {
                "request": request,
                "doing": doing if stage is None else f"{doing}; {stage}",
                "text": reports.part(),
            }
            link.set(f"part/{self._activity.process}", dumps(sent))


@dataclass(frozen=True)
class Report:
    """A report. ``path``: None if there is no file. ``doing``: the calls of processes that have sent their parts."""

    path: str | None
    doing: Mapping[int, str]


class Collector:
    """Asks all processes for their parts, and writes the file. In rank 0, or in another rank while that is silent."""

    def __init__(self, link: Link, hello: Callable[[int], Mapping[str, Any] | None], count: int, process: int) -> None:
        self._link, self._hello, self._count, self._process = link, hello, count, process
        self._requests = 0

    def collect(self, title: str) -> Report:
        """Waits for the parts within a bound, and not longer than until another process asks for a report.

        Raises memsaver.Error if the store cannot be reached.
        """
        self._requests += 1
        request = f"{self._process}/{self._requests}"
        self._link.set("report", request)
        parts: dict[int, dict[str, str]] = {}
        began = time.monotonic()
        pace, until = Pace(), began + _PARTS_S
        keys = ["report", *(f"part/{process}" for process in range(self._count))]
        asked: bytes | None = request.encode()
        while len(parts) < self._count and asked == request.encode() and time.monotonic() < until:
            pace.sleep(until)
            asked, *contents = self._link.get_all(keys)
            found = [loads(content) if content is not None else {} for content in contents]
            # Those of an earlier pass stay: a process overwrites its part for the request of another one.
            parts |= {process: each for process, each in enumerate(found) if each.get("request") == request}
        path = reports.save(title, f"rank {self._process}", self._lines(parts, time.monotonic() - began))
        return Report(path, {process: each["doing"] for process, each in parts.items()})

    def _lines(self, parts: Mapping[int, Mapping[str, str]], waited: float) -> Sequence[str]:
        lines: list[str] = []
        for process in range(self._count):
            lines += ["", f"== rank {process}, {_where(self._hello(process))} =="]
            if process in parts:
                lines += [f"it {parts[process]['doing']}", parts[process]["text"]]
            else:
                why = "it is stopped, or a native call holds the GIL"
                lines.append(f"it has sent no part within {waited:.1f} s: {why}")
        return lines


class Silence:
    """Watches the heartbeats of rank 0 from the deadline of a turn on.

    Rank 0 writes the report of a turn. If a native call holds the GIL there, or if the process is stopped, no thread
    of it runs. Then the first of the other ranks to notice writes the report.
    """

    def __init__(self, link: Link, process: int, collector: Collector) -> None:
        self._link, self._process, self._collector = link, process, collector
        self._beat: bytes | None = None
        self._since: float | None = None  # when the last heartbeat was seen first; None: not read yet
        self._reported = False
        self.report: str | None = None
        """The path of the report that this rank has written in this turn."""

    def begin(self) -> None:
        """A turn begins."""
        self._since, self._reported, self.report = None, False, None

    def look(self, number: int, phase: str) -> None:
        """Writes the report of a turn, once, if rank 0 is silent. Raises memsaver.Error without the store."""
        if self._process == 0 or self._reported:
            return
        beat, now = self._link.get("beat/0"), time.monotonic()
        if self._since is None or beat != self._beat:
            self._beat, self._since = beat, now
            return
        if now - self._since < _SILENT_S:
            return
        self._reported = True
        if self._link.exchange(f"reporter/{number}", "", str(self._process)) != str(self._process):
            return  # another rank writes it
        text = f"the turn to phase {phase!r} is late: rank 0, which leads it, has sent no heartbeat for"
        text = f"{text} {now - self._since:.1f} s"
        self.report = self._collector.collect(text).path
        log.error("%s; report: %s", text, self.report if self.report is not None else "none could be written")


def _where(hello: Mapping[str, Any] | None) -> str:
    return "which has not made its group" if hello is None else f"pid {hello['pid']} on {hello['name']}"


def name_of_method(role: str, place: int, method: str) -> str:
    """A call of a member, for ``Activity.begin()``."""
    return f"is in {method}() of its {role!r}{f' {place}' if place else ''}"
