"""Transitions in the background: order, results and errors."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import memsaver
from memsaver import _core
from tests.support import MIB, Block, Make, blocks, check, fresh_device, host_held_bytes, host_used_bytes, run_clean


@contextmanager
def guarded(region: memsaver.Region) -> Iterator[None]:
    """Delays every transition of a region, as a guarded launch does."""
    assert _core.acquire([region._core]) is None
    try:
        yield
    finally:
        _core.release([region._core])


def begin(side: str, region: memsaver.Region) -> memsaver.TransitionFuture:
    return memsaver.start(pause=region) if side == "pause" else memsaver.start(resume=region)


def test_a_transition_in_the_background_is_there_at_once_and_done_later(make: Make) -> None:
    region = make("host")
    held = blocks(region, [5 * MIB, 100])
    size, mapped = region.allocated_bytes, region.mapped_bytes
    with guarded(region):
        pause = memsaver.start(pause=region)
        assert not pause.done() and not pause.cancel()
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError):
                pause.result(timeout)
        held[0].check()
    done = pause.result(60)
    assert pause.result(0) is done and pause.done() and region.state == "paused"
    assert done == memsaver.Transition((region.tag,), (), mapped, 0, size, done.seconds)
    assert done.seconds > 0 and pickle.loads(pickle.dumps(done)) == done
    resume = memsaver.start(resume=region.tag).result()
    assert (resume.resumed, resume.copied_bytes) == ((region.tag,), size)
    check(held)
    assert memsaver.start().result(60) == memsaver.switch() == memsaver.pause([]) == memsaver.Transition()


def test_a_transition_can_be_awaited_without_holding_up_the_loop(make: Make) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [5 * MIB])
    hold = ExitStack()
    hold.enter_context(guarded(region))
    pause = memsaver.start(pause=region)

    async def wait() -> memsaver.Transition:
        return await pause

    async def release() -> None:
        hold.close()  # runs only if the await does not block the loop

    async def work() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)
        assert not pause.done()  # the cancelled await has not cancelled it
        done, another, _ = await asyncio.gather(wait(), memsaver.start(pause=other), release())
        assert (done.paused, another.paused) == ((region.tag,), (other.tag,))
        assert await pause is done  # again

    with hold:
        asyncio.run(work())
    region.resume()
    held[0].check()


def test_entering_a_region_before_its_queued_pause_fails_the_pause(make: Make) -> None:
    region, other = make("host"), make()
    block = Block(region, MIB)
    with ExitStack() as inside:
        with guarded(other):
            first = memsaver.start(pause=other)
            pause = memsaver.start(pause=[region, other])  # waits for the first
            inside.enter_context(region)
        with pytest.raises(memsaver.Error, match="inside it"):
            pause.result()
        assert region.state == "active"
    first.result()
    block.check()


def test_transitions_of_a_region_happen_in_the_order_in_which_they_were_made(make: Make) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [host_held_bytes() - host_used_bytes() + 5 * MIB, 100]) + blocks(other, [MIB])
    memsaver.configure(host_limit=0)
    with guarded(region):
        moves = [begin(side, region) for side in ("pause", "resume", "pause")]
    assert moves[1].result().resumed == ()  # it was not paused
    for failed in (moves[0], moves[0], moves[2]):  # each with its own error
        with pytest.raises(memsaver.BackupError, match="host_limit"):
            failed.result()
    assert moves[0].done() and isinstance(moves[0].exception(), memsaver.BackupError)
    memsaver.configure(host_limit=None)
    with guarded(region):
        moves = [begin(side, region) for side in ("pause", "resume", "pause", "pause", "resume", "pause")]
        assert other.pause().paused == other.resume().resumed == (other.tag,)  # no common region, so no wait
        assert not any(move.done() for move in moves)
    tag = (region.tag,)
    assert [(move.result().paused, move.result().resumed) for move in moves] == [
        (tag, ()), ((), tag), (tag, ()), ((), ()), ((), tag), (tag, ()),
    ]  # fmt: skip
    assert (region.state, region.mapped_bytes) == ("paused", 0)
    region.resume()
    check(held)


def test_waits_end_with_the_interpreter_and_other_threads_of_the_program_go_on(tmp_path: Path) -> None:
    source = """
        import subprocess, sys, threading, memsaver
        from memsaver.broker import discovery
        from tests.support import MIB, Block
        begun = memsaver.region("begun", "cpu", "host")
        same = memsaver.region("same", "cpu", "host", same_as="model")
        large = memsaver.region("large", "cpu")
        mine = memsaver.region("mine", "cpu", "host")
        held = [Block(same, MIB), Block(mine, MIB)]
        held.append(large._core.allocate_array(memsaver.stats().devices["cpu"].free_bytes - 16 * MIB))
        large.pause()
        held.append(Block(begun, 32 * MIB))
        holder = subprocess.Popen(
            [sys.executable, "-c", "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, 2, 1); "
             "print(flush=True); sys.stdin.read()", str(discovery.common_path("model"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        holder.stdout.readline()
        half = memsaver.transitions.prepare_pause(begun)
        waiting = {
            "queue": memsaver.start(pause=begun), "lock": memsaver.start(pause=same),
            "memory": memsaver.start(resume=large, memory_timeout=1e6),
        }

        def work():
            for name, each in waiting.items():
                print(name, type(each.exception()).__name__, flush=True)
            mine.pause()  # the bound has passed
            mine.resume()
            held[1].check()
            print([each.state for each in (same, large, mine)], flush=True)
            holder.kill()
            holder.communicate()

        threading.Thread(target=work).start()
    """
    settings = {"MEMSAVER_HOST_DEVICE": fresh_device(), "MEMSAVER_POOL_DIR": str(tmp_path / "pools")}
    expected = "queue Error\nlock Error\nmemory OutOfMemoryError\n['active', 'paused', 'active']\n"
    assert run_clean(source, **settings) == expected
