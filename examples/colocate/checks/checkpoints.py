"""Checkpoints of a run, in a folder that the loop and all trainers share. A run resumes from the newest complete one.

A checkpoint is a folder `step-00000005` with the trainer's state, by torch.distributed.checkpoint, and `loop.json`. It
gets this name when all is synced to disk; before, it is `partial-00000005`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..trainer.interface import CheckpointError

_KEPT = 2
_STATE = "loop.json"
_METADATA = ".metadata"  # the last file that the trainers write


class Checkpoints:
    """The checkpoints of one run. The last two are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check_start(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Check, before a run starts, that it can go on from the newest checkpoint, or that there is none to keep.

        Raises CheckpointError for other settings, and for a folder with checkpoints without `resume`.
        """
        if resume:
            path, state = self.newest()
            for name in (*settings, *state["settings"]):
                found, expected = (each.get(name, "not there") for each in (state["settings"], settings))
                if found != expected:
                    raise CheckpointError(f"{path}: {name} is {found!r}; expected {expected!r}, as in this run")
        elif complete := self.complete:
            raise CheckpointError(f"there is {str(complete[-1])!r} already; expected a folder without, or --resume")

    def begin(self, step: int) -> Path:
        """Make a folder for the trainer's state. Removes those that are not complete."""
        for partial in self.folder.glob("partial-*"):
            shutil.rmtree(partial)
        path = self.folder / f"partial-{step:08d}"
        path.mkdir(parents=True)
        return path

    def commit(self, state: dict[str, Any]) -> Path:
        """Complete the checkpoint of this step, and remove older ones.

        `state`: the rest beside the trainer's, ready for JSON, with `step` and `settings`.
        """
        partial, path = (self.folder / f"{name}-{state['step']:08d}" for name in ("partial", "step"))
        if not (partial / _METADATA).is_file():
            raise CheckpointError(f"{str(partial)!r} has no state of a trainer; expected a folder that all nodes share")
        with open(partial / _STATE, "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        partial.rename(path)
        _sync(self.folder)
        for old in self.complete[:-_KEPT]:
            shutil.rmtree(old)
        return path

    @property
    def complete(self) -> list[Path]:
        """The newest comes last."""
        return sorted(self.folder.glob("step-*"))

    def newest(self) -> tuple[Path, dict[str, Any]]:
        """And its `loop.json`. Raises CheckpointError if there is none, or an unreadable one."""
        if not (complete := self.complete):
            raise CheckpointError(f"{str(self.folder)!r} has no complete checkpoint; expected a folder step-NNNNNNNN")
        path = complete[-1]
        try:
            return path, json.loads((path / _STATE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(path)!r} cannot be read; expected the file of a run: {error!r}") from error


def _sync(folder: Path) -> None:
    """A name in a folder outlasts a crash of the machine once the folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
