"""Writes a trace: a line for each event, appended, so that the file of a killed process can be read.

All processes of a host have one clock, CLOCK_MONOTONIC, and can share a file. Lines are made and written apart from
transitions that are shorter than this work: by a thread, 10 ms later.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from memsaver import _core
from memsaver.process_names import process_name
from memsaver.trace import title_of

log = logging.getLogger("memsaver")

OUTSIDE, IDLE = "outside of regions", "idle in the pool"  # owners of memory beside regions
Args = Mapping[str, Any]

_LONG_S = 0.005  # a transition that is written before its call returns
_BATCH_S = 0.01  # time until others are written
_tracks: dict[str, int] = {}  # their numbers, the same in all traces of the process


class Writer:
    """The trace of one process. ``%p`` in ``path`` stands for its pid. The file is made by the first event.

    An error of a write ends the trace, and is logged. Times are those of ``time.monotonic()``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._pid = os.getpid()
        self._file: int | None = None
        self._ended = False
        self._writing = threading.RLock()
        self._events: deque[Callable[[], str]] = deque()  # not written yet
        self._wake, self._thread = threading.Event(), threading.Thread(target=self._serve, name="memsaver trace")
        self._thread.daemon = True
        self._lanes: list[float] = []  # tracks of transitions that overlap: the end of the last one of each
        self._tracks: set[str] = set()  # that have a name
        self._names: list[str] = []  # lines with new ones
        self._devices: dict[str, str] = {}  # the names of their counters
        self._held: dict[str, dict[str, int]] = {}  # bytes by device and owner, as they were written last

    def transition(self, before: Any, began: float, record: Any, events: Iterable[Any]) -> None:
        """Writes a transition that has ended.

        ``before``: the memory when it began; ``record``: its TransitionRecord; ``events``: those of the core.
        """
        text = partial(self._transition, before, _core.region_memory(), began, record, events)
        self._add(text, now=record.seconds >= _LONG_S)

    def event(
        self, kind: str, cat: str, name: str, at: float | None = None, args: Args | None = None, **more: Any
    ) -> None:
        """Writes another event. ``kind``: its "ph" in the format; ``at``: None for now; ``more``: see ``_line()``."""
        self._add(partial(self._line, kind, cat, name, time.monotonic() if at is None else at, args or {}, **more))

    def flush(self) -> None:
        """Writes the events so far."""
        with self._writing:
            if self._ended:  # the file is closed, and its number may be that of another file
                return
            try:
                text = "".join([make() for make in self._taken()])
                if text:
                    if self._file is None:
                        self._file = self._open()
                    _write(self._file, "".join(self._names) + text)
                    self._names.clear()
            except Exception as error:
                self._ended = True
                log.error("the trace ends: %s cannot be written: %s", self.path, error)

    def _taken(self) -> Iterator[Callable[[], str]]:
        with suppress(IndexError):  # also where a finalizer in this thread has flushed meanwhile
            while True:
                yield self._events.popleft()

    def end(self, exits: bool = False) -> None:
        """Ends the trace. ``exits``: the process ends, and its memory returns."""
        if exits:
            self._add(partial(self._memory, time.monotonic(), None))
        with self._writing:
            self.flush()
            self._ended = True
            if self._file is not None:
                os.close(self._file)
                self._file = None
        self._wake.set()

    def _add(self, text: Callable[[], str], now: bool = False) -> None:
        if self._ended:
            return
        self._events.append(text)
        if now:
            self.flush()
        elif not self._wake.is_set():
            self._wake.set()
            if self._thread.ident is None:
                with suppress(RuntimeError):  # another thread has started it, or the interpreter exits
                    self._thread.start()

    def _serve(self) -> None:
        while self._wake.wait() and not self._ended:
            time.sleep(_BATCH_S)
            self._wake.clear()
            self.flush()

    def _transition(self, before: Any, after: Any, began: float, record: Any, events: Iterable[Any]) -> str:
        name = title_of(record.pause, record.resume)
        names = ("number", "outcome", "thread", "error", "released_bytes", "restored_bytes", "copied_bytes")
        figures = {each: getattr(record, each) for each in names}
        lane = next((lane for lane, end in enumerate(self._lanes) if end <= began), len(self._lanes))
        self._lanes[lane : lane + 1] = [began + record.seconds]
        text, beside = self._memory(began, before), f" {lane + 1}" if lane else ""
        track = f"transitions{beside}"
        text += self._line("X", "transition", name, began, figures, track, until=began + record.seconds)
        ends = [*(began + each.began_s for each in record.stages[1:]), began + record.seconds]
        for each, until in zip(record.stages, ends):
            name = each.name if each.guest is None else f"{each.name} {each.guest}"
            text += self._line("X", "stage", name, began + each.began_s, {}, track, until=until)
        for device, kind, since, until, nbytes, holders in events:
            held = [{"pid": pid, "name": title(process_name(pid)), "bytes": part} for pid, part in holders]
            name = f"waits for {', '.join(each['name'] for each in held)}" if held else kind
            track, figures = f"{device} {kind}{beside}", {"bytes": nbytes} | ({"holders": held} if held else {})
            text += self._line("X", kind.split()[0], name, began + since, figures, track, until=began + until)
        return text + self._memory(began + record.seconds, after)

    def _memory(self, at: float, memory: Any) -> str:
        """Counters of the devices whose memory has changed. ``memory``: None if the process has none any more."""
        held = {device: dict.fromkeys(owners, 0) for device, owners in self._held.items()}
        for tag, device, mapped, offered in memory or ():
            owners = held.setdefault(device, {})
            owners[tag] = owners.get(tag, 0) + mapped
            if offered:
                owners[f"{tag} (offered)"] = owners.get(f"{tag} (offered)", 0) + offered
        text = ""
        for device, owners in held.items():
            if owners != self._held.get(device):
                if device not in self._devices:
                    self._devices[device] = f"memory {device} {_core.device_uuid(device)}"
                text += self._line("C", "memory", self._devices[device], at, owners)
        self._held = held
        return text

    def _line(
        self, kind: str, cat: str, name: str, at: float, args: Args, track: str = "", until: float | None = None,
        **more: Any,
    ) -> str:  # fmt: skip
        """The line of an event. The first one of a track names it.

        Times are whole microseconds: so spans of a track nest, also where one ends with another.
        """
        ts, tid = int(1e6 * at), self._pid
        if until is not None:
            more["dur"] = int(1e6 * until) - ts
        if track:  # tids of all processes differ: Perfetto finds the thread of a name by its tid alone
            tid = self._pid << 10 | _tracks.setdefault(track, len(_tracks) + 1)
            if track not in self._tracks:
                self._tracks.add(track)
                self._names.append(self._line("M", "", "thread_name", 0, {"name": track}, tid=tid))
        event = {"ph": kind, "cat": cat, "name": name, "pid": self._pid, "tid": tid, "ts": ts, **more, "args": args}
        return dumps(event, separators=(",", ":")) + ",\n"

    def _open(self) -> int:
        file = os.open(self.path.replace("%p", str(self._pid)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # the first one of several processes writes the beginning
        if not os.fstat(file).st_size:
            _write(file, "[\n")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # of the clock
        name = {"name": title(process_name(self._pid)), "boot": boot}
        self._names.insert(0, self._line("M", "", "process_name", 0, name))
        return file


def _write(file: int, text: str) -> None:
    """In one call, if the system can: then lines of several processes do not mix."""
    data = text.encode()
    while data:
        data = data[os.write(file, data) :]


def title(name: str) -> str:
    """The name of a process. That of an actor is without the method that Ray adds for the time of a call."""
    return name.removeprefix("ray::").partition(".")[0] if name.startswith("ray::") else name
