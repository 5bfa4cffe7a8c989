"""The fill of a resume without contents: none, zeros, or NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memsaver
from tests import controls
from tests.support import KIB, MIB, Block, blocks

Make = Callable[..., memsaver.Region]
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


def holds(block: Block, fill: str) -> bool:
    return bool((block.tensor.numpy() == BYTES[fill]).all())


@pytest.mark.parametrize("fill", BYTES)
def test_contents_without_a_backup_are_filled(make: Make, fill: str) -> None:
    region, frozen = make(fill=fill), make("host", fill=fill, frozen=True)
    held, kept = blocks(region, SIZES), blocks(frozen, SIZES)
    for seed in range(2):
        memsaver.pause([region.tag, frozen.tag])
        assert memsaver.resume([region.tag, frozen.tag]).copied_bytes == frozen.allocated_bytes
        for block in kept:
            block.check()
        for block in held:
            assert holds(block, fill)
            block.fill(seed)
    frozen.pause()
    frozen.resume(restore=False)
    assert all(holds(block, fill) for block in kept)


def test_poison_is_nan_in_every_host_dtype(make: Make) -> None:
    region = make(fill="poison")
    tensors = [region.empty((33, 7), dtype).copy_(torch.ones(33, 7)) for dtype in FLOATS]
    region.pause()
    region.resume()
    for tensor in tensors:
        assert bool(torch.isnan(tensor.to(torch.complex128)).all()), tensor.dtype


def test_without_a_fill_nothing_is_written(make: Make) -> None:
    region = make()
    held = blocks(region, [3 * MIB])
    region.pause()
    controls.disarm()
    region.resume()
    assert controls.calls() == len(region._core.chunks) + 1  # map each, and allow
    assert not holds(held[0], "zero") and not holds(held[0], "poison")  # the chunks' old bytes


@pytest.mark.parametrize("fill", ["ones", "", 0, True, ["zero"], b"zero"])
def test_other_fills_are_refused(tag: str, fill: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="fill is"):
        memsaver.region(tag, device="cpu", fill=fill)
    assert tag not in {region.tag for region in memsaver.regions.all_regions()}
