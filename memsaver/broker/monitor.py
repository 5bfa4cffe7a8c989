"""Watches processes: detects that a process has exited, and that none of its kernels can run any more.

A process has *exited* when its pidfd is readable. It is *torn down* when, in addition, its sentinels have hung up, the
processes that may have its descriptors have exited, and the driver no longer lists it. csrc/pool/sentinel.h has the
reasons.
The processes that may have its descriptors are the children that it reported, those that a scan after its exit finds
with a sentinel, and those that are exiting when the monitor waits for nothing else: an exiting process may close a
sentinel before the driver's descriptors.
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

from memsaver.broker import procfs
from memsaver.broker.protocol import ExhaustedError, MalformedError

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
    unsearched: list[int] = field(default_factory=list)  # pids whose children are still to be found
    was_listed: bool = False  # by the driver, at the last query after its exit
    next_query_at: float = 0.0  # of the driver's list
    is_searched: bool = False  # after its sentinels hung up, the exiting processes were added to its children

    @property
    def has_descriptors_open(self) -> bool:
        """Whether another process may hold the driver's descriptors that this one had."""
        return bool(self.sentinels or self.children or self.unsearched)


class ProcessMonitor:
    """The watched processes. ``compute_pids``: returns the pids that the driver lists now."""

    def __init__(self, selector: selectors.BaseSelector, compute_pids: Callable[[], Iterable[int]]) -> None:
        self._selector = selector
        self._compute_pids = compute_pids
        self._running: dict[int, Process] = {}
        self._new_exits: list[Process] = []  # not yet returned by take_exited()
        self._exited: list[Process] = []  # returned, and neither in the next collection nor forgotten
        self._tearing_down: dict[Process, None] = {}
        self._scan_at = 0.0  # when to scan next for the processes that hold a sentinel
        self._scanned: set[int] = set()  # pids of the last scan

    def watch(self, pid: int) -> Process:
        """Watches a process for one more user. Raises OSError if it has exited or cannot be watched."""
        process = self._running.get(pid)
        if process is not None and procfs.has_exited(process.file):
            self._record_exit(process)  # and another process has its number
            process = None
        if process is None:
            process = self._add(pid, os.pidfd_open(pid))
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

    def add_descriptors(self, process: Process, files: list[int]) -> None:
        """Takes the descriptors of a ``sentinel`` message out of a list.

        Raises MalformedError for other descriptors, and ExhaustedError.
        """
        while files:
            status = os.fstat(files[0])
            if stat.S_ISFIFO(status.st_mode) and fcntl.fcntl(files[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                self._add_sentinel(process, status.st_ino, files)
                continue
            pid = _pid_of(files[0])
            if pid is None:
                raise MalformedError("a descriptor is neither the read end of a pipe nor a pidfd")
            self._add_child(process, pid, files)

    def take_exited(self) -> list[Process]:
        """The processes that have exited since the last call. Their kernels may still run."""
        exited, self._new_exits = self._new_exits, []
        self._exited += exited
        return exited

    def take_torn_down(self) -> list[Process]:
        """The processes that were torn down since the last call. Nothing of them can run any more.

        Processes without users are forgotten at their exit.
        """
        exited, self._exited = self._exited, []
        for process in exited:
            if process.uses:
                self._begin_teardown(process)
            else:
                self._forget(process)
        self._scan()
        self._search_exiting()
        torn_down = []
        for process in list(self._tearing_down):
            self._search_children(process)
            if process.is_searched and not process.has_descriptors_open and not self._is_listed(process):
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
        return sorted({pid for pid in process.children.values() if pid > 0}) if process.has_exited else []

    def close(self) -> None:
        """Closes all descriptors."""
        for process in self._running.values():
            self._selector.unregister(process.file)
        for process in (*self._running.values(), *self._new_exits, *self._exited, *self._tearing_down):
            self._forget(process)
        self._running.clear()
        self._new_exits.clear()
        self._exited.clear()
        self._tearing_down.clear()

    def _add(self, pid: int, file: int) -> Process:
        process = self._running[pid] = Process(pid, file)

        def ready(_: int) -> None:
            if self._running.get(pid) is process:  # else its watch ended earlier in this turn
                self._record_exit(process)

        self._selector.register(file, selectors.EVENT_READ, ready)
        return process

    def _record_exit(self, process: Process) -> None:
        del self._running[process.pid]
        self._selector.unregister(process.file)
        process.has_exited = True
        self._new_exits.append(process)

    def _begin_teardown(self, process: Process) -> None:
        self._tearing_down[process] = None
        self._scan_at = 0.0
        self._scanned.clear()
        process.was_listed = process.pid in self._compute_pids()
        process.unsearched += process.children.values()  # which may have forked as well
        self._search_children(process)

    def _is_listed(self, process: Process) -> bool:
        """Whether the driver listed it at the last query."""
        if not process.was_listed or time.monotonic() < process.next_query_at:
            return process.was_listed
        process.next_query_at = time.monotonic() + QUERY_S
        # Its number may be another process's by now.
        process.was_listed = process.pid in self._compute_pids() and not procfs.is_alive(process.pid)
        return process.was_listed

    def _add_sentinel(self, process: Process, inode: int, files: list[int]) -> None:
        process.has_sentinel = True
        if inode in process.sentinels:
            os.close(files.pop(0))
            return
        if len(process.sentinels) >= _MOST_SENTINELS:
            raise MalformedError(f"process {process.pid} has sent {_MOST_SENTINELS} other sentinels")
        file = files.pop(0)
        os.set_blocking(file, False)
        process.sentinels[inode] = file
        process.is_searched = False

        def ready(_: int) -> None:
            if process.sentinels.get(inode) != file:
                return  # closed earlier in this turn
            with contextlib.suppress(BlockingIOError):
                if not os.read(file, 1 << 16):  # no process has the write end
                    self._unregister(process.sentinels.pop(inode))

        self._selector.register(file, selectors.EVENT_READ, ready)

    def _add_child(self, process: Process, pid: int, files: list[int]) -> None:
        is_known = any(number == pid and not procfs.has_exited(file) for file, number in process.children.items())
        if pid == -1 or pid == process.pid or is_known or procfs.has_exited(files[0]):
            os.close(files.pop(0))
            return
        file = files.pop(0)
        process.children[file] = pid

        def ready(_: int) -> None:
            if process.children.get(file) != pid or not procfs.has_exited(file):
                return
            del process.children[file]
            self._unregister(file)
            if not process.has_exited:
                process.unsearched.append(process.pid)  # the child may have forked as well
                self._search_children(process)

        self._selector.register(file, selectors.EVENT_READ, ready)

    def _search_children(self, process: Process) -> None:
        """Finds children that the process did not report. Without free descriptors the search is repeated later."""
        with contextlib.suppress(OSError):
            while process.unsearched:
                for pid in procfs.inheritors(process.unsearched[0]):
                    with contextlib.suppress(ProcessLookupError):
                        self._add_child(process, pid, [os.pidfd_open(pid)])
                process.unsearched.pop(0)

    def _scan(self) -> None:
        """Finds the processes that hold a sentinel of an exited process. A scan that fails is repeated later."""
        owners = {inode: each for each in self._tearing_down for inode in each.sentinels}
        begun = time.monotonic()
        if not owners or begun < self._scan_at:
            return
        with contextlib.suppress(OSError):
            pids = procfs.all_pids()
            # A process without a sentinel does not get one later, except from its parent at the fork. So each process
            # is examined once. A pid that was reused since the last scan would be missed, but pids are used in turn.
            since = min(each.start for each in owners.values())
            for inode, status in procfs.writers(owners, pids - self._scanned, since):
                self._add_holder(owners[inode], status)
            self._scanned = pids
        ended = time.monotonic()
        self._scan_at = ended + max(_SCAN_S, (ended - begun) / _SCAN_SHARE)

    def _search_exiting(self) -> None:
        """Finds the exiting processes that may have closed a sentinel, and not yet the driver's descriptors.

        One search is enough, since all holders of a sentinel have closed it by now. Without free descriptors it is
        repeated later.
        """
        quiet = [each for each in self._tearing_down if not each.has_descriptors_open and not each.is_searched]
        if not quiet:
            return
        with contextlib.suppress(OSError):
            found = procfs.exiting()
            for process in quiet:
                for status in found:
                    if status.start >= process.start:  # a child does not start before its parent
                        self._add_holder(process, status)
                process.is_searched = True

    def _add_holder(self, process: Process, status: procfs.Status) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._add_child(process, status.pid, [procfs.open_pidfd(status)])

    def _unregister(self, file: int) -> None:
        self._selector.unregister(file)
        os.close(file)

    def _forget(self, process: Process) -> None:
        os.close(process.file)
        for file in (*process.sentinels.values(), *process.children):
            self._unregister(file)
        process.sentinels.clear()
        process.children.clear()


def _pid_of(file: int) -> int | None:
    try:
        return procfs.pid_of(file)
    except OSError as error:
        raise ExhaustedError(f"a descriptor cannot be examined: {error.strerror}") from None
