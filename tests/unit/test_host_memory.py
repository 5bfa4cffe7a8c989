"""Host memory for backups: the machine's memory, the process's budget, and the places of contents."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

import memsaver
from tests import controls
from tests.support import GIB, KIB, MIB, PAGE, Make, blocks, check, drop_backups, host_held_bytes, run_clean


@pytest.fixture
def arena() -> None:
    """The arena is there, and empty."""
    memsaver.region("flush", device="cpu")
    assert drop_backups() == 0


# The budget


def test_a_backup_beyond_the_limit_is_refused_before_anything_moves(make: Make, arena: None) -> None:
    region = make("host")
    held = blocks(region, [25 * MIB, 15 * MIB])
    mapped = region.mapped_bytes
    memsaver.configure(host_limit=10 * MIB)
    controls.disarm()
    with pytest.raises(memsaver.BackupError) as caught:
        region.pause()
    error = caught.value
    assert controls.calls() == 0
    assert (error.needed_bytes, error.held_bytes, error.available_bytes) == (40 * MIB, 0, 10 * MIB)
    for part in (f"needs {40 * MIB} bytes", "holds 0 bytes", f"host_limit is {10 * MIB} bytes"):
        assert part in str(error)
    assert (region.state, region.mapped_bytes, region.backup_bytes) == ("active", mapped, 0)
    assert host_held_bytes() == 0
    check(held)


def test_held_host_memory_is_used_beyond_a_lowered_limit(make: Make, arena: None) -> None:
    one, two = make("host"), make("host")
    held = blocks(one, [20 * MIB]) + blocks(two, [20 * MIB + 512], seed=5)
    one.pause()
    one.resume()
    memsaver.configure(host_limit=0)
    one.pause()
    one.resume()
    with pytest.raises(memsaver.BackupError) as caught:
        two.pause()
    assert (caught.value.needed_bytes, caught.value.held_bytes) == (PAGE, 20 * MIB)
    memsaver.configure(host_limit=20 * MIB + PAGE)
    two.pause()
    two.resume()
    check(held)


def test_the_regions_of_one_transition_are_counted_together(make: Make, arena: None) -> None:
    one, two = make("host"), make("host")
    held = blocks(one, [20 * MIB]) + blocks(two, [20 * MIB], seed=5)
    tags = [one.tag, two.tag]
    memsaver.configure(host_limit=30 * MIB)
    with pytest.raises(memsaver.BackupError) as caught:
        memsaver.pause(tags)
    assert caught.value.needed_bytes == 40 * MIB
    assert (one.state, two.state, host_held_bytes()) == ("active", "active", 0)
    memsaver.pause(one.tag)
    with pytest.raises(memsaver.BackupError) as caught:
        memsaver.pause(tags)
    assert (caught.value.needed_bytes, caught.value.held_bytes) == (20 * MIB, 20 * MIB)
    assert (one.state, two.state) == ("paused", "active")
    memsaver.configure(host_limit=None)
    memsaver.pause(tags)
    memsaver.resume(tags)
    check(held)


def test_without_a_limit_the_machine_is_the_limit() -> None:
    nbytes = psutil.virtual_memory().total // PAGE * PAGE + GIB  # mapped and not touched
    said = run_clean(
        f"""
        import psutil, resource, memsaver
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a chunk is a descriptor
        region = memsaver.region("a", device="cpu")
        held = region._core.allocate_array({nbytes})
        before = psutil.virtual_memory()
        try:
            region.pause(backup="host")
        except memsaver.BackupError as error:
            print(error.needed_bytes, error.held_bytes, 0 < error.available_bytes < {nbytes}, region.state)
            print("can be taken until nine tenths of the machine" in str(error))
            # A tenth less than the available memory. Half of that tenth is a margin for other processes.
            most = max(before.available, psutil.virtual_memory().available)
            print(error.available_bytes <= most - before.total // 20)
        """,
        MEMSAVER_HOST_DEVICE=str(nbytes + GIB),
    )
    assert said == f"{nbytes} 0 True active\nTrue\nTrue\n"


# Held memory


def test_a_fresh_process_holds_no_more_than_its_live_bytes() -> None:
    said = run_clean(
        """
        import random, memsaver
        rng = random.Random(1)
        region = memsaver.region("a", device="cpu", backup="host")
        held = [region._core.allocate_array(rng.choice([1, 513, 4097, 99_999, 1 << 20, 2_500_001])) for _ in range(400)]
        rng.shuffle(held)
        del held[100:]
        live = region.allocated_bytes
        assert live < region.mapped_bytes
        assert memsaver.stats().devices["cpu"].host_held_bytes == 0
        region.pause()
        print(live, memsaver.stats().devices["cpu"].host_held_bytes)
        """
    )
    live, holds = map(int, said.split())
    assert live <= holds <= 1.02 * live + 64 * MIB


def test_idle_host_memory_goes_back_to_the_system(make: Make, arena: None) -> None:
    region = make("host")
    held = blocks(region, [90 * MIB])
    region.pause()
    assert memsaver.release_host_memory() == 0  # all of it is in use
    region.resume()
    before = _private_bytes()
    assert memsaver.release_host_memory() == 90 * MIB
    assert host_held_bytes() == 0
    assert before - _private_bytes() > 80 * MIB
    region.pause()
    region.resume()
    held[0].check()


def _private_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * KIB
