"""``configure(verify=True)``: contents before a pause are compared with those after the resume."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

import memsaver
from memsaver._torch import checksums
from memsaver.regions import Ranges
from tests.support import MIB, Sweep

ROW = 8192


@pytest.fixture(autouse=True)
def verify() -> None:
    memsaver.configure(verify=True)


def flip(address: int) -> None:
    """Change one bit of a byte."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0x10


def flip_backup(tensor: torch.Tensor, offset: int) -> None:
    flip(memsaver.cpu_backup(tensor).data_ptr() + offset)


def test_flipped_byte_of_a_backup_raises(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host")
    with region:
        first, second = torch.full((MIB,), 7, dtype=torch.uint8), torch.randn(3 * MIB // 4)
    for offset in (0, 1, ROW - 1, ROW, 3 * MIB // 2 + 5, 3 * MIB - 1):
        region.pause()
        flip_backup(second, offset)
        with pytest.raises(memsaver.VerifyError, match=f"region {tag!r} on cpu changed") as raised:
            region.resume()
        error = raised.value
        assert (error.tag, error.segment, error.offset) == (tag, second.data_ptr(), offset // ROW * ROW)
        assert region.state == "active"
        assert bool((first == 7).all())


def test_changed_freed_and_discarded_contents_are_not_compared(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host", fill="poison")
    x, freed = region.empty(MIB, torch.uint8), [region.empty(MIB)]
    for value in range(3):
        x.fill_(value)
        region.pause()
        freed.clear()
        region.resume()
        assert x[0] == value
    region.pause(backup="none")
    region.resume()
    region.pause()
    region.resume(restore=False)  # checksums of this pause stay behind
    assert x[0] == 255
    x.fill_(2)
    memsaver.configure(verify=False)
    region.pause()
    memsaver.configure(verify=True)
    region.resume()
    assert bool((x == 2).all())
    frozen = memsaver.region(f"{tag} frozen", "cpu", "host", frozen=True)
    y = frozen.empty(MIB).fill_(1)
    frozen.pause()
    frozen.resume()
    y[5] = 2  # not allowed, and not copied
    frozen.pause()
    with pytest.raises(memsaver.VerifyError):
        frozen.resume()


def test_next_transition_waits_for_the_comparison(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region = memsaver.region(tag, "cpu", "host")
    x = region.empty(MIB, torch.uint8)
    x.fill_(1)
    states = []
    original = checksums._sums

    def watched(device: str, parts: Ranges, block: int) -> torch.Tensor:
        time.sleep(0.05)
        states.append(region.state)
        return original(device, parts, block)

    region.pause()
    monkeypatch.setattr(checksums, "_sums", watched)
    resumed = memsaver.start(resume=region)
    paused = memsaver.start(pause=region, backup="none")
    resumed.result()
    paused.result()
    assert states == ["resuming"]
    region.resume()


def test_pause_after_a_failed_one_compares_the_first_contents(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host")
    held = [region.empty(3 * MIB, torch.uint8).fill_(0)]
    gap = region.empty(31 * MIB)  # chunks with a gap take more calls
    held += [region.empty(size * MIB, torch.uint8).fill_(size) for size in (1, 2)]
    del gap
    for _ in Sweep("error", region.pause, "cuMemUnmap"):  # contents are there until then
        region.pause()
        flip_backup(held[2], 3)
        with pytest.raises(memsaver.VerifyError):
            region.resume()
        flip(held[2].data_ptr() + 3)
    region.resume()
    for number, each in enumerate(held):
        assert bool((each == number).all())
