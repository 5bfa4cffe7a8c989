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
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from ..trainer import CheckpointError
from ..trainer.checkpoint import METADATA

VERSION = 1
_KEPT = 2
_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = ".partial"
_REMOVED = ".removed"
_STATE = "loop.json"


@dataclass(frozen=True)
class LoopState:
    """The state of a run after `step` steps, without the trainer's. Learning rates follow from `step`.

    `settings`: the settings that the curve depends on, see `settings_of`. `task`: the state of the task's random
    numbers. `engines`: those of each rank's sampler. `warm`: rewards of the held-out problems after the warm-up.
    `statistics`, `counts`: of all steps so far.
    """

    step: int
    settings: dict[str, Any]
    task: list[Any]
    engines: list[list[int]]
    warm: list[float]
    statistics: dict[str, float]
    counts: dict[str, int]

    def check(self, settings: Mapping[str, Any], where: str) -> None:
        """Raise CheckpointError, naming the first difference, for a run with other settings."""
        for name in (*settings, *self.settings):
            found, expected = (each.get(name, "not there") for each in (self.settings, settings))
            if found != expected:
                raise CheckpointError(f"{where}: {name} is {found!r}; expected {expected!r}, the setting of this run")


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
            state.check(settings, str(path))
        elif (found := self.latest()) is not None:
            raise CheckpointError(f"there is {str(found)!r} already; expected a folder without, or --resume")

    def begin(self, step: int) -> Path:
        """Make a folder for the trainer's state. Removes folders that were not committed or were removed in part."""
        for name in self._names():
            if not _NAME.fullmatch(name):
                shutil.rmtree(self.folder / name)
        partial = self.folder / f"step-{step:08d}{_PARTIAL}"
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{str(partial)!r} cannot be made: {error}") from error
        return partial

    def commit(self, state: LoopState) -> Path:
        """Make the checkpoint of this step a complete one, and remove older ones."""
        final = self.folder / f"step-{state.step:08d}"
        partial = final.with_name(final.name + _PARTIAL)
        if not (partial / METADATA).is_file():
            raise CheckpointError(f"{str(partial)!r} has no state of a trainer; expected a folder that all nodes share")
        with open(partial / _STATE, "w") as file:
            json.dump({"version": VERSION, **asdict(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        if final.exists():  # of the same step, before the run went back
            self._remove(final)
        os.rename(partial, final)
        _sync(self.folder)
        for old in self._complete()[:-_KEPT]:
            self._remove(old)
        return final

    def latest(self) -> Path | None:
        """The newest complete one."""
        return next(reversed(self._complete()), None)

    def newest(self) -> tuple[Path, LoopState]:
        """Raises CheckpointError if there is none, and for one of another version."""
        path = self.latest()
        if path is None:
            raise CheckpointError(f"{str(self.folder)!r} has no complete checkpoint; expected a folder step-NNNNNNNN")
        return path, read(path)

    def _complete(self) -> list[Path]:
        return [self.folder / name for name in self._names() if _NAME.fullmatch(name)]

    def _names(self) -> list[str]:
        try:
            return sorted(each.name for each in self.folder.iterdir() if each.name.startswith("step-"))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{str(self.folder)!r} cannot be read: {error}; expected a folder") from error

    def _remove(self, path: Path) -> None:
        """Under another name: one that is half removed is not complete."""
        removed = path.with_name(path.name + _REMOVED)
        os.rename(path, removed)
        shutil.rmtree(removed)


def read(path: Path) -> LoopState:
    """The state in a complete checkpoint. Raises CheckpointError for another file, and for another version."""
    file = path / _STATE
    try:
        found = json.loads(file.read_text())
        version = found.pop("version")
        if version != VERSION:
            raise CheckpointError(f"{str(file)!r} has version {version!r}; expected {VERSION}")
        return LoopState(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error!r}; expected the file of a run") from error


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
