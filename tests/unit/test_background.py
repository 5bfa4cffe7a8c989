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
from tests.support import MIB, Block, Fill, blocks, free_bytes, host_held_bytes, host_used_bytes, run_clean, until

Make = Callable[..., memsaver.Region]
FIELDS = ["paused", "resumed", "released_bytes", "restored_bytes", "copied_bytes", "seconds"]


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


# Under way, and done


def test_a_transition_in_the_background_is_there_at_once_and_done_later(make: Make, guard: Hold) -> None:
    region = make("host")
    held = blocks(region, [5 * MIB, 100])
    size, mapped = region.allocated_bytes, region.mapped_bytes
    hold = guard(region)
    pause = region.pause(wait=False)
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
    assert (done.paused, done.resumed) == ((region.tag,), ())
    assert (done.released_bytes, done.restored_bytes, done.copied_bytes) == (mapped, 0, size)
    assert done.seconds > 0
    assert "released_bytes=" in repr(done)
    resume = memsaver.resume(region.tag, wait=False).result()
    assert (resume.resumed, resume.copied_bytes) == ((region.tag,), size)
    for block in held:
        block.check()


def test_a_transition_is_a_value(make: Make) -> None:
    region = make("host")
    for done in (region.pause(), region.resume(), memsaver.switch(), memsaver.pause([])):
        assert type(done) is memsaver.Transition
    empty = memsaver.pause([], wait=False)
    assert empty.done() and empty.result() == memsaver.Transition()
    done = region.pause()
    assert done == memsaver.Transition((region.tag,), (), 0, 0, 0, done.seconds) != memsaver.Transition()
    assert done != 3  # type: ignore[comparison-overlap]
    assert len({done, memsaver.Transition(), memsaver.Transition()}) == 2
    copy = pickle.loads(pickle.dumps(done))
    assert copy == done and copy is not done
    for name in FIELDS:
        with pytest.raises(AttributeError):
            setattr(done, name, 0)


# Awaiting


def test_a_transition_can_be_awaited_without_holding_up_the_loop(make: Make, guard: Hold) -> None:
    region = make("host")
    held = blocks(region, [5 * MIB])
    hold = guard(region)

    async def release() -> str:
        hold.release()  # runs only if the await does not block the loop
        return region.state

    async def work() -> None:
        pause = region.pause(wait=False)

        async def wait() -> memsaver.Transition:
            return await pause

        done, state = await asyncio.gather(wait(), release())
        assert done.paused == (region.tag,)
        assert state != "paused" or pause.done()
        assert await pause is done  # again

    asyncio.run(work())
    assert region.state == "paused"
    region.resume()
    held[0].check()


def test_a_cancelled_await_does_not_cancel_the_transition(make: Make, guard: Hold) -> None:
    region = make("host")
    held = blocks(region, [5 * MIB])
    hold = guard(region)
    pause = region.pause(wait=False)

    async def work() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(pause), 0.01)

    asyncio.run(work())
    assert not pause.done()
    hold.release()
    assert pause.result().paused == (region.tag,)
    region.resume()
    held[0].check()


async def _awaited(transition: memsaver.transitions.TransitionFuture) -> memsaver.Transition:
    return await transition


def test_transitions_can_be_gathered(make: Make) -> None:
    one, two = make("host"), make("host")
    held = blocks(one, [5 * MIB]) + blocks(two, [5 * MIB])

    async def work() -> tuple[memsaver.Transition, memsaver.Transition]:
        return await asyncio.gather(one.pause(wait=False), memsaver.pause(two, wait=False))

    assert [done.paused for done in asyncio.run(work())] == [(one.tag,), (two.tag,)]
    memsaver.resume([one, two])
    for block in held:
        block.check()


# Errors


def test_an_error_comes_with_the_result(make: Make) -> None:
    region = make("host")
    held = blocks(region, [host_held_bytes() - host_used_bytes() + 5 * MIB])  # more than the idle bytes
    memsaver.configure(host_limit=0)
    pause = region.pause(wait=False)
    for _ in range(2):
        with pytest.raises(memsaver.BackupError, match="host_limit"):
            pause.result()
    with pytest.raises(memsaver.BackupError):
        asyncio.run(_awaited(pause))
    assert pause.done() and isinstance(pause.exception(), memsaver.BackupError)
    assert region.state == "active"
    memsaver.configure(host_limit=None)
    region.pause()
    region.resume()
    held[0].check()


def test_each_queued_transition_reports_its_own_error(make: Make, guard: Hold) -> None:
    region = make("host")
    held = blocks(region, [host_held_bytes() - host_used_bytes() + 5 * MIB])  # more than the idle bytes
    memsaver.configure(host_limit=0)
    hold = guard(region)
    pause, resume = region.pause(wait=False), region.resume(wait=False)
    again = region.pause(wait=False)
    hold.release()
    with pytest.raises(memsaver.BackupError):
        pause.result()
    assert resume.result().resumed == ()  # it was not paused
    with pytest.raises(memsaver.BackupError):
        again.result()
    assert region.state == "active"
    held[0].check()


def test_contents_discarded_by_a_failed_pause_are_named_by_the_next_error(make: Make, guard: Hold) -> None:
    region = make("none")
    held = blocks(region, [MIB])
    for _ in range(25):
        hold = guard(region)
        pause, resume = region.pause(wait=False), region.resume(wait=False)
        controls.arm(2)  # synchronize, unmap
        hold.release()
        with pytest.raises(memsaver.DriverError, match="cuMemUnmap") as caught:
            pause.result()
        assert resume.result().resumed == (region.tag,)
        assert caught.value.discarded == (region.tag,)
    held[0].fill(1)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ValueError, lambda tag: memsaver.pause("no such tag", wait=False)),
        (ValueError, lambda tag: memsaver.pause(tag, backup="floppy", wait=False)),
        (ValueError, lambda tag: memsaver.switch(pause=tag, resume=tag, wait=False)),
        (ValueError, lambda tag: memsaver.resume(tag, memory_timeout=-1, wait=False)),
        (TypeError, lambda tag: memsaver.resume(tag, memory_timeout="soon", wait=False)),  # type: ignore[call-overload]
        (TypeError, lambda tag: memsaver.pause(tag, progress=3, wait=False)),  # type: ignore[call-overload]
        (TypeError, lambda tag: memsaver.pause(tag, progress="yes")),  # type: ignore[call-overload]
        (TypeError, lambda tag: memsaver.resume(tag, progress=[])),  # type: ignore[call-overload]
        (TypeError, lambda tag: memsaver.switch(pause=tag, progress=True)),  # type: ignore[call-overload]
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Make, kind: type[Exception], call: Callable[[str], object]) -> None:
    region = make("host")
    with pytest.raises(kind):
        call(region.tag)
    assert region.state == "active"
    assert region.pause().paused == (region.tag,)  # nothing stands in its queue


def test_a_background_pause_inside_the_region_raises(make: Make) -> None:
    region = make("host")
    with region:
        tensor = torch.full((100,), 3.0)
        with pytest.raises(memsaver.Error, match="inside it"):
            region.pause(wait=False)
        assert region.state == "active"
        region.pause()  # waiting for it, nothing else can happen
        region.resume()
    assert bool((tensor == 3).all())
    region.pause(wait=False).result()
    region.resume()
    assert bool((tensor == 3).all())


def test_entering_a_region_before_its_queued_pause_fails_the_pause(make: Make, guard: Hold) -> None:
    region, other = make("host"), make()
    block = Block(region, MIB)
    hold = guard(other)
    first = other.pause(wait=False)
    pause = memsaver.pause([region.tag, other.tag], wait=False)  # waits for the first
    with region:
        hold.release()
        with pytest.raises(memsaver.Error, match="inside it"):
            pause.result()
        assert region.state == "active"
    first.result()
    block.check()


# Queues


def test_transitions_of_a_region_happen_in_the_order_in_which_they_were_made(make: Make, guard: Hold) -> None:
    region = make("host")
    held = blocks(region, [40 * MIB, 100])
    hold = guard(region)
    moves = [getattr(region, name)(wait=False) for name in ("pause", "resume", "pause", "pause", "resume", "pause")]
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


def test_transitions_without_a_common_region_do_not_wait_for_each_other(make: Make, guard: Hold) -> None:
    one, two = make("host"), make("host")
    held = blocks(one, [MIB]) + blocks(two, [MIB], seed=5)
    hold = guard(one)
    slow = one.pause(wait=False)
    assert two.pause().paused == (two.tag,)
    assert two.resume(wait=False).result().resumed == (two.tag,)
    assert not slow.done()
    hold.release()
    slow.result()
    one.resume()
    for block in held:
        block.check()


def test_overlapping_transitions_do_not_lock_each_other_out(make: Make, guard: Hold) -> None:
    regions = [make("host") for _ in range(3)]
    held = [Block(region, MIB, seed) for seed, region in enumerate(regions)]
    one, two, three = (region.tag for region in regions)
    hold = guard(*regions)
    moves = [
        memsaver.pause([one, two], wait=False),
        memsaver.switch(pause=three, resume=one, wait=False),
        memsaver.switch(pause=one, resume=[two, three], wait=False),
        memsaver.pause([three, two, one], wait=False),
        memsaver.resume([two, one], wait=False),
        memsaver.resume(three, wait=False),
    ]
    hold.release()
    for move in moves:
        move.result(60)
    assert moves[1].result().resumed == (one,) and moves[2].result().resumed == (two, three)
    for block in held:
        block.check()


def test_a_resume_waits_for_memory_that_a_later_pause_frees(make: Make) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [40 * MIB])
    region.pause()
    held += blocks(other, [40 * MIB], seed=5)
    with Fill():
        resume = region.resume(memory_timeout=60.0, wait=False)
        until(lambda: region.state == "resuming")
        assert not resume.done()
        other.pause()
        assert resume.result().resumed == (region.tag,)
        held[0].check()
        back = other.resume(memory_timeout=60.0, wait=False)
        region.pause(wait=False)
        back.result()
        held[1].check()
    region.resume()
    held[0].check()


def test_many_transitions_leave_nothing_behind(make: Make) -> None:
    regions = [make("host") for _ in range(3)]
    held = [Block(region, MIB, seed) for seed, region in enumerate(regions)]
    before, used, threads = free_bytes(), host_used_bytes(), threading.active_count()
    moves = []
    for _ in range(20):
        moves += [region.pause(wait=False) for region in regions]
        moves += [region.resume(wait=False) for region in regions]
    for move in moves:
        move.result()
    until(lambda: threading.active_count() == threads)
    assert (free_bytes(), host_used_bytes()) == (before, used)
    for block in held:
        block.check()


# The end of the process


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del held"])
def test_the_process_exits_after_pending_transitions(end: str) -> None:
    said = run_clean(f"""
        import atexit, sys, memsaver
        region = memsaver.region("a", device="cpu", backup="host")
        other = memsaver.region("b", device="cpu", backup="host")
        held = [region._core.allocate_array(150 << 20), other._core.allocate_array(30 << 20)]
        other.pause()
        atexit.register(lambda: print(region.state, other.state))
        moves = [region.pause(wait=False), other.resume(wait=False), region.resume(wait=False)]
        moves.append(memsaver.switch(pause="a", resume="b", wait=False))
        {end}
    """)
    assert said == "paused active\n"


def test_an_error_of_an_unawaited_transition_is_silent() -> None:
    run_clean("""
        import memsaver
        memsaver.configure(host_limit=0)
        region = memsaver.region("a", device="cpu", backup="host")
        held = region._core.allocate_array(1 << 20)
        region.pause(wait=False)
    """)


# Progress


Reports = list[tuple[int, int]]


def check_reports(reports: Reports, copied: int) -> None:
    assert reports
    done = [each for each, _ in reports]
    assert done == sorted(done)
    assert all(0 < each <= total for each, total in reports)
    assert reports[-1] == (copied, copied)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("backup", ["host", "disk"])
def test_progress_ends_at_the_copied_bytes(make: Make, tmp_path: Path, backup: str, wait: bool) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make(backup)
    held = blocks(region, [100, 130 * MIB, 5 * MIB])
    moves: list[Callable[..., Any]] = [region.pause, region.resume]
    for move in moves:
        reports: Reports = []
        moved = move(wait=wait, progress=lambda done, total, to=reports: to.append((done, total)))
        done: memsaver.Transition = moved if wait else moved.result()
        assert done.copied_bytes == region.allocated_bytes
        check_reports(reports, done.copied_bytes)
        assert all(total == done.copied_bytes for _, total in reports)
    for block in held:
        block.check()


def test_progress_of_a_switch_counts_both_directions(make: Make) -> None:
    out, back, lost = make("host"), make("host"), make("none")
    held = blocks(out, [70 * MIB]) + blocks(back, [90 * MIB], seed=5) + blocks(lost, [9 * MIB])
    back.pause()
    reports: Reports = []
    done = memsaver.switch(
        pause=[out.tag, lost.tag], resume=back.tag, progress=lambda done, total: reports.append((done, total))
    )
    assert done.copied_bytes == 160 * MIB
    check_reports(reports, 160 * MIB)
    held[1].check()
    memsaver.switch(pause=back.tag, resume=out.tag)
    held[0].check()


def test_progress_is_called_by_one_thread_at_a_time_and_never_decreases(make: Make, tmp_path: Path) -> None:
    """Several threads write and read a file, and each of them could call progress."""
    memsaver.configure(disk_dir=tmp_path)
    region = make("disk")
    block = Block(region, 150 * MIB)
    for move in (region.pause, region.resume):
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
                another.wait(0.5)  # time for another call to overlap
            to.append((done, total))
            inside -= 1

        copied = move(progress=note).copied_bytes
        assert not together
        check_reports(reports, copied)
    block.check()


def test_progress_is_not_called_without_copies(make: Make, tag: str) -> None:
    region, frozen = make("none"), memsaver.region(tag, device="cpu", backup="host", frozen=True)
    held = blocks(region, [MIB]) + blocks(frozen, [MIB])
    reports: Reports = []

    def note(done: int, total: int) -> None:
        reports.append((done, total))

    region.pause(progress=note)
    region.pause(progress=note)
    region.resume(progress=note)
    memsaver.switch(progress=note)
    frozen.pause()
    frozen.resume()
    frozen.pause(progress=note)
    frozen.resume(restore=False, progress=note)
    assert reports == []
    del held


def test_progress_can_ask_for_figures(make: Make) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [5 * MIB]) + blocks(other, [MIB], seed=5)
    seen: list[Any] = []

    def look(done: int, total: int) -> None:
        memsaver.stats()
        other.pause()
        other.resume()
        seen.append(region.state)

    region.pause(progress=look)
    region.resume(progress=look)
    assert set(seen) == {"pausing", "resuming"}
    for block in held:
        block.check()


@pytest.mark.parametrize("backup", ["host", "disk"])
def test_an_exception_in_progress_is_logged_and_fails_nothing(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, backup: str
) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make(backup)
    block = Block(region, 70 * MIB)

    def fail(done: int, total: int) -> None:
        raise LookupError("of the caller's own")

    for move in (region.pause, region.resume):
        caplog.clear()
        assert move(progress=fail).copied_bytes == 70 * MIB
        assert "of the caller's own" in caplog.text
        assert all(record.levelname == "ERROR" for record in caplog.records if record.exc_info)
    block.check()
    region.pause(progress=lambda: None)  # type: ignore[arg-type,misc]
    assert "TypeError" in caplog.text
    region.resume()
    block.check()


@pytest.mark.parametrize("backup", ["host", "disk"])
def test_an_interrupt_in_progress_is_raised_when_the_transition_has_ended(
    make: Make, tmp_path: Path, backup: str
) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make(backup)
    block = Block(region, 70 * MIB)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        region.pause(progress=interrupt)
    assert (region.state, region.mapped_bytes) == ("paused", 0)
    with pytest.raises(KeyboardInterrupt):
        region.resume(progress=interrupt)
    assert (region.state, region.backup_bytes) == ("active", 0)
    block.check()
    pause = region.pause(wait=False, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        pause.result()
    assert region.state == "paused"
    region.resume()
    block.check()


def test_an_interrupt_does_not_replace_an_error(make: Make) -> None:
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
