"""The loop, tiny, with real actors on the host driver."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver

ray = pytest.importorskip("ray", reason="needs ray")

from examples.colocate import loop  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and figures of a run."""
    path = tmp_path / "figures.json"
    status = loop.main(["--recipe", "tiny", "--device", "cpu", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_a_run_passes_its_proofs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, figures = run(tmp_path, "--steps", "3")
    assert status == 0
    assert figures["proofs_passed"] == {
        "tokens are the same": 3,
        "addresses are the same": 6,
        "memory was free": 3,
        "log-probabilities agree": 3,
        "overwritten": 4,  # batch sizes
    }
    assert len(figures["steps"]) == 3
    assert figures["tokens"] > 0 and figures["pauses"] > 0 and figures["transition_seconds"] > 0
    assert figures["out_of_memory"] is None
    used, total = figures["used_bytes_by_phase"], figures["device_bytes"]
    assert used.keys() == {"rollout", "away", "train", "sync"}
    assert total / 2 < used["rollout"] <= total and total / 2 < used["train"] <= total
    assert used["sync"] < total / 4
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == figures
    assert any(line.startswith("held-out greedy reward") for line in printed)


def test_without_pausing_it_runs_out_of_memory(tmp_path: Path) -> None:
    status, figures = run(tmp_path, "--no-pause")
    assert status == loop.OUT_OF_MEMORY_STATUS
    assert "out of memory" in figures["out_of_memory"]
    assert figures["steps"] == []


def test_two_ranks_with_zero_advantages_leave_the_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    sync = loop.Loop._sync

    def noting_sync(self: loop.Loop) -> None:
        sync(self)
        ray.get([trainer.begin_sync.remote() for trainer in self.trainers])
        found.append({name: tensor for bucket in self._buckets() for name, tensor in ray.get(bucket).items()})

    monkeypatch.setattr(loop.Loop, "_sync", noting_sync)
    status, figures = run(tmp_path, "--ranks", "2", "--zero-advantages")
    assert status == 0
    assert figures["proofs_passed"]["tokens are the same"] == 2
    assert figures["proofs_passed"]["log-probabilities agree"] == 2
    assert figures["held_out_after_warm_up"] == figures["held_out_at_end"]
    assert len(found) == 3  # after the warm-up, and after each step
    for later in found[1:]:
        assert all(torch.equal(tensor, later[name]) for name, tensor in found[0].items())


def test_the_cause_of_an_error_is_found() -> None:
    reason = memsaver.OutOfMemoryError("full")
    wrapped = RuntimeError("phase")
    wrapped.__cause__ = reason
    assert loop.out_of_memory(wrapped) is reason
    assert loop.out_of_memory(RuntimeError("other")) is None
