"""The ledger of a device: every byte in use, once, by process and kind."""

from __future__ import annotations

import json
import os
import pickle
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaver
from memsaver import _core, errors, ledger, process_names
from memsaver._torch import graphs
from memsaver._torch import ledger as torch_ledger
from memsaver.ledger import LedgerRow, accounts, messages
from memsaver.ledger import own as figures_here
from memsaver.ledger.accounts import Device, PoolTotal, Report, account
from memsaver.ledger.rows import Part
from tests import controls
from tests.fake_cuda import run_on_fake
from tests.support import GIB, MIB, PAGE, Peer, blocks

Make = Callable[..., memsaver.Region]


LEFT = "left by other files"
_left: set[str] = set()  # tags of their regions with memory


@pytest.fixture(autouse=True)
def no_other_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other files may leave memory in this process. It gets a row of its own, which the tests leave out."""
    memsaver.region("flush", device="cpu")
    paused: list[memsaver.Region] = []
    for region in memsaver.regions.all_regions():
        if region.device == "cpu" and region.state == "active":
            with suppress(memsaver.Error):
                region.pause()
                paused.append(region)
    _left.clear()
    _left.update(region.tag for region in memsaver.regions.all_regions() if region.mapped_bytes)
    monkeypatch.setattr(figures_here, "_measured", {})
    monkeypatch.setattr(figures_here, "_measured", {("cpu", LEFT, ""): figures_here._unattributed_bytes("cpu") or 0})
    yield
    controls.disarm()
    controls.reset()  # without a context a resume would lose the region
    for region in paused:  # the next file expects them as they were
        region.resume()


def own_rows(found: ledger.Ledger) -> list[LedgerRow]:
    return [row for row in found.rows if row.kind != LEFT and row.label not in _left]


def of_device() -> ledger.Ledger:
    return memsaver.stats().devices["cpu"].ledger


def used_bytes() -> int:
    free, total = _core.open_driver("cpu").memory()
    return int(total - free)


def by_kind(found: ledger.Ledger) -> dict[tuple[int | None, str], int]:
    """Bytes by pid and kind."""
    sums: dict[tuple[int | None, str], int] = {}
    for row in own_rows(found):
        sums[row.pid, row.kind] = sums.get((row.pid, row.kind), 0) + row.bytes
    return sums


def check_sum(found: ledger.Ledger) -> None:
    assert sum(row.bytes for row in found.rows) == found.used_bytes == used_bytes()
    assert found.is_consistent


# One process


STEPS = ("grow", "free", "pause", "resume", "retain", "outside")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2))))
def test_each_byte_has_one_row_after_any_calls(steps: list[tuple[str, int]]) -> None:
    regions = [memsaver.region(f"ledger{each}", device="cpu", backup="host") for each in range(3)]
    driver = _core.open_driver("cpu")
    held: list[list[Any]] = [[], [], []]
    outside: list[int] = []
    try:
        for step, at in steps:
            region = regions[at]
            if step == "grow" and region.state == "active":
                held[at] += blocks(region, [(at + 1) * 3 * MIB])
            elif step == "free" and held[at]:
                held[at].pop()
            elif step in ("pause", "resume"):
                getattr(region, step)()
            elif step == "retain":
                memsaver.configure(retain=at * 8 * MIB)
            elif step == "outside":
                outside.append(driver.create(PAGE))
            mapped = sum(region.mapped_bytes for region in regions)
            expected = {"region": mapped, "unknown": len(outside) * PAGE}
            expected["retained"] = memsaver.stats().devices["cpu"].retained_bytes
            found = of_device()
            check_sum(found)
            sums = by_kind(found)
            assert sums == {(os.getpid(), kind): nbytes for kind, nbytes in expected.items() if nbytes}
    finally:
        for handle in outside:
            driver.release(handle)
        memsaver.configure(retain=0)
        for region in regions:
            region.resume()


class Cache(memsaver.Guest):
    held = 0

    def leave(self) -> None:
        raise AssertionError("it stays")

    @property
    def nbytes(self) -> int:
        return self.held


def test_a_guest_has_a_row(tag: str) -> None:
    guest = Cache("connections", tags=tag)
    guest.held = 2 * PAGE
    memsaver.register(guest)
    memsaver.region(tag, device="cpu")
    handle = _core.open_driver("cpu").create(2 * PAGE)
    try:
        found = of_device()
        check_sum(found)
        name = process_names.process_name(os.getpid())
        assert own_rows(found) == [LedgerRow(os.getpid(), name, "guest", "connections", "here", 2 * PAGE)]
        left = figures_here._measured["cpu", LEFT, ""]  # of two rows that contradict, the larger one is reduced
        guest.held = left + 3 * PAGE  # more than there is
        found = of_device()
        assert [(row.kind, row.bytes) for row in own_rows(found)] == [("guest", 2 * PAGE)]
        assert not found.is_consistent and sum(row.bytes for row in found.rows) == used_bytes()
    finally:
        memsaver.unregister(guest)
        _core.open_driver("cpu").release(handle)


# Several processes


def test_memory_of_a_process_without_a_broker_is_one_row(make: Make) -> None:
    held = blocks(make(), [2 * MIB])
    with Peer() as user, Peer() as other:
        user.run("region = memsaver.region('theirs', device='cpu'); held = region._core.allocate_array(64 << 20)")
        other.run("driver = _core.open_driver('cpu'); handle = driver.create(4 << 20)")
        found = of_device()
        check_sum(found)
        theirs = int(user.run("print(region.mapped_bytes)"))
        assert by_kind(found) == {
            (os.getpid(), "region"): held[0].region.mapped_bytes,
            (user.pid, "process"): theirs,
            (other.pid, "process"): 4 * MIB,
        }
        user.run("region.pause()")
        assert (user.pid, "process") not in by_kind(of_device())


# The ledger of made-up figures

DRIVER_S = 300  # bytes that the driver itself has


def test_chunks_of_a_pool_count_for_their_holder_or_as_idle() -> None:
    """The driver lists a pool of 100 bytes for its clients' handles, for its broker, or for no process."""
    for holdings, imported in (
        ([(1, 70, None), (2, 90, None)], (60, 80)),  # handles of chunks that they returned count as well
        ([(1, 10, None), (2, 10, None), (9, 100, None)], (0, 0)),
        ([(1, 10, None), (2, 10, None)], (0, 0)),
    ):
        one = Report(1, "one", [("region", "a", "active", 60)], imported[0], pooled=60)
        two = Report(2, "two", [("region", "b", "active", 20)], imported[1], pooled=20)
        found = account(Device(100 + 20 + DRIVER_S, holdings, False), [one, two], PoolTotal(9, "broker", 100))
        assert by_kind(found) == {
            (1, "region"): 60, (1, "unknown"): 10, (2, "region"): 20, (2, "unknown"): 10, (9, "pool idle"): 20,
            (None, "unlisted"): DRIVER_S,
        }  # fmt: skip


def test_chunks_of_a_process_that_has_exited_count_for_the_process_that_keeps_them() -> None:
    client = {
        "pid": 1, "name": "dead", "held_bytes": 60, "exited": True, "kept_by": [{"pid": 2, "name": "child"}],
        "is_current": True, "ledger": {"imported_bytes": 0, "rows": [["context", "", "", 9]]},
    }  # fmt: skip
    report = accounts._report(client)
    for holdings in ([(1, 80, None), (2, 10, None)], [(2, 10, 0)]):
        found = account(Device(130, holdings, False), [report], PoolTotal(9, "broker", 100))
        rows = {(2, "pool held"): 60, (2, "process"): 10, (9, "pool idle"): 40, (None, "unlisted"): 20}
        assert by_kind(found) == rows
        assert [row.label for row in found.rows if row.kind == "pool held"] == ["of pid 1, which has exited"]
    assert accounts._report({**client, "kept_by": []}).pid == 1


def test_figures_that_contradict_each_other_leave_no_negative_row() -> None:
    """A region was paused between two reads, or a chunk of the pool was taken. A guest claims too much."""
    one = Report(1, "one", [("region", "a", "active", 60)], 0)
    found = account(Device(10, [(1, 10, None)], False), [one], None)
    assert by_kind(found) == {(1, "region"): 10} and not found.is_consistent
    found = account(Device(40, [], False), [one], None)
    assert by_kind(found) == {(1, "region"): 40} and not found.is_consistent
    found = account(Device(80, [(1, 10, None)], False), [one], None)
    assert by_kind(found) == {(1, "region"): 60, (None, "unlisted"): 20} and not found.is_consistent
    taken = Report(1, "one", [("region", "a", "active", 60)], 0, pooled=60)
    found = account(Device(80, [(1, 10, None)], False), [taken], PoolTotal(9, "broker", 40))
    assert by_kind(found) == {(1, "region"): 60, (1, "unknown"): 10, (None, "unlisted"): 10}
    assert not found.is_consistent
    guest = Report(2, "two", [("region", "b", "active", 60), ("guest", "", "", 50), ("torch cached", "", "", -5)], 0)
    found = account(Device(150, [(1, 60, None), (2, 80, None)], False), [one, guest], None)
    assert by_kind(found) == {(1, "region"): 60, (2, "region"): 60, (2, "guest"): 30} and not found.is_consistent


SIZES = st.integers(0, 100)
KINDS = st.sampled_from(["region", "guest", "context"])
PARTS = st.lists(st.tuples(KINDS, st.just(""), st.just(""), SIZES), max_size=3)
REPORTS = st.builds(Report, st.integers(1, 4), st.just("some"), PARTS, st.none() | SIZES, SIZES)
HOLDINGS = st.lists(st.tuples(st.integers(1, 5), SIZES, st.none() | SIZES), max_size=4, unique_by=lambda row: row[0])


@given(
    st.builds(Device, SIZES, HOLDINGS, st.booleans()),
    st.lists(REPORTS, max_size=3, unique_by=lambda report: report.pid),
    st.none() | st.builds(PoolTotal, st.just(9), st.just("broker"), SIZES),
)
def test_any_figures_give_rows_that_sum_up_and_none_that_is_negative(
    device: Device, reports: list[Report], pool: PoolTotal | None
) -> None:
    found = account(device, reports, pool)
    assert all(row.bytes > 0 for row in found.rows)
    assert sum(row.bytes for row in found.rows) == device.used_bytes


def test_an_inconsistent_account_is_read_again_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    held = blocks(make(), [2 * MIB])
    read = _core.ledger_figures
    calls: list[str] = []

    def late(device: str) -> dict[str, Any]:
        found = read(device)
        calls.append(device)
        if len(calls) <= wrong:
            found["retained_bytes"] += PAGE
        return found

    monkeypatch.setattr(_core, "ledger_figures", late)
    wrong = 1
    check_sum(of_device())
    assert len(calls) == 2
    calls.clear()
    wrong = 9
    found = of_device()
    assert len(calls) == 2 and not found.is_consistent
    assert (os.getpid(), "unknown") not in by_kind(found)
    assert sum(row.bytes for row in found.rows) == used_bytes()
    del held


def test_the_account_of_a_device_without_figures_has_the_known_rows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = blocks(make(), [2 * MIB])
    read = _core.ledger_figures
    monkeypatch.setattr(_core, "ledger_figures", lambda device: {**read(device), "used_bytes": None, "holdings": []})
    found = of_device()
    assert found.used_bytes is None
    assert by_kind(found) == {(os.getpid(), "region"): held[0].region.mapped_bytes}


# Messages


def test_a_report_survives_its_message(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    held = blocks(make(), [2 * MIB])
    parts = [("torch cached", "", "", 5 * PAGE), ("graphs", "cuda_graph", "", PAGE)]
    monkeypatch.setattr(figures_here, "torchs", lambda figure, device, missing: parts)
    found = ledger.decoded(ledger.encoded("cpu"))
    assert found["imported_bytes"] == 0
    region = held[0].region
    rows = [["region", region.tag, "active", region.mapped_bytes], *map(list, parts)]
    assert all(row in found["rows"] for row in rows)
    assert [region.tag, "active", "none", 2 * MIB, region.mapped_bytes, 0] in found["regions"]


def test_the_rows_of_a_long_report_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(parts: list[Part]) -> tuple[str, list[list[Any]]]:
        report = Report(1, "one", parts, 0)
        monkeypatch.setattr(messages, "own", lambda device: (None, report))
        text = ledger.encoded("cpu")
        return text, ledger.decoded(text)["rows"]

    _, rows = reported([("graphs", f"graph {each} {'x' * 200}", "", each) for each in range(1, 1001)])
    assert len(rows) <= messages.MOST_ROWS and sum(row[3] for row in rows) == sum(range(1001))
    assert rows[0][3] == 1000 and rows[-1][0] == "other"
    text, rows = reported([(200 * "\u20ac", 200 * "\u20ac", 200 * "\u20ac", each) for each in range(1, 1001)])
    assert len(text) < _core.LONGEST_PACKET and 1 < len(rows) < messages.MOST_ROWS
    assert sum(row[3] for row in rows) == sum(range(1001))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"imported_bytes": 0}', '{"imported_bytes": "0", "rows": [], "regions": []}',
        *(
            f'{{"imported_bytes": 0, "rows": {rows}, "regions": []}}'
            for rows in (
                "{}", '[["a", "b", "c"]]', '[["a", "b", "c", true]]', '[["a", 1, "c", 2]]', '[["a", "b", "c", 1e3]]',
                '[["a", "b", "c", 9223372036854775808]]', json.dumps([["a" * 101, "", "", 1]]),
                json.dumps([["a", "", "", 1]] * 201),
            )
        ),
        '{"imported_bytes": 0, "rows": [], "regions": [["a", "b", "c", 1, 2]]}',
    ],
)  # fmt: skip
def test_a_malformed_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ledger.decoded(text)


# Text


def test_lines_have_the_largest_first_and_sum_the_rest() -> None:
    rows = [LedgerRow(pid, f"p{pid}", "process", "", "", pid * GIB) for pid in range(1, 14)]
    rows += [LedgerRow(13, "p13", "region", "kv", "active", 3 * GIB), LedgerRow(None, "", "unlisted", "", "", MIB)]
    found = ledger.lines(ledger.Ledger(sum(row.bytes for row in rows), rows, True))
    assert len(found) == 10
    assert found[0] == "p13 (pid 13) 16.00 GiB: process 13.00 GiB, region kv (active) 3.00 GiB"
    assert found[1] == "p12 (pid 12) 12.00 GiB: process 12.00 GiB"
    assert found[-1] == "5 more 10.00 GiB"
    assert ledger.lines(ledger.Ledger(MIB, rows[-1:], True)) == ["no listed process 1.0 MiB: unlisted 1.0 MiB"]


# Errors


def test_out_of_memory_has_the_rows_of_stats(make: Make) -> None:
    region = make()
    held = blocks(region, [40 * MIB])
    with Peer() as peer:
        peer.run("handle = _core.open_driver('cpu').create(4 << 20)")
        with pytest.raises(memsaver.OutOfMemoryError) as caught:
            region.empty(1 << 50)
        found = memsaver.stats().asdict()["devices"]["cpu"]["ledger"]
        name = process_names.process_name(peer.pid)
        assert f"\n  {name} (pid {peer.pid}) 4.0 MiB: process 4.0 MiB" in str(caught.value)
    assert caught.value.ledger == found["rows"] != []
    first, *lines = str(caught.value).split("\n")
    assert first.endswith("; nothing has changed")
    me = f"{process_names.process_name(os.getpid())} (pid {os.getpid()})"
    size = errors.gib(region.mapped_bytes)
    [mine] = [line for line in lines if line.startswith(f"  {me} ")]
    assert f"region {region.tag} (active) {size}" in mine
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.ledger) == (str(caught.value), caught.value.ledger)
    del held


def test_torchs_error_has_the_rows_as_notes(make: Make) -> None:
    outer, inner = make(), make()
    held = blocks(outer, [2 * MIB])
    with pytest.raises(torch.OutOfMemoryError) as caught, outer, inner:
        raise torch.OutOfMemoryError("CUDA out of memory")
    notes = caught.value.__notes__
    assert len(notes) == 1 and f"region {outer.tag} (active)" in notes[0]
    del held


# torch's figures, made up here: no machine of these tests has torch with CUDA


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures of torch on cuda:0. ``inside``: segments in regions; ``segments``: torch's list."""
    found: dict[str, Any] = {"reserved": 0, "allocated": 0, "blocks": 10, "inside": [], "segments": [], "lists": 0}

    def stats(device: torch.device) -> dict[str, Any]:
        assert device == torch.device("cuda:0")
        names = {"reserved_bytes": "reserved", "allocated_bytes": "allocated", "allocation": "blocks"}
        counts = {name: {"all": {"current": found[key]}} for name, key in names.items()}
        return {**counts, "inactive_split": {"all": {"current": 0}}}

    def snapshot(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
        assert pool_id == (0, 0)
        found["lists"] += 1
        return list(found["segments"])

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch_ledger, "snapshot", snapshot)
    monkeypatch.setattr(torch_ledger, "_segments", lambda device: found["inside"])
    return found


def segment(address: int, total: int, allocated: int, device: int = 0) -> dict[str, Any]:
    """A block in use and a free one."""
    blocks = [
        {"address": address, "size": allocated, "state": "active_allocated"},
        {"address": address + allocated, "size": total - allocated, "state": "inactive"},
    ]
    return {"address": address, "total_size": total, "blocks": blocks, "device": device}


def test_segments_in_regions_are_not_torchs(figures: dict[str, Any]) -> None:
    """Neighbouring segments of a region are one range. Segments of another device are not listed."""
    figures |= {"reserved": 100, "allocated": 60, "inside": [(1000, 50), (3000, 10)]}
    figures["segments"] = [
        segment(900, 30, 15), segment(1000, 20, 20), segment(1020, 30, 5), segment(1050, 10, 10),
        segment(3000, 10, 10), segment(5000, 1000, 1000, device=1),
    ]  # fmt: skip
    assert torch_ledger.parts("cuda:0") == [("torch allocated", "", "", 25), ("torch cached", "", "", 15)]
    assert torch_ledger.outside_bytes("cuda:0") == 40


def test_blocks_of_one_segment_inside_and_outside_count_once(figures: dict[str, Any]) -> None:
    """An expandable segment whose first pieces are from before ``memsaver.default_pool()``."""
    figures |= {"reserved": 100, "allocated": 70, "inside": [(1040, 60)]}
    joined = segment(1000, 40, 30)
    joined |= {"total_size": 100, "blocks": joined["blocks"] + segment(1040, 60, 40)["blocks"]}
    figures["segments"] = [joined]
    assert torch_ledger.parts("cuda:0") == [("torch allocated", "", "", 30), ("torch cached", "", "", 10)]
    assert torch_ledger.outside_bytes("cuda:0") == 40


def test_the_account_does_not_load_torch() -> None:
    from tests.support import run_clean

    assert (
        run_clean("""
        import sys, memsaver
        region = memsaver.region("a", device="cpu")
        held = region._core.allocate_array(1 << 20)
        rows = memsaver.stats().devices["cpu"].ledger.rows
        print([row.kind for row in rows], "torch" in sys.modules)
    """)
        == "['region'] False\n"
    )


# Measurements


def test_a_measurement_is_the_growth_that_no_other_row_has(make: Make) -> None:
    region = make()
    driver = _core.open_driver("cpu")
    handles: list[int] = []
    with ledger.measured("graphs", "decode", "cpu") as outer:
        handles.append(driver.create(PAGE))
        held = blocks(region, [10 * MIB])
        with ledger.measured("NCCL", "", "cpu") as inner:
            handles += [driver.create(PAGE), driver.create(PAGE)]
    try:
        assert (outer.bytes, inner.bytes) == (PAGE, 2 * PAGE)
        found = of_device()
        check_sum(found)
        assert by_kind(found) == {
            (os.getpid(), "region"): region.mapped_bytes,
            (os.getpid(), "graphs"): PAGE,
            (os.getpid(), "NCCL"): 2 * PAGE,
        }
        for handle in handles[1:]:
            driver.release(handle)
        del handles[1:]
        inner.release()
        inner.release()
        check_sum(of_device())
    finally:
        for handle in handles:
            driver.release(handle)
        outer.release()
        inner.release()
    check_sum(of_device())
    del held


def test_the_context_is_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory that the process had when its first region was made is freed later, or is a guest's."""
    monkeypatch.setattr(figures_here, "_seen", set())
    driver = _core.open_driver("cpu")
    handles = [driver.create(PAGE) for _ in range(4)]
    ledger.measure_context("cpu")
    guest = Cache("connections", tags="connections")
    try:
        assert by_kind(of_device()) == {(os.getpid(), "context"): 4 * PAGE}
        ledger.measure_context("cpu")
        driver.release(handles.pop())
        assert by_kind(of_device()) == {(os.getpid(), "context"): 3 * PAGE}
        memsaver.register(guest)
        guest.held = 2 * PAGE
        assert by_kind(of_device()) == {(os.getpid(), "context"): PAGE, (os.getpid(), "guest"): 2 * PAGE}
        check_sum(of_device())
        handles.append(driver.create(PAGE))
        assert by_kind(of_device())[os.getpid(), "unknown"] == PAGE
    finally:
        memsaver.unregister(guest)
        while handles:
            driver.release(handles.pop())
    guest.held = 0
    check_sum(of_device())
    assert own_rows(of_device()) == []


class MadeUpGraph:
    def _add_needs(self, needed: object) -> None:
        pass


def test_a_graph_has_a_row_as_long_as_it_lives(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parts of torch that need CUDA made up."""
    region = make("host")
    driver = _core.open_driver("cpu")
    handles: list[int] = []

    @contextmanager
    def capture(graph: object, **options: object) -> Iterator[None]:
        yield
        handles.append(driver.create(PAGE))  # the instantiation

    monkeypatch.setattr(graphs, "CUDAGraph", MadeUpGraph)
    monkeypatch.setattr(graphs, "adapter", lambda: SimpleNamespace(pool=lambda home: SimpleNamespace(id=(0, 1))))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    graph: Any = MadeUpGraph()
    with graphs.graph(graph, region):
        pass
    try:
        found = of_device()
        check_sum(found)
        name = process_names.process_name(os.getpid())
        assert own_rows(found) == [LedgerRow(os.getpid(), name, "graphs", region.tag, "", PAGE)]
    finally:
        driver.release(handles.pop())
        del graph
    check_sum(of_device())
    assert own_rows(of_device()) == []


# On the fake CUDA driver

FAKE = """
import os
import memsaver
from memsaver import _core, ledger
from tests.fake_cuda import control
from tests.fake_cuda.control import Segment

MIB, PAGE = 1 << 20, 2 << 20

def rows():
    found = memsaver.stats().devices["cuda:0"]
    assert found.ledger.used_bytes == found.total_bytes - found.free_bytes
    assert sum(row.bytes for row in found.ledger.rows) == found.ledger.used_bytes
    assert found.ledger.is_consistent
    return {(row.pid, row.kind): row.bytes for row in found.ledger.rows}

me = os.getpid()
"""


def test_the_rows_of_a_gpu_that_lists_its_processes() -> None:
    run_on_fake(
        FAKE
        + """
region = memsaver.region("kv", device="cuda:0")
segment = Segment(region, 5 * MIB)
expected = {(me, "region"): region.mapped_bytes, (me, "context"): 300 * MIB, (4711, "process"): 100 * MIB,
            (None, "unlisted"): 28 * MIB}
assert rows() == expected, rows()
control.take(0, 7 * MIB)
assert rows() == {**expected, (me, "unknown"): 7 * MIB}
with ledger.measured("graphs", "decode", "cuda:0") as graphs:
    control.take(0, 9 * MIB)
assert rows() == {**expected, (me, "unknown"): 7 * MIB, (me, "graphs"): 9 * MIB}
control.take(0, -9 * MIB)
graphs.release()
assert rows() == {**expected, (me, "unknown"): 7 * MIB}
region.pause()
del expected[me, "region"]
assert rows() == {**expected, (me, "unknown"): 7 * MIB}
""",
        context="300MiB",
        occupied="128MiB",
        processes=f"0:4711:{100 * MIB}",
    )


def test_a_process_with_regions_of_a_drop_in_alone_has_a_context() -> None:
    run_on_fake(
        FAKE
        + """
from memsaver.drop_in.tagged import TaggedRegions
kv = TaggedRegions("library").active("kv", "none")
assert kv.device == "cuda:0"
assert rows() == {(me, "context"): 300 * MIB, (None, "unlisted"): 64 * MIB}, rows()
""",
        context="300MiB",
        occupied="64MiB",
    )


def test_imported_memory_of_a_gpu_is_not_listed_for_the_importer() -> None:
    """It needs one call of the driver, and a process that made the memory keeps it in its list."""
    importer = """
        import sys, memsaver
        from memsaver import _core
        from tests.fake_cuda import control
        memsaver.region("kv", device="cuda:0")
        driver = _core.open_driver("cuda:0")
        handle = driver.import_fd(int(sys.argv[1]))
        [(pid, *figures)] = _core.ledger_figures("cuda:0")["holdings"]
        assert figures == [300 << 20, 0], figures
        assert control.calls("cuMemImportFromShareableHandle") == 1 and control.calls("cuMemMap") == 0
        driver.release(handle)
    """
    run_on_fake(
        f"CHILD = {textwrap.dedent(importer)!r}"
        + """
import subprocess, sys
import memsaver
from memsaver import _core
memsaver.region("kv", device="cuda:0")
driver = _core.open_driver("cuda:0")
file = driver.export_fd(driver.create(8 << 20))
driver.import_fd(file)
assert _core.ledger_figures("cuda:0")["holdings"][0][1:] == (308 << 20, 0)
subprocess.run([sys.executable, "-c", CHILD, str(file)], check=True, pass_fds=[file])
""",
        context="300MiB",
    )
