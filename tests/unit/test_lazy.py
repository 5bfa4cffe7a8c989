"""Lazy pauses in one process: what is copied, and when, and what stays after failures. See also test_machines.py."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import memsaver
from memsaver import _core, _results
from memsaver.transitions import prepare_pause
from tests import controls
from tests.pool_support import LAZY
from tests.support import (
    MIB,
    PAGE,
    Block,
    Fill,
    Make,
    Sweep,
    blocks,
    check,
    drop_backups,
    free_bytes,
    host_used_bytes,
    run_clean,
    sparse_blocks,
    until,
)

CHUNK = PAGE
LARGE = 32 * MIB  # four in a batch of copies ahead, two in one of a pause. Each has contents of 1 MiB


@pytest.fixture(autouse=True)
def nothing_rests() -> None:
    """Memory that earlier tests freed would come back within a test, in the place of offered memory."""
    gc.collect()
    memsaver.trim()


@pytest.fixture(autouse=True)
def disk(tmp_path: Path) -> None:
    memsaver.configure(disk_dir=tmp_path)


def lazily(
    make: Make, backup: str = "host", chunks: int = 4, size: int = CHUNK, **options: object
) -> tuple[memsaver.Region, list[Block]]:
    """A region with some chunks and their blocks, which is paused lazily."""
    region = make(backup, **options)
    held = sparse_blocks(region, chunks) if size == LARGE else blocks(region, chunks * [size])
    region.pause(lazy=True)
    assert (region.state, region.mapped_bytes, region.offered_bytes) == ("paused", 0, chunks * size)
    return region, held


def test_turns_of_sides_that_both_fit_copy_nothing(make: Make) -> None:
    one, held = lazily(make)
    two = make("none")
    other = two.empty(64 * MIB)
    memory, free = host_used_bytes(), free_bytes()
    for turn in range(4):
        out, back = (one, two) if turn % 2 else (two, one)
        done = memsaver.switch(pause=out.tag, resume=back.tag, lazy={out.tag: True})
        assert (done.copied_bytes, done.released_bytes, done.restored_bytes) == (0, 0, 0)
        assert (out.mapped_bytes, back.offered_bytes) == (0, 0)
        with pytest.raises(memsaver.RegionPausedError):
            out.empty(1)
    assert (host_used_bytes(), free_bytes()) == (memory, free)
    [stats] = [each for each in memsaver.stats().devices["cpu"].regions if each.tag == one.tag]
    assert (stats.mapped_bytes, stats.offered_bytes, stats.backup_bytes) == (0, 4 * CHUNK, 0)
    ledger = memsaver.stats().devices["cpu"].ledger
    [row] = [each for each in ledger.rows if each.label == one.tag]
    assert (row.kind, row.bytes) == ("offered", 4 * CHUNK)
    assert sum(each.bytes for each in ledger.rows) == ledger.used_bytes
    with Fill(leave=0):
        with pytest.raises(memsaver.OutOfMemoryError):
            make("none").empty(64 * CHUNK, torch.uint8)
        assert one.offered_bytes == 0  # it was given, and did not suffice
    one.resume()
    check(held)
    del other


def test_a_demand_takes_what_it_lacks_and_a_resume_copies_only_that_back(make: Make) -> None:
    one, held = lazily(make, size=LARGE)
    two = make("host")
    more = [two.empty(3 * LARGE, torch.uint8)]
    two.pause()
    with Fill(leave=LARGE + 10 * MIB):
        two.resume()
        assert (one.backup_bytes, one.offered_bytes) == (2 * MIB, 2 * LARGE)  # 54 MiB are lacking
        more += [two.empty(20 * MIB, torch.uint8)]
        assert one.offered_bytes == LARGE  # 10 MiB were free
        more += [two.empty(5 * MIB, torch.uint8)]
        assert one.offered_bytes == LARGE
        last = Block(two, MIB, seed=9)
        done = memsaver.switch(pause=two.tag, resume=one.tag, lazy=True)
        assert done.copied_bytes == 3 * MIB + two.backup_bytes
        assert two.backup_bytes <= 3 * LARGE
    two.resume()
    check([*held, last])
    del more


def test_the_option_is_the_default_of_pauses(make: Make) -> None:
    with pytest.raises(memsaver.ConfigError, match="expected True, False or 'copy'"):
        memsaver.configure(lazy="copies")
    memsaver.configure(lazy=True)
    region, other = make("host"), make("host")
    held = [Block(each, CHUNK, 1) for each in (region, other)]
    memsaver.pause([region, other], lazy={other.tag: False})
    assert (region.offered_bytes, other.offered_bytes) == (CHUNK, 0)
    region.pause(lazy=False)
    assert (region.offered_bytes, region.backup_bytes) == (0, CHUNK)
    memsaver.resume([region, other])
    memsaver.define_phase("lazy", region)
    memsaver.define_phase("lazy other", other)
    with memsaver.phase("lazy"):
        assert other.offered_bytes == CHUNK
    other.resume()
    memsaver.configure(lazy="copy")
    other.pause()
    wait_for_copies(other, CHUNK)
    assert other.offered_bytes == CHUNK
    other.resume()
    memsaver.configure(lazy=False)
    check(held)
    region.pause()
    assert region.offered_bytes == 0
    region.resume()


def test_contents_that_are_not_kept_are_given_without_a_copy(make: Make) -> None:
    for backup, options in (("none", {}), ("host", {"frozen": True})):
        region, held = lazily(make, backup, **options)
        region.resume()
        region.pause()  # a frozen region has its copy from here on
        region.resume()
        region.pause(lazy=True)
        used = host_used_bytes()
        controls.disarm()
        with Fill(leave=0):
            controls.arm(1, "error", "cuMemcpyDtoHAsync")
            make("none").empty(CHUNK, torch.uint8)
            assert controls.calls() == 0
            controls.disarm()
        assert (host_used_bytes(), region.offered_bytes) == (used, 3 * CHUNK)
        del held


@pytest.mark.parametrize(("backup", "taken"), [("none", 2), ("host", 1)])
def test_a_small_demand_takes_a_share_of_what_needs_no_copy(make: Make, backup: str, taken: int) -> None:
    """A program that allocates step by step does not wait in each step. Large chunks stay."""
    region, large = make(backup), make(backup)
    held = [region.empty(MIB, torch.uint8) for _ in range(64)], sparse_blocks(large, 1)
    memsaver.pause([region, large], lazy=True)
    before = region.offered_bytes
    with Fill(leave=0):
        one = blocks(make("none"), [MIB])
        assert (before - region.offered_bytes, large.offered_bytes) == (taken * PAGE, LARGE)
    memsaver.resume([region, large])
    del held, one


@pytest.mark.parametrize("fill", ["zero", "poison"])
def test_a_failed_resume_that_discards_has_not_written_to_offered_contents(make: Make, fill: str) -> None:
    region, held = lazily(make, "host", chunks=1, fill=fill)
    other, _ = lazily(make, "host", chunks=1)
    other.pause()
    failures = 0
    for error in Sweep("error", lambda: memsaver.resume([region, other], restore=False)):
        if region.state == "paused":
            failures += 1
            region.resume()
            check(held)
        else:
            assert error is not None  # of the fill, after the resume
            held[0].fill(failures)
        memsaver.pause([region, other], lazy={region.tag: True})
    assert failures > 3
    assert set(held[0].tensor[:100].tolist()) == {0 if fill == "zero" else 0xFF}


def test_a_resume_that_waits_leaves_its_offers_to_others(make: Make, threads: ThreadPoolExecutor) -> None:
    one, held = lazily(make)
    two, more = lazily(make, chunks=2)
    two.pause()
    with Fill(leave=0) as fill:
        blocks(make("none"), [2 * CHUNK])  # freed at once: idle memory
        one_half = blocks(make("none"), [2 * CHUNK])
        assert one.offered_bytes == 2 * CHUNK
        waits = threads.submit(lambda: one.resume(memory_timeout=60))
        until(lambda: one.state == "resuming")
        two.resume(memory_timeout=20)  # for a moment the other one may have a chunk
        check(more)
        assert (one.state, one.offered_bytes) == ("resuming", 0)
        fill.close()
        waits.result(60)
    check(held)
    del one_half


def test_an_interrupt_of_an_eviction_loses_nothing(make: Make, threads: ThreadPoolExecutor) -> None:
    region, held = lazily(make)
    other, more = lazily(make, chunks=2)
    other.pause()

    def interrupt() -> None:
        until(lambda: controls.stopped("cuMemcpyDtoHAsync"))
        os.kill(os.getpid(), signal.SIGINT)
        controls.go_on("cuMemcpyDtoHAsync")

    with Fill(leave=0), controls.held("cuMemcpyDtoHAsync"):
        done = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            other.resume()
        done.result(60)
        assert (region.state, other.state, region.offered_bytes) == ("paused", "paused", 2 * CHUNK)
    memsaver.resume([region, other])
    check(held + more)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_pause_after_a_resume_that_could_not_be_undone_copies_the_contents(make: Make, lazy: bool) -> None:
    region, held = lazily(make)
    controls.fail("cuMemSetAccess", 1)
    controls.fail("cuMemUnmap", 1)
    with pytest.raises(memsaver.DriverError):
        region.resume()
    assert region.mapped_bytes == 4 * CHUNK  # without access
    region.pause(lazy=lazy)
    assert (region.mapped_bytes, controls.context_lost()) == (0, False)
    region.resume()
    check(held)


@pytest.mark.parametrize("way", ["allocation", "pause", "read"])
def test_a_demand_waits_for_the_eviction_of_another_one(make: Make, threads: ThreadPoolExecutor, way: str) -> None:
    region, held = lazily(make, chunks=1, size=LARGE)
    one, two = make("none"), make("none")
    begin: dict[str, Callable[[], object]] = {
        "allocation": lambda: one.empty(LARGE // 2, torch.uint8),
        "pause": region.pause,
        "read": lambda: memsaver.cpu_backup(held[0].tensor, clone=True),
    }
    with Fill(leave=0):
        with controls.held("cuMemcpyDtoHAsync"):
            first = threads.submit(begin[way])
            until(lambda: controls.stopped("cuMemcpyDtoHAsync"))
            with ThreadPoolExecutor(1) as pool:
                second = pool.submit(lambda: two.empty(LARGE // 2, torch.uint8))
                with pytest.raises(TimeoutError):
                    second.result(1.2)  # an allocation waits for a second for what comes back from other threads
                controls.go_on("cuMemcpyDtoHAsync")
                kept = first.result(60), second.result(60)
        del kept, first, second
    region.resume()
    check(held)


def test_an_allocation_with_the_gil_does_not_wait_for_a_pause_that_needs_it() -> None:
    """The pause copies offered chunks, looks for signals between its batches, and has the lock of evictions then.

    An allocation with torch's mutex is the same: another thread may have the GIL, and wait for this mutex.
    """
    source = """
        import ctypes, faulthandler, threading
        import memsaver
        from tests import controls
        from tests.support import MIB, Fill, blocks, check, until
        faulthandler.dump_traceback_later(30, exit=True)
        region, other = (memsaver.region(tag, device="cpu", backup="host") for tag in "ab")
        held = blocks(region, [64 * MIB] * 3)
        allocate = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        with_gil = allocate(other._core.entry_points()[0])
        region.pause(lazy=True)
        with Fill():
            controls.copies_delay(0.2)
            thread = threading.Thread(target=region.pause)
            thread.start()
            until(lambda: region.mapped_bytes)
            with_gil(32 * MIB, 0, None)  # may find no memory: torch tries again
            assert with_gil(32 * MIB, 0, None)
            thread.join()
        assert region.offered_bytes == 0
        region.resume()
        check(held)
    """
    run_clean(source, MEMSAVER_HOST_DEVICE="1GiB")


def test_a_failed_copy_keeps_its_host_memory_until_no_copy_is_queued(make: Make, threads: ThreadPoolExecutor) -> None:
    region, held = lazily(make)
    memory = host_used_bytes()
    with Fill(leave=0), controls.held("cuStreamSynchronize"):
        controls.fail("cuEventSynchronize", 999, 2)
        demand = threads.submit(lambda: make("none").empty(4 * CHUNK, torch.uint8))
        until(lambda: controls.stopped("cuStreamSynchronize"))
        assert host_used_bytes() == memory + 4 * CHUNK
        controls.disarm()
        with suppress(memsaver.OutOfMemoryError):
            demand.result(60)
        del demand
    region.resume()
    check(held)


@pytest.mark.parametrize("backup", ["host", "disk"])
def test_a_pause_that_is_not_lazy_copies_the_rest_up_to_its_bound(make: Make, backup: str) -> None:
    """Chunks that were copied remain so, and the next pause copies the others."""
    region, held = lazily(make, backup, size=LARGE)
    free = free_bytes()
    region.pause(lazy=True)
    assert region.offered_bytes == 4 * LARGE
    with Fill(leave=0):
        more = blocks(make("none"), [CHUNK])
        with pytest.raises(memsaver.WaitTimeoutError) as caught:
            region.pause(timeout=0)
        assert caught.value.stage == "backup"
        assert (region.state, region.mapped_bytes, region.offered_bytes) == ("paused", 0, LARGE)  # after one batch
        done = region.pause()
        assert (done.paused, done.released_bytes) == ((), LARGE)
        assert done.copied_bytes == MIB or backup == "disk"  # where the first one wrote more than it gave
        del more
    assert (region.offered_bytes, region.backup_bytes, free_bytes()) == (0, 4 * MIB, free + 4 * LARGE)
    region.resume()
    check(held)


def test_a_shortage_of_host_memory_keeps_the_other_chunks(make: Make) -> None:
    make()  # opens the device
    drop_backups()  # idle memory beside them would take contents
    region, held = lazily(make, size=LARGE)
    memsaver.configure(host_limit=host_used_bytes() + 2 * MIB)
    paused = time.monotonic()
    time.sleep(0.05)
    with Fill(leave=0):
        more = make("none").empty(LARGE, torch.uint8)
        elapsed = time.monotonic() - paused
        [row] = [each for each in memsaver.stats().devices["cpu"].regions if each.tag == region.tag]
        assert region.backup_bytes == MIB and row.paused_s > elapsed - 0.01
        for late in (make("none"), make("none")):
            with pytest.raises(memsaver.OutOfMemoryError, match="cannot be copied: .*host_limit is") as raised:
                late.empty(3 * LARGE, torch.uint8)
            [(pid, _, offered, why)] = raised.value.unused
            assert (pid, offered, why[:13]) == (os.getpid(), 2 * LARGE, "offers chunks")
        assert (region.backup_bytes, region.offered_bytes) == (2 * MIB, 2 * LARGE)
        with pytest.raises(memsaver.BackupError):
            region.pause()
        assert region.offered_bytes == 2 * LARGE
        del more
    region.resume()
    check(held)


def test_offers_are_tried_again_when_a_capture_ends(make: Make, threads: ThreadPoolExecutor) -> None:
    region, held = lazily(make)
    other, more = lazily(make, chunks=1)
    other.pause()
    with Fill(leave=0):
        _core.capture_begins()
        waits = threads.submit(lambda: other.resume(memory_timeout=60))
        with pytest.raises(TimeoutError):
            waits.result(0.2)
        with pytest.raises(memsaver.Error, match="captured"):
            memsaver.cpu_backup(held[0].tensor, clone=True)
        assert region.offered_bytes == 4 * CHUNK
        _core.capture_ends()
        waits.result(60)
    region.resume()
    check(held + more)


@pytest.mark.parametrize("backup", ["host", "disk"])
def test_contents_of_an_offered_region_can_be_read_and_written(make: Make, backup: str) -> None:
    region, held = lazily(make, backup)
    for block in held[:2]:
        found = memsaver.cpu_backup(block.tensor, clone=True)
        assert np.array_equal(found.numpy(), block.expected)
    assert (region.backup_bytes, region.offered_bytes) == (2 * CHUNK, 2 * CHUNK)
    if backup == "host":
        for block in held[1:3]:
            memsaver.cpu_backup(block.tensor)[:5] = 9  # also of a chunk that was offered
            block.expected = block.expected.copy()
            block.expected[:5] = 9
    region.resume()
    check(held)


# Copies ahead of a demand: lazy="copy". A batch of them has 128 MiB.


def ahead(make: Make, backup: str = "host", chunks: int = 8) -> tuple[memsaver.Region, list[Block]]:
    """A region whose contents are copied ahead of a demand, in batches of four chunks."""
    region = make(backup)
    held = sparse_blocks(region, chunks)
    region.pause(lazy="copy")
    return region, held


def wait_for_copies(region: memsaver.Region, nbytes: int = 8 * MIB) -> None:
    """Until so many bytes have been copied, and no chunk is mapped."""
    until(lambda: (region.backup_bytes, region.mapped_bytes) == (nbytes, 0), within_s=20.0)


def copied_out() -> float:
    """Bytes of all copies out of this process."""
    return _results.totals().get(("copies_bytes", "out"), 0.0)


def test_a_demand_copies_nothing_that_was_copied_ahead(make: Make) -> None:
    on_disk, written = ahead(make, "disk", chunks=4)  # for which nothing is copied ahead
    region, held = ahead(make)
    offered = 8 * LARGE
    for turn in range(2):
        wait_for_copies(region)
        assert (region.state, region.offered_bytes) == ("paused", offered)
        with pytest.raises(memsaver.RegionPausedError):
            region.empty(1)
        copies = controls.count("cuMemcpyDtoHAsync")
        with Fill(leave=0):
            make("none").empty(3 * LARGE, torch.uint8)
            assert region.offered_bytes == offered - 3 * LARGE  # chunks that were copied come first
            assert (on_disk.backup_bytes, on_disk.offered_bytes) == (0, 4 * LARGE)
        assert controls.count("cuMemcpyDtoHAsync") == copies
        assert region.resume().copied_bytes == 3 * MIB
        check(held)
        held[0].fill(turn + 50)
        offered = region.mapped_bytes  # the chunks that came back may be smaller
        region.pause(lazy="copy")
    wait_for_copies(region)
    assert region.resume().copied_bytes == 0
    on_disk.resume()
    check(held + written)


@pytest.fixture
def copies_in(make: Make, threads: ThreadPoolExecutor) -> Iterator[Callable[[], memsaver.Region]]:
    """Begins a resume whose copy in is held. Twice at most."""
    regions = [make("host"), make("host")]
    held = [Block(each, CHUNK, seed) for seed, each in enumerate(regions)]  # alive as long as the fixture
    memsaver.pause(regions)

    def begin() -> memsaver.Region:
        region = regions.pop()
        threads.submit(region.resume)
        until(lambda: controls.stopped("cuMemcpyHtoDAsync"))
        return region

    yield begin
    memsaver.resume(regions)
    check(held)


def test_copies_ahead_wait_for_other_copies_and_stop_for_them(
    make: Make, copies_in: Callable[[], memsaver.Region]
) -> None:
    region = make("host")
    held = sparse_blocks(region, 12)
    with controls.held("cuMemcpyHtoDAsync"):
        copies_in()
        copies = controls.count("cuMemcpyDtoHAsync")
        region.pause(lazy="copy")
        time.sleep(0.5)
        assert (controls.count("cuMemcpyDtoHAsync"), region.backup_bytes) == (copies, 0)
        controls.hold("cuMemcpyDtoHAsync")
    until(lambda: controls.stopped("cuMemcpyDtoHAsync"))
    with controls.held("cuMemcpyHtoDAsync"):
        copies_in()
        controls.go_on("cuMemcpyDtoHAsync")
        wait_for_copies(region, 4 * MIB)  # the batch that had begun
        time.sleep(0.5)
        assert region.backup_bytes == 4 * MIB
    wait_for_copies(region, 12 * MIB)
    region.resume()
    check(held)


def test_copies_ahead_wait_for_a_transition_of_the_region(make: Make, copies_in: Callable[[], memsaver.Region]) -> None:
    region = make("host")
    held = blocks(region, [CHUNK])
    with controls.held("cuMemcpyHtoDAsync"):
        other = copies_in()
        region.pause(lazy="copy")
        prepared = prepare_pause(region.tag, lazy="copy")
    until(lambda: other.state == "active")
    time.sleep(0.1)
    assert region.backup_bytes == 0
    prepared.abort()
    wait_for_copies(region, CHUNK)
    region.resume()
    check(held)


@pytest.mark.parametrize("way", ["allocation", "resume", "pause", "read"])
def test_copies_ahead_stop_for_a_demand(make: Make, threads: ThreadPoolExecutor, way: str) -> None:
    begin: dict[str, Callable[[], object]] = {
        "allocation": lambda: make("none").empty(LARGE, torch.uint8),
        "resume": lambda: region.resume(),
        "pause": lambda: region.pause(),
        "read": lambda: memsaver.cpu_backup(held[9].tensor, clone=True),
    }
    before = copied_out()
    with controls.held("cuMemcpyDtoHAsync"):
        region, held = ahead(make, chunks=12)
        until(lambda: controls.stopped("cuMemcpyDtoHAsync"))
        with Fill(leave=0) if way == "allocation" else nullcontext():
            demand = threads.submit(begin[way])
            with pytest.raises(TimeoutError):
                demand.result(0.1)
            if way == "allocation":  # the next batch stops: no demand may wait for it
                controls.hold("cuMemcpyDtoHAsync", after=4)
            else:
                controls.go_on("cuMemcpyDtoHAsync")
            found = demand.result(10)
    if way == "resume":  # after the batch that had begun
        until(lambda: copied_out() > before)
        assert (found.copied_bytes, copied_out() - before) == (0, 4 * MIB)  # type: ignore[attr-defined]
    elif way == "pause":
        assert found.copied_bytes == 8 * MIB  # type: ignore[attr-defined]
    elif way == "allocation":
        until(lambda: region.offered_bytes == 11 * LARGE)
    region.resume()
    check(held)


def test_a_close_waits_for_a_copy_ahead(make: Make, threads: ThreadPoolExecutor) -> None:
    with controls.held("cuMemcpyDtoHAsync"):
        region, held = ahead(make)
        until(lambda: controls.stopped("cuMemcpyDtoHAsync"))
        with pytest.raises(memsaver.Error, match="allocated"):
            closes = threads.submit(region.close)
            with suppress(TimeoutError):
                closes.result(0.1)
            controls.go_on("cuMemcpyDtoHAsync")
            closes.result(60)
        wait_for_copies(region)  # a close that fails does not end them
        region.resume()
        held[0].fill(1)
        controls.hold("cuMemcpyDtoHAsync")
        region.pause(lazy="copy")
        until(lambda: controls.stopped("cuMemcpyDtoHAsync"))
        held.clear()
        closes = threads.submit(region.close)
        with pytest.raises(TimeoutError):
            closes.result(0.1)
        controls.go_on("cuMemcpyDtoHAsync")
        closes.result(60)


def test_copies_ahead_end_without_host_memory_and_chunks_stay_offered(make: Make) -> None:
    make()  # opens the device
    drop_backups()  # idle memory beside them would take contents
    memsaver.configure(host_limit=host_used_bytes() + 5 * MIB)
    maps = controls.count("cuMemMap")
    region, held = ahead(make)
    maps += 8  # of the blocks
    until(lambda: controls.count("cuMemMap") >= maps + 8)  # of two batches
    wait_for_copies(region, 4 * MIB)
    memsaver.configure(host_limit=None)
    time.sleep(0.1)
    assert (region.state, region.offered_bytes, region.backup_bytes) == ("paused", 8 * LARGE, 4 * MIB)
    with Fill(leave=0):
        make("none").empty(6 * LARGE, torch.uint8)
        assert (region.offered_bytes, region.backup_bytes) == (2 * LARGE, 6 * MIB)
    region.resume()
    check(held)


@pytest.mark.parametrize(
    "call",
    ["cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize"],
)
def test_a_call_that_fails_in_a_copy_ahead_loses_nothing(make: Make, call: str) -> None:
    region, held = ahead(make)
    wait_for_copies(region)
    region.resume()
    for nth in (1, 2):
        for kind in ("error", "after"):
            region.pause(lazy=True)
            controls.arm(nth, kind, call)
            region.pause(lazy="copy")
            until(lambda: controls.calls() >= nth)  # noqa: B023
            until(lambda: (region.state, region.mapped_bytes, region.offered_bytes) == ("paused", 0, 8 * LARGE))
            controls.disarm()
            region.resume()
            check(held)


def test_contents_are_whole_after_random_turns_with_copies_ahead(make: Make) -> None:
    choose = random.Random(30)
    sizes = [3 * CHUNK, 5 * MIB, CHUNK, 100]
    regions = [make("host"), make("disk"), make("host", one_handle=True)]
    held = {region: list[Block]() for region in regions}
    for region, of_region in held.items():
        of_region += blocks(region, sizes)
    other = make("none")
    done = 0
    for turn in range(80):
        region = choose.choice(list(held))
        how = choose.choice(("resume", "switch", "again", "read", "write", "free", "demand", "demand"))
        if len(held[region]) < 2:
            region.resume()
            held[region] += blocks(region, sizes, turn)
        block = choose.choice(held[region])
        if region.state == "active":
            block.fill(turn)
            region.pause(lazy=choose.choice(LAZY))
        elif how == "resume":
            region.resume()
        elif how == "switch":
            out = [each.tag for each in held if each.state == "active"]
            memsaver.switch(pause=out, resume=region.tag, lazy="copy" if out else {})
        elif how == "again":
            region.pause(lazy=choose.choice(LAZY))
        elif how == "read":
            assert np.array_equal(memsaver.cpu_backup(block.tensor, clone=True).numpy(), block.expected)
        elif how == "write" and held[region][0].region.backup == "host":
            with suppress(memsaver.BackupError):  # it was copied in several parts
                memsaver.cpu_backup(block.tensor)[:3] = turn
                block.expected = block.expected.copy()
                block.expected[:3] = turn
        elif how == "free":
            del held[region][choose.randrange(len(held[region]))], block
        elif how == "demand":
            with Fill(leave=choose.choice((0, CHUNK, 20 * MIB))), suppress(memsaver.OutOfMemoryError, RuntimeError):
                blocks(other, [choose.choice((PAGE, CHUNK, 3 * CHUNK))])
                done += 1
        if region.state == "active":
            check(held[region])
    memsaver.resume(list(held))
    for of_region in held.values():
        check(of_region)
    assert done > 5 and not controls.context_lost()
