"""Reclaim on demand: a call that waits at the broker makes the other clients return cached memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import memsaver
from memsaver.broker import reclaim
from memsaver.broker.protocol import Message
from memsaver.broker.reclaim import UNKNOWN
from tests.broker_support import Client, Local
from tests.pool_support import Worker, hold_the_gil, let_go, running
from tests.support import MIB, PAGE, until

CAPACITY = 128 * MIB
MOST = 96 * MIB
POOLS = "from tests import torch_pools; from tests.torch_pools import cached"
# A trainer with free blocks in a pool of torch over a region, and an engine that is paused and needs that memory.
CACHED = f"region = memsaver.region('trainer', 'cpu'); cached(region, {MOST})"
PAUSED = f"held = hold('engine', {MOST}, 'host'); memsaver.pause()"
RESUME = "memsaver.resume(memory_timeout=60); held.check()"
# Work on the trainer's blocks for so many seconds. None: until it is released.
WORK = "controls.stream_touch(stream, region._core.live()[0][0], {}, {})"


@pytest.fixture
def broker() -> Iterator[Local]:
    with Local(CAPACITY) as local:
        yield local


@pytest.fixture
def engine(broker: Local) -> Iterator[Worker]:
    with Worker(broker, PAUSED) as worker:
        yield worker


@pytest.fixture
def trainer(broker: Local, engine: Worker) -> Iterator[Worker]:
    with Worker(broker, POOLS, "from tests import controls; stream = controls.stream_create()") as worker:
        yield worker


def mapped(worker: Worker, tag: str = "trainer") -> int:
    return int(worker.run(f"print(memsaver.region({tag!r}, 'cpu').mapped_bytes)"))


# Memory that comes back


def test_free_blocks_of_torch_come_back_when_the_gil_is_free(
    broker: Local, engine: Worker, trainer: Worker, tmp_path: Path
) -> None:
    def holds_its_cache() -> bool:
        """False: a round for the trainer's own demand has asked the trainer too, which returned its cache at once."""
        trainer.run(CACHED)
        hold_the_gil(trainer, pipe)
        if broker.row(trainer.pid)["held_bytes"] >= MOST:
            return True
        let_go(trainer, pipe)
        return False

    pipe = tmp_path / "pipe"
    until(holds_its_cache)
    engine.send(RESUME)
    # The reason may come from the trainer's own demand, before that of the engine is open.
    until(lambda: broker.row(engine.pid)["waiting"] and "GIL" in broker.row(trainer.pid)["unused_why"])
    let_go(trainer, pipe)
    engine.answer()
    # The next step: a new pool takes its place, and has memory as soon as the engine returns it.
    engine.run("memsaver.pause()")
    trainer.run(f"pool = torch_pools.lend(region); assert pool.malloc({MOST})")


def test_offered_chunks_come_while_the_gil_is_held(
    broker: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "LONGEST_COPY_S", 3600.0)
    with Worker(broker, f"held = hold('a', {32 * MIB}, 'host', 1); memsaver.pause()") as one, Worker(broker) as two:
        two.run(f"import torch; held = hold('b', {CAPACITY}, 'host', 2); memsaver.pause(lazy=True)")
        hold_the_gil(two, tmp_path / "pipe")
        one.send("memsaver.resume(memory_timeout=60); held.check()")
        until(lambda: broker.row(two.pid)["held_bytes"] < CAPACITY, within_s=20)
        one.answer()
        let_go(two, tmp_path / "pipe")
        one.run("memsaver.pause()")
        two.run("memsaver.resume(); held.check()")


def test_blocks_come_only_after_the_queued_work(broker: Local, engine: Worker, trainer: Worker) -> None:
    trainer.run(f"{CACHED}; {WORK.format(MOST, None)}")
    engine.send(RESUME)
    until(lambda: "still works" in broker.row(trainer.pid)["unused_why"])
    assert mapped(trainer) >= MOST
    [wait] = broker.row(engine.pid)["waiting"]
    assert wait["needed_bytes"] >= MOST
    trainer.run("controls.stream_release(stream)")
    engine.answer()
    assert trainer.run("print(controls.context_lost())") == "False"


def test_blocks_of_tensors_stay(engine: Worker, trainer: Worker) -> None:
    trainer.run("region = memsaver.region('trainer', 'cpu'); torch_pools.use(); pool = torch_pools.lend(region)")
    trainer.run(f"kept, freed = pool.malloc({32 * MIB}), pool.malloc({64 * MIB}); ctypes.memset(kept, 7, {32 * MIB})")
    trainer.run("torch_pools.free(freed); torch_pools.take_back(region, pool); del pool")
    engine.run(RESUME)
    trainer.run(f"assert ctypes.string_at(kept, {32 * MIB}) == bytes([7]) * {32 * MIB}")
    assert trainer.run("print(len(region._core.segments()))") == "1"
    # When the tensor is freed, the next call that waits gets its block as well, though its pool is gone.
    engine.run("memsaver.pause()")
    trainer.run("torch_pools.free(kept)")
    engine.run("more = memsaver.region('more', 'cpu'); memsaver.resume(memory_timeout=60)")
    engine.run(f"hooks = Hooks(more); assert hooks.alloc({24 * MIB})")
    until(lambda: mapped(trainer) == 0)


def test_retained_chunks_come_back() -> None:
    """They are the driver's, which then has room for chunks of the pool."""
    with running(CAPACITY) as broker, Worker(broker, PAUSED) as engine:
        size = int(broker.environment["MEMSAVER_HOST_DEVICE"])
        assert broker.run("trim").returncode == 0  # the idle chunks of the engine's pause
        with Worker(broker, MEMSAVER_POOL="process") as other:
            rest = (size - MOST // 2) // PAGE * PAGE - broker.status()["total_bytes"]
            other.run(f"memsaver.configure(retain={rest}); big = Hooks(region := memsaver.region('big', 'cpu'))")
            other.run(f"assert big.alloc({rest - 32 * MIB}); memsaver.pause()")
            other.run("memsaver.configure(pool='shared')")
            retained = "print(_core.ledger_figures('cpu')['retained_bytes'])"  # stats() has those of the present source
            assert int(other.run(retained)) > 0
            engine.run("memsaver.resume(memory_timeout=20); held.check()")
            assert int(other.run(retained)) == 0


def test_an_allocation_gets_what_others_cache(broker: Local, engine: Worker, trainer: Worker) -> None:
    """At once, and after queued work: it waits at most a second, which the messages alone may take. Then torch would
    ask again. Without cached memory it ends as soon as the others have answered.
    """
    engine.run("more = Hooks(memsaver.region('more', 'cpu'))")
    for work in ("", f"; {WORK.format(MOST, 0.2)}"):

        def gets(work: str = work) -> bool:
            trainer.run(CACHED + work)  # an earlier request of the engine has freed the former cache
            return engine.run(f"print(address := more.alloc({64 * MIB}))") != "None"

        until(gets, within_s=20)
        engine.run("more.free(address)")
    with Worker(broker) as other:
        until(lambda: other.run(f"print(Hooks(memsaver.region('other', 'cpu')).alloc({MOST}))") != "None")
        assert engine.run(f"print(more.alloc({64 * MIB}))") == "None"


@pytest.mark.parametrize("pool", ["shared", "process"])
def test_a_resume_takes_the_free_blocks_of_its_own_process(pool: str) -> None:
    """Without a wait for others, and while it waits for others."""
    with running(CAPACITY) as place, Worker(place, POOLS, PAUSED, MEMSAVER_POOL=pool) as worker:
        worker.run("from tests.support import Fill")
        for timeout_s in (0, 60):
            worker.run(CACHED)
            worker.run("fill = Fill()")  # of the device, without which no chunk of the pool can be made
            resume = f"with contextlib.suppress(memsaver.OutOfMemoryError): memsaver.resume(memory_timeout={timeout_s})"

            def resumes(resume: str = resume) -> bool:
                """From the caches on: those of an attempt that gave up too early serve no later one."""
                worker.run(CACHED)
                worker.run(resume)
                return worker.run("print(held.region.state)") == "active"

            # An attempt without a wait gives torch's caches a second, which is short on a loaded machine.
            until(resumes, within_s=10)
            worker.run("held.check(); fill.close(); memsaver.pause('engine')")


# Memory that stays


def test_nothing_comes_back_during_a_capture(broker: Local, engine: Worker, trainer: Worker) -> None:
    trainer.run(CACHED)
    trainer.run("_core.capture_begins()")
    engine.send("memsaver.resume(memory_timeout=600); held.check()")
    until(lambda: "captured" in broker.row(trainer.pid)["unused_why"])
    assert mapped(trainer) >= MOST
    trainer.run("_core.capture_ends()")
    until(lambda: not broker.row(engine.pid)["waiting"])  # the broker asks again
    engine.answer()


def test_contents_of_paused_regions_stay(broker: Local, engine: Worker, trainer: Worker) -> None:
    trainer.run("region = memsaver.region('trainer', 'cpu', 'host'); torch_pools.use()")
    trainer.run("pool = torch_pools.lend(region)")
    trainer.run(f"kept = pool.malloc({32 * MIB}); ctypes.memset(kept, 9, {32 * MIB})")
    trainer.run(f"torch_pools.free(pool.malloc({16 * MIB})); torch_pools.take_back(region, pool); region.pause()")
    with Worker(broker) as other:
        other.run(f"held = hold('other', {64 * MIB})")
        assert "OutOfMemoryError" in engine.fails("memsaver.resume(memory_timeout=0.2)")
    assert trainer.run("print(len(region._core.segments()), region.state)") == "2 paused"
    trainer.run(f"region.resume(); assert ctypes.string_at(kept, {32 * MIB}) == bytes([9]) * {32 * MIB}")


def test_a_pool_in_use_stays(engine: Worker, trainer: Worker) -> None:
    """A thread is inside the region."""
    trainer.run(CACHED)
    trainer.run("pool = torch_pools.lend(region)")
    assert "OutOfMemoryError" in engine.fails("memsaver.resume(memory_timeout=0.3)")
    assert mapped(trainer) >= MOST
    trainer.run("torch_pools.take_back(region, pool); del pool")
    engine.run(RESUME)


# The holders


def test_a_waiting_call_says_from_whom_it_waits_for_what(broker: Local, engine: Worker, trainer: Worker) -> None:
    trainer.run(f"{CACHED}; {WORK.format(MOST, None)}")
    engine.run("import logging, threading; records, result = [], []; handler = logging.Handler()")
    engine.run("handler.emit = lambda record: records.append(record.getMessage())")
    engine.run("logging.getLogger('memsaver').addHandler(handler); logging.getLogger('memsaver').setLevel('INFO')")
    engine.run("wait = lambda: result.append(raised(lambda: memsaver.resume(memory_timeout=3)))")
    engine.run("thread = threading.Thread(target=wait); thread.start()")
    pools = "memsaver.stats().devices['cpu'].pool"
    until(lambda: engine.run(f"print([each.why for each in {pools}.holds_up])").count("still works"))
    assert int(engine.run(f"print({pools}.waiting_bytes)")) > 0
    # The process that waits is none of the holders, with the chunks that its demand has collected and those in use.
    assert engine.run(f"print({{each.pid for each in {pools}.holds_up}})") == f"{{{trainer.pid}}}"
    until(lambda: engine.run("print(records)") != "[]")
    [line] = json.loads(engine.run("import json; print(json.dumps(records))"))
    assert f"(pid {engine.pid})" not in line
    assert line.startswith("waits for ") and f"(pid {trainer.pid}) holds " in line and "still works" in line
    engine.run("thread.join()")
    size = memsaver.errors.gib(MOST)
    assert f"(pid {trainer.pid}) {size} on which the device still works" in engine.run("print(result[0])")
    [row] = json.loads(engine.run("print(json.dumps(repickled(result[0]).unused))"))
    assert (row[0], row[2]) == (trainer.pid, MOST)
    assert engine.run(f"print({pools}.waiting_bytes, {pools}.holds_up)") == "0 []"
    trainer.run("controls.stream_release(stream)")


# Messages


def heard(client: Client, kind: str) -> Message:
    """The next message of this kind. Others are left out."""
    while (message := client.hear("stalled", "grant", "reclaim", "holders")).kind != kind:
        pass
    return message


def answer(client: Client) -> None:
    """Answers a `reclaim` that has come, or comes."""
    heard(client, "reclaim")
    client.say("reclaimed", 0, 0)


def test_the_holders_are_named_when_all_have_answered(broker: Local) -> None:
    one, two, three = broker.client(), broker.client(), broker.client()
    held = one.borrow(CAPACITY)
    request = two.want(CAPACITY)
    assert two.hear("stalled").words[0] == request
    assert list(heard(one, "reclaim").words) == [0, 0]
    answer(two)
    heard(three, "reclaim")
    three.hang_up()  # it is not waited for
    one.say("reclaimed", 1, 5, text="still\nat work")
    message = heard(two, "holders")
    while message.text != "still at work":
        assert message.words[1] == 1
        message = heard(two, "holders")
    assert list(message.words) == [request, 1, os.getpid(), CAPACITY, 5]
    one.say("reclaimed", 0, 3, text="kept")
    message = heard(two, "holders")
    while message.words[1]:
        message = heard(two, "holders")
    assert (list(message.words), message.text) == ([request, 0, os.getpid(), CAPACITY, 3], "kept")
    heard(one, "reclaim")  # asked again
    one.give(held)
    assert two.take(CAPACITY)


def test_clients_are_asked_for_offers_one_after_the_other_and_for_what_is_lacking(broker: Local) -> None:
    one, two, three = broker.client(), broker.client(), broker.client()
    held = one.borrow(CAPACITY // 2, 32 * MIB)
    two.borrow(CAPACITY // 2, 32 * MIB)
    one.say("offers", CAPACITY // 2)
    two.say("offers", CAPACITY // 2)
    one.look()
    two.look()
    request = three.want(CAPACITY, 32 * MIB)
    assert three.hear("stalled").words[2] == CAPACITY
    for client in (one, two):
        answer(client)
    assert list(heard(one, "reclaim").words) == [CAPACITY, 0]
    one.give(held[:1])
    one.say("reclaimed", 1, 0)  # more comes
    three.take(32 * MIB)
    one.give(held[1:])
    one.say("offers", 0)
    one.say("reclaimed", 0, 0)
    three.take(32 * MIB)
    assert list(heard(two, "reclaim").words) == [CAPACITY // 2, 0]
    two.say("reclaimed", 0, 0, text="no host memory")  # it can give none
    answer(three)  # its own caches come last
    while (message := heard(three, "holders")).words[1]:
        pass
    assert message.words[0] == request
    three.say("offers", PAGE)  # of its own regions
    for client in (one, two):
        answer(client)  # the next round
    assert list(heard(two, "reclaim").words) == [CAPACITY // 2, 0]
    two.say("reclaimed", 0, 0)
    assert list(heard(three, "reclaim").words) == [CAPACITY // 2, request]


def test_what_comes_back_is_for_the_first_demand(broker: Local) -> None:
    one, two, three = broker.client(), broker.client(), broker.client()
    one.borrow(CAPACITY)
    two.want(PAGE, PAGE)
    heard(one, "reclaim")
    request = three.want(PAGE, PAGE)
    assert list(heard(three, "holders").words) == [request, 0, os.getpid(), CAPACITY, UNKNOWN]


def test_a_later_demand_waits_while_clients_may_give_offers(broker: Local) -> None:
    one, two, three = broker.client(), broker.client(), broker.client()
    one.borrow(CAPACITY, 32 * MIB)
    one.say("offers", CAPACITY)
    one.look()
    two.want(CAPACITY // 2, PAGE)
    answer(one)  # its caches
    three.want(CAPACITY // 2, PAGE)
    assert heard(three, "holders").words[1] == 1
