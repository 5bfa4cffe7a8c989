"""Guests: objects with resources outside of regions. They leave in a pause and come back in a resume."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from memsaver.errors import Error, GuestError, WaitTimeoutError
from memsaver.policies import check_tag, several

log = logging.getLogger("memsaver")


class Guest:
    """Base class of guests, which leave before regions pause and come back after they have resumed.

    A guest holds resources outside of regions, such as communicators, workspaces or caches. It is away exactly while
    all of its tags are paused. A tag with regions is paused if all of its regions are. A tag without regions is paused
    by a pause that names it or that names no tags, until a resume does the same.

    Derived classes override ``leave()`` and ``come_back()``, and ``prepare()`` and ``nbytes`` if they can. The library
    calls one guest at a time, in the thread of the transition. These methods must not start a transition of tags of
    guests. ``prepare()`` and ``leave()`` must not start one of tags that move in the transition under way. Both raise
    memsaver.Error.

    Args:
        name: The name in errors and in ``memsaver.stats()``.
        tags: A tag, or several. Regions need not have them.
        order: The guest with the smallest order leaves first and comes back last. Guests of one order leave in the
            order in which they were registered.

    Examples:
        >>> class Connections(memsaver.Guest):
        ...     def leave(self):
        ...         print("close connections")
        ...     def come_back(self):
        ...         print("open connections")
        >>> connections = Connections("connections", tags="kv_cache")
        >>> memsaver.register(connections)
        >>> done = memsaver.pause("kv_cache"), memsaver.resume("kv_cache")
        close connections
        open connections
        >>> memsaver.unregister(connections)
    """

    def __init__(self, name: str, tags: str | Iterable[str], *, order: int = 0) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"name is {name!r}, expected a string that is not empty")
        if isinstance(order, bool) or not isinstance(order, int):
            raise TypeError(f"order is {order!r}, expected an integer")
        self.name, self.order = name, order
        self.tags = (tags,) if isinstance(tags, str) else tuple(dict.fromkeys(several(tags, "tags")))
        if not self.tags:
            raise ValueError(f"tags is {tags!r}, expected at least one tag")
        for tag in self.tags:
            check_tag(tag)

    def prepare(self) -> None:
        """Raises an error if the guest cannot leave now: the pause raises GuestError, and nothing has changed.

        It runs in the first half of a pause, before memory is reserved. The pause may still be aborted, and the guest
        is not told. So an override either checks, or releases resources that refill by themselves.
        """

    def leave(self) -> None:
        """Releases the resources of the guest. Regions of the pause have stopped all work and are not yet unmapped.

        If it raises an error, it is as it was: the pause raises GuestError, the guests that have left come back, and
        the regions stay active. After an interrupt, ``come_back()`` of this guest is called as well.
        """
        raise NotImplementedError(f"{type(self).__name__}.leave() is missing, expected an override")

    def come_back(self) -> None:
        """Takes the resources again that ``leave()`` released. The regions of the resume are active.

        If it raises an error, it is still away: the resume raises GuestError. Another resume calls this method again,
        and then those of the guests that have not come back yet.
        """
        raise NotImplementedError(f"{type(self).__name__}.come_back() is missing, expected an override")

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the guest holds now, as far as it can tell. 0 by default."""
        return 0


@dataclass
class _Entry:
    guest: Guest
    place: tuple[int, int]  # among the guests: its order, and the number of its registration
    state: str = "here"  # "leaving", "away" or "coming back"
    paused: set[str] = field(default_factory=set)  # of its tags

    @property
    def away(self) -> bool:
        return self.state == "away"

    @property
    def all_paused(self) -> bool:
        return self.paused >= set(self.guest.tags)


# By name. Each change is one call of the dictionary, so that there is no lock that a fork or an interrupt could leave.
_entries: dict[str, _Entry] = {}
_numbers = itertools.count(1)

# The transitions whose guests leave or come back: the first one moves them, the others wait. Each adds and removes
# itself by one call, so that an interrupt at any place leaves none of them here.
_movers: list[Moves] = []
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05  # between looks at it

_calling = threading.local()  # ``tags``: during a method of a guest, tags whose transition would wait for the method


def register(guest: Guest) -> None:
    """Adds a guest: from now on it leaves and comes back with its tags. It counts as being here.

    Args:
        guest: The guest.

    Raises:
        TypeError: ``guest`` is not a ``memsaver.Guest``, or its class does not override ``leave()``.
        ValueError: A guest of this name is registered.

    Examples:
        >>> class Cache(memsaver.Guest):
        ...     def leave(self):
        ...         print("leave")
        >>> cache = Cache("cache", tags="cache")
        >>> memsaver.register(cache)
        >>> done = memsaver.pause("cache")
        leave
        >>> memsaver.unregister(cache)
    """
    if not isinstance(guest, Guest):
        raise TypeError(f"guest is {guest!r}, expected a memsaver.Guest")
    if type(guest).leave is Guest.leave:
        raise TypeError(f"guest {guest.name!r} is a {type(guest).__name__} without leave(), expected an override")
    made = _Entry(guest, (guest.order, next(_numbers)))
    if _entries.setdefault(guest.name, made) is not made:
        raise ValueError(f"there is a guest {guest.name!r}, expected another name, or unregister() of that guest")


def unregister(guest: Guest) -> None:
    """Removes a guest. If it is away, it stays away: its ``come_back()`` is not called.

    Args:
        guest: The guest.

    Raises:
        ValueError: The guest is not registered.

    Examples:
        >>> workspaces = memsaver.guests.Workspaces("params")
        >>> memsaver.register(workspaces)
        >>> memsaver.unregister(workspaces)
    """
    name = getattr(guest, "name", None)
    found = _entries.get(name) if isinstance(name, str) else None
    if found is None or found.guest is not guest:
        raise ValueError(f"guest {guest if name is None else name!r} is not registered")
    _entries.pop(found.guest.name, None)


def _in_order() -> list[_Entry]:
    """The guests in the order in which they leave."""
    return sorted(_entries.values(), key=lambda each: each.place)


def tags() -> set[str]:
    """The tags of all guests."""
    return {tag for each in list(_entries.values()) for tag in each.guest.tags}


def check_caller(chosen: Iterable[str]) -> None:
    """Raises memsaver.Error if a method of a guest calls a transition of these tags that would wait for itself."""
    if (own := getattr(_calling, "tags", None)) is not None and not (own | tags()).isdisjoint(chosen):
        raise Error(
            "a method of a guest called a transition of guests, or of tags that move in the transition under way, "
            "expected one of other tags"
        )


def rows() -> list[dict[str, Any]]:
    """The guests, one dictionary each, in the order in which they leave. ``nbytes`` is None if the guest raises."""
    found = [(each.guest, each.state) for each in _in_order()]
    return [
        {"name": each.name, "tags": each.tags, "order": each.order, "state": state, "nbytes": _nbytes(each)}
        for each, state in found
    ]


def _nbytes(guest: Guest) -> int | None:
    try:
        return int(guest.nbytes)
    except Exception as error:
        log.debug("guest %r does not know its bytes: %s", guest.name, error)
        return None


class Moves:
    """The guests of one transition.

    ``resuming``: the tags that resume. ``enter``: called with each stage, and the name of the guest. ``until``: the
    bound of the wait for guests of other transitions; after a failure this wait has none. ``settled``: returns, by tag
    of regions, whether all of them are paused now, without tags of which regions move. ``pausing`` of the methods: the
    tags of which all regions are about to be paused.
    """

    def __init__(
        self,
        resuming: Set[str],
        enter: Callable[[str, str | None], object],
        settled: Callable[[], Mapping[str, bool]],
        until: float | None = None,
    ) -> None:
        self._resuming, self._enter, self._settled, self._until = resuming, enter, settled, until
        self._moving: Set[str] = resuming  # from prepare() on also the tags that pause
        self.paused: set[str] = set()  # of the tags that the transition pauses, those of guests that left
        self.resumed: set[str] = set()  # of the tags that it resumes, those of guests that came back
        self.seconds = 0.0  # the time that guests took
        self._before: list[tuple[_Entry, set[str]]] = []  # of the guests concerned, the paused tags

    def prepare(self, pausing: Set[str]) -> None:
        """Asks the guests that will leave. Raises GuestError. Nothing has changed then."""
        self._moving = pausing | self._resuming
        for each, paused in self._paused(pausing):
            if not each.away and self._after(each, paused, pausing) >= set(each.guest.tags):
                self._call(each, "prepare", each.guest.prepare)

    def leave(self, pausing: Set[str]) -> None:
        """Guests leave. If this raises, ``settle()`` has to follow."""

        def leave() -> None:
            self._before = self._paused(pausing | self._resuming)
            for each, paused in self._before:
                each.paused = self._after(each, paused, pausing)
                if not each.away and each.all_paused:
                    self._leave(each)
                    self.paused |= pausing & set(each.guest.tags)

        if _concerned(pausing | self._resuming):
            self._alone(leave, self._until, "nothing has changed")

    def settle(self, pausing: Set[str], away: Mapping[str, bool], committed: bool, error: BaseException) -> None:
        """The transition has failed. Guests that are away come back if their tags are not all paused.

        ``away``: by tag of regions, whether all of them are paused now. ``committed``: whether the failure came after
        the commit. The error names guests that cannot come back.
        """
        before, self._before = self._before, []

        def settle() -> None:
            for each, paused in before:
                stay = {tag for tag in paused if tag not in self._resuming or away.get(tag, True)}
                each.paused = stay | {tag for tag in pausing & set(each.guest.tags) if away.get(tag, committed)}
            for each, _ in reversed(before):
                if not each.away or each.all_paused:
                    continue
                try:
                    self._come_back(each)
                except GuestError as second:
                    text = f"after this failure {second}; it is away until a resume of its tags"
                    log.error("%s", text)
                    if isinstance(error, Error):
                        error.args = (f"{error}; {text}",)

        if before:
            self._alone(settle)

    def come_back(self) -> None:
        """Guests come back, in reverse order, up to the first that raises. A repeated resume continues."""

        def come_back() -> None:
            for each in reversed(_concerned(self._resuming)):
                if each.away and not each.all_paused:  # another thread may have paused the tags again
                    self._come_back(each)
                    self.resumed |= self._resuming & set(each.guest.tags)

        if _concerned(self._resuming):
            self._alone(come_back, self._until, "the regions are active, and another resume continues")

    def _paused(self, chosen: Set[str]) -> list[tuple[_Entry, set[str]]]:
        """The guests with one of these tags, each with those of its tags that are paused now.

        Regions may have been closed, made or paused before, without a transition that concerned the guest.
        """
        concerned = _concerned(chosen)
        settled = self._settled() if concerned else {}
        return [(each, {tag for tag in each.guest.tags if settled.get(tag, tag in each.paused)}) for each in concerned]

    def _after(self, each: _Entry, paused: Set[str], pausing: Set[str]) -> set[str]:
        """The tags of a guest that are paused after the transition. ``paused``: those before it."""
        return {*paused, *(pausing & set(each.guest.tags))} - self._resuming

    def _leave(self, each: _Entry) -> None:
        each.state, after = "leaving", "away"  # after an interrupt, too: the guest may have released a part
        try:
            self._call(each, "leave", each.guest.leave)
        except GuestError:
            after = "here"
            raise
        finally:
            each.state = after

    def _come_back(self, each: _Entry) -> None:
        each.state, after = "coming back", "away"
        try:
            self._call(each, "come back", each.guest.come_back)
            after = "here"
        finally:
            each.state = after

    def _call(self, each: _Entry, stage: str, method: Callable[[], object]) -> None:
        self._enter(f"guests {stage}", each.guest.name)
        try:
            try:
                _calling.tags = frozenset() if stage == "come back" else self._moving
                method()
            finally:  # also after an interrupt
                _calling.tags = None
        except Exception as error:
            text = f"guest {each.guest.name!r} could not {stage}: {type(error).__name__}: {error}"
            raise GuestError(text, guest=each.guest.name, stage=stage) from error

    def _alone(self, move: Callable[[], None], until: float | None = None, state: str = "") -> None:
        """Calls a function while no other transition moves guests. ``state``: the end of the error at the bound."""
        since = time.monotonic()
        self._enter("guests", None)
        try:
            _movers.append(self)
            while _movers[0] is not self:
                now = time.monotonic()
                if until is not None and now >= until:
                    text = "the guests of another transition are leaving or coming back"
                    text = f"{text} (stage 'guests', after {now - since:.2f} s); {state}"
                    raise WaitTimeoutError(text, stage="guests", waited_s=now - since)
                pace = min(_LONGEST_S, max(_SHORTEST_S, (now - since) / 10))
                time.sleep(pace if until is None else min(pace, until - now))
            move()
        finally:
            if self in _movers:  # no interrupt comes between this and the next call
                _movers.remove(self)
            self.seconds += time.monotonic() - since


def _concerned(chosen: Set[str]) -> list[_Entry]:
    """The guests with one of these tags, in the order in which they leave."""
    return [each for each in _in_order() if not chosen.isdisjoint(each.guest.tags)] if _entries else []
