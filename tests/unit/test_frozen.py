"""Frozen regions: one copy of contents that never change serves every pause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from tests import controls
from tests.support import (
    KIB,
    MIB,
    PAGE,
    Block,
    Fill,
    Hooks,
    Ledger,
    Sweep,
    blocks,
    descriptors,
    drop_backups,
    host_held_bytes,
    host_used_bytes,
    unnamed_files,
    use_device,
)

Make = Callable[..., memsaver.Region]
Freeze = Callable[..., memsaver.Region]
SIZES = [5 * MIB, 100, 33 * MIB, 700 * KIB + 1]


@pytest.fixture
def freeze(fresh_tag: Callable[[], str], tmp_path: Path) -> Freeze:
    """Makes frozen regions under fresh tags."""
    memsaver.configure(disk_dir=tmp_path)

    def region(backup: str = "host", tag: str | None = None, **options: Any) -> memsaver.Region:
        return memsaver.region(tag or fresh_tag(), device="cpu", backup=backup, frozen=True, **options)

    return region


both = pytest.mark.parametrize("backup", ["host", "disk"])


def copies(region: memsaver.Region) -> tuple[int, int]:
    """Bytes that a pause and the resume after it copied."""
    return region.pause().copied_bytes, region.resume().copied_bytes


# One copy


@both
def test_the_first_pause_copies_and_later_ones_do_not(freeze: Freeze, backup: str) -> None:
    region = freeze(backup)
    held = blocks(region, SIZES)
    size = region.allocated_bytes
    assert copies(region) == (size, size)
    for _ in range(3):
        assert copies(region) == (0, size)
        for block in held:
            block.check()


@both
def test_the_copy_is_kept_while_the_region_is_active(freeze: Freeze, backup: str) -> None:
    region = freeze(backup)
    held = blocks(region, SIZES)
    assert region.backup_bytes == 0
    region.pause()
    region.resume()
    assert region.backup_bytes == region.allocated_bytes
    figures = memsaver.stats().asdict()["devices"]["cpu"]
    row = next(row for row in figures["regions"] if row["tag"] == region.tag)
    assert (row["frozen"], row["state"], row["backup_bytes"]) == (True, "active", region.allocated_bytes)
    assert figures["disk_used_bytes" if backup == "disk" else "host_used_bytes"] >= region.allocated_bytes
    for block in held:
        block.check()


def test_later_pauses_of_a_frozen_region_only_wait_and_unmap(freeze: Freeze) -> None:
    region = freeze()
    held = blocks(region, SIZES)
    region.pause()
    region.resume()
    chunks, used, holds, files = len(region._core.chunks), host_used_bytes(), host_held_bytes(), descriptors()
    memsaver.configure(host_limit=0)
    controls.disarm()
    region.pause()
    assert controls.calls() <= 2 + chunks  # wait, unmap, and a release each
    assert (host_used_bytes(), host_held_bytes()) == (used, holds)
    region.resume()
    assert descriptors() == files
    for block in held:
        block.check()


@both
def test_a_switch_takes_a_frozen_region_out_without_a_copy(freeze: Freeze, make: Make, backup: str) -> None:
    region, other = freeze(backup), make("host")
    held = blocks(region, SIZES) + blocks(other, [24 * MIB], seed=9)
    region.pause()
    memsaver.switch(pause=other.tag, resume=region.tag)
    with Fill():
        for _ in range(3):
            done = memsaver.switch(pause=region.tag, resume=other.tag)
            assert done.copied_bytes == 24 * MIB
            held[-1].check()
            done = memsaver.switch(pause=other.tag, resume=region.tag)
            assert done.copied_bytes == 24 * MIB + region.allocated_bytes
            for block in held[:-1]:
                block.check()


# Sealed


@both
def test_a_copied_region_takes_no_allocations(freeze: Freeze, backup: str) -> None:
    region = freeze(backup)
    held = blocks(region, [3 * MIB])
    hooks = Hooks(region)
    region.pause()
    with pytest.raises(memsaver.RegionPausedError):
        region.empty(1)
    region.resume()
    for use in (lambda: region.empty(1), lambda: region.empty((2, 2), torch.bfloat16), region.__enter__):
        with pytest.raises(memsaver.Error, match="thaw") as caught:
            use()
        assert repr(region.tag) in str(caught.value)
        assert not isinstance(caught.value, memsaver.RegionPausedError)
    with pytest.raises(memsaver.Error, match="thaw"):
        region._core.allocate_array(1)
    assert hooks.alloc(PAGE) is None
    assert region.allocated_bytes == 3 * MIB
    torch.empty(3)  # no thread is inside any region
    assert region.allocated_bytes == 3 * MIB
    held[0].check()


def test_allocating_inside_a_region_that_was_frozen_meanwhile_raises(freeze: Freeze) -> None:
    region = freeze()
    with region:
        held = torch.full((100,), 3.0)
        region.pause()
        region.resume()
        with pytest.raises(memsaver.Error, match="thaw"):
            torch.ones(3)
        region.thaw()
        more = torch.ones(3)
    assert region.owns(more.data_ptr())
    assert bool((held == 3).all())


@both
def test_tensors_of_a_frozen_region_can_be_freed(freeze: Freeze, backup: str) -> None:
    region = freeze(backup)
    held = blocks(region, [3 * MIB, 40 * MIB, 100, 5 * MIB])
    region.pause()
    del held[1]
    assert region.resume().copied_bytes == region.allocated_bytes == 8 * MIB + 512
    del held[0]
    assert copies(region) == (0, 5 * MIB + 512)
    for block in held:
        block.check()
    del held, block
    assert copies(region) == (0, 0)


# Thaw, and other ways to lose the copy


@both
def test_after_a_thaw_contents_may_change(freeze: Freeze, tmp_path: Path, backup: str) -> None:
    region = freeze(backup)
    held = blocks(region, [3 * MIB, 100])
    used = host_used_bytes()
    region.pause()
    region.resume()
    region.thaw()
    assert (region.backup_bytes, host_used_bytes(), unnamed_files(tmp_path)) == (0, used, [])
    held[0].fill(50)
    held.append(Block(region, 2 * MIB, seed=51))
    size = region.allocated_bytes
    assert copies(region) == (size, size)
    assert copies(region) == (0, size)  # frozen again
    for block in held:
        block.check()


@both
def test_contents_that_are_not_restored_are_frozen_no_more(freeze: Freeze, tmp_path: Path, backup: str) -> None:
    region = freeze(backup)
    held = blocks(region, [3 * MIB])
    used = host_used_bytes()
    copies(region)
    region.pause()
    assert region.resume(restore=False).copied_bytes == 0
    assert (region.backup_bytes, host_used_bytes(), unnamed_files(tmp_path)) == (0, used, [])
    held[0].fill(9)
    held.append(Block(region, 100, seed=10))
    size = region.allocated_bytes
    assert copies(region) == (size, size)
    for block in held:
        block.check()


def test_a_pause_of_a_frozen_region_reuses_its_copy_on_another_medium(freeze: Freeze, tmp_path: Path) -> None:
    region = freeze("host")
    held = blocks(region, [3 * MIB])
    copies(region)
    assert region.pause(backup="disk").copied_bytes == 0
    assert unnamed_files(tmp_path) == []
    region.resume()
    held[0].check()
    region.thaw()
    assert region.pause(backup="disk").copied_bytes == 3 * MIB
    region.resume()
    assert copies(region) == (0, 3 * MIB)
    held[0].check()


# Contents come from the copy


def test_writes_to_the_backup_of_a_frozen_region_are_restored_by_every_resume(freeze: Freeze) -> None:
    region = freeze()
    tensor = region.empty(1000)
    tensor.fill_(1)
    region.pause()
    memsaver.cpu_backup(tensor).fill_(2)
    for _ in range(2):
        region.resume()
        assert bool((tensor == 2).all())
        region.pause()


def test_a_view_of_the_copy_that_outlives_the_resume_changes_nothing(freeze: Freeze) -> None:
    region = freeze()
    tensor = region.empty(1000)
    tensor.fill_(1)
    region.pause()
    view = memsaver.cpu_backup(tensor)
    region.resume()
    view.fill_(2)  # "after the resume it is the tensor's alone"
    region.pause()
    region.resume()
    assert bool((tensor == 1).all())


# Failures


@both
def test_a_transition_whose_kth_call_fails_loses_nothing(freeze: Freeze, backup: str) -> None:
    use_device()
    drop_backups()
    ledger = Ledger()
    region = freeze(backup)
    held = blocks(region, [3 * MIB, 17 * MIB, 100])

    def first_pause() -> None:
        region.thaw()
        region.pause()

    for move in (first_pause, region.pause):
        for _ in Sweep("error", move):
            assert region.state in ("active", "paused")
            region.resume()
            for block in held:
                block.check()
        region.resume()
    region.pause()
    for error in Sweep("error", region.resume):
        assert region.state == ("active" if error is None else "paused")
        region.resume()
        for block in held:
            block.check()
        region.pause()
    region.resume()
    assert copies(region) == (0, region.allocated_bytes)
    for block in held:
        block.check()
    del held, block
    region.thaw()
    ledger.check()


# Options


@pytest.mark.parametrize(
    ("kind", "backup", "frozen"),
    [(ValueError, "none", True), (TypeError, "host", 1), (TypeError, "host", "yes"), (TypeError, "disk", 0)],
)
def test_invalid_frozen_options_raise(tag: str, kind: type[Exception], backup: str, frozen: Any) -> None:
    with pytest.raises(kind, match="frozen is"):
        memsaver.region(tag, device="cpu", backup=backup, frozen=frozen)
    assert tag not in {region.tag for region in memsaver.regions.all_regions()}


def test_region_with_another_option_for_an_existing_tag_raises(freeze: Freeze, make: Make) -> None:
    region, plain = freeze(), make("host")
    assert (region.frozen, plain.frozen) == (True, False)
    assert memsaver.region(region.tag, device="cpu", backup="host") is region
    assert memsaver.region(region.tag, device="cpu", backup="host", frozen=True) is region
    assert memsaver.region(plain.tag, device="cpu", backup="host", frozen=False) is plain
    with pytest.raises(ValueError, match="frozen is False, but region .* was made with True"):
        memsaver.region(region.tag, device="cpu", backup="host", frozen=False)
    with pytest.raises(ValueError, match="frozen is True, but region .* was made with False"):
        memsaver.region(plain.tag, device="cpu", backup="host", frozen=True)
    assert (region.frozen, plain.frozen) == (True, False)
