"""Tensors sent between clients of a shared pool: the broker keeps their leases, also over its own death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.broker_support import Running
from tests.pool_support import Worker, is_whole, running
from tests.support import MIB, until

CAPACITY = 64 * MIB
IMPORTS = "import gc, torch.multiprocessing; from multiprocessing.reduction import ForkingPickler"


@pytest.fixture
def broker() -> Iterator[Running]:
    with running(CAPACITY) as started:
        yield started


@pytest.fixture
def owner(broker: Running) -> Iterator[Worker]:
    with Worker(broker, IMPORTS, MEMSAVER_PATCHES="multiprocessing") as worker:
        worker.run("region = memsaver.region('weights', backup='host')")
        worker.run("weights = region.empty((3, 4, 5), torch.float32).copy_(torch.arange(60.0).view(3, 4, 5))")
        yield worker


@pytest.fixture
def other(broker: Running) -> Iterator[Worker]:
    with Worker(broker, IMPORTS) as worker:
        yield worker


def hand_over(owner: Worker, other: Worker, what: str) -> None:
    """The other process has the value as ``tensors``."""
    text = owner.run(f"print(bytes(ForkingPickler.dumps({what})).hex())")
    other.run(f"tensors = pickle.loads(bytes.fromhex({text!r}))")


def attached_bytes(broker: Running, worker: Worker) -> int:
    return int(broker.row(worker.pid)["attached_bytes"])


def region_state(broker: Running, worker: Worker) -> str:
    return str(broker.row(worker.pid)["regions"][0]["state"])


@pytest.mark.parametrize("move", ["pause", "switch", "prepare_pause", "whole"])
def test_a_pause_that_times_out_names_the_attached_processes(owner: Worker, other: Worker, move: str) -> None:
    hand_over(owner, other, "weights")
    owner.run("coming = memsaver.region('coming'); coming.pause()")
    moves = {
        "pause": "memsaver.pause('weights', reader_timeout=0.1)",
        "switch": "memsaver.switch(pause='weights', resume='coming', reader_timeout=0.1)",
        "whole": "memsaver.pause('weights', timeout=0.1, reader_timeout=1e9)",
        "prepare_pause": "memsaver.transitions.prepare_pause('weights', reader_timeout=0.1)",
    }
    text = owner.fails(moves[move])
    assert text.startswith("AttachedError") and f"(pid {other.pid})" in text and "'weights'" in text
    assert text.endswith(" (stage 'readers'); nothing has changed")
    assert owner.run("e = repickled(error); print(e.tag, e.stage, e.holders)").startswith(
        f"weights readers [({other.pid}, "
    )
    assert owner.run("print(region.state, coming.state)") == "active paused"
    owner.run("weights.add_(1); region.empty((10,), torch.float32)")
    other.run("assert tensors.sum() == 1830; del tensors; gc.collect()")
    owner.run(moves[move].replace("0.1", "10") + (".commit()" if move == "prepare_pause" else ""))
    assert owner.run("print(region.state)") == "paused"


def test_a_region_that_others_are_attached_to_is_not_closed(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    owner.run("del weights")
    assert "'weights'" in owner.fails("region.close()")
    other.run("assert tensors.sum() == 1770; del tensors; gc.collect()")
    owner.run("import contextlib")
    # The owner learns of the end of an attachment a moment later, from the broker.
    until(lambda: owner.run("with contextlib.suppress(memsaver.Error): region.close(); print('closed')") == "closed")
    assert owner.fails("print(region.state)") == "Error: region 'weights' was closed"
    owner.run("weights = memsaver.region('weights', backup='host').empty((2,), torch.float32)")
    until(lambda: is_whole(broker.status()))


@pytest.mark.parametrize("broker_dies", [False, True])
def test_the_owners_pause_waits_for_a_child_of_the_attached_process(
    broker: Running, owner: Worker, other: Worker, broker_dies: bool
) -> None:
    """Kernels of the dead process may still write to the owner's memory."""
    hand_over(owner, other, "weights")
    child = int(other.run("print(fork_sleeper())"))
    try:
        if broker_dies:
            broker.kill()
            other.kill()
            broker.start()
            until(lambda: len(broker.status()["clients"]) == 1)
        else:
            other.kill()
        text = owner.fails("memsaver.pause(reader_timeout=0.3)")
        assert text.startswith("AttachedError") and f"(pid {other.pid})" in text
        owner.send("memsaver.pause(timeout=60)")
        until(lambda: region_state(broker, owner) == "pausing")
    finally:
        os.kill(child, signal.SIGKILL)
    owner.answer()
    until(lambda: is_whole(broker.status()))


def test_thousands_of_tensors_are_shared_at_once(owner: Worker, other: Worker, broker: Running) -> None:
    owner.run("block = region.empty((3000, 700), torch.float32); block.copy_(torch.arange(3000.0)[:, None])")
    hand_over(owner, other, "{f'layer.{n}.weight': row for n, row in enumerate(block)}")
    other.run("assert len(tensors) == 3000 and all((t == n).all() for n, t in enumerate(tensors.values()))")
    other.run("[t.neg_() for t in tensors.values()]; del tensors; gc.collect()")
    owner.run("assert torch.equal(block, -torch.arange(3000.0)[:, None].expand(3000, 700)); memsaver.pause()")
    until(lambda: is_whole(broker.status()))


def test_an_attachment_outlives_the_broker_and_its_end_reaches_the_owner(
    broker: Running, owner: Worker, other: Worker
) -> None:
    hand_over(owner, other, "weights")
    broker.kill()
    other.run("tensors.fill_(4)")
    owner.run("assert (weights == 4).all()")
    assert owner.fails("memsaver.pause(reader_timeout=0.1)").startswith("AttachedError")
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 2 and attached_bytes(broker, other) > 0)
    assert owner.fails("memsaver.pause(reader_timeout=0.1)").startswith("AttachedError")
    other.run("tensors.fill_(5); del tensors; gc.collect()")
    owner.run("memsaver.pause(reader_timeout=10); memsaver.resume(memory_timeout=10); assert (weights == 5).all()")
    until(lambda: is_whole(broker.status()))


@pytest.mark.parametrize("first", ["owner", "other"])
def test_an_attachment_can_end_without_a_broker(broker: Running, owner: Worker, other: Worker, first: str) -> None:
    """Whichever of the two meets the next broker first."""
    hand_over(owner, other, "weights")
    broker.kill()
    other.run("del tensors; gc.collect()")
    late = other if first == "owner" else owner
    late.stop()
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 1)
    late.go_on()
    until(lambda: len(broker.status()["clients"]) == 2)
    owner.run("memsaver.pause(reader_timeout=10)")
    until(lambda: is_whole(broker.status()))


def test_an_attachment_ends_if_its_process_dies_without_a_broker(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    broker.kill()
    other.kill()
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 1)
    owner.run("memsaver.pause(reader_timeout=10)")
