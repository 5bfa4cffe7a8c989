"""The part of the default pool that is Python: torch's settings, and the threads that allocate elsewhere meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import memsaver
from memsaver import _core
from memsaver._adapter import adapter
from memsaver._torch import default_pool as module
from memsaver._torch.default_pool import DefaultPools, default_pools

Make = Callable[..., memsaver.Region]


@dataclass(eq=False)
class MadeUpRegion:
    device: str = "cuda:0"
    state: str = "active"
    tag: str = "torch"


class MadeUpSidePools:
    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.now: set[int] = set()
        self.calls: list[Any] = []  # in order

    def has_begun(self, index: int) -> bool:
        return index in self.now

    def begin(self, index: int, allocator: object) -> None:
        assert allocator == "plain", "of torch's own allocator"
        self.calls.append(("begin", index))
        self.begun.append(index)
        self.now.add(index)

    def end(self, index: int) -> None:
        self.calls.append(("end", index))
        self.ended.append(index)
        self.now.discard(index)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> MadeUpSidePools:
    made = MadeUpSidePools()
    monkeypatch.setattr(module, "side_pools", made)
    monkeypatch.setattr(module, "snapshot", lambda pool_id: [])
    monkeypatch.setattr(module, "plain_allocator", lambda: "plain")
    return made


@pytest.fixture
def pools(side: MadeUpSidePools) -> Iterator[tuple[DefaultPools, Any, Any]]:
    made, first, second = DefaultPools(), MadeUpRegion("cuda:0"), MadeUpRegion("cuda:1")
    made.add(first)  # type: ignore[arg-type]
    made.add(second)  # type: ignore[arg-type]
    yield made, first, second


def test_threads_move_for_the_devices_of_paused_default_pools_alone(side: MadeUpSidePools, pools: Any) -> None:
    made, first, second = pools
    assert made.move_threads_away([MadeUpRegion("cuda:0")]) == [] == side.begun
    assert made.move_threads_away([second]) == [1]
    assert made.move_threads_away([first, second]) == [0], "the threads of device 1 have moved"
    first.state, second.state = "pausing", "paused"
    made.move_threads_back()
    assert side.ended == []
    first.state = "active"  # the pause was given up
    made.move_threads_back()
    assert side.ended == [0]
    second.state = "active"
    made.move_threads_back()
    made.move_threads_back()
    assert side.ended == [0, 1]


def test_threads_stay_away_while_a_pause_is_expected(side: MadeUpSidePools, pools: Any) -> None:
    """Other transitions and threads refresh their routes while a pause waits for its turn."""
    made, first, _ = pools
    end = made.expect_pause([first])
    made.move_threads_back()
    assert side.ended == []
    other = made.expect_pause([first])
    end()
    made.move_threads_back()
    assert side.ended == [] and side.begun == [0]
    other()
    made.move_threads_back()
    assert side.ended == [0]


def test_threads_stay_away_between_a_resume_and_the_pause_behind_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    """Else torch could take a piece in the moment at which the region is active, and map it after the pause began."""
    region = make(tag=tag)
    memsaver.pause(tag)
    adapter()
    expected: list[Any] = []

    def expect(regions: Any) -> Callable[[], None]:
        expected.append(regions)
        return lambda: None

    monkeypatch.setattr(default_pools, "expect_pause", expect)
    memsaver.pause(tag)
    assert expected == [[region]]
    memsaver.resume(tag)


def test_a_dropped_pause_may_end_in_any_line(side: MadeUpSidePools, pools: Any) -> None:
    """A collection of garbage calls the function, in the thread that changes or reads the expected pauses."""
    made, first, second = pools
    left: list[Callable[[], None]] = [made.expect_pause([second]) for _ in range(100)]

    def collect(frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and left and frame.f_code.co_filename == module.__file__:
            sys.settrace(None)
            left.pop()()
            sys.settrace(collect)
        return collect

    def act() -> None:
        sys.settrace(collect)
        try:
            end = made.expect_pause([first])
            made.move_threads_back()
            end()
            made.move_threads_back()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and side.ended == [0]
    while left:
        left.pop()()
    made.move_threads_back()
    assert side.ended == [0, 1]


def test_a_second_call_needs_the_same_arguments_and_a_new_tag(
    pools: Any, make: Make, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    made, first, _ = pools
    first.tag, first.backup = "torch", "host"
    made.check("torch", "cuda:0", "host")
    with pytest.raises(ValueError, match="the default pool of cuda:0 is region 'torch' with 'host'"):
        made.check("torch", "cuda:0", "none")
    with pytest.raises(ValueError, match="the default pool of cuda:0 is region 'torch'"):
        made.check("other", "cuda:0", "host")
    made.check(tag, "cpu", "host")
    make(tag=tag)
    with pytest.raises(ValueError, match=f"tag is '{tag}', which has a region on cpu, expected a new tag"):
        made.check(tag, "cpu", "host")


def test_no_thread_moves_during_a_capture_or_for_a_region_without_memory(side: MadeUpSidePools, pools: Any) -> None:
    made, first, _ = pools
    _core.capture_begins()
    try:
        for move in (made.move_threads_away, made.expect_pause):
            with pytest.raises(memsaver.Error, match="a CUDA graph is being captured"):
                move([first])
        made.move_threads_away([MadeUpRegion("cuda:0")])  # no default pool
        assert side.calls == []
    finally:
        _core.capture_ends()
    made.move_threads_away([first])
    made.move_threads_back()
    assert side.ended == [0], "nothing is expected any more"
    for state in ("paused", "resuming", "lost"):
        first.state = state
        assert made.move_threads_away([first]) == []


def test_threads_move_before_the_pause_and_back_after_the_resume(
    make: Make, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    region, seen = make(tag=tag), list[str]()
    adapter()  # without it there is no torch, and no thread to move

    def away(regions: Any) -> list[int]:
        seen.append(region.state)
        return []

    def expect(regions: Any) -> Callable[[], None]:
        seen.append("expected " + region.state)
        return lambda: seen.append("ended " + region.state)

    monkeypatch.setattr(default_pools, "expect_pause", expect)
    monkeypatch.setattr(default_pools, "move_threads_away", away)
    monkeypatch.setattr(default_pools, "move_threads_back", lambda: seen.append("back " + region.state))
    memsaver.pause(tag)
    assert seen == ["expected active", "pausing", "ended paused", "back paused"]
    del seen[:]
    memsaver.resume(tag)
    assert seen[-1] == "back active"
    del seen[:]
    memsaver.transitions.prepare_pause(tag).abort()
    assert seen == ["expected active", "pausing", "ended active", "back active"]
    del seen[:]
    dropped = memsaver.transitions.prepare_pause(tag)
    del dropped
    gc.collect()
    assert seen[:2] == ["expected active", "pausing"] and seen[2].startswith("ended")


@contextmanager
def thread_inside(region: memsaver.Region) -> Iterator[int | None]:
    """Another thread, which is inside a region. Yields its number."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with region:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(60)
        yield thread.ident
    finally:
        leave.set()
        thread.join()


def test_a_pause_that_is_refused_moves_no_thread(make: Make, monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    region = make(tag=tag)
    monkeypatch.setattr(default_pools, "expect_pause", lambda regions: pytest.fail("a thread is inside the region"))
    with thread_inside(region), pytest.raises(memsaver.Error, match="is inside it"):
        memsaver.transitions.prepare_pause(tag)


def test_a_default_pool_is_not_paused_while_another_thread_is_inside_a_region_of_its_device(
    make: Make, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    torchs, other = make(tag=tag), make(tag=tag + "-other")
    monkeypatch.setattr(default_pools, "_regions", {0: torchs})
    monkeypatch.setattr(default_pools, "expect_pause", lambda regions: lambda: None)
    monkeypatch.setattr(default_pools, "move_threads_away", lambda regions: [])
    monkeypatch.setattr(default_pools, "move_threads_back", lambda: None)
    with thread_inside(other) as ident:
        with pytest.raises(memsaver.Error, match=rf"thread {ident} \('.+'\) is inside region '{tag}-other'"):
            memsaver.pause(tag)
        assert torchs.state == "active"
    with other:
        memsaver.pause(tag)
    memsaver.resume(tag)


SIZES = "large_segment_size_mb:32"


@pytest.mark.parametrize(
    ("former", "expected"),
    [
        ("", f"expandable_segments:True,{SIZES}"),
        ("max_split_size_mb:512", f"max_split_size_mb:512,expandable_segments:True,{SIZES}"),
        ("expandable_segments: True", f"expandable_segments: True,{SIZES}"),
        ("expandable_segments:true,large_segment_size_mb:256", None),
        ("large_segment_size_mb:256", "large_segment_size_mb:256,expandable_segments:True"),
    ],
)
def test_settings_of_torch_are_kept(former: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(module, "_settings", lambda: former)
    monkeypatch.setattr(module, "_set", made.append)
    found = module._settings_with_segments()
    assert (found is None) == (expected is None)
    if found is not None:
        module._apply(*found)
    assert made == ([] if expected is None else [expected])


def test_a_torch_without_the_size_of_pieces_gets_expandable_segments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def set_all(settings: str) -> None:
        if "large_segment_size_mb" in settings:
            raise ValueError("Unrecognized key 'large_segment_size_mb' in Accelerator allocator config.")
        made.append(settings)

    monkeypatch.setattr(module, "_settings", lambda: "max_split_size_mb:64")
    monkeypatch.setattr(module, "_set", set_all)
    found = module._settings_with_segments()
    assert found is not None
    module._apply(*found)
    assert made == ["max_split_size_mb:64,expandable_segments:True"]


@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments: false,max_split_size_mb:64"])
def test_segments_that_the_user_turned_off_are_not_turned_on(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_settings", lambda: settings)
    with pytest.raises(memsaver.Error, match="expandable_segments: ?[Ff]alse"):
        module._settings_with_segments()


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device is 'cpu', expected a CUDA device"):
        memsaver.default_pool(device="cpu")
    with pytest.raises(ValueError, match="backup"):
        memsaver.default_pool(device="cpu", backup="tape")
    with pytest.raises(TypeError, match="tag"):
        memsaver.default_pool(5)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "default_device", lambda: "cpu")
    with pytest.raises(ValueError, match="there is no CUDA device: torch has a default pool on CUDA devices alone"):
        memsaver.default_pool()
