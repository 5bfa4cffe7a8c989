"""A group: the ranks of all roles, and the phases that they enter together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from memsaver._arguments import READERS_S, Bounds, several
from memsaver.policies import TurnBackup, TurnRestore, joined, turn_backups, turn_restores
from memsaver.ray.ranks import Rank
from memsaver.ray.turn import Backups, Restores, RunningTurn, Turn, TurnOptions


class Group:
    """All ranks of all roles, and the phases that they enter together.

    One caller at a time may use a group. While all ranks prepare, the group refuses a phase that would resume
    discarded contents without ``restore=False``.

    Args:
        phases: The tags that are resident in each phase: name -> role -> tags.
        backup: Policies with which tags pause in the turn into a phase, if they are not the regions' own: name of the
            phase -> role -> tag -> policy. ``"none"`` discards contents, ``"host"`` and ``"disk"`` keep them. A policy
            in the place of the tags, or of the roles, is for all of them.
        restore: False for tags whose contents the phase overwrites: name of the phase -> role -> tag -> bool, with the
            same short forms.
        roles: The members of each role, one or a list in the order of their ranks. They are Ray actors that derive from
            ``Colocated`` or ``AsyncColocated``, or actors or objects of this process with ``pause(tags)`` and
            ``resume(tags)`` that may be called twice. Objects are called in threads, and may return awaitables.

    Raises:
        TypeError: An argument has a wrong type, or a member has no ``pause()`` or ``resume()``.
        ValueError: A role has no members, a phase has unknown roles or no phase has tags, or ``backup`` or ``restore``
            has unknown phases, roles or policies, or tags that do not pause or resume in the phase.

    Examples:
        The weights are overwritten in each ``"sync"``, so they need no copy when the trainer's turn begins:

        >>> class Engine(memsaver.ray.Colocated):
        ...     def __init__(self):
        ...         self.weights = memsaver.region("weights", device="cpu", backup="host")
        >>> class Trainer(memsaver.ray.Colocated):
        ...     def __init__(self):
        ...         self.params = memsaver.region("params", device="cpu", backup="host")
        >>> group = memsaver.ray.Group(
        ...     engine=Engine(),
        ...     trainer=Trainer(),
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
        phases: Mapping[str, Mapping[str, Iterable[str]]],
        backup: Mapping[str, TurnBackup] | None = None,
        restore: Mapping[str, TurnRestore] | None = None,
        **roles: Any,
    ) -> None:
        if not roles:
            raise ValueError("no roles, expected at least one, such as engine=[actor]")
        self._ranks = [rank for role, given in roles.items() for rank in _of_role(role, given)]
        self._phases = _checked_phases(phases, roles)
        self._backup: dict[str, Backups] = {
            name: turn_backups(given, self._moves(name)[0], f"backup in phase {name!r}")
            for name, given in self._by_phase("backup", backup)
        }
        self._restore: dict[str, Restores] = {
            name: turn_restores(given, self._moves(name)[1], f"restore in phase {name!r}")
            for name, given in self._by_phase("restore", restore)
        }
        self._writers: dict[tuple[Rank, str], Turn] = {}  # by tag, the last turn that was to overwrite its contents
        self._unwritten: dict[Rank, set[str]] = {}  # tags that resumed to be overwritten in a phase that failed
        self._entered: str | None = None
        self._starting = set(self._ranks)  # ranks that may still start: new ones, and dead ones

    @property
    def entered(self) -> str | None:
        """The phase of all ranks. None before the first phase, and after a turn that failed."""
        return self._entered

    def replace(self, role: str, rank: int, actor: Any) -> None:
        """Replaces a member that has died. Afterwards ``entered`` is None until the group enters a phase.

        Args:
            role: The role of the member.
            rank: Its index in the role.
            actor: The new member. Its regions are active, or not made yet.

        Raises:
            ValueError: There is no such rank.
            TypeError: ``actor`` has no ``pause()`` or ``resume()``.

        Examples:
            >>> class Engine(memsaver.ray.Colocated):
            ...     def __init__(self):
            ...         self.weights = memsaver.region("weights", device="cpu")
            >>> group = memsaver.ray.Group(engine=Engine(), phases={"rollout": {"engine": ["weights"]}})
            >>> _ = group.enter("rollout")
            >>> group.replace("engine", 0, Engine())
            >>> group.entered is None
            True
        """
        for at, old in enumerate(self._ranks):
            if (old.role, old.index) == (role, rank):
                self._ranks[at] = Rank(role, rank, actor)
                self._unwritten.pop(old, None)
                self._writers = {key: turn for key, turn in self._writers.items() if key[0] != old}
                self._starting.discard(old)
                self._starting.add(self._ranks[at])
                self._entered = None
                return
        raise ValueError(f"there is no {role!r} {rank!r}; there are {_listed(map(str, self._ranks))}")

    def enter(
        self,
        name: str,
        *,
        backup: TurnBackup = None,
        restore: TurnRestore = None,
        timeout: float | None = None,
        memory_timeout: float | None = None,
        reader_timeout: float = READERS_S,
    ) -> Turn:
        """Enters a phase: of all tags in any phase, exactly the tags of this phase are resident.

        All ranks prepare: tags that pause are drained, and the needs of their pauses are reserved. After the last rank
        has prepared, all ranks commit: they pause, and resume the tags of this phase. If the memory of all ranks comes
        from shared pools, both run at the same time; otherwise ranks resume after the last rank has paused.

        The phase lasts until the next ``enter()``. A with statement around its body is needed only if the body
        overwrites contents that resumed with ``restore=False``: if the body raises, these tags count as not written.
        Phases in which they are resident are then refused, until a phase with ``restore=False`` for them.

        Ranks without ``colocated_prepare()`` pause in one call after all others have prepared. Bounds, ``backup`` and
        ``restore`` are passed to the methods of the ranks as keyword arguments if they are not the defaults. A method
        without a parameter that the turn needs is an error of its rank.

        Args:
            name: The phase.
            backup: The policy of the tags that pause, for this turn: one for all roles, ``{role: policy}`` or
                ``{role: {tag: policy}}``. None: the group's policy for this phase, else that of the regions.
            restore: False for contents that the phase overwrites: for all roles, ``{role: bool}`` or
                ``{role: {tag: bool}}``. None: the group's value for this phase, else True.
            timeout: Seconds for the whole turn, up to the commit of the last rank. Each rank gets the rest of it for
                its own call. If a rank has not answered by then while all prepare, the turn fails, and the rank aborts
                its part when its drain or start has ended. None: no bound.
            memory_timeout: Seconds to wait for memory that others hold. None: 60 for ranks that resume at the same time
                as the pauses that release their memory, else 0.
            reader_timeout: Seconds for pauses to wait for attached readers.

        Returns:
            The turn: the transitions of each rank, and seconds.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: The phase does not exist, or an argument names unknown roles, tags or policies.
            memsaver.Error: A rank failed or has died, or contents without a backup would resume (the cause is a
                BackupError). Its attributes are ``phase``, ``role`` and ``rank``; the cause is chained. Before the
                commits, nothing has changed on any rank. After a later failure the tags to pause are paused, and so are
                the tags that had resumed. The other ranks are notified by ``colocated_failed()``. This phase, or
                another, can be entered again.

        Examples:
            >>> class Engine(memsaver.ray.Colocated):
            ...     def __init__(self):
            ...         self.weights = memsaver.region("weights", device="cpu", backup="host")
            >>> engine = Engine()
            >>> group = memsaver.ray.Group(
            ...     engine=engine, phases={"rollout": {"engine": ["weights"]}, "train": {"engine": []}}
            ... )
            >>> _ = group.enter("train")
            >>> with group.enter("rollout", restore=False) as turn:
            ...     print(turn.unrestored, engine.weights.state)  # overwrite the weights here
            {'engine': ['weights']} active
        """
        pauses, resumes = self._moves(name)
        bounds = Bounds(timeout, 0.0 if memory_timeout is None else memory_timeout, reader_timeout)
        given_memory_timeout = None if memory_timeout is None else bounds.memory_timeout
        backups = joined(self._backup.get(name, {}), turn_backups(backup, pauses))
        restores = joined(self._restore.get(name, {}), turn_restores(restore, resumes))
        options = TurnOptions(bounds, given_memory_timeout, backups, restores, time.monotonic())
        running = RunningTurn(
            name, self._ranks, pauses, resumes, options, self._unwritten, self._starting, self._mark_unwritten
        )
        self._entered = None
        running.prepare()
        turn = running.commit()
        self._entered = name
        for rank in self._ranks:
            overwritten = turn.unrestored.get(rank.role, ())
            for tag in resumes.get(rank.role, ()):
                if tag in overwritten:
                    self._writers[rank, tag] = turn
                    self._unwritten.get(rank, set()).discard(tag)
                else:  # a phase that uses the contents: the turn that was to write them has done so
                    self._writers.pop((rank, tag), None)
        return turn

    def _mark_unwritten(self, turn: Turn) -> None:
        """The body of a turn has failed before a later phase used the contents that it was to write."""
        for (rank, tag), writer in self._writers.items():
            if writer is turn:
                self._unwritten.setdefault(rank, set()).add(tag)

    def _moves(self, name: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Tags that pause, and tags that resume, by role."""
        if name not in self._phases:
            raise ValueError(f"there is no phase {name!r}; there are {_listed(self._phases)}")
        roles = dict.fromkeys(rank.role for rank in self._ranks)
        coming = {role: self._phases[name].get(role, []) for role in roles}
        leaving: dict[str, list[str]] = {role: [] for role in roles}
        for phase in self._phases.values():
            for role, tags in phase.items():
                found = leaving[role]
                found += [tag for tag in tags if tag not in coming[role] and tag not in found]
        return leaving, coming

    def _by_phase(self, option: str, given: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
        if given is None:
            return ()
        if not isinstance(given, Mapping):
            raise TypeError(f"{option} is {given!r}, expected a dict of phase -> role -> tag -> value")
        for name in given:
            if name not in self._phases:
                raise ValueError(f"{option} names the phase {name!r}, expected one of {_listed(self._phases)}")
        return given.items()


def _of_role(role: str, given: Any) -> list[Rank]:
    actors = list(given) if isinstance(given, (list, tuple)) else [given]
    if not actors:
        raise ValueError(f"the role {role!r} has no members, expected one or more")
    return [Rank(role, rank, actor) for rank, actor in enumerate(actors)]


def _checked_phases(
    phases: Mapping[str, Mapping[str, Iterable[str]]], roles: Mapping[str, object]
) -> dict[str, dict[str, list[str]]]:
    if not isinstance(phases, Mapping):
        raise TypeError(f"phases is {phases!r}, expected a dict of name -> role -> tags")
    if not phases:
        raise ValueError("phases is empty, expected a dict of name -> role -> tags")
    checked: dict[str, dict[str, list[str]]] = {}
    for name, by_role in phases.items():
        if not isinstance(by_role, Mapping):
            raise TypeError(f"phase {name!r} is {by_role!r}, expected a dict of role -> tags")
        checked[name] = {}
        for role, tags in by_role.items():
            if role not in roles:
                raise ValueError(f"phase {name!r} names the role {role!r}, expected one of {_listed(roles)}")
            checked[name][role] = list(dict.fromkeys(several(tags, f"phase {name!r} for {role!r}")))
    if not any(tags for by_role in checked.values() for tags in by_role.values()):
        raise ValueError("no phase names a tag, expected at least one")
    return checked


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
