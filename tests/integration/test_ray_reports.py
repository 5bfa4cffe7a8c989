"""Reports of turns of actors that exceed their deadline."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver import config  # noqa: E402
from memsaver.ray import Colocated, Group  # noqa: E402
from memsaver.ray import reports as ray_reports  # noqa: E402
from memsaver.turns import plan as plan_module  # noqa: E402
from tests import ray_support  # noqa: E402
from tests.ray_support import Buffer  # noqa: E402
from tests.support import MIB, until  # noqa: E402

PHASES = {"rollout": {"engine": ["weights"]}, "none": {}}


class Leaves(memsaver.Guest):
    """Leaves once a file is gone."""

    def __init__(self, path: str) -> None:
        super().__init__("connections", "weights")
        self.path = path

    def leave(self) -> None:
        while os.path.exists(self.path):
            time.sleep(0.01)

    def come_back(self) -> None:
        pass


class Engine(Colocated):
    def __init__(self, path: str = "") -> None:
        self.buffer = Buffer("weights", 4 * MIB)
        if path:
            memsaver.register(Leaves(path))

    def state(self) -> str:
        return self.buffer.region.state


class Draining(Engine):
    """Drains until a file is gone."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def colocated_drain(self, tags: Any) -> None:
        while os.path.exists(self.path):
            time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_support.cluster_with_a_device(sys.modules[__name__]):
        yield


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "reports"))
    return tmp_path / "reports"


def test_actors_that_hang_in_each_half_lead_to_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 0.0)
    monkeypatch.setattr(ray_reports, "_PARTS_S", 60.0)
    busy = tmp_path / "busy"
    actor = ray.remote(num_cpus=0)
    engines = [actor(Engine).remote(), actor(Engine).remote(str(busy)), actor(Draining).remote(str(busy))]
    group = Group(engine=engines[:2], phases=PHASES)
    group.enter("rollout")
    busy.touch()
    with pytest.raises(memsaver.Error, match=r"engine 1 could not pause 'weights': WaitTimeoutError") as raised:
        group.enter("none", timeout=8.0)
    error: Any = raised.value
    assert re.search(
        r"; it is in colocated_commit\(\): \w+\(\) at .*\.py:\d+; the pause of 'weights' is in ", str(error)
    )
    assert "is in the stage 'guests leave' of 'connections' since" in str(error)
    assert str(error).endswith(f"; report: {error.report}")
    report = Path(error.report)
    assert report.parent == folder
    _, driver, zero, one = report.read_text().split("\n== ")
    assert driver.startswith(f"the process of the group, pid {os.getpid()} on ")
    assert zero.startswith("engine 0, pid ") and "pause 'weights': done" in zero
    assert one.startswith("engine 1, pid ") and "in leave\n" in one
    with pytest.raises(memsaver.Error, match="engine 1 has not answered a call of an earlier turn"):
        group.enter("none", timeout=8.0)
    busy.unlink()
    until(lambda: ray.get([engine.state.remote() for engine in engines[:2]]) == ["paused", "paused"])
    assert group.enter("rollout", timeout=60.0).phase == "rollout"

    busy.touch()
    group.replace("engine", 1, engines[2])
    with pytest.raises(memsaver.Error, match=r"engine 1 could not prepare to pause 'weights'") as raised:
        group.enter("none", timeout=8.0)
    error = raised.value
    place = r"; it is in colocated_prepare\(\): colocated_drain\(\) at test_ray_reports\.py:\d+; report: "
    assert re.search(place, str(error)), error
    assert "in colocated_drain\n" in Path(error.report).read_text()
    busy.unlink()
    assert group.enter("none", timeout=60.0).phase == "none"
    for engine in engines:
        ray.kill(engine)
