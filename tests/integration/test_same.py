"""Processes that keep one copy of equal contents, on host devices. Each has one region, "reference"."""

from __future__ import annotations

import contextlib
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from tests.pool_support import Worker
from tests.support import GIB, KIB, MIB, environment, fresh_device, until

BLOCK = 8 * MIB
SIZES = [2 * BLOCK, 17 * KIB, BLOCK // 2 + 512, BLOCK]  # end to end: four blocks, the last one shorter
BLOCKS = 4
TOTAL = sum(SIZES)
Start = Callable[..., list[Worker]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes of one job with these contents. ``seeds``: of each."""
    with tempfile.TemporaryDirectory(prefix="ms") as directory, contextlib.ExitStack() as stack:
        settings = environment(MEMSAVER_POOL_DIR=directory)
        settings["MEMSAVER_HOST_DEVICE"] = str(int(fresh_device()) + GIB)
        job = SimpleNamespace(environment=settings)

        def begin(*seeds: int, **changes: str) -> list[Worker]:
            found = []
            for rank, seed in enumerate(seeds):
                options = {"MEMSAVER_POOL": "process", "MEMSAVER_JOB": "one", "RANK": str(rank), **changes}
                worker = stack.enter_context(Worker(job, **options))  # type: ignore[arg-type]
                worker.run("region = memsaver.region('reference', 'cpu', 'host', same_as='model')")
                worker.run(f"held = [Held(region, size, {seed} + size) for size in {SIZES}]")
                found.append(worker)
            return found

        yield begin


def together(workers: list[Worker], statement: str) -> list[str]:
    for each in workers:
        each.send(statement)
    return [each.answer() for each in workers]


def resume_and_check(workers: list[Worker]) -> None:
    together(workers, "region.resume()")
    together(workers, "[each.check() for each in held]")


def pause(workers: list[Worker]) -> list[int]:
    """Pauses as the ranks of a group do: all prepare, then all commit. Returns the bytes that each has copied."""
    together(workers, "turn = memsaver.transitions.prepare_pause('reference')")
    return [int(each) for each in together(workers, "print(turn.commit().copied_bytes)")]


def memory_of(workers: list[Worker]) -> dict[int, int]:
    """Bytes of the files in memory that have contents in common, by inode."""
    found = {}
    for each in workers:
        for name in os.listdir(f"/proc/{each.pid}/fd"):
            path = f"/proc/{each.pid}/fd/{name}"
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(path).startswith("/memfd:same-"):
                    status = os.stat(path)
                    found[status.st_ino] = status.st_blocks * 512
    return found


def private_bytes(workers: list[Worker]) -> list[int]:
    return [int(each) for each in together(workers, "print(memsaver.stats().devices['cpu'].host_held_bytes)")]


def test_four_processes_keep_one_copy_and_each_writes_a_share(start: Start) -> None:
    workers = start(1, 1, 1, 1)
    shares = pause(workers)
    assert sum(shares) == TOTAL and all(0 < each <= BLOCK for each in shares)
    [(inode, nbytes)] = memory_of(workers).items()
    assert TOTAL <= nbytes <= 1.05 * BLOCKS * BLOCK
    assert private_bytes(workers) == [0] * 4
    resume_and_check(workers)
    assert sum(pause(workers)) == 0  # the same contents are there
    resume_and_check(workers)
    together(workers, "controls.arm(1, call='cuMemHostRegister')")
    together(workers, "held[0].fill(9)")  # other contents, equal in all
    assert sum(pause(workers)) == SIZES[0]
    assert list(memory_of(workers).items()) == [(inode, nbytes)]
    resume_and_check(workers)


def test_a_process_that_pauses_alone_copies_all_and_later_ones_nothing(start: Start) -> None:
    workers = start(1, 1, 1)
    together(workers, f"held.append(Held(region, {9 * BLOCK}, 7))")  # more than a batch of copies
    copied = [int(each.run("print(region.pause().copied_bytes)")) for each in workers]
    assert copied == [TOTAL + 9 * BLOCK, 0, 0]
    resume_and_check(workers)
    together(workers, "[each.fill(number) for number, each in enumerate(held)]")
    assert sum(pause(workers)) == TOTAL + 9 * BLOCK
    resume_and_check(workers)


@pytest.mark.parametrize("odd", range(3))
def test_a_process_with_a_different_byte_is_named(start: Start, odd: int) -> None:
    workers = start(1, 1, 1)
    workers[odd].run(f"held[0].data[{BLOCK + 5}] ^= 1; held[0].expected = held[0].data.copy()")
    order = [workers[odd], *workers[:odd], *workers[odd + 1 :]] if odd == 0 else workers
    lines = [
        "try:",
        " turn = memsaver.transitions.prepare_pause(); print('prepared')",
        "except memsaver.SameError as error:",
        " print(error.block, [each[0] for each in error.processes], [each[2] for each in error.processes], error)",
    ]
    attempt = f"exec({chr(10).join(lines)!r})"
    if odd == 0:
        assert order[0].run(attempt) == "prepared"
        answers = together(order[1:], attempt)
    else:
        answers = [each for each in together(order, attempt) if each != "prepared"]
    assert answers
    for each in answers:
        assert each.startswith(f"1 [{workers[odd].pid}] [{odd}] region 'reference' with same_as='model': ")
        assert each.endswith("differ from the others; nothing has changed") and f"rank {odd}" in each
    together(workers, "turn = None; assert region.state == 'active'; [each.check() for each in held]")
    assert private_bytes(workers) == [0] * 3
    # Without the process, the others pause.
    rest = workers[:odd] + workers[odd + 1 :]
    pause(rest)
    assert workers[odd].fails("region.pause()").startswith("SameError")
    resume_and_check(rest)
    together(workers, "[each.check() for each in held]")


def test_two_processes_that_differ_are_both_named(start: Start) -> None:
    one, other = start(1, 2)
    one.run("region.pause()")
    text = other.fails("region.pause()")
    assert re.search(r"differ in block 0 .*no contents are those of most", text)
    assert str(one.pid) in text and str(other.pid) in text
    other.run("held.pop().free()")
    resume_and_check([one])
    one.run("held[1].free(); del held[1]; held[0].fill(3); region.pause()")
    other.run("held[0].fill(3); error = raised(region.pause); assert repickled(error).block == 2")


def test_processes_that_are_killed_take_nothing_from_the_others(start: Start) -> None:
    workers = start(1, 1, 1, 1)
    while len(workers) > 1:
        pause(workers)
        together(workers, "region.resume(); held[0].fill(%d)" % len(workers))  # noqa: UP031
        pause(workers)
        workers.pop(0).kill()  # the first one has made the memory
        resume_and_check(workers)
    pause(workers)
    [late] = start(5)
    assert late.fails("region.pause()").startswith("SameError")
    resume_and_check(workers)


def test_processes_killed_at_random_moments_of_a_pause_take_nothing_from_the_others(start: Start) -> None:
    choose = random.Random(3)
    workers = start(1, 1, 1)
    for turn in range(8):
        for each in workers:
            each.send("region.pause()")
        victim = workers.pop(choose.randrange(3))
        time.sleep(choose.random() * 0.15)
        victim.kill()
        for each in workers:
            each.answer()
        resume_and_check(workers)
        workers += start(1)
        together(workers, f"[each.fill({turn} + each.nbytes) for each in held]")


def test_a_process_that_is_killed_after_its_preparation_leaves_its_share_to_the_others(start: Start) -> None:
    workers = start(1, 1, 1)
    together(workers, "turn = memsaver.transitions.prepare_pause()")
    workers.pop(1).kill()
    copied = [int(each) for each in together(workers, "print(turn.commit().copied_bytes)")]
    assert sum(copied) >= TOTAL
    resume_and_check(workers)


def test_a_process_that_stops_in_its_pause_is_not_waited_for_and_keeps_its_contents(start: Start) -> None:
    workers = start(1, 1)
    together(workers, "turn = memsaver.transitions.prepare_pause()")
    workers[1].stop()
    assert int(workers[0].run("print(turn.commit().copied_bytes)")) == TOTAL
    resume_and_check(workers[:1])
    workers[0].run("held[0].fill(7)")
    assert workers[0].fails("region.pause()").startswith("SameError")  # its memory is the other's backup
    workers[1].go_on()
    workers[1].run("turn.commit()")
    resume_and_check(workers[1:])
    workers[0].run("region.pause()")
    resume_and_check(workers[:1])


def test_a_process_joins_while_another_gives_much_memory_up(start: Start) -> None:
    [one], [other] = start(1), start(1)
    other.run("[each.free() for each in held]; region.close()")
    one.run(f"held.append(Held(region, {24 * BLOCK}, 1)); region.pause(); region.resume()")
    one.send("memsaver.release_host_memory()")
    until(lambda: not memory_of([one]))  # it is being freed
    other.run("region = memsaver.region('reference', 'cpu', 'host', same_as='model')")
    one.answer()


def test_processes_of_another_job_keep_a_copy_of_their_own(start: Start) -> None:
    workers = start(1) + start(2, MEMSAVER_JOB="two")
    together(workers, "region.pause()")
    assert len(memory_of(workers)) == 2
    resume_and_check(workers)


def test_memory_that_all_processes_give_up_goes_back(start: Start) -> None:
    workers = start(1, 1)
    pause(workers)
    assert together(workers, "print(memsaver.release_host_memory())") == ["0", "0"]
    resume_and_check(workers)
    assert together(workers, "print(memsaver.release_host_memory())") == [str(BLOCKS * BLOCK)] * 2
    assert memory_of(workers) == {}
    pause(workers)
    resume_and_check(workers)
