"""Host memory for backups: the machine's memory, the process's budget, and the places of contents."""

from __future__ import annotations

import random
import re

import psutil
import pytest

import memsaver
from tests import controls
from tests.support import GIB, MIB, PAGE, Make, blocks, check, drop_backups, host_held_bytes, run_clean


@pytest.fixture
def arena() -> None:
    """The arena is there, and empty."""
    memsaver.region("flush", device="cpu")
    assert drop_backups() == 0


def test_a_backup_beyond_the_limit_is_refused_before_anything_moves(make: Make, arena: None) -> None:
    """The regions of a transition are counted together. Held memory is used beyond a lowered limit."""
    one, two = make("host"), make("host")
    held = blocks(one, [20 * MIB]) + blocks(two, [20 * MIB], seed=5)
    mapped = one.mapped_bytes
    memsaver.configure(host_limit=30 * MIB)
    controls.disarm()
    with pytest.raises(memsaver.BackupError) as caught:
        memsaver.pause([one, two])
    error = caught.value
    assert controls.calls() == 0
    assert (error.needed_bytes, error.held_bytes, error.available_bytes) == (40 * MIB, 0, 30 * MIB)
    for part in (f"needs {40 * MIB} bytes", "holds 0 bytes", f"host_limit is {30 * MIB} bytes"):
        assert part in str(error)
    assert (one.state, one.mapped_bytes, one.backup_bytes, host_held_bytes()) == ("active", mapped, 0, 0)
    one.pause()
    with pytest.raises(memsaver.BackupError) as caught:
        memsaver.pause([one, two])
    assert (caught.value.needed_bytes, caught.value.held_bytes) == (20 * MIB, 20 * MIB)
    assert (one.state, two.state) == ("paused", "active")
    one.resume()
    memsaver.configure(host_limit=0)
    one.pause()
    with pytest.raises(memsaver.BackupError):
        two.pause()
    one.resume()
    more = blocks(two, [512])
    with pytest.raises(memsaver.BackupError) as caught:
        two.pause()
    assert (caught.value.needed_bytes, caught.value.held_bytes) == (PAGE, 20 * MIB)  # beside idle memory
    memsaver.configure(host_limit=20 * MIB + PAGE)
    two.pause()
    del more
    memsaver.resume([one, two])
    check(held)


def test_a_process_without_threads_pauses_and_one_without_addresses_names_the_bytes() -> None:
    said = run_clean("""
        import ctypes, resource, memsaver
        from memsaver import _core
        from tests.support import MIB, Block
        region = memsaver.region("a", "cpu", "host")
        block = Block(region, 140 * MIB)
        _core.wait_idle("cpu", None)  # starts its thread
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 100 * MIB, hard))
        try:
            region.pause()
        except memsaver.BackupError as error:
            print(error.needed_bytes, error.held_bytes, region.state, error)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        region.pause()  # starts the threads of the device
        region.resume()
        memsaver.release_host_memory()
        stacks, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_attr_init(stacks)
        assert libc.pthread_attr_setstacksize(stacks, ctypes.c_size_t(1 << 47)) == 0  # more than all addresses
        assert libc.pthread_setattr_default_np(stacks) == 0
        region.pause()
        region.resume()
        block.check()
    """)
    assert re.fullmatch(rf"{140 * MIB} 0 active .*no addresses for {140 * MIB} bytes more of pinned.*\n", said)


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


def test_a_process_holds_no_more_than_its_live_bytes_and_returns_idle_ones(make: Make, arena: None) -> None:
    def private_bytes() -> int:
        return psutil.Process().memory_info().rss - psutil.Process().memory_info().shared

    region, rng = make("host"), random.Random(1)
    held = blocks(region, [rng.choice([1, 513, 4097, 99_999, MIB, 2_500_001]) for _ in range(250)])
    rng.shuffle(held)
    del held[70:]
    live = region.allocated_bytes
    assert live < region.mapped_bytes and host_held_bytes() == 0
    region.pause()
    assert live <= (held_now := host_held_bytes()) <= 1.02 * live + 64 * MIB
    assert memsaver.release_host_memory() <= held_now - live  # the rest is in use
    region.resume()
    before, kept = private_bytes(), host_held_bytes()
    assert memsaver.release_host_memory() == kept >= live and host_held_bytes() == 0
    assert before - private_bytes() > 0.8 * live
    region.pause()
    region.resume()
    check(held)
