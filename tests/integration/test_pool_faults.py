"""A shared pool whose clients and brokers are killed at random moments, or whose driver calls fail one after the other.

MEMSAVER_TEST_KILLS multiplies the number of kills, and MEMSAVER_TEST_SEED is the first seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.broker_support import Local, Running
from tests.pool_support import ForkedBroker, Worker, chunks_of, descriptors_of, mappings_of, rss_bytes, settled
from tests.support import MIB, PAGE, until

CLIENT_KILLS = 30 * int(os.environ.get("MEMSAVER_TEST_KILLS", "1"))
BROKER_KILLS = 8 * int(os.environ.get("MEMSAVER_TEST_KILLS", "1"))
FIRST_SEED = int(os.environ.get("MEMSAVER_TEST_SEED", "0"))
CAPACITY = 64 * MIB  # less than two clients would sometimes like to have
PATIENCE_S = 60.0


@pytest.fixture
def broker() -> Iterator[Running]:
    with ForkedBroker(str(CAPACITY)) as running:
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


def check_all(broker: Running, claimant: Worker) -> None:
    """With everybody at rest: all is there, once, and a client that comes can have it."""
    status = settled(broker)
    assert status["idle_bytes"] == status["total_bytes"] == int(claimant.run("print(used_bytes())")), status
    claimant.run(f"claim({CAPACITY})")
    assert settled(broker)["idle_bytes"] == CAPACITY == int(claimant.run("print(used_bytes())"))


def test_clients_killed_at_random_moments_leave_the_pool_consistent(broker: Running, tmp_path: Path) -> None:
    with Survivors(broker, tmp_path / "halt", 1) as survivors, Worker(broker) as claimant:
        for begin in range(FIRST_SEED, FIRST_SEED + CLIENT_KILLS, 30):
            survivors.go(begin)
            for seed in range(begin, min(begin + 30, FIRST_SEED + CLIENT_KILLS)):
                choose = random.Random(seed)
                with Worker(broker) as victim:
                    if choose.random() < 0.85:
                        victim.run("region = memsaver.region('host', 'cpu', 'host')")
                    victim.send(f"moves({seed})")
                    time.sleep(choose.random() * 0.03)
                    assert victim.is_there(), f"seed {seed}: the client has ended"
                    victim.kill()
                until(lambda: victim.pid not in books(broker)[1], PATIENCE_S)  # noqa: B023
            survivors.rest()
            check_all(broker, claimant)


def test_brokers_killed_at_random_moments_leave_contents_intact(broker: Running, tmp_path: Path) -> None:
    with Survivors(broker, tmp_path / "halt", 2) as survivors, Worker(broker) as claimant:
        claimant.run("region = memsaver.region('claim')")
        pids = {worker.pid for worker in (*survivors.workers, claimant)}
        for begin in range(FIRST_SEED, FIRST_SEED + BROKER_KILLS, 8):
            survivors.go(begin)
            for seed in range(begin, min(begin + 8, FIRST_SEED + BROKER_KILLS)):
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
def test_a_call_that_fails_loses_nothing(kind: str) -> None:
    with Local(CAPACITY) as broker, Worker(broker) as worker:
        for move in ("pause", "resume", "switch", "allocate", "free"):
            worker.run(f"sweep({move!r}, {kind!r})")
            settled(broker)
            assert broker.row(worker.pid)["held_bytes"] == 0
        worker.kill()
        until(lambda: not broker.status()["clients"], PATIENCE_S)
        with Worker(broker) as claimant:
            claimant.run(f"claim({CAPACITY})")


# Many turns

CLIENTS = 8
CHUNKS = 3  # enough for one client, and for a part of another's need
TURNS = int(os.environ.get("MEMSAVER_TEST_TURNS", "240"))
WARM_UP = 30  # of each client: descriptors have arrived, allocators have their caches
GROWTH = 2 * MIB  # of a process's memory: a margin for allocators and the interpreter
# M_MMAP_THRESHOLD: freed arrays go back to the system, also below used memory in the heap.
LARGE_ARRAYS_ARE_MAPPED = f"ctypes.CDLL(None).mallopt(-3, {MIB})"


def test_eight_clients_keep_contents_over_many_turns() -> None:
    """Nothing grows. ``MEMSAVER_TEST_TURNS=10000`` takes longer."""
    with ForkedBroker(str(CHUNKS * PAGE)) as broker, ExitStack() as stack:
        made = "held = hold('turns', PAGE + 4096, 'host', {})"  # of two chunks
        workers = [
            stack.enter_context(Worker(broker, LARGE_ARRAYS_ARE_MAPPED, made.format(number), "memsaver.pause()"))
            for number in range(CLIENTS)
        ]
        pids = [broker.pid, *(worker.pid for worker in workers)]
        for turns in (WARM_UP, TURNS // CLIENTS):
            before = {pid: (descriptors_of(pid) - chunks_of(pid), mappings_of(pid), rss_bytes(pid)) for pid in pids}
            for worker in workers:
                worker.send(f"take_turns(held, {turns})")
            for worker in workers:
                worker.answer()
            settled(broker)
        status = broker.status()
        assert status["idle_bytes"] == status["total_bytes"] == int(workers[0].run("print(used_bytes())"))
        assert len(status["clients"]) == CLIENTS
        for pid, (descriptors, mappings, nbytes) in before.items():
            until(lambda: descriptors_of(pid) - chunks_of(pid) <= descriptors)  # noqa: B023 - a connection closes late
            # The broker has the handle of a chunk beside its descriptor, which is a descriptor on the host device.
            assert chunks_of(pid) <= 2 * CHUNKS and mappings_of(pid) <= mappings + 16, pid
            assert rss_bytes(pid) - nbytes <= GROWTH, pid
