"""``configure(verify=True)``: contents before a pause are compared with those after the resume."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

import memsaver
from memsaver._torch import checksums
from tests import controls
from tests.support import MIB

ROW = 8192


@pytest.fixture(autouse=True)
def verify() -> Iterator[None]:
    memsaver.configure(verify=True)
    yield
    memsaver.configure(verify=False)


def flip(address: int) -> None:
    """Change one bit of a byte."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0x10


def flip_backup(tensor: torch.Tensor, offset: int) -> None:
    flip(memsaver.cpu_backup(tensor).data_ptr() + offset)


@pytest.mark.parametrize("offset", [0, 1, ROW - 1, ROW, 3 * MIB // 2 + 5, 3 * MIB - 1])
def test_flipped_byte_of_a_backup_raises(tag: str, offset: int) -> None:
    region = memsaver.region(tag, "cpu", "host")
    with region:
        first, second = torch.full((MIB,), 7, dtype=torch.uint8), torch.randn(3 * MIB // 4)
    region.pause()
    flip_backup(second, offset)
    with pytest.raises(memsaver.VerifyError, match=f"region {tag!r} on cpu changed") as raised:
        region.resume()
    error = raised.value
    assert (error.tag, error.segment, error.offset) == (tag, second.data_ptr(), offset // ROW * ROW)
    assert region.state == "active"
    assert bool((first == 7).all())


@pytest.mark.parametrize("count", [1, ROW - 1, ROW, ROW + 1, 3 * ROW + 7])
def test_last_byte_of_any_size_is_compared(tag: str, count: int) -> None:
    region = memsaver.region(tag, "cpu", "host")
    x = region.empty(count, torch.uint8)
    x.fill_(3)
    region.pause()
    flip_backup(x, count - 1)
    with pytest.raises(memsaver.VerifyError):
        region.resume()


def test_unchanged_contents_pass_each_time(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host")
    with region:
        x = torch.randn(MIB)
    for _ in range(3):
        region.pause()
        region.resume()
        x += 1


def test_discarded_contents_are_not_compared(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host", fill="poison")
    x = region.empty(MIB, torch.uint8)
    x.fill_(1)
    region.pause(backup="none")
    region.resume()
    region.pause()
    region.resume(restore=False)
    assert x[0] == 255


def test_pause_without_verify_leaves_nothing_to_compare(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host")
    x = region.empty(MIB, torch.uint8)
    x.fill_(1)
    region.pause()
    region.resume(restore=False)  # checksums of this pause stay behind
    x.fill_(2)
    memsaver.configure(verify=False)
    region.pause()
    memsaver.configure(verify=True)
    region.resume()
    assert bool((x == 2).all())


def test_tensor_freed_while_paused_is_not_compared(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host")
    with region:
        kept, freed = torch.ones(MIB), torch.ones(MIB)
    region.pause()
    del freed
    region.resume()
    assert bool((kept == 1).all())


def test_write_to_a_frozen_region_raises(tag: str) -> None:
    region = memsaver.region(tag, "cpu", "host", frozen=True)
    with region:
        x = torch.ones(MIB)
    region.pause()
    region.resume()
    x[5] = 2
    region.pause()
    with pytest.raises(memsaver.VerifyError):
        region.resume()


def test_switch_compares_the_resumed_side(tag: str) -> None:
    one, other = memsaver.region(tag + "1", "cpu", "host"), memsaver.region(tag + "2", "cpu", "host")
    x, y = one.empty(MIB, torch.uint8), other.empty(MIB, torch.uint8)
    x.fill_(1)
    y.fill_(2)
    one.pause()
    flip_backup(x, 3)
    with pytest.raises(memsaver.VerifyError) as raised:
        memsaver.switch(pause=other, resume=one)
    assert raised.value.tag == one.tag
    assert (one.state, other.state) == ("active", "paused")
    other.resume()
    assert bool((y == 2).all())


def test_next_transition_waits_for_the_comparison(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region = memsaver.region(tag, "cpu", "host")
    x = region.empty(MIB, torch.uint8)
    x.fill_(1)
    states = []
    original = checksums._sums

    def watched(device: str, address: int, nbytes: int) -> torch.Tensor:
        time.sleep(0.05)
        states.append(region.state)
        return original(device, address, nbytes)

    region.pause()
    monkeypatch.setattr(checksums, "_sums", watched)
    resumed = memsaver.start(resume=region)
    paused = memsaver.start(pause=region, backup="none")
    resumed.result()
    paused.result()
    assert states == ["resuming"]
    region.resume()


@pytest.mark.parametrize("nth", range(1, 20))
def test_pause_after_a_failed_one_compares_the_first_contents(tag: str, nth: int) -> None:
    region = memsaver.region(tag, "cpu", "host")
    held = [region.empty(size * MIB, torch.uint8).fill_(number) for number, size in enumerate((3, 40, 5, 60))]
    controls.arm(nth)
    with suppress(memsaver.Error):
        region.pause()
    controls.disarm()
    region.pause()
    flip_backup(held[2], 3)
    with pytest.raises(memsaver.VerifyError):
        region.resume()
    for number, each in enumerate(held):
        assert number == 2 or bool((each == number).all())
    region.pause()
    region.resume()
