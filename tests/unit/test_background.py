"""Transitions in the background: order, results and errors; and the progress that all transitions report."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import _core
from tests import controls
from tests.support import MIB, Block, Fill, blocks, host_held_bytes, host_used_bytes, run_clean, until

Make = Callable[..., memsaver.Region]


class Guard:
    """Delays every transition of some regions, as a guarded launch does, until release()."""

    def __init__(self, *regions: memsaver.Region) -> None:
        self.cores = [region._core for region in regions]
        assert _core.acquire(self.cores) is None

    def release(self) -> None:
        cores, self.cores = self.cores, []
        if cores:
            _core.release(cores)


@pytest.fixture
def guard() -> Iterator[Callable[..., Guard]]:
    guards: list[Guard] = []

    def make_guard(*regions: memsaver.Region) -> Guard:
        guards.append(Guard(*regions))
        return guards[-1]

    yield make_guard
    for each in guards:
        each.release()


Hold = Callable[..., Guard]


def begin(side: str, region: memsaver.Region) -> memsaver.TransitionFuture:
    return memsaver.start(pause=region) if side == "pause" else memsaver.start(resume=region)


def test_a_transition_in_the_background_is_there_at_once_and_done_later(make: Make, guard: Hold) -> None:
    region = make("host")
    held = blocks(region, [5 * MIB, 100])
    size, mapped = region.allocated_bytes, region.mapped_bytes
    hold = guard(region)
    pause = memsaver.start(pause=region)
    assert not pause.done() and not pause.cancel()
    assert repr(pause) == f"<memsaver.TransitionFuture pause=({region.tag!r},), running>"
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="still under way"):
            pause.result(timeout)
    with pytest.raises(TypeError, match=r"cannot be pickled: pickle its result\(\)"):
        pickle.dumps(pause)
    held[0].check()
    hold.release()
    done = pause.result(60)
    assert pause.result(0) is done and pause.done() and region.state == "paused"
    assert repr(pause) == f"<memsaver.TransitionFuture pause=({region.tag!r},), done>"
    assert done == memsaver.Transition((region.tag,), (), mapped, 0, size, done.seconds)
    assert done.seconds > 0 and pickle.loads(pickle.dumps(done)) == done
    resume = memsaver.start(resume=region.tag).result()
    assert (resume.resumed, resume.copied_bytes) == ((region.tag,), size)
    for block in held:
        block.check()
    assert memsaver.start().result(60) == memsaver.switch() == memsaver.pause([]) == memsaver.Transition()


def test_a_transition_can_be_awaited_without_holding_up_the_loop(make: Make, guard: Hold) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [5 * MIB])
    hold = guard(region)
    pause = memsaver.start(pause=region)

    async def wait() -> memsaver.Transition:
        return await pause

    async def release() -> None:
        hold.release()  # runs only if the await does not block the loop

    async def work() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)
        assert not pause.done()  # the cancelled await has not cancelled it
        done, another, _ = await asyncio.gather(wait(), memsaver.start(pause=other), release())
        assert (done.paused, another.paused) == ((region.tag,), (other.tag,))
        assert await pause is done  # again

    asyncio.run(work())
    region.resume()
    held[0].check()


# Errors


def test_each_queued_transition_reports_its_own_error(make: Make, guard: Hold) -> None:
    region = make("host")
    held = blocks(region, [host_held_bytes() - host_used_bytes() + 5 * MIB])  # more than the idle bytes
    memsaver.configure(host_limit=0)
    hold = guard(region)
    pause, resume, again = (begin(side, region) for side in ("pause", "resume", "pause"))
    hold.release()
    assert resume.result().resumed == ()  # it was not paused
    for failed in (pause, pause, again):
        with pytest.raises(memsaver.BackupError, match="host_limit"):
            failed.result()
    assert pause.done() and isinstance(pause.exception(), memsaver.BackupError) and "failed: Backup" in repr(pause)
    memsaver.configure(host_limit=None)
    assert region.state == "active"
    held[0].check()


def test_contents_discarded_by_a_failed_pause_are_named_by_the_next_error(make: Make, guard: Hold) -> None:
    region = make("none")
    held = blocks(region, [MIB])
    for _ in range(5):
        hold = guard(region)
        pause, resume = memsaver.start(pause=region), memsaver.start(resume=region)
        controls.arm(2)  # synchronize, unmap
        hold.release()
        with pytest.raises(memsaver.DriverError, match="cuMemUnmap") as caught:
            pause.result()
        assert resume.result().resumed == (region.tag,)
        assert caught.value.discarded == (region.tag,)
    held[0].fill(1)


def test_wrong_arguments_are_refused_at_once(make: Make) -> None:
    region: Any = make("host")
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ValueError, {"pause": "no such tag"}),
        (ValueError, {"pause": region, "backup": "floppy"}),
        (ValueError, {"pause": region, "resume": region}),
        (ValueError, {"resume": region, "memory_timeout": -1}),
        (TypeError, {"resume": region, "memory_timeout": "soon"}),
        (TypeError, {"pause": region, "progress": 3}),
    ]
    for kind, options in wrong:
        for call in (memsaver.start, memsaver.switch):
            with pytest.raises(kind):
                call(**options)
    for call in (region.pause, region.resume):
        with pytest.raises(TypeError, match="progress is 'yes', expected something to call"):
            call(progress="yes")
    assert region.state == "active"
    assert region.pause().paused == (region.tag,)  # nothing stands in its queue


def test_a_background_pause_inside_the_region_raises(make: Make) -> None:
    region = make("host")
    with region:
        tensor = torch.full((100,), 3.0)
        with pytest.raises(memsaver.Error, match="inside it"):
            memsaver.start(pause=region)
        assert region.state == "active"
        region.pause()  # waiting for it, nothing else can happen
        region.resume()
    memsaver.start(pause=region).result()
    region.resume()
    assert bool((tensor == 3).all())


def test_entering_a_region_before_its_queued_pause_fails_the_pause(make: Make, guard: Hold) -> None:
    region, other = make("host"), make()
    block = Block(region, MIB)
    hold = guard(other)
    first = memsaver.start(pause=other)
    pause = memsaver.start(pause=[region, other])  # waits for the first
    with region:
        hold.release()
        with pytest.raises(memsaver.Error, match="inside it"):
            pause.result()
        assert region.state == "active"
    first.result()
    block.check()


# Queues


def test_transitions_of_a_region_happen_in_the_order_in_which_they_were_made(make: Make, guard: Hold) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [40 * MIB, 100]) + blocks(other, [MIB])
    hold = guard(region)
    sides = ("pause", "resume", "pause", "pause", "resume", "pause")
    moves = [begin(side, region) for side in sides]
    assert other.pause().paused == other.resume().resumed == (other.tag,)  # without a common region there is no wait
    assert not any(move.done() for move in moves)
    hold.release()
    tag = (region.tag,)
    assert [(move.result().paused, move.result().resumed) for move in moves] == [
        (tag, ()), ((), tag), (tag, ()), ((), ()), ((), tag), (tag, ()),
    ]  # fmt: skip
    assert (region.state, region.mapped_bytes) == ("paused", 0)
    region.resume()
    for block in held:
        block.check()


def test_overlapping_transitions_do_not_lock_each_other_out(make: Make, guard: Hold) -> None:
    one, two, three = regions = [make("host") for _ in range(3)]
    held = [Block(region, MIB, seed) for seed, region in enumerate(regions)]
    hold = guard(*regions)
    moves = [
        memsaver.start(pause=[one, two]),
        memsaver.start(pause=three, resume=one),
        memsaver.start(pause=one, resume=[two, three]),
        memsaver.start(pause=[three, two, one]),
        memsaver.start(resume=[two, one]),
        memsaver.start(resume=three),
    ]
    hold.release()
    for move in moves:
        move.result(60)
    assert moves[1].result().resumed == (one.tag,) and moves[2].result().resumed == (two.tag, three.tag)
    for block in held:
        block.check()


def test_a_resume_waits_for_memory_that_a_later_pause_frees(make: Make) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [40 * MIB])
    region.pause()
    held += blocks(other, [40 * MIB], seed=5)
    with Fill():
        resume = memsaver.start(resume=region, memory_timeout=60.0)
        until(lambda: region.state == "resuming")
        assert not resume.done()
        other.pause()
        assert resume.result().resumed == (region.tag,)
        held[0].check()
        region.pause()
    other.resume()
    held[1].check()


def test_the_process_exits_after_pending_transitions() -> None:
    """An error that nobody asks for is silent."""
    said = run_clean("""
        import atexit, sys, memsaver
        region = memsaver.region("a", device="cpu", backup="host")
        other = memsaver.region("b", device="cpu", backup="host")
        held = [region._core.allocate_array(150 << 20), other._core.allocate_array(30 << 20)]
        other.pause()
        memsaver.configure(host_limit=0)
        memsaver.start(pause="a")
        memsaver.start(resume="a").result()
        memsaver.configure(host_limit=None)
        atexit.register(lambda: print(region.state, other.state))
        moves = [memsaver.start(pause=region), memsaver.start(resume=other), memsaver.start(resume=region)]
        moves.append(memsaver.start(pause="a", resume="b"))
        sys.exit(0)
    """)
    assert said == "paused active\n"


# Progress


Reports = list[tuple[int, int]]
each_backup = pytest.mark.parametrize("backup", ["host", "disk"])


def check_reports(reports: Reports, copied: int) -> None:
    assert reports
    done = [each for each, _ in reports]
    assert done == sorted(done)
    assert all(0 < each <= total == copied for each, total in reports)
    assert reports[-1] == (copied, copied)


@each_backup
def test_progress_ends_at_the_copied_bytes(make: Make, tmp_path: Path, backup: str) -> None:
    """Several threads write and read a file, and each of them could call progress."""
    memsaver.configure(disk_dir=tmp_path)
    region = make(backup)
    held = blocks(region, [100, 70 * MIB, 5 * MIB])
    starts: list[Callable[..., memsaver.Transition]] = [
        region.pause, region.resume,
        lambda **options: memsaver.start(pause=region, **options).result(),
        lambda **options: memsaver.start(resume=region, **options).result(),
    ]  # fmt: skip
    for move in starts:
        reports: Reports = []
        inside = together = 0
        another = threading.Event()

        def note(done: int, total: int, to: Reports = reports, another: threading.Event = another) -> None:
            nonlocal inside, together
            inside += 1
            if inside > 1:
                together += 1
                another.set()
            elif not to:
                another.wait(0.1)  # time for another call to overlap
            to.append((done, total))
            inside -= 1

        done = move(progress=note)
        assert done.copied_bytes == region.allocated_bytes and not together
        check_reports(reports, done.copied_bytes)
    for block in held:
        block.check()


def test_progress_of_a_switch_counts_both_directions_and_can_ask_for_figures(make: Make) -> None:
    out, back, lost, other = make("host"), make("host"), make("none"), make("host")
    held = blocks(out, [70 * MIB]) + blocks(back, [90 * MIB], seed=5) + blocks(other, [MIB], seed=6)
    kept = blocks(lost, [9 * MIB])
    back.pause()
    reports: Reports = []
    seen: set[tuple[str, str]] = set()

    def look(done: int, total: int) -> None:
        memsaver.stats()
        other.pause()
        other.resume()
        seen.add((out.state, back.state))
        reports.append((done, total))

    done = memsaver.switch(pause=[out, lost], resume=back, progress=look)
    assert done.copied_bytes == 160 * MIB
    assert seen == {("pausing", "resuming")}
    check_reports(reports, 160 * MIB)
    memsaver.switch(pause=kept[0].region, resume=out)
    for block in held:
        block.check()


def test_progress_is_not_called_without_copies(make: Make, tag: str) -> None:
    region, frozen = make("none"), memsaver.region(tag, device="cpu", backup="host", frozen=True)
    held = blocks(region, [MIB]) + blocks(frozen, [MIB])
    reports: Reports = []

    def note(done: int, total: int) -> None:
        reports.append((done, total))

    for move in (region.pause, region.pause, region.resume, memsaver.switch):
        move(progress=note)
    frozen.pause()
    frozen.resume()
    frozen.pause(progress=note)
    frozen.resume(restore=False, progress=note)
    assert reports == []
    del held


@each_backup
def test_an_exception_in_progress_is_logged_and_an_interrupt_is_raised_at_the_end(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, backup: str
) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make(backup)
    block = Block(region, 70 * MIB)

    def fail(done: int, total: int) -> None:
        raise LookupError("of the caller's own")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for move in (region.pause, region.resume):
        caplog.clear()
        assert move(progress=fail).copied_bytes == 70 * MIB
        assert "of the caller's own" in caplog.text
        assert all(record.levelname == "ERROR" for record in caplog.records if record.exc_info)
    block.check()
    with pytest.raises(KeyboardInterrupt):
        region.pause(progress=interrupt)
    assert (region.state, region.mapped_bytes) == ("paused", 0)
    with pytest.raises(KeyboardInterrupt):
        region.resume(progress=interrupt)
    assert (region.state, region.backup_bytes) == ("active", 0)
    block.check()
    with pytest.raises(KeyboardInterrupt):
        memsaver.start(pause=region, progress=interrupt).result()
    assert region.state == "paused"
    region.resume()
    block.check()


def test_an_interrupt_in_progress_does_not_replace_an_error(make: Make) -> None:
    region = make("host")
    block = Block(region, 3 * MIB)
    region.pause()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    outcomes = set()
    for nth in range(1, 15):
        controls.arm(nth)
        try:
            region.resume(progress=interrupt)
        except (memsaver.Error, KeyboardInterrupt) as raised:
            outcomes.add((type(raised).__name__, region.state))
        controls.disarm()
        region.resume()
        block.check()
        region.pause()
    assert outcomes == {("DriverError", "paused"), ("KeyboardInterrupt", "active")}
    region.resume()
