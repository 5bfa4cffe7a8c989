"""The base of groups: the call that enters a phase. Derived classes reach the ranks."""

from __future__ import annotations

import itertools
import time
import weakref
from functools import partial

from memsaver import trace
from memsaver.policies import READERS_S, TurnBackup, TurnLazy, TurnRestore
from memsaver.turns.plan import Plan, TurnOptions
from memsaver.turns.ranks import Crew, Rank
from memsaver.turns.turn import RunningTurn, Turn

_groups = itertools.count(1)


class BaseGroup:
    """The phases of a group, and the turns into them, one after the other. One caller at a time."""

    def __init__(self, plan: Plan, crew: Crew) -> None:
        self._plan, self._crew = plan, crew
        self._unwritten: dict[Rank, set[str]] = {}  # tags that resumed to be overwritten in a phase that failed
        self._writers: dict[tuple[Rank, str], int] = {}  # by tag, the last turn that was to overwrite its contents
        self._number = 0  # of the last turn
        self._track = f"group {next(_groups)}"  # in the trace
        self._entered: str | None = None

    @property
    def entered(self) -> str | None:
        """The phase of all ranks. None before the first phase, and after a turn that failed."""
        return self._entered

    def enter(
        self,
        name: str,
        *,
        backup: TurnBackup = None,
        lazy: TurnLazy = None,
        restore: TurnRestore = None,
        timeout: float | None = None,
        memory_timeout: float | None = None,
        reader_timeout: float = READERS_S,
    ) -> Turn:
        """Enters a phase: of all tags in any phase, exactly the tags of this phase are resident.

        All ranks prepare: tags that pause are drained, and the needs of their pauses are reserved. After the last rank
        has prepared, all ranks commit: they pause, and resume the tags of this phase, at the same time if the memory of
        all ranks comes from shared pools.

        The phase lasts until the next ``enter()``. A with statement around its body is needed only if the body
        overwrites contents that resumed with ``restore=False``: if the body raises, these tags count as not written.
        Phases in which they are resident are then refused, until a phase with ``restore=False`` for them.

        In a job of torch.distributed all processes call this method with the same arguments. The call returns, or
        raises, in all processes when the turn has ended. If the body of its with statement raises in one process,
        contents that resumed with ``restore=False`` count as not written in all of them.

        Args:
            name: The phase.
            backup: The policy of the tags that pause, for this turn: one for all roles, ``{role: policy}`` or
                ``{role: {tag: policy}}``. None: the group's policy for this phase, else that of the regions.
            lazy: As for the group, without the phase. None: the group's values for this phase.
            restore: False for contents that the phase overwrites: for all roles, ``{role: bool}`` or
                ``{role: {tag: bool}}``. None: the group's value for this phase, else True.
            timeout: Seconds for the whole turn, up to the commit of the last rank, and for the wait for processes that
                have not called ``enter()``. If a rank has not prepared by then, the turn fails, and the rank aborts its
                part when its drain or start has ended. Ranks that have committed have 30 s more to complete their
                calls; then the turn fails too. No phase can be entered until the rank has answered. None: no bound.
            memory_timeout: Seconds to wait for memory that others hold. None: 60 for ranks that resume at the same time
                as the pauses that release their memory, else 0.
            reader_timeout: Seconds for pauses to wait for attached processes.

        Returns:
            The turn: the transitions of each rank, and seconds.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: The phase does not exist, or an argument names unknown roles, tags or policies.
            memsaver.Error: A rank failed or has died, or contents without a backup would resume. Its attributes are
                ``phase``, ``role`` and ``rank``, and ``report``, the path of the report if a rank has not answered at
                the deadline; the cause is chained. Before the commits, nothing has changed on any rank. After a later
                failure the tags to pause and the tags that had resumed are paused. Any phase can be entered again.
                In a job of torch.distributed also: processes called with different arguments. If no single member is
                the reason, ``role`` is None and ``rank`` is that of the process. The cause of a process that has ended
                is a ``LostRankError``. If the store is lost, no phase can be entered any more. A rank that has not
                learned that all ranks prepared takes its preparation back.

        Examples:
            >>> weights = memsaver.region("weights", device="cpu", backup="host")
            >>> phases = {"rollout": {"engine": ["weights"]}, "train": {"engine": []}}
            >>> group = memsaver.ray.Group(engine=memsaver.ray.Colocated(), phases=phases)
            >>> _ = group.enter("train")
            >>> with group.enter("rollout", restore=False) as turn:
            ...     print(turn.unrestored, weights.state)  # overwrite the weights here
            {'engine': ['weights']} active
        """
        options = self._plan.options(name, backup, restore, lazy, timeout, memory_timeout, reader_timeout)
        return self._enter(name, options)

    def _enter(self, phase: str, options: TurnOptions) -> Turn:
        began = time.monotonic()
        self._end_phase(began)
        self._number += 1
        try:
            unwritten = self._crew.begin(self._number, phase, options, self._unwritten)
            self._unwritten = {rank: set(tags) for rank, tags in unwritten.items()}
            turn = RunningTurn(self._plan, self._crew, self._unwritten, phase, options).run()
        except BaseException as error:
            self._trace(phase, began, repr(error))
            raise
        self._trace(phase, began)
        writers = dict(self._writers)
        after = {rank: set(tags) for rank, tags in self._unwritten.items()}
        for rank in self._crew.ranks:
            overwritten = set(turn.unrestored.get(rank.role, ()))
            after.get(rank, set()).difference_update(overwritten)
            for tag in self._plan.part(phase, rank.role).resumes:
                if tag in overwritten:
                    writers[rank, tag] = self._number
                else:  # a phase that uses the contents: the turn that was to write them has done so
                    writers.pop((rank, tag), None)
        # No field of the dataclass, which is frozen. A turn that is kept does not keep its group.
        turn.__dict__["_on_error"] = partial(_mark_unwritten, weakref.ref(self), self._number)
        # At once: after an interrupt before it, the contents that the phase was to write count as not written.
        self._writers, self._unwritten, self._entered = writers, after, phase
        return turn

    def _end_phase(self, at: float) -> None:
        if (writer := trace.active) is not None and self._entered is not None:
            writer.event("E", "phase", self._entered, at, track=self._track)
        self._entered = None

    def _trace(self, phase: str, began: float, error: str | None = None) -> None:
        if (writer := trace.active) is not None:
            until = time.monotonic()
            args = {"error": error}
            writer.event("X", "turn", f"turn to {phase}", began, args, track=self._track, until=until)
            if error is None:
                writer.event("B", "phase", phase, until, track=self._track)


def _mark_unwritten(of: weakref.ref[BaseGroup], number: int) -> None:
    """The body of a turn has failed before a later phase used the contents that it was to write."""
    if (group := of()) is not None:  # else no phase follows
        for (rank, tag), writer in group._writers.items():
            if writer == number:
                group._unwritten.setdefault(rank, set()).add(tag)
