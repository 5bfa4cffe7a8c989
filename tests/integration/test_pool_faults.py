"""A shared pool whose clients and brokers are killed at random moments, or whose driver calls fail one after the other.

MEMSAVER_TEST_KILLS multiplies the number of kills, and MEMSAVER_TEST_SEED is the first seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_support import Running
from tests.pool_support import Worker, is_whole
from tests.support import MIB, until

CLIENT_KILLS = 100 * int(os.environ.get("MEMSAVER_TEST_KILLS", "1"))
BROKER_KILLS = 20 * int(os.environ.get("MEMSAVER_TEST_KILLS", "1"))
FIRST_SEED = int(os.environ.get("MEMSAVER_TEST_SEED", "0"))
CAPACITY = 64 * MIB  # less than two clients would sometimes like to have
PATIENCE_S = 60.0


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running(str(CAPACITY)) as running:
        yield running


def books(broker: Running) -> tuple[dict[str, Any], set[int]]:
    """The status, and the pids in it. Checks that each byte is in one place."""
    status = broker.status()
    held = sum(row["held_bytes"] for row in status["clients"])
    assert held + status["idle_bytes"] + status["leaving_bytes"] == status["total_bytes"], status
    return status, {row["pid"] for row in status["clients"]}


class Survivors:
    """Clients that are not killed, and report contents that have changed."""

    def __init__(self, broker: Running, halt: Path, count: int) -> None:
        self.halt = halt
        self.workers = [Worker(broker) for _ in range(count)]

    def go(self, seed: int) -> None:
        self.halt.unlink(missing_ok=True)
        for number, worker in enumerate(self.workers):
            worker.send(f"print(moves({seed} * 10 + {number}, {str(self.halt)!r}, '-{seed}'))")

    def rest(self) -> None:
        """Checks contents, then releases the memory."""
        self.halt.touch()
        for worker in self.workers:
            assert "resume" in worker.answer()
            worker.run("memsaver.pause()")

    def __enter__(self) -> Survivors:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            with worker:
                pass


def settled(broker: Running) -> dict[str, Any]:
    """The status, once the pool is whole."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_whole(status := broker.status()):
        assert time.monotonic() < deadline, f"not whole within {PATIENCE_S} s: {status}"
    return status


def check_all(broker: Running, claimant: Worker) -> None:
    """With everybody at rest: all is there, once, and a client that comes can have it."""
    status = settled(broker)
    assert status["idle_bytes"] == status["total_bytes"] == int(claimant.run("print(used_bytes())")), status
    claimant.run(f"claim({CAPACITY})")
    assert settled(broker)["idle_bytes"] == CAPACITY == int(claimant.run("print(used_bytes())"))


def test_clients_killed_at_random_moments_leave_the_pool_consistent(broker: Running, tmp_path: Path) -> None:
    with (
        Survivors(broker, tmp_path / "halt", 1) as survivors,
        Worker(broker) as nursery,
        Worker(broker) as claimant,
    ):
        for begin in range(FIRST_SEED, FIRST_SEED + CLIENT_KILLS, 50):
            survivors.go(begin)
            for seed in range(begin, min(begin + 50, FIRST_SEED + CLIENT_KILLS)):
                pid, ended = map(int, nursery.run(f"print(client_dies({seed}))").split())
                assert ended == -signal.SIGKILL, f"seed {seed}: the client ended with {ended}"
                until(lambda: pid not in books(broker)[1], PATIENCE_S)  # noqa: B023
            survivors.rest()
            check_all(broker, claimant)


def test_brokers_killed_at_random_moments_leave_contents_intact(broker: Running, tmp_path: Path) -> None:
    with Survivors(broker, tmp_path / "halt", 2) as survivors, Worker(broker) as claimant:
        claimant.run("region = memsaver.region('claim')")
        pids = {worker.pid for worker in (*survivors.workers, claimant)}
        for begin in range(FIRST_SEED, FIRST_SEED + BROKER_KILLS, 10):
            survivors.go(begin)
            for seed in range(begin, min(begin + 10, FIRST_SEED + BROKER_KILLS)):
                until(lambda: pids <= books(broker)[1], PATIENCE_S)
                choose = random.Random(seed)
                time.sleep(choose.random() * 0.05)
                late = choose.choice(survivors.workers) if choose.random() < 0.5 else None
                if late:
                    late.stop()
                broker.kill()
                broker.start()
                if late:
                    time.sleep(choose.random() * 0.3)  # the other joins before it, and takes the free chunks
                    late.go_on()
                until(lambda: pids <= books(broker)[1], PATIENCE_S)
            survivors.rest()
            check_all(broker, claimant)


# Faults in a client


@pytest.mark.parametrize("kind", ["error", "memory"])
@pytest.mark.parametrize("move", ["pause", "resume", "switch", "allocate", "free"])
@pytest.mark.parametrize("backup", ["none", "host"])
def test_a_call_that_fails_loses_nothing(broker: Running, move: str, backup: str, kind: str) -> None:
    with Worker(broker) as worker:
        failed = worker.run(f"print(sweep({move!r}, {backup!r}, {kind!r}))")
        assert int(failed) > 0
        worker.run("memsaver.pause()")
        settled(broker)
        assert broker.row(worker.pid)["held_bytes"] == 0
    with Worker(broker) as claimant:
        until(lambda: worker.pid not in books(broker)[1], PATIENCE_S)
        claimant.run(f"claim({CAPACITY})")
