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
from examples.colocate.turns import ProofError  # noqa: E402


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
        "weights are the checkpoint's": 4,  # after the warm-up, and after each step
        "tokens are the same": 3,
        "addresses are the same": 6,
        "engines hold nothing": 3,
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


def test_with_the_driver_as_the_source_weights_travel_in_buckets(tmp_path: Path) -> None:
    status, figures = run(tmp_path, "--pool", "process", "--steps", "1")
    assert status == 0
    assert figures["settings"]["sync"] == "buckets"
    assert figures["proofs_passed"]["weights are the checkpoint's"] == 2
    assert figures["proofs_passed"]["memory was free"] == 1


def test_two_ranks_write_into_engines_of_another_dtype(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--pool", "shared", "--sync", "attach", "--engine-dtype", "bfloat16")
    status, figures = run(tmp_path, *arguments)
    assert status == 0
    assert figures["proofs_passed"]["weights are the checkpoint's"] == 3
    assert "log-probabilities agree" not in figures["proofs_passed"]  # the engine rounds
    assert len(figures["sync_seconds"]) == 3


def test_weights_that_are_not_the_trainers_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Loop, "_write", lambda self: [])
    with pytest.raises(ProofError, match="engine 0 does not have the trainer's weights: model"):
        run(tmp_path)


def test_attaching_needs_a_shared_pool(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loop.parse(["--pool", "process", "--sync", "attach"])
    assert "needs --pool shared" in capsys.readouterr().err


def test_without_pausing_it_runs_out_of_memory(tmp_path: Path) -> None:
    status, figures = run(tmp_path, "--no-pause")
    assert status == loop.OUT_OF_MEMORY_STATUS
    assert "out of memory" in figures["out_of_memory"]
    assert figures["steps"] == []


def test_two_ranks_with_zero_advantages_leave_the_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    sync = loop.Loop.sync

    def noting_sync(self: loop.Loop, prove: bool) -> None:
        sync(self, prove)
        found.append({name: tensor for bucket in self._buckets() for name, tensor in ray.get(bucket).items()})

    monkeypatch.setattr(loop.Loop, "sync", noting_sync)
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
