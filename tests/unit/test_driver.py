"""The conformance suite that every driver passes, and what the host driver promises besides."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import memsaver
from memsaver import _core
from tests.support import MIB, PAGE, Fill, descriptors, run_python

DEVICES = ["cpu"] + (["cuda:0"] if _core.cuda_device_count() else [])
HOST = ["cpu"]


class Bench:
    """A driver, with everything that a test takes from it given back at the end."""

    def __init__(self, device: str) -> None:
        self.driver = _core.open_driver(device)
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


def test_reserved_addresses_are_aligned_and_apart(bench: Bench) -> None:
    first, second = bench.reserve(PAGE), bench.reserve(3 * PAGE)
    assert first % PAGE == 0 and second % PAGE == 0
    assert first + PAGE <= second or second + 3 * PAGE <= first


def test_what_is_copied_in_is_copied_out(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    bench.map(address, 2 * PAGE, bench.create(2 * PAGE))
    data = random_bytes(PAGE + 12345)
    bench.write(address + 777, data)
    assert np.array_equal(bench.read(address + 777, data.nbytes), data)


def test_a_mark_stands_for_the_copies_queued_before_it(bench: Bench) -> None:
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


def test_one_call_allows_several_whole_chunks(bench: Bench) -> None:
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
def test_unmapping_what_is_not_mapped_is_refused(bench: Bench) -> None:
    address = bench.reserve(2 * PAGE)
    refused(lambda: bench.driver.unmap(address, PAGE))
    bench.map(address, PAGE, bench.create(PAGE))
    refused(lambda: bench.driver.unmap(address, 2 * PAGE))


def test_a_descriptor_shares_the_memory(bench: Bench) -> None:
    address, other = bench.reserve(PAGE), bench.reserve(PAGE)
    handle = bench.create(PAGE)
    bench.map(address, PAGE, handle)
    file = bench.driver.export_fd(handle)
    try:
        imported = bench.own(bench.driver.import_fd(file, PAGE))
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
    imported = bench.own(bench.driver.import_fd(file, PAGE))
    os.close(file)
    bench.driver.unmap(address, PAGE)
    bench.driver.release(handle)
    bench.map(address, PAGE, imported)
    assert np.array_equal(bench.read(address, PAGE), data)


@host_only
def test_shared_memory_counts_once(bench: Bench) -> None:
    before = bench.free()
    handle = bench.driver.create(2 * PAGE)
    file = bench.driver.export_fd(handle)
    imported = bench.driver.import_fd(file, 2 * PAGE)
    os.close(file)
    assert bench.free() == before - 2 * PAGE
    bench.driver.release(handle)
    assert bench.free() == before - 2 * PAGE
    bench.driver.release(imported)
    assert bench.free() == before


@host_only
def test_importing_another_size_is_refused(bench: Bench) -> None:
    file = bench.driver.export_fd(bench.create(PAGE))
    refused(lambda: bench.driver.import_fd(file, 2 * PAGE))
    os.close(file)


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
def test_a_full_device_takes_no_more_until_something_goes(bench: Bench) -> None:
    with Fill(leave=PAGE):
        handle = bench.driver.create(PAGE)
        assert bench.free() == 0
        assert refused(lambda: bench.driver.create(PAGE)).code == 2
        bench.driver.release(handle)
        bench.create(PAGE)


@host_only
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 4096])
def test_sizes_that_are_not_whole_pages_are_refused(bench: Bench, size: int) -> None:
    assert refused(lambda: bench.driver.create(size)).call == "create"
    assert refused(lambda: bench.driver.reserve(size)).call == "reserve"


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
    assert bench.driver.work_is_done()


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'tpu'"):
        _core.open_driver("tpu")
    with pytest.raises((ValueError, memsaver.DriverError)):
        _core.open_driver(f"cuda:{_core.cuda_device_count()}")


def test_the_armed_call_fails_once(bench: Bench) -> None:
    address = bench.reserve(PAGE)
    handle = bench.create(PAGE)
    _core.faults_arm(2)
    bench.driver.map(address, PAGE, handle)
    assert refused(lambda: bench.driver.unmap(address, PAGE)).code == 999
    bench.driver.unmap(address, PAGE)
    assert _core.faults_calls() == 3


def test_an_armed_create_can_say_out_of_memory(bench: Bench) -> None:
    _core.faults_arm(1, "memory")
    assert refused(lambda: bench.driver.create(PAGE)).code == 2


def test_arming_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="nth"):
        _core.faults_arm(0)
    with pytest.raises(ValueError, match="kind"):
        _core.faults_arm(1, "cosmic ray")
