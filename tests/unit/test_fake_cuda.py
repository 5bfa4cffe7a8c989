"""The CUDA driver of the core on devices that are faked (tests/fake_cuda): errors, peers, platforms, dead contexts."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import run_on_fake
from tests.support import GIB

# Every program begins so.
PRELUDE = """
import ctypes
import memsaver
import numpy as np
from memsaver import _core
from tests.fake_cuda import control
from tests.fake_cuda.control import Segment

GIB, MIB, PAGE = 1 << 30, 1 << 20, 2 << 20


def refused(call, kind=memsaver.DriverError):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("nothing was refused")

"""


def run(source: str, /, **options: Any) -> str:
    return run_on_fake(PRELUDE + textwrap.dedent(source), **options)


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ({"fabric": 1}, 1 | 8),
        ({"fabric_refusal": 800}, 1),  # without a channel of IMEX
        ({"fabric_refusal": 801}, 1),
        ({"export_refusal": 801}, 0),
    ],
)
def test_each_segment_has_one_handle_with_all_types_that_the_driver_makes(options: dict[str, int], types: int) -> None:
    run(
        f"""
        import os
        cuda = control._fake
        region = memsaver.region("kv", device="cuda:0", backup="host", one_handle=True)
        other = memsaver.region("other", device="cuda:0", backup="host")

        def handle_at(address):
            handle = ctypes.c_uint64()
            assert cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)) == 0
            assert cuda.cuMemRelease(handle) == 0
            return handle

        def types_of(handle):
            properties = (ctypes.c_int * 16)()
            assert cuda.cuMemGetAllocationPropertiesFromHandle(properties, handle) == 0
            return properties[1]

        held = [Segment(region, nbytes, seed=nbytes) for nbytes in (300 * MIB + 5, 700, 34 * MIB)]
        held[1:2] = []  # its chunk goes, and another one comes to its addresses
        held += [Segment(region, nbytes, seed=nbytes) for nbytes in (100, 3 * MIB)]
        for _ in range(2):
            handles = set()
            for segment in held:
                pages = -(-segment.nbytes // PAGE)
                (handle,) = {{handle_at(segment.address + page * PAGE).value for page in range(pages)}}
                assert types_of(ctypes.c_uint64(handle)) == {types}
                handles.add(handle)
                file = ctypes.c_int()
                code = cuda.cuMemExportToShareableHandle(ctypes.byref(file), ctypes.c_uint64(handle), 1, 0)
                assert (code == 0) == {bool(types)}
                if code == 0:
                    assert os.fstat(file.value).st_size == pages * PAGE
                    os.close(file.value)
            assert len(handles) == len(held) and region.mapped_bytes == (302 + 34 + 2 + 4) * MIB
            memsaver.trim()
            region.pause()
            assert control.used_bytes() == 0
            block = Segment(other, 20 * MIB, seed=9)
            memsaver.switch(pause="other", resume="kv")
            memsaver.switch(pause="kv", resume="other")
            block.check()
            other.pause()
            region.resume()
            for segment in held:
                segment.check()
            other.resume()
            del block
            memsaver.trim()
        """,
        memory="1GiB",
        **options,
    )


def test_a_pause_waits_for_a_kernel_that_writes() -> None:
    """A kernel whose memory is gone when it ends would end the context."""
    run("""
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        kernel = control.launch(0, segment.address, 100, byte=7)
        pause = region.pause(wait=False)
        late = refused(lambda: region.pause(timeout=0.2), memsaver.WaitTimeoutError)
        assert late.stage == "queue"  # the pause before waits for the kernel
        assert not pause.done()
        assert control.finish(kernel) == 0
        pause.result()
        region.resume()
        segment.expected[:100] = 7
        segment.check()
    """)


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
    run(
        f"""
        kept = memsaver.region("kept", device="cuda:63", backup="host")
        segment = Segment(kept, PAGE, seed=1)
        for code in {NOT_LOST}:
            control.fail("cuCtxRecordEvent", code)
            assert refused(kept.pause).code == code
            assert kept.state == "active", code
        kept.pause()
        kept.resume()
        segment.check()
        for device, code in enumerate({LOST}):
            region = memsaver.region("lost", device=f"cuda:{{device}}")
            segment = Segment(region, PAGE)
            control.fail("cuCtxRecordEvent", code)
            assert refused(region.pause).code == code
            assert region.state == "lost", code
        assert kept.state == "active"
        """,
        devices=64,
    )


def test_stats_work_after_the_context_died() -> None:
    run("""
        memsaver.configure(backup_ahead=False)  # or host memory grows meanwhile
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB)
        before = memsaver.stats().asdict()["devices"]["cuda:0"]
        control.kill(0)
        assert memsaver.stats().asdict()["devices"]["cuda:0"] == before
        assert before["free_bytes"] == before["total_bytes"] - control.used_bytes() < before["total_bytes"]
    """)


def test_without_nvml_nothing_is_free_after_the_context_died() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        assert driver.memory() == (80 * GIB, 80 * GIB)
        control.kill(0, 719)
        assert driver.memory() == (0, 80 * GIB)
        """,
        no_nvml=1,
    )


def test_a_call_that_fails_for_another_reason_is_not_answered_by_nvml() -> None:
    run("""
        driver = _core.open_driver("cuda:0")
        control.fail("cuMemGetInfo", 999)
        assert refused(driver.memory).code == 999
    """)


# Platforms

# The attribute is 0; or it is 1, and cuMemCreate refuses with one of these codes.
NO_EXPORT = [{"no_export": 1}, {"export_refusal": 801}, {"export_refusal": 800}, {"export_refusal": 1}]


@pytest.mark.parametrize("platform", NO_EXPORT, ids=str)
def test_a_device_without_descriptors_has_plain_chunks(platform: dict[str, int]) -> None:
    run(
        """
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        region.pause()
        region.resume()
        segment.check()
        driver = _core.open_driver("cuda:0")
        assert not driver.exports()
        handle = driver.create(PAGE)
        error = refused(lambda: driver.export_fd(handle))
        assert (error.call, error.code) == ("cuMemExportToShareableHandle", 801)
        assert "cuda:0 has no POSIX descriptors" in error.message
        driver.release(handle)
        """,
        **platform,
    )


@pytest.mark.parametrize("platform", [*NO_EXPORT, {}], ids=str)
def test_support_for_exports_is_known_before_the_first_chunk(platform: dict[str, int]) -> None:
    run(
        f"""
        driver = _core.open_driver("cuda:0")
        assert driver.exports() is {not platform}
        assert driver.exports() is {not platform}
        assert control.used_bytes() == 0
        """,
        **platform,
    )


@pytest.mark.parametrize("platform", NO_EXPORT, ids=str)
def test_a_broker_refuses_a_device_without_descriptors(platform: dict[str, int]) -> None:
    run(
        """
        error = refused(lambda: _core.open_cuda_memory(0).create(PAGE))
        assert "POSIX descriptor" in error.message and "shared pool" in error.message
        assert control.used_bytes() == 0
        """,
        **platform,
    )


def test_a_full_device_refuses_every_kind_of_handle() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        handle = driver.create(4 * PAGE)
        assert refused(lambda: driver.create(PAGE)).code == 2
        assert driver.exports()
        driver.release(handle)
        """,
        memory="8MiB",
    )


def test_chunks_that_were_exportable_stay_so() -> None:
    """A later refusal is an error: no chunk is silently made without a descriptor."""
    run("""
        driver = _core.open_driver("cuda:0")
        driver.create(PAGE)
        control.fail("cuMemCreate", 801)
        assert refused(lambda: driver.create(PAGE)).code == 801
        assert driver.exports()
    """)


def test_a_device_without_virtual_memory_is_refused() -> None:
    run(
        """
        error = refused(lambda: _core.open_driver("cuda:0"))
        assert error.code == 801 and "virtual memory" in error.message
        """,
        no_virtual_memory=1,
    )


@pytest.mark.parametrize("mig", [0, 1])
def test_nvml_knows_a_device_by_its_uuid_or_its_mig_uuid(mig: int) -> None:
    run(
        """
        import os
        driver = _core.open_driver("cuda:1")
        segment = Segment(memsaver.region("a", device="cuda:1"), PAGE)
        assert driver.uuid().startswith("GPU-f0f1f2f3-")
        assert driver.processes() == [(os.getpid(), control.used_bytes(1)), (4711, 1024)]
        free = driver.memory()[0]
        control.kill(1)
        assert 0 < driver.memory()[0] == free < driver.memory()[1]
        assert _core.open_cuda_memory(1).free_bytes() == free
        """,
        devices=2,
        mig=mig,
        processes="1:4711:1024,0:4712:2048",
    )


# Peers


def test_peer_candidates_are_active_and_can_access_the_device() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        assert driver.peer_candidates() == [3]
        control.activate(2)
        control.activate(5)
        assert driver.peer_candidates() == [2, 3]
        control.activate(3, on=False)
        assert driver.peer_candidates() == [2]
        _core.open_driver("cuda:1")
        assert driver.peer_candidates() == [1, 2]
        assert _core.open_driver("cuda:5").peer_candidates() == [4]
        """,
        devices=6,
        active="3,4",
        peers="0-1,0-2,3-0,4-5",
    )


def test_peer_candidates_query_only_the_state_of_contexts() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        driver.peer_candidates()
        asked = {call: control.calls(call) for call in ("cuDeviceCanAccessPeer", "cuDeviceGetAttribute")}
        states = control.calls("cuDevicePrimaryCtxGetState")
        for _ in range(10):
            assert driver.peer_candidates() == []
        assert all(control.calls(call) == count for call, count in asked.items())
        assert control.calls("cuDevicePrimaryCtxGetState") - states == 10 * 7
        """,
        devices=8,
    )


def test_a_peer_reads_and_writes_memory_that_allows_it() -> None:
    """A kernel without access would end the context of its device, so each device tries once."""
    run(
        """
        driver = _core.open_driver("cuda:0")
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        assert control.access(segment.address, segment.nbytes) == [0]
        assert control.kernel(2, segment.address, 100, byte=7) == 700
        driver.use_peers([1, 3])
        assert (control.retained(1), control.retained(3)) == (1, 1)
        assert control.kernel(3, segment.address, 100, byte=7) == 700  # mapped before: it needs another allow()
        region.pause()
        region.resume()
        assert control.access(segment.address, segment.nbytes) == [0, 1, 3]
        assert control.kernel(1, segment.address, 100, byte=7) == 0
        segment.expected[:100] = 7
        segment.check()
        """,
        devices=4,
    )


def test_a_copy_between_regions_of_two_devices_keeps_contents() -> None:
    run(
        """
        regions = [memsaver.region("a", device=f"cuda:{device}", backup="host") for device in range(2)]
        drivers = [_core.open_driver(f"cuda:{device}") for device in range(2)]
        for driver in drivers:
            driver.use_peers(driver.peer_candidates())
        one, two = [Segment(region, 5 * MIB, seed) for seed, region in enumerate(regions)]
        drivers[1].copy_within(two.address, one.address, one.nbytes)
        drivers[1].finish_copies()
        two.expected = one.expected
        two.check()
        """,
        devices=2,
    )


def test_ctrl_c_ends_the_wait_for_memory_of_any_device() -> None:
    """Signals reach the main thread alone, and a thread beside it waits for the second device's memory."""
    run(
        """
        import signal, threading
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        first = memsaver.region("a", device="cuda:0", backup="host")
        second = memsaver.region("a", device="cuda:1", backup="host")
        segments = [Segment(first, 5 * MIB, seed=1), Segment(second, 5 * MIB, seed=2)]
        memsaver.pause("a")
        driver = _core.open_driver("cuda:1")
        free, _ = driver.memory()
        taken = driver.create(free)
        threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
        try:
            memsaver.resume("a", memory_timeout=1e6)
        except KeyboardInterrupt as error:
            assert error.__context__ is None, error.__context__
        else:
            raise AssertionError("the wait has gone on")
        assert (first.state, second.state) == ("paused", "paused")
        driver.release(taken)
        memsaver.resume("a")
        for segment in segments:
            segment.check()
        """,
        devices=2,
    )


def test_a_tag_selects_its_regions_on_all_devices_and_its_guest_leaves_with_the_last() -> None:
    run(
        """
        class Visitor(memsaver.Guest):
            def leave(self):
                pass

            def come_back(self):
                pass

        first, second = [memsaver.region("a", device=f"cuda:{device}", backup="host") for device in range(2)]
        memsaver.register(Visitor("guest", "a"))
        guest = lambda: memsaver.stats().guests[0].state
        first.pause()
        assert (second.state, guest()) == ("active", "here")
        memsaver.pause("a")
        assert (second.state, guest()) == ("paused", "away")
        second.resume()
        assert (first.state, guest()) == ("paused", "here")
        memsaver.resume("a")
        assert first.state == "active"
        """,
        devices=2,
    )


def test_one_call_allows_the_device_and_its_peers() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        driver.use_peers([1, 2])
        before = control.calls("cuMemSetAccess")
        segment = Segment(memsaver.region("a", device="cuda:0"), PAGE)
        assert control.access(segment.address, PAGE) == [0, 1, 2]
        assert control.calls("cuMemSetAccess") - before == 1
        """,
        devices=3,
    )


def test_waits_and_marks_cover_peers() -> None:
    run(
        """
        from concurrent.futures import ThreadPoolExecutor
        driver = _core.open_driver("cuda:0")
        early = control.launch(1)
        assert driver.record().done()  # of another device
        driver.use_peers([1])
        late = control.launch(0)
        mark = driver.record()
        after = control.launch(1)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(driver.synchronize)
            control.until_waiting(0)
            assert not mark.done()
            control.finish(late)
            control.until_waiting(1)
            assert not mark.done() and not waiting.done()
            control.finish(early)
            assert mark.done() and not waiting.done()
            control.finish(after)
            waiting.result()
        """,
        devices=2,
    )


def test_a_pause_waits_for_a_kernel_of_a_peer() -> None:
    run(
        """
        _core.open_driver("cuda:0").use_peers([1])
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        kernel = control.launch(1, segment.address, 100, byte=7)
        pause = region.pause(wait=False)
        late = refused(lambda: region.pause(timeout=0.2), memsaver.WaitTimeoutError)
        assert late.stage == "queue"  # the pause before waits for the kernel
        assert not pause.done()
        assert control.finish(kernel) == 0
        pause.result()
        region.resume()
        segment.expected[:100] = 7
        segment.check()
        """,
        devices=2,
    )


def test_a_segment_freed_while_a_peer_uses_it_rests() -> None:
    run(
        """
        _core.open_driver("cuda:0").use_peers([1])
        region = memsaver.region("a", device="cuda:0")
        segment = Segment(region, 64 * MIB)
        kernel = control.launch(1, segment.address, 100)
        address = segment.address
        del segment
        other = Segment(region, PAGE)
        assert control.access(address, PAGE) == [0, 1]
        assert control.finish(kernel) == 0
        another = Segment(region, PAGE)
        assert control.access(address, 64 * MIB) == []
        """,
        devices=2,
    )


def test_a_peer_whose_context_died_is_not_waited_for() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        driver.use_peers([1, 2])
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        control.launch(1)
        mark = driver.record()
        assert not mark.done()
        control.kill(1)
        assert mark.done()
        mark.wait()
        region.pause()
        region.resume()
        segment.check()
        assert region.state == "active" and driver.record().done()
        running = control.launch(2)
        assert not driver.record().done()
        control.finish(running)
        control.kill(0)
        assert refused(driver.synchronize).code == 700
        """,
        devices=3,
    )


def test_a_device_that_comes_later_gets_access_to_existing_mappings() -> None:
    run(
        """
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        assert control.access(segment.address, segment.nbytes) == [0]
        control.activate(1)
        _core.refresh_peers()
        assert control.access(segment.address, segment.nbytes) == [0, 1]
        region.pause()
        control.activate(2)
        region.resume()
        assert control.access(segment.address, segment.nbytes) == [0, 1, 2]
        segment.check()
        """,
        devices=3,
    )


def test_peers_can_be_given_up() -> None:
    """Existing mappings stay accessible to them, so waits still cover them."""
    run(
        """
        driver = _core.open_driver("cuda:0")
        region = memsaver.region("a", device="cuda:0")
        driver.use_peers([1, 0, 1])  # the device itself, and one named twice
        one = Segment(region, PAGE)
        driver.use_peers([])
        two = Segment(region, PAGE)
        assert control.access(one.address, PAGE) == [0, 1]
        assert control.access(two.address, PAGE) == [0]
        kernel = control.launch(1)
        assert not driver.record().done()
        control.finish(kernel)
        driver.use_peers([1])
        assert control.retained(1) == 1
        """,
        devices=2,
    )


@pytest.mark.parametrize("ordinal", [-1, 2, 3])
def test_a_device_that_cannot_reach_is_no_peer(ordinal: int) -> None:
    run(
        f"""
        driver = _core.open_driver("cuda:0")
        error = refused(lambda: driver.use_peers([1, {ordinal}]), ValueError)
        assert "peers names cuda:{ordinal}, expected devices that can access the memory of cuda:0" in str(error)
        assert control.retained(1) == 0
        segment = Segment(memsaver.region("a", device="cuda:0"), PAGE)
        assert control.access(segment.address, PAGE) == [0]
        """,
        devices=3,
        peers="0-1,1-2",
    )


def test_a_peer_that_cannot_be_retained_changes_nothing() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        control.fail("cuDevicePrimaryCtxRetain", 2, after=1)
        assert refused(lambda: driver.use_peers([1, 2])).call == "cuDevicePrimaryCtxRetain"
        driver.use_peers([1, 2])
        assert (control.retained(1), control.retained(2)) == (1, 1)
        """,
        devices=3,
    )


def test_peers_change_while_other_threads_call() -> None:
    run(
        """
        import threading
        driver = _core.open_driver("cuda:0")
        stop = threading.Event()
        errors = []

        def work():
            try:
                while not stop.is_set():
                    driver.record().done()
                    driver.synchronize()
                    address, handle = driver.reserve(PAGE), driver.create(PAGE)
                    driver.map(address, PAGE, handle)
                    driver.allow(address, PAGE)
                    assert 0 in control.access(address, PAGE)
                    driver.unmap(address, PAGE)
                    driver.release(handle)
                    driver.unreserve(address, PAGE)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(200):
            driver.use_peers(driver.peer_candidates()[: turn % 8])
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert [control.retained(device) for device in range(8)] == [1] * 8
        """,
        devices=8,
        active="1,2,3,4,5,6,7",
    )


def test_peers_work_with_a_driver_that_cannot_mark_a_context() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        driver.use_peers([1])
        assert driver.record() is None
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        region.pause()
        region.resume()
        segment.check()
        """,
        devices=2,
        no_record_event=1,
    )


def test_marks_use_events_again() -> None:
    run(
        """
        driver = _core.open_driver("cuda:0")
        driver.use_peers([1])
        for _ in range(3):
            marks = [driver.record() for _ in range(5)] + [driver.mark("in"), driver.mark("out")]
            assert control.events() == 5 * 2 + 2
            del marks
        control.kill(1)
        assert driver.record().done()
        assert control.events() == 5 * 2 + 2
        """,
        devices=2,
    )


@pytest.mark.parametrize(("call", "after", "streams"), [("cuStreamCreate", 0, 0), ("cuStreamCreate", 1, 1)])
def test_a_device_that_cannot_be_opened_leaves_nothing_behind(call: str, after: int, streams: int) -> None:
    run(f"""
    control.fail({call!r}, 999, after={after})
    refused(lambda: memsaver.region("a", device="cuda:0"))
    assert control.retained(0) == 0 and control.calls("cuStreamDestroy") == {streams}
    memsaver.region("a", device="cuda:0")
    """)


@pytest.mark.parametrize("gone", [1, 2])
def test_chunks_that_a_failed_call_has_not_unmapped_stay_in_their_region(gone: int) -> None:
    """The driver has unmapped a part of a run. The handles of the others are not released."""
    run(f"""
    region = memsaver.region("a", device="cuda:0", backup="host")
    segments = [Segment(region, PAGE, seed) for seed in range(3)]
    control.stop_unmap({gone})
    assert refused(region.pause).call == "cuMemUnmap"
    left = (3 - {gone}) * PAGE
    assert region.state == "paused"
    assert region.mapped_bytes == control.mapped_bytes() == control.used_bytes() == left
    region.pause(), region.resume()
    assert control.mapped_bytes() == control.used_bytes() == 3 * PAGE
    for segment in segments:
        segment.check()
    """)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("cuMemAddressReserve", "has no such range of addresses left"),
        ("cuMemMap", "no memory left for page tables"),
        ("cuMemSetAccess", "no memory left for page tables"),
    ],
)
def test_another_shortage_than_that_of_device_memory_has_its_call_and_its_resource(call: str, text: str) -> None:
    run(f"""
    region = memsaver.region("a", device="cuda:0", backup="host")
    control.fail({call!r}, 2)
    error = refused(lambda: Segment(region, MIB))
    assert type(error) is memsaver.DriverError and (error.call, error.code) == ({call!r}, 2) and {text!r} in str(error)
    segment = Segment(region, MIB, seed=1)
    region.pause()
    if {call!r} != "cuMemAddressReserve":
        control.fail({call!r}, 2)
        assert {text!r} in str(refused(region.resume)) and region.state == "paused"
    region.resume()
    segment.check()
    assert control.mapped_bytes() == control.used_bytes() == PAGE
    """)


def test_a_mark_in_a_capture_that_was_not_announced_names_the_announcement() -> None:
    run("""
    region = memsaver.region("a", device="cuda:0", backup="host")
    segment = Segment(region, MIB)
    control.fail("cuCtxRecordEvent", 900)
    assert "memsaver.capturing()" in str(refused(region.pause))
    """)


def test_the_drivers_names_are_not_those_of_other_libraries() -> None:
    run("""
    memsaver.region("a", device="cuda:0")
    assert not hasattr(ctypes.CDLL(None), "cuInit")
    """)


@pytest.mark.parametrize("opens", ["region", "broker"])
def test_a_device_with_another_granularity_is_refused(opens: str) -> None:
    run(
        f"""
        opens = dict(region=lambda: memsaver.region("a", device="cuda:0"), broker=lambda: _core.open_cuda_memory(0))
        error = refused(opens[{opens!r}])
        assert error.call == "cuMemGetAllocationGranularity" and error.code == 801
        assert "cuda:0 maps memory in units of 4194304 bytes, expected 2097152" in str(error)
        """,
        granularity="4MiB",
    )


# Memory of a GPU that is a NUMA node of the system. This machine's own memory is node 0, which has its CPUs.

MBIND = 237
# Prints the policy of the mapping that holds a backup: "bind:0" where its pages can come from node 0 alone.
POLICY = """
def policy(address):
    lines = [line.split() for line in open("/proc/self/numa_maps")]
    return max((line for line in lines if int(line[0], 16) <= address), key=lambda line: int(line[0], 16))[1]


region = memsaver.region("a", device="cuda:0", backup="host")
segment = Segment(region, 5 * MIB, seed=1)
"""
NO_NODES = not Path("/proc/self/numa_maps").exists()
needs_nodes = pytest.mark.skipif(NO_NODES, reason="this system has no /proc/self/numa_maps")


def node_files(root: Path, has_cpu: str, gib: tuple[int, int] = (8, 8)) -> Path:
    """The system's files for two nodes, all of whose memory is free."""
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "has_cpu").write_text(f"{has_cpu}\n")
    for node in range(2):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "meminfo").write_text(
            f"Node {node} MemTotal: {gib[node] << 20} kB\nNode {node} MemFree: {gib[node] << 20} kB\n"
        )
    return root


@needs_nodes
@pytest.mark.parametrize("refused", [(), (MBIND,)], ids=["bound", "a container that forbids to bind"])
def test_backups_lie_on_nodes_with_cpus(refused: tuple[int, ...]) -> None:
    said = run(
        POLICY
        + """
region.pause()
print(policy(segment.view().ctypes.data))
region.resume()
segment.check()
""",
        numa=1,
        refused_calls=refused,
    )
    assert said == ("default\n" if refused else "bind:0\n")


@needs_nodes
@pytest.mark.parametrize("refused", [(), (MBIND,)], ids=["bound", "a container that forbids to bind"])
def test_a_backup_in_memory_of_a_gpu_is_refused(tmp_path: Path, refused: tuple[int, ...]) -> None:
    """Node 1 has the CPUs here, and the pages come from node 0 all the same: there is no other."""
    run(
        POLICY
        + """
error = refused(region.pause, memsaver.BackupError)
assert "node 0, which may be memory of a GPU: only the nodes with CPUs (1)" in str(error), error
assert region.state == "active"
segment.check()
row = memsaver.stats().asdict()["devices"]["cuda:0"]
assert row["host_held_bytes"] == 0 == control.registered_bytes()
""",
        numa=0,
        system_files=node_files(tmp_path, has_cpu="1"),
        refused_calls=refused,
    )


def test_a_backup_is_refused_if_its_numa_node_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/numa_maps").write_text("00400000 default anon=1 kernelpagesize_kB=4\n")
    run(
        POLICY
        + """
error = refused(region.pause, memsaver.BackupError)
assert "/proc/self/numa_maps does not list the nodes" in str(error), error
segment.check()
""",
        numa=1,
        system_files=tmp_path,
    )


def test_the_budget_counts_nodes_with_cpus_alone(tmp_path: Path) -> None:
    """8 GiB on node 0, with the CPUs; 500 on node 1, which is the GPU."""
    root = node_files(tmp_path, has_cpu="0", gib=(8, 500))
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: {508 << 20} kB\nMemAvailable: {508 << 20} kB\n")
    for numa, can_be_taken in ((-1, 508 * GIB), (1, 8 * GIB)):
        run(
            f"""
            region = memsaver.region("a", device="cuda:0")
            held = region._core.allocate_array(600 * GIB)
            error = refused(lambda: region.pause(backup="host"), memsaver.BackupError)
            assert error.available_bytes == {can_be_taken} - {can_be_taken} // 10, error
            """,
            memory="700GiB",
            numa=numa,
            system_files=root,
        )


def test_backups_avoid_the_numa_node_of_any_device() -> None:
    """Also where the region is on another: the system may take pages from there."""
    run(
        """
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, PAGE, seed=1)
        region.pause()
        policies = [line.split()[1] for line in open("/proc/self/numa_maps")]
        assert "bind:0" in policies
        """,
        devices=2,
        numa=0,
        numa_first=1,
    )


# Addresses of host memory


def test_eight_devices_take_few_addresses_of_a_large_machine(tmp_path: Path) -> None:
    """They share 47 bits with the regions."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {2 << 30} kB\nMemAvailable: {2 << 30} kB\n")
    run(
        """
        import psutil
        assert _core.host_memory()[1] == 2 << 40
        before = psutil.Process().memory_info().vms
        regions = [memsaver.region("a", device=f"cuda:{device}", backup="host") for device in range(8)]
        held = [Segment(region, 5 * MIB, seed) for seed, region in enumerate(regions)]
        memsaver.pause()
        assert psutil.Process().memory_info().vms - before - control.reserved_bytes() < 1 << 40
        memsaver.resume()
        for segment in held:
            segment.check()
        """,
        devices=8,
        system_files=tmp_path,
    )


def test_contents_in_several_ranges_of_addresses_come_back_whole() -> None:
    """A process with few addresses gets a range for each growth. The fake refuses copies across registrations."""
    run("""
        import psutil, resource
        memsaver.configure(backup_ahead=False)
        regions = [memsaver.region(f"a{number}", device="cuda:0", backup="host") for number in range(4)]
        held = [Segment(region, 40 * MIB, seed) for seed, region in enumerate(regions)]
        larger = memsaver.region("larger", device="cuda:0", backup="host")
        held += [Segment(larger, 95 * MIB, seed=9), Segment(larger, 700, seed=10)]
        most = psutil.Process().memory_info().vms + GIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for region in regions:
            region.pause()
        assert control.calls("cuMemHostRegister") == 4
        memsaver.resume([region.tag for region in regions])
        for _ in range(2):
            larger.pause()
            larger.resume()
            for segment in held:
                segment.check()
        assert control.calls("cuMemHostRegister") == 4  # in existing slabs
        assert memsaver.release_host_memory() == 160 * MIB
        larger.pause()
        larger.resume()
        held[-2].check()
    """)


# Contents after the context died

# A backup in pieces: its memory is the holes that others left, and a little more.
IN_PIECES = """
memsaver.configure(backup_ahead=False)
small = [memsaver.region(f"small{number}", device="cuda:0", backup="host") for number in range(12)]
between = [Segment(region, MIB, seed) for seed, region in enumerate(small)]
memsaver.pause()
memsaver.resume([region.tag for region in small[::2]])
region = memsaver.region("a", device="cuda:0", backup="host")
segments = [Segment(region, nbytes, seed=nbytes) for nbytes in (5 * MIB, 700, 3 * MIB)]
region.pause()
pinned = control.registered_bytes()


def host_bytes():
    row = memsaver.stats().asdict()["devices"]["cuda:0"]
    return row["host_held_bytes"], row["host_used_bytes"]


held, used = host_bytes()
"""


@pytest.mark.parametrize("end", ["kill(0)", "fail('cuMemHostRegister', 999, control.FOREVER)"])
def test_contents_in_pieces_are_read_after_the_context_died(end: str) -> None:
    """A view of them needs pinned memory, which the driver refuses; a copy does not."""
    run(
        IN_PIECES
        + f"control.{end}"
        + """
for segment in reversed(segments):
    assert (segment.read() == segment.expected).all()
assert (segments[1].view() == segments[1].expected).all()
assert "use clone=True" in str(refused(segments[0].view, memsaver.BackupError))
assert control.registered_bytes() == pinned and host_bytes() == (held, used)
"""
    )


def test_a_driver_that_pins_no_memory_is_an_error_with_the_limit_of_locked_memory() -> None:
    run("""
        import resource
        memsaver.configure(backup_ahead=False)
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 5 * MIB, seed=1)
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
        control.fail("cuMemHostRegister", 2, control.FOREVER)
        error = refused(region.pause, memsaver.BackupError)
        assert (error.needed_bytes, error.held_bytes, region.state) == (5 * MIB, 0, "active")
        assert "cuMemHostRegister" in str(error) and "may lock 65536 bytes of memory (RLIMIT_MEMLOCK)" in str(error)
        segment.check()
        control.fail("cuMemHostRegister", 2, 0)
        region.pause()
        region.resume()
        segment.check()
    """)


def test_contents_on_disk_are_read_after_the_context_died(tmp_path: Path) -> None:
    run(f"""
        memsaver.configure(disk_dir={str(tmp_path)!r})
        region = memsaver.region("a", device="cuda:0", backup="disk")
        segments = [Segment(region, nbytes, seed=nbytes) for nbytes in (20 * MIB, 700)]
        region.pause()
        memsaver.release_host_memory()
        control.kill(0)
        calls = control.calls("cuMemHostRegister")
        for segment in segments:
            assert (segment.read() == segment.expected).all()
        assert control.calls("cuMemHostRegister") == calls
    """)


def test_memory_that_stays_registered_is_kept() -> None:
    """The driver of a dead context unregisters nothing; it would reach the memory still."""
    run("""
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 20 * MIB, seed=1)
        region.pause()
        region.resume()
        control.kill(0)
        assert memsaver.release_host_memory() == 0
        row = memsaver.stats().asdict()["devices"]["cuda:0"]
        assert row["host_held_bytes"] == control.registered_bytes() == 20 * MIB
        assert row["host_used_bytes"] == 0
    """)


def test_a_failed_unregister_of_host_memory_is_repeated_later() -> None:
    run("""
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, 20 * MIB, seed=1)
        region.pause()
        region.resume()
        control.fail("cuMemHostUnregister", 999)
        assert memsaver.release_host_memory() == 0
        region.pause()
        region.resume()
        segment.check()
        assert memsaver.release_host_memory() == 20 * MIB
        assert control.registered_bytes() == 0
    """)


# Locks of the arena

# Calls that every thread may make while another makes host memory. Each has a thread of its own, so a call that does
# not return fails the test.
MEANWHILE = """
from concurrent.futures import ThreadPoolExecutor
from tests.support import until


def returns(call):
    return pool.submit(call).result(timeout=20)


def host_bytes():
    row = memsaver.stats().asdict()["devices"]["cuda:0"]
    return row["host_held_bytes"], row["host_used_bytes"]


pool = ThreadPoolExecutor(8)
memsaver.configure(backup_ahead=False)
small, large = [memsaver.region(tag, device="cuda:0", backup="host") for tag in ("small", "large")]
segments = [Segment(small, 6 * MIB, seed=1)]
small.pause()
held = host_bytes()[0]
"""
# Before the memory is touched the arena asks for the nearest node; after that it is pinned.
STOPS = ["cuDeviceGetAttribute", "cuMemHostRegister"]


@pytest.mark.parametrize("stop", STOPS)
def test_no_lock_is_held_while_a_pause_makes_memory(stop: str) -> None:
    run(
        MEANWHILE
        + f"""
segments.append(Segment(large, 50 * MIB, seed=2))
with control.held({stop!r}):
    pause = large.pause(wait=False)
    control.until_stopped({stop!r})
    assert returns(host_bytes) == (held, held)
    returns(small.resume)  # put()
    assert returns(host_bytes) == (held, 0)
    returns(small.pause)  # takes idle memory
    assert returns(host_bytes) == (held, held)
    assert not pause.done()
pause.result()
memsaver.resume()
for segment in segments:
    segment.check()
"""
    )


@pytest.mark.parametrize("stop", STOPS)
def test_no_lock_is_held_while_the_background_makes_memory(stop: str) -> None:
    run(
        MEANWHILE
        + f"""
small.resume()
memsaver.configure(backup_ahead=True)
with control.held({stop!r}):
    segments.append(Segment(large, 50 * MIB, seed=2))
    control.until_stopped({stop!r})
    assert returns(host_bytes) == (held, 0)
    returns(small.pause)
    assert returns(host_bytes) == (held, held)
    returns(small.resume)
    segments.append(returns(lambda: Segment(large, MIB, seed=3)))  # tells the arena how much is wanted
until(lambda: host_bytes()[0] > 56 * MIB)
memsaver.pause()
memsaver.resume()
for segment in segments:
    segment.check()
"""
    )


def test_no_lock_is_held_while_memory_goes_back() -> None:
    run(
        MEANWHILE
        + """
other = memsaver.region("other", device="cuda:0", backup="host")
segments.append(Segment(other, 6 * MIB, seed=2))
other.pause()
small.resume()
with control.held("cuMemHostUnregister"):
    released = pool.submit(memsaver.release_host_memory)
    control.until_stopped("cuMemHostUnregister")
    returns(host_bytes)
    returns(other.resume)
    returns(other.pause)
assert released.result() == held
memsaver.resume()
for segment in segments:
    segment.check()
"""
    )


# Locks of the core


@pytest.mark.parametrize(("move", "stop"), [("pause", "cuEventSynchronize"), ("resume", "cuMemcpyHtoDAsync")])
def test_no_lock_is_held_while_contents_are_copied(move: str, stop: str) -> None:
    run(
        MEANWHILE
        + f"""
other = memsaver.region("other", device="cuda:0")
if {move!r} == "pause":
    small.resume()
with control.held({stop!r}):
    moved = small.{move}(wait=False)
    control.until_stopped({stop!r})
    assert returns(lambda: _core.acquire([other._core])) is None
    returns(lambda: _core.release([other._core]))
    assert returns(lambda: small.state) == {move!r}[:-1] + "ing"
    returns(memsaver.stats)
    segments.append(returns(lambda: Segment(other, MIB, seed=2)))
    returns(lambda: other.pause(backup="none"))
    returns(other.resume)
    assert not moved.done()
moved.result()
small.resume()
segments[0].check()
"""
    )


def test_no_lock_is_held_while_peers_get_access() -> None:
    """Of tagged regions, in which programs with a preloaded library allocate."""
    run(
        MEANWHILE
        + """
tagged = _core.tagged_regions("tms")
segments.append(Segment(memsaver.regions.wrapper(tagged.active("a", "cuda:0", "none")), MIB))
control.activate(1)
with control.held("cuMemSetAccess"):
    made = pool.submit(tagged.active, "b", "cuda:0", "none")
    control.until_stopped("cuMemSetAccess")
    assert [region.tag for _, region in returns(tagged.all)] == ["tms.a"]
    assert not made.done()
assert made.result().tag == "tms.b"
""",
        devices=2,
    )


def test_no_lock_is_held_while_a_chunk_of_an_ended_broker_is_released() -> None:
    run("""
    import os, subprocess, sys, tempfile
    from concurrent.futures import ThreadPoolExecutor
    from memsaver.broker import daemon, discovery
    from tests.support import until
    command = [sys.executable, "-m", "memsaver", "broker", "--detach", "--device", "0", "--capacity", "1GiB"]
    pool = ThreadPoolExecutor(4)
    with tempfile.TemporaryDirectory(prefix="ms") as folder:
        os.environ["MEMSAVER_POOL_DIR"] = folder
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        [path] = discovery.found()
        memsaver.configure(pool="shared")
        region = memsaver.region("kv", device="cuda:0")
        control.hold("cuMemImportFromShareableHandle")
        made = pool.submit(refused, lambda: Segment(region, MIB), memsaver.Error)
        control.until_stopped("cuMemImportFromShareableHandle")
        daemon.stop(path)
        until(lambda: not _core.connected("cuda:0"))
        control.hold("cuMemRelease")
        control.go_on("cuMemImportFromShareableHandle")
        control.until_stopped("cuMemRelease")
        assert pool.submit(_core.pool_waits, "cuda:0").result(timeout=20) == ([], [])
        control.go_on("cuMemRelease")
        made.result()
    """)


def test_a_free_beside_an_allocation_leaves_the_page_that_they_share() -> None:
    """The new segment is in no book before its memory can be reached."""
    run("""
        from concurrent.futures import ThreadPoolExecutor
        region = memsaver.region("a", device="cuda:0")
        first = Segment(region, MIB)
        with ThreadPoolExecutor(1) as pool:
            with control.held("cuMemSetAccess"):
                second = pool.submit(Segment, region, 3 * MIB, 1)
                control.until_stopped("cuMemSetAccess")
                del first
            second = second.result()
        assert region._core.chunks == [PAGE, PAGE]
        second.check()
    """)


@pytest.mark.parametrize("call", ["cuCtxRecordEvent", "cuCtxSynchronize"])
def test_a_capture_begins_after_calls_under_way_that_would_break_it(call: str) -> None:
    run(
        f"""
        from concurrent.futures import ThreadPoolExecutor, wait
        region = memsaver.region("a", device="cuda:0", backup="host")
        segment = Segment(region, MIB, seed=1)
        with ThreadPoolExecutor(1) as pool:
            with control.held({call!r}):
                pause = region.pause(wait=False)
                control.until_stopped({call!r})
                capture = pool.submit(_core.capture_begins)
                assert not wait([capture], timeout=0.3).done
                assert not _core.capturing()
            capture.result()
        assert _core.capturing()
        pause.result()
        _core.capture_ends()
        region.resume()
        segment.check()
        """,
        no_record_event=int(call == "cuCtxSynchronize"),
    )


# Thousands of tensors


@pytest.mark.parametrize("backup", ["host", "disk"])
def test_neighbours_are_copied_as_one(tmp_path: Path, backup: str) -> None:
    """4,000 tensors of 4 KiB are two blocks of a file, or one piece of host memory."""
    run(f"""
        memsaver.configure(disk_dir={str(tmp_path)!r}, backup_ahead=False)  # ahead, host memory grows in several slabs
        region = memsaver.region("a", device="cuda:0", backup={backup!r})
        segments = [Segment(region, 4096, seed) for seed in range(4000)]
        for call, move in (("cuMemcpyDtoHAsync", region.pause), ("cuMemcpyHtoDAsync", region.resume)):
            before = control.calls(call)
            move()
            assert control.calls(call) - before <= 4, (call, control.calls(call) - before)
        for segment in segments:
            segment.check()
        region.pause()
        for segment in segments[::100]:
            assert (segment.read() == segment.expected).all()
    """)


def test_a_pause_beside_a_capture_that_nobody_announced_breaks_it() -> None:
    run("""
        cu = ctypes.CDLL("libcuda.so.1")
        region = memsaver.region("a", device="cuda:0")
        segment = Segment(region, PAGE)
        stream, context, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cu.cuCtxPushCurrent(context)
        cu.cuStreamCreate(ctypes.byref(stream), 1), cu.cuStreamBeginCapture(stream, 2)
        assert refused(region.pause).code == 900 and region.state == "active"
        assert cu.cuStreamEndCapture(stream, ctypes.byref(graph)) == 901
        cu.cuStreamBeginCapture(stream, 0)
        with memsaver.capturing():
            refused(region.pause, memsaver.Error)
        assert cu.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        region.pause(), region.resume()
    """)


def test_released_memory_that_is_free_only_later_serves_an_allocation() -> None:
    run(
        """
        first, second = (memsaver.region(name, device="cuda:0") for name in "ab")
        segment = Segment(first, 600 * MIB)
        first.pause()
        other = Segment(second, 600 * MIB)
        second.pause()
        first.resume(memory_timeout=60)
        """,
        memory="1GiB",
        freed_late=3,
    )


def test_a_process_whose_contexts_all_died_still_reads_its_backups() -> None:
    run(
        """
        regions = [memsaver.region("a", device=f"cuda:{device}", backup="host") for device in range(2)]
        first, second = (Segment(region, 5 * MIB, seed=1) for region in regions)
        regions[0].pause()
        control.kill(1)
        refused(regions[1].pause, memsaver.Error)
        refused(regions[0].resume, memsaver.Error)
        assert regions[1].state == "lost"
        assert np.array_equal(first.read(), first.expected)
        memsaver.stats()
        """,
        devices=2,
        dies_whole=1,
    )


def test_a_table_with_other_pointers_than_those_of_the_core_is_refused() -> None:
    run(
        """
        from tests.torch_segments import calls, library
        calls()
        reason = _core.bind_default_pools(library())
        assert reason.startswith("the table has no cu"), reason
        """,
        pointers_by_version=1,
    )


def test_access_between_devices_may_have_one_direction() -> None:
    run(
        """
        driver = [_core.open_driver(f"cuda:{device}") for device in range(2)]
        assert driver[0].peer_candidates() == [1] and driver[1].peer_candidates() == []
        """,
        devices=2,
        peers="1>0",
    )


def test_a_process_that_nvml_lists_under_another_number_is_another_holder() -> None:
    run(
        """
        segment = Segment(memsaver.region("a", device="cuda:0"), PAGE)
        assert _core.open_driver("cuda:0").processes() == [(4711, control.used_bytes())]
        memsaver.stats()
        """,
        own_pid=4711,
    )
