"""Pause, resume and switch: contents, refusals, and waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import memsaver
from memsaver import _core
from tests import controls
from tests.support import (
    MIB,
    PAGE,
    Block,
    Fill,
    Make,
    blocks,
    check,
    descriptors,
    free_bytes,
    host_held_bytes,
    host_used_bytes,
    segments,
    until,
)

# Memory and contents of a pause and a resume


def test_a_transition_returns_after_its_copies_end(make: Make) -> None:
    region = make("host")
    held = blocks(region, [MIB, 100, 66 * MIB])
    controls.virtual_clock(True)
    controls.copies_delay(1.0)
    for seed in range(2):
        region.pause()
        region.resume()
        for block in held:
            block.check()
            block.fill(seed)
    assert not controls.context_lost()


# Switch


def test_a_switch_hands_chunks_from_region_to_region(make: Make) -> None:
    out, back = make("none"), make("none")
    held = blocks(out, [64 * MIB]) + blocks(back, [64 * MIB])
    back.pause()
    for use in (lambda: back.empty(10), lambda: back.empty(0), back.__enter__):
        with pytest.raises(memsaver.RegionPausedError, match=repr(back.tag)) as caught:
            use()
        assert (caught.value.tag, caught.value.state) == (back.tag, "paused")
    sizes = out._core.chunks
    before, files = free_bytes(), descriptors()
    controls.disarm()
    done = memsaver.switch(pause=out.tag, resume=[back.tag])
    # Wait, unmap, map each, and allow: none is created or released.
    assert controls.calls() == len(sizes) + 3
    assert (done.paused, done.resumed) == ((out.tag,), (back.tag,))
    assert (done.released_bytes, done.restored_bytes) == (64 * MIB, 64 * MIB)
    assert sorted(back._core.chunks) == sorted(sizes)
    assert (free_bytes(), descriptors()) == (before, files)
    del held
    # On a full device the large chunk goes to the large region.
    small, big = make(), make()
    incoming = [small._core.allocate_array(2 * MIB), big._core.allocate_array(256 * MIB)]
    memsaver.pause([small.tag, big.tag])
    out.resume()
    outgoing = out._core.allocate_array(288 * MIB)
    with Fill():
        memsaver.switch(pause=[out.tag], resume=[small.tag, big.tag])
        assert (small._core.chunks, big._core.chunks) == ([32 * MIB], [256 * MIB])
    del incoming, outgoing


def test_a_resume_does_not_wait_while_its_exact_layout_fits(make: Make) -> None:
    region = make("host")
    held = blocks(region, [34 * MIB])
    assert region.mapped_bytes == 64 * MIB  # large chunks where there is memory
    region.pause()
    controls.virtual_clock(True)
    before = controls.clock_now()
    with Fill(leave=34 * MIB):
        region.resume(memory_timeout=60)
    assert (controls.clock_now() < before + 1, region.mapped_bytes) == (True, 34 * MIB)
    check(held)


def test_the_handle_of_a_segment_goes_to_no_other_region(make: Make) -> None:
    """Libraries that have registered it may still write to its memory."""

    def handle_of(block: Block) -> int:
        core = block.region._core
        [(_, _, handle)] = _core.lend(core, (block.address, block.nbytes), core.residence, 1, os.getpid())
        _core.end_lease(core, 1)
        return int(handle)

    whole, other, back = make("host", one_handle=True), make("host"), make("host")
    held = [Block(region, 32 * MIB, seed) for seed, region in enumerate((whole, other, back))]
    back.pause()
    handle = handle_of(held[1])
    done = memsaver.switch(pause=[whole, other], resume=[back])
    assert (handle_of(held[2]), done.released_bytes) == (handle, 64 * MIB)
    held[2].check()
    memsaver.resume([whole, other])
    check(held)


# Out of memory, and waiting for it


def test_a_switch_that_fails_has_given_its_chunks_back_when_it_raises(make: Make) -> None:
    out, back = make("host"), make("host")
    held = blocks(back, [10 * MIB])
    back.pause()
    held += blocks(out, [host_held_bytes() - host_used_bytes() + 5 * MIB])  # more than the idle bytes
    free = free_bytes()
    controls.arm(1, "error", "cuMemHostRegister")
    with pytest.raises(memsaver.BackupError) as caught:
        memsaver.switch(pause=out.tag, resume=back.tag)
    assert caught.tb is not None  # whose frames know the transition
    assert (out.state, back.state, free_bytes()) == ("active", "paused", free)
    memsaver.switch(pause=out.tag, resume=back.tag)
    held[0].check()
    memsaver.switch(pause=back.tag, resume=out.tag)
    held[1].check()


def test_a_resume_without_memory_names_everything_and_can_be_retried(make: Make) -> None:
    region, other = make("host"), make()
    held = blocks(region, [5 * MIB, 40 * MIB]) + blocks(other, [7 * MIB])
    region.pause()
    used = host_used_bytes()
    with Fill(leave=3 * PAGE):
        for _ in range(3):
            with pytest.raises(memsaver.OutOfMemoryError) as caught:
                memsaver.resume(region.tag)
            error = caught.value
            assert (error.device, error.needed_bytes, error.free_bytes) == ("cpu", 46 * MIB, 3 * PAGE)
            rows = {row["label"]: row["bytes"] for row in error.ledger if row["kind"] == "region"}
            assert region.tag not in rows and rows[other.tag] == other.mapped_bytes > 0
            for part in (str(46 * MIB), str(3 * PAGE), other.tag):
                assert part in str(error)
            assert (region.state, region.mapped_bytes, free_bytes()) == ("paused", 0, 3 * PAGE)
            assert host_used_bytes() == used
    region.resume()
    check(held)


def test_the_option_bounds_waits_of_allocations_and_of_resumes_without_a_bound(
    make: Make, threads: ThreadPoolExecutor
) -> None:
    region, other = make("host"), make("none")
    held = blocks(region, [40 * MIB])
    region.pause()
    size = 48 * MIB
    with Fill(leave=PAGE):
        memsaver.configure(memory_timeout=0.05)
        for take in (region.resume, partial(other._core.allocate_array, size)):
            with pytest.raises(memsaver.OutOfMemoryError) as caught:
                take()
            assert caught.value.waited_s >= 0.05
        with pytest.raises(memsaver.OutOfMemoryError) as caught:
            region.resume(memory_timeout=0)
        assert caught.value.waited_s == 0
    memsaver.configure(memory_timeout=60)
    fill, looks = Fill(leave=PAGE), controls.count("cuMemGetInfo")
    taken = threads.submit(other._core.allocate_array, size)
    until(lambda: controls.count("cuMemGetInfo") > looks)
    assert not taken.done()
    fill.close()
    held_by_other = taken.result()
    assert other.allocated_bytes == size
    fill = Fill(leave=PAGE)
    resumed = threads.submit(region.resume)
    until(lambda: region.state == "resuming")
    fill.close()
    resumed.result()
    held[0].check()
    del held_by_other


@pytest.mark.parametrize("end", ["pause", "interrupt"])
def test_an_allocation_that_waits_for_memory_ends_with_a_pause_and_on_an_interrupt(
    make: Make, threads: ThreadPoolExecutor, end: str
) -> None:
    region = make("none")
    memsaver.configure(memory_timeout=60)
    with Fill(leave=PAGE) as fill:
        looks = controls.count("cuMemGetInfo")
        if end == "interrupt":
            threads.submit(until, lambda: controls.count("cuMemGetInfo") > looks).add_done_callback(
                lambda _: os.kill(os.getpid(), signal.SIGINT)
            )
            with pytest.raises(KeyboardInterrupt):
                region._core.allocate_array(48 * MIB)
        else:
            taken = threads.submit(region._core.allocate_array, 48 * MIB)
            until(lambda: controls.count("cuMemGetInfo") > looks)
            with pytest.raises(memsaver.Error, match="another thread allocates in it"):
                region.close()
            region.pause()
            fill.close()
            with pytest.raises(memsaver.RegionPausedError):
                taken.result()
    assert free_bytes() > 48 * MIB


def test_the_earliest_bound_ends_the_wait_for_memory(make: Make) -> None:
    region, out = make("host"), make("host")
    held = blocks(region, [40 * MIB]) + blocks(out, [PAGE])
    region.pause()
    with Fill():
        for bounds in ({"timeout": 0.05, "memory_timeout": 60.0}, {"timeout": 60.0, "memory_timeout": 0.05}):
            acts: list[Callable[..., object]] = [
                partial(memsaver.resume, region.tag),
                partial(memsaver.switch, pause=out.tag, resume=region.tag),
            ]
            for act in acts:
                unchanged = "stage 'memory'.*; nothing has changed\n"
                with pytest.raises(memsaver.OutOfMemoryError, match=unchanged) as caught:
                    act(**bounds)
                assert caught.value.stage == "memory"
                # Of the whole call's bound a part has passed when the wait for memory begins.
                least = 0.05 if bounds["memory_timeout"] == 0.05 else 0.0
                assert least <= caught.value.waited_s < 60
                assert (region.state, out.state, free_bytes()) == ("paused", "active", 0)
    region.resume(timeout=0.05)
    check(held)


@pytest.mark.parametrize("stage", ["queue", "launches"])
def test_a_bound_ends_the_wait_for_an_earlier_transition_or_guarded_launches(
    make: Make, threads: ThreadPoolExecutor, stage: str
) -> None:
    region = make("host")
    held = blocks(region, [MIB])
    calls: list[Callable[..., object]] = [region.pause, region.resume]
    if stage == "queue":
        end = memsaver.transitions.prepare_pause(region.tag).abort
    else:
        assert _core.acquire([region._core]) is None
        end, calls[1:] = partial(_core.release, [region._core]), []
    late = [threads.submit(call, timeout=0.05) for call in calls]
    try:
        for each in late:
            with pytest.raises(memsaver.WaitTimeoutError, match=f"stage '{stage}'.*; nothing has changed$") as caught:
                each.result(5)
            assert (caught.value.stage, caught.value.waited_s >= 0.05) == (stage, True)
        assert region.state == ("pausing" if stage == "queue" else "active") and region.mapped_bytes > 0
    finally:
        end()
        wait(late)
        region.resume()
    assert region.pause(timeout=60.0).paused == (region.tag,)
    region.resume()
    held[0].check()


# Several threads


def test_transitions_from_four_threads_keep_all_contents(
    make: Make, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    memsaver.configure(disk_dir=tmp_path)
    regions = [make(backup) for backup in ("host", "disk", "host", "disk")]
    held = [block for seed, region in enumerate(regions) for block in blocks(region, [MIB, 3 * MIB + 512], seed * 10)]
    before = free_bytes() + sum(region.mapped_bytes for region in regions)
    tags = [region.tag for region in regions]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            one, two = (tags[number] for number in rng.permutation(4)[:2])
            match rng.integers(3):
                case 0:
                    memsaver.pause([one, two])
                case 1:
                    memsaver.resume([one, two])
                case 2:
                    memsaver.switch(pause=one, resume=two)

    for done in [threads.submit(work, seed) for seed in range(4)]:
        done.result()
    memsaver.pause(tags)
    assert free_bytes() == before
    memsaver.resume(tags)
    check(held)


# Guarded launches and captures


def test_memory_freed_during_a_pause_is_released_by_it(make: Make, threads: ThreadPoolExecutor) -> None:
    """The pause waits for a guarded launch. No new one begins meanwhile."""
    region = make("host")
    held = blocks(region, [3 * MIB, MIB])
    core = region._core
    assert _core.acquire([core]) is None
    paused = threads.submit(region.pause)
    until(lambda: region.state == "pausing")
    held[1].check()
    assert _core.acquire([core]) is region._core  # no new launch begins
    with pytest.raises(memsaver.RegionPausedError):
        region.empty(1)
    del held[0]
    assert not paused.done()
    _core.release([core])
    assert paused.result().paused == (region.tag,)
    assert region.allocated_bytes == MIB
    region.resume()
    assert (region.allocated_bytes, segments(region)) == (MIB, [(held[0].address, MIB)])
    held[0].check()


def test_a_capture_that_torch_did_not_begin_can_be_announced(make: Make, threads: ThreadPoolExecutor) -> None:
    region, other = make("host"), make()
    held = blocks(region, [MIB, PAGE, PAGE])
    other.pause()
    calls: list[Callable[[], object]] = [
        region.pause,
        partial(memsaver.switch, pause=region.tag, resume=other.tag),
        partial(memsaver.trim, region.tag),
    ]
    with pytest.raises(ZeroDivisionError), memsaver.capturing():
        with memsaver.capturing():
            controls.disarm()
        for act in calls:
            for call in (act, lambda act=act: threads.submit(act).result()):
                with pytest.raises(memsaver.Error, match="captured"):
                    call()
        assert controls.calls() == 0  # a wait would have broken the capture
        assert (region.state, other.state) == ("active", "paused")
        other.resume()  # a resume waits for nothing on the device
        address = held[1].address
        del held[1]
        during = Block(region, PAGE)
        assert during.address != address  # no mark was made, after which the segment could serve again
        raise ZeroDivisionError
    assert not _core.capturing()
    assert Block(region, PAGE).address == address
    other.pause()
    for act in calls:
        act()
    region.resume()
    held[0].check()
