"""Checkpoints of a run, in a folder that the loop and all trainers share. A run resumes from the newest complete one.

A checkpoint is a folder `step-00000005` with the trainer's state, by torch.distributed.checkpoint, and `loop.json`.
It is written as `step-00000005.partial`, synced to disk, and renamed: a folder with the final name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ..trainer import CheckpointError
from ..trainer.state_files import METADATA

_KEPT = 2
_NAME = re.compile(r"step-\d{8}")
_PARTIAL = ".partial"
_STATE = "loop.json"


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
                    raise CheckpointError(
                        f"{path}: {name} is {found!r}; expected {expected!r}, the setting of this run"
                    )
        elif (found := self.latest()) is not None:
            raise CheckpointError(f"there is {str(found)!r} already; expected a folder without, or --resume")

    def begin(self, step: int) -> Path:
        """Make a folder for the trainer's state. Removes folders that were not committed or were removed in part."""
        for path in set(self._all()) - set(self._complete()):
            shutil.rmtree(path)
        partial = self.folder / f"step-{step:08d}{_PARTIAL}"
        partial.mkdir(parents=True)
        return partial

    def commit(self, state: dict[str, Any]) -> Path:
        """Make the checkpoint of this step a complete one, and remove older ones.

        `state`: the rest beside the trainer's, ready for JSON, with `step` and `settings`.
        """
        final = self.folder / f"step-{state['step']:08d}"
        partial = final.with_name(final.name + _PARTIAL)
        if not (partial / METADATA).is_file():
            raise CheckpointError(f"{str(partial)!r} has no state of a trainer; expected a folder that all nodes share")
        with open(partial / _STATE, "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        if final.exists():  # of the same step, before the run went back
            self._remove(final)
        partial.rename(final)
        _sync(self.folder)
        for old in self._complete()[:-_KEPT]:
            self._remove(old)
        return final

    def latest(self) -> Path | None:
        """The newest complete one."""
        return next(reversed(self._complete()), None)

    def newest(self) -> tuple[Path, dict[str, Any]]:
        """Raises CheckpointError if there is none, or an unreadable one."""
        path = self.latest()
        if path is None:
            raise CheckpointError(f"{str(self.folder)!r} has no complete checkpoint; expected a folder step-NNNNNNNN")
        try:
            return path, json.loads((path / _STATE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error!r}; expected the file of a run") from error

    def _complete(self) -> list[Path]:
        return [path for path in self._all() if _NAME.fullmatch(path.name)]

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def _remove(self, path: Path) -> None:
        """Under another name: one that is half removed is not complete."""
        shutil.rmtree(path.rename(path.with_name(path.name + ".removed")))


def settings_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """All fields of a dataclass and of those in it, by dotted name and ready for JSON."""
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= settings_of(value, f"{prefix}{field.name}.")
        else:
            plain = value is None or isinstance(value, (bool, int, float, str))
            found[prefix + field.name] = value if plain else repr(value)
    return found


def _sync(folder: Path) -> None:
    """A name in a folder outlasts a crash of the machine once the folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
