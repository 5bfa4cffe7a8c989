"""Shared helpers: contents to fill and compare, figures of this process, and subprocesses."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

import memsaver
from memsaver import _core
from tests import controls

KIB = 1 << 10
if TYPE_CHECKING:
    import torch
    from hypothesis import settings

MIB = 1 << 20
GIB = 1 << 30
PAGE = 2 * MIB
ROOT = Path(__file__).resolve().parent.parent
# Python 3.12 and newer warn of a fork beside other threads. Programs that fork are the tests' own.
_FORK = "ignore:This process (pid=:DeprecationWarning"

Make = Callable[..., memsaver.Region]  # the fixture `make`
# Random tests make so many new sequences in the place of their fixed ones.
EXPLORED = int(os.environ.get("MEMSAVER_TEST_EXPLORE", "0"))

_counter = itertools.count()


_random = np.zeros(0, np.uint8)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """The same in each process: a read-only view of bytes that are made once, since that takes its time."""
    global _random
    if len(_random) < nbytes + MIB:
        nwords = -(-(nbytes + MIB) // (16 * MIB)) * 2 * MIB
        _random = np.random.default_rng(0).integers(0, 1 << 64, nwords, np.uint64).view(np.uint8)
        _random.flags.writeable = False
    begin = 64 * (seed * 40503 % (MIB // 64))  # an odd number: other bytes for each of the first 16,384 seeds
    return _random[begin : begin + nbytes]


def holds(address: int, expected: np.ndarray[Any, Any]) -> bool:
    """Whether memory has these bytes. It writes no memory of its own, unlike a comparison of arrays."""
    return _memcmp(address, expected.ctypes.data, expected.nbytes) == 0


class Block:
    """One segment of a host region, with its expected contents."""

    def __init__(self, region: memsaver.Region, nbytes: int, seed: int = 0) -> None:
        before = {offset for offset, _ in segments(region)}
        self.tensor = region.empty(nbytes, uint8())
        self.region = region
        self.nbytes = nbytes
        self.address = self.tensor.data_ptr()
        self.is_new = self.address not in before
        self.expected = np.zeros(0, np.uint8)
        self.fill(seed)

    def fill(self, seed: int) -> None:
        self.expected = random_bytes(self.nbytes, seed)
        self.tensor.numpy()[:] = self.expected

    def check(self) -> None:
        """The address has not changed, and the contents are the written ones."""
        assert self.tensor.data_ptr() == self.address
        assert len(self.expected) == self.nbytes
        assert holds(self.address, self.expected), f"{self.nbytes} bytes at {self.address:#x} differ"


def uint8() -> torch.dtype:
    import torch

    return torch.uint8


def blocks(region: memsaver.Region, sizes: Iterable[int], seed: int = 0) -> list[Block]:
    return [Block(region, nbytes, seed + number) for number, nbytes in enumerate(sizes)]


def sparse_blocks(region: memsaver.Region, chunks: int) -> list[Block]:
    """Blocks of 1 MiB, each in a chunk of 32 MiB: few bytes to copy in many batches. A resume lays them out anew."""
    pairs = [(region.empty(31 * MIB, uint8()), Block(region, MIB, seed)) for seed in range(chunks)]
    return [block for _, block in pairs]


def check(held: Iterable[Any]) -> None:
    """Checks blocks. It leaves no name that would keep the last one."""
    for block in held:
        block.check()


def segments(region: memsaver.Region) -> list[tuple[int, int]]:
    """(address, bytes) of the segments in use. Adjacent segments are joined."""
    return list(region._core.live())


def free_bytes(device: str = "cpu") -> int:
    return int(_core.open_driver(device).memory()[0])


def used_bytes(device: str = "cpu") -> int:
    free, total = _core.open_driver(device).memory()
    return int(total - free)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def unnamed_files(directory: object, kept: bool = False) -> list[int]:
    """Descriptors of this process on files without a name in a directory; ``kept``: also those without contents."""
    if not kept:
        memsaver.release_host_memory()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if link.startswith(f"{directory}/") and link.endswith(" (deleted)"):
            found.append(int(name))
    return found


@contextmanager
def fast_directory(otherwise: Path) -> Iterator[Path]:
    """A directory in memory where there is one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else otherwise) as path:
        yield Path(path)


def host_used_bytes(device: str = "cpu") -> int:
    return int(memsaver.stats().devices[device].host_used_bytes)


def host_held_bytes(device: str = "cpu") -> int:
    return int(memsaver.stats().devices[device].host_held_bytes)


def drop_backups() -> int:
    """Resumes the regions that other tests left paused, and releases the arena. Returns the bytes it still holds."""
    for region in memsaver.regions.all_regions():
        region.resume()
        region.thaw()
    memsaver.release_host_memory()
    return host_held_bytes()


def until(condition: Callable[[], object], within_s: float = 60.0) -> float:
    """Waits for a condition that another thread or process makes true. Returns the seconds of the wait."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        time.sleep(0.001)
    return time.monotonic() - began


def use_device() -> None:
    """Opens the device, and frees the memory whose marks have passed."""
    region = memsaver.region("flush", device="cpu")
    region.resume()  # a test of calls for all regions may have left it paused
    Block(region, 1)


class Visitor(memsaver.Guest):
    """A guest that calls a function with "prepare", "leave" or "come back"."""

    def __init__(
        self, name: str, tags: str | list[str], on_call: Callable[[str], object] = lambda call: None, *, order: int = 0
    ) -> None:
        super().__init__(name, tags, order=order)
        self.on_call = on_call

    def prepare(self) -> None:
        self.on_call("prepare")

    def leave(self) -> None:
        self.on_call("leave")

    def come_back(self) -> None:
        self.on_call("come back")


@dataclass
class Ledger:
    """Bytes and descriptors that this process holds. They are equal before and after a test, but for chunks whose
    release failed: these are lost, or not if the call was made.
    """

    free: int = field(default_factory=free_bytes)
    files: int = field(default_factory=descriptors)
    host_used: int = field(default_factory=host_used_bytes)
    unreleased: int = field(default_factory=_core.unreleased_bytes)

    def has(self, free: int) -> bool:
        """Whether so many bytes are free as at the beginning, without those that failed releases may have lost."""
        return 0 <= self.free - free <= _core.unreleased_bytes() - self.unreleased

    def equals(self, found: Ledger) -> bool:
        most_lost = (found.unreleased - self.unreleased) // PAGE  # chunks, of one descriptor each
        return self.has(found.free) and self.host_used == found.host_used and 0 <= found.files - self.files <= most_lost

    def check(self) -> None:
        use_device()
        memsaver.release_host_memory()  # and files that are kept
        deadline = time.monotonic() + 3
        while not self.equals(found := Ledger()) and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread in the background may have a file of the system open for a moment
        assert self.equals(found), f"{found}, not {self}"


class Sweep:
    """Repeats an action. Its first driver or file call fails, then its second, and so on to the last.

    ``call``: count only calls of this name. ``raises``: some of the failures are errors of the action.
    """

    def __init__(self, kind: str, act: Callable[[], object], call: str = "", raises: bool = True) -> None:
        self.kind = kind
        self.act = act
        self.call = call
        self.raises = raises and kind != "after"  # a call that was made can count as made
        self.failures = 0

    def __iter__(self) -> Iterator[memsaver.Error | None]:
        """Yields the error of each attempt. The caller checks the state, and restores the initial one."""
        for nth in range(1, 1000):
            controls.arm(nth, self.kind, self.call)
            error = None
            try:
                self.act()
            except memsaver.Error as raised:
                error = raised
            reached = controls.calls() >= nth
            controls.disarm()
            if not reached:
                assert error is None
                assert self.failures > 0 or not self.raises
                assert nth > 1
                return
            self.failures += error is not None
            yield error


def fresh_device() -> str:
    """A host device size that no other test of this run uses, and probably none of another run."""
    return str(GIB // 4 + ((os.getpid() * 61 + next(_counter)) % 50_000) * PAGE)


class Fill:
    """Takes memory of a device until ``leave`` bytes are free; close() gives it back."""

    def __init__(self, leave: int = 0, device: str = "cpu") -> None:
        self.driver = _core.open_driver(device)
        self.handles: list[int] = []
        self.nbytes = missing = free_bytes(device) - leave
        assert missing >= 0 and missing % PAGE == 0
        while missing:
            size = next(size for size in (256 * MIB, 32 * MIB, PAGE) if size <= missing)
            self.handles.append(self.driver.create(size))
            missing -= size

    def close(self) -> None:
        while self.handles:
            self.driver.release(self.handles.pop())

    def __enter__(self) -> Fill:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def functions(points: tuple[int, int]) -> tuple[Any, Any]:
    """A pair of entry points as functions that ctypes can call."""
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    return alloc(points[0]), free(points[1])


@contextmanager
def thread_inside(region: memsaver.Region) -> Iterator[int | None]:
    """Another thread, which is inside a region. Yields its number."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with region:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(60)
        yield thread.ident
    finally:
        leave.set()
        thread.join()


class Hooks:
    """A region's entry points as torch calls them."""

    def __init__(self, region: memsaver.Region) -> None:
        self._alloc, self._free = functions(region._core.entry_points())

    def alloc(self, nbytes: int) -> int | None:
        found: int | None = self._alloc(nbytes, 0, None)
        return found

    def free(self, address: int | None, nbytes: int = 0) -> None:
        self._free(address, nbytes, 0, None)


def exploration(examples: int, steps: int) -> settings:
    """So many fixed sequences of a state machine, or EXPLORED new ones."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        max_examples=EXPLORED or examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=not EXPLORED,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process. Variables without a value are left out of it."""
    changes.setdefault("MEMSAVER_HOST_DEVICE", fresh_device())
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {**os.environ, "PYTHONPATH": path, **changes}
    return {name: value for name, value in found.items() if value or name not in changes}


def run_program(command: Sequence[str], timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, with any status. ``options``: of subprocess.run()."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)


def run_python(source: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in an interpreter of its own, on a fresh host device unless the environment names one."""
    return run_program([sys.executable, "-W", _FORK, "-c", textwrap.dedent(source)], env=environment(**changes))


def run_clean(source: str, **changes: str) -> str:
    """run_python() of a program that must succeed and print nothing to stderr. Returns its stdout."""
    done = run_python(source, **changes)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


ENDED = "the process ended: "


class Remote:
    """Another process, which runs one statement at a time and returns its output."""

    _to: IO[str]
    _from: IO[str]

    def send(self, statement: str) -> None:
        self._to.write(statement + "\n")
        self._to.flush()

    def answer(self) -> str:
        lines: list[str] = []
        for line in self._from:
            if line == "<done>\n":
                return "".join(lines).strip()
            lines.append(line)
        raise AssertionError(ENDED + "".join(lines))

    def run(self, statement: str) -> str:
        self.send(statement)
        return self.answer()

    def __enter__(self) -> Self:
        return self


class Peer(Remote):
    """Another process with memsaver."""

    def __init__(self, **changes: str) -> None:
        loop = """
            import sys, memsaver
            scope = {"memsaver": memsaver, "_core": memsaver._core}
            for line in sys.stdin:
                exec(line, scope)
                print("<done>", flush=True)
        """
        changes.setdefault("MEMSAVER_HOST_DEVICE", os.environ["MEMSAVER_HOST_DEVICE"])
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(loop)],
            env=environment(**changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._to.close()
        self._from.close()


def end_main_thread() -> None:
    """Ends only this thread, unlike os._exit(). The system treats a process without a main thread as exiting."""
    exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    ctypes.CDLL(None).syscall(exit_thread, 0)
