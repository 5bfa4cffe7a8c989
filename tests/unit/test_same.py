"""``same_as`` in one process. For several processes see tests/integration/test_same.py."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import memsaver
from memsaver._torch import checksums
from memsaver._torch.checksums import block_sums
from tests import controls
from tests.support import KIB, MIB, Make, Sweep, blocks, check, host_held_bytes, run_clean, sparse_blocks

BLOCK = 8 * MIB
ROWS = 64 * KIB  # of a smaller block


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other runs of these tests use the same names at the same time."""
    monkeypatch.setenv("MEMSAVER_POOL_DIR", str(tmp_path / "pools"))


def sums(*arrays: np.ndarray) -> list[int]:
    return block_sums("cpu", [(each.ctypes.data, each.nbytes) for each in arrays], ROWS)


def test_words_are_read_at_multiples_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads no others."""
    folded, found = checksums._folded, []

    def spy(words: torch.Tensor) -> torch.Tensor:
        found.append(words.data_ptr() % 8)
        return folded(words)

    monkeypatch.setattr(checksums, "_folded", spy)
    monkeypatch.setattr(checksums, "_AT_ONCE", 4 * ROWS)
    sums(np.ones(5, np.uint8), np.ones(9 * ROWS, np.uint8))
    assert found and not any(found)


def common_bytes() -> int:
    return memsaver.stats().devices["cpu"].host_common_bytes


def test_blocks_that_have_not_changed_are_not_copied_again(make: Make, tag: str) -> None:
    region, free = make("host", same_as=tag), common_bytes()
    held = [*sparse_blocks(region, 3), *blocks(region, [9 * MIB + 512, 3 * KIB])]  # several batches of copies
    before, total = host_held_bytes(), region.allocated_bytes
    assert region.pause().copied_bytes == total
    assert (host_held_bytes(), common_bytes()) == (before, free + -(-total // BLOCK) * BLOCK)
    assert region.resume().copied_bytes == total
    check(held)
    assert region.pause().copied_bytes == 0
    region.resume()
    held[3].tensor[20 * KIB] += 1
    held[3].expected = held[3].tensor.numpy().copy()
    assert region.pause().copied_bytes == BLOCK
    region.resume()
    check(held)
    held += [*sparse_blocks(region, 3), *blocks(region, [BLOCK], 9)]  # the memory grows
    del held[1]
    region.pause()
    region.resume()
    check(held)
    held.clear()
    region.close()
    assert common_bytes() == free


def test_calls_that_fail_lose_no_contents(make: Make, tag: str) -> None:
    region = make("host", same_as=tag)
    held = blocks(region, [BLOCK, 3 * KIB])
    for number, _ in enumerate(Sweep("error", region.pause)):
        region.pause()
        region.resume()
        check(held)
        held[1].fill(number)
        memsaver.release_host_memory()
    region.pause()
    for _ in Sweep("error", region.resume):
        region.resume()
        check(held)
        region.pause()


def test_a_comparison_waits_for_work_in_flight_up_to_the_bound(make: Make, tag: str) -> None:
    region = make("host", same_as=tag)
    [block] = blocks(region, [3 * MIB])
    stream = controls.stream_create()
    controls.stream_write(stream, block.address + MIB, MIB, 7)
    with pytest.raises(memsaver.WaitTimeoutError) as raised:
        region.pause(timeout=0.1)
    assert (raised.value.stage, region.state) == ("device", "active")
    controls.stream_release(stream)
    block.expected = block.expected.copy()
    block.expected[MIB : 2 * MIB] = 7
    controls.stream_write(stream, block.address, KIB, 8, 0.2)
    block.expected[:KIB] = 8
    region.pause()
    region.resume()
    block.check()
    assert region.pause().copied_bytes == 0  # the sums were those of the contents
    region.resume()


def test_other_policies_and_failures_of_a_pause(make: Make, tag: str, tmp_path: Path) -> None:
    region, before = make("host", same_as=tag), common_bytes()
    [block] = blocks(region, [3 * MIB])
    with pytest.raises(ValueError, match=rf"lazy is True for {region.tag!r}, .* same_as={tag!r}, expected False"):
        region.pause(lazy=True)
    memsaver.configure(lazy=True)  # of the other regions
    assert region.pause().copied_bytes == 3 * MIB
    memsaver.configure(lazy=False)
    with pytest.raises(memsaver.BackupError, match="other processes use the same memory: use clone=True"):
        memsaver.cpu_backup(block.tensor)
    assert np.array_equal(memsaver.cpu_backup(block.tensor, clone=True).numpy(), block.expected)
    region.resume()
    region.pause(backup="none", lazy=True)
    region.resume()
    block.fill(2)
    memsaver.configure(disk_dir=str(tmp_path))
    region.pause(backup="disk")
    region.resume()
    block.check()
    assert common_bytes() == before + BLOCK
    memsaver.configure(verify=True)
    region.pause()
    region.resume()
    block.check()
    # A pause that fails keeps no copy.
    other = make("host")
    held = [block, *blocks(other, [BLOCK])]
    memsaver.release_host_memory()
    memsaver.configure(host_limit=BLOCK)
    with pytest.raises(memsaver.BackupError) as raised:
        memsaver.pause([region, other])
    assert region._common.leave() == BLOCK  # also while the traceback lives
    assert raised.value.regions == (region.tag, other.tag)
    check(held)


def test_a_file_that_could_not_grow_grows_in_the_next_pause(tmp_path: Path) -> None:
    """In a process of its own: a touch of memory beyond the end of the file would end it."""
    source = """
        import resource, memsaver
        from tests.support import MIB, Block
        region = memsaver.region("weights", device="cpu", backup="host", same_as="weights")
        block = Block(region, 20 * MIB)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MIB, hard))
        try:
            region.pause()
        except memsaver.Error as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        memsaver.configure(host_limit=24 * MIB)  # the failed call holds none of it
        region.pause()
        region.resume()
        block.check()
    """
    printed = run_clean(source, MEMSAVER_POOL_DIR=str(tmp_path / "pools"))
    assert printed.endswith("the file in memory cannot grow: File too large\n")


def test_wrong_arguments(make: Make, tag: str) -> None:
    for backup in ("none", "disk"):
        with pytest.raises(ValueError, match=f"same_as is {tag!r} and backup is {backup!r}, expected 'host'"):
            make(backup, same_as=tag)
    for wrong, kind in ((3, TypeError), ("", ValueError), ("a\n", ValueError)):
        with pytest.raises(kind, match="same_as is "):
            make("host", same_as=wrong)
    region = make("host", same_as=tag)
    with pytest.raises(ValueError, match=f"same_as is {tag!r}, which region {region.tag!r} of this process has on cpu"):
        make("host", same_as=tag)
    with pytest.raises(ValueError, match=f"same_as is 'x', but region {region.tag!r} was made with {tag!r}"):
        make("host", region.tag, same_as="x")
    assert make("host", region.tag) is region


def test_every_changed_byte_changes_a_sum_of_its_block_alone() -> None:
    array = np.frombuffer(random.Random(1).randbytes(2 * ROWS + 5001), np.uint8).copy()
    before = sums(array)
    assert len(before) == 6
    parts = [array[:3], array[3 : ROWS - 1], array[ROWS - 1 :]]
    assert sums(*(each.copy() for each in parts)) == before
    for at in (0, 1, 8191, 8192, ROWS - 1, ROWS, 2 * ROWS + 5000):
        for bit in (1, 128):
            array[at] ^= bit
            after = sums(array)
            array[at] ^= bit
            changed = [number for number in range(6) if before[number] != after[number]]
            assert changed == [at // ROWS * 2, at // ROWS * 2 + 1]


def test_changes_that_a_plain_sum_misses_change_the_sums() -> None:
    words = np.arange(ROWS // 8, dtype=np.int64)
    before = sums(words)
    for change in ([5, 2000], [5, 6], [1024, 2048]):  # within a row, and over rows
        for act in (lambda pair: pair[::-1].copy(), lambda pair: pair ^ np.int64(-(1 << 63)), lambda pair: pair ^ 1):
            kept = words[change].copy()
            words[change] = act(kept)
            assert all(one != other for one, other in zip(before, sums(words)))
            words[change] = kept
    assert sums(np.zeros(100, np.uint8)) != sums(np.zeros(101, np.uint8))
