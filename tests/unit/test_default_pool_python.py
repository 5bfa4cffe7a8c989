"""The part of the default pool that is Python: torch's settings, and the threads that allocate elsewhere meanwhile."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import memsaver
from memsaver import _core
from memsaver._adapter import adapter
from memsaver._torch import default_pool as module
from memsaver._torch.default_pool import DefaultPools, default_pools
from memsaver.regions import Region
from tests.support import Make, thread_inside


@dataclass(eq=False)
class MadeUpRegion:
    device: str = "cuda:0"
    state: str = "active"
    tag: str = "torch"
    backup: str = "host"
    _index = Region._index


class MadeUpSidePools:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.now: set[int] = set()
        self.calls: list[tuple[str, int]] = []

    def has_begun(self, index: int) -> bool:
        return index in self.now

    def begin(self, index: int, allocator: object) -> bool:
        assert allocator == "plain", "of torch's own allocator"
        if _core.capturing():
            return False
        self.calls.append(("begin", index))
        self.now.add(index)
        return True

    def end(self, index: int) -> None:
        self.calls.append(("end", index))
        self.now.discard(index)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> MadeUpSidePools:
    made = MadeUpSidePools()
    monkeypatch.setattr(module, "side_pools", made)
    monkeypatch.setattr(module, "plain_allocator", lambda: "plain")
    return made


@pytest.fixture
def pools(side: MadeUpSidePools) -> tuple[DefaultPools, Any, Any]:
    made, first, second = DefaultPools(), MadeUpRegion("cuda:0"), MadeUpRegion("cuda:1")
    made.add(first)  # type: ignore[arg-type]
    made.add(second)  # type: ignore[arg-type]
    return made, first, second


@pytest.mark.parametrize("seed", range(5))
def test_threads_are_away_while_a_default_pool_is_paused_or_about_to_be(
    side: MadeUpSidePools, pools: Any, seed: int
) -> None:
    """Other transitions and threads refresh their routes at any time. No thread moves during a capture."""
    made, *both = pools
    choose, expected = random.Random(seed), list[tuple[Any, set[int]]]()
    for _ in range(500):
        region = choose.choice(both)
        act = choose.choice(["expect", "end", "end", "change", "refresh", "refresh", "capture"])
        before = set(side.now)
        if act == "expect":
            regions = choose.choice([[region], both, [MadeUpRegion("cuda:0")], []])
            numbers = {both.index(each) for each in regions if each in both}
            expected.append((made.expect_pause(regions), numbers))
            active = {number for number in numbers if both[number].state in ("active", "pausing")}
            assert side.now == before | active, "regions without memory are left alone"
        elif act == "capture" and region.state == "active" and both.index(region) not in before:
            _core.capture_begins()
            try:
                with pytest.raises(memsaver.Error, match="a CUDA graph is being captured"):
                    made.expect_pause([region])
            finally:
                _core.capture_ends()
            assert side.now == before
        elif act == "end" and expected:
            expected.pop(choose.randrange(len(expected)))[0]()
            assert side.now == before
        elif act == "change" and (both.index(region) in side.now or region.state != "active"):
            region.state = choose.choice(["active", "pausing", "paused", "resuming", "lost"])
        elif act == "refresh":
            made.move_threads_back()
            about = set().union(*(numbers for _, numbers in expected))
            assert side.now == {number for number in before if number in about or both[number].state != "active"}
    assert {("begin", 0), ("begin", 1), ("end", 0), ("end", 1)} <= set(side.calls)


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
    assert not thread.is_alive() and side.calls[-1] == ("end", 0)
    while left:
        left.pop()()
    made.move_threads_back()
    assert side.now == set()


def test_threads_move_before_the_pause_and_back_after_the_resume(
    make: Make, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    region, seen = make(tag=tag), list[str]()
    router: Any = adapter()  # without it there is no torch, and no thread to move

    def expect(regions: Any) -> Callable[[], None]:
        if not regions:  # of a resume
            return lambda: None
        assert list(regions) == [region]
        seen.append("expected " + region.state)
        return lambda: seen.append("ended " + region.state)

    monkeypatch.setattr(router, "expect_pause", expect)
    monkeypatch.setattr(default_pools, "move_threads_back", lambda: seen.append("back " + region.state))
    memsaver.pause(tag)
    assert seen == ["expected active", "ended paused", "back paused"]
    del seen[:]
    memsaver.pause(tag)  # an earlier transition may resume it before
    assert seen[0] == "expected paused"
    del seen[:]
    memsaver.resume(tag)
    assert seen[-1] == "back active"
    del seen[:]
    memsaver.transitions.prepare_pause(tag).abort()
    assert seen == ["expected active", "ended active", "back active"]
    del seen[:]
    dropped = memsaver.transitions.prepare_pause(tag)
    del dropped
    gc.collect()
    assert seen[0] == "expected active" and seen[1].startswith("ended")


def test_a_default_pool_is_not_paused_while_another_thread_is_inside_a_region_of_its_device(
    make: Make, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    torchs, other = make(tag=tag), make(tag=tag + "-other")
    router: Any = adapter()
    monkeypatch.setattr(default_pools, "_regions", {0: torchs})
    monkeypatch.setattr(default_pools, "move_threads_back", lambda: None)
    monkeypatch.setattr(router, "expect_pause", lambda regions: pytest.fail("no thread moves"))
    with thread_inside(other) as ident:
        with pytest.raises(memsaver.Error, match=rf"thread {ident} \('.+'\) is inside region '{tag}-other'"):
            memsaver.pause(tag)
        assert torchs.state == "active"
    monkeypatch.setattr(router, "expect_pause", lambda regions: lambda: None)
    with other:
        memsaver.pause(tag)
    memsaver.resume(tag)


# Arguments and settings


def test_a_second_call_needs_the_same_arguments_and_a_new_tag(pools: Any, make: Make, tag: str) -> None:
    made, *_ = pools
    made.check("torch", "cuda:0", "host")
    with pytest.raises(ValueError, match="the default pool of cuda:0 is region 'torch' with 'host'"):
        made.check("torch", "cuda:0", "none")
    with pytest.raises(ValueError, match="the default pool of cuda:0 is region 'torch'"):
        made.check("other", "cuda:0", "host")
    made.check(tag, "cpu", "host")
    make(tag=tag)
    with pytest.raises(ValueError, match=f"tag is '{tag}', which has a region on cpu, expected a new tag"):
        made.check(tag, "cpu", "host")


SIZES = "large_segment_size_mb:32"


def test_settings_of_torch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, former, expected in [
        ((2, 11), "max_split_size_mb:512", f"max_split_size_mb:512,expandable_segments:True,{SIZES}"),
        ((2, 11), "expandable_segments: True", f"expandable_segments: True,{SIZES}"),
        ((2, 11), "expandable_segments:true,large_segment_size_mb:256", None),
        ((2, 10), "max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
    ]:
        monkeypatch.setattr(module, "RELEASE", release)
        assert module._with_segments(former) == (expected or former)
    for off in ("expandable_segments:False", "expandable_segments: false,max_split_size_mb:64"):
        with pytest.raises(memsaver.Error, match="expandable_segments: ?[Ff]alse"):
            module._with_segments(off)
