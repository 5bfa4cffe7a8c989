"""Every driver and file call of a transition fails in turn: contents that a policy keeps stay, and no chunk is lost."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

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
    Ledger,
    Make,
    Sweep,
    blocks,
    check,
    drop_backups,
    fast_directory,
    free_bytes,
    host_used_bytes,
    run_clean,
    use_device,
)

KINDS = ["error", "memory", "after"]
SIZES = [MIB, 34 * MIB, PAGE + 5, 100, 3 * KIB]  # the second goes: chunks with a gap take more calls


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with fast_directory(tmp_path) as directory:
        memsaver.configure(disk_dir=directory)
        use_device()  # the device is open, and the arena exists
        drop_backups()
        yield Ledger()


def with_a_gap(region: memsaver.Region, seed: int = 0) -> list[Block]:
    first, gap = Block(region, SIZES[0], seed), region.empty(SIZES[1])
    held = [first, *blocks(region, SIZES[2:], seed + 2)]
    del gap
    return held


@dataclass
class Kind:
    """A kind of region, and its blocks."""

    backup: str
    options: dict[str, Any] = field(default_factory=dict)
    retain: str = "0"
    sealed: bool = False  # its contents were copied before

    def make(self, make: Make, seed: int = 0) -> tuple[memsaver.Region, list[Block]]:
        memsaver.configure(retain=self.retain)
        region = make(self.backup, **self.options)
        held = with_a_gap(region, seed)
        if self.sealed:
            region.pause(), region.resume()
        return region, held

    def settle(self, held: list[Block], paused: bool) -> None:
        """Checks the blocks of an active region after a failure. Writes contents that were discarded."""
        for seed, block in enumerate(held):
            if not paused or self.backup != "none":
                block.check()
            elif self.options.get("fill") == "zero":
                assert not block.tensor.numpy().any()
            if paused and self.backup == "none":
                block.fill(seed)


REGIONS = {
    "none": Kind("none"),
    "none, zeroed": Kind("none", {"fill": "zero"}),
    "none, retained": Kind("none", retain="1GiB"),
    "host": Kind("host"),
    "host, retained": Kind("host", retain="1GiB"),
    "host, frozen": Kind("host", {"frozen": True}),
    "host, sealed": Kind("host", {"frozen": True}, sealed=True),
    "disk": Kind("disk", retain="1GiB"),
    "disk, frozen": Kind("disk", {"frozen": True}, retain="1GiB"),
}
# The code of a full device, and calls that are made and report an error, are the same with each option.
FAILURES = [
    pytest.param(region, kind, id=f"{name}-{kind}")
    for name, region in REGIONS.items()
    for kind in KINDS
    if kind == "error" or name in ("none", "host", "disk" if kind == "after" else "none, retained")
]
each_failure = pytest.mark.parametrize(("region", "kind"), FAILURES)


@each_failure
def test_a_pause_survives_a_failure_of_any_driver_call(make: Make, ledger: Ledger, region: Kind, kind: str) -> None:
    """Another pause continues after the failure, and so does a resume, in turns."""
    kept, held = region.make(make)

    def pause() -> None:
        if not region.sealed:
            kept.thaw()
        kept.pause()

    used = host_used_bytes()
    for continues in (True, False):
        rolled_back = rolled_forward = halves = 0
        memsaver.release_host_memory()  # to be pinned anew
        for error in Sweep(kind, pause):
            paused = kept.state == "paused"
            if not paused:
                rolled_back += 1
                assert isinstance(error, (memsaver.DriverError, memsaver.BackupError))
                assert host_used_bytes() == used
                region.settle(held, paused=False)
            else:
                rolled_forward += 1
                halves += kept.mapped_bytes > 0
                assert error is not None or kept.mapped_bytes == 0
            if continues:
                paused = paused or kept.pause().paused == (kept.tag,)
                kept.pause()
                assert (kept.state, kept.mapped_bytes) == ("paused", 0)
            kept.resume()
            region.settle(held, paused)
            if continues:
                memsaver.release_host_memory()
        assert rolled_back >= (4 if region.backup == "host" and not region.sealed else 1)
        assert rolled_forward >= 2
        assert halves >= 1 or kind == "after"  # an unmap that was made counts as made
        kept.resume()
        region.settle(held, paused=True)
    held.clear()
    memsaver.configure(retain=0)
    kept.thaw()
    ledger.check()


@each_failure
def test_a_resume_survives_a_failure_of_any_driver_call(make: Make, ledger: Ledger, region: Kind, kind: str) -> None:
    kept, held = region.make(make)
    kept.pause()
    used, waiting = host_used_bytes(), kept.backup_bytes
    failed = 0
    for error in Sweep(kind, kept.resume):
        if error is not None:
            failed += 1
            assert (kept.state, kept.mapped_bytes) == ("paused", 0)
            assert (host_used_bytes(), kept.backup_bytes) == (used, waiting)
            use_device()
            assert ledger.has(free_bytes() + memsaver.stats().devices["cpu"].retained_bytes)
            kept.resume()
        assert kept.state == "active"
        region.settle(held, paused=True)
        kept.pause()
    assert failed >= 2
    held.clear()
    memsaver.configure(retain=0)
    kept.resume()
    kept.thaw()
    ledger.check()


@pytest.mark.parametrize(
    ("room", "kind", "leaving", "coming"),
    [
        ("full", "error", "none", "host"),
        ("full", "error", "host", "disk"),
        ("retained", "error", "none", "host"),
        ("retained", "error", "host", "disk"),
        ("free", "error", "host", "disk"),
        ("free", "memory", "none", "host"),
        ("free", "after", "host", "disk"),
    ],
)
def test_a_switch_survives_a_failure_of_any_driver_call(
    make: Make, ledger: Ledger, room: str, kind: str, leaving: str, coming: str
) -> None:
    memsaver.configure(retain="1GiB" if room == "retained" else 0)
    region = Kind(leaving)
    out, back = make(leaving), make(coming)
    there = with_a_gap(back, seed=10)
    if room == "free":
        there += blocks(back, [2 * PAGE], seed=20)  # more than the outgoing chunks: created by the switch
    back.pause()
    here = with_a_gap(out)
    fill = Fill() if room == "full" else None
    rolled_back = rolled_forward = 0
    for error in Sweep(kind, lambda: memsaver.switch(pause=out.tag, resume=back.tag)):
        if out.state == "active":
            rolled_back += 1
            assert error is not None
            assert (back.state, back.mapped_bytes) == ("paused", 0)
            region.settle(here, paused=False)
        elif error is not None:
            rolled_forward += 1
            assert (out.state, back.state) == ("paused", "paused")
        if error is not None:  # it names contents that policy "none" discarded before
            gone = (out.tag,) if leaving == "none" and out.state == "paused" else ()
            assert error.discarded == pickle.loads(pickle.dumps(error)).discarded == gone
            if gone:
                assert "nothing has changed" not in str(error)
                assert str(error).endswith(f"; paused before that: {out.tag!r} (without a backup)")
        memsaver.switch(pause=out.tag, resume=back.tag)
        assert (out.state, out.mapped_bytes, back.state) == ("paused", 0, "active")
        check(there)
        memsaver.switch(pause=back.tag, resume=out.tag)
        assert (out.state, back.state, back.mapped_bytes) == ("active", "paused", 0)
        region.settle(here, paused=True)
    assert rolled_back >= 1 and rolled_forward >= 3
    here.clear()
    there.clear()
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


def test_a_resume_without_descriptors_leaves_the_region_paused(make: Make, ledger: Ledger) -> None:
    region = make("host")
    held = blocks(region, [60 * MIB])
    region.pause()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # all lower ones are in use
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        with pytest.raises(memsaver.DriverError):
            region.resume()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (region.state, region.mapped_bytes, free_bytes()) == ("paused", 0, ledger.free)
    region.resume()
    held[0].check()
    held.clear()
    ledger.check()


def test_a_check_of_a_mapping_that_fails_as_well_ends_no_process() -> None:
    source = """
        import memsaver
        from tests import controls
        from tests.support import MIB, blocks, check
        region = memsaver.region("a", device="cpu", backup="host")
        held = blocks(region, [34 * MIB, 100])
        controls.fail("cuMemUnmap", 1)
        controls.fail("cuMemRelease", 1)
        try:
            region.pause(lazy=True)
        except memsaver.DriverError as error:
            assert (error.call, region.state) == ("cuMemUnmap", "paused")
        region.resume()
        check(held)
        # A context that is gone, by a code that does not tell so: no call can be made after some of them.
        acts = [lambda: region.pause(lazy=True), region.pause, lambda: region.empty(34 * MIB)]
        for act in acts:
            failed = 0
            for after in range(9):
                controls.fail("cuCtxPushCurrent", 201, 1 << 40, after)
                try:
                    act()
                except memsaver.Error:
                    failed += 1
                controls.disarm()
                region.resume()
                check(held)
            assert failed
    """
    run_clean(source)


def test_memory_that_is_freed_under_refused_chunks_delays_no_other_allocation(make: Make, ledger: Ledger) -> None:
    region, other = make("host"), make()
    held = blocks(region, SIZES)
    other.empty(1)
    memsaver.trim()
    controls.fail("cuMemUnmap", 1)
    with pytest.raises(memsaver.DriverError):
        region.pause()
    held.pop()
    assert region.mapped_bytes > 0
    controls.virtual_clock(True)
    began = controls.clock_now()
    with Fill(), pytest.raises(memsaver.OutOfMemoryError):
        other.empty(PAGE)
    assert controls.clock_now() == began  # no wait for another thread's sweep, which is bounded
    region.resume()
    check(held)
    held.clear()
    ledger.check()


def test_a_failed_resume_waits_for_its_copies_though_waits_are_refused(make: Make) -> None:
    regions = [make("host"), make("host")]
    held = [each for region in regions for each in blocks(region, SIZES)]
    memsaver.pause(regions)
    controls.copies_delay(0.2)
    controls.fail("cuMemcpyHtoDAsync", 1, after=1)  # the first copy is under way
    controls.fail("cuStreamSynchronize", 1, times=2, after=1)  # the first wait is for the other direction
    with pytest.raises(memsaver.DriverError):
        memsaver.resume(regions)
    controls.copies_delay(0)
    _core.open_driver("cpu").finish_copies()
    assert not controls.context_lost()
    memsaver.resume(regions)
    check(held)
