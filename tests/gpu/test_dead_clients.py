"""Clients of a shared pool that are killed while kernels run and a forked child holds the driver's descriptors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.broker_support import Running
from tests.pool_support import SECOND_S, Worker, is_whole
from tests.support import GIB, until

pytestmark = pytest.mark.gpu

CAPACITY = 2 * GIB
KILLS = 10
IMPORTS = "from tests.gpu.pool_clients import *"


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running(str(CAPACITY), "--device", "cuda:0") as running:
        yield running


@pytest.fixture
def heir(broker: Running) -> Iterator[Worker]:
    with Worker(broker, IMPORTS, f"numbers = Numbers('heir', {CAPACITY // 2})", "memsaver.pause()") as worker:
        yield worker


def waits(broker: Running, worker: Worker) -> bool:
    return bool(broker.row(worker.pid)["waiting"])


def check_for_half_a_second(heir: Worker) -> None:
    for _ in range(10):
        heir.run("numbers.check()")
        time.sleep(0.05)


def test_a_child_that_closes_the_drivers_descriptors_delays_nothing(broker: Running, heir: Worker) -> None:
    for _ in range(KILLS):
        with Worker(broker, IMPORTS, MEMSAVER_CLOSE_ON_FORK="1") as victim:
            victim.run(f"numbers = Numbers('victim', {CAPACITY})")
            child = int(victim.run("print(fork_sleeper())"))
            try:
                heir.send("memsaver.resume(memory_timeout=60); numbers.fill(123)")
                until(lambda: waits(broker, heir))
                victim.run("write_for_long(numbers)")
                victim.kill()
                heir.answer()
                os.kill(child, 0)
                check_for_half_a_second(heir)
            finally:
                os.kill(child, signal.SIGKILL)
        heir.run("memsaver.pause()")


def test_memory_of_a_client_without_children_returns_at_its_exit(broker: Running) -> None:
    with Worker(broker, IMPORTS, f"numbers = Numbers('victim', {CAPACITY})") as victim:
        victim.run("write_for_long(numbers)")
        victim.kill()  # returns when the kernel has torn it down
        until(lambda: is_whole(status := broker.status()) and status["idle_bytes"] == status["total_bytes"], SECOND_S)
