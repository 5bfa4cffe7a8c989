"""Reports of turns that exceed their deadline, over torch.distributed's store: a rank is a process that hangs."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

import memsaver
from memsaver.distributed import Colocated, Group, liveness
from memsaver.turns import plan as plan_module
from memsaver.turns import reports
from tests import controls
from tests.ranks_support import ranks, store_server
from tests.ray_support import Buffer
from tests.support import MIB, Visitor, fresh_device

PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}}
BOUND_S = 1.0
HANGS = ("enter", "drain", "prepare", "gil", "leave", "come back", "copy")


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


class Hanging(Visitor):
    def __init__(self, tag: str, stop: Stop) -> None:
        super().__init__("collective", tag, self.reach)
        self.stop, self.stage = stop, ""

    def reach(self, stage: str) -> None:
        if stage == self.stage:
            self.stage = ""
            self.stop.wait()


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
            controls.hold("cuEventSynchronize")
            threading.Thread(target=self._end_copy).start()
        return super().resume(*args, **options)

    def _end_copy(self) -> None:
        self.stop.wait()
        controls.go_on("cuEventSynchronize")


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMSAVER_HOST_DEVICE", fresh_device())
    monkeypatch.setenv("MEMSAVER_REPORT_DIR", str(tmp_path / "reports"))


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "stop"
    os.mkfifo(path)
    yield str(path)


def _turns(rank: int, port: int, path: str, folder: str) -> None:
    """On the way from "train" to "rollout", rank 1 hangs at each place, until rank 0 has its error."""
    liveness._BEAT_S = plan_module._ANSWER_S = plan_module._COMPLETE_S = 0.1
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    stop = Stop(path)
    roles: dict[str, Any] = {"engine": Member("weights", stop), "trainer": Member("params", stop)}
    group = Group(phases=PHASES, store=store, rank=rank, world_size=2, **roles)
    guest = Hanging("params", stop)
    for hangs in HANGS:
        reports._PARTS_S = 0.5 if hangs == "gil" else 60.0  # with the GIL held no part comes
        if rank == 1 and hangs in ("prepare", "leave", "come back"):
            guest = Hanging("weights" if hangs == "come back" else "params", stop)
            memsaver.register(guest)
        group.enter("train", timeout=60)
        if rank == 1:
            guest.stage = roles["engine" if hangs == "copy" else "trainer"].hangs = hangs
            if hangs == "enter":
                stop.wait()
        with pytest.raises(memsaver.Error) as raised:
            group.enter("rollout", timeout=BOUND_S)
        if rank == 0:
            stop.end()
            _check(raised.value, hangs)
            assert str(Path(raised.value.report).parent) == folder  # type: ignore[attr-defined]
        if guest.name in [each.name for each in memsaver.stats().guests]:
            memsaver.unregister(guest)


def _check(error: Any, hangs: str) -> None:
    text = str(error)
    assert error.rank == 1
    assert f"; report: {error.report}" in text
    method = {"drain": "colocated_prepare", "prepare": "colocated_prepare", "leave": "colocated_commit"}
    stage = {"prepare": "guests prepare", "leave": "guests leave", "come back": "guests come back", "copy": "move"}
    if hangs == "enter":
        assert "rank 1 is outside of enter();" in text
    elif hangs != "gil":
        assert f"it is in {method.get(hangs, 'resume')}() of its " in text
    if hangs in stage:
        assert f"has been in the stage {stage[hangs]!r}" in text
    path = Path(error.report)
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    head, zero, one = re.split(r"\n== rank \d, pid \d+ on .* ==\n", path.read_text())
    assert head.startswith("phase 'rollout' could not be entered: rank 1 has not ")
    assert "it waits for the other ranks" in zero
    if hangs == "gil":
        assert "it has sent no part within" in one
    else:
        assert "thread 'MainThread':" in one
        assert "os.read(self._file, 1)" in one, one
        assert "pause 'weights': done" in one


def test_a_rank_that_hangs_leads_to_a_report_that_names_it_and_its_stage(stop: str, tmp_path: Path) -> None:
    with store_server() as (_, port), ranks(_turns, 2, port, stop, str(tmp_path / "reports")):
        pass
    assert len(list((tmp_path / "reports").iterdir())) == len(HANGS)
