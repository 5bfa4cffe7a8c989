"""Checkpoints of the loop: completeness, the number kept, and the ones that a run refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from examples.colocate.checks.checkpoints import Checkpoints  # noqa: E402
from examples.colocate.trainer.interface import CheckpointError  # noqa: E402


def state(step: int) -> dict[str, Any]:
    return {"step": step, "settings": {"ranks": "2"}, "task": [1, 2], "warm": [1.0, 0.1 + 0.2]}


def write(checkpoints: Checkpoints, step: int) -> Path:
    (checkpoints.begin(step) / ".metadata").write_text("of a trainer")
    return checkpoints.commit(state(step))


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_the_last_two_checkpoints_are_kept_and_the_last_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.complete == []
    for step in (0, 5, 10, 15):
        written = write(checkpoints, step)
        assert checkpoints.newest() == (written, state(step))
    assert names(tmp_path / "new") == ["step-00000010", "step-00000015"]


def test_a_partial_checkpoint_is_ignored_and_removed_by_the_next(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    partial = checkpoints.begin(10)
    (partial / ".metadata").write_text("whole, and the loop's part is still to come")
    assert Checkpoints(tmp_path).newest()[1]["step"] == 5
    write(checkpoints, 7)
    assert names(tmp_path) == ["step-00000005", "step-00000007"]


def test_a_checkpoint_without_trainer_state_is_not_committed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    checkpoints.begin(10)
    with pytest.raises(CheckpointError, match="partial-00000010' has no state of a trainer; expected a folder"):
        checkpoints.commit(state(10))
    assert checkpoints.newest()[1]["step"] == 5


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (write(checkpoints, 5) / "loop.json").write_text("{")
    with pytest.raises(CheckpointError, match="step-00000005' cannot be read; expected the file of a run"):
        checkpoints.newest()
