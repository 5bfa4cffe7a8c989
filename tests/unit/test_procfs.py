"""Forked processes in /proc: real ones, and those of a made-up /proc."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from memsaver import _core
from memsaver.broker import procfs
from tests.support import end_main_thread

FORKED, STARTED = 0x400040, 0x400000  # flags after a fork, and after an exec


def driver_files() -> set[int]:
    """Descriptors of host devices' tables that this process holds. Devices of earlier tests may still exist."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.path.basename(os.readlink(f"/proc/self/fd/{name}")).startswith("memsaver."):
                found.add(int(name))
    return found


@contextmanager
def forked(act: Callable[[], object] = lambda: None, but: Iterable[int] = ()) -> Iterator[int]:
    """A child that has done something, and holds the descriptors of this process, those in ``but`` excepted."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        for file in but:
            os.close(file)
        act()
        os.write(tell, b"1")
        signal.pause()
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def others() -> set[int]:
    """Descriptors of host devices that are not the test's own."""
    return driver_files()


@pytest.fixture
def driver_file(tmp_path: Path, others: set[int]) -> Iterator[int]:
    """A descriptor with the name of a host device's table."""
    file = os.open(tmp_path / "memsaver.0.4096", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield file
    os.close(file)


# Real processes


def test_the_writers_of_a_pipe_are_found_and_its_readers_are_not() -> None:
    read, write = os.pipe()
    inode = os.fstat(read).st_ino
    with forked() as both, forked(lambda: os.close(write)):
        status = procfs.read(both)
        assert status is not None and status.parent == os.getpid()
        assert procfs.writers([0, inode], procfs.all_pids()) == [(inode, status)]  # and this process, not named
        assert procfs.writers([inode], procfs.all_pids() - {both}) == []
        assert procfs.writers([inode], procfs.all_pids(), status.start) == [(inode, status)]
        assert procfs.writers([inode], procfs.all_pids(), status.start + 1) == []
    assert procfs.writers([inode], procfs.all_pids()) == []
    os.close(write)
    os.close(read)


def test_a_child_forked_with_driver_descriptors_is_an_inheritor(driver_file: int, others: set[int]) -> None:
    without = forked(lambda: os.close(driver_file), but=others)
    with forked(but=others) as heir, without, subprocess.Popen(["sleep", "60"]) as program:
        assert procfs.inheritors(os.getpid()) == [heir]
        assert procfs.inheritors(heir) == []  # this process is older
        program.kill()


def test_a_child_that_opened_the_driver_itself_is_no_inheritor(driver_file: int, others: set[int]) -> None:
    path = os.readlink(f"/proc/self/fd/{driver_file}")

    def reopen() -> None:
        os.close(driver_file)
        os.open(path, os.O_RDWR)

    if _core.same_file(os.getpid(), driver_file, os.getpid(), driver_file) is None:
        pytest.skip("kcmp is not allowed here")
    with forked(reopen, but=others):
        assert procfs.inheritors(os.getpid()) == []


def test_a_grandchild_whose_parent_has_ended_has_inherited_as_well(driver_file: int) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        grandchild = os.fork()
        if grandchild:
            os.write(write, str(grandchild).encode())
            os._exit(0)
        signal.pause()
    grandchild = int(os.read(read, 20))
    os.waitpid(child, 0)
    try:
        assert procfs.inheritors(os.getpid()) == [grandchild]
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_pid_of_reads_the_process_of_a_pidfd(driver_file: int) -> None:
    with forked() as child:
        file = os.pidfd_open(child)
        assert (procfs.pid_of(file), procfs.has_exited(file), procfs.is_alive(child)) == (child, False, True)
    assert (procfs.pid_of(file), procfs.has_exited(file), procfs.is_alive(child)) == (-1, True, False)
    os.close(file)
    assert procfs.pid_of(driver_file) is None


def test_a_pidfd_of_a_process_is_not_one_of_the_next_of_its_number() -> None:
    with forked() as child:
        status = procfs.read(child)
        assert status is not None
        file = procfs.open_pidfd(status)
        assert procfs.pid_of(file) == child
        os.close(file)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProcessLookupError):
            procfs.open_pidfd(dataclasses.replace(status, start=status.start - 1))
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ProcessLookupError):
        procfs.open_pidfd(status)


def test_a_process_that_exits_shows_no_descriptors_and_is_found() -> None:
    """Its main thread has ended, as that of a process that is being torn down, and another thread has not."""
    read, write = os.pipe()

    def exit_slowly() -> None:
        threading.Thread(target=signal.pause).start()
        signal.signal(signal.SIGUSR1, lambda *_: end_main_thread())

    with forked(exit_slowly) as child, forked() as other:
        os.kill(child, signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while (status := procfs.read(child)) is None or status.state != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if not status.flags:
            pytest.skip("the system tells no flags")
        found = [each.pid for each in procfs.exiting()]
        assert child in found and other not in found
        holders = procfs.writers([os.fstat(read).st_ino], [child, other])
        assert [each.pid for _, each in holders] == [other]
        file = procfs.open_pidfd(status)
        assert not procfs.has_exited(file)
        os.close(file)
    os.close(read)
    os.close(write)


def test_a_zombie_is_not_alive() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not procfs.is_alive(child)
    os.waitpid(child, 0)


# A made-up /proc


class Proc:
    """``add`` makes a process whose descriptors are symbolic links, as in /proc."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = str(root)
        monkeypatch.setattr(psutil, "PROCFS_PATH", self.root)
        (root / "stat").write_text("btime 1000\n")
        for program in ("python", "sleep"):
            (root / program).touch()

    def add(
        self,
        pid: int,
        *files: str,
        parent: int = 1,
        flags: int = FORKED,
        start: int = 100,
        program: str = "python",
        state: str = "S",
    ) -> None:
        folder = Path(self.root, str(pid))
        (folder / "fd").mkdir(parents=True)
        numbers = f"{state} {parent} 0 0 0 0 {flags} " + "0 " * 12 + f"{start} " + "0 " * 30
        (folder / "stat").write_text(f"{pid} (a name) with) {numbers}")
        (folder / "status").write_text(f"Uid:\t{os.getuid()}\t{os.geteuid()}\t{os.getuid()}\t{os.getuid()}\n")
        (folder / "exe").symlink_to(f"../{program}")
        for number, target in enumerate(files):
            (folder / "fd" / str(number)).symlink_to(target)

    def inheritors(self, told: bool | None = None) -> list[int]:
        return sorted(procfs.inheritors(10, lambda *_: told))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    proc = Proc(tmp_path, monkeypatch)
    proc.add(10, "/dev/null", "/dev/nvidiactl", "/dev/nvidia0", flags=STARTED)
    return proc


def test_without_kcmp_forked_descendants_with_driver_files_count(proc: Proc) -> None:
    proc.add(11, "/dev/nvidia0", parent=10)
    proc.add(12, parent=11)
    proc.add(13, "/dev/nvidiactl", parent=12)
    proc.add(14, "/dev/nvidia0")  # no descendant
    proc.add(15, "/dev/null", parent=10)
    assert proc.inheritors(None) == [11, 13]
    assert proc.inheritors(True) == [11, 13, 14]
    assert proc.inheritors(False) == []


@pytest.mark.parametrize(
    "other",
    [{"flags": STARTED}, {"program": "sleep"}, {"state": "Z"}, {"start": 99}],
    ids=["has executed", "another program", "zombie", "older"],
)
def test_processes_that_cannot_have_inherited_do_not_count(proc: Proc, other: dict[str, Any]) -> None:
    proc.add(11, "/dev/nvidia0", parent=10, **other)
    assert proc.inheritors(True) == []


@pytest.mark.parametrize(
    ("flags", "is_found"),
    [(FORKED | 0x4, True), (FORKED, False), (STARTED | 0x4, False), (0, False)],
    ids=["exits", "lives", "has executed", "no flags"],
)
@pytest.mark.parametrize("state", ["S", "Z"])
def test_an_exiting_forked_process_may_hold_descriptors(proc: Proc, flags: int, is_found: bool, state: str) -> None:
    proc.add(11, flags=flags, state=state)
    assert [each.pid for each in procfs.exiting()] == [11] * is_found


def test_an_exiting_process_of_another_user_does_not_count(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.add(11, flags=FORKED | 0x4)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert procfs.exiting() == []


def test_a_scan_without_free_descriptors_raises(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one that has found nothing."""
    proc.add(11, "pipe:[7]")

    def exhausted(*_: object) -> list[str]:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "readlink", exhausted)
    with pytest.raises(OSError, match="too many"):
        procfs.writers([7], [10, 11])


def test_children_are_found_without_process_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = Proc(tmp_path, monkeypatch)
    proc.add(10, "/dev/nvidia0", flags=0)
    proc.add(11, "/dev/nvidia0", parent=10, flags=0)
    assert proc.inheritors(None) == [11]


def test_children_of_a_process_without_a_driver_do_not_count(proc: Proc) -> None:
    proc.add(20, "/dev/null", flags=STARTED)
    proc.add(21, "/dev/nvidia0", parent=20)
    assert procfs.inheritors(20, lambda *_: True) == []
    assert procfs.inheritors(99, lambda *_: True) == []


def test_a_descendant_that_may_not_be_looked_at_counts(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.add(11, "/dev/null", parent=10)
    proc.add(12, "/dev/null")
    look = os.stat

    def refuse(path: str) -> os.stat_result:
        if path in (f"{proc.root}/11/exe", f"{proc.root}/12/exe"):
            raise PermissionError(path)
        return look(path)

    monkeypatch.setattr(os, "stat", refuse)
    assert proc.inheritors(True) == [11]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(psutil.NoSuchProcess, None), (psutil.AccessDenied, PermissionError)],
    ids=["ended", "denied"],
)
def test_descendants_that_cannot_be_read_are_none_or_an_error(
    proc: Proc, monkeypatch: pytest.MonkeyPatch, error: type[psutil.Error], expected: type[OSError] | None
) -> None:
    proc.add(11, "/dev/nvidia0", parent=10)

    def fail(pid: int) -> psutil.Process:
        raise error(pid)

    monkeypatch.setattr(psutil, "Process", fail)
    if expected is None:
        assert proc.inheritors(None) == []
    else:
        with pytest.raises(expected):
            proc.inheritors(None)
