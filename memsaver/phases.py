"""Phases: names for sets of resident regions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from memsaver import _guests, regions
from memsaver._arguments import READERS_S, Bounds
from memsaver.policies import Backup, Restore, check_backup
from memsaver.regions import Region
from memsaver.transitions import Progress, Transition, transition

Hook = Callable[[], object]


@dataclass(frozen=True, eq=False)
class Phase:
    name: str
    resident: Mapping[str | Region, None]  # in the order of the definition; a tag may be without a region yet
    on_enter: Hook | None
    on_exit: Hook | None


_phases: dict[str, Phase] = {}
_entered: list[Phase] = []  # phases whose block has not been left


def define_phase(
    name: str,
    resident: str | Region | Iterable[str | Region],
    *,
    on_enter: Hook | None = None,
    on_exit: Hook | None = None,
) -> None:
    """Defines the regions that are resident in a phase.

    A second definition replaces the first. So ``define_phase(name, [])`` removes all regions of a phase. A region that
    was closed leaves the phases that name it as a Region. A tag that a phase names needs a region when it is entered.

    Args:
        name: The name of the phase.
        resident: A tag, a Region, or several of either. The regions of a tag need not exist yet. Guests of a tag come
            back with the phase, and leave if no phase that names their tags is entered: see ``memsaver.Guest``.
        on_enter: Called after the phase's regions have resumed.
        on_exit: Called at the end of the phase's with statement.

    Raises:
        TypeError: An argument has a wrong type.

    Examples:
        >>> memsaver.define_phase("rollout", ["weights", "kv_cache"])
        >>> memsaver.define_phase("train", "optimizer", on_exit=lambda: print("trained"))
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}, expected a string")
    parts = dict.fromkeys(regions.selected(resident, "resident"))
    for hook in (on_enter, on_exit):
        if hook is not None and not callable(hook):
            raise TypeError(f"on_enter or on_exit is {hook!r}, expected something to call, or None")
    _phases[name] = Phase(name, parts, on_enter, on_exit)


def phase(
    name: str,
    *,
    backup: Backup = None,
    restore: Restore = True,
    timeout: float | None = None,
    memory_timeout: float | None = None,
    reader_timeout: float = READERS_S,
    progress: Progress | None = None,
) -> AbstractContextManager[Transition]:
    """Enters a phase in a with statement: of all regions in any phase, exactly those of this phase are resident.

    Phases do not nest. An inner phase pauses the regions of the outer phase, and they stay paused at its end; a
    RuntimeWarning names them. The end of the with statement calls ``on_exit`` and moves no regions.

    Args:
        name: The name of a phase that ``define_phase()`` has defined.
        backup: Another policy for the regions that pause, as for ``memsaver.switch()``.
        restore: False leaves the contents of the regions that resume undefined, as for ``memsaver.switch()``.
        timeout: Seconds for the transition up to its commit, as for ``memsaver.switch()``. It does not bound
            ``on_enter``. None: no bound.
        memory_timeout: Seconds to wait for memory that others hold, as for ``memsaver.switch()``.
        reader_timeout: Seconds to wait for attached processes, as for ``memsaver.switch()``.
        progress: Called with the bytes copied and the bytes to copy, as for ``memsaver.switch()``.

    Returns:
        A context manager. Its value is the transition into the phase.

    Raises:
        ValueError: The phase is not defined, or one of its tags has no region.
        memsaver.Error: As from ``memsaver.switch()``.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> optimizer = memsaver.region("optimizer", device="cpu", backup="host")
        >>> memsaver.define_phase("rollout", kv)
        >>> memsaver.define_phase("train", optimizer)
        >>> with memsaver.phase("rollout") as moved:
        ...     print(moved.paused, kv.state, optimizer.state)
        ('optimizer',) active paused
    """
    if name not in _phases:
        known = ", ".join(map(repr, sorted(_phases))) or "none"
        raise ValueError(f"there is no phase {name!r}; there are {known}")
    bounds = Bounds(timeout, memory_timeout, reader_timeout)
    if isinstance(backup, str):
        check_backup(backup)
    options: dict[str, Any] = {"backup": backup, "restore": restore, "bounds": bounds, "progress": progress}
    return _entered_phase(_phases[name], options)


@contextmanager
def _entered_phase(entered: Phase, options: dict[str, Any]) -> Iterator[Transition]:
    coming = regions.find([part for part in entered.resident if not _is_closed(part)])
    named = {part for each in _phases.values() for part in each.resident}
    every = regions.all_regions()
    staying = set(coming)
    leaving = [each for each in every if (each in named or each.tag in named) and each not in staying]
    _warn_of_outer(entered, leaving)
    # Tags of guests alone. A tag with regions moves by them: a phase can name some of its regions.
    alone = (_guests.tags() & named) - {each.tag for each in every}
    resident = alone.intersection(entered.resident)
    moved = transition(leaving, coming, pause_guests=alone - resident, resume_guests=resident, **options)
    assert isinstance(moved, Transition)  # the call has waited for it
    if entered.on_enter is not None:
        entered.on_enter()
    try:
        _entered.append(entered)
        yield moved
    finally:
        if entered in _entered:  # no interrupt comes between this and the next call
            _entered.remove(entered)
        if entered.on_exit is not None:
            entered.on_exit()


def _is_closed(part: str | Region) -> bool:
    return isinstance(part, Region) and part._handle.closed


def _warn_of_outer(entered: Phase, leaving: list[Region]) -> None:
    for outer in _entered:
        lost = [each.tag for each in leaving if each in outer.resident or each.tag in outer.resident]
        if lost:
            tags = ", ".join(map(repr, dict.fromkeys(lost)))
            warnings.warn(
                f"phase {entered.name!r} is entered inside phase {outer.name!r} and pauses its regions: {tags}. They "
                f"stay paused when {entered.name!r} is left; leave {outer.name!r} first, or enter it again",
                RuntimeWarning,
                stacklevel=4,  # the with statement, through phase() and its context manager
            )
