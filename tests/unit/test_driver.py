"""The conformance suite that every driver passes, and further behaviour of the host driver."""

from __future__ import annotations

import ctypes
import os
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


def test_memory_lives_as_long_as_a_handle_or_a_mapping_and_its_addresses_show_the_same_bytes(bench: Bench) -> None:
    files, free = descriptors(), bench.free()
    base, data = bench.reserve(7 * PAGE), random_bytes(2 * PAGE, seed=3)
    handle, other = bench.driver.create(2 * PAGE), bench.create(PAGE)
    file = bench.driver.export_fd(handle)
    imported = bench.driver.import_fd(file)
    os.close(file)
    error = refused(lambda: bench.driver.export_fd(imported))  # a process that borrows memory cannot send it on
    assert error.code == 1 and "invalid argument" in str(error)
    bench.driver.map(base, 2 * PAGE, handle)
    bench.driver.map(base + 2 * PAGE, 2 * PAGE, imported)
    refused(lambda: bench.driver.map(base + PAGE, PAGE, other))  # these addresses are in use
    refused(lambda: bench.driver.map(base + 4 * PAGE + MIB, PAGE, other))  # not a multiple of a page
    bench.driver.map(base + 4 * PAGE, PAGE, other)
    bench.driver.allow(base, 5 * PAGE)  # one call for several chunks
    bench.write(base, data)
    assert np.array_equal(bench.read(base + 2 * PAGE, 2 * PAGE), data)
    bench.driver.fill(base + PAGE + 5, PAGE - 9, 7)
    bench.driver.copy_within(base + 4 * PAGE, base + PAGE, PAGE)
    bench.driver.finish_copies()  # copies out have a stream of their own
    data = np.concatenate([data[PAGE : PAGE + 5], np.full(PAGE - 9, 7, np.uint8), data[-4:]])
    for page in (3, 4):
        assert np.array_equal(bench.read(base + page * PAGE, PAGE), data)
    if bench.driver.name == "cpu":
        refused(lambda: bench.driver.map(base + 5 * PAGE, PAGE, handle))  # a chunk is mapped whole
    bench.driver.release(handle)
    bench.driver.unmap(base, 4 * PAGE)
    bench.driver.map(base + PAGE, 2 * PAGE, imported)
    bench.driver.allow(base + PAGE, 2 * PAGE)
    bench.driver.release(imported)
    assert np.array_equal(bench.read(base + 2 * PAGE, PAGE), data)
    refused(lambda: bench.driver.unmap(base + 2 * PAGE, PAGE))  # a part of a chunk
    if bench.driver.name == "cpu":  # CUDA leaves these undefined, or others use the device
        assert bench.free() == free - 3 * PAGE
        for wrong in (imported, 1 << 40):  # which was released, and which does not exist
            refused(lambda: bench.driver.release(wrong))  # noqa: B023
        refused(lambda: bench.driver.map(base, PAGE, 1 << 40))
        refused(lambda: bench.driver.map(base + 5 * PAGE, 2 * PAGE, other))
        refused(lambda: bench.driver.unmap(base + PAGE, 3 * PAGE))  # with a gap
        refused(lambda: bench.driver.unreserve(base, 7 * PAGE))
    bench.driver.unmap(base + PAGE, 2 * PAGE)
    bench.driver.unmap(base + 4 * PAGE, PAGE)
    assert bench.driver.name != "cpu" or (bench.free(), descriptors()) == (free - PAGE, files + 1)


@pytest.mark.parametrize("by", ["marks", "synchronize"])
def test_marks_and_waits_cover_the_copies_queued_before_them(bench: Bench, by: str) -> None:
    size = 16 * MIB
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
