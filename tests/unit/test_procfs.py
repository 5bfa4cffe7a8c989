"""Forked processes in a made-up /proc. test_monitor.py and tests/integration/test_shared_pool.py have real ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from memsaver.broker import procfs

FORKED, STARTED, EXITING = 0x400040, 0x400000, 0x4  # flags after a fork, after an exec, and of an exit


class Proc:
    """``add`` makes a process whose descriptors are symbolic links, as in /proc."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setattr(procfs, "ROOT", str(root))

    def add(self, pid: int, *files: str, parent: int = 1, flags: int = FORKED, state: str = "S") -> None:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True)
        numbers = f"{state} {parent} 0 0 0 0 {flags} " + "0 " * 12 + "100 " + "0 " * 30
        (folder / "stat").write_bytes(f"{pid} (a name) with".encode() + b"\xff) " + numbers.encode())  # any bytes
        for number, target in enumerate(files):
            (folder / "fd" / str(number)).symlink_to(target)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    proc = Proc(tmp_path, monkeypatch)
    proc.add(10, "/dev/null", "/dev/nvidiactl", "/dev/nvidia0", flags=STARTED)
    return proc


def test_forked_descendants_with_driver_files_are_inheritors(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.add(11, "/dev/nvidia0", parent=10)
    proc.add(12, parent=11)
    proc.add(13, "/dev/nvidiactl", parent=12)
    proc.add(14, "/dev/nvidia0")  # no descendant
    proc.add(15, "/dev/null", parent=10)
    proc.add(16, "/dev/nvidia0", parent=10, state="Z")
    proc.add(17, "/dev/nvidia0", parent=10, flags=STARTED)  # it has executed another program
    proc.add(18, "/dev/nvidia0", parent=10, flags=0)  # some sandboxes report no flags
    proc.add(19, "/dev/null", parent=10)
    read = os.listdir

    def listdir(path: str) -> list[str]:
        if path.endswith("/19/fd"):
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert procfs.inheritors(10) == [11, 13, 18, 19]
    assert procfs.inheritors(99) == []


def test_exiting_processes_of_this_user_may_keep_descriptors(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.add(11, "pipe:[7]", flags=FORKED | EXITING)
    proc.add(12, "pipe:[7]", flags=FORKED | EXITING, state="Z")
    proc.add(13, flags=FORKED)
    proc.add(14, "pipe:[7]", flags=STARTED | EXITING)
    proc.add(15, flags=0)
    assert [(status.pid, inodes) for status, inodes in procfs.keepers([8])] == [(11, set()), (12, set())]
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert list(procfs.keepers([8])) == []

    def exhausted(*_: object) -> list[str]:
        raise OSError(errno.EMFILE, "too many open files")

    proc.add(16, "pipe:[7]")
    monkeypatch.setattr(os, "readlink", exhausted)
    with pytest.raises(OSError, match="too many"):  # it is not taken for a scan that has found nothing
        list(procfs.keepers([7]))
