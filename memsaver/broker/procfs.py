"""Reads /proc: finds processes that run or exit, hold the end of a pipe, or inherited a driver's descriptors.

psutil is used where it has an equivalent. It has none for:

- pidfds;
- the flags of a process, and its start in exact clock ticks: one read of /proc/PID/stat gives both;
- descriptors of pipes and devices: ``open_files()`` lists regular files only;
- the inode of a program, which differs from that of a later file with the same path.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil

from memsaver import _core
from memsaver.errors import ConfigError

_DRIVER_FILE = re.compile(
    r"/dev/nvidia.*|/.*/memsaver\.\d+\.\d+( \(deleted\))?"
)  # CUDA's devices; the table of a host device
_EXITING = 0x4  # PF_EXITING of the kernel
_FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC
_GONE = (FileNotFoundError, ProcessLookupError)
_UNSEEN = (*_GONE, PermissionError)  # ended, or of another user. A lack of descriptors is not among them

# (pid, descriptor, other pid, other descriptor) -> whether both are one open file; None: unknown
SameFile = Callable[[int, int, int, int], bool | None]


def mps_error(device: str) -> ConfigError:
    return ConfigError(
        f"the memory of {device} cannot be in a shared pool under MPS: one server process runs the kernels of all "
        "processes, so the end of a process is not the end of its kernels",
        option="pool",
        value="shared",
    )


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


def pid_of(file: int) -> int | None:
    """The pid of a pidfd: -1 if the process was reaped, 0 if it is in another pid namespace. None: not a pidfd."""
    with open(f"/proc/self/fdinfo/{file}") as info:
        found = re.search(r"^Pid:\s*(-?\d+)$", info.read(), re.MULTILINE)
    return int(found[1]) if found else None


def all_pids() -> set[int]:
    return set(psutil.pids())


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
        with open(f"{psutil.PROCFS_PATH}/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except _GONE:
        return None
    return Status(pid, int(fields[1]), int(fields[6]), int(fields[19]), fields[0])


def open_pidfd(process: Status) -> int:
    """Opens a pidfd. Raises ProcessLookupError if the process has ended, also if another process has its pid now."""
    file = os.pidfd_open(process.pid)
    try:
        now = read(process.pid)
        if now is None or now.start != process.start:
            raise ProcessLookupError(f"process {process.pid} has ended")
    except BaseException:
        os.close(file)
        raise
    return file


def writers(inodes: Iterable[int], pids: Iterable[int], since: int = 0) -> list[tuple[int, Status]]:
    """Finds the processes that hold the write end of one of these pipes. Returns the inode and the process of each.

    Only processes that have not called exec since they were forked, that this user may examine, and not this process.
    ``since``: the earliest start, in clock ticks. Raises OSError if /proc cannot be read.
    """
    links = {f"pipe:[{inode}]": inode for inode in inodes}
    found = set()
    for process in _forked(pids):
        if process.start < since:
            continue
        with contextlib.suppress(*_UNSEEN):
            for _, target, path in _descriptors(process.pid):
                if target in links and _is_for_writing(path):
                    found.add((links[target], process))
    return sorted(found, key=lambda each: (each[1].pid, each[0]))


def exiting() -> list[Status]:
    """Finds other processes of this user that have not called exec since they were forked, and are exiting or zombies.

    /proc lists no descriptors of an exiting process, while the kernel closes them one after another. Raises OSError if
    /proc cannot be read.
    """
    found = []
    for process in _forked(all_pids()):
        if process.flags & _EXITING:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if psutil.Process(process.pid).uids().effective == os.geteuid():
                    found.append(process)
    return found


def inheritors(pid: int, same_file: SameFile = _core.same_file) -> list[int]:
    """Finds the processes that inherited a process's descriptors of a device's driver and still hold one.

    Such a process is a forked descendant that has not called exec, which closes these descriptors. kcmp() determines
    whether two descriptors are one open file. Where it is not permitted, as in some containers, each forked descendant
    with any descriptor of a driver counts. So does a forked descendant that this user may not examine.
    """
    own = _living(pid)
    if own is None or not (files := _driver_files(pid)):
        return []
    program = _program(pid)
    descendants = functools.cache(lambda: _descendants(pid))  # it reads all processes, and is rarely needed
    found = []
    for each in filter(None, map(_living, all_pids())):
        if each.pid == pid or each.start < own.start or not (each.is_forked or not own.flags):
            continue
        try:
            theirs = _driver_files(each.pid) if _program(each.pid) == program else []
        except PermissionError:
            if each.pid in descendants():
                found.append(each.pid)
            continue
        except _GONE:
            continue
        shared = _share_any(pid, files, each.pid, theirs, same_file)
        if shared or (shared is None and each.pid in descendants()):
            found.append(each.pid)
    return found


def _forked(pids: Iterable[int]) -> Iterator[Status]:
    """The processes that have not called exec since they were forked, without this process."""
    for pid in pids:
        with contextlib.suppress(PermissionError):
            process = read(pid) if pid != os.getpid() else None
            if process is not None and process.is_forked:
                yield process


def _living(pid: int) -> Status | None:
    """Reads the status of a process. None: it has ended, or is a zombie, which has no descriptors."""
    process = read(pid)
    return None if process is None or process.state in "ZX" else process


def _program(pid: int) -> tuple[int, int]:
    status = os.stat(f"{psutil.PROCFS_PATH}/{pid}/exe")
    return status.st_dev, status.st_ino


def _descriptors(pid: int) -> Iterator[tuple[int, str, str]]:
    """The number, target and path of each descriptor."""
    folder = f"{psutil.PROCFS_PATH}/{pid}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with contextlib.suppress(FileNotFoundError):
            yield int(name), os.readlink(path), path


def _driver_files(pid: int) -> list[tuple[int, str]]:
    return [(file, target) for file, target, _ in _descriptors(pid) if _DRIVER_FILE.fullmatch(target)]


def _is_for_writing(path: str) -> bool:
    """Whether a descriptor is open for writing: the mode of its link in /proc/PID/fd."""
    return bool(os.lstat(path).st_mode & stat.S_IWUSR)


def _share_any(
    pid: int, files: list[tuple[int, str]], other: int, others: list[tuple[int, str]], same_file: SameFile
) -> bool | None:
    for other_file, other_target in others:
        for file, target in files:
            if target != other_target:
                continue
            shared = same_file(pid, file, other, other_file)
            if shared is None or shared:
                return shared
    return False


def _descendants(pid: int) -> set[int]:
    """Raises PermissionError if /proc may not be read."""
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
    except psutil.AccessDenied as error:
        raise PermissionError(str(error)) from None
