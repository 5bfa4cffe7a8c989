"""Whether a rank's process still runs: its pid on the same host, else heartbeats in the store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from memsaver._results import daemon
from memsaver.broker import procfs
from memsaver.distributed.messages import LostRankError
from memsaver.errors import Error
from memsaver.guests.store import StoreLink

_BEAT_S = 1.0


def identity() -> dict[str, Any]:
    """This process, in a form that processes of the same host and pid namespace can look up."""
    status = procfs.read(os.getpid())
    start = status.start if status is not None else 0
    return {"host": _host(), "name": socket.gethostname(), "pid": os.getpid(), "start": start}


class Heart:
    """Writes a heartbeat to the store each second, in a thread, until ``stop`` is set or the store has ended.

    ``link``: a direct one, of the thread. ``then``: called after each heartbeat.
    """

    def __init__(self, link: StoreLink, process: int, then: Callable[[], object]) -> None:
        self.stop = threading.Event()
        # The thread does not refer to the group, which can be collected meanwhile.
        self.thread = daemon(partial(_beat, link, process, then, self.stop), "memsaver heart", self.stop.set)


def _beat(link: StoreLink, process: int, then: Callable[[], object], stop: threading.Event) -> None:
    count = 0
    with contextlib.suppress(Error):  # without the store no process can be told
        while not stop.wait(_BEAT_S if count else 0.0):
            count += 1
            link.set(f"beat/{process}", str(count))
            then()


class Watch:
    """Finds out whether processes have ended.

    ``start_timeout``: seconds from the first check of a process to its hello.
    """

    def __init__(self, link: StoreLink, heartbeat_timeout: float, start_timeout: float) -> None:
        self._link, self._heartbeat_timeout, self._start_timeout = link, heartbeat_timeout, start_timeout
        self._host = _host()
        self._hellos: dict[int, dict[str, Any]] = {}
        self._awaited: dict[int, float] = {}  # when a process without a hello was first checked
        self._beats: dict[int, tuple[str | None, float]] = {}  # the last heartbeat, and when it was new

    def hello(self, process: int) -> dict[str, Any] | None:
        """The message of a process from the start of its group, with its identity. None: it has not made it yet."""
        if process not in self._hellos and (found := self._link.get(f"hello/{process}")) is not None:
            self._hellos[process] = json.loads(found)
        return self._hellos.get(process)

    def check(self, process: int) -> None:
        """Raises LostRankError if a process has ended."""
        now, hello = time.monotonic(), self.hello(process)
        if hello is None:
            waited = now - self._awaited.setdefault(process, now)
            if waited >= self._start_timeout:
                text = f"rank {process} has not made its group within start_timeout, {self._start_timeout:g} s"
                raise LostRankError(f"{text}; has its process ended?", process=process)
            return
        if hello["host"] == self._host:
            status = procfs.read(hello["pid"])
            if status is None or status.start != hello["start"] or not procfs.is_alive(hello["pid"]):
                raise LostRankError(f"rank {process} has ended (pid {hello['pid']})", process=process)
            return
        beat = self._link.get(f"beat/{process}")
        last, since = self._beats.get(process, (None, now))
        if beat != last or process not in self._beats:
            self._beats[process] = (beat, now)
        elif now - since > self._heartbeat_timeout:
            text = f"rank {process} has sent no heartbeat for {now - since:.1f} s, expected one a second"
            raise LostRankError(text, process=process)

    def forget_silence(self) -> None:
        """Heartbeats that were not read meanwhile count as new. The wait for a hello begins anew."""
        self._beats.clear()
        self._awaited.clear()


def _host() -> str:
    """The boot of the machine and the namespace of pids. A value of its own if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.urandom(16).hex()}"
