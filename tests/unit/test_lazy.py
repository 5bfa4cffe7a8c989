"""Lazy pauses in one process: what is copied, and when, and what stays after failures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import memsaver
from memsaver import _core
from tests import controls
from tests.support import GIB, MIB, PAGE, Fill, blocks, free_bytes, host_held_bytes, host_used_bytes, until

Make = Callable[..., memsaver.Region]
CHUNK = 32 * MIB


def copied(act: Callable[[], object], *regions: memsaver.Region) -> int:
    """The bytes of contents that a call moves to backups."""
    before = sum(each.backup_bytes for each in regions)
    act()
    return sum(each.backup_bytes for each in regions) - before


def offered(region: memsaver.Region) -> int:
    assert (region.state, region.mapped_bytes) == ("paused", 0)
    return region.offered_bytes


def test_turns_of_sides_that_both_fit_copy_nothing(make: Make) -> None:
    one, two = make("host"), make("none")
    held = blocks(one, [40 * MIB, 100, 70 * MIB]) + blocks(two, [64 * MIB])
    two.pause(lazy=True)
    memory, free = host_used_bytes(), free_bytes()
    for turn in range(20):
        out, back = (one, two) if turn % 2 == 0 else (two, one)
        done = memsaver.switch(pause=out.tag, resume=back.tag, lazy={out.tag: True})
        assert (done.copied_bytes, done.released_bytes, done.restored_bytes) == (0, 0, 0)
        with pytest.raises(memsaver.RegionPausedError):
            out.empty(1)
        assert controls.resident_bytes(held[0].data.ctypes.data) == 0 if False else not _core.capturing()
    assert (host_used_bytes(), free_bytes()) == (memory, free)
    for block in held[:3]:
        block.check()


def test_a_demand_takes_what_it_lacks(make: Make) -> None:
    """A resume, an allocation, and a switch whose own lazy pause gives the chunks."""
    one, two, other = make("host"), make("host"), make("none")
    held, more = blocks(one, [200 * MIB]), blocks(two, [100 * MIB])
    two.pause()
    one.pause(lazy=True)
    with Fill(leave=60 * MIB):
        assert copied(lambda: two.resume(), one) == 64 * MIB  # 40 MiB in chunks of 32 MiB
        assert offered(one) == 136 * MIB + 0 * PAGE
        taken = copied(lambda: more.extend(blocks(other, [30 * MIB])), one)
        assert taken <= 30 * MIB + CHUNK
        two.pause(lazy=True)
        assert memsaver.resume(one.tag).copied_bytes == 64 * MIB + taken
        assert copied(lambda: memsaver.switch(pause=one, resume=two, lazy=True), one) <= two.backup_bytes + CHUNK
    for region in (one, two):
        region.resume()
    for block in held + more:
        block.check()
