"""Contents in files: whole, checked, removed with the process, and not written where there is no room.

tests/unit/test_faults.py fails each call on a file.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import memsaver
from tests.support import (
    KIB,
    MIB,
    Make,
    Peer,
    blocks,
    check,
    drop_backups,
    fresh_device,
    host_held_bytes,
    host_used_bytes,
    run_clean,
    unnamed_files,
    until,
)

BLOCK = 8 * MIB  # in which files are written, read and checked
STAGING = 64 * MIB  # of host memory for the blocks under way


@pytest.fixture(autouse=True)
def disk(tmp_path: Path) -> Path:
    """Where backups of this test go."""
    memsaver.configure(disk_dir=tmp_path)
    return tmp_path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={16 * MIB}", "none", str(path)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"tmpfs cannot be mounted here: {error}")
    memsaver.configure(disk_dir=path)
    try:
        yield path
    finally:
        memsaver.configure(disk_dir=tmp_path)
        memsaver.release_host_memory()
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_removed_directory_raises_and_keeps_the_contents(make: Make, disk: Path) -> None:
    region, place = make("disk"), disk / "place"
    held = blocks(region, [5 * MIB])
    place.mkdir()
    memsaver.configure(disk_dir=place)
    region.pause()
    place.rmdir()  # the file lives on without a name
    region.resume()
    check(held)
    memsaver.release_host_memory()
    with pytest.raises(memsaver.BackupError, match="No such file"):
        region.pause()
    assert region.state == "active"
    check(held)


def free_on(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def used_on_disk() -> int:
    return int(memsaver.stats().devices["cpu"].disk_used_bytes)


# There and back


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [100, 5 * MIB, 513, 13 * MIB + 1, 700 * KIB],
        [BLOCK - 512, 512, 512, BLOCK],
        [BLOCK + 1, BLOCK - 1],
        [513] * 300,
        [6 * BLOCK, BLOCK + 9],  # more blocks than threads
    ],
    ids=lambda sizes: f"{len(sizes)} from {sizes[0]}",
)
def test_contents_come_back_whole(make: Make, disk: Path, sizes: list[int]) -> None:
    """The file is kept, and used again for fewer contents and for more."""
    region = make("disk")
    held = blocks(region, sizes)
    used = host_used_bytes()
    memsaver.configure(host_limit=host_held_bytes() + STAGING)  # enough for the blocks under way
    files: list[int] = []
    for change in ("none", "more", "less"):
        if change == "more":
            held += blocks(region, [3 * MIB + 5], seed=50)
        elif change == "less":
            del held[0]
        size, mapped = region.allocated_bytes, region.mapped_bytes
        done = region.pause()
        assert (done.copied_bytes, done.released_bytes, region.backup_bytes) == (size, mapped, size)
        assert (host_used_bytes(), used_on_disk()) == (used, -(-size // 4096) * 4096)
        assert region.resume().copied_bytes == size
        assert (region.backup_bytes, used_on_disk()) == (0, 0)
        check(held)
        files += unnamed_files(disk, kept=True)
    assert len({*files}) == 1
    assert 0 < memsaver.stats().devices["cpu"].disk_held_bytes <= memsaver.release_host_memory()
    assert (memsaver.stats().devices["cpu"].disk_held_bytes, unnamed_files(disk)) == (0, [])


def test_a_killed_process_leaves_nothing(small_disk: Path) -> None:
    """It is killed while it waits with contents in a file, and while it writes them."""
    before = free_on(small_disk)
    for waits in (True, False):
        with Peer(MEMSAVER_HOST_DEVICE=fresh_device(), MEMSAVER_DISK_DIR=str(small_disk)) as peer:
            peer.run("region = memsaver.region('a', device='cpu', backup='disk')")
            peer.run("held = region._core.allocate_array(10 << 20)")
            peer.send("region.pause()")
            if waits:
                peer.answer()
            until(lambda: free_on(small_disk) <= before - 10 * MIB)
            peer.kill()
            until(lambda: free_on(small_disk) == before)
        assert os.listdir(small_disk) == []


# Where there is no room


def test_a_full_disk_is_an_error_before_anything_moves(make: Make, small_disk: Path) -> None:
    drop_backups()
    region, other, back = make("disk"), make("disk"), make("host")
    held = blocks(region, [13 * MIB, 7 * MIB])
    mapped, before = region.mapped_bytes, free_on(small_disk)
    with pytest.raises(memsaver.BackupError) as caught:
        region.pause()
    error = caught.value
    assert (error.needed_bytes, error.held_bytes, error.available_bytes) == (20 * MIB, 0, before)
    for part in (str(20 * MIB), str(error.available_bytes), str(small_disk)):
        assert part in str(error)
    assert (region.state, region.mapped_bytes, region.backup_bytes) == ("active", mapped, 0)
    assert (free_on(small_disk), used_on_disk()) == (before, 0)  # for others to use
    check(held)
    del held[1]
    region.pause()
    assert before - free_on(small_disk) >= 13 * MIB
    region.resume()
    memsaver.release_host_memory()
    assert free_on(small_disk) == before
    # The files of a switch do not fit together.
    held += blocks(other, [10 * MIB], seed=5) + blocks(back, [2 * MIB], seed=6)
    back.pause()
    with pytest.raises(memsaver.BackupError):
        memsaver.switch(pause=[region.tag, other.tag], resume=back.tag)
    assert (region.state, other.state, back.state) == ("active", "active", "paused")
    assert (unnamed_files(small_disk), free_on(small_disk)) == ([], before)
    back.resume()
    check(held)
    # Files in another directory take no space there.
    memsaver.configure(disk_dir=small_disk.parent)
    region.pause()
    memsaver.configure(disk_dir=small_disk)
    held += blocks(other, [10 * MIB], seed=7)
    with pytest.raises(memsaver.BackupError, match=f"in {small_disk}, .* holds {13 * MIB} in files: ") as caught:
        other.pause()
    assert (caught.value.needed_bytes, caught.value.held_bytes) == (20 * MIB, 13 * MIB)
    region.resume()
    check(held)


def test_limits_of_the_process_and_no_directory_are_errors_before_anything_moves(disk: Path) -> None:
    """Of the size of files, of descriptors, and of addresses: for the stacks of threads."""
    said = run_clean(
        """
        import ctypes, os, resource, memsaver
        region = memsaver.region("a", device="cpu", backup="host")
        held = region._core.allocate_array(70 << 20)
        for call in (lambda: memsaver.region("b", "cpu", "disk"), lambda: region.pause(backup="disk")):
            try:
                call()
            except memsaver.ConfigError as error:
                print(error.option, region.state, error)
        print(len(memsaver.regions.all_regions()))
        memsaver.configure(disk_dir=os.environ["DIR"])
        contents = (ctypes.c_ubyte * (70 << 20)).from_address(region._core.live()[0][0])
        contents[5] = contents[60 << 20] = 7

        def refused(limit, most):
            soft, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (most, hard))
            try:
                region.pause(backup="disk")
            except memsaver.Error as error:
                print(type(error).__name__, region.state, region.backup_bytes, error)
            resource.setrlimit(limit, (soft, hard))

        refused(resource.RLIMIT_FSIZE, 10 << 20)
        taken = os.dup(0)
        refused(resource.RLIMIT_NOFILE, taken + 1)
        region.pause(backup="disk")
        region.resume()
        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        refused(resource.RLIMIT_AS, size + (4 << 20))  # no stack fits, but some threads may be left
        region.resume()
        print(region.state, contents[5], contents[60 << 20])
        """,
        DIR=str(disk),
    )
    *none, regions = said.splitlines()[:3]
    assert all(each.startswith("disk_dir active ") and "configure(disk_dir=...) or MEM" in each for each in none)
    assert regions == "1"
    lines = said.splitlines()[3:]
    assert lines[0].startswith("BackupError active 0 ") and "posix_fallocate" in lines[0]
    assert lines[1].startswith("BackupError active 0 ") and "Too many open files" in lines[1]
    assert len(lines) == 3 or "thread" in lines[2]
    assert lines[-1] == "active 7 7"


def test_host_memory_for_the_blocks_is_reserved_first(make: Make, disk: Path) -> None:
    """A switch that reads a file fails before a region is paused. See also test_policies.py."""
    drop_backups()
    out, back = make("none"), make("disk")
    held = blocks(back, [9 * MIB], seed=5)
    back.pause()
    held += blocks(out, [9 * MIB])
    memsaver.release_host_memory()
    memsaver.configure(host_limit=host_held_bytes())
    with pytest.raises(memsaver.BackupError, match="host_limit"):
        memsaver.switch(pause=out.tag, resume=back.tag)
    assert (out.state, back.state) == ("active", "paused")
    held[1].check()
    memsaver.configure(host_limit=None)
    memsaver.switch(pause=out.tag, resume=back.tag)
    held[0].check()


# Corruption


def test_a_corrupted_file_is_noticed(make: Make, disk: Path) -> None:
    """So is one that was cut. In a switch the outgoing region is paused, and keeps its contents."""
    region, out = make("disk"), make("host")
    held = blocks(region, [5 * MIB, 513, 13 * MIB]) + blocks(out, [2 * MIB], seed=9)
    region.pause()
    file = os.open(f"/proc/self/fd/{unnamed_files(disk)[0]}", os.O_RDWR)
    try:
        for begin, nbytes in ((0, 1), (2 * BLOCK + 700, 1), (9 * MIB, 10 * MIB)):  # a byte differs, or the rest is cut
            original = os.pread(file, nbytes, begin)
            if nbytes == 1:
                os.pwrite(file, bytes([original[0] ^ 4]), begin)
            else:
                os.ftruncate(file, begin)
            os.fsync(file)
            for act in (region.resume, lambda: memsaver.switch(pause=out.tag, resume=region.tag)):
                with pytest.raises(memsaver.BackupError, match="checksum" if nbytes == 1 else "pread"):
                    act()
                assert (region.state, region.mapped_bytes) == ("paused", 0)
                assert region.backup_bytes == region.allocated_bytes
            assert out.state == "paused"
            os.pwrite(file, original, begin)
            os.fsync(file)
            out.resume()
    finally:
        os.close(file)
    region.resume()
    check(held)
