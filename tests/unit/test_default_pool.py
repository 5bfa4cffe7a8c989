"""torch's default pool as a region: calls of the driver by torch's library, over GPUs and a torch that are made up."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import memsaver
from memsaver import _core
from memsaver.transitions import prepare_pause
from tests import controls, gpus
from tests.gpus import GpuBroker, gpu
from tests.support import GIB, MIB, until, used_bytes
from tests.torch_segments import (
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    Segment,
    calls,
    default_pool,
    empty_cache_on_demand,
    library,
)

pytestmark = pytest.mark.gpus


@pytest.fixture
def device() -> Iterator[str]:
    yield gpu(memory=GIB)
    Segment.all.clear()


@pytest.fixture
def region(device: str) -> memsaver.Region:
    return default_pool(device)


@pytest.mark.parametrize("piece_mib", [2, 20])
def test_pieces_leave_and_return_at_their_addresses_with_their_contents(
    device: str, region: memsaver.Region, piece_mib: int
) -> None:
    segment = Segment(device, piece_mib)
    assert segment.map(0, 2) == 0 and segment.map(3, 4) == 0
    for i in (0, 1, 3):
        segment.write(i, 10 + i)
    whole = 3 * segment.piece
    assert region.allocated_bytes == region.mapped_bytes == used_bytes(device) == whole
    assert region.owns(segment.at(1)) and not region.owns(segment.at(2))
    for _ in range(2):
        assert region.pause().released_bytes == whole
        assert used_bytes(device) == region.mapped_bytes == 0
        assert region.resume().restored_bytes == whole
        assert [segment.read(i) for i in (0, 1, 3)] == [10, 11, 13]
        assert used_bytes(device) == whole
    assert segment.close() == 0
    assert used_bytes(device) == region.allocated_bytes == 0


def test_a_chunk_serves_one_piece_alone(device: str, region: memsaver.Region) -> None:
    segment = Segment(device, 20)
    assert segment.map(0, 4) == 0
    region.pause(backup="none")
    region.resume()
    for i in range(4):
        assert segment.unmap(i, i + 1) == 0
        assert used_bytes(device) == (3 - i) * 20 * MIB
        assert segment.map(i, i + 1) == 0 and segment.unmap(i, i + 1) == 0


def test_pieces_from_before_and_of_a_pause_stay_outside(device: str) -> None:
    """While the region is paused, torch takes memory of the driver, and frees pieces of the region."""
    segment, beside = Segment(device), Segment(device)
    assert segment.map(0, 2) == 0
    segment.write(0, 1)
    region = default_pool(device)
    assert segment.map(2, 6) == 0
    for i in range(2, 6):
        segment.write(i, i)
    assert region.allocated_bytes == 4 * segment.piece
    assert (segment.export(2), segment.export(0)) == (NOT_SUPPORTED, 0)
    region.pause()
    assert used_bytes(device) == 2 * segment.piece and segment.read(0) == 1
    assert beside.map(0, 2) == 0
    beside.write(0, 7)
    assert segment.unmap(1, 2) == 0 and used_bytes(device) == 3 * segment.piece
    assert segment.unmap(3, 5) == 0 and region.allocated_bytes == 2 * segment.piece
    assert region.resume().restored_bytes == 2 * segment.piece
    assert (segment.read(0), segment.read(2), segment.read(5), beside.read(0)) == (1, 2, 5, 7)
    assert segment.map(1, 2) == 0 and segment.map(3, 5) == 0 and region.mapped_bytes == 5 * segment.piece
    assert beside.close() == 0 and segment.close() == 0 and used_bytes(device) == 0


def test_memory_beside_a_paused_pool_takes_what_regions_give_up(device: str, tag: str) -> None:
    """Chunks that are retained, and those that are offered."""
    points = _core.plain_entry_points()
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(points[0])
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(points[1])
    retained, offered = (memsaver.region(f"{tag}-{each}", device, "host") for each in ("retained", "offered"))
    segments = [gpus.Segment(region, 256 * MIB, seed) for seed, region in enumerate((retained, offered))]
    memsaver.configure(retain="256MiB")
    retained.pause()
    offered.pause(lazy=True)
    assert used_bytes(device) == 512 * MIB
    address = allocate(900 * MIB, gpus.ordinal(device), None)
    assert address is not None and offered.offered_bytes == 0
    assert allocate(900 * MIB, gpus.ordinal(device), None) is None, "an error of torch follows"
    free(address, 900 * MIB, gpus.ordinal(device), None)
    memsaver.resume([retained.tag, offered.tag])
    for each in segments:
        each.check()


def leave_and_return(region: memsaver.Region) -> None:
    region.pause()
    region.resume()


def test_calls_from_elsewhere_reach_the_driver(device: str, region: memsaver.Region) -> None:
    calls().torch_create_of_table.restype = ctypes.c_void_p
    types = ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong
    create = ctypes.CFUNCTYPE(ctypes.c_int, *types)(calls().torch_create_of_table())
    handle, properties = ctypes.c_uint64(), (ctypes.c_int * 8)(1, 1, 1, gpus.ordinal(device))
    assert create(ctypes.byref(handle), 32 * MIB, properties, 0) == 0
    assert region.mapped_bytes == 0 and used_bytes(device) == 32 * MIB
    assert gpus.driver_call("cuMemRelease")(handle) == 0, "the number is the driver's"


@pytest.mark.isolated
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.__setitem__(9, table[3]), "the table has cuMemMap twice"),
        (lambda table: table.__setitem__(6, 0), "the table has no cuMemUnmap"),
        (lambda _: calls().torch_fix_table(), "is not in writable memory of"),
    ],
    ids=["twice", "none", "read-only"],
)
def test_another_table_is_refused_and_left_as_it_is(change: Callable[[Any], None], reason: str) -> None:
    get = ctypes.CDLL(library())["_ZN3c104cuda9DriverAPI3getEv"]
    get.restype = ctypes.POINTER(ctypes.c_size_t)
    table = get()
    change(table)
    before = table[:10]
    found = _core.bind_default_pools(library())
    assert reason in found, found
    assert table[:10] == before


def test_the_driver_decides_on_fabric_handles() -> None:
    for has_fabric in (0, 1):
        device = gpu(memory=GIB, fabric=has_fabric or NOT_SUPPORTED)
        region = default_pool(device)
        segment, beside = (Segment(device, handle_types=8) for _ in range(2))
        assert segment.map(0, 2) == (0 if has_fabric else NOT_SUPPORTED)
        assert region.allocated_bytes == used_bytes(device) == 2 * segment.piece * has_fabric
        region.pause()
        assert beside.map(0, 1) == (0 if has_fabric else NOT_SUPPORTED)
        assert used_bytes(device) == has_fabric * beside.piece
        region.resume()


def test_peers_have_access_also_after_a_resume() -> None:
    names = gpus.gpus(2, memory=GIB)
    region, peer = default_pool(names[0]), gpus.ordinal(names[1])
    segment = Segment(names[0])
    assert segment.map(0, 2) == 0
    assert segment.peer(peer, 0, 2) == NOT_PERMITTED, "no library has used device 1"
    gpus.activate(names[1])
    controls.fail("cuMemSetAccess", 1)
    assert segment.peer(peer, 0, 2) != 0, "a failed change of access is not reported as done"
    assert segment.peer(peer, 0, 2) == 0
    assert gpus.may_access(names, segment.at(0), 2 * segment.piece) == names
    leave_and_return(region)
    assert gpus.may_access(names, segment.at(0), 2 * segment.piece) == names


def test_the_region_takes_no_other_segments_and_stays(device: str, region: memsaver.Region) -> None:
    assert default_pool(device) is region and default_pool(device, "other", backup="none") is region
    for act in (lambda: region._core.allocate_array(MIB), region.close, lambda: region.empty(1)):
        with pytest.raises(memsaver.Error):
            act()
    memsaver.region("taken", device=(other := gpu()), backup="host")
    with pytest.raises(ValueError, match=f"^region 'taken' on {other} exists, expected a new tag$"):
        default_pool(other, "taken")
    # torch frees its cached pieces where memory is short, and tries again.
    first, second = Segment(device, 32, 64), Segment(device, 32, 64)
    assert first.map(0, 20) == 0
    assert second.map(0, 20) == OUT_OF_MEMORY, "20 of 32 pieces are in use"
    assert region.allocated_bytes == used_bytes(device) == 20 * 32 * MIB
    first.cached |= set(range(10))
    assert second.map(0, 20, retries=1) == 0
    assert region.allocated_bytes == used_bytes(device) == 30 * 32 * MIB


@pytest.mark.parametrize(
    ("call", "code", "found"),
    [("cuMemCreate", code, OUT_OF_MEMORY) for code in (OUT_OF_MEMORY, 1, 999)]
    + [("cuMemMap", 1, 1), ("cuMemSetAccess", 1, 1)],
)
def test_a_call_that_fails_leaves_the_device_usable(
    device: str, region: memsaver.Region, call: str, code: int, found: int
) -> None:
    """Every failure of cuMemCreate is reported as a lack of memory. After another code torch cannot use the segment."""
    segment = Segment(device, 32)
    controls.fail(call, code, times=2 if code == OUT_OF_MEMORY else 1)  # of two sizes
    assert segment.map(0, 2 if found == OUT_OF_MEMORY else 1) == found
    if found != OUT_OF_MEMORY:
        assert region.mapped_bytes == region.allocated_bytes == used_bytes(device) == 0
        segment = Segment(device, 32)
    assert segment.map(0, 2) == 0
    segment.write(1, 9)
    leave_and_return(region)
    assert segment.read(1) == 9
    assert segment.unmap(0, 2) == 0 and used_bytes(device) == 0 == region.mapped_bytes


def test_segments_in_adjacent_reservations(device: str) -> None:
    """A call of the driver that crosses the end of a reservation is not defined: each piece has calls of its own."""
    free = Segment(device, most=9)
    assert free.close() == 0
    segments = [Segment(device, most=3, at=free.at(3 * number)) for number in range(3)]
    region = default_pool(device)
    assert segments[1].address == segments[0].at(3) and segments[2].address == segments[1].at(3)
    for number, segment in enumerate(segments):
        assert segment.map(0, 3) == 0
        segment.write(2, number)
    before = controls.count("cuMemUnmap"), controls.count("cuMemSetAccess")
    leave_and_return(region)
    assert [segment.read(2) for segment in segments] == [0, 1, 2]
    after = controls.count("cuMemUnmap"), controls.count("cuMemSetAccess")
    assert all(a - b == 9 for a, b in zip(after, before))
    assert all(segment.close() == 0 for segment in segments) and used_bytes(device) == 0


@pytest.mark.parametrize("state", ["pausing, given up", "pausing, done", "resuming"])
def test_a_segment_ends_in_a_transition(device: str, region: memsaver.Region, state: str) -> None:
    """torch's addresses stay reserved as long as chunks of the transition are under them."""
    segment, kept = Segment(device), Segment(device, 2)
    assert segment.map(0, 3) == 0 and kept.map(0, 1) == 0
    kept.write(0, 7)
    frees = controls.count("cuMemAddressFree")
    if state == "resuming":
        region.pause()
        with controls.held("cuMemSetAccess"):
            resume = memsaver.start(resume=region)
            until(lambda: controls.stopped("cuMemSetAccess"))
            assert region.state == "resuming" and segment.close() == 0
        resume.result()
    else:
        prepared = prepare_pause([region])
        closed = segment.close()
        if state == "pausing, done":
            prepared.commit()
            region.resume()
        else:
            prepared.abort()
        assert closed == 0  # after the end of the transition, for which the fixtures wait if the test fails
    assert region.state == "active" and kept.read(0) == 7
    assert region.mapped_bytes == used_bytes(device) == kept.piece
    assert controls.count("cuMemAddressFree") == frees
    assert kept.map(1, 2) == 0  # its create() frees the addresses
    assert controls.count("cuMemAddressFree") == frees + 1
    assert kept.close() == 0


def test_pieces_come_and_go_around_pauses(device: str, region: memsaver.Region, threads: ThreadPoolExecutor) -> None:
    segments = [Segment(device, 32, 8), Segment(device, 2, 64)]
    kept = Segment(device, 2)
    assert kept.map(0, 2) == 0
    kept.write(0, 1)
    kept.write(1, 2)
    stop, failed, gate, is_here = threading.Event(), [], threading.Lock(), [True]

    def allocate(segment: Segment) -> None:
        while not stop.is_set():
            with gate:  # as torch's allocator, which is told before a pause that the pool leaves
                code = segment.map(0, 4) if is_here[0] else None
            if code == 0:
                code = segment.unmap(0, 4)
            if code:
                failed.append(code)
                return

    allocating = [threads.submit(allocate, each) for each in segments]
    for _ in range(5):
        with gate:
            is_here[0] = False
        leave_and_return(region)
        is_here[0] = True
        assert (kept.read(0), kept.read(1)) == (1, 2)
    stop.set()
    for each in allocating:
        each.result()
    assert not failed, failed
    assert region.mapped_bytes == used_bytes(device) == 2 * kept.piece
    assert kept.close() == 0


# In a shared pool

ENGINE = """
import sys, memsaver
from tests.gpus import Segment
memsaver.configure(pool="shared")
held = Segment(memsaver.region("engine", device=sys.argv[1]), 40 << 20)
memsaver.pause()
print("paused", flush=True)
sys.stdin.readline()
memsaver.resume(memory_timeout=30)
print("resumed", flush=True)
sys.stdin.readline()
"""
CACHE = """
import sys, time, memsaver
from tests.torch_segments import Segment, default_pool, empty_cache_on_demand
memsaver.configure(pool="shared")
region = default_pool(sys.argv[1])
empty_cache_on_demand()
segment = Segment(sys.argv[1], 2, 32)
assert segment.map(0, 22) == 0
segment.cached |= set(range(20))
unmap = segment.unmap
segment.unmap = lambda *pieces: [time.sleep(0.01), unmap(*pieces)][1]
print("cached", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def pooled(device: str) -> Iterator[memsaver.Region]:
    """The default pool of a process with a shared pool."""
    with GpuBroker(device, "48MiB"):
        yield default_pool(device)


def started(program: str, device: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, device], stdin=-1, stdout=-1, text=True)


@pytest.mark.isolated
def test_cached_pieces_go_to_another_process_that_waits(device: str, pooled: memsaver.Region) -> None:
    empty_cache_on_demand()
    segment = Segment(device, 2, 32)
    with started(ENGINE, device) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        assert engine.stdout.readline() == "paused\n"
        assert segment.map(0, 22) == 0
        assert segment.map(22, 32) == OUT_OF_MEMORY, "the broker has two pieces left"
        segment.cached |= set(range(20))
        segment.write(20, 3)
        segment.write(21, 4)
        print("go", file=engine.stdin, flush=True)
        assert engine.stdout.readline() == "resumed\n"
        assert pooled.allocated_bytes == pooled.mapped_bytes == 2 * segment.piece
        assert (segment.read(20), segment.read(21)) == (3, 4)
        assert segment.map(0, 20, retries=1) == OUT_OF_MEMORY
        engine.stdin.close()
    until(lambda: segment.map(0, 10) == 0)
    leave_and_return(pooled)
    assert (segment.read(20), segment.read(21)) == (3, 4)


@pytest.mark.isolated
def test_the_pieces_of_an_allocation_share_one_wait(device: str, pooled: memsaver.Region) -> None:
    """Another process returns its cached pieces one by one, each after some time."""
    segment = Segment(device, 2, 32)
    with started(CACHE, device) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "cached\n"
        assert segment.map(0, 10, retries=1) == 0, "all pieces come within the wait"
        assert pooled.mapped_bytes == 10 * segment.piece
        assert segment.map(10, 32, retries=1) == OUT_OF_MEMORY
        other.stdin.close()
