"""Arguments that several calls take: tags, devices, bounds, and backup and restore by tag. All are checked here."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from memsaver import _core

READERS_S = 60.0
_LONGEST_TAG = 200
_LONGEST_S = 86400.0 * 365  # the core's clock adds it without overflow


def seconds(value: object, name: str = "timeout") -> float:
    """A bound as a float that the core can take. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, expected seconds")
    if not value >= 0:
        raise ValueError(f"{name} is {value!r}, expected seconds of 0 or more")
    return float(min(value, _LONGEST_S))


@dataclass(frozen=True)
class Bounds:
    """The bounds of one call, in seconds, as for ``memsaver.switch()``. The earliest that applies to a wait ends it.

    Raises TypeError or ValueError, as seconds().
    """

    timeout: float | None = None
    memory_timeout: float | None = None
    reader_timeout: float = READERS_S

    def __post_init__(self) -> None:
        for name in ("timeout", "memory_timeout", "reader_timeout"):
            if name == "reader_timeout" or getattr(self, name) is not None:
                object.__setattr__(self, name, seconds(getattr(self, name), name))

    def left(self, since: float) -> Bounds:
        """The bounds of a part that begins now, of a call that began at ``since`` by ``time.monotonic()``."""
        if self.timeout is None:
            return self
        return replace(self, timeout=max(0.0, since + self.timeout - time.monotonic()))


def check_tag(tag: object, option: str = "tag") -> None:
    """Raises TypeError or ValueError unless the value can be the tag of a region."""
    if not isinstance(tag, str):
        raise TypeError(f"{option} is {tag!r}, expected a string")
    if not tag:
        raise ValueError(f"{option} is '', expected a name")
    if len(tag) > _LONGEST_TAG or not tag.isprintable():
        raise ValueError(f"{option} is {tag!r}, expected at most {_LONGEST_TAG} printable characters")


def several(tags: object, name: str) -> list[str]:
    """Tags as a list. ``name`` is the argument's name in an error.

    Raises TypeError for all other values, a single string included.
    """
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise TypeError(f"{name} is {tags!r}, expected a list of tags")
    found = list(tags)
    for tag in found:
        if not isinstance(tag, str):
            raise TypeError(f"{name} has {tag!r}, expected a string")
    return sorted(found) if isinstance(tags, (set, frozenset)) else found  # the order of a set differs by process


def device_name(device: object) -> str:
    """``"cpu"`` or ``"cuda:N"`` from a torch-style string or a ``torch.device``. Raises ValueError otherwise."""
    name = str(device)
    if name == "cpu":
        return name
    kind, colon, index = name.partition(":")
    if kind == "cuda" and (not colon or (index.isascii() and index.isdecimal() and len(index) < 5)):
        if index:
            return f"cuda:{int(index)}"
        torch = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0}"
    raise ValueError(f"device is {device!r}, expected 'cpu', 'cuda' or 'cuda:N'")


BACKUPS: tuple[str, ...] = _core.BACKUPS
Backup = str | Mapping[str, str] | None
"""Backup policies of a pause: one for all tags, or by tag. None: the regions' own policies."""

Restore = bool | Mapping[str, bool]
"""Whether a resume restores contents: one value for all tags, or by tag. True for tags that are left out."""

LazyMode = bool | Literal["copy"]
Lazy = LazyMode | Mapping[str, LazyMode] | None
"""Whether a pause is lazy: one value for all tags, or by tag. The option ``lazy`` is for tags that are left out."""

TurnBackup = str | Mapping[str, str | Mapping[str, str]] | None
"""Backup policies of a group's turn: one for all roles, or by role; there, one for all tags, or by tag.

None: the group's policies for the phase.
"""

TurnRestore = bool | Mapping[str, bool | Mapping[str, bool]] | None
"""Whether a group's turn restores contents, in the forms of TurnBackup. None: the group's values for the phase."""

TurnLazy = LazyMode | Mapping[str, LazyMode | Mapping[str, LazyMode]] | None
"""Whether pauses of a group's turn are lazy, in the forms of TurnBackup. None: the group's values for the phase."""


@dataclass(frozen=True)
class Derived:
    """A policy for a region whose contents can be computed again from other regions: a pause copies nothing.

    A resume calls ``rebuild()`` after the contents of the other regions have arrived, and before the region is active.
    With ``restore=False`` it does not. A pause with ``backup="host"`` or ``"disk"`` keeps the contents as in other
    regions. In ``memsaver.stats()`` the policy is ``"none"``.

    Attributes:
        rebuild: Writes the contents into the tensors of the region, and neither enters nor allocates in a region of the
            resume. It has to wait for work that it queues on other devices than the region's. The thread is that of the
            transition: modes of the caller's thread, such as ``torch.no_grad()``, may be missing. The region keeps the
            function, and the object of a bound method. If it raises, all regions of the resume are paused again with
            their contents, and the resume raises RebuildError.
        after: The tags whose contents ``rebuild()`` reads. All of their regions have to be active, or to resume in the
            same call with contents. A resume for which one is not raises RegionPausedError, and nothing has changed.

    Raises:
        TypeError: ``rebuild`` cannot be called, or is a coroutine function, or ``after`` is not a list of tags.

    Examples:
        >>> master = memsaver.region("master", device="cpu", backup="host")
        >>> fp32 = master.empty(256).fill_(0.5)
        >>> cast = memsaver.Derived(lambda: bf16.copy_(fp32), after=["master"])
        >>> weights = memsaver.region("weights", device="cpu", backup=cast)
        >>> bf16 = weights.empty(256, torch.bfloat16).copy_(fp32)
        >>> memsaver.pause(["master", "weights"]).copied_bytes
        1024
        >>> memsaver.resume(["master", "weights"]).copied_bytes, bf16[0].item()
        (1024, 0.5)
    """

    rebuild: Callable[[], object]
    after: Sequence[str]

    def __post_init__(self) -> None:
        if not callable(self.rebuild):
            raise TypeError(f"rebuild is {self.rebuild!r}, expected a function without arguments")
        if inspect.iscoroutinefunction(self.rebuild):
            raise TypeError(f"rebuild is {self.rebuild!r}, a coroutine function, expected one that does not await")
        object.__setattr__(self, "after", tuple(several(self.after, "after")))
        for tag in self.after:
            check_tag(tag)


_Check = Callable[[object, str], None]
ByRole = dict[str, dict[str, Any]]  # values by role and tag


# ``option``: the argument's name in an error.


def check_backup(backup: object, option: str = "backup") -> None:
    """Raises ValueError unless ``backup`` is a policy."""
    if backup not in BACKUPS:
        raise ValueError(f"{option} is {backup!r}, expected one of {listed(BACKUPS)}")


def check_restore(restore: object, option: str = "restore") -> None:
    """Raises TypeError unless ``restore`` is a bool."""
    if not isinstance(restore, bool):
        raise TypeError(f"{option} is {restore!r}, expected True or False")


def check_lazy(lazy: object, option: str = "lazy") -> None:
    """Raises TypeError unless ``lazy`` is a bool or a string, ValueError for another string than ``"copy"``."""
    if not isinstance(lazy, bool) and lazy != "copy":
        error = ValueError if isinstance(lazy, str) else TypeError
        raise error(f"{option} is {lazy!r}, expected True, False or 'copy'")


_CHECKS: dict[str, _Check] = {"backup": check_backup, "restore": check_restore, "lazy": check_lazy}


def of_call(option: str, given: Any, tags: Sequence[str]) -> dict[str, Any]:
    """By tag, the values of ``backup``, ``restore`` or ``lazy`` in a call. ``tags``: those that pause, or that resume.

    Raises ValueError for other tags, and as the check of the option.
    """
    return {} if given is None and option != "restore" else _by_tag(option, given, tags, _CHECKS[option])


def of_turn(option: str, given: Any, tags: Mapping[str, Sequence[str]], place: str = "") -> ByRole:
    """By role and tag, the values of an option in a turn. As ``of_call()``, with the tags by role.

    ``place``: follows the option's name in an error.
    """
    return {} if given is None else _by_role(option + place, given, tags, _CHECKS[option])


def joined(first: ByRole, then: ByRole) -> ByRole:
    """The union of both. For a tag of a role in both, the second applies."""
    return {role: {**first.get(role, {}), **then.get(role, {})} for role in {**first, **then}}


def those_of(tags: Iterable[str], given: Any) -> Any:
    """The values of an option for these tags. A value for all tags stays."""
    return {tag: given[tag] for tag in tags if tag in given} if isinstance(given, Mapping) else given


def _by_role(option: str, given: Any, tags: Mapping[str, Sequence[str]], check: _Check) -> ByRole:
    if not isinstance(given, Mapping):
        return {role: _by_tag(option, given, names, check) for role, names in tags.items()}
    for role in given:
        if role not in tags:
            raise ValueError(f"{option} names the role {role!r}, expected one of {listed(tags)}")
    found = {role: _by_tag(f"{option} of {role!r}", value, tags[role], check) for role, value in given.items()}
    for role in given:
        if not tags[role]:
            raise ValueError(f"{option} names the role {role!r}, expected one with a tag that {_move(option)}")
    return found


def _by_tag(option: str, given: Any, tags: Sequence[str], check: _Check) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        check(given, option)
        return dict.fromkeys(tags, given)
    moving = set(tags)
    for tag, value in given.items():
        if tag not in moving:
            raise ValueError(
                f"{option} names the tag {tag!r}, expected one that {_move(option)}: {listed(tags) or 'none does'}"
            )
        check(value, f"{option} for {tag!r}")
    return dict(given)


def _move(option: str) -> str:
    return "resumes" if option.startswith("restore") else "pauses"


def listed(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))
