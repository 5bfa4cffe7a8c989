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
from examples.colocate.report import Report  # noqa: E402
from examples.colocate.turns import ProofError  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR")
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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--pool process --sync attach", "needs --pool shared"),
        ("--steps -1", "--steps: '-1', expected an integer of 0 or more"),
        ("--warm-up-steps x", "--warm-up-steps: 'x', expected an integer of 0 or more"),
        ("--eval-every -1", "--eval-every: '-1', expected an integer of 0 or more"),
        ("--ranks 0", "--ranks: '0', expected an integer of 1 or more"),
        ("--ranks-per-gpu 0", "--ranks-per-gpu: '0', expected an integer of 1 or more"),
        ("--ranks 3 --ranks-per-gpu 2", "--ranks-per-gpu is 2, expected a divisor of --ranks, 3"),
        ("--kv-share 0", "--kv-share: '0', expected a share above 0 and up to 1"),
        ("--kv-share nan", "--kv-share: 'nan', expected a share above 0 and up to 1"),
        ("--workspace-share 1.5", "--workspace-share: '1.5', expected a share above 0 and up to 1"),
        ("--json .", "--json: '.', expected a file that can be written"),
        ("--json no/such/folder.json", "--json: 'no/such/folder.json', expected a file that can be written"),
        ("--json old/file", "--json: 'old/file', expected a file that can be written"),
        ("--device cuda", "--device is 'cuda' and this machine has no CUDA device"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("kept")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loop, "Loop", None)
    with pytest.raises(SystemExit) as ended:
        loop.main(arguments.split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["old"]


def test_the_least_there_can_be_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("overwritten when there are figures")
    options = loop.parse(["--steps", "0", "--kv-share", "1", "--json", str(tmp_path / "old"), "--device", "cpu"])
    assert (options.steps, options.kv_share, options.json) == (0, 1.0, str(tmp_path / "old"))
    assert (tmp_path / "old").read_text() == "overwritten when there are figures"
    assert loop.parse(["--device", "cuda", "--address", "10.0.0.1:6379"]).device == "cuda"  # its GPUs are elsewhere


def test_figures_come_without_git_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("MEMSAVER_COMMIT", raising=False)
    assert Report(settings={"device": "cpu"}).as_dict()["commit"] == ""


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
