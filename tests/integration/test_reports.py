"""Reports of turns that exceed their deadline, over torch.distributed's store: the ranks are processes that hang."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

import memsaver
from memsaver.distributed import Colocated, Group
from memsaver.distributed import reports as distributed_reports
from memsaver.turns import plan as plan_module
from memsaver.turns import turn as turn_module
from tests.ranks_support import ranks
from tests.ray_support import Buffer
from tests.support import MIB, fresh_device

PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}}
TIMEOUT = timedelta(seconds=60)
BOUND_S = 6.0


class Stop:
    """A pipe. A process that hangs reads a byte from it, which another process writes to end the hang."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR)  # so that neither end waits for the other

    def wait(self) -> None:
        """Hangs as a method in Python does."""
        os.read(self._file, 1)

    def wait_with_the_gil(self) -> None:
        """Hangs as a native call does that holds the GIL."""
        ctypes.PyDLL(None).read(self._file, ctypes.create_string_buffer(1), 1)

    def end(self) -> None:
        os.write(self._file, b"x")


class Hanging(memsaver.Guest):
    def __init__(self, tag: str, stop: Stop, stage: str) -> None:
        super().__init__("collective", tag)
        self.stop, self.stage = stop, stage

    def _reach(self, stage: str) -> None:
        if stage == self.stage:
            self.stage = ""
            self.stop.wait()

    def prepare(self) -> None:
        self._reach("prepare")

    def leave(self) -> None:
        self._reach("leave")

    def come_back(self) -> None:
        self._reach("come back")


class Member(Colocated):
    def __init__(self, tag: str, stop: Stop) -> None:
        self.buffer = Buffer(tag, 4 * MIB)
        self.stop, self.hangs = stop, ""

    def colocated_drain(self, tags: Any) -> None:
        if self.hangs == "drain":
            self.hangs = ""
            self.stop.wait()
        if self.hangs == "gil":
            self.hangs = ""
            self.stop.wait_with_the_gil()

    def resume(self, *args: Any, **options: Any) -> Any:
        if self.hangs == "copy":
            self.hangs = ""
            return memsaver.resume(*args, progress=lambda done, total: self.stop.wait(), **options)
        return super().resume(*args, **options)


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMSAVER_HOST_DEVICE", fresh_device())
    monkeypatch.setenv("MEMSAVER_REPORT_DIR", str(tmp_path / "reports"))


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "stop"
    os.mkfifo(path)
    yield str(path)


def _turn(rank: int, port: int, path: str, hangs: str, done: str) -> None:
    """Rank 1 hangs on the way from "train" to "rollout", until rank 0 has its error."""
    plan_module._COMPLETE_S = turn_module._NOTIFY_S = 0.1
    distributed_reports._PARTS_S = 8.0 if hangs == "gil" else 60.0  # with the GIL held no part comes
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    stop = Stop(path)
    roles: dict[str, Any] = {"engine": Member("weights", stop), "trainer": Member("params", stop)}
    group = Group(phases=PHASES, store=store, rank=rank, world_size=2, **roles)
    if rank == 1 and hangs in ("prepare", "leave", "come back"):
        memsaver.register(Hanging("weights" if hangs == "come back" else "params", stop, hangs))
    group.enter("train", timeout=60)
    if rank == 1:
        roles["engine" if hangs == "copy" else "trainer"].hangs = hangs
        if hangs == "enter":
            stop.wait()
    with pytest.raises(memsaver.Error) as raised:
        group.enter("rollout", timeout=BOUND_S)
    if rank == 0:
        stop.end()
        error: Any = raised.value
        _check(error, hangs)
        Path(done).write_text(error.report)


def _check(error: Any, hangs: str) -> None:
    text = str(error)
    assert error.rank == 1
    assert f"; report: {error.report}" in text
    method = {"drain": "colocated_prepare", "prepare": "colocated_prepare", "leave": "colocated_commit"}
    stage = {"prepare": "guests prepare", "leave": "guests leave", "come back": "guests come back", "copy": "move"}
    if hangs == "enter":
        assert "rank 1 is outside of enter() since" in text
    elif hangs != "gil":
        assert f"it is in {method.get(hangs, 'resume')}() of its " in text
    if hangs in stage:
        assert f"is in the stage {stage[hangs]!r}" in text
    report = Path(error.report).read_text()
    head, zero, one = re.split(r"\n== rank \d, pid \d+ on .* ==\n", report)
    assert head.startswith("phase 'rollout' could not be entered: ")
    assert "it waits for the other ranks" in zero
    if hangs == "gil":
        assert "it has sent no part within" in one
    else:
        assert "thread 'MainThread':" in one
        assert "os.read(self._file, 1)" in one, one
        assert "pause 'weights': done" in one


@pytest.mark.parametrize("hangs", ["enter", "drain", "prepare", "gil", "leave", "come back", "copy"])
def test_a_rank_that_hangs_leads_to_a_report_that_names_it_and_its_stage(hangs: str, stop: str, tmp_path: Path) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    done = tmp_path / "done"
    with ranks(_turn, 2, store.port, stop, hangs, str(done)):
        pass
    report = Path(done.read_text())
    assert report.parent == tmp_path / "reports"
    assert (report.parent.stat().st_mode & 0o777, report.stat().st_mode & 0o777) == (0o700, 0o600)


def _turn_with_silent_leader(rank: int, port: int, path: str) -> None:
    """Rank 0 hangs with the GIL, until another rank has logged a report."""
    distributed_reports._SILENT_S, distributed_reports._PARTS_S = 1.5, 3.0
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    stop = Stop(path)
    roles: dict[str, Any] = {"engine": Member("weights", stop), "trainer": Member("params", stop)}
    group = Group(phases=PHASES, store=store, rank=rank, world_size=3, **roles)
    group.enter("train", timeout=60)
    logged: list[str] = []

    class Ending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            stop.end()

    logger, ending = logging.getLogger("memsaver"), Ending(logging.ERROR)
    if rank == 0:
        roles["trainer"].hangs = "gil"
    else:
        logger.addHandler(ending)
    with pytest.raises(memsaver.Error, match="rank 0"):
        group.enter("rollout", timeout=2)
    logger.removeHandler(ending)
    for text in logged:
        assert "phase 'rollout' is late: rank 0, which leads it, has sent no heartbeat for" in text
        report = Path(text.rpartition("; report: ")[2]).read_text()
        zero = re.split(r"\n== rank \d, pid \d+ on .* ==\n", report)[1]
        assert f"by rank {rank}\n" in report
        assert "it has sent no part within" in zero
        assert report.count("it waits for the other ranks") == 2


def test_another_rank_writes_the_report_if_rank_0_is_silent(stop: str, tmp_path: Path) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with ranks(_turn_with_silent_leader, 3, store.port, stop):
        pass
    authors = [re.search(r"by (rank \d)", each.read_text()) for each in (tmp_path / "reports").glob("turn-*.txt")]
    named = [found[1] for found in authors if found is not None and found[1] != "rank 0"]
    assert len(named) == 1, named
