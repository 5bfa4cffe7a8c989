"""Whether a rank's process still runs: its pid on the same host, else heartbeats in the store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from memsaver._results import daemon
from memsaver.broker import procfs
from memsaver.distributed.messages import LostRankError
from memsaver.guests.store import StoreError, StoreLink

_BEAT_S = 1.0


def hello() -> str:
    """This process, in a form that processes of the same host and pid namespace can look up."""
    status = procfs.read(os.getpid())
    start = status.start if status is not None else 0
    return json.dumps({"host": _host(), "name": socket.gethostname(), "pid": os.getpid(), "start": start})


def start_heart(link: StoreLink, process: int, then: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    """Starts a thread that writes a heartbeat each second, until an event is set or the store has ended.

    ``link``: a direct one, of the thread. ``then``: called after each heartbeat. Neither refers to the group, which can
    be collected meanwhile.
    """
    stop = threading.Event()

    def beat() -> None:
        count = 0
        with contextlib.suppress(StoreError):  # without the store no process can be told
            while not stop.wait(_BEAT_S if count else 0.0):
                count += 1
                link.set(f"beat/{process}", str(count))
                then()

    return daemon(beat, "memsaver heart", stop.set), stop


class Watch:
    """Finds out whether processes have ended."""

    def __init__(self, link: StoreLink, heartbeat_timeout: float) -> None:
        self._link, self._heartbeat_timeout, self._host = link, heartbeat_timeout, _host()
        self._hellos: dict[int, dict[str, Any]] = {}
        self._beats: dict[int, tuple[str | None, float]] = {}  # the last heartbeat, and when it was new

    def check(self, process: int) -> None:
        """Raises LostRankError if a process that has made its group has ended."""
        hello = self._hello(process)
        if hello is None:
            return
        if hello["host"] == self._host:
            status = procfs.read(hello["pid"])
            if status is None or status.start != hello["start"] or not procfs.is_alive(hello["pid"]):
                raise LostRankError(f"rank {process} has ended (pid {hello['pid']})", process=process)
            return
        now, beat = time.monotonic(), self._link.get(f"beat/{process}")
        last, since = self._beats.get(process, (None, now))
        if beat != last or process not in self._beats:
            self._beats[process] = (beat, now)
        elif now - since > self._heartbeat_timeout:
            text = f"rank {process} has sent no heartbeat for {now - since:.1f} s, expected one a second"
            raise LostRankError(text, process=process)

    def forget_silence(self) -> None:
        """Heartbeats that were not read meanwhile count as new."""
        self._beats.clear()

    def named(self, process: int) -> str:
        """The process, for a report."""
        hello = self._hello(process)
        where = "which has not made its group" if hello is None else f"pid {hello['pid']} on {hello['name']}"
        return f"rank {process}, {where}"

    def _hello(self, process: int) -> dict[str, Any] | None:
        if process not in self._hellos and (found := self._link.get(f"hello/{process}")) is not None:
            self._hellos[process] = json.loads(found)
        return self._hellos.get(process)


def _host() -> str:
    """The boot of the machine and the namespace of pids. A value of its own if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.urandom(16).hex()}"
