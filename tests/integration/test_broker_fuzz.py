"""A broker that gets random messages from one client while another works.

MEMSAVER_TEST_SEED is the first seed, and MEMSAVER_TEST_PACKETS the number of packets for each seed.
"""

from __future__ import annotations

import os

import pytest

from tests.nursery import Fork
from tests.pool_support import ForkedBroker, Worker, chunks_of, descriptors_of, settled
from tests.support import MIB, PAGE, until

SEEDS = range(first := int(os.environ.get("MEMSAVER_TEST_SEED", "0")), first + 2)
PACKETS = int(os.environ.get("MEMSAVER_TEST_PACKETS", "1000"))
TURNS = 60


@pytest.mark.parametrize("seed", SEEDS)
def test_random_messages_of_one_client_do_not_affect_the_others(seed: int) -> None:
    with ForkedBroker(str(128 * MIB)) as broker:
        pid = broker.pid
        with Worker(broker, f"held = hold('a', 3 * MIB, 'host', {seed})", "memsaver.pause()") as worker:
            settled(broker)
            before = descriptors_of(pid) - chunks_of(pid)
            worker.send(f"take_turns(held, {TURNS})")
            with Fork(broker.environment, "tests.broker_fuzz") as stranger:
                stranger.run(f"say(Path({str(broker.path)!r}), {seed}, {PACKETS})")
            worker.answer()
            worker.run(f"take_turns(held, {TURNS})")  # also with the chunks that the other client has left
            until(lambda: len(settled(broker)["clients"]) == 1)
            broker.run("trim", "--device", "cpu")
            until(lambda: broker.status()["total_bytes"] == 0)
            until(lambda: chunks_of(pid) == 0)
            until(lambda: descriptors_of(pid) <= before, within_s=10)
            worker.run(f"claim({64 * PAGE})")
