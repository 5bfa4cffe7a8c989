"""Base classes of members with regions: transitions in one call, and a pause by prepare and commit."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import memsaver
from memsaver import _core, _guests, regions
from memsaver._moves import Move, has_contents, is_rebuilt
from memsaver._results import in_thread
from memsaver.errors import Error, WaitTimeoutError
from memsaver.policies import READERS_S, Backup, Bounds, Derived, Lazy, Restore, those_of
from memsaver.regions import Selection as Tags
from memsaver.transitions import Transition, prepare_pause
from memsaver.turns import late

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ready:
    """The result of ``colocated_prepare()``: the actor has prepared its part of a turn.

    Attributes:
        moves: Whether a region that is to pause is resident.
        pooled: Whether the memory of all regions in the turn comes from shared pools, and no guest moves in it.
        discarded: Of the tags that are to resume, those whose contents an earlier pause discarded.
        derived: Of the tags to rebuild in a resume, each source: the tag, the tag of the source, and ``"active"``, or
            ``"kept"`` if a resume brings its contents, or ``"lost"``.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> memsaver.ray.Colocated().colocated_prepare(["kv_cache"])
        Ready(moves=True, pooled=False, discarded=(), derived=())
    """

    moves: bool
    pooled: bool
    discarded: tuple[str, ...] = ()
    derived: tuple[tuple[str, str, str], ...] = ()
    _active: tuple[str, ...] | None = field(default=None, repr=False)  # tags to resume that are active already

    def _resumes(self, tags: Iterable[str]) -> list[str]:
        """Those of these tags that the resume of the turn brings back. Empty if the member does not say."""
        return [] if self._active is None else [tag for tag in tags if tag not in self._active]


def _check_pause(cls: type) -> None:
    # Ray's tracing wraps the methods of an actor's class, and AsyncColocated those of Colocated.
    if inspect.unwrap(cls.pause) is not Colocated.pause:  # type: ignore[attr-defined]
        raise TypeError(
            f"{cls.__name__} overrides pause(), expected colocated_drain() for work before a pause, and "
            "colocated_commit() for work after it"
        )


class Colocated:
    """Base of a Ray actor with regions, or of an object of the calling process. All results and errors pickle.

    A group calls ``resume()``, and pauses by ``colocated_prepare()`` and ``colocated_commit()``, so that all ranks
    pause or none. Override ``colocated_drain()`` for work before regions pause, and ``resume()`` for work after they
    have resumed. A class that overrides ``pause()``, which a group calls to undo a resume alone, raises TypeError.
    Actors with ``async def`` methods derive from ``AsyncColocated``.

    Examples:
        >>> class Engine(memsaver.ray.Colocated):
        ...     def __init__(self):
        ...         self.weights = memsaver.region("weights", device="cpu", backup="host")
        ...     def colocated_drain(self, tags):
        ...         print("drain before", tags)
        >>> engine = Engine()
        >>> engine.pause(["weights"]).paused
        drain before ['weights']
        ('weights',)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_pause(cls)

    def pause(
        self,
        tags: Tags = None,
        *,
        backup: Backup = None,
        lazy: Lazy = None,
        timeout: float | None = None,
        reader_timeout: float = READERS_S,
        progress: bool = False,
    ) -> Transition:
        """Drains, and pauses regions of this process as ``memsaver.pause()`` does, with its errors.

        Args:
            tags: A tag, a Region, several of either, or None for all regions.
            backup: Another policy than the regions' own: one for all tags, or ``{tag: policy}``.
            lazy: As for ``memsaver.pause()``.
            timeout: Seconds for the whole call up to its commit. The time of the drain counts, but the bound does not
                interrupt the drain. None: no bound.
            reader_timeout: Seconds to wait for attached processes.
            progress: As for ``memsaver.pause()``.

        Returns:
            The transition.
        """
        since, bounds = time.monotonic(), Bounds(timeout, reader_timeout=reader_timeout)
        names = list(regions.choose(tags).tags)
        _drain(self, names)
        bounded = _pause_options(bounds.left(since))
        return memsaver.pause(names, backup=backup, lazy=lazy, progress=progress, **bounded)

    def resume(
        self,
        tags: Tags = None,
        *,
        restore: Restore = True,
        timeout: float | None = None,
        memory_timeout: float | None = None,
        progress: bool = False,
    ) -> Transition:
        """Resumes regions of this process as ``memsaver.resume()`` does, with its errors.

        Args:
            tags: A tag, a Region, several of either, or None for all regions.
            restore: False leaves the contents undefined. For all tags, or ``{tag: bool}``.
            timeout: Seconds for the whole call up to its commit. None: no bound.
            memory_timeout: Seconds to wait for memory that others hold. None: as ``memsaver.resume()`` waits.
            progress: As for ``memsaver.pause()``.

        Returns:
            The transition.
        """
        return memsaver.resume(tags, restore=restore, timeout=timeout, memory_timeout=memory_timeout, progress=progress)

    def colocated_drain(self, tags: Sequence[str]) -> None:
        """Prepares the actor for the pause of these tags. To be overridden; this method does nothing.

        Every pause calls it first, and raises its errors. If other ranks fail, ``colocated_abort()`` is called.

        Args:
            tags: The tags whose regions are to pause.
        """

    def colocated_prepare(
        self,
        tags: Sequence[str],
        coming: Sequence[str] = (),
        *,
        backup: Backup = None,
        lazy: Lazy = None,
        timeout: float | None = None,
        reader_timeout: float = READERS_S,
    ) -> Ready:
        """Drains, and reserves everything that a pause needs. A pause that an earlier group prepared is aborted.

        Args:
            tags: The tags to pause. Tags without regions are left out.
            coming: The tags that will resume in the same turn. A tag without a region is a ValueError.
            backup: As for ``pause()``.
            lazy: As for ``pause()``.
            timeout: As for ``pause()``.
            reader_timeout: As for ``pause()``.

        Returns:
            The part of this actor in the turn.
        """
        since, bounds = time.monotonic(), Bounds(timeout, reader_timeout=reader_timeout)
        halves = _halves(self)
        turn = halves.abort()
        halves.wait(timeout)
        ready, names = _ready(tags, coming), _existing(tags)
        _drain(self, names)
        backup, lazy = those_of(names, backup) or None, those_of(names, lazy)
        halves.prepare(turn, names, backup, lazy, bounds.left(since))
        return ready

    def colocated_background(
        self,
        tags: Sequence[str],
        coming: Sequence[str],
        *,
        phase: str,
        backup: Backup = None,
        lazy: Lazy = None,
        restore: Restore = True,
        timeout: float | None = None,
        memory_timeout: float | None = None,
        reader_timeout: float = READERS_S,
    ) -> None:
        """Begins to pause lingering tags and to resume late ones in the background: see ``memsaver.define_phase()``.

        The tags to pause are drained. The next ``colocated_prepare()`` waits for both, up to its bound.

        Args:
            tags: The tags to pause. Tags without regions are left out.
            coming: The tags to resume, one after the other, so that the first is there early. All at once if the class
                overrides ``resume()``, or one has a ``Derived`` region. After an error no other is resumed.
            phase: The phase that an error names.
            backup: As for ``pause()``.
            lazy: As for ``pause()``.
            restore: As for ``resume()``.
            timeout: As for ``pause()`` and ``resume()``.
            memory_timeout: As for ``resume()``.
            reader_timeout: As for ``pause()``.
        """
        names, found, since = _existing(tags), [*regions.find(coming)], time.monotonic()
        bounds = Bounds(timeout, memory_timeout, reader_timeout)

        def leave() -> None:
            _drain(self, names)
            chosen = {"backup": those_of(names, backup) or None, "lazy": those_of(names, lazy)}
            memsaver.pause(names, **chosen, **_pause_options(bounds))  # type: ignore[arg-type]

        # Without an override no loop of an async actor is needed.
        plain = type(self).resume in (Colocated.resume, AsyncColocated.resume)
        together = not plain or any(isinstance(each.backup, Derived) for each in found)
        parts = [list(coming)] if together else [[tag] for tag in coming]
        arrivals: list[Future[None]] = [Future() for _ in parts]

        def come() -> None:
            resume = partial(Colocated.resume, self) if plain else self.resume
            failed: BaseException | None = None
            for part, arrival in zip(parts, arrivals):
                left, wanted = bounds.left(since).timeout, those_of(part, restore)
                try:
                    if failed is None:
                        _awaited(self, resume(part, restore=wanted, timeout=left, memory_timeout=memory_timeout))
                except BaseException as error:
                    failed = error
                if failed is None:
                    arrival.set_result(None)
                else:
                    arrival.set_exception(failed)

        if names:
            late.expect(phase, _halves(self).background(leave), [])
        if coming:
            _halves(self).background(come)
            for part, arrival in zip(parts, arrivals):
                late.expect(phase, arrival, regions.find(part))

    def colocated_commit(self) -> Transition:
        """Commits the prepared pause. Raises memsaver.Error if nothing is prepared, as after a restart of the actor.

        Returns:
            The transition.
        """
        halves = _halves(self)
        done = halves.commit()
        late.forget(regions.find(_existing(halves.names)))
        return done

    def colocated_abort(self) -> None:
        """Aborts the prepared pause, if there is one. Extend it if a drain has to be undone as well."""
        _halves(self).abort()


def _drain(member: Colocated | AsyncColocated, tags: Sequence[str]) -> None:
    if tags and type(member).colocated_drain is not AsyncColocated.colocated_drain:
        _awaited(member, member.colocated_drain(tags))


short_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()  # which end with a call: of async members of this process


def _awaited(member: Colocated | AsyncColocated, result: object) -> None:
    """Waits for the result of a method of an async actor. This thread is not that of its loop."""
    if isinstance(result, Coroutine):
        loop = member.__dict__.get("_colocated_loop")
        if loop is None:
            result.close()
            raise TypeError(
                f"{type(member).__name__} has an async method that a pause or a resume calls, {result}, "
                "expected a class that derives from AsyncColocated"
            )
        if loop in short_loops:
            asyncio.run(result)
        else:
            asyncio.run_coroutine_threadsafe(result, loop).result()


def _coroutine(method: Callable[..., _T]) -> Callable[..., Coroutine[Any, Any, _T]]:
    """A method of ``Colocated`` as a coroutine. It runs in a thread of its own, which a cancellation does not stop."""

    @functools.wraps(method)
    async def run(self: AsyncColocated, *args: Any, **options: Any) -> _T:
        self.__dict__["_colocated_loop"] = asyncio.get_running_loop()
        call = functools.partial(contextvars.copy_context().run, method, self, *args, **options)
        # Not the event loop's executor, whose threads may all be busy.
        return await asyncio.wrap_future(in_thread(call, "memsaver colocated"))

    run.__doc__ = f"``Colocated.{method.__name__}()`` as a coroutine."
    return run


class AsyncColocated:
    """Base of an async actor with regions. Transitions run in threads, so the event loop is not blocked.

    The methods are those of ``Colocated``, as coroutines. A cancellation stops neither a drain nor a transition. A
    coroutine must not block the loop until a late region has come: ``await asyncio.to_thread(region.wait)``.

    Examples:
        >>> class Engine(memsaver.ray.AsyncColocated):
        ...     def __init__(self):
        ...         self.weights = memsaver.region("weights", device="cpu", backup="host")
        >>> asyncio.run(Engine().pause(["weights"])).paused
        ('weights',)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_pause(cls)

    pause = _coroutine(Colocated.pause)
    resume = _coroutine(Colocated.resume)
    colocated_prepare = _coroutine(Colocated.colocated_prepare)
    colocated_commit = _coroutine(Colocated.colocated_commit)
    colocated_abort = _coroutine(Colocated.colocated_abort)
    colocated_background = _coroutine(Colocated.colocated_background)

    async def colocated_drain(self, tags: Sequence[str]) -> None:
        """``Colocated.colocated_drain()`` as a coroutine."""


class _Halves:
    """The pause that an actor has prepared and not yet committed. There is one at most.

    The lock is held over a whole step. So an abort during the reservation of an async actor waits, and aborts the
    result. An abort during a drain ends the turn that the abort before it returned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = 0
        self.names: list[str] = []  # the tags of the last pause that was prepared
        self._prepared: list[Move] | None = None  # empty: there was nothing to pause
        self._background: list[Future[None]] = []  # transitions of the last turn, which may be under way

    def background(self, move: Callable[[], None]) -> Future[None]:
        future = in_thread(move, "memsaver background")
        self._background.append(future)
        return future

    def wait(self, timeout: float | None) -> None:
        """Waits for the transitions in the background. Their errors are those of late regions."""
        began = time.monotonic()
        if futures.wait(self._background, timeout).not_done:
            text = "late and lingering tags of the last turn are still moving"
            raise WaitTimeoutError(text, stage="late", waited_s=time.monotonic() - began)
        self._background.clear()

    def prepare(self, turn: int, names: Sequence[str], backup: Backup, lazy: Lazy, bounds: Bounds) -> None:
        with self._lock:
            if turn != self._turn:
                raise Error("this turn was taken back while the actor drained")
            self.names = list(names)
            moves = [prepare_pause(names, backup=backup, lazy=lazy, **_pause_options(bounds))] if names else []
            self._prepared = moves  # at once: an interrupt would leave them in a traceback alone

    def commit(self) -> Transition:
        with self._lock:
            prepared, self._prepared = self._prepared, None
            if prepared is None:
                raise Error("nothing is prepared here: it was taken back, or this actor has started anew since")
            try:
                return prepared[0].commit() if prepared else Transition()
            except BaseException as error:
                for each in prepared:
                    each.fail(error)  # also after an interrupt before its commit began
                raise

    def abort(self) -> int:
        """Returns the number of the turn that begins now."""
        with self._lock:
            self._turn += 1
            prepared, self._prepared = self._prepared, None
            if prepared is not None:
                for each in prepared:
                    each.abort()
            return self._turn


def _halves(actor: object) -> _Halves:
    """The actor's _Halves. Not made by an __init__, since derived classes need not call it."""
    return actor.__dict__.setdefault("_colocated_halves", _Halves())


def _ready(tags: Sequence[str], coming: Sequence[str]) -> Ready:
    regions.find(coming)  # raises for tags without regions before any region pauses
    pausing, resuming = set(tags), set(coming)
    concerned = [each for each in regions.all_regions() if each.tag in pausing or each.tag in resuming]
    guests = _guests.tags() & (pausing | resuming)  # their memory is in no pool
    return Ready(
        moves=any(each.tag in pausing and each.state != "paused" for each in concerned),
        pooled=not guests and all(_core.in_pool(device) for device in {each.device for each in concerned}),
        discarded=tuple(dict.fromkeys(each.tag for each in concerned if each.tag in resuming and each.discarded)),
        derived=tuple(
            (each.tag, source, _source_state(source))
            for each in concerned
            if each.tag in resuming and each.state == "paused" and is_rebuilt(each)
            for source in each.backup.after  # type: ignore[union-attr]
        ),
        _active=tuple(dict.fromkeys(each.tag for each in concerned if each.tag in resuming and each.state == "active")),
    )


def _source_state(tag: str) -> str:
    away = [each for each in regions.find(tag) if each.state != "active"]
    if not away:
        return "active"
    return "kept" if all(isinstance(each.backup, Derived) or has_contents(each) for each in away) else "lost"


def _pause_options(bounds: Bounds) -> dict[str, Any]:
    return {"timeout": bounds.timeout, "reader_timeout": bounds.reader_timeout}


def _existing(tags: Sequence[str]) -> list[str]:
    known = regions.known_tags()
    return [tag for tag in tags if tag in known]
