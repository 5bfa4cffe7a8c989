"""The trace: events of several processes on one clock, their merge, and the picture of memory."""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import memsaver
from memsaver import _core, _results, cli, trace
from memsaver.broker import daemon
from memsaver.trace.files import read
from memsaver.trace.picture import MOVING, samples
from memsaver.trace.writer import IDLE, Writer
from memsaver.transitions import prepare_pause
from tests.pool_support import Running, Worker
from tests.support import MIB, Block, Fill, Make, Visitor, check, run_clean, until

Event = dict[str, Any]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The trace of this process."""
    path = tmp_path / "run.json"
    memsaver.configure(trace=path)
    yield path
    memsaver.configure(trace=None)


def of(path: Path | str) -> list[Event]:
    if trace.active is not None:
        trace.active.flush()
    return read([str(path)]).events


def command(*arguments: object) -> tuple[int, str, str]:
    """Runs `memsaver trace`. Returns the exit status and both outputs."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = cli.main(["trace", *map(str, arguments)])
    return code, out.getvalue(), errors.getvalue()


def named(events: list[Event], name: str, **fields: Any) -> list[Event]:
    return [each for each in events if each["name"] == name and fields.items() <= each.items()]


def only(events: list[Event], name: str, **fields: Any) -> Event:
    [found] = named(events, name, **fields)
    return found


def end(event: Event) -> int:
    return int(event["ts"] + event["dur"])


def check_format(events: list[Event]) -> None:
    """The rules of the Trace Event format: keys and types, tracks with names, spans of a track that nest."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    marks: dict[tuple[int, int], list[str]] = defaultdict(list)
    pairs: dict[tuple[int, str, str], list[str]] = defaultdict(list)
    names: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    last = 0
    for each in events:
        assert isinstance(each["name"], str) and type(each["pid"]) is int and type(each["args"]) is dict, each
        key = (each["pid"], each["tid"])
        if each["ph"] == "M":
            assert isinstance(each["args"]["name"], str)
            names[each["name"]].add(key)
            continue
        assert isinstance(each["cat"], str) and type(each["ts"]) is int and each["ts"] >= last, each
        last = each["ts"]
        if each["ph"] == "X":
            assert type(each["dur"]) is int and each["dur"] >= 0, each
            tracks[key].append(each)
        elif each["ph"] == "C":
            assert all(type(value) is int and value >= 0 for value in each["args"].values()) and each["args"], each
        elif each["ph"] in "BE":
            tracks.setdefault(key, [])
            marks[key].append(each["name"])
            if each["ph"] == "E":
                assert marks[key].pop() == marks[key].pop()
        else:
            pairs[each["pid"], each["cat"], each["id2"]["local"]].append(each["ph"])
    assert {key[0] for key in tracks} <= {pid for pid, _ in names["process_name"]}
    assert tracks.keys() <= names["thread_name"]
    assert len({tid for _, tid in tracks}) == len(tracks)  # Perfetto finds the thread of a name by its tid alone
    assert all(found == ["b", "e"] for found in pairs.values())
    for spans in tracks.values():
        open_until: list[int] = []
        for each in spans:
            while open_until and open_until[-1] <= each["ts"]:
                open_until.pop()
            assert not open_until or end(each) <= open_until[-1], each
            open_until.append(end(each))


def stages(events: list[Event], of_: Event) -> list[str]:
    """The stages within a transition."""
    return [
        each["name"] for each in events
        if each.get("cat") == "stage" and (each["pid"], each["tid"]) == (of_["pid"], of_["tid"])
        and of_["ts"] <= each["ts"] and end(each) <= end(of_)
    ]  # fmt: skip


class Turned:
    """Two processes that took turns on a pool of 128 MiB, until one was killed, and their traces."""

    def __init__(self, folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEMSAVER_TRACE", str(folder / "broker.%p.json"))
            broker = Running("128MiB")
        path = str(folder / "run.json")  # which both share
        with broker, Worker(broker, MEMSAVER_TRACE=path) as engine, Worker(broker, MEMSAVER_TRACE=path) as trainer:
            self.engine, self.trainer, self.broker, self.uuid = engine.pid, trainer.pid, broker.process.pid, broker.uuid
            engine.run("held = hold('kv', 96 * MIB, 'host')")
            engine.run("held.region.pause()")
            trainer.run("held = hold('params', 64 * MIB, 'host')")
            trainer.run("held.region.pause()")
            engine.run("held.region.resume()")
            trainer.send("held.region.resume(memory_timeout=60)")
            self.lacking = until_told(broker, trainer.pid, engine.pid)
            engine.run("held.check(); held.region.pause()")
            trainer.answer()
            trainer.run("held.check()")
            engine.send("held.region.resume(memory_timeout=60)")
            until_told(broker, engine.pid, trainer.pid)
            until(lambda: named(of(path), "resume params"))
            trainer.kill()
            engine.answer()
            engine.run("held.check()")
            self.freed_at = time.monotonic()
            until(lambda: len(named(of(path), "resume kv")) == 2)
        self.files = sorted(folder.glob("*.json"))


def until_told(broker: Running, waiting: int, holder: int) -> int:
    """Until a client waits, and was told who holds the memory. Returns the bytes that it lacks."""
    until(lambda: broker.row(waiting)["waiting"] and broker.row(holder)["unused_bytes"] is not None)
    [demand] = broker.row(waiting)["waiting"]
    return int(demand["needed_bytes"] - demand["granted_bytes"])


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Turned:
    return Turned(tmp_path_factory.mktemp("turned"))


def test_each_process_has_a_file_and_the_merge_is_one_trace_of_the_format(turned: Turned, tmp_path: Path) -> None:
    """Or some have one in common."""
    assert [path.name for path in turned.files] == [f"broker.{turned.broker}.json", "run.json"]
    text = turned.files[1].read_text()
    assert text.startswith("[\n") and text.count("[\n") == 1
    assert command("merge", *turned.files, "-o", tmp_path / "all.json") == (0, "", "")
    events: list[Event] = json.loads((tmp_path / "all.json").read_text())
    check_format(events)
    assert {each["pid"] for each in events} == {turned.broker, turned.engine, turned.trainer}
    parts = [each for path in turned.files for each in of(path)]
    assert sorted(map(json.dumps, events)) == sorted(map(json.dumps, parts))
    for path in turned.files:
        check_format(of(path))
    again = read([str(tmp_path / "all.json")])
    assert (again.events, again.torn) == (events, 0)


def test_a_wait_has_its_bytes_and_the_process_that_holds_them(turned: Turned) -> None:
    events = read(map(str, turned.files)).events
    wait = next(each for each in events if each["pid"] == turned.trainer and each.get("cat") == "waits")
    assert wait["args"]["bytes"] == turned.lacking == 32 * MIB
    [holder] = wait["args"]["holders"]
    assert (holder["pid"], holder["bytes"]) == (turned.engine, 96 * MIB)
    assert wait["name"] == f"waits for {holder['name']}"
    resume = only(events, "resume params", pid=turned.trainer)
    assert resume["ts"] <= wait["ts"] and end(wait) <= end(resume)
    first, second = named(events, "pause kv", pid=turned.engine)
    assert end(first) < wait["ts"] < second["ts"] < end(wait)  # one clock
    demand = [
        each for each in events
        if each["ph"] == "b" and each["args"]["pid"] == turned.trainer and each["args"]["waited_s"] > 0
    ]  # fmt: skip
    assert demand[0]["pid"] == turned.broker and demand[0]["name"].endswith(f" ({turned.trainer})")
    assert demand[0]["args"]["granted_bytes"] == demand[0]["args"]["bytes"] == 64 * MIB
    assert demand[0]["args"]["holders"] == [holder]
    begin, ended = [each for each in events if each.get("id2") == demand[0]["id2"] and each["cat"] == "demand"]
    # The client waits before the broker has its request.
    assert resume["ts"] <= begin["ts"] < second["ts"] < ended["ts"] <= end(resume)


def test_transitions_have_their_stages_and_copies_and_memory_by_owner_is_a_counter(turned: Turned) -> None:
    events = read(map(str, turned.files)).events
    pause, resume = named(events, "pause kv")[0], only(events, "resume params")
    assert stages(events, pause) == ["queue", "readers", "launches", "device", "backup", "move"]
    assert stages(events, resume) == ["queue", "readers", "launches", "memory", "move"]
    assert (pause["args"]["outcome"], pause["args"]["released_bytes"]) == ("done", 96 * MIB)
    out, back = named(events, "copies out", pid=turned.engine), named(events, "copies in")
    assert [each["args"]["bytes"] for each in out] == [96 * MIB, 96 * MIB]
    assert [(each["pid"], each["args"]["bytes"]) for each in back] == [
        (turned.engine, 96 * MIB), (turned.trainer, 64 * MIB), (turned.engine, 96 * MIB)
    ]  # fmt: skip
    for copies, move in ((out[0], pause), (back[1], resume)):
        assert move["ts"] <= copies["ts"] and end(copies) <= end(move) and copies["tid"] != move["tid"]
    name = f"memory cpu {turned.uuid}"
    kv = [each["args"]["kv"] // MIB for each in named(events, name, pid=turned.engine)]
    params = [each["args"]["params"] // MIB for each in named(events, name, pid=turned.trainer)]
    assert (kv, params) == ([96, 0, 96, 0, 96], [64, 0, 64])
    loans = named(events, f"loans cpu {turned.uuid}", pid=turned.broker)
    own = [nbytes for each in loans for owner, nbytes in each["args"].items() if owner.endswith(f"({turned.engine})")]
    assert {0, 96 * MIB} <= {*own} and max(own) == 96 * MIB
    idle = named(events, f"pool cpu {turned.uuid}", pid=turned.broker)
    assert 96 * MIB in [each["args"][IDLE] for each in idle]
    assert all(sum(each["args"].values()) <= 128 * MIB for each in loans)


def test_the_file_of_a_killed_process_is_read_but_for_a_torn_line(turned: Turned, tmp_path: Path) -> None:
    path = tmp_path / "torn.json"
    path.write_bytes(turned.files[1].read_bytes()[:-30])
    found = read([str(path)])
    assert found.torn == 1
    assert only(found.events, "pause params")["args"]["outcome"] == "done"
    text = "memsaver: lines left out, which the end of a process has cut: 1\n"
    assert command("merge", path, "-o", tmp_path / "all.json") == (0, "", text)
    check_format(json.loads((tmp_path / "all.json").read_text()))
    path.write_text(path.read_text() + turned.files[0].read_text().removeprefix("[\n"))  # by the next process
    found = read([str(path)])
    assert found.torn == 1
    assert [each for each in found.events if each["pid"] == turned.broker] == read([str(turned.files[0])]).events


def test_an_event_that_is_read_twice_is_in_the_merge_once(turned: Turned, tmp_path: Path) -> None:
    path = tmp_path / "run.all.json"
    for _ in range(2):  # its own output is among the files of the second call
        assert command("merge", *turned.files, *tmp_path.glob("run.*"), "-o", path) == (0, "", "")
    assert json.loads(path.read_text()) == read(map(str, turned.files)).events


def test_the_picture_has_each_owner_and_a_killed_process_holds_nothing(turned: Turned, tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    assert command("plot", *turned.files, "-o", path) == (0, "", "")
    root = ElementTree.fromstring(path.read_text())
    space = "{http://www.w3.org/2000/svg}"
    titles = [each.text or "" for each in root.iter(f"{space}title")]
    legend = [each.text or "" for each in root.iter(f"{space}text")]
    name = next(each["args"]["name"] for each in of(turned.files[1]) if each["name"] == "process_name")
    kv, params = f"{name} {turned.engine}: kv", f"{name} {turned.trainer}: params"
    assert f"{kv}: at most 96.00 MiB" in titles and f"{params}: at most 64.00 MiB" in titles
    assert {kv, params, IDLE} <= {*legend}
    for polygon in root.iter(f"{space}polygon"):
        points = [tuple(map(float, point.split(","))) for point in polygon.attrib["points"].split()]
        assert len(points) >= 4 and all(0 <= x <= 860 and 0 <= y <= 352 for x, y in points)
    found = samples(read(map(str, turned.files)).events)
    times = [at for at, _ in found]
    assert times == sorted(times)
    for at, held in found:
        regions = sum(nbytes for owner, nbytes in held.items() if ": " in owner)
        assert regions <= 128 * MIB
        if at > turned.freed_at:
            assert held[params] == 0
    assert any(held.get(params) == 64 * MIB and held[kv] == 0 for _, held in found)
    assert any(held.get(f"{name} {turned.trainer}: {MOVING}") for _, held in found)  # before its first transition
    cut = [each for each in of(turned.files[1]) if each["name"] != "process_name"]
    assert any(held.get(f"? {turned.engine}: kv") for _, held in samples(cut))


def test_the_picture_is_utf_8_in_each_locale(tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    program = f"""
from pathlib import Path
from memsaver.trace.picture import draw
draw([(0.0, {{"engine: \\u6a21": 1.0}}), (1.0, {{}})], Path({str(path)!r}))
"""
    assert run_clean(program, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C") == ""
    assert "engine: \u6a21" in [each.text for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_an_event_that_comes_while_a_trace_ends_is_written_to_no_other_file(tmp_path: Path) -> None:
    """A file that is opened after the end of the trace may get the number of the trace's descriptor."""
    writer = Writer(str(tmp_path / "run.json"))
    writer.event("B", "phase", "rollout")
    writer.flush()
    comes, ended = threading.Event(), threading.Event()

    class Events(deque[Any]):
        def append(self, event: Any) -> None:
            comes.set()
            ended.wait(60)
            super().append(event)

    writer._events = Events()
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(writer._add, lambda: "late", now=True)
        assert comes.wait(60)
        writer.end()
        with open(tmp_path / "other", "w"):
            ended.set()
            late.result(60)
    assert (tmp_path / "other").read_text() == ""


@pytest.mark.parametrize("how", ["pause", "allocation", "ahead"])
def test_copies_of_offered_contents_are_in_the_trace_and_the_sums(make: Make, file: Path, how: str) -> None:
    """Offered chunks have an owner of their own in the counters."""
    region = make("host")
    block = Block(region, 2 * MIB)
    other = make("none")
    region.pause(lazy=True)
    counters = [each["args"] for each in of(file) if each.get("cat") == "memory"]
    offered = f"{region.tag} (offered)"
    assert [(each[region.tag], each.get(offered)) for each in counters[-2:]] == [(2 * MIB, None), (0, 2 * MIB)]
    before, began = _results.totals(), time.monotonic()
    if how == "pause":
        region.pause()
    elif how == "ahead":
        region.pause(lazy="copy")
    else:
        gc.collect()
        memsaver.trim()
        with Fill(leave=0):
            Block(other, 2 * MIB)
    until(lambda: any(each.get("cat") == "copies" for each in of(file)), within_s=20)
    events = of(file)
    check_format(events)
    [copies] = [each for each in events if each.get("cat") == "copies"]
    assert (copies["name"], copies["args"]) == ("copies out", {"bytes": 2 * MIB})
    assert began - 1e-6 <= copies["ts"] / 1e6 <= (copies["ts"] + copies["dur"]) / 1e6 <= time.monotonic()
    after = _results.totals()
    assert after["copies_bytes", "out"] - before.get(("copies_bytes", "out"), 0) == 2 * MIB
    region.resume()
    block.check()
    del block
    region.close()
    other.pause()
    last = [each["args"] for each in of(file) if each.get("cat") == "memory"][-1]
    assert (last[region.tag], last[offered]) == (0, 0)


def test_waits_for_the_driver_and_for_readers_have_their_bytes(make: Make, file: Path) -> None:
    region = make("host")
    block = Block(region, 2 * MIB)
    assert _core.lend(region._core, (block.address, block.nbytes), region.residence, 7, os.getpid())
    pausing = memsaver.start(pause=region)
    until(lambda: [each.name for each in memsaver.history()[-1].stages][-1:] == ["readers"])
    _core.end_lease(region._core, 7)
    pausing.result(60)
    with Fill() as rest:
        resuming = memsaver.start(resume=region, memory_timeout=60)
        until(lambda: [each.name for each in memsaver.history()[-1].stages][-1:] == ["memory"])
        time.sleep(0.05)
        rest.close()
        resuming.result(60)
    block.check()
    events = of(file)
    check_format(events)
    readers, memory = [each for each in events if each.get("cat") == "waits"]
    assert readers["args"]["bytes"] == memory["args"]["bytes"] == 2 * MIB
    assert [each["pid"] for each in readers["args"]["holders"]] == [os.getpid()]
    assert (memory["name"], "holders" in memory["args"]) == ("waits", False)
    for wait, move in ((readers, f"pause {region.tag}"), (memory, f"resume {region.tag}")):
        whole = only(events, move)
        assert whole["ts"] <= wait["ts"] and end(wait) <= end(whole)
    assert memory["dur"] > 0


def test_a_long_transition_is_written_before_its_call_returns(make: Make, file: Path) -> None:
    region = make("host")
    memsaver.register(Visitor("slow", "slow", lambda call: time.sleep(0.02 * (call == "leave"))))
    memsaver.pause([region, "slow"])
    found = read([str(file)]).events  # without a flush
    assert only(found, f"pause {region.tag}, slow")["args"]["outcome"] == "done"
    assert "guests leave slow" in stages(found, only(found, f"pause {region.tag}, slow"))
    memsaver.resume()


def test_phases_and_turns_of_a_group_are_in_the_trace(make: Make, file: Path) -> None:
    pytest.importorskip("ray")
    from memsaver.ray import Colocated, Group

    region, own = make("host"), make("host")
    own.pause()
    memsaver.define_phase("own", own)
    with memsaver.phase("own"):
        pass
    group = Group(engine=Colocated(), phases={"rollout": {"engine": [region.tag]}, "train": {"engine": []}})
    group.enter("rollout")
    group.enter("train")
    group.replace("engine", 0, Colocated())
    with memsaver.capturing(), pytest.raises(memsaver.Error):
        region_ = make("host")
        Group(engine=Colocated(), phases={"a": {"engine": [region_.tag]}, "b": {"engine": []}}).enter("b")
    events = of(file)
    check_format(events)
    marks = [(each["ph"], each["name"]) for each in events if each.get("cat") in ("phase", "turn")]
    assert marks == [
        ("B", "own"), ("E", "own"), ("X", "turn to rollout"), ("B", "rollout"), ("E", "rollout"),
        ("X", "turn to train"), ("B", "train"), ("E", "train"), ("X", "turn to b"),
    ]  # fmt: skip
    assert "is being captured" in only(events, "turn to b")["args"]["error"]
    assert only(events, "turn to train")["args"]["error"] is None
    turn, pause = only(events, "turn to train"), only(events, f"pause {region.tag}")
    assert turn["ts"] <= pause["ts"] and end(pause) <= end(turn)
    assert end(only(events, f"resume {own.tag}")) <= only(events, "own", ph="B")["ts"]


def test_a_broker_that_a_client_starts_writes_to_the_same_trace(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        found.append(env["MEMSAVER_TRACE"])
        return subprocess.CompletedProcess(command, 0, "1")

    monkeypatch.setattr(subprocess, "run", run)
    assert daemon._spawn("HOST-5", "cpu", None, None, tmp_path / "log") == 1
    assert found == [str(file)]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make) -> None:
    expected = "expected the path of a file that can be written, in a directory that exists"
    for value in (tmp_path, tmp_path / "no" / "run.json", "", 3, "a\0b"):
        with pytest.raises(memsaver.ConfigError) as caught:
            memsaver.configure(trace=value)
        assert str(caught.value) == f"trace is {value!r}, {expected}"
        assert (caught.value.option, caught.value.value, trace.active) == ("trace", value, None)
    region = make("host")
    memsaver.configure(trace="/dev/full")
    with caplog.at_level(logging.ERROR, logger="memsaver"):
        region.pause()
        assert trace.active is not None
        trace.active.flush()
        region.resume()
        trace.active.flush()
    memsaver.configure(trace=None)
    assert [each.getMessage() for each in caplog.records] == [
        "the trace ends: /dev/full cannot be written: [Errno 28] No space left on device"
    ]


def test_a_file_system_without_locks_has_the_trace(file: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of a cluster may be mounted without locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    region = make("host")
    region.pause()
    assert only(of(file), f"pause {region.tag}")["args"]["outcome"] == "done"
    assert file.read_text().startswith("[\n{")


def test_files_that_are_no_traces_or_of_another_boot_are_named(file: Path, make: Make, tmp_path: Path) -> None:
    make("host").pause()
    boot = next(each["args"]["boot"] for each in of(file) if each["name"] == "process_name")
    (tmp_path / "text").write_text('{}\n{"ph": "X"}\n{"ph": "M"}\n{"ph": "M", "args": 1}\n')
    (tmp_path / "other").write_text(file.read_text().replace(boot, "another"))
    for arguments, error in (
        (("merge", file, tmp_path / "text"), f"{tmp_path}/text is no trace: expected a file of configure(trace=...)"),
        (("merge", file, tmp_path / "other"), "are of several hosts, or of several boots of one"),
        (("merge", tmp_path / "none"), str(tmp_path / "none")),
        (("plot", file, "--device", "GPU-1"), "the device is GPU-1, expected one of the trace: HOST-"),
    ):
        code, said, text = command(*arguments, "-o", tmp_path / "made")
        assert (code, said, text.count("\n")) == (1, "", 1) and text.startswith("memsaver: ") and error in text
    assert not (tmp_path / "made").exists()


# Ranges of NVTX


class Ranges:
    """torch.cuda.nvtx."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[int] = []
        self.error: Exception | None = None

    def range_start(self, name: str) -> int:
        if self.error is not None:
            raise self.error
        self.begun.append(name)
        return len(self.begun)

    def range_end(self, number: int) -> None:
        self.ended.append(number)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranges]:
    made = Ranges()
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", made)  # type: ignore[arg-type]
    memsaver.configure(nvtx=True)
    yield made
    memsaver.configure(nvtx=False)


def test_each_transition_is_in_the_trace_and_a_range_of_nvtx_however_it_ends(
    make: Make, file: Path, ranges: Ranges, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are under way at the same time have tracks of their own."""
    region, other = make("host"), make("host")
    blocks = [Block(region, MIB), Block(other, MIB)]
    prepared = prepare_pause(region.tag)
    assert (ranges.begun, ranges.ended) == ([f"pause {region.tag}"], [])
    other.pause()
    prepared.commit()
    assert ranges.ended == [2, 1]
    memsaver.start(pause=region, resume=other).result(60)
    region.resume()
    prepare_pause(region.tag).abort()
    prepared = prepare_pause(region.tag)
    del prepared
    with memsaver.capturing(), pytest.raises(memsaver.Error):
        region.pause()
    pause = f"pause {region.tag}"
    assert ranges.begun[1:3] == [f"pause {other.tag}", f"{pause}; resume {other.tag}"]
    assert ranges.begun[3:] == [f"resume {region.tag}", pause, pause, pause]
    assert ranges.ended == [2, 1, 3, 4, 5, 6, 7]
    events = of(file)
    check_format(events)
    assert [each["args"]["outcome"] for each in named(events, pause)] == ["done", "aborted", "aborted", "failed"]
    assert named(events, pause)[-1]["args"]["error"].startswith("Error: a CUDA graph is being")
    tracks = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    found = [tracks[each["pid"], each["tid"]] for each in events if each.get("cat") == "transition"]
    assert found[:3] == ["transitions 2", "transitions", "transitions"]  # the first one ends after the second
    copies = [tracks[each["pid"], each["tid"]] for each in events if each.get("cat") == "copies"]
    assert {*copies} == {"cpu copies in", "cpu copies out", "cpu copies out 2"}
    memsaver.configure(nvtx=False)
    region.pause()
    region.resume()
    memsaver.configure(nvtx=True)
    ranges.error = RuntimeError("no CUDA build")
    with caplog.at_level(logging.ERROR, logger="memsaver"):
        assert region.pause().paused == region.resume().resumed == (region.tag,)
    assert [each.getMessage() for each in caplog.records] == [
        "the ranges of NVTX end: RuntimeError('no CUDA build'); expected torch's build for CUDA, or the package nvtx"
    ]
    assert len(ranges.begun) == 7
    check(blocks)


def test_without_torch_the_package_nvtx_has_the_ranges_and_a_process_that_exits_holds_nothing(tmp_path: Path) -> None:
    found = run_clean(
        """
        import sys, types
        sys.modules["nvtx"] = types.SimpleNamespace(start_range=lambda name: name, end_range=print)
        import memsaver
        memsaver.configure(nvtx=True)
        region = memsaver.region("kv", device="cpu")
        array = region._core.allocate_array(2 << 20)
        region.pause(); region.resume()
        print("torch" in sys.modules)
        """,
        MEMSAVER_TRACE=str(tmp_path / "run.json"),
    )
    assert found == "pause kv\nresume kv\nFalse\n"
    counters = [each["args"]["kv"] // MIB for each in of(tmp_path / "run.json") if each.get("cat") == "memory"]
    assert counters[-3:] == [0, 2, 0]
