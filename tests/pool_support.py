"""Clients of a shared pool: the code that they run in processes of their own, and checks of the pool from outside.

A client imports this too (``Worker``), so nothing here needs torch: allocations call the entry points that torch
would call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import memsaver
from memsaver import _core, cli
from memsaver.policies import LazyMode
from tests import controls  # noqa: F401 - statements of workers name it
from tests.broker_support import Broker, Local, Running
from tests.nursery import Fork
from tests.support import (  # noqa: F401 - statements of workers name them
    MIB,
    PAGE,
    Hooks,
    Sweep,
    check,
    end_main_thread,
    random_bytes,
    until,
    used_bytes,
)

LAZY: tuple[LazyMode, ...] = (False, True, "copy")
SECOND_S = 1.0  # within which a pool is whole again after an exit


class ForkedBroker(Running):
    """A broker whose process is a fork, which takes a tenth of the time of a start of its command."""

    def start(self) -> None:
        self._fork = Fork(self.environment, "memsaver.cli")
        self._fork.start(cli.main, ["broker", *self.arguments])
        until(self.sockets)
        [self.path] = self.sockets()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert number == signal.SIGKILL
        self._fork.close()

    @property
    def pid(self) -> int:
        return self._fork.pid


@contextlib.contextmanager
def running(capacity: int) -> Iterator[Running]:
    """A broker. At the end every broker that a client has started in its place is ended too."""
    with ForkedBroker(str(capacity)) as broker:
        yield broker
        for lock in broker.directory.glob("*.lock"):
            pid = int(lock.read_text() or 0)
            if pid and pid != broker.pid:
                os.kill(pid, signal.SIGKILL)


class Held:
    """One segment of a host region, with its expected contents."""

    def __init__(self, region: memsaver.Region, nbytes: int, seed: int | None = 0) -> None:
        """``seed``: None leaves the contents unchanged."""
        self.region = region
        self.nbytes = nbytes
        self._hooks = Hooks(region)
        address = self._hooks.alloc(nbytes)
        if address is None:
            raise MemoryError(f"{region.tag} got no {nbytes} bytes")
        self.address = address
        self.data = np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)
        if seed is not None:
            self.fill(seed)

    def fill(self, seed: int) -> None:
        self.expected = random_bytes(self.nbytes, seed)
        self.data[:] = self.expected

    def check(self) -> None:
        assert np.array_equal(self.data, self.expected), f"{self.nbytes} bytes differ"

    def free(self) -> None:
        self._hooks.free(self.address)


def hold(tag: str, nbytes: int, backup: str = "none", seed: int | None = 0, **options: Any) -> Held:
    """A region with one segment."""
    return Held(memsaver.region(tag, device="cpu", backup=backup, **options), nbytes, seed)


def own_status() -> dict[str, Any]:
    """The pool's status, as this process gets it as a client."""
    found: dict[str, Any] = json.loads(_core.pool_status("cpu"))
    return found


def fork_sleeper() -> int:
    """A child that holds every descriptor of this process."""
    child = os.fork()
    while not child:
        time.sleep(1)
    return child


def fork_exiting(go: str) -> int:
    """A child that exits, and closes its descriptors once a file exists. It stays in its exit until it is killed."""

    def close() -> None:
        while not os.path.exists(go):
            time.sleep(0.01)
        os.closerange(3, 1 << 16)
        while True:
            time.sleep(1)

    child = os.fork()
    if not child:
        threading.Thread(target=close).start()
        end_main_thread()
    return child


def driver_file() -> str:
    """The file that every process on this process's host device has open."""
    links = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return next(link for link in links if os.path.basename(link).startswith("memsaver."))


def repickled(error: memsaver.Error) -> memsaver.Error:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
    found: memsaver.Error = again
    return found


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def chunks_of(pid: int) -> int:
    """The number of its descriptors that keep chunks of a host device."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:memsaver")
    return count


def mappings_of(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Worker(Fork):
    """A client of the pool in another process. Statements see the names of this module."""

    def __init__(self, broker: Running | Local, *statements: str, **changes: str) -> None:
        names = ("MEMSAVER_HOST_DEVICE", "MEMSAVER_POOL_DIR", "MEMSAVER_JOB")
        settings = {name: broker.environment[name] for name in names if name in broker.environment}
        super().__init__({**settings, "MEMSAVER_POOL": "shared", **changes}, "tests.pool_support")
        try:
            for statement in statements:
                self.run(statement)
        except BaseException:
            self.close()
            raise

    def fails(self, statement: str) -> str:
        """Runs a statement that must raise an error of memsaver, kept there as ``error``. Returns its type and text."""
        return self.run(f"error = raised(lambda: {statement}); print(f'{{type(error).__name__}}: {{error}}')")


def hold_the_gil(worker: Worker, pipe: Path) -> None:
    """The main thread of a worker is in a native call with the GIL, until a byte is written to the pipe."""
    held = pipe.with_name("held")
    for path in (pipe, held):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    worker.run(f"tell, until_byte = (os.open(path, os.O_RDWR) for path in ({str(held)!r}, {str(pipe)!r}))")
    worker.run("python, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)")
    worker.send("os.write(tell, byte); python.read(until_byte, byte, ctypes.c_size_t(1))")
    with held.open("rb") as file:
        file.read(1)


def let_go(worker: Worker, pipe: Path) -> None:
    with pipe.open("wb") as file:
        file.write(b"1")
    worker.answer()


def raised(act: Callable[[], object], kind: type[Exception] = memsaver.Error) -> Any:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError("it raised nothing")


def claim(nbytes: int) -> None:
    """All memory of a pool, in one region, filled, read and given back, by a process that holds nothing else."""
    held = hold("claim", nbytes, "none", 1)
    held.check()
    held.free()
    held.region.pause()
    held.region.resume()


def is_whole(status: dict[str, Any]) -> bool:
    """Every byte of the pool is idle or held by a client, and no demand waits."""
    held = sum(row["held_bytes"] for row in status["clients"])
    return (
        held + status["idle_bytes"] == status["total_bytes"] <= status["capacity_bytes"]
        and status["leaving_bytes"] == 0
        and not any(row["waiting"] for row in status["clients"])
    )


def settled(broker: Broker, within_s: float = 60.0) -> dict[str, Any]:
    """The status, once the pool is whole."""
    until(lambda: is_whole(broker.status()), within_s)
    return broker.status()


# Actions of clients


def moves(seed: int, until_path: str = "", names: str = "") -> str:
    """Random transitions of a client, until the file exists, or for ever. Returns the counts of actions.

    Shortage and a missing broker are expected. Contents that differ raise.
    """
    choose = random.Random(seed)
    regions: dict[str, memsaver.Region] = {}
    blocks: dict[str, Held] = {}
    counts: Counter[str] = Counter()
    while not (until_path and os.path.exists(until_path)):
        name = choose.choice(("host", "none", "frozen"))
        move = choose.choice(("new", "free", "pause", "resume", "resume", "switch"))
        try:
            if name not in regions:
                backup = "none" if name == "none" else "host"
                regions[name] = memsaver.region(f"{name}{names}", "cpu", backup, frozen=name == "frozen")
            region = regions[name]
            if move == "new" and name not in blocks and region.state == "active" and not region._core.sealed:
                blocks[name] = Held(region, choose.choice((PAGE, 3 * PAGE + 5, 17 * PAGE)), choose.randrange(1 << 30))
            elif move == "free" and name in blocks and choose.random() < 0.3:
                if region._core.sealed and region.state == "active":
                    region.thaw()
                blocks.pop(name).free()
            elif move == "pause":
                region.pause(lazy=choose.choice(LAZY))
            elif move == "resume":
                _resumed(region, blocks, lambda: region.resume(memory_timeout=choose.choice((0, 0.02, 0.5))))  # noqa: B023
            elif move == "switch":
                other = choose.choice([each for each in regions.values() if each is not region] or [region])
                if other is not region:
                    switch = functools.partial(memsaver.switch, pause=other.tag, resume=region.tag, memory_timeout=0.02)
                    switch = functools.partial(switch, lazy=choose.choice(LAZY))
                    _resumed(region, blocks, switch)
            counts[move] += 1
        except (memsaver.OutOfMemoryError, memsaver.BrokerError, MemoryError) as error:
            counts[type(error).__name__] += 1
            if isinstance(error, memsaver.BrokerError):
                time.sleep(0.002)
    for name, block in blocks.items():
        if regions[name].state == "active":
            block.check()
    return str(dict(counts))


def _resumed(region: memsaver.Region, blocks: dict[str, Held], act: Callable[[], object]) -> None:
    was_paused = region.state == "paused"
    act()
    block = blocks.get(region.tag.rstrip("0123456789-"))
    if block is None:
        return
    if region.backup == "none" and was_paused:
        block.fill(7)
    block.check()


def sweep(move: str, kind: str) -> None:
    """Fails each driver call of a move in turn. After each, nothing is lost, and the same move succeeds."""
    out, into = memsaver.region("out", "cpu", "host"), memsaver.region("into", "cpu", "host")
    memsaver.resume()  # after an earlier sweep
    blocks = [Held(out, nbytes, nbytes % 97) for nbytes in (3 * PAGE + 7, PAGE, 100)]
    coming = [Held(into, 5 * PAGE, 3)] if move == "switch" else []
    extra: list[int] = []
    hooks = Hooks(out)

    def allocate() -> None:
        address = hooks.alloc(9 * PAGE)
        if address is None:
            raise memsaver.Error("torch raises its own")
        extra.append(address)

    def free() -> None:
        while extra:
            hooks.free(extra.pop())

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "pause": (out.pause, out.resume),
        "resume": (out.resume, out.pause),
        "switch": (lambda: memsaver.switch(pause=out, resume=into), lambda: memsaver.switch(pause=into, resume=out)),
        "allocate": (allocate, free),
        "free": (free, allocate),
    }
    act, back = ways[move]

    def act_and_settle() -> None:
        try:
            act()
        finally:
            until(lambda: _in_books(out, into), 10)  # the pool's thread makes calls as well

    if move == "switch":
        into.pause()
    elif move in ("resume", "free"):
        back()
    for error in Sweep(kind, act_and_settle, raises=move != "free"):
        if error is not None and move == "resume":
            assert (out.state, out.mapped_bytes) == ("paused", 0)
        if error is not None and move in ("pause", "resume", "switch"):
            act()  # the same call again completes the transition
        check(coming)
        check(blocks if out.state == "active" else [])
        back()
    free()
    for block in (*blocks, *coming):
        block.free()
    memsaver.resume()
    memsaver.pause()


def _in_books(*regions: memsaver.Region) -> bool:
    """Whether the bytes that the broker counts for this process equal the bytes that its regions map."""
    [row] = [row for row in own_status()["clients"] if row["pid"] == os.getpid()]
    return bool(row["held_bytes"] == sum(each.mapped_bytes + each.offered_bytes for each in regions))


def take_turns(held: Held, turns: int) -> None:
    """Resumes and pauses a region repeatedly. The first waiting client gets the memory next."""
    for turn in range(turns):
        held.region.resume(memory_timeout=60.0)
        held.check()
        if turn % 16 == 0:
            held.fill(turn)
        held.region.pause(lazy=turn % 3 > 0)
    held.region.pause()
