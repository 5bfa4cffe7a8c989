"""Whose turn it is: phases of the group, with what each of them found on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from memsaver.ray import Group, Turn

from .report import Report


class ProofError(RuntimeError):
    """What a pause must not change has changed."""


class Turns:
    """Enters phases and keeps the figures. With `pausing` off nothing ever moves, and all stays resident.

    `pool` is where memory comes from: in a "shared" one whoever resumes waits for what others give back, and may begin
    while they do.

    rollout  the engine alone
    away     the trainer's workspace alone: the engine's memory is another's, and the weights have not changed
    train    the trainer alone
    sync     parameters here, weights there: the weights come without their old contents
    """

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
        self._group = Group(engine=self.engines, trainer=self.trainers, phases=self.phases)

    def enter(self, name: str, timeout: float = 60.0) -> Turn | None:
        """Make it this phase's turn, on all ranks. Returns how that went; None without pausing."""
        turn = None
        if self.pausing:
            restore = {"engine": name != "sync"}  # the engine's old weights are about to be overwritten
            with self._group.phase(name, timeout=timeout, restore=restore) as turn:
                self._count(turn)
        self.look(name)
        return turn

    def look(self, name: str) -> None:
        """Note what the driver says is in use."""
        for memory in ray.get([trainer.memory.remote() for trainer in self.trainers]):
            self.report.saw(name, memory.used, memory.total)

    def prove_room(self) -> None:
        """The trainers saw the memory that they took free before they resumed; in a shared pool, engines hold none."""
        if not self.pausing:
            return
        if self.pool == "shared":
            held = ray.get([engine.mapped_bytes.remote() for engine in self.engines])
            if any(held):
                raise ProofError(f"in the trainer's turn the engines hold {held} bytes")
            self.report.proofs["engines hold nothing"] += 1
            return
        for rank, before in enumerate(ray.get([trainer.before_resume.remote() for trainer in self.trainers])):
            if before is None or before.free < before.needed:
                raise ProofError(f"trainer {rank} resumed over memory that was not free: it saw {before}")
        self.report.proofs["memory was free"] += 1

    def _count(self, turn: Turn) -> None:
        self.report.phase_seconds[turn.phase] += turn.seconds
        self.report.pauses += sum(len(each.paused) for each in turn.transitions)
        # Ranks move side by side: the slowest counts.
        for side in (turn.paused, turn.resumed):
            ranks = [each.seconds for transitions in side.values() for each in transitions]
            self.report.memsaver_seconds += max(ranks, default=0.0)
