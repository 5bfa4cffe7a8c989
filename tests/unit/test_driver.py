"""The conformance suite that every driver passes, and further behaviour of the host driver."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memsaver
from memsaver import _core
from tests import controls
from tests.support import MIB, PAGE, Fill, descriptors, environment, fresh_device, run_python, until

DEVICES = ["cpu"] + (["cuda:0"] if _core.cuda_device_count() else [])
HOST = ["cpu"]


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


host_only = pytest.mark.parametrize("bench", HOST, indirect=True)


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


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


def test_reserved_addresses_are_aligned_and_apart(bench: Bench) -> None:
    first, second = bench.reserve(PAGE), bench.reserve(3 * PAGE)
    assert first % PAGE == 0 and second % PAGE == 0
    assert first + PAGE <= second or second + 3 * PAGE <= first


def test_copy_out_returns_the_bytes_of_copy_in(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    bench.map(address, 2 * PAGE, bench.create(2 * PAGE))
    data = random_bytes(PAGE + 12345)
    bench.write(address + 777, data)
    assert np.array_equal(bench.read(address + 777, data.nbytes), data)


def test_a_mark_covers_the_copies_queued_before_it(bench: Bench) -> None:
    size = 32 * MIB
    address = bench.reserve(size)
    bench.map(address, size, bench.create(size))
    data, found = random_bytes(size, seed=1), np.zeros(size, np.uint8)
    bench.driver.copy_in(address, data.ctypes.data, size)
    into = bench.driver.mark("in")
    into.wait()
    assert into.done()
    bench.driver.copy_out(found.ctypes.data, address, size)
    out = bench.driver.mark("out")
    out.wait()
    assert out.done() and np.array_equal(found, data)


def test_copies_of_one_direction_run_in_order(bench: Bench) -> None:
    address = bench.reserve(PAGE)
    bench.map(address, PAGE, bench.create(PAGE))
    versions = [random_bytes(PAGE, seed) for seed in range(20)]
    for version in versions:
        bench.driver.copy_in(address, version.ctypes.data, PAGE)
    bench.driver.fill(address + 100, 50, 7)  # queued behind them
    expected = versions[-1].copy()
    expected[100:150] = 7
    bench.driver.mark("in").wait()
    assert np.array_equal(bench.read(address, PAGE), expected)


@pytest.mark.parametrize("byte", [0, 0xFF])
def test_fill_writes_every_byte(bench: Bench, byte: int) -> None:
    size = 3 * PAGE
    address = bench.reserve(size)
    for at in range(0, size, PAGE):
        bench.map(address + at, PAGE, bench.create(PAGE))
    bench.write(address, random_bytes(size))
    bench.driver.fill(address, size, byte)
    bench.driver.finish_copies()
    assert np.array_equal(bench.read(address, size), np.full(size, byte, np.uint8))


def test_the_nearest_memory_is_a_node_or_unknown(bench: Bench) -> None:
    assert -1 <= bench.driver.host_node() < 1024


def test_data_survives_remapping_a_handle_to_another_address(bench: Bench) -> None:
    before, after = bench.reserve(PAGE), bench.reserve(PAGE)
    handle = bench.create(PAGE)
    bench.map(before, PAGE, handle, unmap=False)
    data = random_bytes(PAGE)
    bench.write(before, data)
    bench.driver.unmap(before, PAGE)
    bench.map(after, PAGE, handle)
    assert np.array_equal(bench.read(after, PAGE), data)


def test_two_addresses_of_one_handle_are_the_same_memory(bench: Bench) -> None:
    first, second = bench.reserve(PAGE), bench.reserve(PAGE)
    handle = bench.create(PAGE)
    bench.map(first, PAGE, handle)
    bench.map(second, PAGE, handle)
    data = random_bytes(PAGE)
    bench.write(first, data)
    assert np.array_equal(bench.read(second, PAGE), data)


def test_an_address_can_be_mapped_again(bench: Bench) -> None:
    address = bench.reserve(PAGE)
    contents = [random_bytes(PAGE, seed) for seed in range(2)]
    handles = [bench.create(PAGE) for _ in contents]
    for _ in range(3):
        for handle, data in zip(handles, contents):
            bench.map(address, PAGE, handle, unmap=False)
            bench.write(address, data)
            assert np.array_equal(bench.read(address, PAGE), data)
            bench.driver.unmap(address, PAGE)


def test_mapping_over_a_mapping_is_refused(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    bench.map(address, PAGE, bench.create(PAGE))
    small, large = bench.create(PAGE), bench.create(2 * PAGE)
    data = random_bytes(PAGE)
    bench.write(address, data)
    refused(lambda: bench.driver.map(address, PAGE, small))
    refused(lambda: bench.driver.map(address, 2 * PAGE, large))
    assert np.array_equal(bench.read(address, PAGE), data)


def test_mapping_a_size_other_than_the_chunks_is_refused(bench: Bench) -> None:
    address = bench.reserve(4 * PAGE)
    handle = bench.create(2 * PAGE)
    refused(lambda: bench.driver.map(address, 4 * PAGE, handle))


@host_only
def test_mapping_a_part_of_a_chunk_is_refused(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    handle = bench.create(2 * PAGE)
    refused(lambda: bench.driver.map(address, PAGE, handle))


def test_mapping_where_nothing_is_reserved_is_refused(bench: Bench) -> None:
    handle = bench.create(2 * PAGE)
    address = bench.driver.reserve(PAGE)
    bench.driver.unreserve(address, PAGE)
    refused(lambda: bench.driver.map(address, 2 * PAGE, handle))


def test_one_unmap_serves_several_whole_chunks(bench: Bench) -> None:
    address = bench.reserve(7 * PAGE)
    at = address
    contents = []
    for seed, pages in enumerate((2, 1, 4)):
        bench.map(at, pages * PAGE, bench.create(pages * PAGE), unmap=False)
        contents.append((at, random_bytes(pages * PAGE, seed)))
        bench.write(*contents[-1])
        at += pages * PAGE
    for where, data in contents:
        assert np.array_equal(bench.read(where, data.nbytes), data)
    bench.driver.unmap(address, 7 * PAGE)
    bench.map(address, 2 * PAGE, bench.create(2 * PAGE))


def test_one_allow_call_covers_several_chunks(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    for at in (address, address + PAGE):
        bench.driver.map(at, PAGE, bench.create(PAGE))
    bench.driver.allow(address, 2 * PAGE)
    data = random_bytes(2 * PAGE)
    bench.write(address, data)
    assert np.array_equal(bench.read(address, 2 * PAGE), data)
    bench.driver.unmap(address, 2 * PAGE)


@pytest.mark.parametrize(("begin", "pages"), [(0, 1), (1, 1), (1, 2), (0, 3)])
def test_no_part_of_a_chunk_can_be_unmapped(bench: Bench, begin: int, pages: int) -> None:
    address = bench.reserve(4 * PAGE)
    for at in (address, address + 2 * PAGE):
        bench.map(at, 2 * PAGE, bench.create(2 * PAGE))
    data = random_bytes(4 * PAGE)
    bench.write(address, data)
    refused(lambda: bench.driver.unmap(address + begin * PAGE, pages * PAGE))
    assert np.array_equal(bench.read(address, 4 * PAGE), data)


@host_only
def test_unmapping_unmapped_memory_is_refused(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    refused(lambda: bench.driver.unmap(address, PAGE))
    bench.map(address, PAGE, bench.create(PAGE))
    refused(lambda: bench.driver.unmap(address, 2 * PAGE))


def test_an_imported_descriptor_maps_the_same_memory(bench: Bench) -> None:
    address, other = bench.reserve(PAGE), bench.reserve(PAGE)
    handle = bench.create(PAGE)
    bench.map(address, PAGE, handle)
    file = bench.driver.export_fd(handle)
    try:
        imported = bench.own(bench.driver.import_fd(file))
    finally:
        os.close(file)
    bench.map(other, PAGE, imported)
    data = random_bytes(PAGE)
    bench.write(address, data)
    assert np.array_equal(bench.read(other, PAGE), data)


def test_an_importer_keeps_the_memory(bench: Bench) -> None:
    address = bench.reserve(PAGE)
    handle = bench.driver.create(PAGE)
    bench.driver.map(address, PAGE, handle)
    bench.driver.allow(address, PAGE)
    data = random_bytes(PAGE)
    bench.write(address, data)
    file = bench.driver.export_fd(handle)
    imported = bench.own(bench.driver.import_fd(file))
    os.close(file)
    bench.driver.unmap(address, PAGE)
    bench.driver.release(handle)
    bench.map(address, PAGE, imported)
    assert np.array_equal(bench.read(address, PAGE), data)


@host_only
def test_shared_memory_is_counted_once(bench: Bench) -> None:
    before = bench.free()
    handle = bench.driver.create(2 * PAGE)
    file = bench.driver.export_fd(handle)
    imported = bench.driver.import_fd(file)
    os.close(file)
    assert bench.free() == before - 2 * PAGE
    bench.driver.release(handle)
    assert bench.free() == before - 2 * PAGE
    bench.driver.release(imported)
    assert bench.free() == before


@host_only
def test_importing_other_descriptors_is_refused(bench: Bench, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert refused(lambda: bench.driver.import_fd(file.fileno())).code == 1
    assert refused(lambda: bench.driver.import_fd(1 << 20)).code == 1


@host_only
def test_descriptors_go_with_the_memory(bench: Bench) -> None:
    before = descriptors()
    handles = [bench.driver.create(PAGE) for _ in range(8)]
    for handle in handles:
        bench.driver.release(handle)
    assert descriptors() == before


def test_free_memory_goes_down_and_up_again(bench: Bench) -> None:
    size = 64 * MIB
    free, total = bench.driver.memory()
    assert 0 < free <= total
    handle = bench.driver.create(size)
    held = bench.free()
    bench.driver.release(handle)
    assert held <= free - size
    assert bench.free() >= held + size


def test_memory_released_while_mapped_stays_until_it_is_unmapped(bench: Bench) -> None:
    size = 64 * MIB
    address = bench.reserve(size)
    handle = bench.driver.create(size)
    bench.driver.map(address, size, handle)
    bench.driver.allow(address, size)
    held = bench.free()
    data = random_bytes(PAGE)
    bench.write(address, data)
    bench.driver.release(handle)
    assert bench.free() < held + size
    assert np.array_equal(bench.read(address, PAGE), data)
    bench.driver.unmap(address, size)
    assert bench.free() >= held + size


def test_creating_beyond_the_device_says_out_of_memory(bench: Bench) -> None:
    beyond = (bench.driver.memory()[1] // PAGE + 1) * PAGE
    error = refused(lambda: bench.driver.create(beyond))
    assert error.code == 2


@host_only
def test_a_full_device_refuses_memory_until_some_is_released(bench: Bench) -> None:
    with Fill(leave=PAGE):
        handle = bench.driver.create(PAGE)
        assert bench.free() == 0
        assert refused(lambda: bench.driver.create(PAGE)).code == 2
        bench.driver.release(handle)
        bench.create(PAGE)


@host_only
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 4096])
def test_sizes_that_are_not_whole_pages_are_refused(bench: Bench, size: int) -> None:
    assert refused(lambda: bench.driver.create(size)).call == "cuMemCreate"
    assert refused(lambda: bench.driver.reserve(size)).call == "cuMemAddressReserve"


@host_only
def test_handles_that_do_not_exist_are_refused(bench: Bench) -> None:
    address = bench.reserve(PAGE)
    handle = bench.driver.create(PAGE)
    bench.driver.release(handle)
    refused(lambda: bench.driver.release(handle))
    refused(lambda: bench.driver.map(address, PAGE, handle))
    refused(lambda: bench.driver.export_fd(handle))


@host_only
def test_addresses_that_hold_a_mapping_cannot_be_given_up(bench: Bench) -> None:
    address = bench.reserve(PAGE)
    bench.map(address, PAGE, bench.create(PAGE))
    refused(lambda: bench.driver.unreserve(address, PAGE))


@pytest.mark.parametrize("step", ["reserved", "mapped", "unmapped"])
def test_touching_host_memory_without_access_ends_in_a_fault(step: str) -> None:
    done = run_python(f"""
        import ctypes
        from memsaver import _core
        driver = _core.open_driver("cpu")
        page = 2 << 20
        address = driver.reserve(page)
        if {step!r} != "reserved":
            driver.map(address, page, driver.create(page))
        if {step!r} == "unmapped":
            driver.allow(address, page)
            ctypes.memset(address, 1, page)
            driver.unmap(address, page)
        print("so far", flush=True)
        ctypes.c_char.from_address(address).value
    """)
    assert done.stdout == "so far\n"
    assert done.returncode == -signal.SIGSEGV


@host_only
def test_host_memory_is_plain_memory_of_the_process(bench: Bench) -> None:
    address = bench.reserve(PAGE)
    bench.map(address, PAGE, bench.create(PAGE))
    ctypes.memset(address, 42, PAGE)
    assert (bench.read(address, PAGE) == 42).all()


def test_a_device_is_known_by_its_uuid(bench: Bench) -> None:
    assert bench.driver.uuid() == _core.open_driver(bench.driver.name).uuid() != ""


def test_work_that_was_waited_for_is_done(bench: Bench) -> None:
    bench.driver.synchronize()
    ticket = bench.driver.record()
    if ticket is not None:
        until(ticket.done)


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'tpu'"):
        _core.open_driver("tpu")
    with pytest.raises((ValueError, memsaver.DriverError)):
        _core.open_driver(f"cuda:{_core.cuda_device_count()}")


def test_a_copy_within_the_device_is_queued_with_the_copies_in(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    bench.map(address, 2 * PAGE, bench.create(2 * PAGE))
    data = random_bytes(PAGE)
    bench.driver.copy_in(address, data.ctypes.data, PAGE)
    bench.driver.copy_within(address + PAGE + 512, address + 100, 5000)
    bench.driver.fill(address, PAGE, 0)  # behind it
    bench.driver.mark("in").wait()
    assert np.array_equal(bench.read(address + PAGE + 512, 5000), data[100:5100])


def test_synchronize_and_record_cover_the_copies(bench: Bench) -> None:
    size = 64 * MIB
    address = bench.reserve(size)
    bench.map(address, size, bench.create(size))
    data, found = random_bytes(size), np.zeros(size, np.uint8)
    bench.driver.copy_in(address, data.ctypes.data, size)
    bench.driver.synchronize()
    bench.driver.copy_out(found.ctypes.data, address, size)
    ticket = bench.driver.record()
    bench.driver.synchronize()
    assert np.array_equal(found, data)
    assert ticket is None or ticket.done()


def test_host_memory_is_pinned_once(bench: Bench) -> None:
    memory = np.zeros(3 * PAGE, np.uint8)
    address = round_up(memory.ctypes.data)
    bench.driver.pin(address, PAGE)
    assert refused(lambda: bench.driver.pin(address, PAGE)).code == 712
    bench.driver.unpin(address)
    assert refused(lambda: bench.driver.unpin(address)).code == 713
    bench.driver.pin(address, PAGE)
    bench.driver.unpin(address)


def round_up(address: int) -> int:
    return (address + PAGE - 1) // PAGE * PAGE


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
    controls.reset()  # also in the mode of a late device: each test sets its own delays
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


def test_a_kernel_runs_when_its_stream_is_released(memory: Memory) -> None:
    stream, other = controls.stream_create(), controls.stream_create()
    memory.write(stream, 1)
    read = controls.stream_read(stream, memory.address + 100, 50)
    memory.write(stream, 2)
    controls.stream_release(other)
    assert (memory.first(), read.bytes()) == (0, None)
    controls.stream_release(stream)
    assert (memory.first(), read.bytes()) == (2, b"\1" * 50)


def test_a_record_covers_the_kernels_launched_before_it(memory: Memory) -> None:
    driver = memory.bench.driver
    first, second = controls.stream_create(), controls.stream_create()
    memory.write(first, 1)
    ticket = record(driver)
    memory.write(second, 2)
    later = record(driver)
    assert not ticket.done()
    controls.stream_release(first)
    assert ticket.done() and not later.done()
    controls.stream_release(0)
    assert later.done()


def test_synchronize_waits_for_all_streams(memory: Memory, virtual_time: None) -> None:
    began = controls.clock_now()
    for hold in (3, 7):
        memory.write(controls.stream_create(), hold, hold)
    memory.bench.driver.synchronize()
    assert controls.clock_now() - began == pytest.approx(7)
    assert memory.first() == 7


def test_synchronize_waits_until_another_thread_releases_the_stream(memory: Memory) -> None:
    stream = controls.stream_create()
    found: list[int] = []

    def wait() -> None:
        memory.bench.driver.synchronize()
        found.append(memory.first())

    memory.write(stream, 1)
    thread = threading.Thread(target=wait)
    thread.start()
    memory.write(stream, 2)  # which may be behind the wait
    controls.stream_release(stream)
    thread.join()
    assert found in ([1], [2])


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


@pytest.mark.parametrize("reach", ["no access", "beyond the chunk"])
def test_a_kernel_outside_accessible_memory_ends_the_context(memory: Memory, reach: str) -> None:
    stream = controls.stream_create()
    if reach == "no access":
        memory.bench.driver.unmap(memory.address, PAGE)
        memory.bench.driver.map(memory.address, PAGE, memory.handle)
        memory.write(stream, 1)
    else:
        controls.stream_read(stream, memory.address + 1, PAGE)
    controls.stream_release(stream)
    assert_lost(memory)


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


def test_a_killed_context_ends_a_wait_with_an_error(memory: Memory) -> None:
    stream = controls.stream_create()
    memory.write(stream, 1)
    ticket = record(memory.bench.driver)
    errors: list[memsaver.DriverError] = []
    thread = threading.Thread(target=lambda: errors.append(refused(memory.bench.driver.synchronize)))
    thread.start()
    controls.kill_context()
    thread.join()
    assert errors[0].code == refused(ticket.done).code == 700
    assert memory.first() == 0
    assert_lost(memory)


def test_a_driver_without_records_returns_none(memory: Memory) -> None:
    controls.record_supported(False)
    assert memory.bench.driver.record() is None
    controls.record_supported(True)
    assert record(memory.bench.driver).done()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="the tables are in another folder")
def test_the_table_of_a_host_device_goes_with_its_last_process() -> None:
    """A killed process leaves it to the next process that uses any host device."""
    size = int(fresh_device())
    table = Path(f"/dev/shm/memsaver.2.{os.getuid()}.{size}")
    code = """
        import sys, memsaver
        memsaver.region("a", device="cpu")._core.allocate_array(1 << 20)
        print("used", flush=True)
        sys.stdin.readline()
    """

    def started(nbytes: int) -> subprocess.Popen[str]:
        settings = environment(MEMSAVER_HOST_DEVICE=str(nbytes))
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], env=settings, stdin=-1, stdout=-1, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "used\n"
        return process

    first, second = started(size), started(size)
    first.communicate("\n")
    assert table.exists()
    second.communicate("\n")
    assert not table.exists()
    killed = started(size)
    killed.kill()
    killed.communicate()
    started(int(fresh_device())).communicate("\n")
    assert not table.exists()
