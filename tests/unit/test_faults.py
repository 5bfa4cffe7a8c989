"""Every driver call of a transition fails in turn: contents that a policy keeps stay, and no chunk is lost."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import memsaver
from memsaver import _results
from memsaver.errors import gib
from tests import controls
from tests.support import (
    MIB,
    PAGE,
    Block,
    Fill,
    Hooks,
    Ledger,
    Sweep,
    blocks,
    drop_backups,
    free_bytes,
    host_used_bytes,
    use_device,
)

Make = Callable[..., memsaver.Region]


KINDS = ["error", "memory", "after"]
SIZES = [3 * MIB, 40 * MIB, 5 * MIB, 100, 2 * MIB]  # the second goes: chunks with a gap take more calls


@pytest.fixture
def ledger(make: Make) -> Ledger:
    use_device()  # the device is open, and the arena exists
    drop_backups()
    return Ledger()


@pytest.fixture(params=["0", "1GiB"], ids=["released", "retained"])
def retain(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def with_a_gap(region: memsaver.Region, seed: int = 0) -> list[Block]:
    held = []
    for number, nbytes in enumerate(SIZES):
        held.append(Block(region, nbytes, seed + number))
        if number == 1:
            gap = held.pop()
    del gap
    return held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backup", ["none", "host"])
def test_a_pause_survives_a_failure_of_any_driver_call(
    make: Make, ledger: Ledger, retain: str, backup: str, kind: str
) -> None:
    memsaver.configure(retain=retain)
    region = make(backup)
    held = with_a_gap(region)
    rolled_back = rolled_forward = 0
    mapped, free, used = region.mapped_bytes, free_bytes(), host_used_bytes()
    for error in Sweep(kind, region.pause):
        if region.state == "active":
            rolled_back += 1
            assert isinstance(error, (memsaver.DriverError, memsaver.BackupError))
            assert (region.mapped_bytes, free_bytes(), host_used_bytes()) == (mapped, free, used)
            for block in held:
                block.check()
        else:
            rolled_forward += 1
            assert region.state == "paused"
            assert error is not None or region.mapped_bytes == 0
        region.pause()
        assert (region.state, region.mapped_bytes) == ("paused", 0)
        region.resume()
        for seed, block in enumerate(held):
            if backup == "host":
                block.check()
            else:
                block.fill(seed)
        mapped, free, used = region.mapped_bytes, free_bytes(), host_used_bytes()
        if retain == "0":
            use_device()
            free = free_bytes()
    assert rolled_back >= (4 if backup == "host" else 1)
    assert rolled_forward >= 2
    del held, block
    memsaver.configure(retain=0)
    region.resume()
    ledger.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backup", ["none", "host"])
def test_a_half_paused_region_can_be_resumed_instead(make: Make, ledger: Ledger, backup: str, kind: str) -> None:
    region = make(backup)
    held = with_a_gap(region)
    halves = 0
    for _ in Sweep(kind, region.pause):
        halves += region.state == "paused" and region.mapped_bytes > 0
        region.resume()
        for seed, block in enumerate(held):
            if backup == "host":
                block.check()
            else:
                block.fill(seed)
    assert halves >= 2 or kind == "after"  # an unmap that was made counts as made
    del held, block
    region.pause()
    region.resume()
    ledger.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backup", ["none", "host"])
def test_a_resume_survives_a_failure_of_any_driver_call(
    make: Make, ledger: Ledger, retain: str, backup: str, kind: str
) -> None:
    memsaver.configure(retain=retain)
    region = make(backup)
    held = with_a_gap(region)
    region.pause()
    used, waiting = host_used_bytes(), region.backup_bytes
    block: Block | None = None
    failed = 0
    for error in Sweep(kind, region.resume):
        if error is not None:
            failed += 1
            assert (region.state, region.mapped_bytes) == ("paused", 0)
            assert (host_used_bytes(), region.backup_bytes) == (used, waiting)
            use_device()
            assert ledger.has(free_bytes() + retained())
            region.resume()
        assert region.state == "active"
        if backup == "host":
            for block in held:
                block.check()
        region.pause()
    assert failed >= 2
    held.clear()
    block = None
    memsaver.configure(retain=0)
    region.resume()
    ledger.check()


@pytest.mark.parametrize(
    ("room", "kind"),
    [
        ("full", "error"),
        ("retained", "error"),
        ("free", "error"),
        ("free", "memory"),
        ("free", "after"),
    ],
)
@pytest.mark.parametrize("backup", ["none", "host"])
def test_a_switch_survives_a_failure_of_any_driver_call(
    make: Make, ledger: Ledger, room: str, backup: str, kind: str
) -> None:
    memsaver.configure(retain="1GiB" if room == "retained" else 0)
    out, back = make(backup), make("host")
    there = with_a_gap(back, seed=10)
    if room == "free":
        there += blocks(back, [PAGE, 3 * PAGE], seed=20)  # more than the outgoing chunks: created by the switch
    back.pause()
    here = with_a_gap(out)
    fill = Fill() if room == "full" else None
    rolled_back = rolled_forward = 0
    for error in Sweep(kind, lambda: memsaver.switch(pause=out.tag, resume=back.tag)):
        if out.state == "active":
            rolled_back += 1
            assert error is not None
            assert (back.state, back.mapped_bytes) == ("paused", 0)
            for block in here:
                block.check()
        elif error is not None:
            rolled_forward += 1
            assert (out.state, back.state) == ("paused", "paused")
        memsaver.switch(pause=out.tag, resume=back.tag)
        assert (out.state, out.mapped_bytes, back.state) == ("paused", 0, "active")
        for block in there:
            block.check()
        memsaver.switch(pause=back.tag, resume=out.tag)
        assert (out.state, back.state, back.mapped_bytes) == ("active", "paused", 0)
        for seed, block in enumerate(here):
            if backup == "host":
                block.check()
            else:
                block.fill(seed)
    assert rolled_back >= 1 and rolled_forward >= 3
    here.clear()
    there.clear()
    del block
    if fill is not None:
        fill.close()
    memsaver.configure(retain=0)
    memsaver.resume([out.tag, back.tag])
    ledger.check()


@pytest.mark.parametrize("kind", KINDS)
def test_an_allocation_survives_a_failure_of_any_driver_call(make: Make, ledger: Ledger, kind: str) -> None:
    region = make()
    hooks = Hooks(region)
    first = hooks.alloc(3 * MIB)
    mapped = region.mapped_bytes
    errors = 0

    address: int | None = None

    def allocate() -> None:
        nonlocal address
        address = hooks.alloc(40 * MIB)
        if address is None:
            raise memsaver.Error("torch raises its own")

    for error in Sweep(kind, allocate):
        if error is not None:
            errors += 1
            assert (region.allocated_bytes, region.mapped_bytes) == (3 * MIB, mapped)
            address = hooks.alloc(40 * MIB)
            assert address is not None
        hooks.free(address)
        address = None
    assert errors >= 2
    hooks.free(address)
    hooks.free(first)
    ledger.check()


@pytest.mark.parametrize("kind", ["error", "memory"])
def test_an_error_in_an_allocation_says_which_call(make: Make, kind: str) -> None:
    region = make()
    Block(region, 100)  # from here on the region has addresses
    raised = []
    for nth in range(1, 4):
        controls.arm(nth, kind)
        try:
            region.empty(100)
        except memsaver.Error as error:
            raised.append(error)
        assert region.allocated_bytes == 0 and region.mapped_bytes == 0
    expected = memsaver.DriverError if kind == "error" else memsaver.OutOfMemoryError
    assert isinstance(raised[0], expected)
    assert [error.call for error in raised[1:] if isinstance(error, memsaver.DriverError)] == [
        "cuMemMap",
        "cuMemSetAccess",
    ]


MADE = [
    "cuCtxRecordEvent",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemCreate",
    "cuMemHostRegister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
]


@pytest.mark.parametrize("call", MADE)
def test_a_call_that_takes_effect_and_reports_an_error_loses_nothing(make: Make, ledger: Ledger, call: str) -> None:
    region = make("host")
    held = with_a_gap(region)
    failures = 0

    def cycle() -> None:
        memsaver.release_host_memory()  # to be pinned anew
        block = Block(region, 50 * MIB)
        del block
        region.pause()
        region.resume()

    for error in Sweep("after", cycle, call):
        failures += error is not None
        region.resume()
        for block in held:
            block.check()
        region.pause()
        assert region.mapped_bytes == 0
        region.resume()
    assert failures > 0 or call in ("cuMemUnmap", "cuMemRelease")  # which count as made
    held.clear()
    del block
    ledger.check()


@pytest.mark.isolated
@pytest.mark.parametrize(
    ("call", "backup"),
    [
        ("cuCtxRecordEvent", "none"),
        ("cuMemcpyDtoHAsync", "host"),
        ("cuMemUnmap", "none"),
        ("cuMemMap", "host"),
        ("cuMemcpyHtoDAsync", "host"),
    ],
)
def test_a_context_that_dies_in_a_transition_leaves_the_region_lost(make: Make, call: str, backup: str) -> None:
    region, other = make(backup), make(backup)
    held = with_a_gap(region)
    if call in ("cuMemMap", "cuMemcpyHtoDAsync"):
        region.pause()
    controls.arm(1, "lost", call)
    with pytest.raises(memsaver.DriverError) as caught:
        region.pause() if region.state == "active" else region.resume()
    assert (caught.value.call, caught.value.code) == (call, 700)
    assert (region.state, other.state) == ("lost", "lost")
    for act in (region.pause, region.resume, other.pause, lambda: region.empty(100)):
        with pytest.raises(memsaver.RegionPausedError, match="lost"):
            act()
    del held


def test_a_free_whose_kth_call_fails_leaves_nothing_behind(make: Make, ledger: Ledger) -> None:
    region = make()
    for nth in range(1, 4):
        block = Block(region, 3 * MIB)
        controls.arm(nth)
        del block
        controls.disarm()
        assert region.allocated_bytes == 0
        region.pause()
        assert region.mapped_bytes == 0
        region.resume()
    ledger.check()


@pytest.mark.parametrize("refused_again", [False, True])
def test_a_chunk_that_a_free_could_not_unmap_serves_again(make: Make, ledger: Ledger, refused_again: bool) -> None:
    region = make()
    block = Block(region, PAGE)
    controls.arm(2)  # record, unmap
    del block
    assert (region.allocated_bytes, region.mapped_bytes) == (0, PAGE)
    controls.disarm()
    if refused_again:
        controls.arm(1, call="cuMemUnmap")
    again = Block(region, PAGE)
    controls.disarm()
    assert region.mapped_bytes == PAGE
    again.check()
    del again
    ledger.check()


@pytest.mark.parametrize("backup", ["none", "host"])
def test_memory_kept_by_a_refused_unmap_is_released_when_empty(make: Make, ledger: Ledger, backup: str) -> None:
    region = make(backup)
    halves = 0
    held: list[Block] = []
    for _ in Sweep("error", region.pause):
        halves += region.state == "paused" and region.mapped_bytes > 0
        held.clear()
        region.resume()
        assert (region.allocated_bytes, region.mapped_bytes) == (0, 0)
        held = with_a_gap(region)
    assert halves > 0
    held.clear()
    region.resume()
    ledger.check()


def test_a_half_paused_region_whose_contents_are_kept_is_not_named_as_discarded(make: Make) -> None:
    region = make("host")
    held = with_a_gap(region)
    for error in Sweep("error", region.pause):
        if region.state == "paused" and region.mapped_bytes > 0:
            controls.arm(2)  # synchronize, unmap
            with pytest.raises(memsaver.DriverError, match="cuMemUnmap") as caught:
                region.pause(backup="none")  # its backup was made before: nothing is given up
            assert caught.value.discarded == ()
            controls.disarm()
        elif error is not None:
            assert error.discarded == ()
        region.resume()
        for block in held:
            block.check()


def test_a_release_that_fails_is_counted_and_not_tried_again(
    make: Make, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call may have been made, and its number may be that of another handle by now."""
    monkeypatch.setattr(_results, "_is_logged", False)
    region = make()
    block = Block(region, PAGE)
    controls.arm(3)  # record, unmap, release
    del block
    assert region.mapped_bytes == 0
    for _ in range(2):
        Block(region, PAGE)
        region.pause(), region.resume()
        assert memsaver.stats().unreleased_bytes == ledger.unreleased + PAGE
        assert free_bytes() == ledger.free - PAGE
    assert [record.message for record in caplog.records if "failed to release" in record.message] == [
        f"the driver failed to release {gib(ledger.unreleased + PAGE)}: they may be lost until this process ends"
    ]
    ledger.check()


def test_host_memory_that_cannot_be_pinned_is_an_error_before_anything(make: Make, ledger: Ledger) -> None:
    region = make("host")
    memsaver.release_host_memory()
    held_bytes = memsaver.stats().devices["cpu"].host_held_bytes
    held = blocks(region, [5 * MIB])
    controls.arm(2)  # synchronize, pin
    with pytest.raises(memsaver.BackupError, match="injected") as caught:
        region.pause()
    assert (caught.value.needed_bytes, caught.value.held_bytes) == (5 * MIB, held_bytes)
    assert region.state == "active"
    assert memsaver.stats().devices["cpu"].host_held_bytes == held_bytes
    held[0].check()
    region.pause()
    region.resume()
    held[0].check()
    held.clear()
    ledger.check()


def test_a_region_whose_addresses_are_refused_can_be_asked_for_again(tag: str) -> None:
    controls.arm(1)
    region = memsaver.region(tag, device="cpu")  # takes no addresses before it needs them
    with pytest.raises(memsaver.DriverError, match="cuMemAddressReserve"):
        Block(region, 100)
    assert region.allocated_bytes == 0
    Block(region, 100).check()


def test_a_resume_without_descriptors_leaves_the_region_paused(make: Make, ledger: Ledger) -> None:
    region = make("host")
    held = blocks(region, [60 * MIB])
    region.pause()
    with few_descriptors(spare=1):
        with pytest.raises(memsaver.DriverError):
            region.resume()
    assert (region.state, region.mapped_bytes, free_bytes()) == ("paused", 0, ledger.free)
    region.resume()
    held[0].check()
    held.clear()
    ledger.check()


def test_without_descriptors_the_living_are_not_taken_for_dead(make: Make) -> None:
    held = Block(make(), 3 * MIB)
    before = free_bytes()
    with few_descriptors(spare=0):
        assert free_bytes() == before
    assert free_bytes() == before
    held.check()


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """The process can open ``spare`` files and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        for file in taken[len(taken) - spare :]:
            os.close(file)
        del taken[len(taken) - spare :]
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def retained() -> int:
    return int(memsaver.stats().devices["cpu"].retained_bytes)
