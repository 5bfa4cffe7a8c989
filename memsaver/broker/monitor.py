"""Watches processes: detects that a process has exited, and that none of its kernels can run any more.

A process has *exited* when its pidfd is readable. It is *torn down* when, in addition, its sentinels have hung up, the
processes that may have its descriptors have exited, and the driver no longer lists it. csrc/pool/link.h has the
reasons.
The processes that may have its descriptors are the children that it had before its sentinel, their descendants, those
that a scan after its exit finds with a sentinel, and those that are exiting when its sentinels have hung up: an exiting
process may close a sentinel before the driver's descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from memsaver.broker import procfs
from memsaver.broker.protocol import MalformedError, RefusedError

QUERY_S = 0.01  # between two queries of the driver's list
_SCAN_S = 0.02  # between two scans for the processes that hold a sentinel
_SCAN_SHARE = 0.02  # largest share of time for scans, which hold up the loop
_MOST_SENTINELS = 16  # of one process, which opens another one only after an exec


@dataclass(eq=False)
class Process:
    """A watched process, until it is torn down or no longer in use."""

    pid: int
    file: int  # its pidfd
    start: int = 0  # its start time by the system's clock; 0: unknown
    uses: int = 0  # connections and clients that need its end
    has_exited: bool = False
    has_sentinel: bool = False  # it has sent a sentinel
    sentinels: dict[int, int] = field(default_factory=dict)  # read ends that have not hung up, by inode
    # Pidfds, with their pids, of processes that may have its descriptors and have not exited.
    children: dict[int, int] = field(default_factory=dict)
    was_listed: bool = False  # by the driver, at the last query after its exit
    next_query_at: float = 0.0  # of the driver's list
    is_searched: bool = False  # after its sentinels hung up, the exiting processes were added to its children


class ProcessMonitor:
    """The watched processes. ``compute_pids``: returns the pids that the driver lists now."""

    def __init__(self, selector: selectors.BaseSelector, compute_pids: Callable[[], Iterable[int]]) -> None:
        self._selector = selector
        self._compute_pids = compute_pids
        self._running: dict[int, Process] = {}
        self._new_exits: list[Process] = []  # not yet returned by take_exited()
        self._tearing_down: dict[Process, None] = {}  # exited, and returned
        self._scan_at = 0.0  # when to scan next for the processes that hold a sentinel

    def watch(self, pid: int) -> Process:
        """Watches a process for one more user. Raises OSError if it has exited or cannot be watched."""
        process = self._running.get(pid)
        if process is not None and procfs.has_exited(process.file):
            self._record_exit(process)  # and another process has its number
            process = None
        if process is None:
            process = self._running[pid] = Process(pid, os.pidfd_open(pid))
            self._selector.register(process.file, selectors.EVENT_READ, partial(self._ready, process))
            with contextlib.suppress(OSError):
                status = procfs.read(pid)
                process.start = 0 if status is None else status.start
        process.uses += 1
        return process

    def retain(self, process: Process) -> None:
        """Adds a user of a watched process."""
        process.uses += 1

    def release(self, process: Process) -> None:
        """Removes a user of a process. Without users, a process that has not exited is no longer watched."""
        process.uses -= 1
        if not process.uses and self._running.get(process.pid) is process:
            del self._running[process.pid]
            self._selector.unregister(process.file)
            self._forget(process)

    def add_sentinel(self, process: Process, files: list[int]) -> None:
        """Takes the descriptor of a ``hello`` message out of a list. Finds the children that were forked before.

        Raises MalformedError for another descriptor, and RefusedError if the children cannot be watched.
        """
        status = os.fstat(files[0])
        if not stat.S_ISFIFO(status.st_mode) or fcntl.fcntl(files[0], fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            raise MalformedError("a descriptor is not the read end of a pipe")
        process.has_sentinel = True
        inode = status.st_ino
        if inode in process.sentinels:
            return
        if len(process.sentinels) >= _MOST_SENTINELS:
            raise MalformedError(f"process {process.pid} has sent {_MOST_SENTINELS} other sentinels")
        try:
            for pid in procfs.inheritors(process.pid):
                self._add_found(process, pid)
        except OSError as error:
            text = f"the children of process {process.pid} cannot be watched: {error.strerror}"
            raise RefusedError(text, "exhausted") from None
        process.sentinels[inode] = file = files.pop(0)
        os.set_blocking(file, False)

        def ready(_: int) -> None:
            if process.sentinels.get(inode) != file:
                return  # closed earlier in this turn
            with contextlib.suppress(BlockingIOError):
                if not os.read(file, 1 << 16):  # no process has the write end
                    self._unregister(process.sentinels.pop(inode))

        self._selector.register(file, selectors.EVENT_READ, ready)

    def take_exited(self) -> list[Process]:
        """The processes that have exited since the last call. Their kernels may still run."""
        exited, self._new_exits = self._new_exits, []
        for process in exited:
            self._tearing_down[process] = None
            process.was_listed = process.pid in self._compute_pids()
        if exited:
            self._scan_at = 0.0
        return exited

    def take_torn_down(self) -> list[Process]:
        """The processes that were torn down since the last call. Nothing of them can run any more.

        Processes without users are forgotten.
        """
        for process in [each for each in self._tearing_down if not each.uses]:
            del self._tearing_down[process]
            self._forget(process)
        self._scan()
        torn_down = []
        for process in list(self._tearing_down):
            if process.is_searched and not process.children and not self._is_listed(process):
                del self._tearing_down[process]
                self._forget(process)
                torn_down.append(process)
        return torn_down

    def deadlines(self) -> list[float]:
        """Times of the next calls of take_torn_down() that no descriptor announces."""
        deadlines = []
        if any(not each.sentinels and not each.children for each in self._tearing_down):
            deadlines.append(time.monotonic() + QUERY_S)
        if any(each.sentinels for each in self._tearing_down):
            deadlines.append(self._scan_at)
        return deadlines

    def keepers_of(self, process: Process) -> list[int]:
        """Known processes that run and may hold descriptors of an exited process."""
        return sorted(process.children.values()) if process.has_exited else []

    def close(self) -> None:
        """Closes all descriptors."""
        for process in self._running.values():
            self._selector.unregister(process.file)
        for process in (*self._running.values(), *self._new_exits, *self._tearing_down):
            self._forget(process)
        self._running.clear()
        self._new_exits.clear()
        self._tearing_down.clear()

    def _ready(self, process: Process, _: int) -> None:
        if self._running.get(process.pid) is process:  # else its watch ended earlier in this turn
            self._record_exit(process)

    def _record_exit(self, process: Process) -> None:
        del self._running[process.pid]
        self._selector.unregister(process.file)
        process.has_exited = True
        self._new_exits.append(process)

    def _is_listed(self, process: Process) -> bool:
        """Whether the driver listed it at the last query."""
        if not process.was_listed or time.monotonic() < process.next_query_at:
            return process.was_listed
        process.next_query_at = time.monotonic() + QUERY_S
        # Its number may be another process's by now.
        process.was_listed = process.pid in self._compute_pids() and not procfs.is_alive(process.pid)
        return process.was_listed

    def _scan(self) -> None:
        """Finds the processes that may have descriptors of exited ones. A scan that fails is repeated later.

        One scan is enough after the sentinels have hung up: all holders of a sentinel are exiting or have exited then.
        """
        begun = time.monotonic()
        quiet = [each for each in self._tearing_down if not each.sentinels and not each.is_searched]
        held = [each for each in self._tearing_down if each.sentinels] if begun >= self._scan_at else []
        if not quiet and not held:
            return
        with contextlib.suppress(OSError):
            for status, inodes in procfs.keepers({inode for each in held for inode in each.sentinels}):
                for process in quiet:
                    if not inodes and status.start >= process.start:  # a child does not start before its parent
                        self._add_found(process, status.pid, status.start)
                for process in held:
                    if inodes & process.sentinels.keys():
                        self._add_found(process, status.pid, status.start)
            for process in (*quiet, *held):
                for child in list(process.children.values()):
                    for pid in procfs.inheritors(child):
                        self._add_found(process, pid)
            for process in quiet:
                process.is_searched = True
        ended = time.monotonic()
        self._scan_at = ended + max(_SCAN_S, (ended - begun) / _SCAN_SHARE)

    def _add_found(self, process: Process, pid: int, start: int | None = None) -> None:
        """Watches a process that may have descriptors of another one.

        ``start``: of the process that was found, since another one may have its number now.
        """
        if pid == process.pid:
            return
        try:
            file = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        is_known = any(number == pid and not procfs.has_exited(known) for known, number in process.children.items())
        try:
            now = procfs.read(pid)
        except OSError:  # for instance because `file` has the last free descriptor
            os.close(file)
            raise
        if now is None or start not in (None, now.start) or is_known or procfs.has_exited(file):
            os.close(file)
            return
        process.children[file] = pid

        def ready(_: int) -> None:
            if process.children.get(file) == pid and procfs.has_exited(file):
                del process.children[file]
                self._unregister(file)

        self._selector.register(file, selectors.EVENT_READ, ready)

    def _unregister(self, file: int) -> None:
        self._selector.unregister(file)
        os.close(file)

    def _forget(self, process: Process) -> None:
        os.close(process.file)
        for file in (*process.sentinels.values(), *process.children):
            self._unregister(file)
        process.sentinels.clear()
        process.children.clear()
