"""Host memory for backups: the machine's memory, the process's budget, and the places of contents."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import memsaver
from memsaver import _core
from tests import controls
from tests.support import (
    GIB,
    KIB,
    MIB,
    PAGE,
    Block,
    blocks,
    drop_backups,
    host_held_bytes,
    host_used_bytes,
    run_clean,
    until,
)

Make = Callable[..., memsaver.Region]
MACHINE = {"proc/meminfo": "MemTotal:       8388608 kB\nMemFree:         100000 kB\nMemAvailable:    4194304 kB\n"}
NO_LIMIT = (1 << 64) - 1


@pytest.fixture
def arena() -> None:
    """The arena is there, and empty."""
    memsaver.region("flush", device="cpu")
    assert drop_backups() == 0


# The memory of the machine and its cgroups


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def second(group: str, limit: int | str, usage: int, inactive: int | None = None) -> dict[str, str]:
    """The files of a cgroup of version 2."""
    folder = f"sys/fs/cgroup{group.rstrip('/')}"
    files = {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{usage}\n"}
    if inactive is not None:
        files[f"{folder}/memory.stat"] = f"anon 4096\nfile 77\ninactive_file {inactive}\nactive_file 5\n"
    return files


def first(group: str, limit: int, usage: int, inactive: int) -> dict[str, str]:
    """The files of a cgroup of version 1."""
    folder = f"sys/fs/cgroup/memory{group.rstrip('/')}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_rss 4096\ntotal_inactive_file {inactive}\n",
    }


GROUP = {"proc/self/cgroup": "0::/pod/box\n"}
GROUP_1 = {"proc/self/cgroup": "5:name=systemd:/elsewhere\n4:cpu,memory:/pod/box\n3:cpuset:/\n"}


def left(available: int, total: int) -> int:
    """Of one machine or group: until nine tenths of it are in use."""
    return max(0, available - total // 10)


OF_MACHINE = left(4 * GIB, 8 * GIB)


MEMORY: dict[str, tuple[dict[str, str], int, int, int]] = {
    "the machine alone": (MACHINE, 4 * GIB, 8 * GIB, OF_MACHINE),
    "nothing known": ({}, NO_LIMIT, NO_LIMIT, NO_LIMIT),
    "a group without files": ({**MACHINE, **GROUP}, 4 * GIB, 8 * GIB, OF_MACHINE),
    "a group alone": ({**GROUP, **second("/pod/box", GIB, 0)}, GIB, GIB, left(GIB, GIB)),
    "2: limit less usage": ({**MACHINE, **GROUP, **second("/pod/box", 2 * GIB, GIB)}, GIB, 2 * GIB, left(GIB, 2 * GIB)),
    "2: pages of files that the kernel can drop are free": (
        {**MACHINE, **GROUP, **second("/pod/box", 2 * GIB, GIB, 300 * MIB)},
        GIB + 300 * MIB, 2 * GIB, left(GIB + 300 * MIB, 2 * GIB),
    ),
    "2: never more free than the limit": (
        {**MACHINE, **GROUP, **second("/pod/box", 2 * GIB, GIB, 3 * GIB)}, 2 * GIB, 2 * GIB, left(2 * GIB, 2 * GIB),
    ),
    "2: a group over its limit has none": ({**MACHINE, **GROUP, **second("/pod/box", GIB, GIB + MIB)}, 0, GIB, 0),
    "2: beyond nine tenths nothing can be taken": (
        {**MACHINE, **GROUP, **second("/pod/box", GIB, 950 * MIB)}, 74 * MIB, GIB, 0,
    ),
    "2: the machine has less": (
        {**MACHINE, **GROUP, **second("/pod/box", 64 * GIB, GIB)}, 4 * GIB, 8 * GIB, OF_MACHINE,
    ),
    "2: a large group with more free, but less than a tenth of it": (
        {**MACHINE, **GROUP, **second("/pod/box", 64 * GIB, 59 * GIB)}, 4 * GIB, 8 * GIB, 0,
    ),
    "2: no limit": ({**MACHINE, **GROUP, **second("/pod/box", "max", GIB)}, 4 * GIB, 8 * GIB, OF_MACHINE),
    "2: a limit one above": (
        {**MACHINE, **GROUP, **second("/pod/box", "max", GIB), **second("/pod", 3 * GIB, GIB)},
        2 * GIB, 3 * GIB, left(2 * GIB, 3 * GIB),
    ),
    "2: the tightest counts, wherever it is": (
        {**MACHINE, **GROUP, **second("/pod/box", 3 * GIB, GIB),
         **second("/pod", 6 * GIB, 5 * GIB + 512 * MIB, 100 * MIB), **second("/", 7 * GIB, GIB)},
        612 * MIB, 3 * GIB, 0,
    ),
    "2: a tenth of each stays free": (
        {**MACHINE, **GROUP, **second("/pod/box", 3 * GIB, GIB), **second("/pod", 6 * GIB, 4 * GIB)},
        2 * GIB, 3 * GIB, left(2 * GIB, 6 * GIB),
    ),
    "2: in a container the path is one of the outside": (
        {**MACHINE, **GROUP, **second("/", GIB, 256 * MIB)}, 768 * MIB, GIB, left(768 * MIB, GIB),
    ),
    "1: limit less usage that stays": (
        {**MACHINE, **GROUP_1, **first("/pod/box", 2 * GIB, GIB, 200 * MIB)},
        GIB + 200 * MIB, 2 * GIB, left(GIB + 200 * MIB, 2 * GIB),
    ),
    "1: no limit is a large number": (
        {**MACHINE, **GROUP_1, **first("/pod/box", (1 << 63) - 4096, GIB, 0)}, 4 * GIB, 8 * GIB, OF_MACHINE,
    ),
    "1: the tightest counts, wherever it is": (
        {**MACHINE, **GROUP_1, **first("/pod/box", 3 * GIB, GIB, 0), **first("/pod", 4 * GIB, 3 * GIB, MIB)},
        GIB + MIB, 3 * GIB, left(GIB + MIB, 4 * GIB),
    ),
    "1: of memory, not of others": (
        {**MACHINE, **GROUP_1, **first("/elsewhere", MIB, 0, 0)}, 4 * GIB, 8 * GIB, OF_MACHINE,
    ),
    "1 and 2 at once": (
        {**MACHINE, "proc/self/cgroup": "2:memory:/old\n0::/new\n", **first("/old", 3 * GIB, GIB, 0),
         **second("/new", 3 * GIB, 2 * GIB)},
        GIB, 3 * GIB, left(GIB, 3 * GIB),
    ),
    "lines that say little": (
        {**MACHINE, "proc/self/cgroup": "nonsense\n0::\n", **second("/", 2 * GIB, GIB)},
        GIB, 2 * GIB, left(GIB, 2 * GIB),
    ),
    "a limit whose usage is not known": (
        {**MACHINE, **GROUP, "sys/fs/cgroup/pod/box/memory.max": "1048576\n"}, 4 * GIB, 8 * GIB, OF_MACHINE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "available", "total", "can_be_taken"), MEMORY.values(), ids=MEMORY)
def test_available_memory_is_bounded_by_machine_and_cgroups(
    tmp_path: Path, files: dict[str, str], available: int, total: int, can_be_taken: int
) -> None:
    assert _core.host_memory(tree(tmp_path, files)) == (available, total, can_be_taken)


def node(number: int, free: int, total: int, files: int = 0) -> dict[str, str]:
    """The file of a NUMA node; a half of the pages of files are in use."""
    figures = {
        "MemTotal": total,
        "MemFree": free,
        "Active(file)": files // 2,
        "Inactive(file)": files // 2,
        "Dirty": GIB,
    }
    lines = [f"Node {number} {name}: {value // KIB:>12} kB\n" for name, value in figures.items()]
    return {f"sys/devices/system/node/node{number}/meminfo": "".join(lines)}


HAS_CPU = "sys/devices/system/node/has_cpu"
# Two sockets, and two GPUs whose memory the system has as nodes 2 and 10.
NODES = {
    "proc/meminfo": f"MemTotal: {40 * GIB // KIB} kB\nMemAvailable: {30 * GIB // KIB} kB\n",
    HAS_CPU: "0-1\n",
    **node(0, 3 * GIB, 6 * GIB, files=GIB),
    **node(1, 2 * GIB, 6 * GIB),
    **node(2, 12 * GIB, 14 * GIB),
    **node(10, 14 * GIB, 14 * GIB),
}


@pytest.mark.parametrize(
    ("files", "available", "total"),
    [
        pytest.param(NODES, 6 * GIB, 12 * GIB, id="the sockets"),
        pytest.param({**NODES, HAS_CPU: "0,2\n"}, 16 * GIB, 20 * GIB, id="a list"),
        pytest.param({**NODES, HAS_CPU: "1-2,10\n"}, 28 * GIB, 34 * GIB, id="a list of ranges"),
        pytest.param({**NODES, **MACHINE}, 4 * GIB, 12 * GIB, id="never more than the machine has"),
        pytest.param({**NODES, **GROUP, **second("/pod/box", 2 * GIB, GIB)}, GIB, 2 * GIB, id="a group has less"),
        pytest.param({**NODES, HAS_CPU: "\n"}, 0, 0, id="no node has CPUs"),
        pytest.param(MACHINE, 0, 0, id="nothing known of nodes"),
    ],
)
def test_memory_of_gpu_nodes_does_not_count(tmp_path: Path, files: dict[str, str], available: int, total: int) -> None:
    found = _core.host_memory(tree(tmp_path, files), nodes_with_cpus=True)
    assert found == (available, total, left(available, total))


def test_this_machine_has_plausible_memory_figures() -> None:
    available, total, can_be_taken = _core.host_memory()
    assert 0 < can_be_taken < available <= total <= psutil.virtual_memory().total


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
    for block in held:
        block.check()


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
    for block in held:
        block.check()


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
    for block in held:
        block.check()


def test_without_a_limit_the_machine_is_the_limit() -> None:
    nbytes = psutil.virtual_memory().total // PAGE * PAGE + GIB  # mapped and not touched
    said = run_clean(
        f"""
        import resource, memsaver
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a chunk is a descriptor
        region = memsaver.region("a", device="cpu")
        held = region._core.allocate_array({nbytes})
        before = memsaver._core.host_memory()
        try:
            region.pause(backup="host")
        except memsaver.BackupError as error:
            print(error.needed_bytes, error.held_bytes, 0 < error.available_bytes < {nbytes}, region.state)
            print("can be taken until nine tenths of the machine" in str(error))
            after = memsaver._core.host_memory()
            # A tenth less than the available memory. Half of that tenth is a margin for other processes.
            print(error.available_bytes <= max(before[0], after[0]) - after[1] // 20)
        """,
        MEMSAVER_HOST_DEVICE=str(nbytes + GIB),
        MEMSAVER_BACKUP_AHEAD="0",
    )
    assert said == f"{nbytes} 0 True active\nTrue\nTrue\n"


@pytest.mark.parametrize("value", [-1, "plenty", 1.5, True])
def test_an_invalid_limit_raises(value: Any) -> None:
    with pytest.raises(memsaver.ConfigError, match="host_limit"):
        memsaver.configure(host_limit=value)


@pytest.mark.parametrize("value", [2, "maybe", None])
def test_backup_ahead_takes_only_booleans(value: Any) -> None:
    with pytest.raises(memsaver.ConfigError, match="backup_ahead"):
        memsaver.configure(backup_ahead=value)


# Held memory


@pytest.mark.parametrize("seed", range(3))
def test_a_fresh_process_holds_no_more_than_its_live_bytes(seed: int) -> None:
    said = run_clean(
        f"""
        import random, memsaver
        rng = random.Random({seed})
        region = memsaver.region("a", device="cpu", backup="host")
        held = [region._core.allocate_array(rng.choice([1, 513, 4097, 99_999, 1 << 20, 2_500_001])) for _ in range(400)]
        rng.shuffle(held)
        del held[100:]
        live = region.allocated_bytes
        assert live < region.mapped_bytes
        region.pause()
        print(live, memsaver.stats().devices["cpu"].host_held_bytes)
        """,
        MEMSAVER_BACKUP_AHEAD="0",
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


def test_contents_survive_when_idle_host_memory_goes(make: Make, arena: None) -> None:
    regions = [make("host") for _ in range(4)]
    held = [Block(region, 10 * MIB, seed) for seed, region in enumerate(regions)]
    for region in regions:  # one slab after the other
        region.pause()
    regions[0].resume()
    regions[2].resume()
    assert memsaver.release_host_memory() == 20 * MIB
    assert host_held_bytes() == host_used_bytes() == 20 * MIB
    regions[0].pause()
    for region in regions:
        region.resume()
    for block in held:
        block.check()


# Pieces


def fragments(make: Make, count: int) -> list[Block]:
    """Leaves holes of 1 MiB in the arena, between the backups of the returned blocks."""
    held = [Block(make("host"), MIB, seed) for seed in range(2 * count)]
    memsaver.pause([block.region.tag for block in held])
    memsaver.resume([block.region.tag for block in held[::2]])
    return held[1::2]


@pytest.mark.parametrize("sizes", [[10 * MIB], [700 * KIB] * 15, [MIB + 512] * 4 + [513] * 200, [100 * MIB]])
def test_contents_in_several_pieces_come_back_whole(make: Make, arena: None, sizes: list[int]) -> None:
    between = fragments(make, 6)
    holes = host_held_bytes() - host_used_bytes()
    assert holes >= 6 * MIB
    region = make("host")
    held = blocks(region, sizes)
    before = host_held_bytes()
    region.pause()
    assert host_held_bytes() - before <= max(0, region.backup_bytes - holes) + 2 * PAGE  # the holes were used
    for block in between:
        block.region.resume()
        block.check()
    memsaver.release_host_memory()
    region.resume()
    for block in held:
        block.check()
    assert host_used_bytes() == 0


# Ahead of the first pause


def test_the_arena_grows_with_a_region_before_its_first_pause(make: Make, arena: None) -> None:
    memsaver.configure(backup_ahead=True)
    region = make("host")
    held = blocks(region, [30 * MIB, 513, 10 * MIB])
    until(lambda: host_held_bytes() >= region.allocated_bytes and host_used_bytes() == 0)
    assert region.state == "active"
    ready = host_held_bytes()
    assert ready <= region.allocated_bytes + PAGE
    region.pause()
    assert host_held_bytes() == ready
    region.resume()
    for block in held:
        block.check()


def test_the_arena_keeps_up_with_many_small_steps(make: Make, arena: None) -> None:
    memsaver.configure(backup_ahead=True)
    one, two = make("host"), make("host")
    held = [Block(region, 60 * KIB, seed) for seed in range(400) for region in (one, two)]
    needed = one.allocated_bytes + two.allocated_bytes
    until(lambda: host_held_bytes() >= needed)
    ready = host_held_bytes()
    assert ready <= needed + PAGE
    memsaver.pause([one.tag, two.tag])
    assert host_held_bytes() == ready
    memsaver.resume([one.tag, two.tag])
    for block in held:
        block.check()


@pytest.mark.parametrize("backup", ["none", "disk"])
def test_other_regions_need_no_host_memory_ahead(make: Make, arena: None, tmp_path: Path, backup: str) -> None:
    memsaver.configure(backup_ahead=True, disk_dir=tmp_path)
    other, region = make(backup), make("host")
    held = blocks(other, [50 * MIB]) + blocks(region, [4 * MIB])
    until(lambda: host_held_bytes() > 0)
    assert host_held_bytes() == 4 * MIB
    del held


def test_growth_ahead_can_be_off(make: Make, arena: None) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [20 * MIB])
    memsaver.configure(backup_ahead=True)
    held += blocks(other, [100])  # the arena follows all regions from here on
    until(lambda: host_held_bytes() >= 20 * MIB)
    memsaver.configure(backup_ahead=False)
    held += blocks(other, [20 * MIB])
    other.pause()
    assert host_held_bytes() == 22 * MIB
    del held


def test_a_failure_to_pin_ahead_is_reported_by_the_pause(
    make: Make, arena: None, capfd: pytest.CaptureFixture[str]
) -> None:
    region = make("host")
    held = blocks(region, [20 * MIB])
    memsaver.configure(backup_ahead=True)
    controls.arm(1)
    held += blocks(region, [100])  # in memory that is mapped: the next driver call is the background's
    until(lambda: controls.calls() >= 1)
    memsaver.release_host_memory()  # behind the attempt
    assert host_held_bytes() == 0
    memsaver.configure(backup_ahead=False, host_limit=10 * MIB)
    with pytest.raises(memsaver.BackupError):
        region.pause()
    assert region.state == "active"
    memsaver.configure(backup_ahead=True, host_limit=None)
    held += blocks(region, [100])  # the next growth tries again
    until(lambda: host_held_bytes() >= region.allocated_bytes)
    assert capfd.readouterr() == ("", "")
    region.pause()
    region.resume()
    for block in held:
        block.check()


def test_growth_during_an_attempt_that_fails_is_not_forgotten(make: Make, arena: None) -> None:
    for _ in range(10):
        memsaver.configure(backup_ahead=False)
        region = make("host")
        held = blocks(region, [20 * MIB])
        memsaver.configure(backup_ahead=True)
        controls.arm(1)
        held += blocks(region, [100])  # in memory that is mapped: the next driver call is the background's
        until(lambda: controls.calls() >= 1)
        held += blocks(region, [100])
        until(lambda: host_held_bytes() >= region.allocated_bytes)  # noqa: B023
        held.clear()
        memsaver.release_host_memory()


def test_a_pause_beside_the_growth_ahead_takes_nothing_twice() -> None:
    said = run_clean("""
        import memsaver
        memsaver.configure(backup_ahead=True)
        region = memsaver.region("a", device="cpu", backup="host")
        held = region._core.allocate_array(200 << 20)
        region.pause()
        memsaver._core.stop_background()  # waits for the slab in progress
        print(memsaver.stats().devices["cpu"].host_held_bytes)
    """)
    assert int(said) == 200 * MIB


@pytest.mark.parametrize(("options", "nbytes"), [({}, 0), ({"backup_ahead": True}, 4 * MIB)])
def test_nothing_is_pinned_unasked_and_at_most_half_of_the_free_memory(options: dict[str, bool], nbytes: int) -> None:
    size = 6 * _core.host_memory()[2] // 10
    said = run_clean(
        f"""
        import memsaver, time
        memsaver.configure(**{options})
        region = memsaver.region("a", device="cpu", backup="host")
        held = lambda: memsaver.stats().devices["cpu"].host_held_bytes
        first = region._core.allocate_array({4 * MIB})
        while held() != {nbytes}:
            time.sleep(0.01)
        second = region._core.allocate_array({size})
        time.sleep(0.2)  # for a thread that should not pin
        print(held())
        """,
        MEMSAVER_HOST_DEVICE=str(size // PAGE * PAGE + 100 * PAGE),
    )
    assert int(said) == nbytes


def test_growth_ahead_ends_at_the_limit(make: Make, arena: None, capfd: pytest.CaptureFixture[str]) -> None:
    memsaver.configure(backup_ahead=True, host_limit=10 * MIB)
    region = make("host")
    held = blocks(region, [6 * MIB])
    until(lambda: host_held_bytes() == 6 * MIB)
    held += blocks(region, [20 * MIB])
    with pytest.raises(memsaver.BackupError) as caught:
        region.pause()
    assert caught.value.held_bytes == host_held_bytes() <= 10 * MIB
    assert caught.value.needed_bytes + caught.value.held_bytes == 26 * MIB
    memsaver.configure(host_limit="1GiB")
    region.pause()
    region.resume()
    for block in held:
        block.check()
    assert capfd.readouterr() == ("", "")


def test_released_host_memory_comes_back_with_the_next_growth(make: Make, arena: None) -> None:
    memsaver.configure(backup_ahead=True)
    region = make("host")
    held = blocks(region, [20 * MIB])
    until(lambda: host_held_bytes() == 20 * MIB)
    assert memsaver.release_host_memory() == 20 * MIB
    assert host_held_bytes() == 0
    held += blocks(region, [MIB])
    until(lambda: host_held_bytes() >= 21 * MIB)
    region.pause()
    region.resume()
    for block in held:
        block.check()


def test_the_process_ends_cleanly_while_the_arena_grows() -> None:
    for size in (1, 50 * MIB, 600 * MIB):
        run_clean(
            f"""
            import memsaver
            memsaver.configure(backup_ahead=True)
            held = memsaver.region("a", device="cpu", backup="host")._core.allocate_array({size})
            """,
            MEMSAVER_HOST_DEVICE=str(GIB + os.getpid() % 1000 * PAGE + 5000 * PAGE),
        )
