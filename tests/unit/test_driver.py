"""The conformance suite that every driver passes, and further behaviour of the host driver."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import memsaver
from memsaver import _core
from tests import controls
from tests.support import MIB, PAGE, descriptors, random_bytes

DEVICES = ["cpu"] + (["cuda:0"] if _core.cuda_device_count() else [])


class Bench:
    """A driver, with everything that a test takes from it given back at the end."""

    def __init__(self, device: str) -> None:
        self.driver = _core.open_driver(device)
        if device != "cpu":
            controls.with_cuda()
        self.stack = ExitStack()

    def reserve(self, size: int) -> int:
        address: int = self.driver.reserve(size)
        self.stack.callback(self.driver.unreserve, address, size)
        return address

    def create(self, size: int) -> int:
        return self.own(self.driver.create(size))

    def own(self, handle: int) -> int:
        self.stack.callback(self.driver.release, handle)
        return handle

    def map(self, address: int, size: int, handle: int, unmap: bool = True) -> None:
        self.driver.map(address, size, handle)
        if unmap:
            self.stack.callback(self.driver.unmap, address, size)
        self.driver.allow(address, size)

    def write(self, address: int, data: np.ndarray[Any, Any]) -> None:
        self.driver.copy_in(address, data.ctypes.data, data.nbytes)
        self.driver.finish_copies()

    def read(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        found = np.zeros(nbytes, np.uint8)
        self.driver.copy_out(found.ctypes.data, address, nbytes)
        self.driver.finish_copies()
        return found

    def free(self) -> int:
        return int(self.driver.memory()[0])


@pytest.fixture(params=DEVICES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    with made.stack:
        yield made


def refused(call: Callable[[], object]) -> memsaver.DriverError:
    with pytest.raises(memsaver.DriverError) as caught:
        call()
    error = caught.value
    assert error.call and error.message and error.code != 0
    assert error.call in str(error) and str(error.code) in str(error) and error.message in str(error)
    return error


def record(driver: Any) -> _core.WorkMark:
    mark = driver.record()
    assert mark is not None
    return mark


class Calls:
    """Random calls on a few pages of addresses, and a model of their results. Memory has a number: several handles and
    addresses may have the same. ``exact``: the host driver, which also refuses calls that CUDA leaves undefined.
    """

    PAGES = 12

    def __init__(self, bench: Bench, exact: bool, seed: int) -> None:
        self.bench, self.driver, self.exact = bench, bench.driver, exact
        self.random, self.bytes = random.Random(seed), np.random.default_rng(seed)
        self.base = bench.reserve(self.PAGES * PAGE)
        self.handles: dict[int, int] = {}  # numbers of their memory
        self.pages: dict[int, int] = {}  # of each memory
        self.imported: set[int] = set()
        self.contents: dict[tuple[int, int], np.ndarray[Any, Any]] = {}  # by memory and page
        self.mapped: list[tuple[int, int] | None] = [None] * self.PAGES  # memory and its page, by page
        self.waits_for_access: set[int] = set()  # pages
        self.free = bench.free()

    def address(self, page: int) -> int:
        return self.base + page * PAGE

    def create(self) -> None:
        if len(self.handles) < 8:
            pages = self.random.choice((1, 2, 4))
            number = max(self.pages, default=0) + 1
            self.handles[self.driver.create(pages * PAGE)] = number
            self.pages[number] = pages

    def share(self) -> None:
        handle = self.random.choice([*self.handles])
        if handle in self.imported:  # a process that borrows memory cannot send it on
            error = refused(lambda: self.driver.export_fd(handle))
            assert error.code == 1 and "invalid argument" in str(error)
            return
        file = self.driver.export_fd(handle)
        other = self.driver.import_fd(file)
        os.close(file)
        self.handles[other] = self.handles[handle]
        self.imported.add(other)

    def release(self) -> None:
        handle = self.random.choice([*self.handles])
        self.driver.release(handle)
        del self.handles[handle]
        self.imported.discard(handle)
        if self.exact:
            refused(lambda: self.driver.release(handle))
            refused(lambda: self.driver.export_fd(1 << 40))  # which does not exist
            refused(lambda: self.driver.map(self.base, PAGE, 1 << 40))

    def map(self) -> None:
        handle = self.random.choice([*self.handles])
        number = self.handles[handle]
        pages = self.pages[number]
        asked = self.random.choice((pages, pages, pages, pages + 1, *([pages - 1] if self.exact and pages > 1 else [])))
        first = self.random.randrange(self.PAGES - asked + 1)
        where = range(first, first + asked)
        if asked != pages or any(self.mapped[page] for page in where):
            refused(lambda: self.driver.map(self.address(first), asked * PAGE, handle))
            return
        self.driver.map(self.address(first), asked * PAGE, handle)
        self.mapped[first : first + pages] = [(number, page) for page in range(pages)]
        self.waits_for_access |= set(where)

    def unmap(self) -> None:
        """One call for several whole chunks. No part of a chunk can be unmapped."""
        first = self.random.randrange(self.PAGES)
        last = min(self.PAGES - 1, first + self.random.randrange(5))
        found = self.mapped[first : last + 1]
        whole = [each for each in found if each is not None]
        if len(whole) == len(found) and whole[0][1] == 0 and whole[-1][1] == self.pages[whole[-1][0]] - 1:
            self.driver.unmap(self.address(first), len(found) * PAGE)
            self.mapped[first : last + 1] = [None] * len(found)
            self.waits_for_access -= set(range(first, last + 1))
        elif self.exact or len(whole) == len(found):
            refused(lambda: self.driver.unmap(self.address(first), len(found) * PAGE))

    def run(self) -> range:
        """Adjacent mapped pages, which can be reached: one call gives access to several chunks."""
        first = self.random.choice([page for page, found in enumerate(self.mapped) if found] or [0])
        last = first
        while last < self.PAGES and self.mapped[last] is not None:
            last += 1
        begin = first
        while begin < last and self.mapped[begin][1] != 0:  # type: ignore[index]
            begin -= 1
        if begin < last:
            self.driver.allow(self.address(begin), (last - begin) * PAGE)
            for page in self.waits_for_access & set(range(begin, last)):
                if self.mapped[page] not in self.contents:
                    self.write_page(page)
            self.waits_for_access -= set(range(begin, last))
        return range(begin, last)

    def write_page(self, page: int) -> None:
        data = self.bytes.integers(0, 256, PAGE, np.uint8)
        self.bench.write(self.address(page), data)
        self.contents[self.mapped[page]] = data  # type: ignore[index]

    def write(self) -> None:
        pages = self.run()
        if not pages:
            return
        begin = self.random.randrange(len(pages) * PAGE)
        data = self.bytes.integers(
            0, 256, min(len(pages) * PAGE - begin, self.random.choice((1, 777, PAGE + 12345))), np.uint8
        )
        at = self.address(pages[0]) + begin
        how = self.random.choice(("copy_in", "fill", "copy_within"))
        if how == "copy_in":
            self.bench.write(at, data)
        elif how == "fill":
            data[:] = self.random.choice((0, 7, 0xFF))
            self.driver.fill(at, data.size, data[0])
        else:
            data = self.bench.read(self.address(pages[0]), min(data.size, begin))
            self.driver.copy_within(at, self.address(pages[0]), data.size)
        self.driver.finish_copies()
        offset = begin
        while data.size:
            part = data[: PAGE - offset % PAGE]
            memory = self.mapped[pages[offset // PAGE]]
            self.contents[memory][offset % PAGE : offset % PAGE + part.size] = part  # type: ignore[index]
            offset, data = offset + part.size, data[part.size :]

    def check(self) -> None:
        pages = self.run()
        for page in pages:
            assert np.array_equal(self.bench.read(self.address(page), PAGE), self.contents[self.mapped[page]])  # type: ignore[index]
        if self.exact:
            living = {*self.handles.values(), *(each[0] for each in self.mapped if each)}
            assert self.bench.free() == self.free - sum(self.pages[number] for number in living) * PAGE
            if any(self.mapped):
                refused(lambda: self.driver.unreserve(self.base, self.PAGES * PAGE))

    def close(self) -> None:
        for page, found in enumerate(self.mapped):
            if found is not None and found[1] == 0:
                self.driver.unmap(self.address(page), self.pages[found[0]] * PAGE)
        for handle in self.handles:
            self.driver.release(handle)


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_give_the_results_of_a_model(bench: Bench, seed: int) -> None:
    files = descriptors()
    calls = Calls(bench, bench.driver.name == "cpu", seed)
    steps = [calls.create, calls.share, calls.release, calls.map, calls.map, calls.unmap, calls.write, calls.check]
    for _ in range(150):
        step = calls.random.choice(steps)
        if calls.handles or step in (calls.create, calls.check):
            step()
    calls.close()
    assert calls.exact is False or (bench.free(), descriptors()) == (calls.free, files)


@pytest.mark.parametrize("by", ["marks", "synchronize"])
def test_marks_and_waits_cover_the_copies_queued_before_them(bench: Bench, by: str) -> None:
    size = 64 * MIB
    address = bench.reserve(size)
    bench.map(address, size, bench.create(size))
    data, found = random_bytes(size, seed=1), np.zeros(size, np.uint8)

    def wait(direction: str) -> None:
        if by == "marks":
            mark = bench.driver.mark(direction)
            mark.wait()
            assert mark.done()
        else:
            recorded = bench.driver.record()
            bench.driver.synchronize()
            assert recorded is None or recorded.done()

    bench.driver.copy_in(address, data.ctypes.data, size)
    wait("in")
    bench.driver.copy_out(found.ctypes.data, address, size)
    wait("out")
    assert np.array_equal(found, data)


# The host driver under work, as a GPU is: kernels that end later, and their mistakes.


@dataclass
class Memory:
    """Accessible memory of the host driver, full of zeros."""

    bench: Bench
    address: int
    size: int
    handle: int

    def first(self) -> int:
        return ctypes.c_ubyte.from_address(self.address).value

    def write(self, stream: int, byte: int, hold: float | None = None) -> None:
        controls.stream_write(stream, self.address, self.size, byte, hold)


@pytest.fixture
def memory() -> Iterator[Memory]:
    bench = Bench("cpu")
    with bench.stack:
        address = bench.reserve(PAGE)
        handle = bench.create(PAGE)
        bench.map(address, PAGE, handle)
        yield Memory(bench, address, PAGE, handle)
        controls.virtual_clock(False)
        controls.reset()
        if not mapped(bench, address):
            bench.driver.map(address, PAGE, handle)


def mapped(bench: Bench, address: int) -> bool:
    try:
        bench.driver.allow(address, PAGE)
    except memsaver.DriverError:
        return False
    return True


@pytest.fixture
def virtual_time() -> Iterator[None]:
    controls.virtual_clock(True)
    yield
    controls.virtual_clock(False)


def every_call(memory: Memory) -> dict[str, Callable[[], object]]:
    driver, address = memory.bench.driver, memory.address
    host = np.zeros(16, np.uint8).ctypes.data
    return {
        "cuMemAddressReserve": lambda: driver.reserve(PAGE),
        "cuMemAddressFree": lambda: driver.unreserve(address, PAGE),
        "cuMemCreate": lambda: driver.create(PAGE),
        "cuMemRelease": lambda: driver.release(memory.handle),
        "cuMemExportToShareableHandle": lambda: driver.export_fd(memory.handle),
        "cuMemImportFromShareableHandle": lambda: driver.import_fd(0),
        "cuMemMap": lambda: driver.map(address, PAGE, memory.handle),
        "cuMemSetAccess": lambda: driver.allow(address, PAGE),
        "cuMemUnmap": lambda: driver.unmap(address, PAGE),
        "cuCtxSynchronize": driver.synchronize,
        "cuCtxRecordEvent": driver.record,
        "cuMemcpyDtoHAsync": lambda: driver.copy_out(host, address, 16),
        "cuMemcpyHtoDAsync": lambda: driver.copy_in(address, host, 16),
        "cuMemsetD8Async": lambda: driver.fill(address, 16, 1),
        "cuMemcpyDtoDAsync": lambda: driver.copy_within(address + 16, address, 16),
        "cuEventRecord": lambda: driver.mark("in"),
        "cuStreamSynchronize": driver.finish_copies,
        "cuMemHostRegister": lambda: driver.pin(host, 16),
        "cuMemHostUnregister": lambda: driver.unpin(host),
    }


def assert_lost(memory: Memory) -> None:
    assert controls.context_lost()
    for name, call in every_call(memory).items():
        error = refused(call)
        assert error.call in (name, "cuEventCreate")  # of a mark
        assert error.code == 700


def test_every_call_fails_after_an_illegal_access(memory: Memory) -> None:
    driver = memory.bench.driver
    stream, other = controls.stream_create(), controls.stream_create()
    free = memory.bench.free()
    ticket, mark = record(driver), driver.mark("in")
    memory.write(stream, 1)
    memory.write(other, 2)
    driver.unmap(memory.address, PAGE)  # without a wait
    assert not controls.context_lost()
    controls.stream_release(stream)
    for _ in range(2):
        assert_lost(memory)
    assert refused(ticket.done).code == refused(mark.wait).code == 700
    assert driver.uuid() and driver.holdings() and driver.host_node() == -1  # which ask the system, not the context
    controls.reset()
    assert memory.bench.free() == free
    driver.map(memory.address, PAGE, memory.handle)
    driver.allow(memory.address, PAGE)
    driver.synchronize()
    assert memory.first() == 0  # kernels that had not started never ran


@pytest.mark.parametrize("way", ["copy_out", "copy_in", "fill", "copy_within", "copy_within from"])
def test_a_copy_whose_memory_was_unmapped_ends_the_context(memory: Memory, virtual_time: None, way: str) -> None:
    driver, host = memory.bench.driver, np.zeros(16, np.uint8)
    other = memory.bench.reserve(PAGE)
    memory.bench.map(other, PAGE, memory.bench.create(PAGE))
    controls.copies_delay(1)
    {
        "copy_out": lambda: driver.copy_out(host.ctypes.data, memory.address, 16),
        "copy_in": lambda: driver.copy_in(memory.address, host.ctypes.data, 16),
        "fill": lambda: driver.fill(memory.address, 16, 1),
        "copy_within": lambda: driver.copy_within(memory.address, other, 16),
        "copy_within from": lambda: driver.copy_within(other, memory.address, 16),
    }[way]()
    driver.unmap(memory.address, PAGE)
    assert refused(driver.finish_copies).code == 700
    assert_lost(memory)
