"""The fill of a resume without contents: none, zeros, or NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memsaver
from tests import controls
from tests.support import KIB, MIB, Block, Sweep, blocks

Filled = Callable[..., memsaver.Region]
SIZES = [5 * MIB, 100, 90 * MIB, 700 * KIB + 1]
BYTES = {"zero": 0, "poison": 0xFF}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64] + [
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, name)
]


@pytest.fixture(autouse=True)
def dirty_memory() -> Iterator[None]:
    """Retained chunks keep their old bytes. New chunks would be zero."""
    memsaver.configure(retain="1GiB")
    yield


@pytest.fixture
def filled(fresh_tag: Callable[[], str]) -> Filled:
    """Makes regions that fill, under fresh tags."""

    def region(fill: str, backup: str = "none", **options: Any) -> memsaver.Region:
        return memsaver.region(fresh_tag(), device="cpu", backup=backup, fill=fill, **options)

    return region


every = pytest.mark.parametrize("fill", ["zero", "poison"])


def holds(block: Block, fill: str) -> bool:
    return bool((block.tensor.numpy() == BYTES[fill]).all())


@every
def test_contents_without_a_backup_are_filled(filled: Filled, fill: str) -> None:
    region = filled(fill)
    held = blocks(region, SIZES)
    for seed in range(2):
        region.pause()
        region.resume()
        for block in held:
            assert holds(block, fill)
            block.fill(seed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_is_nan_in_every_host_dtype(filled: Filled, dtype: torch.dtype) -> None:
    region = filled("poison")
    tensor = region.empty((33, 7), dtype)
    tensor.copy_(torch.ones(33, 7))
    region.pause()
    region.resume()
    assert bool(torch.isnan(tensor.to(torch.complex128 if dtype.is_complex else torch.float64)).all())


@every
def test_frozen_contents_are_not_filled(filled: Filled, fill: str) -> None:
    region = filled(fill, "host", frozen=True)
    held = blocks(region, SIZES)
    for _ in range(2):
        region.pause()
        region.resume()
        for block in held:
            block.check()
    region.pause()
    region.resume(restore=False)
    assert all(holds(block, fill) for block in held)


@every
def test_a_resume_fills_contents_that_a_failed_pause_left(filled: Filled, fill: str) -> None:
    region = filled(fill)
    held = blocks(region, [3 * MIB, 40 * MIB, 100])
    halves = 0
    for _ in Sweep("error", region.pause):
        went = region.state == "paused"
        halves += went and region.mapped_bytes > 0
        region.resume()
        for seed, block in enumerate(held):
            if went:
                assert holds(block, fill)
                block.fill(seed)
            else:
                block.check()
    assert halves > 0


@every
def test_a_resume_whose_kth_call_fails_fills_the_next_time(filled: Filled, fill: str) -> None:
    region = filled(fill)
    held = blocks(region, [3 * MIB, 40 * MIB, 100])
    region.pause()
    for error in Sweep("error", region.resume):
        assert region.state == ("active" if error is None else "paused")
        region.resume()
        for seed, block in enumerate(held):
            assert holds(block, fill)
            block.fill(seed)
        region.pause()


def test_a_fill_does_not_count_as_copied_bytes(filled: Filled) -> None:
    region = filled("zero")
    held = blocks(region, SIZES)
    told: list[tuple[int, int]] = []
    region.pause()
    assert region.resume(progress=lambda done, total: told.append((done, total))).copied_bytes == 0
    assert told == []
    assert all(holds(block, "zero") for block in held)


def test_without_a_fill_nothing_is_written(make: Callable[..., memsaver.Region]) -> None:
    region = make()
    held = blocks(region, [3 * MIB])
    region.pause()
    controls.disarm()
    region.resume()
    assert controls.calls() == len(region._core.chunks) + 1  # map each, and allow
    assert not holds(held[0], "zero") and not holds(held[0], "poison")  # the chunks' old bytes


@pytest.mark.parametrize("fill", ["ones", "nothing", "", 0, True, ["zero"], b"zero"])
def test_other_fills_are_refused(tag: str, fill: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="fill is"):
        memsaver.region(tag, device="cpu", fill=fill)
    assert tag not in {region.tag for region in memsaver.regions.all_regions()}


def test_region_with_another_option_for_an_existing_tag_raises(
    filled: Filled, make: Callable[..., memsaver.Region]
) -> None:
    region, plain = filled("zero"), make()
    assert (region.fill, plain.fill) == ("zero", None)
    assert memsaver.region(region.tag, device="cpu") is region
    assert memsaver.region(region.tag, device="cpu", fill="zero") is region
    with pytest.raises(ValueError, match="fill is 'poison', but region .* was made with 'zero'"):
        memsaver.region(region.tag, device="cpu", fill="poison")
    with pytest.raises(ValueError, match="fill is 'zero', but region .* was made with None"):
        memsaver.region(plain.tag, device="cpu", fill="zero")
    assert (region.fill, plain.fill) == ("zero", None)
