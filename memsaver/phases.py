"""Phases: by name, which regions are resident."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from memsaver import regions
from memsaver.transitions import Progress, Transition

Hook = Callable[[], object]


@dataclass(frozen=True)
class Phase:
    name: str
    resident: tuple[str, ...]
    on_enter: Hook | None
    on_exit: Hook | None


_phases: dict[str, Phase] = {}


def define_phase(name: str, resident: Iterable[str], on_enter: Hook | None = None, on_exit: Hook | None = None) -> None:
    """Says which tags are resident in a phase; a second definition takes the place of the first.

    ``on_enter`` runs after the phase's regions are there, ``on_exit`` when the phase is left. The regions need not
    exist yet. Raises TypeError for arguments of other kinds.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}, expected a string")
    tags = tuple(regions.several(resident, "resident"))
    for hook in (on_enter, on_exit):
        if hook is not None and not callable(hook):
            raise TypeError(f"on_enter or on_exit is {hook!r}, expected something to call, or None")
    _phases[name] = Phase(name, tags, on_enter, on_exit)


@contextmanager
def phase(name: str, *, timeout: float = 0.0, progress: Progress | None = None) -> Iterator[Transition]:
    """Enters a phase: of all regions that any phase names, exactly this one's are resident. Yields the transition.

    Leaving runs ``on_exit`` and nothing else: the next phase says what goes. ``timeout``: seconds to wait for memory.
    ``progress`` as for :func:`memsaver.pause`.

    Raises ValueError for a phase that is not defined or a resident tag without a region, and what switch() raises.
    """
    if name not in _phases:
        known = ", ".join(map(repr, sorted(_phases))) or "none"
        raise ValueError(f"there is no phase {name!r}; there are {known}")
    entered = _phases[name]
    named = {tag for each in _phases.values() for tag in each.resident}
    existing = {each.tag for each in regions.all_regions()}
    leaving = sorted((named - set(entered.resident)) & existing)
    moved = regions.switch(pause=leaving, resume=entered.resident, timeout=timeout, progress=progress)
    if entered.on_enter is not None:
        entered.on_enter()
    try:
        yield moved
    finally:
        if entered.on_exit is not None:
            entered.on_exit()
