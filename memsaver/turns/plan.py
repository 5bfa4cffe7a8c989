"""The phases of a group: the tags that move in the turn into a phase, with their policies."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memsaver import policies
from memsaver.policies import READERS_S, Bounds, ByRole, TurnBackup, TurnLazy, TurnRestore, listed, several, those_of

Phases = Mapping[str, Mapping[str, Iterable[str] | Mapping[str, Iterable[str]]]]
_PARTS = ("resident", "late", "lingering")  # of a role in a phase
_HANDOVER_S = 60.0  # default bound of a resume's wait for memory that another rank releases in the same turn
_COMPLETE_S = 30.0  # after a turn's timeout, ranks that have committed may take this long to complete their calls
_ANSWER_S = 1.0  # after a turn's timeout, the ranks' own errors may take this long to arrive


@dataclass(frozen=True)
class TurnOptions:
    """The options of one turn. ``since``: when it began, by ``time.monotonic()``."""

    bounds: Bounds
    values: dict[str, ByRole]  # of "backup", "restore" and "lazy"
    since: float

    @property
    def until(self) -> float | None:
        """The time by ``time.monotonic()`` after which a rank without an answer fails the turn."""
        return None if self.bounds.timeout is None else self.since + self.bounds.timeout + _ANSWER_S

    @property
    def completes_until(self) -> float | None:
        """The time by ``time.monotonic()`` after which a turn stops to wait for ranks that have committed."""
        return None if self.bounds.timeout is None else self.since + self.bounds.timeout + _COMPLETE_S

    def restores(self, role: str, tag: str) -> bool:
        return bool(self.values["restore"].get(role, {}).get(tag, True))

    def of_pauses(self, role: str, tags: Sequence[str]) -> dict[str, Any]:
        bounds = self.bounds.left(self.since)
        backup, lazy = (those_of(tags, self.values[option].get(role, {})) for option in ("backup", "lazy"))
        options = {"backup": backup or None, "timeout": bounds.timeout, "reader_timeout": bounds.reader_timeout}
        return {**options, "lazy": lazy} if lazy else options

    def of_resumes(self, role: str, tags: Sequence[str], handover: bool) -> dict[str, Any]:
        """``handover``: another rank may release the memory in the same turn."""
        bounds = self.bounds.left(self.since)
        wait = _HANDOVER_S if bounds.memory_timeout is None and handover else bounds.memory_timeout
        restore = {tag: self.restores(role, tag) for tag in tags}
        return {"restore": restore, "timeout": bounds.timeout, "memory_timeout": wait}


class Part(NamedTuple):
    """The tags of a role that move in the turn into a phase: at once, or (lingering, late) during its work."""

    leaving: list[str]
    lingering: list[str]
    resident: list[str]
    late: list[str]

    @property
    def pauses(self) -> list[str]:
        return [*self.leaving, *self.lingering]

    @property
    def resumes(self) -> list[str]:
        return [*self.resident, *self.late]


class Plan:
    """The checked arguments of a group. ``roles``: those with members; None: they are not known.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A phase has unknown roles, no phase has tags, or ``backup``, ``restore`` or ``lazy`` has unknown
            phases, roles or policies, or tags that do not pause or resume in the phase.
    """

    def __init__(
        self,
        phases: Phases,
        roles: Collection[str] | None,
        backup: Mapping[str, TurnBackup] | None = None,
        restore: Mapping[str, TurnRestore] | None = None,
        lazy: Mapping[str, TurnLazy] | None = None,
    ) -> None:
        self.phases = _checked_phases(phases, roles)
        self.roles = list(
            dict.fromkeys(role for each in self.phases.values() for role in each) if roles is None else roles
        )
        given = {"backup": backup, "restore": restore, "lazy": lazy}
        self.values = {option: self._by_phase(option, by_phase) for option, by_phase in given.items()}

    def part(self, name: str, role: str) -> Part:
        parts = [phase.get(role, {}) for phase in self.phases.values()]
        resident, late, lingering = (self.phases[name].get(role, {}).get(part, []) for part in _PARTS)
        named = dict.fromkeys(tag for each in parts for part in _PARTS for tag in each.get(part, ()))
        others = {*resident, *late, *lingering}
        return Part([tag for tag in named if tag not in others], lingering, resident, late)

    def options(
        self,
        name: str,
        backup: TurnBackup = None,
        restore: TurnRestore = None,
        lazy: TurnLazy = None,
        timeout: float | None = None,
        memory_timeout: float | None = None,
        reader_timeout: float = READERS_S,
    ) -> TurnOptions:
        """The checked options of a turn that begins now."""
        if name not in [*self.phases]:  # a list: a value without a hash is refused, too
            raise ValueError(f"there is no phase {name!r}; there are {listed(self.phases)}")
        bounds = Bounds(timeout, memory_timeout, reader_timeout)
        values = {
            option: policies.joined(self.values[option].get(name, {}), self._checked(option, given, name))
            for option, given in (("backup", backup), ("restore", restore), ("lazy", lazy))
        }
        return TurnOptions(bounds, values, time.monotonic())

    def _by_phase(self, option: str, given: Any) -> dict[str, ByRole]:
        """By phase, the checked values."""
        if not isinstance(given, (Mapping, type(None))):
            raise TypeError(f"{option} is {given!r}, expected a dict of phase -> role -> tag -> value")
        for name in given or ():
            if name not in self.phases:
                raise ValueError(f"{option} names the phase {name!r}, expected one of {listed(self.phases)}")
        return {
            name: self._checked(option, each, name, f" in phase {name!r}") for name, each in dict(given or {}).items()
        }

    def _checked(self, option: str, given: Any, name: str, place: str = "") -> ByRole:
        parts = {role: self.part(name, role) for role in self.roles}
        moves = {role: part.resumes if option == "restore" else part.pauses for role, part in parts.items()}
        return policies.of_turn(option, given, moves, place)


def _checked_phases(phases: Phases, roles: Collection[str] | None) -> dict[str, dict[str, dict[str, list[str]]]]:
    if not isinstance(phases, Mapping):
        raise TypeError(f"phases is {phases!r}, expected a dict of name -> role -> tags")
    if not phases:
        raise ValueError("phases is empty, expected a dict of name -> role -> tags")
    checked: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name, by_role in phases.items():
        if not isinstance(by_role, Mapping):
            raise TypeError(f"phase {name!r} is {by_role!r}, expected a dict of role -> tags")
        checked[name] = {}
        for role, tags in by_role.items():
            if roles is not None and role not in roles:
                raise ValueError(f"phase {name!r} names the role {role!r}, expected one of {listed(roles)}")
            checked[name][role] = _checked_parts(tags, f"phase {name!r} for {role!r}")
    if not any(tags for by_role in checked.values() for parts in by_role.values() for tags in parts.values()):
        raise ValueError("no phase names a tag, expected at least one")
    return checked


def _checked_parts(given: Any, place: str) -> dict[str, list[str]]:
    parts = given if isinstance(given, Mapping) else {"resident": given}
    for part in parts:
        if part not in _PARTS:
            raise ValueError(f"{place} has {part!r}, expected {listed(_PARTS)}")
    name = "" if parts is not given else ": {}"
    checked = {part: list(dict.fromkeys(several(tags, place + name.format(part)))) for part, tags in parts.items()}
    tags = [tag for each in checked.values() for tag in each]
    for tag in tags:
        if tags.count(tag) > 1:
            raise ValueError(f"{place} names {tag!r} twice, expected resident, late or lingering")
    return checked
