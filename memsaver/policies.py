"""Policies for the contents of regions in a transition: the backup in a pause, and the restore in a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from memsaver import _core

BACKUPS: tuple[str, ...] = _core.BACKUPS
Backup = str | Mapping[str, str] | None
"""Backup policies of a pause: one for all tags, or by tag. None: the regions' own policies."""

Restore = bool | Mapping[str, bool]
"""Whether a resume restores contents: one value for all tags, or by tag. True for tags that are left out."""

TurnBackup = str | Mapping[str, str | Mapping[str, str]] | None
"""Backup policies of a group's turn: one for all roles, or by role; there, one for all tags, or by tag.

None: the group's policies for the phase.
"""

TurnRestore = bool | Mapping[str, bool | Mapping[str, bool]] | None
"""Whether a group's turn restores contents, in the forms of TurnBackup. None: the group's values for the phase."""

_V = TypeVar("_V", str, bool)
_Check = Callable[[object, str], None]
_ByTag = dict[str, _V]
_ByRole = dict[str, dict[str, _V]]


def check_backup(backup: object, option: str = "backup") -> None:
    """Raises ValueError unless ``backup`` is a policy. ``option`` is the argument's name in the error."""
    if backup not in BACKUPS:
        raise ValueError(f"{option} is {backup!r}, expected one of {_listed(BACKUPS)}")


def check_restore(restore: object, option: str = "restore") -> None:
    """Raises TypeError unless ``restore`` is a bool. ``option`` is the argument's name in the error."""
    if not isinstance(restore, bool):
        raise TypeError(f"{option} is {restore!r}, expected True or False")


def backups(backup: Backup, tags: Sequence[str]) -> _ByTag[str]:
    """By tag, the policies in a call. Raises ValueError for tags that do not pause, and for other policies."""
    return {} if backup is None else _by_tag("backup", backup, tags, check_backup)


def restores(restore: Restore, tags: Sequence[str]) -> _ByTag[bool]:
    """By tag, whether to restore contents. Raises ValueError for tags that do not resume, TypeError unless a bool."""
    return {**dict.fromkeys(tags, True), **_by_tag("restore", restore, tags, check_restore)}


def turn_backups(backup: TurnBackup, leaving: Mapping[str, Sequence[str]], option: str = "backup") -> _ByRole[str]:
    """By role and tag, the policies in a turn. ``leaving``: the tags that pause in it, by role.

    Raises ValueError for unknown roles, tags that do not pause, and other policies.
    """
    return {} if backup is None else _by_role(option, backup, leaving, check_backup)


def turn_restores(restore: TurnRestore, coming: Mapping[str, Sequence[str]], option: str = "restore") -> _ByRole[bool]:
    """By role and tag, whether a turn restores contents. ``coming``: the tags that resume in it, by role.

    Raises ValueError for unknown roles and tags that do not resume, TypeError for values that are not bools.
    """
    return {} if restore is None else _by_role(option, restore, coming, check_restore)


def joined(first: _ByRole[_V], then: _ByRole[_V]) -> _ByRole[_V]:
    """The union of both. For a tag of a role in both, the second applies."""
    return {role: {**first.get(role, {}), **then.get(role, {})} for role in {**first, **then}}


def as_option(option: str, chosen: Mapping[str, object], tags: Sequence[str]) -> dict[str, Any]:
    """The values in ``chosen`` for some of these tags, as the keyword argument of a call for all of them.

    One value if all tags have the same, else a dict by tag. No argument if no tag has a value.
    """
    named = {tag: chosen[tag] for tag in tags if tag in chosen}
    if not named:
        return {}
    first = next(iter(named.values()))
    same = all(tag in named and named[tag] == first for tag in tags)
    return {option: first if same else named}


def _by_role(option: str, given: Any, tags: Mapping[str, Sequence[str]], check: _Check) -> _ByRole[Any]:
    if not isinstance(given, Mapping):
        return {role: _by_tag(option, given, names, check) for role, names in tags.items()}
    for role in given:
        if role not in tags:
            raise ValueError(f"{option} names the role {role!r}, expected one of {_listed(tags)}")
    found = {role: _by_tag(f"{option} of {role!r}", value, tags[role], check) for role, value in given.items()}
    for role in given:
        if not tags[role]:
            raise ValueError(f"{option} names the role {role!r}, expected one with a tag that {_move(option)}")
    return found


def _by_tag(option: str, given: Any, tags: Sequence[str], check: _Check) -> _ByTag[Any]:
    if not isinstance(given, Mapping):
        check(given, option)
        return dict.fromkeys(tags, given)
    moving = set(tags)
    for tag, value in given.items():
        if tag not in moving:
            raise ValueError(
                f"{option} names the tag {tag!r}, expected one that {_move(option)}: {_listed(tags) or 'none does'}"
            )
        check(value, f"{option} for {tag!r}")
    return dict(given)


def _move(option: str) -> str:
    return "resumes" if option.startswith("restore") else "pauses"


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))
