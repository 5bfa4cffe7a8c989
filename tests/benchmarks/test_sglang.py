"""The benchmark of SGLang's memory on servers that are made up: its order of calls, and the tokens it compares."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("sglang_memory")
    FakeServer.all.clear()
    monkeypatch.setattr(module, "Server", FakeServer)
    monkeypatch.setattr(module, "Process", lambda *_, **__: Closing())
    monkeypatch.setattr(module, "ask_all", lambda processes: [{"last": True, "bytes": 7} for _ in processes])
    monkeypatch.setattr(module, "update", lambda server, trainers: server.update())
    monkeypatch.setattr(module, "used_bytes", lambda: 1 << 30)
    return module


class Closing:
    def close(self) -> None: ...


class FakeServer:
    """Its tokens name the version of its weights, which a release loses unless there is a backup."""

    all: list[FakeServer] = []

    def __init__(
        self, name: str, directory: str, logs: str, variables: dict[str, str], *options: str, **_: Any
    ) -> None:
        self.name, self.options, self.variables = name, options, variables
        self.version, self.updates = "none", 0
        self.calls: list[str] = []
        self.all.append(self)

    def wait_ready(self) -> float:
        return 1.0

    def preloaded(self) -> str:
        return "memsaver" if self.variables["MEMSAVER_DROP_IN"] else "tms"

    def release(self, *tags: str) -> float:
        self.calls += [f"release {tag}" for tag in tags]
        if "weights" in tags and "--enable-weights-cpu-backup" not in self.options:
            self.version = "lost"
        return 2.0

    def resume(self, *tags: str) -> float:
        self.calls += [f"resume {tag}" for tag in tags]
        return 4.0

    def update(self) -> float:
        self.updates += 1
        self.version = str(self.updates)
        self.calls.append("update")
        return 1.0

    def flush(self) -> None: ...

    def tokens(self) -> list[list[str]]:
        return [[self.version]]

    def processes(self) -> list[Any]:
        return []

    def close(self, wait_s: float = 0) -> None: ...


def options(**changed: Any) -> argparse.Namespace:
    ways = ("tms", "tms, retained", "memsaver")
    return argparse.Namespace(
        **{"ways": ways, "checkpoint": False, "kv_gib": 1.0, "logs": None, "rest": 0.0, **changed}
    )


ROUND = ["release kv_cache", "release weights", "release cuda_graph", "resume cuda_graph", "resume weights"]


def test_new_weights_arrive_before_the_kv_cache_if_there_is_no_backup(memory: ModuleType, tmp_path: Path) -> None:
    setting = memory.Setting("tiny", "update", options(), str(tmp_path))
    setting.run(1)
    assert list(setting.servers) == ["tms", "memsaver"]  # host memory that is kept is a matter of backups
    assert setting.servers["memsaver"].calls == ["update", *[*ROUND, "update", "resume kv_cache"] * 3]
    assert setting.different == []
    assert len(setting.sequences) == 4


def test_contents_have_to_come_back_if_there_is_a_backup(memory: ModuleType, tmp_path: Path) -> None:
    setting = memory.Setting("tiny", "backup-graphs", options(), str(tmp_path))
    assert setting.servers["tms, retained"].variables["TMS_RETAIN_CPU_BACKUP"] == "1"
    assert all(each.variables["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1" for each in setting.servers.values())
    setting.servers["memsaver"].options = ()  # loses its weights
    setting.run(1)
    assert setting.servers["tms"].calls == ["update", *[*ROUND, "resume kv_cache", "update"] * 3]
    assert setting.different == [f"memsaver, round {number}" for number in (1, 2, 3)]


def test_the_table_compares_with_host_memory_that_is_kept(
    memory: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = {
        way: [{"ms": {"release weights": ms, "resume weights": 2 * ms}, "freed_bytes": 1, "rss_bytes": 1}] * 3
        for way, ms in {"tms": 50.0, "tms, retained": 20.0, "memsaver": 10.0}.items()
    }
    left = {way: {"device_bytes": 0, "host_bytes": 0} for way in rounds}
    found = {
        "model": "tiny", "setting": "backup", "weight_bytes": 10**9, "kv_gib": 1.0, "rounds": rounds, "left": left,
        "plain_ms": {"out": 9.0, "into": 18.0}, "different": [], "sequences": 4,
    }  # fmt: skip
    assert memory.report(found)
    lines = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines["release weights"] == ["50.0", "20.0", "10.0", "0.50"]
    assert lines["release, all"] == ["50.0", "20.0", "10.0", "0.50"]
    assert lines["of the bus"][:3] == ["18.0%", "45.0%", "90.0%"]
    assert not memory.report({**found, "different": ["tms, round 1"]})
