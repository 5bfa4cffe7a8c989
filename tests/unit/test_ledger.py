"""The ledger of a device: every byte in use, once, by process and kind."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaver
from memsaver import _core, errors, ledger, process_names
from memsaver.ledger import LedgerRow, accounts, reports
from memsaver.ledger.accounts import Device, Part, Report, account
from tests import controls
from tests.support import GIB, MIB, PAGE, Make, Peer, blocks, host_held_bytes, used_bytes

Sums = dict[tuple[int | None, str], int]  # bytes by pid and kind

_left_bytes = 0  # in use by this process before the test: chunks whose release other files made fail
_left_tags: set[str] = set()  # of regions of other files with memory


@pytest.fixture(autouse=True)
def no_other_memory() -> Iterator[None]:
    """Other files may leave memory in this process, which the tests leave out."""
    global _left_bytes, _left_tags
    memsaver.region("flush", device="cpu")
    paused: list[memsaver.Region] = []
    for region in memsaver.regions.all_regions():
        if region.device == "cpu" and region.state == "active":
            with suppress(memsaver.Error):
                region.pause()
                paused.append(region)
    _left_bytes = 0
    _left_tags = {region.tag for region in memsaver.regions.all_regions() if region.mapped_bytes}
    _left_bytes = by_kind(of_device()).get((os.getpid(), "unknown"), 0)
    yield
    controls.disarm()
    controls.reset()  # without a context a resume would lose the region
    for region in paused:  # the next file expects them as they were
        region.resume()


def of_device() -> ledger.Ledger:
    return memsaver.stats().devices["cpu"].ledger


def by_kind(found: ledger.Ledger) -> Sums:
    sums: Sums = {(os.getpid(), "unknown"): -_left_bytes}
    for row in found.rows:
        if row.label not in _left_tags:
            sums[row.pid, row.kind] = sums.get((row.pid, row.kind), 0) + row.bytes
    return {key: nbytes for key, nbytes in sums.items() if nbytes}


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
            assert by_kind(found) == {(os.getpid(), kind): nbytes for kind, nbytes in expected.items() if nbytes}
    finally:
        for handle in outside:
            driver.release(handle)
        memsaver.configure(retain=0)
        for region in regions:
            region.resume()


# The ledger of made-up figures

DRIVER_S = 300  # bytes that the driver itself has


def sums(found: ledger.Ledger) -> Sums:
    assert len({(row.pid, row.kind) for row in found.rows}) == len(found.rows)
    return {(row.pid, row.kind): row.bytes for row in found.rows}


def test_chunks_of_a_pool_count_for_their_holder_or_as_idle() -> None:
    """The driver lists a pool of 100 bytes for its clients' handles, for its broker, or for no process."""
    for holdings, imported in (
        ([(1, 70, None), (2, 90, None)], (60, 80)),  # handles of chunks that they returned count as well
        ([(1, 10, None), (2, 10, None), (9, 100, None)], (0, 0)),
        ([(1, 10, None), (2, 10, None)], (0, 0)),
    ):
        one = Report(1, "one", [("region", "a", "active", 60)], imported[0], pooled=60)
        two = Report(2, "two", [("region", "b", "active", 20)], imported[1], pooled=20)
        found = account(Device(100 + 20 + DRIVER_S, holdings, False), [one, two], (9, 100))
        assert sums(found) == {
            (1, "region"): 60, (1, "unknown"): 10, (2, "region"): 20, (2, "unknown"): 10, (9, "pool idle"): 20,
            (None, "unlisted"): DRIVER_S,
        }  # fmt: skip
    # A guest claims too much: rows that memsaver counts itself stay, and none is negative.
    one = Report(1, "one", [("region", "a", "active", 60)], 0)
    guest = Report(2, "two", [("region", "b", "active", 60), ("guest", "", "", 50), ("torch", "", "", -5)], 0)
    found = account(Device(150, [(1, 60, None), (2, 80, None)], False), [one, guest], None)
    assert sums(found) == {(1, "region"): 60, (2, "region"): 60, (2, "guest"): 30} and not found.is_consistent


def test_chunks_of_a_process_that_has_exited_count_for_the_process_that_keeps_them() -> None:
    client = {
        "pid": 1, "name": "dead", "held_bytes": 50, "leaving_bytes": 10, "exited": True,
        "kept_by": [{"pid": 2, "name": "child"}], "is_current": True,
        "ledger": {"imported_bytes": 0, "rows": [["guest", "", "", 9]]},
    }  # fmt: skip
    report = accounts._report(client)
    for holdings in ([(1, 80, None), (2, 10, None)], [(2, 10, 0)]):
        found = account(Device(130, holdings, False), [report], (9, 100))
        rows = {(2, "pool held"): 60, (2, "process"): 10, (9, "pool idle"): 40, (None, "unlisted"): 20}
        assert sums(found) == rows
        assert [row.label for row in found.rows if row.kind == "pool held"] == ["of pid 1, which has exited"]
    assert accounts._report({**client, "kept_by": []}).pid == 1


SIZES = st.integers(0, 100)
PARTS = st.lists(st.tuples(st.sampled_from(["region", "guest"]), st.just(""), st.just(""), SIZES), max_size=3)
REPORTS = st.builds(Report, st.integers(1, 4), st.just("some"), PARTS, st.none() | SIZES, SIZES)
HOLDINGS = st.lists(st.tuples(st.integers(1, 5), SIZES, st.none() | SIZES), max_size=4, unique_by=lambda row: row[0])


@given(
    st.builds(Device, SIZES, HOLDINGS, st.booleans()),
    st.lists(REPORTS, max_size=3, unique_by=lambda report: report.pid),
    st.none() | st.tuples(st.just(9), SIZES),
)
def test_any_figures_give_rows_that_sum_up_and_none_that_is_negative(
    device: Device, reports: list[Report], pool: tuple[int, int] | None
) -> None:
    found = account(device, reports, pool)
    assert all(row.bytes > 0 for row in found.rows)
    assert sum(row.bytes for row in found.rows) == device.used_bytes


class Cache(memsaver.Guest):
    held = 2 * PAGE

    def leave(self) -> None:
        raise AssertionError("it stays")

    @property
    def nbytes(self) -> int:
        return self.held


def test_an_inconsistent_account_is_read_again_once_and_one_without_figures_has_the_known_rows(
    make: Make, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    """A guest may claim more than there is."""
    held = blocks(make(), [2 * MIB])
    guest = Cache("connections", tags=tag)
    memsaver.register(guest)
    driver = _core.open_driver("cpu")
    handle = driver.create(guest.held)
    found = of_device()
    check_sum(found)
    name = process_names.process_name(os.getpid())
    assert LedgerRow(os.getpid(), name, "guest", "connections", "here", guest.held) in found.rows
    guest.held = used_bytes() + PAGE
    found = of_device()
    assert not found.is_consistent and sum(row.bytes for row in found.rows) == used_bytes()
    driver.release(handle)
    memsaver.unregister(guest)
    read = _core.ledger_figures
    calls: list[str] = []

    def late(device: str) -> dict[str, Any]:
        found = read(device)
        calls.append(device)
        if len(calls) <= wrong:
            found["retained_bytes"] += _left_bytes + PAGE
        return found

    monkeypatch.setattr(_core, "ledger_figures", late)
    for wrong in (1, 9):
        calls.clear()
        found = of_device()
        assert len(calls) == 2 and found.is_consistent == (wrong == 1)
        assert sum(row.bytes for row in found.rows) == used_bytes()
    monkeypatch.setattr(_core, "ledger_figures", lambda device: {**read(device), "used_bytes": None, "holdings": []})
    found = of_device()
    assert found.used_bytes is None
    assert [row.bytes for row in found.rows if row.label not in _left_tags] == [held[0].region.mapped_bytes]


# Messages


def test_a_report_survives_its_message_and_the_rows_of_a_long_one_are_joined(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    def sent(parts: list[Part]) -> dict[str, Any]:
        monkeypatch.setattr(reports, "own", lambda device: (None, Report(1, "", parts, 7)))
        text = ledger.encoded("cpu")
        assert len(text) < _core.LONGEST_PACKET
        found = ledger.decoded(text)
        assert found["imported_bytes"] == 7 and found["host_held_bytes"] == host_held
        return found

    [held] = blocks(make(), [2 * MIB])
    kept = blocks(make("host"), [2 * MIB])
    kept[0].region.pause()
    host_held = host_held_bytes()
    assert host_held > 0
    few = [("torch", "", "", 5 * PAGE), ("guest", "a", "here", PAGE)]
    found = sent(few)
    assert found["rows"] == [list(part) for part in few]
    region = held.region
    assert [region.tag, "active", "none", 2 * MIB, region.mapped_bytes, 0, 0] in found["regions"]
    rows = sent([("guest", f"part {each} {200 * chr(120)}", "", each) for each in range(1, 1001)])["rows"]
    assert len(rows) == reports.MOST_ROWS and sum(row[3] for row in rows) == sum(range(1001))
    assert rows[0][3] == 1000 and rows[-1][0] == "other"
    rows = sent([(200 * "\\u20ac", 200 * "\\u20ac", 200 * "\\u20ac", each) for each in range(1, 1001)])["rows"]
    assert 1 < len(rows) < reports.MOST_ROWS and sum(row[3] for row in rows) == sum(range(1001))


REPORT = {"imported_bytes": 0, "host_held_bytes": 0, "rows": [], "regions": []}


def test_a_malformed_report_is_refused() -> None:
    assert ledger.decoded(json.dumps(REPORT)) == REPORT
    wrong: list[dict[str, Any]] = [
        {"imported_bytes": "0"}, {"host_held_bytes": None}, {"rows": {}}, {"rows": [["a", "b", "c"]]},
        {"rows": [["a", "b", "c", True]]}, {"rows": [["a", 1, "c", 2]]}, {"rows": [["a", "b", "c", 1 << 63]]},
        {"rows": [["a" * 101, "", "", 1]]}, {"rows": [["a", "", "", 1]] * 201}, {"regions": [["a", "b", "c", 1, 2]]},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(ValueError):
            ledger.decoded(json.dumps(REPORT | change))


# Text and errors


def test_lines_have_the_largest_first_and_sum_the_rest() -> None:
    rows = [LedgerRow(pid, f"p{pid}", "process", "", "", pid * GIB) for pid in range(1, 14)]
    rows += [LedgerRow(13, "p13", "region", "kv", "active", 3 * GIB), LedgerRow(None, "", "unlisted", "", "", MIB)]
    found = ledger.lines(ledger.Ledger(sum(row.bytes for row in rows), rows, True))
    assert len(found) == 10
    assert found[0] == "p13 (pid 13) 16.00 GiB: process 13.00 GiB, region kv (active) 3.00 GiB"
    assert found[1] == "p12 (pid 12) 12.00 GiB: process 12.00 GiB"
    assert found[-1] == "5 more 10.00 GiB"
    assert ledger.lines(ledger.Ledger(MIB, rows[-1:], True)) == ["no listed process 1.0 MiB: unlisted 1.0 MiB"]


def test_out_of_memory_has_the_rows_of_stats(make: Make) -> None:
    """Memory of this process outside of regions is among them."""
    region = make()
    held = blocks(region, [40 * MIB])
    driver = _core.open_driver("cpu")
    mine = driver.create(PAGE)
    with Peer() as peer:
        peer.run("handle = _core.open_driver('cpu').create(4 << 20)")
        with pytest.raises(memsaver.OutOfMemoryError) as caught:
            region.empty(1 << 50)
        found = of_device()
        table = str(memsaver.stats())
        name = process_names.process_name(peer.pid)
        assert f"\n  {name} (pid {peer.pid}) 4.0 MiB: process 4.0 MiB" in str(caught.value)
        assert f"\n  {name} (pid {peer.pid}) 4.0 MiB: process 4.0 MiB" in table
    driver.release(mine)
    assert [LedgerRow(**row) for row in caught.value.ledger] == found.rows != []
    assert by_kind(found)[os.getpid(), "unknown"] == PAGE
    first, *lines = str(caught.value).split("\n")
    assert first.startswith("out of memory on cpu (stage 'memory'): ") and first.endswith(" free; nothing has changed")
    me = f"{process_names.process_name(os.getpid())} (pid {os.getpid()})"
    size = errors.gib(region.mapped_bytes)
    [line] = [line for line in lines if line.startswith(f"  {me} ")]
    assert f"region {region.tag} (active) {size}" in line
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), vars(copy)) == (str(caught.value), vars(caught.value))
    with pytest.raises(torch.OutOfMemoryError) as of_torch, region, make():
        raise torch.OutOfMemoryError("CUDA out of memory")
    [note] = of_torch.value.__notes__
    assert f"region {region.tag} (active)" in note
    del held
