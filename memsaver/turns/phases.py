"""Phases of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from memsaver import _guests, policies, regions, trace
from memsaver._adapter import loaded
from memsaver._moves import active
from memsaver.errors import Error
from memsaver.policies import READERS_S, Backup, Bounds, Lazy, Restore, check_backup, those_of
from memsaver.regions import Chosen, Region, Selection
from memsaver.transitions import Transition, TransitionFuture, started, transition
from memsaver.turns import late as late_tags

Hook = Callable[[], object]


@dataclass(frozen=True)
class _Phase:
    """The parts are tags and regions. A tag may be without a region yet."""

    resident: list[str | Region]
    late: list[str | Region]
    lingering: list[str | Region]
    on_enter: Hook | None
    on_exit: Hook | None

    @property
    def parts(self) -> set[str | Region]:
        return {*self.resident, *self.late, *self.lingering}


_phases: dict[str, _Phase] = {}


def define_phase(
    name: str,
    resident: Selection,
    *,
    late: Selection = (),
    lingering: Selection = (),
    on_enter: Hook | None = None,
    on_exit: Hook | None = None,
) -> None:
    """Defines the regions that are resident in a phase.

    A second definition replaces the first. So ``define_phase(name, [])`` removes all regions of a phase. A region that
    was closed leaves the phases that name it as a Region.

    Args:
        name: The name of the phase.
        resident: A tag, a Region, or several of either. A tag needs a region when the phase is entered. Guests of a tag
            come back with the phase, and leave with a phase that does not name their tags.
        late: Regions that are resident too, and resume in the background after the others. The first use waits for
            them: entering the region, ``Region.empty()``, ``Region.wait()``, a replay of a ``memsaver.CUDAGraph`` that
            needs it, and an optimizer with ``memsaver.wait_before_step()``. No other access waits: before ``wait()``
            has returned, a read of its tensors gives other values, and a write is lost or ends the process. An error of
            the resume is raised there and names the phase. The region is paused with its contents. ``timeout`` and
            ``memory_timeout`` of ``phase()`` count anew for this transition. A capture of a graph that is under way at
            its begin makes it fail.
        lingering: Regions of other phases that pause in the background, in one transition with the late ones. Their
            memory does not serve the resident ones. An error is logged, and the regions stay active.
        on_enter: Called after the phase's regions have resumed, late ones apart.
        on_exit: Called at the end of the phase's with statement.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A part is named twice.

    Examples:
        >>> memsaver.define_phase("rollout", ["weights", "kv_cache"])
        >>> memsaver.define_phase("train", "params", late="optimizer", lingering="kv_cache")
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}, expected a string")
    given = [regions.selected(each, option) for option, each in
             (("resident", resident), ("late", late), ("lingering", lingering))]  # fmt: skip
    for at, part in enumerate(every := [part for parts in given for part in parts]):
        if any(_overlap(part, other) for other in every[:at]):
            raise ValueError(f"phase {name!r} names {part!r} twice, expected resident, late or lingering")
    for hook in (on_enter, on_exit):
        if hook is not None and not callable(hook):
            raise TypeError(f"on_enter or on_exit is {hook!r}, expected something to call, or None")
    _phases[name] = _Phase(given[0], given[1], given[2], on_enter, on_exit)


def phase(
    name: str,
    *,
    backup: Backup = None,
    lazy: Lazy = None,
    restore: Restore = True,
    timeout: float | None = None,
    memory_timeout: float | None = None,
    reader_timeout: float = READERS_S,
    progress: bool = False,
) -> AbstractContextManager[Transition]:
    """Enters a phase in a with statement: of all regions in any phase, exactly those of this phase are resident.

    Late and lingering regions (see ``define_phase()``) move in a second transition, which this call begins at its end.

    Phases do not nest: an inner phase pauses the regions of the outer phase. The end of the with statement calls
    ``on_exit`` and moves no regions.

    Args:
        name: The name of a phase that ``define_phase()`` has defined.
        backup: As for ``memsaver.switch()``, of the regions that pause.
        lazy: As for ``memsaver.switch()``, of the regions that pause.
        restore: As for ``memsaver.switch()``, of the regions that resume.
        timeout: Seconds for the transition up to its commit. None: no bound.
        memory_timeout: Seconds to wait for memory that others hold, as for ``memsaver.resume()``.
        reader_timeout: Seconds to wait for attached processes.
        progress: As for ``memsaver.pause()``, of the transition.

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
    if name not in [*_phases]:  # a list: a value without a hash is refused, too
        known = ", ".join(map(repr, sorted(_phases))) or "none"
        raise ValueError(f"there is no phase {name!r}; there are {known}")
    bounds = Bounds(timeout, memory_timeout, reader_timeout)
    if isinstance(backup, str):
        check_backup(backup)
    return _entered_phase(name, bounds, backup, lazy, restore, progress)


@contextmanager
def _entered_phase(
    name: str, bounds: Bounds, backup: Backup, lazy: Lazy, restore: Restore, progress: bool
) -> Iterator[Transition]:
    entered = _phases[name]
    every = regions.all_regions()
    known = regions.known_tags(every)
    coming, coming_late = (_open(each) for each in (entered.resident, entered.late))
    lingering = set(_open([part for part in entered.lingering if isinstance(part, Region) or part in known]))
    named = set[str | Region]().union(*(each.parts for each in _phases.values()))
    staying = {*coming, *coming_late}
    leaving = [each for each in every if (each in named or each.tag in named) and each not in staying]
    # Tags of guests alone. A tag with regions moves by them: a phase can name some of its regions.
    alone = (_guests.tags() & named) - {each.tag for each in every}
    back, back_late = alone.intersection(entered.resident), alone.intersection(entered.late)
    gone_late = (alone - back - back_late).intersection(entered.lingering)
    outward = Chosen([each for each in leaving if each not in lingering], alone - back - back_late - gone_late)
    later = Chosen([each for each in leaving if each in lingering], gone_late)
    inward, inward_late = Chosen(coming, back), Chosen(coming_late, back_late)
    policies.of_call("backup", backup, [*outward.tags, *later.tags])
    policies.of_call("lazy", lazy, [*outward.tags, *later.tags])
    policies.of_call("restore", restore, [*inward.tags, *inward_late.tags])
    if (torch := loaded()) is not None:  # before anything moves
        torch.check_pausable(active(later.regions), None)
    pausing: dict[str, Any] = {"backup": those_of(outward.tags, backup), "lazy": those_of(outward.tags, lazy)}
    moved = transition(outward, inward, bounds, **pausing, restore=those_of(inward.tags, restore), progress=progress)
    late_tags.forget([*leaving, *staying])
    if later.tags or inward_late.tags:
        pausing = {"backup": those_of(later.tags, backup), "lazy": those_of(later.tags, lazy)}
        try:
            future = started(later, inward_late, bounds, **pausing, restore=those_of(inward_late.tags, restore))
        except Error as error:  # a thread has entered a lingering region meanwhile
            future = TransitionFuture()
            future.set_exception(error)
        late_tags.expect(name, future, coming_late)
    if entered.on_enter is not None:
        entered.on_enter()
    if (writer := trace.active) is not None:
        writer.event("B", "phase", name, track="phases")
    try:
        yield moved
    finally:
        if writer is not None:
            writer.event("E", "phase", name, track="phases")
        if entered.on_exit is not None:
            entered.on_exit()


def _overlap(one: str | Region, other: str | Region) -> bool:
    """Whether two parts name the same regions."""
    if isinstance(one, Region) and isinstance(other, Region):
        return one is other
    return (one if isinstance(one, str) else one.tag) == (other if isinstance(other, str) else other.tag)


def _open(parts: Iterable[str | Region]) -> list[Region]:
    return regions.find([part for part in parts if isinstance(part, str) or not part._handle.closed])
