"""Freed memory rests until its work has ended. A shortage on the device waits for it. The clock is virtual."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

import memsaver
from memsaver import _core
from tests import controls
from tests.support import MIB, Block, Fill, Make, until

SIZE = 8 * MIB
WAIT_S = 1.0  # of a shortage, at most


@pytest.fixture
def stream() -> Iterator[int]:
    _core.open_driver("cpu")
    controls.virtual_clock(True)
    stream = controls.stream_create()
    yield stream
    assert not controls.context_lost()  # no kernel lost its memory
    controls.stream_release(0)


def free_under_a_kernel(stream: int, block: Block, hold: float | None) -> float:
    """Frees a block on which a kernel works for ``hold`` seconds more. Returns the time."""
    controls.stream_touch(stream, block.address, block.nbytes, hold)
    return float(controls.clock_now())


def test_a_freed_segment_is_not_used_again_before_its_kernel_has_ended(make: Make, stream: int) -> None:
    region = make()
    block = Block(region, SIZE)
    address = block.address
    free_under_a_kernel(stream, block, None)
    del block
    second = Block(region, SIZE)
    assert second.address != address
    controls.stream_release(stream)
    controls.clock_pass(WAIT_S)
    assert Block(region, SIZE).address == address
    second.check()


def test_freed_memory_goes_back_when_its_kernel_has_ended_without_another_call(make: Make, stream: int) -> None:
    region = make()
    block = Block(region, SIZE)
    free_under_a_kernel(stream, block, None)
    del block
    assert region._core.mapped_bytes >= SIZE
    controls.stream_release(stream)
    controls.clock_pass(WAIT_S)  # where marks come late
    until(lambda: region._core.mapped_bytes == 0, within_s=20)


def test_the_thread_sets_no_marks(make: Make, stream: int) -> None:
    """A mark would break a capture of another library. Memory that was freed during a capture is marked at its end."""
    busy, other = make(), make()
    block, during = Block(busy, SIZE), Block(other, SIZE)
    free_under_a_kernel(stream, block, None)
    del block
    _core.capture_begins()
    del during
    _core.capture_ends()
    controls.capture_begin()  # of another library, which is not announced
    assert busy._core.mapped_bytes >= SIZE
    controls.stream_release(stream)
    controls.clock_pass(WAIT_S)  # where marks come late
    until(lambda: busy._core.mapped_bytes + other._core.mapped_bytes == 0, within_s=20)
    assert controls.capture_end(), "a mark broke the capture"


@pytest.mark.parametrize("way", ["allocation", "resume", "in vain"])
def test_a_shortage_waits_for_memory_that_another_region_freed_up_to_a_bound(make: Make, stream: int, way: str) -> None:
    busy, other = make(), make("host")
    late = Block(other, SIZE, seed=1) if way == "resume" else None
    if late is not None:
        other.pause()
    block = Block(busy, SIZE)
    with Fill():
        freed = free_under_a_kernel(stream, block, None if way == "in vain" else 0.5)
        del block
        if late is not None:
            other.resume()
        elif way == "in vain":
            with pytest.raises(memsaver.OutOfMemoryError):
                Block(other, SIZE)
            assert controls.clock_now() >= freed + WAIT_S
            controls.stream_release(stream)
        late = late or Block(other, SIZE)
        assert controls.clock_now() >= freed + 0.5
        late.check()


def test_two_allocations_wait_for_the_same_freed_memory_without_marks(
    make: Make, stream: int, request: pytest.FixtureRequest
) -> None:
    """As before CUDA 12.5: both wait for the device, and one of them returns the memory for both."""
    busy, takers = make(), (make(), make())
    request.addfinalizer(lambda: controls.record_supported(True))
    controls.record_supported(False)
    block = Block(busy, SIZE)
    with Fill(), ThreadPoolExecutor(2) as threads, controls.held("cuMemUnmap"):
        free_under_a_kernel(stream, block, 0.5)
        del block
        both = [threads.submit(each.empty, SIZE // 2, torch.uint8) for each in takers]
        until(lambda: controls.stopped("cuMemUnmap"))
        assert not wait(both, 0.2).done
        controls.go_on("cuMemUnmap")
        taken = [each.result(60) for each in both]
    del taken
