"""The drill of `--kill`: actors die in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .options import Kill
from .report import Report
from .workers import Workers


class Drill:
    """The kills that are still to come."""

    def __init__(self, kills: Sequence[Kill], report: Report) -> None:
        self._kills, self._report = list(kills), report

    def of_step(self, role: str, step: int, workers: Workers) -> Callable[[], None]:
        """A function that kills the last rank of `role` if that is due in this step. A repeated step kills no more."""
        due = [kill for kill in self._kills if kill == (role, step)]

        def kill() -> None:
            for each in due:
                self._kills.remove(each)
                rank = len(workers.by_role[role]) - 1
                self._report.say(f"drill: killing {role} {rank} in step {step}")
                workers.kill(role, rank)

        return kill
