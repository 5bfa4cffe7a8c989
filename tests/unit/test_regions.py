"""Regions: constant addresses, adjacent segments, and the chunks under them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import memsaver
from memsaver import _core
from tests import controls
from tests.support import (
    KIB,
    MIB,
    PAGE,
    Block,
    Fill,
    Hooks,
    Make,
    blocks,
    check,
    descriptors,
    free_bytes,
    host_used_bytes,
    run_clean,
    thread_inside,
    uint8,
    until,
)


def test_thousands_of_small_tensors_share_few_chunks(make: Make, tmp_path: Path) -> None:
    """And move as one: their contents are few pieces of host memory, or few blocks of a file."""
    memsaver.configure(disk_dir=tmp_path)
    region = make("host")
    held = [region.empty(16 * KIB // 4).fill_(number) for number in range(2000)]
    assert region.allocated_bytes == 2000 * 16 * KIB
    assert len(region._core.chunks) <= 20
    assert region.mapped_bytes <= 2 * region.allocated_bytes + PAGE
    for backup, most in (("host", 60), ("disk", 100), ("none", 60)):
        for move in (lambda: region.pause(backup=backup), region.resume):  # noqa: B023
            controls.disarm()
            move()
            assert controls.calls() <= most, controls.calls()
        assert len(region._core.chunks) <= 4
        assert backup == "none" or all(tensor[-1] == number for number, tensor in enumerate(held))


# The pool that the process retains


def test_retained_chunks_serve_the_next_region_and_are_given_up_before_an_allocation_fails(make: Make) -> None:
    memsaver.configure(retain="64MiB")
    one, two = make(), make()
    held = blocks(one, [32 * MIB]) + blocks(two, [32 * MIB])
    two.pause()
    memsaver.configure(retain=0)
    memsaver.configure(retain="64MiB")
    before = free_bytes()
    one.pause()
    assert (retained(), free_bytes()) == (32 * MIB, before)  # kept from others
    controls.disarm()
    two.resume()
    assert controls.calls() == len(two._core.chunks) + 1  # map each, allow: none created
    assert (retained(), free_bytes()) == (0, before)
    two.pause()
    with Fill():
        taker = make()
        Block(taker, 3 * PAGE).check()
        until(lambda: (retained() + free_bytes(), taker.mapped_bytes) == (32 * MIB, 0))
    memsaver.configure(retain="4MiB")
    assert retained() <= 4 * MIB
    del held


# Frozen regions: one copy of contents that never change serves every pause. See also test_machines.py


def test_later_pauses_of_a_frozen_region_only_wait_and_unmap_and_it_takes_no_allocations(make: Make) -> None:
    region = make("host", frozen=True)
    held = blocks(region, [3 * MIB, 9 * MIB])
    hooks = Hooks(region)
    region.pause()
    region.resume()
    chunks, used = len(region._core.chunks), host_used_bytes()
    memsaver.configure(host_limit=0)
    controls.disarm()
    region.pause()
    assert controls.calls() <= 2 + chunks  # wait, unmap, and a release each
    region.resume()
    uses: list[Callable[[], object]] = [
        lambda: region.empty(1), region.__enter__, lambda: region._core.allocate_array(1),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(memsaver.Error, match=f"{region.tag}.*thaw") as caught:
            use()
        assert not isinstance(caught.value, memsaver.RegionPausedError)
    assert hooks.alloc(PAGE) is None
    torch.empty(3)  # no thread is inside any region
    assert (region.allocated_bytes, host_used_bytes()) == (12 * MIB, used)
    del held[1]  # tensors can be freed
    assert (region.pause().copied_bytes, region.resume().copied_bytes) == (0, 3 * MIB)
    held[0].check()


# Trim


@pytest.mark.parametrize("backup", ["none", "host"])
def test_trim_and_a_resume_return_what_no_tensor_uses(make: Make, backup: str) -> None:
    region = make(backup)
    held = [Block(region, 3 * MIB), Block(region, 3 * MIB)]
    gaps = [region._core.allocate_array(3 * MIB) for _ in range(100)]
    held.append(Block(region, 3 * MIB))
    region.pause(backup="none"), region.resume()  # lays the chunks out anew: 256 MiB where there is room
    assert max(region._core.chunks) == 256 * MIB
    held[0].fill(5)
    stream = controls.stream_create()
    controls.stream_touch(stream, held[-1].address, 4)
    del gaps, held[1:]
    controls.arm(1, call="cuMemUnmap")  # a chunk that stays mapped without a segment
    with pytest.raises(memsaver.WaitTimeoutError):
        memsaver.trim(region.tag, timeout=0.05)
    controls.stream_release(stream)
    for _ in range(2):
        memsaver.trim(region.tag)
    assert region._core.chunks == [256 * MIB]  # a chunk with a segment stays
    region.pause(backup="host"), region.resume()
    assert region.mapped_bytes <= region.allocated_bytes * 1.05 + 48 * MIB
    check(held)
    held.clear()
    memsaver.trim(region.tag)
    assert region.mapped_bytes == 0


# The end of a region


@pytest.mark.parametrize("state", ["active", "paused"])
def test_the_tag_of_a_closed_region_makes_a_new_region(make: Make, state: str) -> None:
    before, used, files = free_bytes(), host_used_bytes(), descriptors()
    region = make("host")
    held = blocks(region, [5 * MIB, 100])
    tag, address = region.tag, held[0].address
    for each, change in (("active", region.pause), ("paused", region.resume)):
        with pytest.raises(memsaver.Error, match=str(region.allocated_bytes)):
            region.close()
        assert make("host", tag) is region and region.state == each  # its tensors live
        change()
    check(held)
    if state == "paused":
        region.pause()
    held.clear()
    region.close()
    assert (free_bytes(), host_used_bytes()) == (before, used)
    assert tag not in {row.tag for row in memsaver.stats().devices["cpu"].regions}
    assert memsaver.regions.owning(address) is None
    region.close()  # once more is nothing
    assert (repr(region), region.backup) == (f"<memsaver.Region {tag!r} on cpu, backup='host', closed>", "host")
    uses: list[Callable[[], object]] = [
        region.pause, region.resume, region.thaw, region.__enter__, lambda: region.empty(3), lambda: region.empty(0),
        lambda: region.owns(1), lambda: region.pool, lambda: region.state, lambda: region.residence,
        lambda: region.allocated_bytes, lambda: region.mapped_bytes, lambda: region.backup_bytes,
        lambda: _core.acquire([region._core]),  # of a guarded graph
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(memsaver.Error, match=f"^region {tag!r} was closed$"):
            use()
    with pytest.raises(ValueError, match=f"there is no region {tag!r}"):
        memsaver.pause(tag)
    for _ in range(1000):  # they leave nothing
        make("none", tag).close()
    other = make("host", tag)
    assert other is not region and (other.state, other.allocated_bytes) == ("active", 0)
    block = Block(other, 3 * MIB)
    other.pause()
    other.resume()
    block.check()
    del block
    other.close()
    assert (free_bytes(), descriptors()) == (before, files)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_region_is_not_copied(make: Make, made: Callable[[object], object]) -> None:
    """``memsaver.pause(copy)`` moved nothing, without an error."""
    region = make()
    with pytest.raises(TypeError, match=f"region {region.tag!r} is neither copied nor pickled, expected its tag"):
        made(region)


def test_a_region_in_use_is_not_closed(make: Make) -> None:
    region = make("host")
    region.pause()
    region.resume()

    def is_refused() -> None:
        with pytest.raises(memsaver.Error, match=repr(region.tag)):
            region.close()
        assert memsaver.region(region.tag, device="cpu", backup="host") is region

    prepared = memsaver.transitions.prepare_pause(region.tag)
    is_refused()
    prepared.abort()
    assert _core.acquire([region._core]) is None
    is_refused()
    _core.release([region._core])
    with region:
        is_refused()
    with thread_inside(region) as ident:
        with pytest.raises(memsaver.Error, match=f"cannot be closed: thread {ident} .* is inside it"):
            region.close()
        is_refused()
    region.close()


def test_a_bound_ends_the_wait_of_a_close_and_other_regions_are_made_meanwhile(make: Make) -> None:
    region = make("host")
    block = Block(region, MIB)
    stream = controls.stream_create()
    reading = controls.stream_read(stream, block.address, 4)  # until its stream is released
    del block.tensor
    try:
        with pytest.raises(memsaver.WaitTimeoutError, match="stage 'device'"):
            region.close(timeout=0.05)
        assert memsaver.region(region.tag, device="cpu", backup="host") is region
        with ThreadPoolExecutor(1) as threads:
            closed = threads.submit(region.close)
            with pytest.raises(TimeoutError):
                closed.result(0.1)
            make("host")  # does not wait
            assert not closed.done() and reading.bytes() is None
            controls.stream_release(stream)
            closed.result(60)
    finally:
        controls.stream_release(stream)
    assert memsaver.region(region.tag, device="cpu", backup="host") is not region
    with pytest.raises(TypeError, match="timeout is 'soon'"):
        make().close(timeout="soon")  # type: ignore[arg-type]


def test_regions_are_made_and_closed_by_several_threads(tag: str) -> None:
    def work() -> int:
        count = 0
        for _ in range(200):
            region = memsaver.region(tag, device="cpu")
            try:
                region.empty(1000, uint8()).fill_(1)
                region.close()
                count += 1
            except memsaver.Error:  # another thread has closed it, or has a tensor in it
                pass
        return count

    with ThreadPoolExecutor(4) as threads:
        assert sum(each.result() for each in [threads.submit(work) for _ in range(4)]) > 0
    region = memsaver.region(tag, device="cpu")
    assert region.allocated_bytes == 0
    region.close()


def retained() -> int:
    return int(memsaver.stats().devices["cpu"].retained_bytes)


def test_the_largest_chunks_serve_one_segment_alone() -> None:
    """They are made for regions without contents. All regions take them."""
    said = run_clean(
        """
        import memsaver
        memsaver.configure(retain="8GiB")
        MIB = 1 << 20
        kv = memsaver.region("kv", device="cpu")
        weights = memsaver.region("weights", device="cpu", backup="host")
        kv_array, weights_array = kv._core.allocate_array(2560 * MIB), weights._core.allocate_array(1280 * MIB)
        print(*(size // MIB for size in kv._core.chunks))
        print(*(size // MIB for size in weights._core.chunks))
        weights.pause(backup="none")
        memsaver.switch(pause="kv", resume="weights", restore=False)
        print(*(size // MIB for size in weights._core.chunks))
        weights.pause(backup="none")
        del kv_array, weights_array
        memsaver.configure(retain=0)
        region = memsaver.region("a", device="cpu")
        held = [region._core.allocate_array(24 * MIB) for _ in range(100)]
        region.pause(); region.resume()
        assert max(region._core.chunks) == 256 * MIB, region._core.chunks
        whole = region._core.allocate_array(3 << 30)  # beside others, one of 1 GiB has no room for such a chunk
        region.pause(); region.resume()
        assert max(region._core.chunks) == 1 << 30
        del whole
        assert region.mapped_bytes <= 2400 * MIB * 1.05 + 48 * MIB  # those chunks went with their segment
        """,
        MEMSAVER_HOST_DEVICE="8GiB",
    )
    assert said.splitlines() == ["1024 1024 256 256", "256 256 256 256 256", "1024 256"]
