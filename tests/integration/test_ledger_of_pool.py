"""The account of a device of which several processes share a pool: each chunk counts once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from memsaver import cli, ledger
from memsaver.ledger import Ledger
from tests.broker_support import PATIENCE_S, Running
from tests.pool_support import ForkedBroker, Worker, hold_the_gil, let_go
from tests.support import MIB, run_python, until

MEDIUM = 32 * MIB
Sums = dict[tuple[int | None, str, str], int]  # bytes by pid, kind and label


@pytest.fixture
def broker() -> Iterator[Running]:
    with ForkedBroker() as running:
        yield running


@pytest.fixture
def one(broker: Running) -> Iterator[Worker]:
    with Worker(broker, f"a = hold('a', {40 * MIB})", f"b = hold('b', {8 * MIB}, 'host'); b.region.pause()") as worker:
        yield worker


@pytest.fixture
def two(broker: Running) -> Iterator[Worker]:
    with Worker(broker, f"c = hold('c', {100 * MIB})") as worker:
        yield worker


def sums(found: Ledger) -> Sums:
    rows: Sums = {}
    for row in found.rows:
        rows[row.pid, row.kind, row.label] = rows.get((row.pid, row.kind, row.label), 0) + row.bytes
    return rows


def seen_by_broker(broker: Running) -> Ledger:
    return ledger.of_pool(broker.status())


def seen_by(worker: Worker) -> Ledger:
    """The account in the stats() of a client."""
    text = worker.run("import json; print(json.dumps(memsaver.stats().asdict()['devices']['cpu']['ledger']))")
    found = json.loads(text)
    return Ledger(found["used_bytes"], [ledger.LedgerRow(**row) for row in found["rows"]], found["is_consistent"])


def used_bytes(worker: Worker) -> int:
    return int(worker.run("print(used_bytes())"))


def mapped(worker: Worker, tag: str) -> int:
    return int(worker.run(f"print(memsaver.region({tag!r}).mapped_bytes)"))


def when(see: Callable[[], Ledger], expected: Sums) -> Ledger:
    """An account with these rows. A client on a loaded machine may report later than the broker waits for it."""
    found = see()
    deadline = time.monotonic() + PATIENCE_S
    while sums(found) != expected and time.monotonic() < deadline:
        found = see()
    assert sums(found) == expected
    return found


def check_everywhere(broker: Running, expected: Sums, *workers: Worker) -> None:
    """The broker and its clients have these rows, whose sum is the driver's figure."""
    for see in (partial(seen_by_broker, broker), *(partial(seen_by, worker) for worker in workers)):
        found = when(see, expected)
        assert sum(row.bytes for row in found.rows) == found.used_bytes == used_bytes(workers[0])
        assert found.is_consistent


def test_regions_idle_chunks_and_other_memory_of_clients(broker: Running, one: Worker, two: Worker) -> None:
    two.run(f"handle = _core.open_driver('cpu').create({4 * MIB})")
    two.run("memsaver.configure(retain='1GiB')")  # of the driver's chunks alone
    idle = broker.status()["idle_bytes"]
    assert idle >= 8 * MIB
    expected: Sums = {
        (one.pid, "region", "a"): mapped(one, "a"),
        (two.pid, "region", "c"): mapped(two, "c"),
        (two.pid, "unknown", ""): 4 * MIB,
        (broker.pid, "pool idle", ""): idle,
    }
    check_everywhere(broker, expected, one, two)


def test_the_table_of_top_has_each_byte_of_many_regions_once(broker: Running) -> None:
    """A report has 200 regions at most: the first ones, and a row for the smallest."""
    with Worker(broker, f"held = [hold(str(tag), {2 * MIB} if tag < 220 else {8 * MIB}) for tag in range(230)]"):
        found = broker.status()
        while not found["clients"][0]["is_current"]:
            found = broker.status()
    table = "\n".join(cli._lines({**found, "ledger": ledger.of_pool(found)})).partition("process ")[2]
    shown = map(float, re.findall(r"  ([\d.]+) MiB$", table, re.MULTILINE))
    assert sum(shown) * MIB == found["device_memory"]["used_bytes"]
    assert len(re.findall(r"region 22\d \(active\) +8.0 MiB", table)) == 10


def test_memory_that_another_process_is_attached_to_counts_for_its_owner(
    broker: Running, one: Worker, two: Worker
) -> None:
    expected: Sums = {
        (one.pid, "region", "a"): mapped(one, "a"),
        (two.pid, "region", "c"): mapped(two, "c"),
        (broker.pid, "pool idle", ""): broker.status()["idle_bytes"],
    }
    one.run("memsaver.configure(patches='multiprocessing'); tensor = memsaver.region('a').empty(1000)")
    one.run("import torch.multiprocessing; from multiprocessing.reduction import ForkingPickler")
    sent = one.run("print(ForkingPickler.dumps(tensor).hex())")
    two.run(f"import pickle; view = pickle.loads(bytes.fromhex('{sent}'))")
    expected[one.pid, "region", "a"] = mapped(one, "a")
    check_everywhere(broker, expected, one, two)
    two.run("del view")


def test_a_process_outside_of_the_pool_sees_each_byte_once(broker: Running, one: Worker) -> None:
    with Worker(broker, MEMSAVER_POOL="process") as peer:
        peer.run("region = memsaver.region('mine', device='cpu')")
        peer.run(f"handle = _core.open_driver('cpu').create({4 * MIB})")
        text = peer.run("print(json.dumps(memsaver.stats().asdict()['devices']['cpu']['ledger']))")
        found = json.loads(text)
        total = broker.status()["total_bytes"]
        assert [(row["pid"], row["kind"], row["bytes"]) for row in found["rows"]] == [
            (peer.pid, "unknown", 4 * MIB), (broker.pid, "process", total),
        ]  # fmt: skip
        assert found["used_bytes"] == used_bytes(one) == total + 4 * MIB
        expected: Sums = {
            (one.pid, "region", "a"): mapped(one, "a"),
            (peer.pid, "process", ""): 4 * MIB,
            (broker.pid, "pool idle", ""): broker.status()["idle_bytes"],
        }
        check_everywhere(broker, expected, one)


def test_chunks_of_a_broker_that_died_count_for_their_holders(broker: Running, one: Worker, two: Worker) -> None:
    regions: Sums = {(one.pid, "region", "a"): mapped(one, "a"), (two.pid, "region", "c"): mapped(two, "c")}
    broker.kill()
    until(lambda: one.run("print(_core.connected('cpu'))") == "False")
    until(lambda: used_bytes(one) == sum(regions.values()))  # the clients drop their handles of idle chunks
    found = seen_by(one)
    assert sums(found) == {(one.pid, "region", "a"): mapped(one, "a"), (two.pid, "process", ""): mapped(two, "c")}
    assert found.is_consistent and found.used_bytes == used_bytes(one)
    broker.start()
    until(lambda: {row["pid"] for row in broker.status()["clients"]} == {one.pid, two.pid})
    until(lambda: broker.status()["total_bytes"] == sum(regions.values()))
    check_everywhere(broker, regions, one, two)


def test_a_client_that_holds_the_gil_counts_by_its_chunks(broker: Running, one: Worker, tmp_path: Path) -> None:
    """Its report could be of other memory than it has now."""
    held = broker.row(one.pid)["held_bytes"]
    hold_the_gil(one, tmp_path / "pipe")
    until(lambda: not broker.row(one.pid)["is_current"])
    assert sums(seen_by_broker(broker)).items() >= {(one.pid, "pool held", ""): held}.items()
    let_go(one, tmp_path / "pipe")
    until(lambda: sums(seen_by_broker(broker)).items() >= {(one.pid, "region", "a"): mapped(one, "a")}.items())


def test_a_client_ends_while_its_ledger_is_made(broker: Running) -> None:
    """The end of the interpreter does not stop the thread within a call of the core, which would end the process."""
    program = """
import threading, time
import memsaver
from memsaver import _core
from memsaver.ledger import reports
memsaver.configure(pool="shared")
region = memsaver.region("a", device="cpu")

def slow(device, inside):
    end = time.monotonic() + 0.5
    while threading.current_thread().name == "memsaver-queries" and time.monotonic() < end:
        _core.ledger_figures(device)
    return 0

reports._torch_bytes = slow
memsaver.stats()  # which does not wait so long
"""
    names = ("MEMSAVER_HOST_DEVICE", "MEMSAVER_POOL_DIR")
    done = run_python(program, **{name: broker.environment[name] for name in names})
    assert (done.returncode, done.stderr) == (0, "")
