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
    blocks,
    descriptors,
    host_held_bytes,
    host_used_bytes,
    unnamed_files,
)

Make = Callable[..., memsaver.Region]
SIZES = [5 * MIB, 100, 33 * MIB, 700 * KIB + 1]

both = pytest.mark.parametrize("backup", ["host", "disk"])


@pytest.fixture(autouse=True)
def disk(tmp_path: Path) -> Path:
    memsaver.configure(disk_dir=tmp_path)
    return tmp_path


def copies(region: memsaver.Region) -> tuple[int, int]:
    """Bytes that a pause and the resume after it copied."""
    return region.pause().copied_bytes, region.resume().copied_bytes


@both
def test_the_first_pause_copies_and_later_ones_do_not(make: Make, backup: str) -> None:
    region = make(backup, frozen=True)
    held = blocks(region, SIZES)
    size = region.allocated_bytes
    assert copies(region) == (size, size)
    figures = memsaver.stats().asdict()["devices"]["cpu"]
    row = next(row for row in figures["regions"] if row["tag"] == region.tag)
    assert (row["frozen"], row["state"], row["backup_bytes"], region.backup_bytes) == (True, "active", size, size)
    assert figures["disk_used_bytes" if backup == "disk" else "host_used_bytes"] >= size
    for _ in range(2):
        assert copies(region) == (0, size)
        for block in held:
            block.check()


def test_later_pauses_of_a_frozen_region_only_wait_and_unmap(make: Make) -> None:
    region = make("host", frozen=True)
    held = blocks(region, SIZES)
    copies(region)
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
def test_a_switch_takes_a_frozen_region_out_without_a_copy(make: Make, backup: str) -> None:
    region, other = make(backup, frozen=True), make("host")
    held = blocks(region, SIZES) + blocks(other, [24 * MIB], seed=9)
    region.pause()
    memsaver.switch(pause=other.tag, resume=region.tag)
    with Fill():
        assert memsaver.switch(pause=region.tag, resume=other.tag).copied_bytes == 24 * MIB
        held[-1].check()
        done = memsaver.switch(pause=other.tag, resume=region.tag)
        assert done.copied_bytes == 24 * MIB + region.allocated_bytes
        for block in held[:-1]:
            block.check()


@both
def test_a_copied_region_takes_no_allocations(make: Make, backup: str) -> None:
    region = make(backup, frozen=True)
    held = blocks(region, [3 * MIB, 40 * MIB])
    hooks = Hooks(region)
    region.pause()
    with pytest.raises(memsaver.RegionPausedError):
        region.empty(1)
    region.resume()
    uses: list[Callable[[], object]] = [
        lambda: region.empty(1), region.__enter__, lambda: region._core.allocate_array(1),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(memsaver.Error, match="thaw") as caught:
            use()
        assert repr(region.tag) in str(caught.value)
        assert not isinstance(caught.value, memsaver.RegionPausedError)
    assert hooks.alloc(PAGE) is None
    torch.empty(3)  # no thread is inside any region
    assert region.allocated_bytes == 43 * MIB
    held[0].check()
    del held[1]  # tensors can be freed
    assert copies(region) == (0, 3 * MIB)
    held[0].check()


def test_allocating_inside_a_region_that_was_frozen_meanwhile_raises(make: Make) -> None:
    region = make("host", frozen=True)
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


@pytest.mark.parametrize("thaws", [True, False], ids=["thaw", "not restored"])
@both
def test_without_the_copy_contents_may_change(make: Make, disk: Path, backup: str, thaws: bool) -> None:
    region = make(backup, frozen=True)
    held = blocks(region, [3 * MIB, 100])
    used = host_used_bytes()
    copies(region)
    if thaws:
        region.thaw()
    else:
        region.pause()
        assert region.resume(restore=False).copied_bytes == 0
    assert (region.backup_bytes, host_used_bytes(), unnamed_files(disk)) == (0, used, [])
    for seed, block in enumerate(held):
        block.fill(50 + seed)
    held.append(Block(region, 2 * MIB, seed=60))
    size = region.allocated_bytes
    assert copies(region) == (size, size)
    assert copies(region) == (0, size)  # frozen again
    for block in held:
        block.check()


def test_a_pause_of_a_frozen_region_reuses_its_copy_on_another_medium(make: Make, disk: Path) -> None:
    region = make("host", frozen=True)
    held = blocks(region, [3 * MIB])
    copies(region)
    assert region.pause(backup="disk").copied_bytes == 0
    assert unnamed_files(disk) == []
    region.resume()
    region.thaw()
    assert region.pause(backup="disk").copied_bytes == 3 * MIB
    region.resume()
    assert copies(region) == (0, 3 * MIB)
    held[0].check()


def test_writes_to_the_backup_are_restored_and_those_of_a_view_that_outlives_the_resume_are_not(make: Make) -> None:
    region = make("host", frozen=True)
    tensor = region.empty(1000)
    tensor.fill_(1)
    region.pause()
    memsaver.cpu_backup(tensor).fill_(2)
    for _ in range(2):
        region.resume()
        assert bool((tensor == 2).all())
        region.pause()
    view = memsaver.cpu_backup(tensor)
    region.resume()
    view.fill_(3)  # after the resume it is the tensor's alone
    region.pause()
    region.resume()
    assert bool((tensor == 2).all())


@pytest.mark.parametrize(
    ("kind", "backup", "frozen"), [(ValueError, "none", True), (TypeError, "host", 1), (TypeError, "disk", 0)]
)
def test_invalid_frozen_options_raise(tag: str, kind: type[Exception], backup: str, frozen: Any) -> None:
    with pytest.raises(kind, match="frozen is"):
        memsaver.region(tag, device="cpu", backup=backup, frozen=frozen)
    assert tag not in {region.tag for region in memsaver.regions.all_regions()}


@pytest.mark.parametrize(("option", "value", "default"), [("frozen", True, False), ("fill", "zero", None)])
def test_region_with_another_option_for_an_existing_tag_raises(
    make: Make, option: str, value: Any, default: Any
) -> None:
    region, plain = make("host", **{option: value}), make("host")
    assert (getattr(region, option), getattr(plain, option)) == (value, default)
    assert make("host", region.tag) is make("host", region.tag, **{option: value}) is region
    others: list[tuple[memsaver.Region, Any, Any]] = [(plain, value, default)]
    others.append((region, False, True) if option == "frozen" else (region, "poison", "zero"))
    for each, asked, made in others:
        with pytest.raises(ValueError, match=f"{option} is {asked!r}, but region .* was made with {made!r}"):
            make("host", each.tag, **{option: asked})
