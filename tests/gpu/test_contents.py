"""Contents on a real device: the pipeline both ways at once, on disk, in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memsaver
from tests.gpu.fixtures import Make
from tests.support import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    """Tensors of a test that failed must not fill the device of the next."""
    yield
    torch.cuda.empty_cache()
    memsaver.release_host_memory()


def random_tensors(region: memsaver.Region, count: int, nbytes: int) -> list[torch.Tensor]:
    with region:
        tensors = [torch.empty(nbytes // 8, dtype=torch.int64, device="cuda") for _ in range(count)]
    for tensor in tensors:
        tensor.random_()
    return tensors


def sums(tensors: list[torch.Tensor]) -> list[int]:
    """Checksums that compare contents without a second copy. They are weighted, so swapped pieces differ."""
    weights = torch.arange(1, tensors[0].numel() + 1, device="cuda")
    return torch.stack([(tensor * weights).sum() for tensor in tensors]).tolist()


def host_bytes(name: str = "host_held_bytes") -> int:
    return memsaver.stats().asdict()["devices"]["cuda:0"][name]


@pytest.mark.parametrize("retain", [0, "16GiB"])
def test_contents_of_several_regions_survive_pauses_and_switches(fresh: Make, retain: str) -> None:
    memsaver.configure(retain=retain)
    regions = [fresh("contents", "host") for _ in range(3)]
    sizes = (40, 64 * MIB), (2, 512 * MIB), (400, 2 * MIB)
    held = [random_tensors(region, count, nbytes) for region, (count, nbytes) in zip(regions, sizes)]
    expected = [sums(tensors) for tensors in held]
    tags = [region.tag for region in regions]
    for _ in range(2):
        memsaver.pause(tags)
        memsaver.resume(tags[0])
        memsaver.switch(pause=tags[0], resume=tags[1:])
        memsaver.switch(pause=tags[1], resume=tags[0])
        memsaver.resume(tags)
        assert [sums(tensors) for tensors in held] == expected


def test_host_memory_is_that_of_the_live_bytes(fresh: Make) -> None:
    memsaver.release_host_memory()
    before = host_bytes()
    region = fresh("live", "host")
    tensors = random_tensors(region, 100, 20 * MIB)
    segments = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if region.owns(segment["address"]))
    assert segments == region.allocated_bytes
    assert host_bytes() == before
    expected = sums(tensors)
    region.pause()
    assert host_bytes() - before <= segments * 1.02 + 64 * MIB
    region.resume()
    assert sums(tensors) == expected


def test_streams_go_on_beside_a_background_pause(fresh: Make) -> None:
    region = fresh("background", "host")
    tensors = random_tensors(region, 64, 64 * MIB)
    expected = sums(tensors)
    counter = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    moved = memsaver.start(pause=region)
    launched_while_under_way = 0
    while not moved.done():
        counter.add_(1)
        torch.cuda.current_stream().synchronize()
        launched_while_under_way += not moved.done()
    assert moved.result().paused == (region.tag,)
    assert launched_while_under_way > 10
    back = memsaver.start(resume=region)
    again = memsaver.start(pause=region)
    region.resume()
    assert back.done() and again.done()
    assert sums(tensors) == expected


def test_a_common_copy_has_contents_of_odd_lengths(
    fresh: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSAVER_POOL_DIR", str(tmp_path))
    region = fresh("odd", "host", same_as="odd lengths")
    held = [region.empty((nbytes,), torch.uint8).random_() for nbytes in (5, 40 * MIB, 3, 40 * MIB + 1)]
    expected = [each.cpu() for each in held]
    assert region.pause().copied_bytes == sum(each.numel() for each in held)
    region.resume()
    assert all(torch.equal(each.cpu(), one) for each, one in zip(held, expected))
