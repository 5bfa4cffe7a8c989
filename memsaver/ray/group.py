"""A group: the ranks of all roles, and the phases that they enter together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from memsaver.policies import TurnBackup, TurnLazy, TurnRestore
from memsaver.ray.ranks import Caller, MemberRank
from memsaver.ray.reports import Collector
from memsaver.turns.group import BaseGroup
from memsaver.turns.plan import Phases, Plan, TurnOptions
from memsaver.turns.ranks import check_distinct
from memsaver.turns.turn import Turn

_LOOK_LONGER_S = 30.0


class Group(BaseGroup):
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
        ValueError: A role has no members, a member is given twice, no phase has tags, or an argument has unknown
            phases, roles or policies, or tags that do not pause or resume in the phase.

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
        check_distinct((rank.role, rank.member) for rank in ranks)
        self._reports = Collector()
        self._caller = Caller(ranks, self._reports.collect)
        super().__init__(Plan(phases, roles, backup, restore, lazy), self._caller)

    def replace(self, role: str, rank: int, actor: Any) -> None:
        """Replaces a member that has died. Afterwards ``entered`` is None until the group enters a phase.

        Args:
            role: The role of the member.
            rank: Its index in the role.
            actor: The new member. Its regions are active, or not made yet.

        Raises:
            ValueError: There is no such rank, or ``actor`` is a member already.
            TypeError: ``actor`` lacks a method of ``Colocated``.

        Examples:
            >>> Engine = memsaver.ray.Colocated
            >>> group = memsaver.ray.Group(engine=Engine(), phases={"rollout": {"engine": ["weights"]}})
            >>> group.replace("engine", 0, Engine())
        """
        new = MemberRank(role, rank, actor)
        others = [each for each in self._caller.ranks if (each.role, each.index) != (role, rank)]
        check_distinct((each.role, each.member) for each in [*others, new])
        self._caller.replace(new)
        self._end_phase(time.monotonic())

    def _enter(self, phase: str, options: TurnOptions) -> Turn:
        if options.completes_until is not None:  # the actors look a little longer than the turn waits
            seconds = options.completes_until - time.monotonic() + _LOOK_LONGER_S
            self._reports.watch(self._caller.ranks, seconds)
        return super()._enter(phase, options)


def _of_role(role: str, given: Any) -> list[MemberRank]:
    actors = list(given) if isinstance(given, (list, tuple)) else [given]
    if not actors:
        raise ValueError(f"the role {role!r} has no members, expected one or more")
    return [MemberRank(role, rank, actor) for rank, actor in enumerate(actors)]
