"""Processes that borrow from one pool: hand-overs, waits, shortage, and brokers that are killed and restarted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from memsaver import _core
from memsaver.broker import protocol
from memsaver.broker.protocol import Message
from memsaver.process_names import process_name
from tests.broker_support import Broker, Local, Running
from tests.nursery import Fork
from tests.pool_support import SECOND_S, Worker, descriptors_of, is_whole, running, settled
from tests.support import MIB, PAGE, fresh_device, until

CAPACITY = 64 * MIB
LARGE = 50 * MIB  # of which no two fit
HOLDERS = (  # of memory of a pool, but for the process itself, by an error
    "[(row['pid'], row['name'], row['bytes']) for row in repickled(error).ledger"
    " if row['kind'] in ('region', 'pool held') and row['pid'] != os.getpid()]"
)


@pytest.fixture
def broker() -> Iterator[Local]:
    with Local(CAPACITY) as local:
        yield local


@pytest.fixture
def mortal() -> Iterator[Running]:
    """A broker in a process of its own."""
    with running(CAPACITY) as started:
        yield started


@contextmanager
def without_broker() -> Iterator[tuple[Fork, Path]]:
    """A process, and the path at which it looks for a broker. None is there."""
    with tempfile.TemporaryDirectory(prefix="ms") as directory:
        settings = {"MEMSAVER_HOST_DEVICE": fresh_device(), "MEMSAVER_POOL_DIR": directory}
        with Fork(settings, "tests.pool_support") as worker:
            uuid = worker.run("print(_core.device_uuid('cpu'))")
            yield worker, Path(directory, f"{uuid}.sock")


def held(broker: Broker, worker: Worker) -> int:
    return int(broker.row(worker.pid)["held_bytes"])


def is_waiting(broker: Broker, worker: Worker) -> bool:
    return bool(broker.row(worker.pid)["waiting"])


# Hand-overs


def test_an_allocation_waits_for_a_pause_in_another_process_up_to_the_option(broker: Local) -> None:
    with Worker(broker) as one, Worker(broker) as two:
        one.run(f"held = hold('a', {LARGE}, 'host', 1)")
        two.run("memsaver.configure(memory_timeout=0.05)")
        two.run(f"raised(lambda: hold('b', {LARGE}), MemoryError)")
        two.run("memsaver.configure(memory_timeout=60); time.sleep(1.01)")  # torch asks again within 1 s
        two.send(f"held = hold('b', {LARGE}, 'none', 2)")
        until(lambda: is_waiting(broker, two))
        one.run("memsaver.pause()")
        two.answer()
        two.run("held.check()")
        # More than the pool has in all, and a second try of torch, do not wait: this would exceed the test's bound.
        two.run("memsaver.configure(memory_timeout=1e6)")
        two.run(f"raised(lambda: hold('c', {2 * CAPACITY}), MemoryError)")
        two.run(f"raised(lambda: hold('c', {LARGE}), MemoryError)")


def test_a_resume_takes_chunks_before_the_pause_that_gives_them_has_ended() -> None:
    """100 MiB out against 100 MiB in, in a pool of 128 MiB. The pause stops at the copy of its second region."""
    with (
        Local(128 * MIB) as broker,
        Worker(broker, "held = hold('a', 100 * MIB, 'host', 1)", "memsaver.pause()") as one,
        Worker(broker, "lost = hold('b', 50 * MIB)", "held = hold('c', 50 * MIB, 'host', 2)") as two,
    ):
        one.send("memsaver.resume(memory_timeout=60); held.check()")
        until(lambda: is_waiting(broker, one))
        two.run("controls.hold('cuEventSynchronize'); moving = memsaver.start(pause=None)")
        until(lambda: held(broker, one) > 0)
        assert held(broker, two) > 0 and is_waiting(broker, one)
        two.run("controls.go_on('cuEventSynchronize'); moving.result()")
        one.answer()
        assert held(broker, two) == 0


def test_the_pool_is_the_source_of_memory_after_the_process_joined(broker: Local) -> None:
    """No chunk of it is retained."""
    with Worker(
        broker, f"held = hold('a', {PAGE}, 'host', 5)", MEMSAVER_POOL="process", MEMSAVER_RETAIN="1GiB"
    ) as worker:
        worker.run("memsaver.configure(pool='shared')")
        assert held(broker, worker) == 0
        worker.run("memsaver.pause(); memsaver.resume(); held.check()")
        assert held(broker, worker) == PAGE
        shown = "s = memsaver.stats().asdict(); print(s['options']['pool'], s['devices']['cpu']['retained_bytes'])"
        assert worker.run(shown) == "shared 0"
        worker.run("memsaver.pause()")
        until(lambda: held(broker, worker) == 0)
        worker.run("memsaver.resume(); memsaver.configure(pool='process'); memsaver.pause(); memsaver.resume()")
        worker.run("held.check()")
        until(lambda: held(broker, worker) == 0)


# Waiting and shortage


def test_a_wait_that_times_out_gives_its_chunks_back(broker: Local) -> None:
    with Worker(broker, f"held = hold('a', {LARGE}, 'host', 1)", "memsaver.pause()") as one, Worker(broker) as two:
        two.run("held = hold('b', 32 * MIB, 'host', 2)")
        one.send("error = raised(lambda: memsaver.resume(memory_timeout=0.5)); print(type(error).__name__)")
        until(lambda: held(broker, one) > 0)
        assert one.answer() == "OutOfMemoryError"
        assert settled(broker, 20)["idle_bytes"] >= 32 * MIB
        assert held(broker, one) == 0
        with Worker(broker, f"held = hold('c', {CAPACITY} - 32 * MIB)") as three:
            one.run("raised(lambda: memsaver.resume(memory_timeout=0.2))")  # gets nothing
            assert not is_waiting(broker, one)  # the broker knows the end of the demand
            three.run("held.check()")
            three.run("memsaver.pause()")
        two.run("held.check(); memsaver.pause()")
        one.run("memsaver.resume(memory_timeout=60); held.check()")


def test_waiting_is_first_come_first_served(broker: Local) -> None:
    sizes = (14, 14, 14, 14, 8)  # MiB: in the smallest chunks
    with (
        Worker(broker, f"held = hold('b', {CAPACITY}, 'host', 1)", "memsaver.pause()") as first,
        Worker(broker, f"held = hold('c', {PAGE}, 'host', 2)", "memsaver.pause()") as second,
        Worker(broker, f"many = [hold(f'a{{n}}', size * MIB) for n, size in enumerate({sizes})]") as holder,
    ):
        first.send("memsaver.resume(memory_timeout=60); held.check()")
        until(lambda: is_waiting(broker, first))
        second.send("memsaver.resume(memory_timeout=60); held.check()")
        until(lambda: is_waiting(broker, second))
        for number in range(len(sizes)):
            holder.run(f"memsaver.pause('a{number}')")
            until(lambda: held(broker, first) == sum(sizes[: number + 1]) * MIB)  # noqa: B023
            assert held(broker, second) == 0 and is_waiting(broker, second)  # although there was enough for it
        first.answer()
        first.run("memsaver.pause()")
        second.answer()


def test_two_processes_that_wait_for_each_other_both_finish(broker: Local) -> None:
    with (
        Worker(broker, "a = hold('a', 30 * MIB)", "memsaver.pause()", "b = hold('b', 30 * MIB)") as one,
        Worker(broker, "a = hold('a', 30 * MIB)", "memsaver.pause()") as two,
    ):
        two.run("b = hold('b', 30 * MIB)")
        one.send("error = raised(lambda: memsaver.resume('a', memory_timeout=0.5)); memsaver.pause('b')")
        two.run("memsaver.resume('a', memory_timeout=30)")
        one.answer()
        two.run("memsaver.pause()")
        one.run("memsaver.resume(memory_timeout=30)")


def figures(worker: Worker) -> list[int]:
    """Of its regions, in MiB: mapped, offered, backed up."""
    figure = "sum(each.{}_bytes for each in memsaver.regions.all_regions()) >> 20"
    return [int(worker.run(f"print({figure.format(name)})")) for name in ("mapped", "offered", "backup")]


def test_offered_chunks_go_to_a_process_that_lacks_them() -> None:
    """An allocation, and a resume without a wait. Turns of sides that both fit copy nothing."""
    with Local(128 * MIB) as broker, Worker(broker) as one, Worker(broker) as two:
        for worker in (one, two):
            worker.run(f"held = hold('a', {64 * MIB}, 'host', {worker.pid})")
            for _ in range(10):
                worker.run("memsaver.pause(lazy=True)")
                assert worker.run("print(memsaver.resume().copied_bytes)") == "0"
        one.run("memsaver.pause(lazy=True)")
        until(lambda: broker.row(one.pid)["ledger"])  # a busy client answers a later question
        assert [row[0] for row in broker.row(one.pid)["ledger"]["rows"]] == ["offered"]
        two.run(f"more = hold('b', {10 * MIB}, 'host', 3)")
        assert figures(one) == [0, 32, 32]
        two.run("memsaver.pause(lazy=True)")
        one.run("memsaver.resume(memory_timeout=0)")  # 22 MiB are free at most
        mapped, offered, copied = figures(two)
        assert (mapped, copied) == (0, 32) and offered >= 42
        error = one.fails(f"memsaver.region('d', 'cpu')._core.allocate_array({100 * MIB})")
        assert error.startswith("OutOfMemoryError")
        one.run("held.check(); memsaver.pause()")
        two.run("memsaver.resume(memory_timeout=0); held.check(); more.check()")


@pytest.mark.parametrize("left", [0, 2], ids=["full", "nearly full"])
def test_offered_chunks_are_taken_before_an_allocation_is_refused(left: int) -> None:
    """torch would free its caches then. During a capture no other wait is possible."""
    with Local((128 + left) * MIB) as broker, Worker(broker) as one, Worker(broker) as two:
        one.run(f"held = hold('a', {128 * MIB}, 'host', 1); memsaver.pause(lazy=True)")
        two.run(f"with memsaver.capturing(): more = hold('b', {64 * MIB}, 'host', 3)")
        assert figures(one) == [0, 64, 64]
        two.run("more.check(); memsaver.pause()")
        one.run("memsaver.resume(); held.check()")


def test_a_resume_that_waits_gets_chunks_that_are_offered_later_and_those_of_the_dead() -> None:
    with Local(128 * MIB) as broker, Worker(broker) as one, Worker(broker) as two:
        one.run(f"held = hold('a', {64 * MIB}, 'host', 1); memsaver.pause(lazy=True)")
        two.run(f"held = hold('a', {96 * MIB}, 'host', 2)")
        assert figures(one) == [0, 32, 32]
        one.send("memsaver.resume(memory_timeout=60); held.check()")
        until(lambda: is_waiting(broker, one))
        two.run("memsaver.pause(lazy=True)")
        one.answer()
        assert figures(two) == [0, 64, 32]
        two.kill()
        one.run(f"memsaver.configure(memory_timeout=60); hold('b', {64 * MIB}, 'host', 2).check()")


def test_chunks_that_cannot_be_copied_stay_and_demands_of_their_process_end() -> None:
    with Local(128 * MIB) as broker, Worker(broker) as one:
        one.run(f"kept = hold('none', {96 * MIB}); memsaver.pause(); held = hold('a', {64 * MIB}, 'host', 1)")
        one.run("memsaver.pause('a', lazy=True); memsaver.configure(host_limit=1 << 20)")
        for demand in (f"memsaver.region('b', 'cpu')._core.allocate_array({96 * MIB})", "memsaver.resume('none')"):
            assert one.fails(demand).startswith("OutOfMemoryError")
        assert figures(one) == [0, 64, 0]
        one.run("memsaver.resume('a'); held.check()")


def test_an_allocation_beyond_the_pool_is_out_of_memory_and_names_the_holders(broker: Local) -> None:
    """The rows of the ledger have the broker's name, which is the one that this process reads."""
    with (
        Worker(broker, f"held = hold('a', {LARGE})", MEMSAVER_NAME="rollout engine") as one,
        Worker(broker, "region = memsaver.region('b')") as two,
    ):
        one.run("ctypes.CDLL(None).prctl(15, b'rollout engine')")
        assert two.run("hooks = Hooks(region); print(hooks.alloc(32 * MIB))") == "None"
        for nbytes in (32, 200):  # more than is free, and more than there ever is
            text = two.fails(f"region._core.allocate_array({nbytes} * MIB)")
            name = f"{process_name(one.pid)} (pid {one.pid})"
            assert text.startswith("OutOfMemoryError")
            assert text.count(name) == text.count(f"(pid {one.pid})") >= 1, text
        assert two.run("print(region.mapped_bytes, region.allocated_bytes)") == "0 0"
        assert held(broker, two) == 0
        one.run("held.check(); memsaver.pause()")
        until(lambda: held(broker, one) == 0)
        assert two.run("print(hooks.alloc(32 * MIB) is None)") == "False"


def test_an_allocation_that_fails_has_the_free_memory_of_the_pool(broker: Local) -> None:
    """The chunks that it returns are for others at once. A race: hence many tries."""
    with Worker(broker, f"held = hold('a', {PAGE})") as one, Worker(broker, "region = memsaver.region('b')") as two:
        two.run(f"region._core.allocate_array({LARGE})")  # all of the pool exists
        free = CAPACITY - held(broker, one)
        two.run(f"fails = lambda: raised(lambda: region._core.allocate_array({CAPACITY})).free_bytes")
        assert two.run("print({fails() for _ in range(100)})") == f"{{{free}}}"


def test_a_client_that_hangs_is_named_and_the_others_go_on(broker: Local) -> None:
    """With memory in use, and with handles of idle chunks that have to be broken up."""
    with (
        Worker(broker, "held = hold('a', 32 * MIB, 'host', 1)") as hung,
        Worker(broker, f"held = hold('b', {PAGE}, 'host', 2)", "memsaver.pause()") as other,
        Worker(broker, "region = memsaver.region('c')", "hooks = Hooks(region)") as waiter,
    ):
        hung.stop()
        assert f"(pid {hung.pid})" in waiter.fails(f"region._core.allocate_array({LARGE})")
        for _ in range(3):
            other.run("memsaver.resume(memory_timeout=10); held.check(); memsaver.pause()")
        hung.go_on()
        hung.run("held.check(); memsaver.pause()")
        until(lambda: held(broker, hung) == 0)
        hung.stop()
        many = f"[memsaver.region(f'b{{n}}')._core.allocate_array({PAGE}) for n in range(32)]"
        assert f"(pid {hung.pid})" in waiter.fails(many)
        hung.go_on()
        settled(broker)
        waiter.run(f"assert hooks.alloc({PAGE}) is not None")


def test_behind_a_broker_that_hangs_one_allocation_waits_and_the_error_of_all_names_it(mortal: Running) -> None:
    """torch calls with the lock of its allocator held, and raises its own error without the reason."""
    with Worker(mortal, "import torch; region = memsaver.region('a', 'cpu'); hooks = Hooks(region)") as worker:
        worker.run(f"assert hooks.alloc({PAGE}) is not None")
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            answer = ThreadPoolExecutor(1).submit(
                worker.run, f"print([hooks.alloc({PAGE}) for _ in range(20)] == [None] * 20)"
            )
            assert answer.result(timeout=60) == "True"  # 10 s for one of them
            worker.run("region.__enter__(); failed = hooks.alloc(4 << 20)")
            worker.run("error = torch.OutOfMemoryError('CUDA out of memory')")
            worker.run("region.__exit__(type(error), error, None)")
            notes = worker.run("print(failed, error.__notes__)")
            assert (
                notes.startswith("None") and "region 'a' failed: the broker at" in notes and "does not answer" in notes
            )
        finally:
            os.kill(mortal.pid, signal.SIGCONT)
        until(lambda: worker.run(f"print(hooks.alloc({PAGE}) is not None)") == "True")
        worker.run("region.__enter__(); error = torch.OutOfMemoryError('of another allocation')")
        worker.run("region.__exit__(type(error), error, None); assert 'does not answer' not in str(error.__notes__)")


# Ends of clients


def is_back(broker: Broker) -> bool:
    """Whether all memory that was made is idle."""
    status = broker.status()
    return is_whole(status) and bool(status["idle_bytes"] == status["total_bytes"])


@contextmanager
def ended(pid: int) -> Iterator[int]:
    """A process of this machine, which ends with the block at the latest."""
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_memory_of_a_dead_client_waits_for_its_child(mortal: Running) -> None:
    """The child outlives it by seconds. The next owner gets nothing of it meanwhile, and the error names the child. A
    program that the client has started delays nothing.
    """
    with (
        Worker(mortal, f"held = hold('a', {LARGE})", "import subprocess") as one,
        Worker(mortal, f"held = hold('b', {LARGE}, 'host', 3)", MEMSAVER_POOL="process") as two,
        ended(int(one.run("program = subprocess.Popen(['sleep', '600']); print(program.pid)"))),
    ):
        with ended(int(one.run("print(fork_sleeper())"))) as child:
            kept, name = held(mortal, one), process_name(child)
            one.kill()
            two.run("memsaver.pause(); memsaver.configure(pool='shared')")
            text = two.fails("memsaver.resume(memory_timeout=1.5)")
            assert text.startswith("OutOfMemoryError") and f"{name} (pid {child}) {kept / MIB:.1f} MiB" in text
            assert two.run(f"print({HOLDERS})") == f"[({child}, {name!r}, {kept})]"
            row = mortal.row(one.pid)
            assert (row["held_bytes"], row["exited"]) == (kept, True)
            assert row["kept_by"] == [{"pid": child, "name": name}]
            assert f"has exited; its memory is kept by {name} (pid {child})" in mortal.run("top").stdout
            two.send("memsaver.resume(memory_timeout=60); held.check()")
            until(lambda: is_waiting(mortal, two))
        two.answer()
        assert one.pid not in {row["pid"] for row in mortal.status()["clients"]}


def test_a_child_that_has_closed_its_sentinel_and_still_exits_is_waited_for(broker: Local, tmp_path: Path) -> None:
    """As a child that is killed, of which the kernel closes the sentinel before the driver's descriptors."""
    with Worker(broker, f"held = hold('a', {LARGE})") as one:
        with ended(int(one.run(f"print(fork_exiting({str(tmp_path / 'go')!r}))"))) as child:
            one.kill()
            until(lambda: broker.row(one.pid)["exited"])
            assert broker.row(one.pid)["kept_by"] == []  # an exiting process shows no descriptors
            (tmp_path / "go").touch()
            until(lambda: [each["pid"] for each in broker.row(one.pid)["kept_by"]] == [child])
            assert not is_back(broker)
        until(lambda: is_back(broker), SECOND_S)


EARLY_FORK = """
    import os, signal, sys
    file = os.open(sys.argv[1], os.O_RDWR | os.O_CLOEXEC)  # as a library does that uses the driver before memsaver
    child = os.fork()
    while not child:
        signal.pause()
    from tests.pool_support import *
    held = hold("a", int(sys.argv[2]))
    print(child, flush=True)
    signal.pause()
"""


def test_a_child_forked_before_the_import_of_memsaver_is_waited_for(broker: Local) -> None:
    """It has the driver's descriptors, and no sentinel."""
    with Worker(broker, "region = memsaver.region('b', device='cpu')") as two:
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(EARLY_FORK), two.run("print(driver_file())"), str(LARGE)],
            env={**broker.environment, "MEMSAVER_POOL": "shared"},
            stdout=subprocess.PIPE,
            text=True,
        ) as one:
            assert one.stdout is not None
            with ended(int(one.stdout.readline())) as child:
                one.kill()
                until(lambda: broker.row(one.pid)["exited"])
                text = two.fails(f"region._core.allocate_array({LARGE})")
                assert f"(pid {child})" in text and f"(pid {one.pid})" not in text
            until(lambda: is_back(broker), SECOND_S)
        two.run(f"held = Held(region, {LARGE}); held.check()")


def test_no_process_sees_the_bytes_of_another(broker: Local) -> None:
    """Each process writes a byte of its own to all of its memory. The pool is just large enough for one of them."""
    only = "def only(held, *own): assert not np.setdiff1d(held.data, (0, *own)).size, np.unique(held.data)"
    write = "def write(): [each.data.fill(0xAA) for each in all]"
    fill = "all = [hold('a', 32 * MIB), *(hold(f'a{i}', 2 * MIB) for i in range(16))]; write()"
    with (
        Worker(broker, "import numpy as np", only, write, fill) as one,
        Worker(broker, "import numpy as np", only) as two,
    ):
        one.run("memsaver.pause(); memsaver.resume()")
        one.run("assert all[0].data.all()")  # it had these chunks last
        one.run("memsaver.pause()")
        two.run("keep = hold('keep', 32 * MIB, seed=None, fill='keep'); assert (keep.data == 0xAA).all()")
        two.run("none, kept = hold('none', 6 * MIB, seed=None), hold('kept', 7 * MIB + 5, 'host', None)")
        two.run("gap, last = [Held(kept.region, nbytes, None) for nbytes in (8 * MIB, 3 * MIB + 5)]")
        two.run("for each in (none, kept, gap, last): only(each)")
        two.run("more = [Held(kept.region, 20_000, None) for _ in range(200)]; [each.free() for each in more[::2]]")
        two.run("kept = [kept, last, *more[1::2]]; [each.fill(seed) for seed, each in enumerate(kept)]; gap.free()")
        for _ in range(2):  # the second time without descriptors
            two.run("none.data.fill(0xBB); memsaver.pause()")
            one.run("memsaver.resume(memory_timeout=60); [only(each, 0xAA) for each in all]; write(); memsaver.pause()")
            two.run("memsaver.resume(memory_timeout=60); [each.check() for each in kept]; only(none)")
            two.run("gap = Held(last.region, 8 * MIB, None); only(gap, 0xBB); gap.data.fill(0xBB); gap.free()")
        two.run("memsaver.pause('keep'); whole = hold('whole', 32 * MIB, seed=None); only(whole)")  # in its chunk
        two.run("memsaver.switch(pause='whole', resume='keep'); only(keep)")
        two.run("memsaver.pause()")


# Ends of brokers


def test_a_client_can_start_the_next_broker_and_is_in_its_pool_at_once(mortal: Running) -> None:
    with (
        Worker(mortal, "held = hold('a', 20 * MIB, 'host', 1)", MEMSAVER_POOL_CAPACITY="64MiB") as one,
        Worker(mortal, "held = hold('b', 20 * MIB, 'host', 2)", "memsaver.pause()") as two,
    ):
        mortal.kill()
        one.run("memsaver.configure(pool='shared')")
        one.run("memsaver.pause(); memsaver.resume(); held.check()")
        until(lambda: len(mortal.status()["clients"]) == 2)
        two.run("memsaver.resume(memory_timeout=10); held.check()")
        assert mortal.status()["capacity_bytes"] == CAPACITY
        assert settled(mortal)["total_bytes"] == int(one.run("print(used_bytes())"))


def test_a_client_whose_broker_has_just_shut_down_joins_the_next_one(broker: Local) -> None:
    with Worker(
        broker, "from pathlib import Path; from memsaver.broker import daemon; ensure = daemon.ensure"
    ) as worker:
        worker.run("found = [Path('no-broker.sock')]")
        worker.run("daemon.ensure = lambda *options: found.pop() if found else ensure(*options)")
        assert worker.run("memsaver.region('a'); print(_core.connected('cpu'), found)") == "True []"


def test_configure_during_a_reconnect_joins_the_pool_once(mortal: Running) -> None:
    with Worker(mortal, "held = hold('a', PAGE, 'host', 1)") as worker:
        worker.stop()
        mortal.kill()
        mortal.start()
        os.kill(mortal.pid, signal.SIGSTOP)
        worker.go_on()
        worker.send("memsaver.configure(pool='shared')")
        time.sleep(0.5)  # both have said hello
        os.kill(mortal.pid, signal.SIGCONT)
        worker.answer()
        worker.run("for _ in range(100): held.region.pause(); held.region.resume(memory_timeout=5); held.check()")
        assert settled(mortal)["total_bytes"] == PAGE == held(mortal, worker)


def test_a_pause_without_a_broker_gives_the_memory_to_the_driver(mortal: Running) -> None:
    """A resume that waits when the broker dies fails, and changes nothing. No descriptors are left."""
    with Worker(mortal, f"held = hold('a', {LARGE}, 'host', 1)", "memsaver.pause()") as one, Worker(mortal) as two:
        two.run("held = hold('b', 32 * MIB, 'host', 2)")
        before: list[int] = []
        for _ in range(3):
            one.send("error = raised(lambda: memsaver.resume(memory_timeout=60)); print(type(error).__name__)")
            until(lambda: held(mortal, one) > 0)
            mortal.kill()
            assert one.answer() == "BrokerError"
            assert one.run("print(held.region.state, held.region.mapped_bytes)") == "paused 0"
            two.run("memsaver.pause()")
            until(lambda: two.run("print(used_bytes())") == "0")
            assert two.fails("memsaver.resume(memory_timeout=1)").startswith("BrokerError")
            mortal.start()
            until(lambda: len(mortal.status()["clients"]) == 2)
            one.run("memsaver.resume(memory_timeout=60); held.check(); memsaver.pause()")
            two.run("memsaver.resume(memory_timeout=60); held.check()")
            assert settled(mortal)["total_bytes"] == int(one.run("print(used_bytes())")) <= CAPACITY
            pids = (one.pid, two.pid, mortal.pid)
            before = before or [descriptors_of(pid) for pid in pids]
            for pid, count in zip(pids, before):
                until(lambda: descriptors_of(pid) <= count, within_s=5)  # noqa: B023


def test_the_next_broker_counts_the_chunks_of_the_last_one_and_lends_the_rest(mortal: Running) -> None:
    with (
        Worker(mortal, f"held = hold('b', {LARGE}, 'host', 2)", "memsaver.pause()") as two,
        Worker(mortal, "held = hold('a', 20 * MIB, 'host', 1)") as one,
    ):
        mapped = int(one.run("print(held.region.mapped_bytes)"))
        mortal.kill()
        mortal.start()
        until(lambda: len(mortal.status()["clients"]) == 2)
        until(lambda: held(mortal, one) == mapped)
        assert two.fails("memsaver.resume()").startswith("OutOfMemoryError")
        two.run("rest = hold('rest', 8 * MIB, seed=3)")
        one.run("held.check(); memsaver.pause(); memsaver.resume(memory_timeout=10); held.check(); memsaver.pause()")
        two.run("rest.check(); rest.free(); memsaver.pause('rest')")
        two.run("memsaver.resume('b', memory_timeout=10); held.check(); memsaver.pause()")
        two.run(f"claim({CAPACITY})")
        one.run("memsaver.resume(memory_timeout=10); held.check()")
        assert settled(mortal)["total_bytes"] == int(one.run("print(used_bytes())"))


def test_a_client_with_few_descriptors_joins_the_next_broker(mortal: Running) -> None:
    """Its chunks need none."""
    with Worker(mortal, "many = [hold(f'a{n}', PAGE, 'host', n) for n in range(30)]", "import resource") as one:
        one.run("limit = resource.getrlimit(resource.RLIMIT_NOFILE)")
        before = descriptors_of(one.pid)
        mortal.kill()
        one.run("memsaver.pause('a0')")  # which tells that it knows
        one.run(f"resource.setrlimit(resource.RLIMIT_NOFILE, ({before + 15}, limit[1]))")
        mortal.start()
        until(lambda: mortal.status()["total_bytes"] == 29 * PAGE, within_s=10)
        one.run("resource.setrlimit(resource.RLIMIT_NOFILE, limit)")
        one.run("memsaver.resume('a0', memory_timeout=10); [each.check() for each in many]")
        until(lambda: descriptors_of(one.pid) <= before, within_s=5)


def test_no_process_joins_a_pool_under_mps(broker: Local) -> None:
    with Worker(broker, "region = memsaver.region('a', device='cpu')", MEMSAVER_POOL="process") as worker:
        assert worker.run("print(_core.under_mps('cpu'))") == "False"
        worker.run("_core.under_mps = lambda device: device == 'cpu'")
        text = worker.fails("memsaver.configure(pool='shared')")
        assert text.startswith("ConfigError") and "cpu" in text and "under MPS" in text
        assert worker.run("e = repickled(error); print(e.option, e.value)") == "pool shared"
        assert worker.run("print(_core.in_pool('cpu'), memsaver.stats().options.get('pool'))") == "False process"
        assert worker.run("print(hold('b', PAGE).region.state)") == "active"


class FakeBroker:
    """Listens on the path of a device's broker, and gives one answer to each client."""

    def __init__(self, path: str, answer: Message) -> None:
        self.channel = protocol.new_socket()
        self.channel.bind(path)
        self.channel.listen(16)
        self.answer = answer

    def join(self) -> socket.socket:
        """Answers the next client that says hello, and returns its connection."""
        while True:
            guest, _ = self.channel.accept()
            if protocol.receive(guest) is not None:  # None: it only looked whether somebody is there
                protocol.send(guest, self.answer.encode())
                return guest


def test_a_broker_that_refuses_or_sends_malformed_messages_is_left() -> None:
    """No descriptors stay, and the client searches for a broker again."""
    malformed = [Message("grant", (1,)), Message("stalled"), Message("holders")]
    with without_broker() as (worker, path):
        fake = FakeBroker(str(path), protocol.refusal("version", 0, "it speaks version 99"))
        worker.send("error = raised(lambda: memsaver.configure(pool='shared')); print(type(error).__name__, error)")
        fake.join().close()
        text = worker.answer()
        assert text.startswith("BrokerError") and "version 99" in text
        assert worker.run("print(memsaver.stats().options.get('pool'), _core.in_pool('cpu'))").endswith("False")
        fake.answer = Message("welcome", (protocol.VERSION, CAPACITY))
        worker.send("memsaver.configure(pool='shared')")
        guest = fake.join()
        worker.answer()
        before = descriptors_of(worker.pid)
        for message in malformed * 2:
            protocol.send(guest, message.encode(), [0] * 8)
            following = fake.join()
            guest.close()
            guest = following
            until(lambda: descriptors_of(worker.pid) == before, within_s=20)
        fake.channel.close()


def test_signals_do_not_prolong_the_wait_for_a_broker_that_hangs() -> None:
    """The timer of a profiler sends signals at intervals that are shorter than the wait."""
    with without_broker() as (worker, path):
        silent = FakeBroker(str(path), Message("welcome"))
        worker.run("signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 1, 1)")
        assert "does not answer" in worker.run("print(raised(lambda: memsaver.configure(pool='shared')))")
        silent.channel.close()


def test_a_broker_whose_queue_of_connections_is_full_is_not_waited_for() -> None:
    """The queue of a stopped broker fills up. connect() has no bound of its own."""
    with without_broker() as (worker, path):
        full = FakeBroker(str(path), Message("welcome"))
        full.channel.listen(0)
        worker.run("from memsaver.broker import discovery; from pathlib import Path")
        worker.run(f"first = discovery.connect(Path({str(path)!r}))")
        for call in ("memsaver.configure(pool='shared')", f"discovery.connect(Path({str(path)!r}))"):
            assert "does not accept connections" in worker.run(f"print(raised(lambda: {call}))")
        assert worker.run("print(*discovery.found())") == str(path)
        full.channel.close()


def test_the_next_broker_hears_nothing_of_a_chunk_that_could_not_be_imported() -> None:
    """It would refuse a client that returns an unknown chunk."""
    with without_broker() as (worker, path):
        fake = FakeBroker(str(path), Message("welcome", (protocol.VERSION, CAPACITY)))
        worker.send("memsaver.configure(pool='shared')")
        guest = fake.join()
        worker.answer()
        worker.run("controls.hold('cuMemImportFromShareableHandle')")
        worker.run("thread = threading.Thread(target=lambda: raised(lambda: hold('a', PAGE), MemoryError))")
        worker.run("thread.start()")
        while (message := protocol.receive(guest)) is not None and message.kind != "demand":
            pass
        assert message is not None
        grant = Message("grant", (message.words[0], 1, 0, 5, PAGE, _core.HAS_DESCRIPTOR))
        protocol.send(guest, grant.encode(), [0])  # the descriptor is not of memory
        worker.run("until(lambda: controls.stopped('cuMemImportFromShareableHandle'))")
        guest.close()
        following = fake.join()
        assert protocol.receive(following) == Message("inventory")
        worker.run("controls.go_on('cuMemImportFromShareableHandle'); thread.join()")
        following.setblocking(False)
        with pytest.raises(BlockingIOError):
            print(protocol.receive(following))
        following.close()
        fake.channel.close()
