"""A group: the ranks of all roles, and the phases that they enter together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from memsaver.policies import READERS_S, TurnBackup, TurnLazy, TurnRestore
from memsaver.ray.ranks import Caller, MemberRank
from memsaver.ray.reports import Collector
from memsaver.turns.plan import Phases, Plan
from memsaver.turns.turn import Turn, Turns

_LOOK_LONGER_S = 30.0


class Group:
    """All ranks of all roles, and the phases that they enter together.

    One caller at a time may use a group. While all ranks prepare, the group refuses a phase that would resume
    discarded contents without ``restore=False``.

    Args:
        phases: The tags that are resident in each phase: name -> role -> tags. In the place of the tags,
            ``{"resident": tags, "late": tags, "lingering": tags}``: see ``memsaver.define_phase()``.
        backup: Policies with which tags pause in the turn into a phase, if they are not the regions' own: name of the
            phase -> role -> tag -> policy. A policy in the place of the tags, or of the roles, is for all of them.
        lazy: True or ``"copy"`` for tags that pause lazily, as by ``memsaver.pause()``, in the same forms.
        restore: False for tags whose contents the phase overwrites: name of the phase -> role -> tag -> bool, with the
            same short forms.
        roles: The members of each role, one or a list in the order of their ranks: Ray actors, or objects of this
            process, which are called in threads. They derive from ``Colocated`` or ``AsyncColocated``, or have their
            methods.

    Raises:
        TypeError: An argument has a wrong type, or a member lacks a method of ``Colocated``.
        ValueError: A role has no members, no phase has tags, or an argument has unknown phases, roles or policies, or
            tags that do not pause or resume in the phase.

    Examples:
        The weights are overwritten in each ``"sync"``, so they need no copy when the trainer's turn begins:

        >>> weights, params = (memsaver.region(tag, device="cpu", backup="host") for tag in ("weights", "params"))
        >>> group = memsaver.ray.Group(
        ...     engine=memsaver.ray.Colocated(),
        ...     trainer=memsaver.ray.Colocated(),
        ...     phases={
        ...         "rollout": {"engine": ["weights"]},
        ...         "train": {"trainer": ["params"]},
        ...         "sync": {"engine": ["weights"], "trainer": ["params"]},
        ...     },
        ...     backup={"train": {"engine": {"weights": "none"}}},
        ...     restore={"sync": {"engine": {"weights": False}}},
        ... )
        >>> _ = group.enter("train")
        >>> group.enter("sync").unrestored
        {'engine': ['weights']}
    """

    def __init__(
        self,
        *,
        phases: Phases,
        backup: Mapping[str, TurnBackup] | None = None,
        lazy: Mapping[str, TurnLazy] | None = None,
        restore: Mapping[str, TurnRestore] | None = None,
        **roles: Any,
    ) -> None:
        if not roles:
            raise ValueError("no roles, expected at least one, such as engine=[actor]")
        ranks = [rank for role, given in roles.items() for rank in _of_role(role, given)]
        self._plan = Plan(phases, roles, backup, restore, lazy)
        self._reports = Collector()
        self._caller = Caller(ranks, self._reports.collect)
        self._turns = Turns(self._plan, self._caller)

    @property
    def entered(self) -> str | None:
        """The phase of all ranks. None before the first phase, and after a turn that failed."""
        return self._turns.entered

    def replace(self, role: str, rank: int, actor: Any) -> None:
        """Replaces a member that has died. Afterwards ``entered`` is None until the group enters a phase.

        Args:
            role: The role of the member.
            rank: Its index in the role.
            actor: The new member. Its regions are active, or not made yet.

        Raises:
            ValueError: There is no such rank.
            TypeError: ``actor`` lacks a method of ``Colocated``.

        Examples:
            >>> Engine = memsaver.ray.Colocated
            >>> group = memsaver.ray.Group(engine=Engine(), phases={"rollout": {"engine": ["weights"]}})
            >>> group.replace("engine", 0, Engine())
        """
        self._caller.replace(MemberRank(role, rank, actor))
        self._turns.entered = None

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

        Args:
            name: The phase.
            backup: The policy of the tags that pause, for this turn: one for all roles, ``{role: policy}`` or
                ``{role: {tag: policy}}``. None: the group's policy for this phase, else that of the regions.
            lazy: As for the group, without the phase. None: the group's values for this phase.
            restore: False for contents that the phase overwrites: for all roles, ``{role: bool}`` or
                ``{role: {tag: bool}}``. None: the group's value for this phase, else True.
            timeout: Seconds for the whole turn, up to the commit of the last rank. If a rank has not prepared by then,
                the turn fails, and the rank aborts its part when its drain or start has ended. Ranks that have
                committed have 30 s more to complete their calls; then the turn fails too. No phase can be entered until
                the rank has answered. None: no bound.
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
        if options.completes_until is not None:  # the actors look a little longer than the turn waits
            seconds = options.completes_until - time.monotonic() + _LOOK_LONGER_S
            self._reports.watch(self._caller.ranks, seconds)
        return self._turns.enter(name, options)


def _of_role(role: str, given: Any) -> list[MemberRank]:
    actors = list(given) if isinstance(given, (list, tuple)) else [given]
    if not actors:
        raise ValueError(f"the role {role!r} has no members, expected one or more")
    return [MemberRank(role, rank, actor) for rank, actor in enumerate(actors)]
