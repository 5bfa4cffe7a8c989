"""The turns of a group, one after the other, and the contents that a failed phase has not written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memsaver.turns.plan import Plan, listed
from memsaver.turns.ranks import Calls, Rank
from memsaver.turns.turn import Reporting, RunningTurn, Turn, TurnOptions


class Turns:
    """Runs the turns of all ranks. One caller at a time."""

    def __init__(self, plan: Plan, ranks: Sequence[Rank], report: Reporting | None = None) -> None:
        self._plan, self._ranks, self._report = plan, list(ranks), report
        self._writers: dict[tuple[Rank, str], Turn] = {}  # by tag, the last turn that was to overwrite its contents
        self._unwritten: dict[Rank, set[str]] = {}  # tags that resumed to be overwritten in a phase that failed
        self._late: Calls = {}  # of ranks that had not answered when their turn ended
        self._starting = set(self._ranks)  # ranks that may still start: new ones, and dead ones
        self.entered: str | None = None
        """The phase of all ranks. None before the first phase, and after a turn that failed."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks of all roles. Those that were replaced are not among them."""
        return self._ranks

    def enter(self, name: str, options: TurnOptions, between: Callable[[], None] | None = None) -> Turn:
        """Runs a turn. ``between`` is called between its halves; if it raises, the prepared ranks abort."""
        pauses, resumes = self._plan.moves(name)
        running = RunningTurn(
            name, self._ranks, pauses, resumes, options, self._unwritten, self._starting, self._late,
            self.mark_unwritten, self._report,
        )  # fmt: skip
        self.entered = None
        running.prepare()
        if between is not None:
            try:
                between()
            except BaseException:
                running.abort()
                raise
        turn = running.commit()
        writers = dict(self._writers)
        unwritten = {rank: set(tags) for rank, tags in self._unwritten.items()}
        for rank in self._ranks:
            overwritten = set(turn.unrestored.get(rank.role, ()))
            unwritten.get(rank, set()).difference_update(overwritten)
            for tag in resumes.get(rank.role, ()):
                if tag in overwritten:
                    writers[rank, tag] = turn
                else:  # a phase that uses the contents: the turn that was to write them has done so
                    writers.pop((rank, tag), None)
        # At once: after an interrupt before it, the contents that the phase was to write count as not written.
        self._writers, self._unwritten, self.entered = writers, unwritten, name
        return turn

    def replace(self, new: Rank) -> None:
        """Puts a rank in the place of the one with its role and index. Raises ValueError if there is none."""
        for at, old in enumerate(self._ranks):
            if (old.role, old.index) == (new.role, new.index):
                self._ranks[at] = new
                self._unwritten.pop(old, None)
                self._late.pop(old, None)
                self._writers = {key: turn for key, turn in self._writers.items() if key[0] != old}
                self._starting.discard(old)
                self._starting.add(new)
                self.entered = None
                return
        there = listed(map(str, self._ranks))
        raise ValueError(f"there is no {new.role!r} {new.index!r}; there are {there}")

    def mark_unwritten(self, turn: Turn) -> None:
        """The body of a turn has failed before a later phase used the contents that it was to write."""
        for (rank, tag), writer in self._writers.items():
            if writer is turn:
                self._unwritten.setdefault(rank, set()).add(tag)

    def awaits(self, turn: Turn) -> bool:
        """Whether contents that a turn was to overwrite have not been used since."""
        return any(writer is turn for writer in self._writers.values())
