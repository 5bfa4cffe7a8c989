"""torch's default pool as a region: calls of the driver by torch's library, over a fake driver and a fake torch."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.fake_cuda import run_on_fake

BEGIN = """
import ctypes, os, subprocess, sys, tempfile, threading
import memsaver
from memsaver import _core
from tests.fake_cuda import control
from tests.support import GIB, MIB, until
from tests.torch_segments import (
    NOT_PERMITTED, NOT_SUPPORTED, OUT_OF_MEMORY, Segment, calls, default_pool, empty_cache_on_demand, library,
)
"""


def run(source: str, **options: Any) -> None:
    run_on_fake(BEGIN + textwrap.dedent(source), memory=options.pop("memory", "1GiB"), **options)


def test_pieces_leave_and_return_at_their_addresses_with_their_contents() -> None:
    """Those from before stay outside. torch frees its cached pieces and tries again if there is no memory."""
    run("""
    calls()
    segment = Segment(32)
    assert segment.map(0, 2) == 0
    segment.write(0, 1)
    region = default_pool()
    assert segment.map(2, 3) == 0
    segment.write(2, 2)
    assert region.allocated_bytes == segment.piece
    region.pause()
    assert control.used_bytes() == 2 * segment.piece and segment.read(0) == 1
    assert segment.unmap(1, 2) == 0 and control.used_bytes() == segment.piece
    region.resume()
    assert (segment.read(0), segment.read(2)) == (1, 2)
    assert segment.map(1, 2) == 0 and region.allocated_bytes == 2 * segment.piece
    assert segment.close() == 0 and control.used_bytes() == 0

    for piece_mib in (2, 20, 32, 256):
        segment = Segment(piece_mib)
        assert segment.map(0, 2) == 0 and segment.map(3, 4) == 0
        for i in (0, 1, 3):
            segment.write(i, 10 + i)
        whole = 3 * segment.piece
        assert region.allocated_bytes == region.mapped_bytes == control.used_bytes() == whole
        assert region.owns(segment.at(1)) and not region.owns(segment.at(2))
        for _ in range(2):
            assert region.pause().released_bytes == whole
            assert control.used_bytes() == control.mapped_bytes() == region.mapped_bytes == 0
            assert region.resume().restored_bytes == whole
            assert [segment.read(i) for i in (0, 1, 3)] == [10, 11, 13]
            assert control.used_bytes() == control.mapped_bytes() == whole
        assert segment.close() == 0
        assert control.used_bytes() == control.mapped_bytes() == region.allocated_bytes == 0

    first, second = Segment(32, 64), Segment(32, 64)
    assert first.map(0, 20) == 0
    assert second.map(0, 20) == OUT_OF_MEMORY, "20 of 32 pieces are in use"
    assert region.allocated_bytes == control.used_bytes() == 20 * 32 * MIB
    first.cache(0, 10)
    assert second.map(0, 20, retries=1) == 0
    assert region.allocated_bytes == control.used_bytes() == 30 * 32 * MIB
    """)


def test_a_chunk_serves_one_piece_alone() -> None:
    run("""
    region = default_pool()
    segment = Segment(20)
    assert segment.map(0, 4) == 0
    region.pause(backup="none"), region.resume()
    for i in range(4):
        assert segment.unmap(i, i + 1) == 0
        assert control.used_bytes() == (3 - i) * 20 * MIB
        assert segment.map(i, i + 1) == 0 and segment.unmap(i, i + 1) == 0
    """)


def test_while_it_is_paused_torch_takes_memory_of_the_driver_and_frees_pieces() -> None:
    run("""
    region = default_pool()
    segment, beside = Segment(32), Segment(32)
    assert segment.map(0, 4) == 0
    for i in range(4):
        segment.write(i, i)
    region.pause()
    assert beside.map(0, 2) == 0
    beside.write(0, 7)
    assert control.used_bytes() == 2 * beside.piece
    assert segment.unmap(1, 3) == 0
    assert region.allocated_bytes == 2 * segment.piece
    assert region.resume().restored_bytes == 2 * segment.piece
    assert (segment.read(0), segment.read(3), beside.read(0)) == (0, 3, 7)
    assert segment.map(1, 3) == 0 and region.mapped_bytes == 4 * segment.piece
    assert beside.close() == 0 and segment.close() == 0 and control.used_bytes() == 0
    """)


def test_calls_from_elsewhere_reach_the_driver() -> None:
    run("""
    region = default_pool()
    calls().fake_create.restype = ctypes.c_void_p
    types = ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong
    create = ctypes.CFUNCTYPE(ctypes.c_int, *types)(calls().fake_create())
    handle, properties = ctypes.c_uint64(), (ctypes.c_int * 8)(1, 1, 1, 0)
    assert create(ctypes.byref(handle), 32 * MIB, properties, 0) == 0
    assert region.mapped_bytes == 0 and control.used_bytes() == 32 * MIB
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuMemRelease(handle) == 0, "the number is the driver's"
    """)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("table[9] = table[3]", "the table has cuMemMap twice"),
        ("table[6] = 0", "the table has no cuMemUnmap"),
        ("calls().fake_fix_table()", "is not in writable memory of"),
    ],
)
def test_another_table_is_refused_and_left_as_it_is(change: str, reason: str) -> None:
    run(f"""
    get = ctypes.CDLL(library())["_ZN3c104cuda9DriverAPI3getEv"]
    get.restype = ctypes.POINTER(ctypes.c_size_t)
    table = get()
    {change}
    before = table[:10]
    found = _core.bind_default_pools(library())
    assert {reason!r} in found, found
    assert table[:10] == before
    """)


@pytest.mark.parametrize("has_fabric", [0, 1])
def test_the_driver_decides_on_fabric_handles(has_fabric: int) -> None:
    run(
        f"has_fabric = {has_fabric}"
        + """
region = default_pool()
calls().fake_handle_types(8)
segment, beside = Segment(32), Segment(32)
assert segment.map(0, 2) == (0 if has_fabric else NOT_SUPPORTED)
expected = 2 * segment.piece if has_fabric else 0
assert region.allocated_bytes == control.used_bytes() == expected
region.pause()
assert beside.map(0, 1) == (0 if has_fabric else NOT_SUPPORTED)
assert control.used_bytes() == has_fabric * beside.piece
region.resume()
""",
        fabric=has_fabric,
    )


def test_the_region_is_torchs_alone() -> None:
    """It takes no other segments and stays. torch exports none of its pieces."""
    run("""
    other = memsaver.region("torch", device="cuda:0", backup="host")
    try:
        default_pool()
        raise AssertionError
    except ValueError as error:
        assert str(error) == "region 'torch' on cuda:0 exists, expected a new tag", error
    other.close()
    calls()
    before = Segment(32)
    assert before.map(0, 1) == 0
    region = default_pool()
    assert default_pool() is region and default_pool("other", backup="none") is region
    for act in (lambda: region._core.allocate_array(MIB), region.close, lambda: region.empty(1)):
        try:
            act()
        except memsaver.Error:
            continue
        raise AssertionError(act)
    segment = Segment(32)
    assert segment.map(0, 1) == 0
    assert segment.export(0) == NOT_SUPPORTED and before.export(0) == 0
    """)


def test_peers_have_access_also_after_a_resume() -> None:
    """A failed change of access is not reported as done."""
    run(
        """
    region = default_pool()
    segment = Segment(32)
    assert segment.map(0, 2) == 0
    assert segment.peer(1, 0, 2) == NOT_PERMITTED, "no library has used device 1"
    control.activate(1, 1)
    control.fail("cuMemSetAccess", 1, times=1)
    assert segment.peer(1, 0, 2) != 0
    assert segment.peer(1, 0, 2) == 0
    both = control.access(segment.at(0), 2 * segment.piece)
    region.pause(), region.resume()
    assert control.access(segment.at(0), 2 * segment.piece) == both == [0, 1]
    """,
        devices=2,
        peers="all",
    )


def test_failed_calls_leave_the_segments_usable() -> None:
    """Every failure of cuMemCreate is reported as a lack of memory. After another code torch cannot use the segment."""
    run("""
    region = default_pool()
    segment = Segment(32)
    for code in (OUT_OF_MEMORY, 1, 999):
        control.fail("cuMemCreate", code, times=2 if code == OUT_OF_MEMORY else 1, after=0)  # of two sizes
        assert segment.map(0, 2) == OUT_OF_MEMORY, code
        assert segment.map(0, 2) == 0, code
        segment.write(1, 9)
        region.pause(), region.resume()
        assert segment.read(1) == 9
        assert segment.unmap(0, 2) == 0 and control.used_bytes() == 0 == region.mapped_bytes
    for call in ("cuMemMap", "cuMemSetAccess"):
        segment = Segment(32)
        control.fail(call, 1)
        assert segment.map(0, 1) == 1, call
        assert region.mapped_bytes == region.allocated_bytes == control.used_bytes() == 0
        other = Segment(32)
        assert other.map(0, 2) == 0
        other.write(1, 9)
        region.pause(), region.resume()
        assert other.read(1) == 9 and other.close() == 0 and control.used_bytes() == 0
    """)


@pytest.mark.parametrize("known", [True, False])
def test_segments_in_adjacent_reservations(known: bool) -> None:
    """A call of the driver that crosses the end of a reservation is not defined. Other neighbours share a call."""
    run(
        f"known = {known}"
        + """
if known:
    region = default_pool()
segments = [Segment(32, most=3) for _ in range(3)]
region = default_pool()
assert segments[1].address == segments[0].at(3) and segments[2].address == segments[1].at(3)
for number, segment in enumerate(segments):
    assert segment.map(0, 3) == 0
    segment.write(2, number)
before = control.calls("cuMemUnmap"), control.calls("cuMemSetAccess")
region.pause(), region.resume()
assert [segment.read(2) for segment in segments] == [0, 1, 2]
after = control.calls("cuMemUnmap"), control.calls("cuMemSetAccess")
assert all(a - b == (6 if known else 9) for a, b in zip(after, before)), "64 and 32 MiB of each, or each piece"
assert all(segment.close() == 0 for segment in segments) and control.used_bytes() == 0
""",
        adjacent=1,
    )


def test_a_segment_ends_in_a_transition() -> None:
    """torch's addresses stay reserved as long as chunks of the transition are under them."""
    run("""
    from memsaver.transitions import prepare_pause
    region, kept = default_pool(), Segment(2)
    assert kept.map(0, 1) == 0
    kept.write(0, 7)
    for state in ("pausing, given up", "pausing, done", "resuming"):
        segment = Segment(32)
        assert segment.map(0, 3) == 0
        if state == "resuming":
            region.pause()
            with control.held("cuMemSetAccess"):
                resume = memsaver.start(resume=region)
                control.until_stopped("cuMemSetAccess")
                assert region.state == "resuming" and segment.close() == 0
            resume.result()
        else:
            prepared = prepare_pause("torch")
            assert segment.close() == 0
            if state == "pausing, done":
                prepared.commit()
                region.resume()
            else:
                prepared.abort()
        assert region.state == "active" and kept.read(0) == 7
        assert region.mapped_bytes == control.used_bytes() == control.mapped_bytes() == kept.piece
        before = control.reserved_bytes()
        assert kept.map(1, 2) == 0  # its create() frees the addresses
        assert before - control.reserved_bytes() >= 16 * segment.piece, state
        assert kept.unmap(1, 2) == 0
    assert kept.close() == 0
    """)


POOL = """
from memsaver.broker import daemon, discovery

def started():
    command = [sys.executable, "-m", "memsaver", "broker", "--detach", "--device", "0", "--capacity", "768MiB"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [found] = discovery.found()
    return found

ENGINE = '''
import sys, memsaver
from tests.fake_cuda.control import Segment
memsaver.configure(pool="shared")
held = Segment(memsaver.region("engine", device="cuda:0"), 640 << 20)
memsaver.pause()
print("paused", flush=True)
sys.stdin.readline()
memsaver.resume(memory_timeout=30)
print("resumed", flush=True)
sys.stdin.readline()
'''
"""


def test_cached_pieces_go_to_another_process_that_waits() -> None:
    """The fake driver's memory is the process's own, so the processes share the broker's figures alone."""
    run(
        POOL
        + """
with tempfile.TemporaryDirectory(prefix="ms") as folder:
    os.environ["MEMSAVER_POOL_DIR"] = folder
    path = started()
    try:
        memsaver.configure(pool="shared")
        region = default_pool()
        empty_cache_on_demand()
        segment = Segment(32, 32)
        with subprocess.Popen([sys.executable, "-c", ENGINE], stdin=-1, stdout=-1, text=True) as engine:
            assert engine.stdout.readline() == "paused\\n"
            assert segment.map(0, 22) == 0
            assert segment.map(22, 32) == OUT_OF_MEMORY, "the broker has two pieces left"
            segment.cache(0, 20), segment.write(20, 3), segment.write(21, 4)
            print("go", file=engine.stdin, flush=True)
            assert engine.stdout.readline() == "resumed\\n"
            assert region.allocated_bytes == region.mapped_bytes == 2 * segment.piece
            assert (segment.read(20), segment.read(21)) == (3, 4)
            assert segment.map(0, 20, retries=1) == OUT_OF_MEMORY
            engine.stdin.close()
        until(lambda: segment.map(0, 10) == 0)
        region.pause(), region.resume()
        assert (segment.read(20), segment.read(21)) == (3, 4)
    finally:
        daemon.stop(path)
"""
    )


def test_pieces_come_and_go_around_pauses() -> None:
    run("""
    region = default_pool()
    segments = [Segment(32, 8), Segment(2, 64), Segment(20, 8)]
    kept = Segment(2)
    assert kept.map(0, 2) == 0
    kept.write(0, 1), kept.write(1, 2)
    stop, failed, gate, is_here = threading.Event(), [], threading.Lock(), [True]
    def allocate(segment):
        while not stop.is_set():
            with gate:  # as torch's allocator, which is told before a pause that the pool leaves
                code = segment.map(0, 4) if is_here[0] else None
            if code == 0:
                code = segment.unmap(0, 4)
            if code:
                failed.append(code)
                return
    threads = [threading.Thread(target=allocate, args=(each,)) for each in segments]
    for each in threads:
        each.start()
    for _ in range(20):
        with gate:
            is_here[0] = False
        region.pause(), region.resume()
        is_here[0] = True
        assert (kept.read(0), kept.read(1)) == (1, 2)
    stop.set()
    for each in threads:
        each.join()
    assert not failed, failed
    assert region.mapped_bytes == control.used_bytes() == 2 * kept.piece
    assert kept.close() == 0
    """)


CACHE = """
import sys, memsaver
from tests.torch_segments import Segment, default_pool, empty_cache_on_demand
memsaver.configure(pool="shared")
region = default_pool()
empty_cache_on_demand()
segment = Segment(32, 32)
assert segment.map(0, 22) == 0
segment.cache(0, 20)
print("cached", flush=True)
sys.stdin.readline()
"""


def test_the_pieces_of_an_allocation_share_one_wait() -> None:
    """Another process returns its cached pieces one by one, each after some time."""
    run(
        POOL
        + f"CACHE = {CACHE!r}"
        + """
with tempfile.TemporaryDirectory(prefix="ms") as folder:
    os.environ["MEMSAVER_POOL_DIR"] = folder
    path = started()
    try:
        memsaver.configure(pool="shared")
        region = default_pool()
        segment = Segment(32, 32)
        slow = {**os.environ, "FAKE_CUDA_DELAYS": "cuMemUnmap=10000"}
        with subprocess.Popen([sys.executable, "-c", CACHE], stdin=-1, stdout=-1, text=True, env=slow) as other:
            assert other.stdout.readline() == "cached\\n"
            assert segment.map(0, 10, retries=1) == 0, "all pieces come within the wait"
            assert region.mapped_bytes == 10 * segment.piece
            assert segment.map(10, 32, retries=1) == OUT_OF_MEMORY
            other.stdin.close()
    finally:
        daemon.stop(path)
"""
    )
