"""The code of a shared pool's clients on a CUDA device, in processes of their own (see tests/pool_support.py)."""

from __future__ import annotations

import gc  # noqa: F401  # for statements of tests
import os
import pickle  # noqa: F401
import random
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler  # noqa: F401

import torch
import torch.multiprocessing  # registers the reducers of tensors

import memsaver
from memsaver import _core
from tests.support import MIB, Hooks

DEVICE = "cuda:0"
FILLS = 200  # of one graph
REPLAYS = 100
LOOKS, LOOKS_APART_S = 10, 0.05


class Numbers:
    """A tensor in a region, which holds a sequence of numbers from ``start``."""

    def __init__(self, tag: str, nbytes: int, backup: str = "none", start: int = 0) -> None:
        self.region = memsaver.region(tag, DEVICE, backup)
        self.tensor = self.region.empty((nbytes // 8,), torch.int64)
        self.fill(start)

    def fill(self, start: int) -> None:
        self.start = start
        torch.arange(start, start + self.tensor.numel(), out=self.tensor)
        torch.cuda.synchronize()

    def check(self) -> None:
        step = 1 << 24  # numbers at a time, so that the comparison takes little memory of its own
        for at in range(0, self.tensor.numel(), step):
            part = self.tensor[at : at + step]
            expected = torch.arange(self.start + at, self.start + at + part.numel(), device=DEVICE)
            assert torch.equal(part, expected), f"differs from number {at} on"


class Heir:
    """A paused tensor that gets a dead client's memory, fills it, and counts the bytes that change afterwards."""

    def __init__(self, nbytes: int) -> None:
        self.region = memsaver.region("heir", DEVICE)
        self.tensor = self.region.empty((nbytes,), torch.uint8).fill_(7)
        assert self.wrong_bytes() == 0  # and the kernels are loaded: take() loses no time
        self.region.pause()

    def take(self, memory_timeout: float) -> str:
        """Returns the arrival time of the memory, by the machine's clock, and the wrong bytes summed over all reads."""
        self.region.resume(memory_timeout=memory_timeout)
        came = time.monotonic()
        self.tensor.fill_(7)
        wrong = 0
        for _ in range(LOOKS):
            wrong += self.wrong_bytes()
            time.sleep(LOOKS_APART_S)
        return f"{came} {wrong}"

    def wrong_bytes(self) -> int:
        parts = self.tensor.split(256 * MIB)  # the comparison takes as much memory as a part
        return int(torch.stack([(part != 7).sum() for part in parts]).sum())


def write_for_long(numbers: Numbers, seconds: float = 4.0) -> None:
    """Queues work for about so many seconds that writes to the whole tensor repeatedly."""
    graph = torch.cuda.CUDAGraph()
    numbers.tensor.fill_(-1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for byte in range(FILLS):
            numbers.tensor.fill_(-1 - byte)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    for _ in range(max(1, min(REPLAYS, int(1e3 * seconds / max(began.elapsed_time(ended), 1.0))))):
        graph.replay()
    numbers.graph = graph  # type: ignore[attr-defined]


def is_busy() -> bool:
    return not torch.cuda.current_stream().query()


def client_dies(seed: int, sizes: tuple[int, int] = (192 * MIB, 320 * MIB)) -> str:
    """A client of the pool pauses and resumes until it is killed at a random moment. Returns its pid, and its end.

    A fork of this process, which must not have used CUDA.
    """
    choose = random.Random(seed)
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            _live(choose, sizes, lambda: os.write(tell, b"1"))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(choose.random() * 0.3)
    os.kill(child, signal.SIGKILL)
    return f"{child} {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"


def _live(choose: random.Random, sizes: tuple[int, int], ready: Callable[[], object]) -> None:
    regions = [memsaver.region(backup, DEVICE, backup) for backup in ("none", "host")]
    for region, nbytes in zip(regions, sizes):
        hooks = Hooks(region)
        while hooks.alloc(nbytes) is None:
            time.sleep(0.001)
        if not region.pause().paused:
            raise AssertionError("nothing was paused")
    ready()
    turn(regions, choose, lambda: False)


def turn(regions: list[memsaver.Region], choose: random.Random, is_over: Callable[[], bool]) -> int:
    """Random transitions until ``is_over()``. Returns the number of those that did not fail for memory or a broker."""
    count = 0
    while not is_over():
        chosen = choose.sample(regions, choose.randint(1, len(regions)))
        try:
            for region in chosen:
                if choose.random() < 0.5:
                    region.pause(lazy=choose.choice((False, True, "copy")))
                else:
                    region.resume(memory_timeout=0.05)
                count += 1
        except (memsaver.OutOfMemoryError, memsaver.BrokerError):
            time.sleep(0.001)
    return count


def survive(numbers: Numbers, seed: int, path: str) -> int:
    """Transitions of one region with contents, until the file exists. At the end the region is active and checked."""
    count = turn([numbers.region], random.Random(seed), lambda: os.path.exists(path))
    deadline = time.monotonic() + 60
    while numbers.region.state != "active":
        try:
            numbers.region.resume(memory_timeout=10)
        except (memsaver.OutOfMemoryError, memsaver.BrokerError):
            assert time.monotonic() < deadline
    numbers.check()
    return count


def unreleased() -> int:
    return int(_core.unreleased_bytes())


class Trainer:
    """Bytes in free blocks of torch's pool over a region, with kernels in flight on them."""

    def __init__(self, nbytes: int) -> None:
        self.region = memsaver.region("trainer", DEVICE)
        self.nbytes = nbytes
        self.step()
        torch.cuda.synchronize()

    def step(self) -> None:
        """Writes to all bytes, in blocks that are free in torch afterwards. Returns while the kernels run."""
        with self.region:
            count = self.nbytes // (256 * MIB)
            blocks = [torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
            for number, block in enumerate(blocks):
                block.fill_(number)

    def cache(self, seconds: float) -> None:
        """Queues a kernel of about so many seconds, then a step."""
        torch.cuda._sleep(int(seconds * 1.5e9))
        self.step()

    def check(self) -> None:
        with self.region:
            block = torch.full((256 * MIB,), 3, dtype=torch.uint8, device=DEVICE)
        assert bool((block == 3).all())
