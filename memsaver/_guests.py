"""Guests: objects with resources outside of regions. They leave in a pause and come back in a resume."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from memsaver._arguments import check_tag, several
from memsaver.errors import Error, GuestError, WaitTimeoutError

log = logging.getLogger("memsaver")


class Guest:
    """Base class of guests, which leave before regions pause and come back after they have resumed.

    A guest holds resources outside of regions, such as communicators, workspaces or caches.

    A guest is away exactly while all of its tags are paused. A tag with regions is paused if all of its regions are. A
    tag without regions is paused by a pause that names it or that names no tags, until a resume does the same.

    Of several guests, the one with the smallest ``order`` leaves first and comes back last. Guests of one order leave
    in the order in which they were registered.

    Derived classes override ``leave()`` and ``come_back()``, and ``prepare()`` and ``nbytes`` if they can. The library
    calls one guest at a time, in the thread of the transition. These methods must not call ``memsaver.pause()``,
    ``resume()`` or ``switch()`` for tags of guests: that raises memsaver.Error.

    Args:
        name: The name in errors and in ``memsaver.stats()``.
        tags: A tag, or several. Regions need not have them.
        order: Its place among the guests.

    Attributes:
        name: As above.
        tags: As above.
        order: As above.

    Examples:
        >>> class Connections(memsaver.Guest):
        ...     def leave(self):
        ...         print("close connections")
        ...     def come_back(self):
        ...         print("open connections")
        >>> connections = Connections("connections", tags="kv_cache")
        >>> memsaver.register(connections)
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> done = memsaver.pause("kv_cache")
        close connections
        >>> done = memsaver.resume("kv_cache")
        open connections
        >>> memsaver.unregister(connections)
    """

    name: str
    tags: tuple[str, ...]
    order: int

    def __init__(self, name: str, tags: str | Iterable[str], *, order: int = 0) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"name is {name!r}, expected a string that is not empty")
        if isinstance(order, bool) or not isinstance(order, int):
            raise TypeError(f"order is {order!r}, expected an integer")
        self.name = name
        self.tags = (tags,) if isinstance(tags, str) else tuple(dict.fromkeys(several(tags, "tags")))
        self.order = order
        if not self.tags:
            raise ValueError(f"tags is {tags!r}, expected at least one tag")
        for tag in self.tags:
            check_tag(tag)

    def prepare(self) -> None:
        """Refuses a pause that ``leave()`` could not complete. This method does nothing.

        It runs in the first half of a pause, before memory is reserved. The pause may still be aborted, and the guest
        is not told. So an override either checks, or releases resources that refill by themselves.

        Raises:
            Exception: The guest cannot leave now. The pause raises GuestError, and nothing has changed.
        """

    def leave(self) -> None:
        """Releases the resources of the guest. Regions of the pause have stopped all work and are not yet unmapped.

        Raises:
            Exception: The guest could not leave, and is as it was. The pause raises GuestError, the guests that have
                left come back, and the regions stay active. After an interrupt, such as KeyboardInterrupt, the library
                calls ``come_back()`` of this guest as well.
        """
        raise NotImplementedError(f"{type(self).__name__}.leave() is missing, expected an override")

    def come_back(self) -> None:
        """Takes the resources again that ``leave()`` released. The regions of the resume are active.

        Raises:
            Exception: The guest could not come back, and is still away. The resume raises GuestError. Another resume
                calls this method again, and then the guests that have not come back yet.
        """
        raise NotImplementedError(f"{type(self).__name__}.come_back() is missing, expected an override")

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the guest holds now, as far as it can tell. 0 by default."""
        return 0


@dataclass
class _Entry:
    guest: Guest
    number: int
    state: str = "here"  # "leaving", "away" or "coming back"
    paused: set[str] = field(default_factory=set)  # of its tags

    @property
    def away(self) -> bool:
        return self.state == "away"

    @property
    def all_paused(self) -> bool:
        return self.paused >= set(self.guest.tags)


_entries: list[_Entry] = []  # in the order in which the guests leave
_registry = threading.Lock()
_registered = 0

# Held while guests leave or come back. Python code that takes it holds no other lock of the library.
_moving = threading.Lock()
_mover: int | None = None  # the thread that holds _moving


def register(guest: Guest) -> None:
    """Adds a guest: from now on it leaves and comes back with its tags. It counts as being here.

    Args:
        guest: The guest.

    Raises:
        TypeError: ``guest`` is not a ``memsaver.Guest``.
        ValueError: A guest of this name is registered.

    Examples:
        >>> class Cache(memsaver.Guest):
        ...     def leave(self):
        ...         print("leave")
        ...     def come_back(self):
        ...         print("come back")
        >>> cache = Cache("cache", tags="cache")
        >>> memsaver.register(cache)
        >>> memsaver.pause("cache").paused
        leave
        ('cache',)
        >>> memsaver.unregister(cache)
    """
    global _registered
    if not isinstance(guest, Guest):
        raise TypeError(f"guest is {guest!r}, expected a memsaver.Guest")
    with _registry:
        if any(each.guest.name == guest.name for each in _entries):
            raise ValueError(f"there is a guest {guest.name!r}, expected another name, or unregister() of that guest")
        _registered += 1
        _entries.append(_Entry(guest, _registered))
        _entries.sort(key=lambda each: (each.guest.order, each.number))


def unregister(guest: Guest) -> None:
    """Removes a guest. If it is away, it stays away: its ``come_back()`` is not called.

    Args:
        guest: The guest.

    Raises:
        ValueError: The guest is not registered.

    Examples:
        >>> class Cache(memsaver.Guest):
        ...     def leave(self):
        ...         print("leave")
        >>> cache = Cache("cache", tags="cache")
        >>> memsaver.register(cache)
        >>> memsaver.unregister(cache)
        >>> [each.name for each in memsaver.stats().guests]
        []
    """
    with _registry:
        for each in _entries:
            if each.guest is guest:
                _entries.remove(each)
                return
    raise ValueError(f"guest {getattr(guest, 'name', guest)!r} is not registered")


def tags() -> set[str]:
    """The tags of all guests."""
    with _registry:
        return {tag for each in _entries for tag in each.guest.tags}


def rows() -> list[dict[str, Any]]:
    """The guests, one dictionary each, in the order in which they leave. ``nbytes`` is None if the guest raises."""
    with _registry:
        found = list(_entries)
    return [
        {
            "name": each.guest.name,
            "tags": each.guest.tags,
            "order": each.guest.order,
            "state": each.state,
            "nbytes": _nbytes(each.guest),
        }
        for each in found
    ]


def _nbytes(guest: Guest) -> int | None:
    try:
        return int(guest.nbytes)
    except Exception as error:
        log.debug("guest %r does not know its bytes: %s", guest.name, error)
        return None


class Moves:
    """The guests of one transition.

    ``pausing``, ``resuming``: called when the guests are about to move. They return the tags of which all regions are
    about to be paused, and the tags that resume. ``enter``: called with each stage, and the name of the guest.
    """

    def __init__(
        self,
        pausing: Callable[[], Set[str]],
        resuming: Callable[[], Set[str]],
        enter: Callable[[str, str | None], object],
        until: float | None = None,
    ) -> None:
        self._pausing, self._resuming, self._enter, self._until = pausing, resuming, enter, until
        self.paused: set[str] = set()  # of the tags that the transition pauses, those of guests that left
        self.resumed: set[str] = set()  # of the tags that it resumes, those of guests that came back
        self.seconds = 0.0  # the time that guests took
        self._before: list[tuple[_Entry, set[str], bool]] = []  # of the guests concerned, the paused tags, and if away

    def prepare(self) -> None:
        """Asks the guests that will leave. Raises GuestError. Nothing has changed then."""
        if not _entries:
            return
        pausing, resuming = self._pausing(), self._resuming()
        for each in _concerned(pausing):
            after = (each.paused | pausing) - resuming
            if not each.away and after >= set(each.guest.tags):
                self._call(each, "prepare", each.guest.prepare)

    def leave(self) -> None:
        """Guests leave. If this raises, they are as they were."""
        if not _entries:
            return
        pausing, resuming = self._pausing(), self._resuming()
        if not _concerned(pausing | resuming):
            return
        with self._alone(self._until):
            concerned = _concerned(pausing | resuming)
            self._before = [(each, set(each.paused), each.away) for each in concerned]
            try:
                for each in concerned:
                    each.paused = (each.paused | (pausing & set(each.guest.tags))) - resuming
                    if not each.away and each.all_paused:
                        self._leave(each)
                        self.paused |= pausing & set(each.guest.tags)
            except BaseException as error:
                before, self._before = self._before, []
                for each, paused, _ in before:
                    each.paused = paused
                self._undo([each for each, _, was_away in before if each.away and not was_away], error)
                raise

    def settle(self, away: Mapping[str, bool], committed: bool, error: BaseException) -> None:
        """The transition has failed after the guests left. Guests whose tags are not all paused come back.

        ``away``: by tag of regions, whether all of them are paused now. ``committed``: whether the failure came after
        the commit.
        """
        before, self._before = self._before, []
        if not before:
            return
        pausing, resuming = self._pausing(), self._resuming()
        with self._alone(None):
            for each, paused, _ in before:
                each.paused = {
                    tag
                    for tag in each.guest.tags
                    if (tag in paused and (tag not in resuming or away.get(tag, True)))
                    or (tag in pausing and away.get(tag, committed))
                }
            self._undo(
                [each for each, _, was_away in before if each.away and not was_away and not each.all_paused], error
            )

    def come_back(self) -> None:
        """Guests come back, in reverse order, up to the first that raises. A repeated resume continues."""
        resuming = self._resuming()
        if not _concerned(resuming):
            return
        with self._alone(None):
            for each in reversed(_concerned(resuming)):
                if each.away and not each.all_paused:
                    self._come_back(each)
                    self.resumed |= resuming & set(each.guest.tags)

    def _leave(self, each: _Entry) -> None:
        each.state = "leaving"
        try:
            self._call(each, "leave", each.guest.leave)
        except GuestError:
            each.state = "here"
            raise
        except BaseException:  # an interrupt: the guest may have released a part
            each.state = "away"
            raise
        each.state = "away"

    def _come_back(self, each: _Entry) -> None:
        each.state = "coming back"
        try:
            self._call(each, "come back", each.guest.come_back)
        except BaseException:
            each.state = "away"
            raise
        each.state = "here"

    def _undo(self, left: list[_Entry], cause: BaseException) -> None:
        for each in reversed(left):
            try:
                self._come_back(each)
            except GuestError as error:
                text = f"after this failure {error}; it is away until a resume of its tags"
                log.error("%s", text)
                if isinstance(cause, Error):
                    cause.args = (f"{cause}; {text}",)

    def _call(self, each: _Entry, stage: str, method: Callable[[], object]) -> None:
        self._enter(f"guests {stage}", each.guest.name)
        try:
            method()
        except Exception as error:
            raise GuestError(
                f"guest {each.guest.name!r} could not {stage}: {type(error).__name__}: {error}",
                guest=each.guest.name,
                stage=stage,
            ) from error

    @contextmanager
    def _alone(self, until: float | None) -> Iterator[None]:
        """No other transition moves guests in the block."""
        global _mover
        if _mover == threading.get_ident():
            raise Error("a guest that leaves or comes back called a transition of guests, expected one without")
        since = time.monotonic()
        self._enter("guests", None)
        if not _moving.acquire(timeout=-1 if until is None else max(0.0, until - since)):
            waited = time.monotonic() - since
            text = "the guests of another transition are leaving or coming back"
            raise WaitTimeoutError(
                f"{text} (stage 'guests', after {waited:.2f} s); nothing has changed", stage="guests", waited_s=waited
            )
        _mover = threading.get_ident()
        try:
            yield
        finally:
            _mover = None
            _moving.release()
            self.seconds += time.monotonic() - since


def _concerned(chosen: Set[str]) -> list[_Entry]:
    """The guests with one of these tags, in the order in which they leave."""
    with _registry:
        return [each for each in _entries if not chosen.isdisjoint(each.guest.tags)]
