"""Processes that borrow from one pool on a CUDA device: hand-overs, sent tensors, and killed processes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.broker_support import Running
from tests.pool_support import Worker, is_whole
from tests.support import GIB, MIB, until

pytestmark = pytest.mark.gpu

CAPACITY = 2 * GIB
CLIENT_KILLS, BROKER_KILLS = 20, 6
IMPORTS = "from tests.gpu.pool_clients import *"


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running(str(CAPACITY), "--device", "cuda:0") as running:
        yield running


def pids(broker: Running) -> set[int]:
    return {row["pid"] for row in broker.status()["clients"]}


def test_free_blocks_of_torch_come_after_the_queued_work(broker: Running) -> None:
    with Worker(broker, IMPORTS, f"numbers = Numbers('engine', {1536 * MIB}, 'host')", "memsaver.pause()") as engine:
        with Worker(broker, IMPORTS, f"trainer = Trainer({1024 * MIB})", "trainer.cache(0.5)") as trainer:
            engine.run("memsaver.resume(memory_timeout=60); numbers.check()")
            assert trainer.run("print(trainer.region.mapped_bytes)") == "0"
            engine.run("numbers.check(); memsaver.pause()")
            trainer.run("trainer.check(); trainer.step(); torch.cuda.synchronize()")


def test_memory_of_one_job_is_zero_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver zeroes it, also if the first job was killed with its broker. The jobs take most of the device."""
    nbytes = torch.cuda.mem_get_info()[0] * 8 // 10 // (256 * MIB) * (256 * MIB)
    for job in ("first", "second"):
        monkeypatch.setenv("MEMSAVER_JOB", job)
        until(lambda: torch.cuda.mem_get_info()[0] >= nbytes + GIB)
        with Running(str(nbytes + GIB), "--device", "cuda:0") as broker, Worker(broker, IMPORTS) as worker:
            worker.run(f"held = memsaver.region('held', DEVICE).empty(({nbytes},), torch.uint8)")
            count = "print(sum(int(part.count_nonzero()) for part in held.split(1 << 28)))"
            if job == "first":
                worker.run("held.fill_(0xA5)")
                assert worker.run(count) == str(nbytes)
            else:
                assert worker.run(count) == "0"


def test_the_next_owners_bytes_are_untouched_by_a_killed_clients_kernels(broker: Running) -> None:
    """No child holds the driver's descriptors here; tests/gpu/test_under_fire.py has clients with one."""
    with Worker(broker, IMPORTS) as victim, Worker(broker, IMPORTS) as heir:
        heir.run(f"numbers = Numbers('heir', {CAPACITY // 2})")
        heir.run("memsaver.pause()")
        victim.run(f"numbers = Numbers('victim', {CAPACITY})")
        heir.send("memsaver.resume(memory_timeout=60); numbers.fill(123)")
        until(lambda: broker.row(heir.pid)["waiting"])
        victim.run("write_for_long(numbers)")
        assert victim.run("print(is_busy())") == "True"
        victim.kill()
        heir.answer()
        for _ in range(10):
            heir.run("numbers.check()")
            time.sleep(0.1)
        assert victim.pid not in pids(broker)


def test_clients_killed_at_random_moments_leave_the_pool_consistent(
    broker: Running, tmp_path: Path, driver_free: Callable[[], int]
) -> None:
    free = driver_free()
    halt = tmp_path / "halt"
    with Worker(broker, IMPORTS) as survivor, Worker(broker, IMPORTS) as nursery:
        survivor.run(f"numbers = Numbers('numbers', {1280 * MIB}, 'host', 5)")
        survivor.send(f"print(survive(numbers, 1, {str(halt)!r}))")
        for seed in range(CLIENT_KILLS):
            pid, ended = map(int, nursery.run(f"print(client_dies({seed}))").split())
            assert ended == -signal.SIGKILL, f"seed {seed}: the client ended with {ended}"
            until(lambda: pid not in pids(broker), within_s=10)  # noqa: B023
            status = broker.status()
            in_use = sum(row["held_bytes"] for row in status["clients"])
            assert in_use + status["idle_bytes"] + status["leaving_bytes"] == status["total_bytes"] <= CAPACITY
        halt.touch()
        assert int(survivor.answer()) > 0
        survivor.run("memsaver.pause()")
        check_all(broker)
        survivor.run("memsaver.resume(memory_timeout=60); numbers.check()")
    broker.kill()
    until(lambda: driver_free() >= free - 256 * MIB)


def check_all(broker: Running) -> None:
    """All is there, and a client that comes can have it."""
    until(lambda: is_whole(broker.status()))
    status = broker.status()
    assert status["idle_bytes"] == status["total_bytes"] <= CAPACITY
    with Worker(broker, IMPORTS) as claimant:
        claimant.run(f"numbers = Numbers('all', {CAPACITY}, 'none', 9)")
        claimant.run("numbers.check()")
    until(lambda: claimant.pid not in pids(broker))


def test_brokers_killed_at_random_moments_leave_contents_intact(broker: Running, tmp_path: Path) -> None:
    halt = tmp_path / "halt"
    made = "numbers = Numbers('numbers', {} * MIB, 'host', {})"
    with Worker(broker, IMPORTS, made.format(1280, 5), "memsaver.pause()") as one, Worker(broker, IMPORTS) as two:
        two.run(made.format(1280, 6))
        for number, worker in enumerate((one, two)):
            worker.send(f"print(survive(numbers, {number}, {str(halt)!r})); memsaver.pause()")
        for seed in range(BROKER_KILLS):
            until(lambda: {one.pid, two.pid} <= pids(broker))
            time.sleep(random.Random(seed).random() * 0.4)
            broker.kill()
            broker.start()
        until(lambda: {one.pid, two.pid} <= pids(broker))
        halt.touch()
        for worker in (one, two):
            assert int(worker.answer()) > 0
        check_all(broker)
