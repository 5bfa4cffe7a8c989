"""The exit of a watched process, and the end of all its kernels and children."""

from __future__ import annotations

import dataclasses
import errno
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from memsaver.broker import monitor, procfs
from memsaver.broker.monitor import Process, ProcessMonitor
from memsaver.broker.protocol import RefusedError
from tests.support import descriptors, end_main_thread


class World:
    """ProcessMonitor with a loop, and children of this process to be watched."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.said: list[tuple[str, int]] = []
        self.listed: set[int] = set()  # by the driver
        self.monitor = ProcessMonitor(self.selector, lambda: self.listed)
        self.children: list[int] = []

    def turn(self, until: Callable[[], object] = lambda: True) -> None:
        """One turn of the loop, and more until something is so."""
        deadline = time.monotonic() + 30
        while True:
            for key, mask in self.selector.select(0.01):
                key.data(mask)
            self.look()
            if until():
                return
            assert time.monotonic() < deadline

    def look(self) -> None:
        self.said += [("exited", process.pid) for process in self.monitor.take_exited()]
        self.said += [("gone", process.pid) for process in self.monitor.take_torn_down()]

    def fork(self, act: Callable[[], object] = lambda: None) -> int:
        """A child that has every descriptor of this process, and has done something first."""
        ready, tell = os.pipe()
        child = os.fork()
        if not child:
            act()
            os.write(tell, b"1")
            while True:
                time.sleep(0.1)  # a signal just before pause() would not end it
        os.close(tell)
        os.read(ready, 1)
        os.close(ready)
        self.children.append(child)
        return child

    def client(self) -> tuple[Process, int]:
        """A watched child with a sentinel, and the write end of that, which this process has as well."""
        read, write = os.pipe()
        process = self.monitor.watch(self.fork())
        self.monitor.add_sentinel(process, [read])
        return process, write

    def kill(self, pid: int, waits: bool = True) -> None:
        os.kill(pid, signal.SIGKILL)
        if waits:
            os.waitpid(pid, 0)
            self.children.remove(pid)

    def close(self) -> None:
        for child in list(self.children):
            self.kill(child)
        self.selector.close()


def status_of(pid: int) -> procfs.Status:
    status = procfs.read(pid)
    assert status is not None
    return status


@pytest.fixture
def world() -> Iterator[World]:
    before = len(os.listdir("/proc/self/fd"))
    world = World()
    yield world
    world.monitor.close()
    world.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_sentinel_does_not_mean_an_exit(world: World) -> None:
    """As after an exec, which closes it."""
    read, write = os.pipe()
    process = world.monitor.watch(world.fork(lambda: os.close(write)))
    world.monitor.add_sentinel(process, [read])
    os.close(write)
    world.turn(lambda: not process.sentinels)
    assert world.said == [] and process.has_sentinel
    world.kill(process.pid)
    world.turn(lambda: len(world.said) == 2)


def exhausted(*_: object) -> list[int]:
    raise OSError(errno.EMFILE, "too many open files")


def closes_on_signal(file: int) -> Callable[[], object]:
    return lambda: signal.signal(signal.SIGUSR1, lambda *_: os.close(file))


def test_a_child_seen_with_a_sentinel_is_waited_for_after_it_closes_it(world: World) -> None:
    """It may have closed the sentinel, and not yet the driver's descriptors."""
    process, write = world.client()
    child = world.fork(closes_on_signal(write))
    world.kill(process.pid)
    world.turn(lambda: world.said)
    assert world.monitor.keepers_of(process) == [child]
    late = world.fork(closes_on_signal(write))  # as if the child had forked
    world.turn(lambda: world.monitor.keepers_of(process) == sorted([child, late]))
    os.close(write)
    for pid in (child, late):
        os.kill(pid, signal.SIGUSR1)
    world.turn(lambda: not process.sentinels)
    for pid in (child, late):
        world.turn()
        assert world.said == [("exited", process.pid)]
        assert pid in world.monitor.keepers_of(process)
        world.kill(pid)
        world.turn(lambda: pid not in process.children.values())  # noqa: B023
    world.turn(lambda: world.said[1:] == [("gone", process.pid)])


@pytest.mark.parametrize("comes", ["before the exit", "after the exit"])
def test_an_exiting_process_that_was_never_seen_with_the_sentinel_is_waited_for(world: World, comes: str) -> None:
    """It lists no descriptors, closes the sentinel, and is still in its exit. ``comes``: the hang-up."""
    process, write = world.client()
    wait, go = os.pipe()

    def exit_slowly() -> None:
        def close() -> None:
            os.read(wait, 1)
            os.close(write)
            while True:
                signal.pause()

        threading.Thread(target=close).start()
        signal.signal(signal.SIGUSR1, lambda *_: end_main_thread())

    child = world.fork(exit_slowly)
    os.kill(child, signal.SIGUSR1)
    world.turn(lambda: status_of(child).state == "Z")
    if not status_of(child).flags:
        pytest.skip("the system tells no flags")
    os.close(write)

    if comes == "before the exit":
        os.write(go, b"1")
    world.kill(process.pid)
    world.turn(lambda: world.said)
    if comes == "after the exit":
        assert process.sentinels and world.monitor.keepers_of(process) == []
        os.write(go, b"1")
    world.turn(lambda: not process.sentinels)
    world.turn()
    assert world.said == [("exited", process.pid)]
    assert world.monitor.keepers_of(process) == [child]
    world.kill(child)
    world.turn(lambda: world.said[1:] == [("gone", process.pid)])
    os.close(wait)
    os.close(go)


@pytest.mark.parametrize("was_exiting", [False, True], ids=["holder", "exiting"])
@pytest.mark.parametrize("other_start", [0, 1, -1], ids=["same", "reused", "older than the client"])
def test_a_pid_reused_after_a_scan_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, was_exiting: bool, other_start: int
) -> None:
    """Nor is a process that exits and that began before the client."""
    process, write = world.client()
    other = world.fork(lambda: os.close(write))
    status = status_of(other)
    assert 0 < process.start <= status.start
    if other_start > 0:  # the one that was found is another
        status = dataclasses.replace(status, start=status.start + 1)
    elif other_start < 0:
        status = dataclasses.replace(status, start=process.start - 1)
        monkeypatch.setattr(procfs, "read", lambda pid: status)
    is_older = other_start < 0 and was_exiting
    monkeypatch.setattr(procfs, "keepers", lambda inodes: [(status, set() if was_exiting else set(inodes))])
    world.kill(process.pid)
    world.turn(lambda: world.said)
    os.close(write)
    world.turn(lambda: not process.sentinels)
    monkeypatch.setattr(procfs, "keepers", lambda inodes: [(status, set())] if was_exiting else [])
    world.turn()
    is_gone = other_start > 0 or is_older
    assert (("gone", process.pid) in world.said) is is_gone
    if not is_gone:
        monkeypatch.undo()
        world.kill(other)
        world.turn(lambda: len(world.said) == 2)


@pytest.mark.parametrize("name", ["keepers", "pidfd_open"])
def test_a_failed_scan_is_repeated(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also the one after the sentinel has hung up."""
    process, write = world.client()
    child = world.fork(closes_on_signal(write))

    with monkeypatch.context() as now:
        now.setattr(procfs if name == "keepers" else os, name, exhausted)
        world.kill(process.pid)
        world.turn(lambda: world.said)
        world.turn()
        os.close(write)
        assert len(world.said) == 1 and world.monitor.keepers_of(process) == []
    world.turn(lambda: world.monitor.keepers_of(process) == [child])
    with monkeypatch.context() as now:
        now.setattr(procfs, "keepers", exhausted)
        os.kill(child, signal.SIGUSR1)
        world.turn(lambda: not process.sentinels)
        world.kill(child)
        world.turn(lambda: not process.children)
        world.turn()
        assert len(world.said) == 1 and world.monitor.deadlines()
    world.turn(lambda: len(world.said) == 2)


def test_a_process_that_the_driver_lists_is_waited_for(world: World) -> None:
    process, write = world.client()
    os.close(write)
    world.listed = {process.pid}
    world.kill(process.pid)
    world.turn(lambda: process.is_searched and not process.children)  # also of other tests, which exit just then
    for _ in range(3):
        time.sleep(monitor.QUERY_S)
        assert world.monitor.deadlines()[0] <= time.monotonic() + monitor.QUERY_S
        world.turn()
    assert world.said == [("exited", process.pid)]
    assert world.monitor.keepers_of(process) == []
    world.listed = set()
    world.turn(lambda: len(world.said) == 2)
    assert world.monitor.deadlines() == []


def test_a_pid_that_the_driver_lists_later_is_another_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    process, write = world.client()
    world.kill(process.pid)
    world.turn(lambda: world.said)
    world.listed = {process.pid}  # not when it had exited
    os.close(write)
    world.turn(lambda: len(world.said) == 2)
    other, write = world.client()
    os.close(write)
    world.listed = {other.pid}
    world.kill(other.pid)
    world.turn(lambda: len(world.said) == 3)
    monkeypatch.setattr(procfs, "is_alive", lambda pid: pid == other.pid)  # a new process has the number
    world.turn(lambda: len(world.said) == 4)


def test_children_without_the_sentinel_and_their_children_are_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, grandchild = world.fork(), world.fork()
    process = world.monitor.watch(world.fork())
    monkeypatch.setattr(procfs, "inheritors", lambda pid: {process.pid: [child]}.get(pid, []))
    read, write = os.pipe()
    world.monitor.add_sentinel(process, [read])
    assert list(process.children.values()) == [child]
    monkeypatch.setattr(procfs, "inheritors", lambda pid: {child: [grandchild]}.get(pid, []))  # forked meanwhile
    os.close(write)
    world.kill(process.pid)
    world.turn(lambda: world.said)
    assert sorted(process.children.values()) == sorted([child, grandchild])
    for pid in (child, grandchild):
        assert len(world.said) == 1
        world.kill(pid)
        world.turn(lambda: pid not in process.children.values())  # noqa: B023
    world.turn(lambda: len(world.said) == 2)


def test_a_child_whose_status_cannot_be_read_leaves_no_descriptor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan fails for lack of descriptors. It must not keep one."""
    process, write = world.client()
    world.fork()
    world.kill(process.pid)
    world.turn(lambda: world.said)
    status = procfs.Status(world.children[-1], os.getpid(), 0, 0, "S")
    with monkeypatch.context() as now:
        now.setattr(procfs, "read", exhausted)
        now.setattr(procfs, "keepers", lambda _: iter([(status, set(process.sentinels))]))
        before = descriptors()
        world.monitor._scan_at = 0.0
        world.turn()
        assert descriptors() == before
    os.close(write)


def test_children_that_cannot_be_watched_refuse_a_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "inheritors", exhausted)
    process = world.monitor.watch(world.fork())
    read, write = os.pipe()
    with pytest.raises(RefusedError, match=f"children of process {process.pid} cannot be watched: too many") as caught:
        world.monitor.add_sentinel(process, files := [read])
    assert caught.value.code == "exhausted"
    os.close(write)
    os.close(files[0])
