"""The report of a turn whose leader is silent after the deadline: another rank writes it."""

from __future__ import annotations

import logging
import time

from memsaver.distributed.link import Link
from memsaver.distributed.reports import Collector

log = logging.getLogger("memsaver")

_SILENT_S = 3.0  # without a heartbeat of rank 0, which sends one a second


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
