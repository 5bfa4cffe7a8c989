"""Contents on a real device: the pipeline both ways at once, ahead, frozen, on disk, read while paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import memsaver
from tests.gpu.fixtures import Make, Neighbour
from tests.support import GIB, MIB, until

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
    return [int((tensor * weights).sum()) for tensor in tensors]


def host_bytes(name: str = "host_held_bytes") -> int:
    return memsaver.stats().asdict()["devices"]["cuda:0"][name]


@pytest.mark.parametrize("retain", [0, "16GiB"])
def test_contents_of_several_regions_survive_pauses_and_switches(fresh: Make, retain: str) -> None:
    memsaver.configure(retain=retain)
    regions = [fresh("contents", "host") for _ in range(3)]
    sizes = (40, 64 * MIB), (3, GIB), (700, 2 * MIB)
    held = [random_tensors(region, count, nbytes) for region, (count, nbytes) in zip(regions, sizes)]
    expected = [sums(tensors) for tensors in held]
    tags = [region.tag for region in regions]
    for _ in range(3):
        memsaver.pause(tags)
        memsaver.resume(tags[0])
        memsaver.switch(pause=tags[0], resume=tags[1:])
        memsaver.switch(pause=tags[1], resume=tags[0])
        memsaver.resume(tags)
        assert [sums(tensors) for tensors in held] == expected


def test_a_switch_in_place_needs_no_more_than_the_larger_side(
    fresh: Make, neighbour: Neighbour, driver_free: Callable[[], int]
) -> None:
    out, back = fresh("out", "host"), fresh("back", "host")
    coming = random_tensors(back, 64, 64 * MIB)
    there = sums(coming)
    back.pause()
    leaving = random_tensors(out, 48, 64 * MIB)
    here = sums(leaving)
    torch.cuda.empty_cache()
    neighbour.hold(1536 * MIB)
    lowest = [driver_free()]
    assert lowest[0] <= 2 * GIB
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            lowest.append(driver_free())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        memsaver.switch(pause=out.tag, resume=back.tag)  # 3 GiB out, 4 GiB in
        after = driver_free()
        memsaver.switch(pause=back.tag, resume=out.tag)
    finally:
        stop.set()
        watcher.join()
        neighbour.tell("release")
    assert min(lowest) >= after - 64 * MIB  # never more in use than with the larger side in
    assert sums(leaving) == here
    memsaver.switch(pause=out.tag, resume=back.tag)
    assert sums(coming) == there


def host_memory_rests() -> bool:
    held = host_bytes()
    time.sleep(0.5)
    return host_bytes() == held


def test_host_memory_grows_ahead_to_the_live_bytes(fresh: Make) -> None:
    memsaver.configure(backup_ahead=True)
    memsaver.release_host_memory()
    before = host_bytes()
    region = fresh("ahead", "host")
    tensors = random_tensors(region, 100, 20 * MIB)
    until(lambda: host_bytes() - before >= region.allocated_bytes)
    until(host_memory_rests)  # regions of other tests may count as well
    segments = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if region.owns(segment["address"]))
    assert segments == region.allocated_bytes
    held = host_bytes()
    others = sum(each.allocated_bytes for each in memsaver.regions.all_regions() if each is not region)
    assert held - before <= (segments + others) * 1.02 + 64 * MIB
    expected = sums(tensors)
    region.pause()
    assert host_bytes() == held  # the pause found it ready
    region.resume()
    assert sums(tensors) == expected


def test_graphs_are_captured_while_host_memory_grows(fresh: Make) -> None:
    region = fresh("beside", "host")
    done = threading.Event()

    def grow() -> None:
        held = []
        for _ in range(24):
            held.append(region.empty((128 * MIB,), torch.uint8))
            time.sleep(0.01)
        done.set()

    memsaver.configure(backup_ahead=True)
    memsaver.release_host_memory()
    value = torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        value.add_(0)
    torch.cuda.synchronize()
    thread = threading.Thread(target=grow)
    thread.start()
    captured = 0
    while not done.is_set() or captured == 0:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            for _ in range(50):
                value.add_(1)
        graph.replay()
        captured += 1
    thread.join()
    torch.cuda.synchronize()
    assert bool((value == 50 * captured).all())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_poison_is_nan_in_every_float_dtype(fresh: Make, dtype: torch.dtype) -> None:
    region = fresh("poison", fill="poison")
    tensor = region.empty((3 * MIB,), dtype)
    region.pause()
    region.resume()
    assert bool(tensor.float().isnan().all())


def test_contents_on_disk_come_back(fresh: Make, tmp_path: Path) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = fresh("disk", "disk")
    tensors = random_tensors(region, 30, 22 * MIB)
    expected = sums(tensors)
    for _ in range(2):
        assert region.pause().copied_bytes == 30 * 22 * MIB
        assert list(tmp_path.iterdir()) == []  # the file has no name
        assert host_bytes("host_used_bytes") == 0
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_regions_of_several_devices_move_in_one_transition() -> None:
    regions = [memsaver.region("several", device=f"cuda:{i}", backup="host") for i in range(torch.cuda.device_count())]
    tensors = [region.empty((512 * MIB,), torch.uint8).random_() for region in regions]
    expected = [tensor.cpu() for tensor in tensors]
    for _ in range(2):
        assert memsaver.pause("several").copied_bytes == 512 * MIB * len(regions)
        memsaver.resume("several")
    for tensor, kept in zip(tensors, expected):
        assert torch.equal(tensor.cpu(), kept)
