"""The phases of a group: the tags that move in the turn into a phase, with their policies."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from memsaver.policies import READERS_S, Bounds, TurnBackup, TurnRestore, joined, several, turn_backups, turn_restores
from memsaver.turns.turn import Backups, Restores, TurnOptions

Phases = Mapping[str, Mapping[str, Iterable[str]]]


class Plan:
    """The checked arguments of a group.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A phase has unknown roles, no phase has tags, or ``backup`` or ``restore`` has unknown phases, roles
            or policies, or tags that do not pause or resume in the phase.
    """

    def __init__(
        self,
        phases: Phases,
        roles: Collection[str],
        backup: Mapping[str, TurnBackup] | None = None,
        restore: Mapping[str, TurnRestore] | None = None,
    ) -> None:
        self._roles = list(roles)
        self.phases = _checked_phases(phases, self._roles)
        self._backup: dict[str, Backups] = {
            name: turn_backups(given, self.moves(name)[0], f"backup in phase {name!r}")
            for name, given in self._by_phase("backup", backup)
        }
        self._restore: dict[str, Restores] = {
            name: turn_restores(given, self.moves(name)[1], f"restore in phase {name!r}")
            for name, given in self._by_phase("restore", restore)
        }

    def moves(self, name: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """The tags that pause, and the tags that resume, by role."""
        if name not in self.phases:
            raise ValueError(f"there is no phase {name!r}; there are {listed(self.phases)}")
        coming = {role: self.phases[name].get(role, []) for role in self._roles}
        leaving: dict[str, list[str]] = {}
        for role in self._roles:
            named = dict.fromkeys(tag for phase in self.phases.values() for tag in phase.get(role, ()))
            staying = set(coming[role])
            leaving[role] = [tag for tag in named if tag not in staying]
        return leaving, coming

    def roles_in_phases(self) -> set[str]:
        """The roles that have a tag in a phase."""
        return {role for phase in self.phases.values() for role, tags in phase.items() if tags}

    def options(
        self,
        name: str,
        backup: TurnBackup = None,
        restore: TurnRestore = None,
        timeout: float | None = None,
        memory_timeout: float | None = None,
        reader_timeout: float = READERS_S,
    ) -> TurnOptions:
        """The checked options of a turn that begins now."""
        pauses, resumes = self.moves(name)
        bounds = Bounds(timeout, memory_timeout, reader_timeout)
        backups = joined(self._backup.get(name, {}), turn_backups(backup, pauses))
        restores = joined(self._restore.get(name, {}), turn_restores(restore, resumes))
        return TurnOptions(bounds, bounds.memory_timeout, backups, restores, time.monotonic())

    def _by_phase(self, option: str, given: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
        if given is None:
            return ()
        if not isinstance(given, Mapping):
            raise TypeError(f"{option} is {given!r}, expected a dict of phase -> role -> tag -> value")
        for name in given:
            if name not in self.phases:
                raise ValueError(f"{option} names the phase {name!r}, expected one of {listed(self.phases)}")
        return given.items()


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def check_mapping(phases: Phases) -> None:
    """Raises TypeError or ValueError unless ``phases`` is a mapping with entries."""
    if not isinstance(phases, Mapping):
        raise TypeError(f"phases is {phases!r}, expected a dict of name -> role -> tags")
    if not phases:
        raise ValueError("phases is empty, expected a dict of name -> role -> tags")


def _checked_phases(phases: Phases, roles: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    check_mapping(phases)
    checked: dict[str, dict[str, list[str]]] = {}
    for name, by_role in phases.items():
        if not isinstance(by_role, Mapping):
            raise TypeError(f"phase {name!r} is {by_role!r}, expected a dict of role -> tags")
        checked[name] = {}
        for role, tags in by_role.items():
            if role not in roles:
                raise ValueError(f"phase {name!r} names the role {role!r}, expected one of {listed(roles)}")
            checked[name][role] = list(dict.fromkeys(several(tags, f"phase {name!r} for {role!r}")))
    if not any(tags for by_role in checked.values() for tags in by_role.values()):
        raise ValueError("no phase names a tag, expected at least one")
    return checked
