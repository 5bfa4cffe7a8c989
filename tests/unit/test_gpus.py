"""The core on GPUs that are made up (tests/gpus.py): platforms, peers, dead contexts, memory of the driver, locks."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

import memsaver
from memsaver import _core, cli, doctor
from memsaver._torch.ipc import receiver
from tests import controls, gpus
from tests.gpus import Segment, gpu
from tests.support import GIB, MIB, PAGE, Visitor, check, run_clean, until, used_bytes

pytestmark = pytest.mark.gpus


def refused(call: Callable[[], object], kind: type[Exception] = memsaver.DriverError) -> Any:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def make(device: str, backup: str = "host", tag: str = "a", **options: Any) -> memsaver.Region:
    return memsaver.region(tag, device=device, backup=backup, **options)


def round_trip(region: memsaver.Region, *segments: Segment) -> None:
    region.pause()
    region.resume()
    check(segments)


def host_bytes(device: str) -> tuple[int, int]:
    row = memsaver.stats().devices[device]
    return row.host_held_bytes, row.host_used_bytes


# Chunks and handles


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({"fabric": 1}, 1 | 8),
        ({"fabric": 800}, 1),  # without a channel of IMEX
        ({"fabric": 801}, 1),
        ({"refusal": 801}, 0),
    ],
)
def test_each_segment_has_one_handle_with_all_types_that_the_driver_makes(
    options: dict[str, int], types: int, threads: ThreadPoolExecutor
) -> None:
    device = gpu(memory=GIB // 4, **options)
    region, other = make(device, one_handle=True), make(device, tag="other")

    def handle_at(address: int) -> int:
        handle = ctypes.c_uint64()
        assert gpus.call("gpus_handle_types", ctypes.c_ulonglong(address), ctypes.byref(handle)) == types
        return handle.value

    held = [Segment(region, nbytes, seed=nbytes) for nbytes in (6 * MIB + 5, 700, 4 * MIB)]
    held[1:2] = []  # its chunk goes, and another one comes to its addresses
    held += [Segment(region, nbytes, seed=nbytes) for nbytes in (100, 3 * MIB)]
    for _ in range(2):
        handles = set()
        for segment in held:
            pages = -(-segment.nbytes // PAGE)
            [handle] = {handle_at(segment.address + page * PAGE) for page in range(pages)}
            handles.add(handle)
        assert len(handles) == len(held) and region.mapped_bytes == (8 + 4 + 2 + 4) * MIB
        memsaver.trim()
        region.pause()
        assert used_bytes(device) == 0
        block = Segment(other, 20 * MIB, seed=9)
        memsaver.switch(pause=[other], resume=[region])
        memsaver.switch(pause=[region], resume=[other])
        block.check()
        other.pause()
        region.resume()
        check(held)
        other.resume()
        del block
        memsaver.trim()
    # One that waited for memory as well.
    taken, looks = gpus.take(device, 230 * MIB), controls.count("cuMemGetInfo")

    def give() -> None:
        until(lambda: controls.count("cuMemGetInfo") > looks + 9)
        gpus.give(device, taken)

    memsaver.configure(memory_timeout=60)
    giver = threads.submit(give)
    waited = Segment(region, 34 * MIB)
    giver.result()
    assert len({handle_at(waited.address + page * PAGE) for page in range(17)}) == 1


# The attribute is 0; or it is 1, and cuMemCreate refuses with one of these codes.
@pytest.mark.parametrize("platform", [{"exports": 0}, {"refusal": 801}, {"refusal": 800}, {"refusal": 1}], ids=str)
def test_a_device_without_descriptors_has_plain_chunks_and_no_shared_pool(platform: dict[str, int]) -> None:
    device = gpu(**platform)
    driver = _core.open_driver(device)
    assert not driver.exports() and not driver.exports() and used_bytes(device) == 0
    handle = driver.create(PAGE)
    error = refused(lambda: driver.export_fd(handle))
    assert (error.call, error.code) == ("cuMemExportToShareableHandle", 801)
    assert f"{device} has no POSIX descriptors" in error.message
    driver.release(handle)
    region = make(device)
    segment = Segment(region, 5 * MIB, seed=1)
    round_trip(region, segment)
    del segment
    error = refused(lambda: _core.open_cuda_memory(gpus.ordinal(device)).create(PAGE))
    assert "POSIX descriptor" in error.message and "shared pool" in error.message
    region.pause()
    assert used_bytes(device) == 0


@pytest.mark.parametrize(
    ("options", "call", "text"),
    [
        ({"virtual_memory": 0}, "cuDeviceGetAttribute", "virtual memory"),
        ({"granularity": 4 * MIB}, "cuMemGetAllocationGranularity", "in units of 4194304 bytes, expected 2097152"),
    ],
)
def test_a_device_that_cannot_serve_is_refused(options: dict[str, int], call: str, text: str) -> None:
    device = gpu(**options)
    for opens in (lambda: make(device), lambda: _core.open_cuda_memory(gpus.ordinal(device))):
        error = refused(opens)
        assert (error.call, error.code) == (call, 801) and device in str(error) and text in str(error)
    other = gpu()  # which commands, brokers and receivers find beside it
    uuid = _core.cuda_uuid(gpus.ordinal(other))
    assert (cli._device(other), cli._device(uuid)) == (other, other)
    assert receiver.device_of(cast(Any, SimpleNamespace(device_uuid=uuid))) == other


def test_a_device_or_a_peer_that_cannot_be_opened_leaves_nothing_behind() -> None:
    for streams in range(2):
        device, before = gpu(), controls.count("cuStreamDestroy")
        controls.fail("cuStreamCreate", 999, after=streams)
        refused(partial(make, device))
        assert gpus.retained(device) == 0 and controls.count("cuStreamDestroy") - before == streams
        make(device)
    assert not hasattr(ctypes.CDLL(None), "cuMemCreate")  # the driver's names are not those of other libraries
    names = gpus.gpus(3)
    driver, region = _core.open_driver(names[0]), make(names[0])
    peers = [gpus.ordinal(name) for name in names[1:]]
    controls.fail("cuDevicePrimaryCtxRetain", 2, after=1)
    assert refused(lambda: driver.use_peers(peers)).call == "cuDevicePrimaryCtxRetain"
    segment = Segment(region, PAGE)
    assert gpus.may_access(names, segment.address, PAGE) == names[:1]
    driver.use_peers(peers)
    assert [gpus.retained(name) for name in names] == [1, 1, 1]


@pytest.mark.parametrize("gone", [1, 2])
def test_chunks_that_a_failed_call_has_not_unmapped_stay_in_their_region(gone: int) -> None:
    """The driver has unmapped a part of a run. The handles of the others are not released."""
    device = gpu()
    region = make(device)
    segments = [Segment(region, PAGE, seed) for seed in range(3)]
    gpus.call("gpus_stop_unmap", ctypes.c_size_t(gone))
    assert refused(region.pause).call == "cuMemUnmap" and region.state == "paused"
    assert region.mapped_bytes == used_bytes(device) == (3 - gone) * PAGE
    round_trip(region, *segments)
    assert used_bytes(device) == 3 * PAGE


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("cuMemAddressReserve", "has no such range of addresses left"),
        ("cuMemMap", "no memory left for page tables"),
        ("cuMemSetAccess", "no memory left for page tables"),
    ],
)
def test_another_shortage_than_that_of_device_memory_has_its_call_and_its_resource(call: str, text: str) -> None:
    device = gpu()
    region = make(device)
    controls.fail(call, 2)
    error = refused(lambda: Segment(region, MIB))
    assert type(error) is memsaver.DriverError and (error.call, error.code) == (call, 2) and text in str(error)
    segment = Segment(region, MIB, seed=1)
    region.pause()
    if call != "cuMemAddressReserve":
        controls.fail(call, 2)
        assert text in str(refused(region.resume)) and region.state == "paused"
    region.resume()
    segment.check()
    assert used_bytes(device) == PAGE


def test_a_full_device_or_a_later_refusal_makes_no_chunk_without_a_descriptor() -> None:
    """Released memory that is free only later serves a resume."""
    device = gpu(memory=8 * MIB)
    address = gpus.take(device, 8 * MIB)
    driver = _core.open_driver(device)
    assert refused(lambda: driver.create(PAGE)).code == 2 and driver.exports()
    gpus.give(device, address)
    driver.release(driver.create(4 * PAGE))
    controls.fail("cuMemCreate", 801)
    assert refused(lambda: driver.create(PAGE)).code == 801 and driver.exports()
    first, second = make(device, "none"), make(device, "none", "b")
    held = Segment(first, 5 * MIB)
    first.pause()
    other = Segment(second, 5 * MIB)
    second.pause()
    controls.fail("cuMemCreate", 2, times=3)
    first.resume(memory_timeout=60)
    assert held.nbytes == other.nbytes


# Contexts that died

# The codes of cuda.h (13.0) after which "the process must be terminated", the context "cannot be used anymore" or was
# destroyed, or the hardware failed for good.
LOST = [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911]
NOT_LOST = [
    *(1, 2, 3, 5, 6, 7, 8, 34, 36, 46, 100, 101, 102, *range(200, 203), *range(205, 214), *range(215, 220)),
    *(*range(221, 226), *range(300, 305), *range(400, 403), 500, 600, 701, *range(703, 706), 708, *range(711, 714)),
    *(720, *range(800, 810), 811, 812, *range(900, 911), *range(912, 917), 999),
]  # fmt: skip


def test_codes_that_end_a_context_and_codes_that_do_not() -> None:
    """A pause that fails: its region is lost, or it is as it was."""
    kept = make(gpu())
    segment = Segment(kept, PAGE, seed=1)
    for code in NOT_LOST:
        controls.fail("cuCtxRecordEvent", code)
        assert refused(kept.pause).code == code
        assert kept.state == "active", code
    round_trip(kept, segment)
    device = gpu()
    for code in LOST:
        region = make(device, "none", f"lost{code}")
        held = Segment(region, PAGE)
        controls.fail("cuCtxRecordEvent", code)
        assert refused(region.pause).code == code
        assert region.state == "lost" and held.nbytes, code
        _core.forget_loss()
    assert kept.state == "active"


def test_an_older_driver_without_nvml(tmp_path: Path) -> None:
    """It has no marks of a context, so pauses wait for the device. After the death of the context nothing is free."""
    (tmp_path / "libcuda.so.1").symlink_to(controls.folder() / "libcuda.so.1")
    run_clean(
        """
        from tests.gpus import Segment
        from tests import controls
        import memsaver
        from memsaver import _core
        driver = _core.open_driver("cuda:0")
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 << 20, seed=1)
        assert driver.record() is None and driver.holdings() == []
        region.pause()
        assert driver.memory() == (1 << 30, 1 << 30)
        region.resume()
        segment.check()
        controls.kill_context("cuda:0")
        assert driver.memory() == (0, 1 << 30)
        """,
        **{**gpus.environment(f"{GIB} record=0"), "LD_LIBRARY_PATH": str(tmp_path)},
    )


@pytest.mark.parametrize(("library", "text"), [(None, "libcuda.so.1"), ("libm.so.6", "older than CUDA 12")])
def test_a_driver_that_cannot_be_used_is_an_error(tmp_path: Path, library: str | None, text: str) -> None:
    if library is not None:
        path = next(each.path for each in psutil.Process().memory_maps() if each.path.endswith(library))
        (tmp_path / "libcuda.so.1").symlink_to(path)
    run_clean(
        f"""
        import memsaver
        from memsaver import _core
        assert _core.cuda_device_count() == 0
        try:
            _core.open_driver("cuda:0")
            raise AssertionError
        except memsaver.DriverError as error:
            assert {text!r} in str(error), error
        """,
        LD_LIBRARY_PATH=str(tmp_path),
    )


@pytest.mark.parametrize("mig", [0, 1])
def test_nvml_knows_a_device_by_its_uuid_or_its_mig_uuid(mig: int) -> None:
    """It lists a process in a container under another number, so as another holder. It outlives the context."""
    own = 4712 if mig else os.getpid()
    device = gpu(mig=mig, processes="4711:1024", own_pid=own)
    driver = _core.open_driver(device)
    segment = Segment(make(device), PAGE)
    controls.fail("cuMemGetInfo", 999)
    assert refused(driver.memory).code == 999  # NVML does not answer for it
    assert driver.uuid().startswith("GPU-")
    assert [row[:2] for row in driver.holdings()] == [(own, PAGE), (4711, 1024)]
    free, total = driver.memory()
    before = memsaver.stats().asdict()["devices"][device]
    controls.kill_context(device)
    assert driver.memory() == (free, total) and 0 < free < total
    assert memsaver.stats().asdict()["devices"][device] == before
    assert _core.open_cuda_memory(gpus.ordinal(device)).free_bytes() == free
    assert _core.cuda_uuid(gpus.ordinal(device)) == driver.uuid()
    assert segment.nbytes


def test_a_gpu_whose_memory_cannot_be_opened_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    bare, plain, other = gpu(virtual_memory=0), gpu(exports=0), gpu()
    code, output = cli.main(["top", "--json"]), capsys.readouterr()
    assert code == 1, output
    shown = {each["device"] for each in json.loads(output.out)["devices"]}
    assert other in shown and not {bare, plain} & shown
    assert f"{plain} has no POSIX descriptors for its memory" in output.err
    assert f"{bare} does not support virtual memory" in output.err


def test_a_context_that_dies_in_a_transition_leaves_the_region_lost(threads: ThreadPoolExecutor) -> None:
    for call, backup in (
        ("cuCtxRecordEvent", "none"),
        ("cuMemcpyDtoHAsync", "host"),
        ("cuMemUnmap", "none"),
        ("cuMemMap", "host"),
        ("cuMemcpyHtoDAsync", "host"),
    ):
        device = gpu()
        region, other = make(device, backup), make(device, backup, "other")
        held = [Segment(region, nbytes) for nbytes in (MIB, 34 * MIB, 3 * MIB)]
        del held[1]  # chunks with a gap
        if call in ("cuMemMap", "cuMemcpyHtoDAsync"):
            region.pause()
        move = region.pause if region.state == "active" else region.resume
        with controls.held(call):
            moving = threads.submit(refused, move)
            until_stopped(call)
            controls.kill_context(device)
        assert (moving.result().call, moving.result().code) == (call, 700)
        assert (region.state, other.state) == ("lost", "lost")
        for act in (region.pause, region.resume, other.pause, partial(Segment, region, 100)):
            assert "lost" in str(refused(act, memsaver.RegionPausedError))


# Peers


def test_a_pause_waits_for_a_kernel_of_a_peer(threads: ThreadPoolExecutor) -> None:
    """A kernel whose memory is gone when it ends would end the context."""
    first, second = gpus.gpus(2)
    _core.open_driver(first).use_peers([gpus.ordinal(second)])
    region = make(first)
    segment = Segment(region, 5 * MIB, seed=1)
    kernel = gpus.launch(second, segment.address, 100, byte=7)
    pause = threads.submit(region.pause)
    until(lambda: region.state != "active")
    late = refused(lambda: region.pause(timeout=0.1), memsaver.WaitTimeoutError)
    assert late.stage == "queue"  # the pause before waits for the kernel
    gpus.finish(kernel)
    pause.result()
    region.resume()
    segment.expected = segment.expected.copy()
    segment.expected[:100] = 7
    segment.check()


def test_a_segment_freed_while_a_peer_uses_it_rests() -> None:
    names = gpus.gpus(2)
    _core.open_driver(names[0]).use_peers([gpus.ordinal(names[1])])
    region = make(names[0], "none")
    segment = Segment(region, 64 * MIB)
    address = segment.address
    kernel = gpus.launch(names[1], address, 100)
    del segment
    other = Segment(region, PAGE)
    assert gpus.may_access(names, address, PAGE) == names
    gpus.finish(kernel)
    another = Segment(region, PAGE)
    assert gpus.may_access(names, address, 64 * MIB) == [] and other.nbytes == another.nbytes


def test_a_peer_whose_context_died_is_not_waited_for(threads: ThreadPoolExecutor) -> None:
    names = gpus.gpus(3)
    driver, region = _core.open_driver(names[0]), make(names[0])
    driver.use_peers([gpus.ordinal(name) for name in names[1:]])
    segment = Segment(region, 5 * MIB, seed=1)
    gpus.launch(names[1])
    mark = driver.record()
    assert mark is not None and not mark.done()
    controls.kill_context(names[1])
    assert mark.done()
    mark.wait()
    round_trip(region, segment)
    running = gpus.launch(names[2])
    mark, waiting = driver.record(), threads.submit(driver.synchronize)
    assert not wait([waiting], 0.2).done
    assert region.state == "active" and mark is not None and not mark.done()
    gpus.finish(running)
    assert mark.done()
    waiting.result(60)
    controls.kill_context(names[0])
    assert refused(driver.synchronize).code == 700


def test_peer_candidates_are_active_and_can_access_the_device() -> None:
    names = gpus.gpus(4)
    one, two, three, four = (gpus.ordinal(name) for name in names)
    gpus.change(names[2], reach="")  # it is reached, and reaches none
    gpus.change(names[0], reach=f"{two}")
    driver, regions = _core.open_driver(names[0]), [make(names[0])]
    assert driver.peer_candidates() == []
    for name in names[1:]:
        gpus.activate(name)
    assert driver.peer_candidates() == [two, four]
    gpus.activate(names[1], on=False)
    assert driver.peer_candidates() == [four]
    other = _core.open_driver(names[3])
    assert other.peer_candidates() == []  # device 2 is not active
    regions.append(make(names[3]))
    driver.use_peers([four])
    first, second = [Segment(region, 5 * MIB, seed) for seed, region in enumerate(regions)]
    other.copy_within(second.address, first.address, first.nbytes)
    other.finish_copies()
    second.expected = first.expected
    second.check()


def test_a_device_that_comes_later_gets_access_to_existing_mappings() -> None:
    names = gpus.gpus(3)
    region = make(names[0])
    segment = Segment(region, 5 * MIB, seed=1)
    where = segment.address, segment.nbytes
    assert gpus.may_access(names, *where) == names[:1]
    gpus.activate(names[1])
    _core.refresh_peers()
    assert gpus.may_access(names, *where) == names[:2]
    region.pause()
    gpus.activate(names[2])
    region.resume()
    assert gpus.may_access(names, *where) == names
    segment.check()


def test_peers_change_while_other_threads_call(threads: ThreadPoolExecutor) -> None:
    names = gpus.gpus(5)
    driver = _core.open_driver(names[0])
    stop = threading.Event()
    for name in names[1:]:
        gpus.activate(name)

    def work() -> None:
        while not stop.is_set():
            mark = driver.record()
            assert mark is not None
            mark.done()
            driver.synchronize()
            address, handle = driver.reserve(PAGE), driver.create(PAGE)
            driver.map(address, PAGE, handle)
            driver.allow(address, PAGE)
            assert names[0] in gpus.may_access(names, address, PAGE)
            driver.unmap(address, PAGE)
            driver.release(handle)
            driver.unreserve(address, PAGE)

    works = [threads.submit(work) for _ in range(3)]
    for turn in range(100):
        driver.use_peers(driver.peer_candidates()[: turn % 5])
    stop.set()
    for each in works:
        each.result()
    assert [gpus.retained(name) for name in names] == [1, 2, 2, 2, 2]


def test_ctrl_c_ends_the_wait_for_memory_of_any_device(threads: ThreadPoolExecutor) -> None:
    """Signals reach the main thread alone, and a thread beside it waits for the second device's memory."""
    regions = [make(name) for name in gpus.gpus(2)]
    segments = [Segment(region, 5 * MIB, seed) for seed, region in enumerate(regions)]
    memsaver.pause(regions)
    driver, looks = _core.open_driver(regions[1].device), controls.count("cuMemGetInfo")
    taken = driver.create(driver.memory()[0] // PAGE * PAGE)

    def interrupt() -> None:
        until(lambda: controls.count("cuMemGetInfo") > looks + 4)
        signal.raise_signal(signal.SIGINT)

    threads.submit(interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        memsaver.resume(regions, memory_timeout=1e6)
    assert caught.value.__context__ is None and [region.state for region in regions] == ["paused", "paused"]
    driver.release(taken)
    memsaver.resume(regions)
    check(segments)


def test_a_tag_selects_its_regions_on_all_devices_and_its_guest_leaves_with_the_last() -> None:
    first, second = [make(name, tag="both") for name in gpus.gpus(2)]
    memsaver.register(Visitor("guest", "both"))
    for act, states in [
        (first.pause, ("paused", "active", "here")),
        (lambda: memsaver.pause("both"), ("paused", "paused", "away")),
        (second.resume, ("paused", "active", "here")),
        (lambda: memsaver.resume("both"), ("active", "active", "here")),
    ]:
        cast(Callable[[], None], act)()
        assert (first.state, second.state, memsaver.stats().guests[0].state) == states


# The ledger


def rows_of(device: str) -> dict[tuple[int | None, str], int]:
    found = memsaver.stats().devices[device]
    assert found.total_bytes is not None and found.free_bytes is not None
    assert found.ledger.used_bytes == found.total_bytes - found.free_bytes
    assert sum(row.bytes for row in found.ledger.rows) == found.ledger.used_bytes
    assert found.ledger.is_consistent
    return {(row.pid, row.kind): row.bytes for row in found.ledger.rows}


def test_the_rows_of_a_gpu_that_lists_its_processes() -> None:
    me, others = os.getpid(), 128 * MIB
    device = gpu(context=300 * MIB, occupied=others, processes=f"4711:{100 * MIB}")
    region = memsaver.region("kv", device=device)
    segment = Segment(region, 5 * MIB)
    expected: dict[tuple[int | None, str], int] = {
        (me, "region"): region.mapped_bytes,
        (me, "unknown"): 300 * MIB,
        (4711, "process"): 100 * MIB,
        (None, "unlisted"): 28 * MIB,
    }
    assert rows_of(device) == expected
    assert _core.open_cuda_memory(gpus.ordinal(device)).compute_pids() == [me, 4711]
    gpus.take(device, 8 * MIB)
    expected[me, "unknown"] += 8 * MIB
    assert rows_of(device) == expected
    region.pause()
    del expected[me, "region"]
    assert rows_of(device) == expected and segment.nbytes


def test_a_gpu_lists_any_number_of_processes() -> None:
    device = gpu(processes=",".join(f"{pid}:1" for pid in range(5000, 5600)))
    assert _core.open_cuda_memory(gpus.ordinal(device)).compute_pids() == [*range(5000, 5600)]


def test_the_doctor_has_the_facts_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = len(_core.gpu_facts())
    gpu(mig=1, fabric=1)
    gpu(exports=0, mps=1)
    gpu(virtual_memory=0)
    part, old, none = _core.gpu_facts()[first:]
    assert (part["name"], part["posix"], part["fabric"], part["mps"]) == ("Test GPU MIG 1g.10gb", True, True, False)
    assert (old["name"], old["posix"], old["fabric"], old["mps"]) == ("Test GPU", False, False, True)
    assert (part["virtual_memory"], none["virtual_memory"], _core.cuda_version()) == (True, False, 13000)
    taken = gpus.take(name := gpu(processes=f"4711:{64 * MIB}"), 64 * MIB)
    found = doctor.findings.run(doctor.CHECKS, doctor.Machine())
    gpus.give(name, taken)
    assert not [each for each in found if "this check failed" in each.value]
    assert any(each.value.startswith(name) and "(pid 4711) 64.0 MiB" in each.value for each in found)
    # A server of MPS is known by the attribute, or by its pipe where the driver has no such attribute.
    (tmp_path / "control").touch()
    for mps, folder, expected in ((0, "", False), (1, "none", True), (-1, "", True), (-1, "none", False)):
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / folder))
        device = gpu(mps=mps)
        memory = _core.open_cuda_memory(gpus.ordinal(device))
        assert memory.under_mps() == _core.under_mps(device) == expected, (mps, folder)


# Memory of a GPU that is a NUMA node of the system. This machine's own memory is node 0, which has its CPUs.

needs_nodes = pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this system has no /proc/self/numa_maps"
)


@contextmanager
def files_of_nodes(folder: Path, has_cpu: str, gib: tuple[int, int] = (8, 8)) -> Iterator[None]:
    """The system's files have two nodes, all of whose memory is free."""
    nodes = folder / "sys/devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_cpu").write_text(f"{has_cpu}\n")
    for node in range(2):
        (nodes / f"node{node}").mkdir()
        free = f"Node {node} MemTotal: {gib[node] << 20} kB\nNode {node} MemFree: {gib[node] << 20} kB\n"
        (nodes / f"node{node}" / "meminfo").write_text(free)
    controls.system_files(folder)
    yield
    controls.system_files(None)


@needs_nodes
@pytest.mark.isolated
def test_backups_lie_on_nodes_with_cpus() -> None:
    """Also where the region is on another GPU than that of the node: the system may take pages from there."""
    names = gpus.gpus(2)
    gpus.change(names[1], numa=1)
    region = make(names[0])
    segment = Segment(region, 5 * MIB, seed=1)
    region.pause()
    address = segment.view().ctypes.data
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    assert max(line for line in lines if int(line[0], 16) <= address)[1] == "bind:0"
    region.resume()
    segment.check()


@needs_nodes
@pytest.mark.isolated
def test_a_backup_in_memory_of_a_gpu_is_refused(tmp_path: Path) -> None:
    """Node 1 has the CPUs here, and the pages come from node 0 all the same: there is no other."""
    with files_of_nodes(tmp_path, has_cpu="1"):
        region = make(gpu(numa=0))
        segment = Segment(region, 5 * MIB, seed=1)
        error = refused(region.pause, memsaver.BackupError)
        assert "node 0, which may be memory of a GPU: only the nodes with CPUs (1)" in str(error), error
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/numa_maps").write_text("00400000 default anon=1 kernelpagesize_kB=4\n")
        error = refused(region.pause, memsaver.BackupError)
        assert "/proc/self/numa_maps does not list the nodes" in str(error), error
        assert region.state == "active"
        segment.check()
        assert host_bytes(region.device)[0] == 0 == controls.pinned_bytes()


@pytest.mark.isolated
def test_the_budget_counts_nodes_with_cpus_alone(tmp_path: Path) -> None:
    """8 GiB on node 0, with the CPUs; 50 on node 1, which is the GPU."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {58 << 20} kB\nMemAvailable: {58 << 20} kB\n")
    with files_of_nodes(tmp_path, has_cpu="0", gib=(8, 50)):
        for numa, can_be_taken in ((-1, 58 * GIB), (1, 8 * GIB)):
            region = make(gpu(memory=80 * GIB, numa=numa), "none")
            segment = Segment(region, 70 * GIB)
            error = refused(lambda region=region: region.pause(backup="host"), memsaver.BackupError)  # type: ignore[misc]
            assert error.available_bytes == can_be_taken - can_be_taken // 10 and segment.nbytes, error


# Host memory


def test_devices_take_few_addresses_of_a_large_machine(tmp_path: Path) -> None:
    """They share 47 bits with the regions."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {2 << 30} kB\nMemAvailable: {2 << 30} kB\n")
    controls.system_files(tmp_path)
    before = psutil.Process().memory_info().vms
    regions = [make(name) for name in gpus.gpus(4, memory=GIB)]
    held = [Segment(region, 5 * MIB, seed) for seed, region in enumerate(regions)]
    memsaver.pause(regions)
    controls.system_files(None)
    assert psutil.Process().memory_info().vms - before < 1 << 40
    memsaver.resume(regions)
    check(held)


def test_contents_in_several_ranges_of_addresses_come_back_whole() -> None:
    """A process with few addresses gets a range for each growth. No copy crosses two registrations."""
    device = gpu()
    regions = [make(device, tag=f"a{number}") for number in range(4)]
    held = [Segment(region, 20 * MIB, seed) for seed, region in enumerate(regions)]
    larger = make(device, tag="larger")
    held += [Segment(larger, 45 * MIB, seed=9), Segment(larger, 700, seed=10)]
    before = controls.count("cuMemHostRegister")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + GIB, limits[1]))
    try:
        for region in regions:
            region.pause()
        assert controls.count("cuMemHostRegister") - before == 4
        memsaver.resume(regions)
        for _ in range(2):
            round_trip(larger, *held)
        assert controls.count("cuMemHostRegister") - before == 4  # in existing slabs
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert memsaver.release_host_memory() >= 80 * MIB and host_bytes(device) == (0, 0)


@pytest.mark.parametrize("end", ["context", "pinning"])
def test_contents_in_pieces_are_read_after_the_context_died(tmp_path: Path, end: str) -> None:
    """A view of them needs pinned memory, which the driver refuses; a copy does not, nor one of a file. Other backups
    left the pieces.
    """
    memsaver.configure(disk_dir=str(tmp_path))
    device = gpu()
    regions = make(device), make(device, "disk", "file")
    segments = [Segment(region, nbytes, seed=nbytes) for region in regions for nbytes in (5 * MIB, 700, 3 * MIB)]
    regions[1].pause()
    memsaver.release_host_memory()
    small = [make(device, tag=f"small{number}") for number in range(12)]
    between = [Segment(region, MIB, seed) for seed, region in enumerate(small)]
    memsaver.pause(small)
    memsaver.resume(small[::2])
    regions[0].pause()
    pinned, held = controls.pinned_bytes(), host_bytes(device)
    if end == "context":
        controls.kill_context(device)
    else:
        controls.fail("cuMemHostRegister", 999, controls.FOREVER)
    for segment in reversed(segments):
        assert np.array_equal(segment.read(), segment.expected)
    assert np.array_equal(segments[1].view(), segments[1].expected)
    for segment in (segments[0], segments[3]):
        assert "use clone=True" in str(refused(segment.view, memsaver.BackupError))
    assert controls.pinned_bytes() == pinned and host_bytes(device) == held and len(between) == 12


def test_a_driver_that_pins_no_memory_is_an_error_with_the_limit_of_locked_memory() -> None:
    region = make(gpu())
    segment = Segment(region, 5 * MIB, seed=1)
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, limits[1]))
    controls.fail("cuMemHostRegister", 2, controls.FOREVER)
    error = refused(region.pause, memsaver.BackupError)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    assert (error.needed_bytes, error.held_bytes, region.state) == (5 * MIB, 0, "active")
    assert "cuMemHostRegister" in str(error) and "may lock 65536 bytes of memory (RLIMIT_MEMLOCK)" in str(error)
    controls.disarm()
    round_trip(region, segment)


def test_memory_that_stays_registered_is_kept() -> None:
    """A refusal to unregister is repeated later. The driver of a dead context unregisters nothing; it would reach the
    memory still.
    """
    memsaver.release_host_memory()  # of other tests
    device, before = gpu(), controls.pinned_bytes()
    region = make(device)
    segment = Segment(region, 20 * MIB, seed=1)
    for _ in range(2):
        round_trip(region, segment)
        controls.fail("cuMemHostUnregister", 999)
        memsaver.release_host_memory()
        assert host_bytes(device) == (20 * MIB, 0) and controls.pinned_bytes() - before == 20 * MIB
    assert memsaver.release_host_memory() == 20 * MIB and controls.pinned_bytes() == before
    round_trip(region, segment)
    controls.kill_context(device)
    assert memsaver.release_host_memory() == 0
    assert host_bytes(device) == (20 * MIB, 0) and controls.pinned_bytes() - before == 20 * MIB


# Locks. Each call that every thread may make meanwhile has a thread of its own, so one that does not return fails the
# test.


class Meanwhile:
    """Two regions of a GPU with a backup each, of which the small one is paused with contents."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.threads = threads
        self.device = gpu()
        self.small, self.large = (make(self.device, tag=tag) for tag in ("small", "large"))
        self.segments = [Segment(self.small, 6 * MIB, seed=1)]
        self.small.pause()
        self.held = host_bytes(self.device)[0]

    def returns(self, call: Callable[[], Any]) -> Any:
        return self.threads.submit(call).result(timeout=20)

    def host_bytes(self) -> tuple[int, int]:
        found: tuple[int, int] = self.returns(lambda: host_bytes(self.device))
        return found

    def check(self) -> None:
        memsaver.resume([region for region in memsaver.regions.all_regions() if region.device == self.device])
        check(self.segments)


@pytest.fixture
def meanwhile(threads: ThreadPoolExecutor) -> Meanwhile:
    return Meanwhile(threads)


def until_stopped(call: str) -> None:
    until(lambda: controls.stopped(call))


# Before the memory is touched the arena asks for the nearest node; after that it is pinned.
STOPS = ["cuDeviceGetAttribute", "cuMemHostRegister"]


@pytest.mark.parametrize("stop", [*STOPS, "cuMemHostUnregister"])
def test_no_lock_is_held_while_memory_is_made_or_goes_back(meanwhile: Meanwhile, stop: str) -> None:
    held, call = meanwhile.held, meanwhile.large.pause
    meanwhile.segments.append(Segment(meanwhile.large, 20 * MIB, seed=2))
    if stop == "cuMemHostUnregister":
        meanwhile.large.pause()
        meanwhile.large.resume()
        call = memsaver.release_host_memory  # type: ignore[assignment]
    with controls.held(stop):
        moving = meanwhile.threads.submit(call)
        until_stopped(stop)
        used = meanwhile.host_bytes()[1]
        assert used == held
        meanwhile.returns(meanwhile.small.resume)  # put()
        assert meanwhile.host_bytes()[1] == 0
        meanwhile.returns(meanwhile.small.pause)  # takes idle memory
        assert meanwhile.host_bytes()[1] == held
        assert not moving.done()
    moving.result()
    meanwhile.check()


@pytest.mark.parametrize(("move", "stop"), [("pause", "cuEventSynchronize"), ("resume", "cuMemcpyHtoDAsync")])
def test_no_lock_is_held_while_contents_are_copied(meanwhile: Meanwhile, move: str, stop: str) -> None:
    small, other = meanwhile.small, make(meanwhile.device, "none", "other")
    if move == "pause":
        small.resume()
    with controls.held(stop):
        moved = meanwhile.threads.submit(getattr(small, move))
        until_stopped(stop)
        assert meanwhile.returns(lambda: _core.acquire([other._core])) is None
        meanwhile.returns(lambda: _core.release([other._core]))
        assert meanwhile.returns(lambda: small.state) == move[:-1] + "ing"
        meanwhile.returns(memsaver.stats)
        meanwhile.segments.append(meanwhile.returns(lambda: Segment(other, MIB)))
        meanwhile.returns(lambda: other.pause(backup="none"))
        meanwhile.returns(other.resume)
        assert not moved.done()
    moved.result()
    small.resume()
    meanwhile.segments[0].check()


def test_a_free_beside_an_allocation_leaves_the_page_that_they_share(threads: ThreadPoolExecutor) -> None:
    """The new segment is in no book before its memory can be reached."""
    region = make(gpu(), "none")
    first = Segment(region, MIB)
    with controls.held("cuMemSetAccess"):
        making = threads.submit(Segment, region, 3 * MIB, 1)
        until_stopped("cuMemSetAccess")
        del first
    second = making.result()
    assert region._core.chunks == [PAGE, PAGE]
    second.check()


# Captures


@pytest.mark.parametrize("call", ["cuCtxRecordEvent", "cuCtxSynchronize"])
def test_a_capture_begins_after_calls_under_way_that_would_break_it(call: str, threads: ThreadPoolExecutor) -> None:
    """A call of the library breaks a capture that was not announced."""
    region = make("cpu", tag="captured")
    controls.record_supported(call == "cuCtxRecordEvent")
    segment = Segment(region, MIB, seed=1)
    with controls.held(call):
        pause = threads.submit(region.pause)
        until_stopped(call)
        capture = threads.submit(_core.capture_begins)
        assert not wait([capture], timeout=0.1).done
        assert not _core.capturing()
    capture.result()
    assert _core.capturing()
    pause.result()
    _core.capture_ends()
    region.resume()
    segment.check()
    region = make(gpu(), "none")
    segment = Segment(region, PAGE)
    controls.capture_begin()
    error = refused(region.pause)
    assert error.code == 900 and "memsaver.capturing()" in str(error) and region.state == "active"
    assert not controls.capture_end() and controls.broken() == ["cuCtxRecordEvent"]
    controls.capture_begin()
    with memsaver.capturing():
        refused(region.pause, memsaver.Error)
    assert controls.capture_end() and segment.nbytes
    region.pause()
