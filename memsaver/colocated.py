"""What an actor with regions offers to a group: whole transitions, and a pause in two halves. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import memsaver
from memsaver import _core, regions
from memsaver.errors import Error
from memsaver.regions import Prepared, Tags
from memsaver.transitions import Transition

log = logging.getLogger("memsaver")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ready:
    """What an actor answers to ``colocated_prepare``."""

    halves: bool  # it pauses in two halves; otherwise its pause() is to be called
    moves: bool  # something is resident that is about to leave
    pooled: bool  # the memory of all regions concerned is in a shared pool


class Colocated:
    """Base of an actor with regions: ``@ray.remote class Engine(Colocated)``. Everything it returns or raises pickles.

    A group calls :meth:`resume`, and pauses in two halves, ``colocated_prepare`` and ``colocated_commit``, so that all
    ranks pause or none. Override :meth:`colocated_drain` for what has to happen before regions leave, and
    :meth:`resume` for what has to be rebuilt after. An actor that overrides :meth:`pause` is paused by that, in one
    piece, once all others are prepared. Actors with ``async def`` methods derive from :class:`AsyncColocated`.
    """

    def pause(self, tags: Tags = None, backup: str | None = None) -> Transition:
        """Drains, then see :func:`memsaver.pause`."""
        names = _names(tags)
        if names:
            self.colocated_drain(names)
        return memsaver.pause(names, backup=backup)

    def resume(self, tags: Tags = None, restore: bool = True, timeout: float = 0.0) -> Transition:
        """See :func:`memsaver.resume`."""
        return memsaver.resume(tags, restore=restore, timeout=timeout)

    def switch(
        self,
        pause: Tags = (),
        resume: Tags = (),
        backup: str | None = None,
        restore: bool = True,
        timeout: float = 0.0,
    ) -> Transition:
        """Drains what it pauses, then see :func:`memsaver.switch`."""
        names = _names(pause)
        if names:
            self.colocated_drain(names)
        return memsaver.switch(pause=names, resume=resume, backup=backup, restore=restore, timeout=timeout)

    def stats(self) -> dict[str, Any]:
        """See :func:`memsaver.stats`."""
        return memsaver.stats()

    def colocated_drain(self, tags: Sequence[str]) -> None:
        """Comes before regions of these tags leave, in every kind of pause. To be overridden; this one does nothing.

        An error here is the pause's. A group whose other ranks fail calls :meth:`colocated_abort` afterwards.
        """

    def colocated_prepare(self, tags: Sequence[str], coming: Sequence[str] = ()) -> Ready:
        """Drains, and reserves all that a pause of ``tags`` needs. ``coming``: tags that will resume in the same turn.

        A leaving tag whose regions are still to be made is left out. What an earlier group left prepared is taken back.
        Raises what pause() raises before anything changes, and ValueError for a coming tag that no region has.
        """
        halves = _halves(self)
        halves.abort()
        ready = _ready(self, Colocated, tags, coming)
        if ready.halves:
            names = _existing(tags)
            if names:
                self.colocated_drain(names)
            halves.prepare(names)
        return ready

    def colocated_commit(self) -> Transition:
        """Goes through with what is prepared. Raises memsaver.Error where nothing is, as after a restart."""
        return _halves(self).commit()

    def colocated_abort(self) -> None:
        """Takes back what is prepared, if anything is. To be extended where a drain has to be taken back, too."""
        _halves(self).abort()

    def colocated_pause(self, tags: Sequence[str]) -> Transition:
        """Pauses in one piece what must leave for a phase. A tag whose regions are still to be made is left out."""
        return self.pause(_existing(tags))

    def colocated_failed(self, role: str, rank: int, error: Exception) -> None:
        """Another rank could not follow into a phase. To be overridden; this one logs."""
        log.warning("%s %d failed in a transition: %s", role, rank, error)


class AsyncColocated:
    """:class:`Colocated` for async actors: the event loop goes on serving while transitions run in threads."""

    async def pause(self, tags: Tags = None, backup: str | None = None) -> Transition:
        """Drains, then see :func:`memsaver.pause`."""
        names = _names(tags)
        if names:
            await self.colocated_drain(names)
        return await memsaver.pause(names, backup=backup, wait=False)

    async def resume(self, tags: Tags = None, restore: bool = True, timeout: float = 0.0) -> Transition:
        """See :func:`memsaver.resume`."""
        return await memsaver.resume(tags, restore=restore, timeout=timeout, wait=False)

    async def switch(
        self,
        pause: Tags = (),
        resume: Tags = (),
        backup: str | None = None,
        restore: bool = True,
        timeout: float = 0.0,
    ) -> Transition:
        """Drains what it pauses, then see :func:`memsaver.switch`."""
        names = _names(pause)
        if names:
            await self.colocated_drain(names)
        return await memsaver.switch(
            pause=names, resume=resume, backup=backup, restore=restore, timeout=timeout, wait=False
        )

    async def stats(self) -> dict[str, Any]:
        """See :func:`memsaver.stats`."""
        return await _in_thread(memsaver.stats)

    async def colocated_drain(self, tags: Sequence[str]) -> None:
        """See :meth:`Colocated.colocated_drain`."""

    async def colocated_prepare(self, tags: Sequence[str], coming: Sequence[str] = ()) -> Ready:
        """See :meth:`Colocated.colocated_prepare`."""
        halves = _halves(self)
        await _in_thread(halves.abort)
        ready = _ready(self, AsyncColocated, tags, coming)
        if ready.halves:
            names = _existing(tags)
            if names:
                await self.colocated_drain(names)
            await _in_thread(lambda: halves.prepare(names))
        return ready

    async def colocated_commit(self) -> Transition:
        """See :meth:`Colocated.colocated_commit`."""
        return await _in_thread(_halves(self).commit)

    async def colocated_abort(self) -> None:
        """See :meth:`Colocated.colocated_abort`."""
        await _in_thread(_halves(self).abort)

    async def colocated_pause(self, tags: Sequence[str]) -> Transition:
        """See :meth:`Colocated.colocated_pause`."""
        return await self.pause(_existing(tags))

    async def colocated_failed(self, role: str, rank: int, error: Exception) -> None:
        """See :meth:`Colocated.colocated_failed`."""
        log.warning("%s %d failed in a transition: %s", role, rank, error)


class _Halves:
    """What an actor has prepared and not yet committed: one pause at most.

    The lock is held over a whole step: an abort that comes while an async actor still prepares finds the result.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None

    def prepare(self, names: Sequence[str]) -> None:
        with self._lock:
            self._abort()
            self._prepared = regions.prepare_pause(names)

    def commit(self) -> Transition:
        with self._lock:
            prepared, self._prepared = self._prepared, None
            if prepared is None:
                raise Error("nothing is prepared here: it was taken back, or this actor has started anew since")
            return prepared.commit()

    def abort(self) -> None:
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.abort()


def _halves(actor: object) -> _Halves:
    """The actor's own. Not made by an __init__, which those that derive need not call."""
    return actor.__dict__.setdefault("_colocated_halves", _Halves())


def _ready(actor: object, base: type, tags: Sequence[str], coming: Sequence[str]) -> Ready:
    # Ray's tracing wraps the methods of an actor's class.
    whole = any(
        inspect.unwrap(getattr(type(actor), method)) is not getattr(base, method)
        for method in ("pause", "colocated_pause")
    )
    regions.find(coming)  # what cannot come is said before anything leaves
    concerned = [each for each in regions.all_regions() if each.tag in tags or each.tag in coming]
    return Ready(
        halves=not whole,
        moves=any(each.tag in tags and each.state != "paused" for each in concerned),
        pooled=all(_core.in_pool(device) for device in {each.device for each in concerned}),
    )


def _names(tags: Tags) -> list[str]:
    """Raises as regions.find() does."""
    return list(dict.fromkeys(each.tag for each in regions.find(tags)))


def _existing(tags: Sequence[str]) -> list[str]:
    known = {each.tag for each in regions.all_regions()}
    return [tag for tag in tags if tag in known]


async def _in_thread(function: Callable[[], _T]) -> _T:
    """Not one of the event loop's few threads, which may all be busy. A caller that is cancelled leaves it running."""
    return await asyncio.wrap_future(regions.in_thread(function, "memsaver colocated"))
