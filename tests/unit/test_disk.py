"""Contents in files: whole, checked, removed with the process, and never lost by a failed file call."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memsaver
from tests.support import (
    KIB,
    MIB,
    Block,
    Ledger,
    Peer,
    Sweep,
    blocks,
    drop_backups,
    fresh_device,
    host_held_bytes,
    host_used_bytes,
    run_clean,
    unnamed_files,
    until,
    use_device,
)

Make = Callable[..., memsaver.Region]
BLOCK = 8 * MIB  # in which files are written, read and checked
STAGING = 64 * MIB  # of host memory for the blocks under way


@pytest.fixture(autouse=True)
def disk(tmp_path: Path) -> Path:
    """Where backups of this test go."""
    memsaver.configure(disk_dir=tmp_path)
    return tmp_path


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of some 48 MiB."""
    path, image = tmp_path / "small", tmp_path / "image"
    path.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={48 * MIB}", "none", str(path)]]
    else:
        with image.open("wb") as file:
            file.truncate(56 * MIB)
        commands = [
            ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(path)],
        ]
    for command in commands:
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{request.param} cannot be mounted here: {error}")
    memsaver.configure(disk_dir=path)
    try:
        yield path
    finally:
        memsaver.configure(disk_dir=tmp_path)
        memsaver.release_host_memory()
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def fast_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        memsaver.configure(disk_dir=path)
        yield Path(path)
        memsaver.configure(disk_dir=tmp_path)


def about(nbytes: int) -> Any:
    """File systems keep some blocks for themselves."""
    return pytest.approx(nbytes, rel=0, abs=MIB)


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
        [4096],
        [100, 5 * MIB, 513, 33 * MIB + 1, 700 * KIB],
        [BLOCK],
        [BLOCK, BLOCK],
        [BLOCK - 512, 512, 512, BLOCK],
        [BLOCK + 1, BLOCK - 1],
        [513] * 3000,
        [3 * MIB + 5] * 25,
        [150 * MIB, 9],
    ],
    ids=lambda sizes: f"{len(sizes)} from {sizes[0]}",
)
def test_contents_come_back_whole(make: Make, disk: Path, sizes: list[int]) -> None:
    region = make("disk")
    held = blocks(region, sizes)
    size, mapped = region.allocated_bytes, region.mapped_bytes
    used = host_used_bytes()
    for _ in range(2):
        done = region.pause()
        assert (done.copied_bytes, done.released_bytes, region.backup_bytes) == (size, mapped, size)
        assert (host_used_bytes(), used_on_disk()) == (used, -(-size // 4096) * 4096)
        done = region.resume()
        assert done.copied_bytes == size
        assert (region.backup_bytes, used_on_disk()) == (0, 0)
        for block in held:
            block.check()
        mapped = region.mapped_bytes
    assert unnamed_files(disk) == []


def test_a_file_is_kept_and_used_again(make: Make, disk: Path) -> None:
    region, other = make("disk"), make("disk")
    held = blocks(region, [20 * MIB, 513, 5 * MIB])
    region.pause()
    region.resume()
    files = unnamed_files(disk, kept=True)
    for seed, nbytes in enumerate([100, 31 * MIB, 3 * MIB + 5]):  # smaller than before, larger, and smaller again
        held[0].fill(50 + seed)
        del held[2:]
        held.append(Block(region, nbytes, seed))
        region.pause()
        region.resume()
        for block in held:
            block.check()
    assert unnamed_files(disk, kept=True) == files and len(files) == 1
    held += blocks(other, [MIB])
    memsaver.pause([region.tag, other.tag])
    figures = memsaver.stats().asdict()["devices"]["cpu"]
    assert figures["disk_used_bytes"] <= figures["disk_held_bytes"]
    memsaver.resume([region.tag, other.tag])
    assert memsaver.stats().devices["cpu"].disk_held_bytes > 51 * MIB
    assert memsaver.release_host_memory() > 51 * MIB
    assert (memsaver.stats().devices["cpu"].disk_held_bytes, unnamed_files(disk)) == (0, [])
    for block in held:
        block.check()


def test_a_kept_file_serves_its_own_directory(make: Make, disk: Path) -> None:
    places = [disk / "one", disk / "two"]
    region = make("disk")
    block = Block(region, 5 * MIB)
    for place in [*places, *places]:
        place.mkdir(exist_ok=True)
        memsaver.configure(disk_dir=place)
        region.pause()
        assert [len(unnamed_files(each)) for each in places] == [each == place for each in places]
        region.resume()
        block.check()


def test_copied_bytes_include_blocks_written_before_the_wait(make: Make) -> None:
    regions = [make("disk") for _ in range(3)]
    held = [block for seed, region in enumerate(regions) for block in blocks(region, [100, 513], 10 * seed)]
    for _ in range(20):
        assert memsaver.pause([region.tag for region in regions]).copied_bytes == 3 * 1536
        assert memsaver.resume([region.tag for region in regions]).copied_bytes == 3 * 1536
    for block in held:
        block.check()


def test_host_memory_is_needed_for_a_few_blocks_only(make: Make) -> None:
    drop_backups()
    region = make("disk")
    held = blocks(region, [200 * MIB])
    memsaver.configure(host_limit=host_held_bytes() + STAGING)
    region.pause()
    region.resume()
    held[0].check()


# The file


def test_disk_space_is_reserved_by_pause_and_released_later(make: Make, small_disk: Path) -> None:
    region = make("disk")
    held = blocks(region, [30 * MIB])
    before = free_on(small_disk)
    region.pause()
    assert before - free_on(small_disk) >= 30 * MIB
    region.resume()
    memsaver.release_host_memory()
    assert free_on(small_disk) == about(before)
    held[0].check()


def test_a_kept_file_makes_room_for_another(make: Make, small_disk: Path) -> None:
    one, two = make("disk"), make("disk")
    held = blocks(one, [5 * MIB]) + blocks(two, [30 * MIB], seed=5)
    memsaver.pause([one.tag, two.tag])
    memsaver.resume([one.tag, two.tag])
    held += blocks(two, [12 * MIB], seed=7)
    two.pause()  # in the larger file, which can grow by 12 MiB once the smaller one has gone
    two.resume()
    for block in held:
        block.check()


def test_a_killed_process_leaves_nothing(small_disk: Path) -> None:
    before, names = free_on(small_disk), os.listdir(small_disk)
    with Peer(MEMSAVER_HOST_DEVICE=fresh_device(), MEMSAVER_DISK_DIR=str(small_disk)) as peer:
        peer.run("region = memsaver.region('a', device='cpu', backup='disk')")
        peer.run("held = region._core.allocate_array(30 << 20)")
        peer.run("region.pause()")
        assert free_on(small_disk) <= before - 30 * MIB
        assert os.listdir(small_disk) == names
        peer.kill()
        until(lambda: free_on(small_disk) == about(before))
    assert os.listdir(small_disk) == names


def test_a_process_killed_while_it_writes_leaves_nothing(disk: Path) -> None:
    with Peer(MEMSAVER_HOST_DEVICE=fresh_device(), MEMSAVER_DISK_DIR=str(disk)) as peer:
        peer.run("region = memsaver.region('a', device='cpu', backup='disk')")
        peer.run("held = region._core.allocate_array(150 << 20)")
        peer.send("region.pause(progress=lambda done, total: print(done, flush=True))")
        assert peer.process.stdout is not None
        assert int(peer.process.stdout.readline()) > 0
        peer.kill()
    assert list(disk.iterdir()) == []


# Where there is no room


def test_a_full_disk_is_an_error_before_anything_moves(make: Make, small_disk: Path) -> None:
    drop_backups()
    region = make("disk")
    held = blocks(region, [40 * MIB, 20 * MIB])
    mapped, before = region.mapped_bytes, free_on(small_disk)
    for _ in range(2):
        with pytest.raises(memsaver.BackupError) as caught:
            region.pause()
        error = caught.value
        assert (error.needed_bytes, error.held_bytes, error.available_bytes) == (60 * MIB, 0, about(before))
        for part in (str(60 * MIB), str(error.available_bytes), str(small_disk)):
            assert part in str(error)
        assert (region.state, region.mapped_bytes, region.backup_bytes) == ("active", mapped, 0)
        assert (free_on(small_disk), used_on_disk()) == (about(before), 0)  # for others to use
        for block in held:
            block.check()
    del held[1], block
    region.pause()
    region.resume()
    held[0].check()


def test_a_switch_whose_files_do_not_fit_together_leaves_no_file(make: Make, small_disk: Path) -> None:
    one, two, back = make("disk"), make("disk"), make("host")
    held = blocks(one, [30 * MIB]) + blocks(two, [30 * MIB], seed=5) + blocks(back, [5 * MIB], seed=6)
    back.pause()
    before = free_on(small_disk)
    with pytest.raises(memsaver.BackupError):
        memsaver.switch(pause=[one.tag, two.tag], resume=back.tag)
    assert (one.state, two.state, back.state) == ("active", "active", "paused")
    assert unnamed_files(small_disk) == []
    assert free_on(small_disk) == about(before)
    back.resume()
    for block in held:
        block.check()


def test_a_limit_on_files_is_a_full_disk(disk: Path) -> None:
    said = run_clean(
        """
        import ctypes, resource, memsaver
        region = memsaver.region("a", device="cpu", backup="disk")
        held = region._core.allocate_array(20 << 20)
        contents = (ctypes.c_ubyte * (20 << 20)).from_address(region._core.live()[0][0])
        contents[5] = contents[19 << 20] = 7
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, -1))
        try:
            region.pause()
        except memsaver.BackupError as error:
            print(error.needed_bytes, region.state, region.backup_bytes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        region.pause()
        region.resume()
        print(contents[5], contents[19 << 20])
        """,
        MEMSAVER_DISK_DIR=str(disk),
    )
    assert said == f"{20 * MIB} active 0\n7 7\n"


def test_a_pause_without_descriptors_changes_nothing(disk: Path) -> None:
    said = run_clean(
        """
        import os, resource, memsaver
        region = memsaver.region("a", device="cpu", backup="disk")
        held = region._core.allocate_array(20 << 20)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [os.dup(0)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
        try:
            region.pause()
        except memsaver.BackupError as error:
            print("Too many open files" in str(error), region.state, region.backup_bytes)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        region.pause()
        print(region.state)
        """,
        MEMSAVER_DISK_DIR=str(disk),
    )
    assert said == "True active 0\npaused\n"


def test_a_pause_without_host_memory_for_the_blocks_changes_nothing(make: Make, disk: Path) -> None:
    drop_backups()
    region = make("disk")
    held = blocks(region, [40 * MIB])
    mapped = region.mapped_bytes
    memsaver.configure(host_limit=host_held_bytes() + 4 * MIB)
    with pytest.raises(memsaver.BackupError, match="host_limit"):
        region.pause()
    assert (region.state, region.mapped_bytes, region.backup_bytes) == ("active", mapped, 0)
    assert (used_on_disk(), unnamed_files(disk)) == (0, [])
    held[0].check()
    memsaver.configure(host_limit=None)
    region.pause()
    region.resume()
    held[0].check()


def drop_all_but(region: memsaver.Region) -> int:
    """Releases the unused host memory. Returns the bytes that are still held."""
    for each in memsaver.regions.all_regions():
        if each is not region:
            each.resume()
            each.thaw()
    memsaver.release_host_memory()
    return host_held_bytes()


def test_a_switch_reserves_the_host_memory_that_reading_a_file_takes(make: Make, disk: Path) -> None:
    """A shortage of host memory raises before the outgoing regions are paused."""
    out, back = make("none"), make("disk")
    held = blocks(back, [40 * MIB], seed=5)
    back.pause()
    held += blocks(out, [40 * MIB])
    memsaver.configure(host_limit=drop_all_but(back))
    with pytest.raises(memsaver.BackupError, match="host_limit"):
        memsaver.switch(pause=out.tag, resume=back.tag)
    assert (out.state, back.state) == ("active", "paused")
    held[1].check()
    memsaver.configure(host_limit=None)
    memsaver.switch(pause=out.tag, resume=back.tag)
    held[0].check()


# Where there is no directory


def test_a_region_on_disk_needs_a_directory() -> None:
    said = run_clean("""
        import memsaver
        calls = [
            lambda: memsaver.region("b", device="cpu", backup="disk"),
            lambda: memsaver.region("a", device="cpu", backup="host").pause(backup="disk"),
        ]
        held = memsaver.region("a", device="cpu", backup="host")._core.allocate_array(100)
        for call in calls:
            try:
                call()
            except memsaver.ConfigError as error:
                print(error.option, "configure(disk_dir=...) or MEMSAVER_DISK_DIR" in str(error))
        print([(region.backup, region.state) for region in memsaver.regions.all_regions()])
    """)
    assert said == "disk_dir True\ndisk_dir True\n[('host', 'active')]\n"


@pytest.mark.parametrize("value", ["", "/no/such/place", "/proc/self/status", None, 7, ["/tmp"]])
def test_an_invalid_directory_raises(disk: Path, value: Any) -> None:
    with pytest.raises(memsaver.ConfigError, match="disk_dir is") as caught:
        memsaver.configure(disk_dir=value, retain=1)
    assert (caught.value.option, caught.value.value) == ("disk_dir", value)
    options = memsaver.stats().options
    assert (options["disk_dir"], options.get("retain", 0)) == (str(disk), 0)


@pytest.mark.parametrize("kind", [os.fspath, Path, os.fsencode])
def test_disk_dir_takes_str_bytes_and_path(make: Make, disk: Path, kind: Callable[[Path], Any]) -> None:
    memsaver.configure(disk_dir=kind(disk))
    region = make("disk")
    block = Block(region, 100)
    region.pause()
    assert len(unnamed_files(disk)) == 1
    region.resume()
    block.check()


def test_a_removed_directory_raises_and_keeps_the_contents(make: Make, disk: Path) -> None:
    region = make("disk")
    block = Block(region, 5 * MIB)
    place = disk / "place"
    place.mkdir()
    memsaver.configure(disk_dir=place)
    region.pause()
    place.rmdir()  # the file lives on without a name
    region.resume()
    block.check()
    memsaver.release_host_memory()
    with pytest.raises(memsaver.BackupError, match="No such file"):
        region.pause()
    assert region.state == "active"
    memsaver.configure(disk_dir=disk)
    region.pause()
    region.resume()
    block.check()


# Corruption


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5 * MIB + 700])
def test_a_corrupted_file_is_noticed(make: Make, disk: Path, at: int) -> None:
    region = make("disk")
    held = blocks(region, [5 * MIB, 513, 35 * MIB])
    region.pause()
    file = os.open(f"/proc/self/fd/{unnamed_files(disk)[0]}", os.O_RDWR)
    try:
        original = os.pread(file, 1, at)
        os.pwrite(file, bytes([original[0] ^ 4]), at)
        os.fsync(file)
        for _ in range(2):
            with pytest.raises(memsaver.BackupError, match="checksum"):
                region.resume()
            assert (region.state, region.mapped_bytes) == ("paused", 0)
            assert region.backup_bytes == region.allocated_bytes
        os.pwrite(file, original, at)
        os.fsync(file)
    finally:
        os.close(file)
    region.resume()
    for block in held:
        block.check()


def test_a_file_that_was_cut_is_noticed(make: Make, disk: Path) -> None:
    region = make("disk")
    held = blocks(region, [35 * MIB])
    region.pause()
    file = os.open(f"/proc/self/fd/{unnamed_files(disk)[0]}", os.O_RDWR)
    rest = os.pread(file, 10 * MIB, 25 * MIB)
    os.ftruncate(file, 25 * MIB)
    with pytest.raises(memsaver.BackupError, match="pread"):
        region.resume()
    assert region.state == "paused"
    os.pwrite(file, rest, 25 * MIB)
    os.fsync(file)
    os.close(file)
    region.resume()
    held[0].check()


def test_corruption_in_a_switch_pauses_one_and_keeps_the_other(make: Make, disk: Path) -> None:
    out, back = make("host"), make("disk")
    held = blocks(back, [20 * MIB], seed=5)
    back.pause()
    held += blocks(out, [20 * MIB])
    file = os.open(f"/proc/self/fd/{unnamed_files(disk)[0]}", os.O_RDWR)
    original = os.pread(file, 4096, 0)
    os.pwrite(file, bytes(4096), 0)
    os.fsync(file)
    with pytest.raises(memsaver.BackupError, match="checksum"):
        memsaver.switch(pause=out.tag, resume=back.tag)
    assert (out.state, back.state, back.mapped_bytes) == ("paused", "paused", 0)
    out.resume()
    held[1].check()
    os.pwrite(file, original, 0)
    os.fsync(file)
    os.close(file)
    back.resume()
    held[0].check()


# Calls that fail


@pytest.fixture
def ledger() -> Ledger:
    use_device()
    drop_backups()
    return Ledger()


SIZES = [3 * MIB, 513, 31 * MIB]  # several blocks


@pytest.mark.parametrize("sizes", [SIZES, [33 * MIB, 513, 40 * MIB]], ids=["one batch", "several"])
def test_a_pause_whose_kth_call_fails_loses_nothing(
    make: Make, ledger: Ledger, fast_disk: Path, sizes: list[int]
) -> None:
    memsaver.configure(retain="1GiB")
    region = make("disk")
    held = blocks(region, sizes)
    whole = 0
    for error in Sweep("error", region.pause):
        assert region.state in ("active", "paused")
        if region.state == "active":
            assert error is not None
            assert (region.backup_bytes, unnamed_files(fast_disk)) == (0, [])
        whole += error is None  # the call was tried again
        region.resume()
        for block in held:
            block.check()
    assert whole >= 3  # a copy, a wait and a write at least
    del held, block
    region.resume()
    memsaver.configure(retain=0)
    ledger.check()


def test_a_resume_whose_kth_call_fails_loses_nothing(make: Make, ledger: Ledger, fast_disk: Path) -> None:
    memsaver.configure(retain="1GiB")
    region = make("disk")
    held = blocks(region, SIZES)
    region.pause()
    whole = 0
    for error in Sweep("error", region.resume):
        if error is not None:
            assert (region.state, region.mapped_bytes, len(unnamed_files(fast_disk))) == ("paused", 0, 1)
            region.resume()
        else:
            whole += 1
        for block in held:
            block.check()
        region.pause()
    assert whole >= 1  # a read
    del held, block
    region.resume()
    memsaver.configure(retain=0)
    ledger.check()


@pytest.mark.parametrize("backup", ["none", "host"])
def test_a_switch_whose_kth_call_fails_loses_nothing(make: Make, ledger: Ledger, fast_disk: Path, backup: str) -> None:
    out, back = make(backup), make("disk")
    there = blocks(back, [20 * MIB, 513], seed=5)
    back.pause()
    here = blocks(out, [9 * MIB, 20 * MIB])
    for error in Sweep("error", lambda: memsaver.switch(pause=out.tag, resume=back.tag)):
        was_active = out.state == "active"
        if was_active:
            assert error is not None and back.state == "paused"
            for block in here:
                block.check()
        memsaver.switch(pause=out.tag, resume=back.tag)
        for block in there:
            block.check()
        memsaver.switch(pause=back.tag, resume=out.tag)
        for seed, block in enumerate(here):
            if backup == "host":
                block.check()
            else:
                block.fill(seed)
    del here, there, block
    memsaver.resume([out.tag, back.tag])
    ledger.check()


def test_without_threads_to_spare_files_are_an_error_or_written_by_fewer(disk: Path) -> None:
    said = run_clean(
        """
        import ctypes, resource, memsaver
        region = memsaver.region("a", device="cpu", backup="disk")
        held = region._core.allocate_array(70 << 20)
        contents = (ctypes.c_ubyte * (70 << 20)).from_address(region._core.live()[0][0])
        contents[5] = contents[60 << 20] = 7
        region.pause()
        region.resume()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), hard))  # no stack fits
        try:
            region.pause()
        except memsaver.Error as error:
            print("thread" in str(error))
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        region.resume()
        print(region.state, contents[5], contents[60 << 20])
        """,
        MEMSAVER_DISK_DIR=str(disk),
    )
    assert said.splitlines()[-1] == "active 7 7"


# Several at once


def test_transitions_on_disk_from_several_threads_keep_all_contents(make: Make) -> None:
    regions = [make("disk") for _ in range(3)]
    held = [block for seed, region in enumerate(regions) for block in blocks(region, [17 * MIB, 700], 10 * seed)]
    errors: list[BaseException] = []

    def work(region: memsaver.Region) -> None:
        try:
            for _ in range(4):
                region.pause()
                region.resume()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(region,)) for region in regions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for block in held:
        block.check()
