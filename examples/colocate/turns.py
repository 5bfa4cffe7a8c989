"""The phases of the loop, and the figures of each turn from one phase into another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from memsaver.ray import Group, Turn

from .report import Report


@dataclass(frozen=True)
class Moved:
    """Bytes of contents that one turn moved, on all ranks together."""

    before: str | None  # the phase that was left; None for the first turn
    after: str
    out_bytes: int
    in_bytes: int


class Turns:
    """Enters phases and keeps the figures. With `pausing` off all regions stay resident.

    `pool`: the source of memory. With a "shared" pool a resume waits for memory that a pause on another actor releases,
    so both run at the same time.

    rollout  the engine alone
    away     the trainer's workspace alone. The engine pauses with its weights in host memory
    train    the trainer alone. The engine's weights have no backup, since the sync overwrites them
    sync     the trainer's parameters and the engine's weights, which come without their old contents
    """

    BACKUP = {"train": {"engine": {"weights": "none"}}}
    RESTORE = {"sync": {"engine": {"weights": False}}}

    def __init__(
        self,
        engines: Sequence[Any],
        trainers: Sequence[Any],
        tags: dict[str, list[str]],
        report: Report,
        pausing: bool,
        pool: str,
    ) -> None:
        self.engines, self.trainers, self.report = list(engines), list(trainers), report
        self.pausing, self.pool = pausing, pool
        self.phases = {
            "rollout": {"engine": tags["engine"]},
            "away": {"trainer": ["workspace"]},
            "train": {"trainer": tags["trainer"]},
            "sync": {"trainer": ["params"], "engine": ["weights"]},
        }
        self._group = Group(
            engine=self.engines,
            trainer=self.trainers,
            phases=self.phases,
            backup=self.BACKUP,
            restore=self.RESTORE,
        )
        self.moved: list[Moved] = []

    def enter(self, name: str, memory_timeout: float = 60.0) -> Turn | None:
        """Enter a phase on all ranks. Returns the turn; None without pausing."""
        with self.phase(name, memory_timeout) as turn:
            return turn

    @contextmanager
    def phase(self, name: str, memory_timeout: float = 60.0) -> Iterator[Turn | None]:
        """The same as a context manager. If the body fails, contents that it was to write count as not written."""
        began = time.monotonic()
        if not self.pausing:
            self.report.entered(name, began)
            self.look(name)
            yield None
            return
        with self._group.enter(name, memory_timeout=memory_timeout) as turn:
            self.report.entered(name, began)
            self._count(turn)
            self.look(name)
            yield turn

    def look(self, name: str) -> None:
        """Note the device memory that is in use, and the bytes that the regions of each role hold."""
        memory = [trainer.memory.remote() for trainer in self.trainers]
        engines = [engine.mapped_bytes.remote() for engine in self.engines]
        trainers = [trainer.mapped_bytes.remote() for trainer in self.trainers]
        for each in ray.get(memory):
            self.report.saw(name, each.used, each.total)
        self.report.held(name, sum(ray.get(engines)), sum(ray.get(trainers)))

    def _count(self, turn: Turn) -> None:
        self.report.phase_seconds[turn.phase] += turn.seconds
        out, into = (
            sum(each.copied_bytes for ranks in side.values() for each in ranks) for side in (turn.paused, turn.resumed)
        )
        before = self.moved[-1].after if self.moved else None
        self.moved.append(Moved(before, turn.phase, out, into))
        self.report.pauses += sum(len(each.paused) for each in turn.transitions)
        # All ranks move at the same time: the slowest counts.
        for side in (turn.paused, turn.resumed):
            ranks = [each.seconds for transitions in side.values() for each in transitions]
            self.report.memsaver_seconds += max(ranks, default=0.0)
