"""Reads /proc: finds processes that run or exit, hold the end of a pipe, or inherited a driver's descriptors.

psutil has no pidfds, no flags of a process, and no descriptors of pipes and devices.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass

ROOT = "/proc"
# CUDA's devices; the table of a host device
_DRIVER_FILE = re.compile(r"/dev/nvidia.*|/.*/memsaver(\.\d+){3}( \(deleted\))?")
_EXITING = 0x4  # PF_EXITING of the kernel
_FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC
_GONE = (FileNotFoundError, ProcessLookupError)  # a lack of descriptors is not among them


def is_alive(pid: int) -> bool:
    """Whether a process with this pid runs. False also if it cannot be opened.

    Not ``psutil.pid_exists()``, which counts zombies, nor ``status()``: a zombie may have running threads.
    """
    try:
        file = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return not has_exited(file)
    finally:
        os.close(file)


def has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@dataclass(frozen=True)
class Status:
    """A line of /proc/PID/stat. Processes that have the same pid one after the other differ in ``start``."""

    pid: int
    parent: int
    flags: int
    start: int  # clock ticks since boot
    state: str

    @property
    def is_forked(self) -> bool:
        """Whether it has not called exec since it was forked. True if unknown: some sandboxes report no flags."""
        return bool(self.flags & _FORKED_WITHOUT_EXEC) or not self.flags


def read(pid: int) -> Status | None:
    """Reads the status of a process. None: there is none. A zombie has a status, and may have running threads."""
    try:
        with open(f"{ROOT}/{pid}/stat", errors="replace") as file:  # the name of a process may be no UTF-8
            fields = file.read().rpartition(")")[2].split()
    except _GONE:
        return None
    return Status(pid, int(fields[1]), int(fields[6]), int(fields[19]), fields[0])


def keepers(inodes: Collection[int]) -> Iterator[tuple[Status, set[int]]]:
    """Finds the processes that may keep what an exited process had, without this process.

    They have not called exec since they were forked, and hold the write end of one of these pipes, or are exiting:
    /proc lists no descriptors of an exiting process, while the kernel closes them one after another. Yields each with
    the inodes of its pipes: none for an exiting one. Raises OSError if /proc cannot be read.
    """
    links = {f"pipe:[{inode}]": inode for inode in inodes}
    for process in _forked():
        with contextlib.suppress(*_GONE, PermissionError):
            if process.flags & _EXITING:
                if os.stat(f"{ROOT}/{process.pid}").st_uid == os.geteuid():
                    yield process, set()
                continue
            files = _descriptors(process.pid)
            pipes = [(links[target], os.lstat(path).st_mode) for target, path in files if target in links]
            if held := {inode for inode, mode in pipes if mode & stat.S_IWUSR}:  # open for writing
                yield process, held


def inheritors(pid: int) -> list[int]:
    """Finds the processes that may hold a process's descriptors of a device's driver.

    These are its descendants that have not called exec, which closes the descriptors, and have a file of a driver open.
    So does a descendant that this user may not examine.
    """
    processes = [process for process in _forked() if process.state not in "ZX"]  # a zombie has no descriptors
    family = {pid}
    while more := {process.pid for process in processes if process.parent in family} - family:
        family |= more
    return sorted(each for each in family - {pid} if _has_driver_file(each))


def _has_driver_file(pid: int) -> bool:
    try:
        return any(_DRIVER_FILE.fullmatch(target) for target, _ in _descriptors(pid))
    except _GONE:
        return False
    except PermissionError:
        return True


def _forked() -> Iterator[Status]:
    """The processes that have not called exec since they were forked, without this process."""
    for pid in (int(name) for name in os.listdir(ROOT) if name.isdigit()):
        with contextlib.suppress(PermissionError):
            process = read(pid) if pid != os.getpid() else None
            if process is not None and process.is_forked:
                yield process


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """The target and the path of each descriptor."""
    folder = f"{ROOT}/{pid}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(path), path
