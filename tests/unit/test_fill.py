"""The fill of a resume without contents: none, or NaN. test_machines.py compares the bytes."""

from __future__ import annotations

import torch

import memsaver
from tests import controls
from tests.support import MIB, PAGE, Make, blocks

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64] + [
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, name)
]


def test_poison_is_nan_in_every_host_dtype(make: Make) -> None:
    region = make(fill="poison")
    tensors = [region.empty((33, 7), dtype).copy_(torch.ones(33, 7)) for dtype in FLOATS]
    region.pause()
    region.resume()
    for tensor in tensors:
        assert bool(torch.isnan(tensor.to(torch.complex128)).all()), tensor.dtype


def test_without_a_fill_nothing_is_written(make: Make) -> None:
    memsaver.configure(retain="1GiB")  # retained chunks keep their old bytes; new chunks would be zero
    region = make()
    held = blocks(region, [3 * MIB])
    region.pause()
    controls.disarm()
    region.resume()
    assert controls.calls() == len(region._core.chunks) + 1  # map each, and allow
    assert len(set(held[0].tensor.numpy()[:PAGE])) > 2
