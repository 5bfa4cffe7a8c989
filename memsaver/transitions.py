"""Pause, resume and switch: the two halves of a transition, and its result."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, TypeVar, overload

from memsaver import _core, _guests, policies, records
from memsaver._adapter import Ranges, adapter, loaded
from memsaver._arguments import READERS_S, Bounds, options_by_keyword, refuse_construction
from memsaver.errors import BackupError, Error
from memsaver.policies import Backup, Restore
from memsaver.regions import Region, Selection, all_regions, choose, wrapper

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("memsaver")

_DEFAULT_BOUNDS = Bounds()
_verify = False
_AWAY = ("paused", "lost")  # states of regions without memory
_T = TypeVar("_T")
Progress = Callable[[int, int], object]
"""Called with the bytes copied and the bytes to copy."""


def set_verify(wanted: bool) -> None:
    """Turns the comparison of contents before a pause with those after the resume on or off."""
    global _verify
    _verify = wanted


@dataclass(frozen=True)
class Transition:
    """The result of a pause, a resume or a switch.

    Attributes:
        paused: Tags of the regions that were active and are paused, and those of the guests that left.
        resumed: Tags of the regions that were paused and are active, and those of the guests that came back.
        released_bytes: Device memory that was released.
        restored_bytes: Device memory that was mapped.
        copied_bytes: Contents that were copied, in both directions together.
        seconds: Duration, the waits for the device and for memory and the time of guests included.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> cache = kv.empty((1 << 20,), torch.uint8)
        >>> done = memsaver.pause("kv_cache")
        >>> done.paused, done.released_bytes, done.copied_bytes
        (('kv_cache',), 2097152, 0)
    """

    paused: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    released_bytes: int = 0
    restored_bytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0


class TransitionFuture(Future[Transition]):
    """A transition in the background: a ``concurrent.futures.Future`` that can also be awaited.

    ``pause()``, ``resume()`` and ``switch()`` return it with ``wait=False``; the constructor raises TypeError.
    ``result()`` and ``await`` return the ``Transition`` or raise its error. A transition cannot be cancelled:
    ``cancel()`` returns False.

    Examples:
        >>> region = memsaver.region("optimizer", device="cpu", backup="host")
        >>> moving = region.pause(wait=False)
        >>> moving.result(timeout=60).paused
        ('optimizer',)
    """

    def __init__(self, *args: object, **options: object) -> None:
        refuse_construction(self, "pause(), resume() or switch() with wait=False")

    @classmethod
    def _pending(cls) -> TransitionFuture:
        made = cls.__new__(cls)
        Future.__init__(made)
        return made

    def result(self, timeout: float | None = None) -> Transition:
        """Waits for the end of the transition.

        Args:
            timeout: Seconds to wait. None: no bound.

        Returns:
            The transition.

        Raises:
            TimeoutError: The transition is still under way after ``timeout`` seconds. It continues.
            Exception: The error of the transition.

        Examples:
            >>> region = memsaver.region("optimizer", device="cpu", backup="host")
            >>> _ = region.pause()
            >>> moving = region.resume(wait=False)
            >>> moving.result(timeout=60).resumed
            ('optimizer',)
        """
        try:
            return super().result(timeout)
        except FutureTimeoutError:
            if self.done():  # the error is the transition's own, or it has ended just now
                return super().result()
            raise TimeoutError(f"the transition is still under way after {timeout} s") from None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TransitionFuture cannot be pickled: pickle its result()")

    def __await__(self) -> Generator[Any, None, Transition]:
        return (yield from asyncio.wrap_future(self).__await__())


class PauseOptions(TypedDict, total=False):
    """Options of ``pause()`` beside ``wait``."""

    backup: Backup
    timeout: float | None
    reader_timeout: float
    progress: Progress | None


class ResumeOptions(TypedDict, total=False):
    """Options of ``resume()`` beside ``wait``."""

    restore: Restore
    timeout: float | None
    memory_timeout: float
    progress: Progress | None


class SwitchOptions(PauseOptions, ResumeOptions):
    """Options of ``switch()`` beside ``wait``."""


@overload
def pause(tags: Selection = None, *, wait: Literal[True] = True, **options: Unpack[PauseOptions]) -> Transition: ...
@overload
def pause(tags: Selection = None, *, wait: Literal[False], **options: Unpack[PauseOptions]) -> TransitionFuture: ...
@overload
def pause(tags: Selection = None, *, wait: bool, **options: Unpack[PauseOptions]) -> Transition | TransitionFuture: ...
@options_by_keyword
def pause(
    tags: Selection = None,
    *,
    backup: Backup = None,
    timeout: float | None = None,
    reader_timeout: float = READERS_S,
    wait: bool = True,
    progress: Progress | None = None,
) -> Transition | TransitionFuture:
    """Releases the device memory of regions and keeps their addresses, after waiting for the device's work.

    Pausing a paused region is a no-op. If a driver or file call fails after the commit, the regions are paused, and
    contents that their policies keep are not lost: another pause continues, and a resume restores them.

    Args:
        tags: A tag, a Region, several of either, or None for all regions. A tag selects its regions on all devices and
            with all policies. Guests of the tags leave first (see ``memsaver.Guest``), and None names the tags of all
            guests as well. An empty list is a no-op.
        backup: Another policy than the regions' own, for this pause: one for all tags, or ``{tag: policy}``. With
            ``"none"`` the contents are undefined after the resume, also if the region's own policy keeps them;
            ``Region.discarded`` is True until then. None: the regions' own policies.
        timeout: Seconds for the whole call up to its commit, its waits included: for earlier transitions on the same
            regions, for guarded replays under way, for the device, for attached readers. After the commit no bound
            interrupts the call. None: no bound.
        reader_timeout: Seconds to wait for other processes that are attached to the regions (see
            ``memsaver.attach()``), 60 by default. Of two bounds the earlier one ends the wait.
        wait: False returns at once. The transition runs in the background, after earlier ones on the same regions, and
            ``TransitionFuture.result()`` raises its errors. The interpreter does not exit before its end.
        progress: Called with the bytes copied and the bytes to copy, several times a second and at the end, by the
            thread that copies. Exceptions from it are logged.

    Returns:
        The transition, or its future if ``wait`` is False.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A tag has no region, a policy does not exist, or a bound is negative.
        BackupError: Host memory or disk space is short. Nothing has changed.
        AttachedError: A bound ended the wait for attached readers. Nothing has changed.
        WaitTimeoutError: ``timeout`` ended another wait. Nothing has changed.
        GuestError: A guest of the tags could not leave. Nothing has changed.
        DriverError: A call of the driver failed.
        memsaver.Error: A graph is being captured, or another thread is inside a region. Nothing has changed.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> memsaver.pause(["weights", kv]).paused
        ('weights', 'kv_cache')
    """
    bounds = Bounds(timeout, reader_timeout=reader_timeout)
    chosen, guests = choose(tags)
    return transition(pause=chosen, backup=backup, bounds=bounds, wait=wait, progress=progress, pause_guests=guests)


@overload
def resume(tags: Selection = None, *, wait: Literal[True] = True, **options: Unpack[ResumeOptions]) -> Transition: ...
@overload
def resume(tags: Selection = None, *, wait: Literal[False], **options: Unpack[ResumeOptions]) -> TransitionFuture: ...
@overload
def resume(
    tags: Selection = None, *, wait: bool, **options: Unpack[ResumeOptions]
) -> Transition | TransitionFuture: ...
@options_by_keyword
def resume(
    tags: Selection = None,
    *,
    restore: Restore = True,
    timeout: float | None = None,
    memory_timeout: float = 0.0,
    wait: bool = True,
    progress: Progress | None = None,
) -> Transition | TransitionFuture:
    """Maps memory under the addresses of paused regions, and copies back the contents that have a backup.

    Resuming an active region is a no-op.

    Args:
        tags: A tag, a Region, several of either, or None for all regions, as for ``pause()``. Guests of the tags come
            back last.
        restore: False leaves the contents undefined, for regions that are about to be overwritten. For all tags, or
            ``{tag: bool}``; True for tags that are left out.
        timeout: Seconds for the whole call up to its commit, as for ``pause()``. None: no bound.
        memory_timeout: Seconds to wait for memory that others hold, after earlier transitions on the same regions have
            ended. 0: no wait. Of two bounds the earlier one ends the wait.
        wait: False returns at once, as for ``pause()``.
        progress: Called with the bytes copied and the bytes to copy, as for ``pause()``.

    Returns:
        The transition, or its future if ``wait`` is False.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A tag has no region, or a bound is negative.
        OutOfMemoryError: The device is short of memory until a bound ends the wait. Nothing has changed.
        WaitTimeoutError: ``timeout`` ended another wait. Nothing has changed.
        BackupError: A file with contents cannot be read. Nothing has changed.
        GuestError: A guest of the tags could not come back. The regions are active, and another resume continues.
        DriverError: A call of the driver failed.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> _ = memsaver.pause("weights")
        >>> memsaver.resume("weights", memory_timeout=30).resumed
        ('weights',)
    """
    bounds = Bounds(timeout, memory_timeout)
    chosen, guests = choose(tags)
    return transition(resume=chosen, restore=restore, bounds=bounds, wait=wait, progress=progress, resume_guests=guests)


@overload
def switch(
    *, pause: Selection = (), resume: Selection = (), wait: Literal[True] = True, **options: Unpack[SwitchOptions]
) -> Transition: ...
@overload
def switch(
    *, pause: Selection = (), resume: Selection = (), wait: Literal[False], **options: Unpack[SwitchOptions]
) -> TransitionFuture: ...
@overload
def switch(
    *, pause: Selection = (), resume: Selection = (), wait: bool, **options: Unpack[SwitchOptions]
) -> Transition | TransitionFuture: ...
@options_by_keyword
def switch(
    *,
    pause: Selection = (),
    resume: Selection = (),
    backup: Backup = None,
    restore: Restore = True,
    timeout: float | None = None,
    memory_timeout: float = 0.0,
    reader_timeout: float = READERS_S,
    wait: bool = True,
    progress: Progress | None = None,
) -> Transition | TransitionFuture:
    """Pauses and resumes regions in one transition. Contents are copied in both directions at once.

    All needs are reserved first. If the resume fails after the commit, the regions to pause are paused, and the same
    call can be made again.

    Args:
        pause: The regions to pause: a tag, a Region, several of either, or None for all regions.
        resume: The regions to resume, in the same forms.
        backup: Another policy for the regions to pause, as for ``pause()``.
        restore: False leaves the contents of the regions to resume undefined, as for ``resume()``.
        timeout: Seconds for the whole call up to its commit. None: no bound.
        memory_timeout: Seconds to wait for memory that others hold, as for ``resume()``.
        reader_timeout: Seconds to wait for attached processes, as for ``pause()``.
        wait: False returns at once, as for ``pause()``.
        progress: Called with the bytes copied and the bytes to copy, as for ``pause()``.

    Returns:
        The transition, or its future if ``wait`` is False.

    Raises:
        ValueError: A region is selected on both sides, or as from ``pause()`` and ``resume()``.
        memsaver.Error: As from ``pause()`` and ``resume()``.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> optimizer = memsaver.region("optimizer", device="cpu", backup="host")
        >>> _ = memsaver.pause("weights")
        >>> done = memsaver.switch(pause="optimizer", resume="weights")
        >>> done.paused, done.resumed
        (('optimizer',), ('weights',))
    """
    leaving, leaving_guests = choose(pause, "pause")
    coming, coming_guests = choose(resume, "resume")
    return transition(
        pause=leaving,
        resume=coming,
        backup=backup,
        restore=restore,
        bounds=Bounds(timeout, memory_timeout, reader_timeout),
        wait=wait,
        progress=progress,
        pause_guests=leaving_guests,
        resume_guests=coming_guests,
    )


def transition(
    pause: Sequence[Region] = (),
    resume: Sequence[Region] = (),
    backup: Backup = None,
    restore: Restore = True,
    bounds: Bounds = _DEFAULT_BOUNDS,
    wait: bool = True,
    progress: Progress | None = None,
    pause_guests: Set[str] = frozenset(),
    resume_guests: Set[str] = frozenset(),
) -> Transition | TransitionFuture:
    """All changes of the state of regions go through this function. See ``pause()``, ``resume()`` and ``switch()``.

    ``pause_guests``, ``resume_guests``: tags of guests that the call names. A tag of regions in ``pause`` and
    ``resume`` need not be among them.
    """
    kept = policies.backups(backup, _tags(pause, pause_guests))
    restored = policies.restores(restore, _tags(resume, resume_guests))
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {progress!r}, expected something to call, or None")
    both = [each for each in pause if each in resume]
    if both:
        raise ValueError(f"{both[0].tag!r} is to be paused and resumed at once, expected one of the two")
    if both_guests := sorted(pause_guests & resume_guests):
        raise ValueError(f"{both_guests[0]!r} is to be paused and resumed at once, expected one of the two")
    if not pause and not resume and not pause_guests and not resume_guests:
        return _ended(Transition(), wait)
    here = threading.get_ident() if wait else None  # this thread may be inside a region that it pauses
    if (torch := loaded()) is not None:  # an early error; prepare() checks again
        torch.check_pausable([each for each in pause if each.state == "active"], here)
    move = _Move(pause, resume, here, bounds, pause_guests, resume_guests)
    run = partial(move.run, kept, restored, progress)
    if wait:
        return run()
    try:
        future = TransitionFuture._pending()
        in_thread(run, "memsaver transition", future)
        return future
    except BaseException:  # the thread could not be started
        move.core.abort()
        raise


def _ended(result: Transition, wait: bool) -> Transition | TransitionFuture:
    if wait:
        return result
    future = TransitionFuture._pending()
    future.set_running_or_notify_cancel()
    future.set_result(result)
    return future


def in_thread(function: Callable[[], _T], name: str, future: Future[_T] | None = None) -> Future[_T]:
    """Runs a function in a thread of its own. The interpreter waits for the thread. It cannot be cancelled."""
    future = Future() if future is None else future
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name).start()
    return future


class _Move:
    """One transition of regions and guests. Its construction queues it at its regions and starts its bounds.

    Guests leave at the beginning of the second half, and come back at its end: a group commits once all ranks have
    prepared, and guests that come back may need the other ranks.
    """

    def __init__(
        self,
        pause: Sequence[Region],
        resume: Sequence[Region],
        thread: int | None,
        bounds: Bounds,
        pause_guests: Set[str] = frozenset(),
        resume_guests: Set[str] = frozenset(),
    ) -> None:
        self.core = _core.Transition(
            [each._core for each in pause],
            [each._core for each in resume],
            bounds.timeout,
            bounds.memory_timeout,
            bounds.reader_timeout,
        )
        self._pause, self._pause_guests = set(pause), pause_guests
        resumed = resume_guests | {each.tag for each in resume}
        until = None if bounds.timeout is None else time.monotonic() + bounds.timeout
        self.recorder = recorder = records.Recorder(_tags(pause, pause_guests), _tags(resume, resume_guests))
        # A prepared pause that the caller drops is aborted.
        this = weakref.ref(self, lambda _: recorder.end("aborted"))
        recorder.core_stages = lambda: list(move.core.stages) if (move := this()) is not None else []
        self._guests = _guests.Moves(self._paused_tags, lambda: resumed, self.recorder.enter, until)
        self._thread = thread
        self._report: _Report | None = None
        self._leaving: tuple[str, ...] = ()
        self._pausing: list[Region] = []
        self._kept: dict[str, str] = {}  # by tag, the policies of this pause that keep contents
        self._differing: Exception | None = None  # found by the comparison of contents
        self._restored: list[Any] = []  # regions that resume with their contents
        self._sealed: list[Any] = []  # frozen regions that resume with their copy

    def prepare(self, backup: Mapping[str, str], restore: Mapping[str, bool], progress: Progress | None) -> None:
        """Reserves everything the transition needs. If this raises, nothing has changed.

        ``backup`` and ``restore`` are by tag. The default of ``backup`` is the region's own policy.
        """
        move = self.core
        self._report = _Report(progress) if progress is not None else None
        try:
            move.begin()
            self._leaving = _tags(move.pausing)
            self._pausing = leaving = [wrapper(each) for each in move.pausing]
            kept = [backup.get(each.tag, each.backup) for each in leaving]
            self._kept = {each.tag: policy for each, policy in zip(leaving, kept) if policy != "none"}
            restored = [restore[each.tag] for each in move.resuming]
            if (torch := loaded()) is not None:
                torch.check_pausable(leaving, self._thread)
            self._guests.prepare()
            live = [_live(each) if policy != "none" else [] for each, policy in zip(leaving, kept)]
            # A frozen region whose copy has other users is unsealed by its resume.
            self._sealed = [
                each for each, wanted in zip(move.resuming, restored) if each.frozen and wanted and each.backup_bytes
            ]
            move.prepare(kept, live, restored, self._report)
            self._restored = [each for each, wanted in zip(move.resuming, restored) if wanted]
            self._record_contents(leaving, kept, live)  # from here on nothing uses the regions
        except BaseException as error:
            if isinstance(error, BackupError) and self._kept:
                error._name_regions(tuple(self._kept), _remedy(self._kept.values()))
            self.recorder.end("failed", error)
            self.abort()
            raise

    def abort(self) -> None:
        self.recorder.end("aborted")
        self.core.abort()  # now, not when a traceback drops its references
        if (torch := loaded()) is not None:
            torch.refresh()

    def _paused_tags(self) -> set[str]:
        """The tags that are paused after this transition, all of their regions included, of those that it pauses."""
        others = {each.tag for each in all_regions() if each not in self._pause and each.state not in _AWAY}
        return {*self._pause_guests, *(each.tag for each in self._pause)} - others

    def commit(self) -> Transition:
        try:
            outcome = self._commit()
        except BaseException as error:
            self.recorder.end("failed", error)
            raise
        self.recorder.end(
            "done",
            released_bytes=outcome.released_bytes,
            restored_bytes=outcome.restored_bytes,
            copied_bytes=outcome.copied_bytes,
        )
        if self._report is not None and self._report.interrupt is not None:
            raise self._report.interrupt
        return outcome

    def _commit(self) -> Transition:
        move = self.core
        begun = False
        try:
            self._guests.leave()
            begun = True
            done = move.run(self._check_contents if _verify else None)
        except BaseException as error:
            move.abort()
            if begun and isinstance(error, Error):
                error._name_paused(self._leaving, _tags(move.discarded))
            committed = begun and (not self._pausing or any(each.state in _AWAY for each in self._pausing))
            self._guests.settle(_away_tags(), committed, error)
            raise
        finally:
            if (torch := loaded()) is not None:
                for each in self._pausing:
                    if each.state != "active":  # else the pause has failed before its commit
                        torch.withdraw(each)
                torch.refresh()
        try:
            try:
                self._guests.come_back()
            finally:
                if self._differing is not None:
                    raise self._differing
        except Error as error:
            error.resumed = _tags(done["resumed"], self._guests.resumed)
            raise
        outcome = Transition(
            paused=_tags(done["paused"], self._guests.paused),
            resumed=_tags(done["resumed"], self._guests.resumed),
            released_bytes=done["released_bytes"],
            restored_bytes=done["restored_bytes"],
            copied_bytes=done["copied_bytes"],
            seconds=done["seconds"] + self._guests.seconds,
        )
        log.debug("%s", outcome)
        for each in self._sealed:
            if not each.sealed:
                log.warning(
                    "region %r is frozen and was resumed while a tensor of cpu_backup() was held, through which its "
                    "copy can change: its next pause makes another copy. Drop such tensors before the resume, or pass "
                    "clone=True",
                    each.tag,
                )
        return outcome

    def _record_contents(self, leaving: Sequence[Region], kept: Sequence[str], live: Sequence[Ranges]) -> None:
        torch = adapter() if _verify else loaded()
        if torch is None:
            return
        partly_unmapped = {wrapper(each) for each in self.core.was_paused}
        for each, policy, ranges in zip(leaving, kept, live):
            if not _verify or policy == "none":
                torch.forget_contents(each)
            elif each not in partly_unmapped:  # else an earlier pause has recorded them, and failed later
                torch.record_contents(each, ranges)

    def _check_contents(self) -> None:
        """The core calls this before the regions are active, and takes no exception."""
        try:
            for each in map(wrapper, self._restored):
                adapter().check_contents(each)
        except Exception as error:
            self._differing = error

    def run(self, backup: Mapping[str, str], restore: Mapping[str, bool], progress: Progress | None) -> Transition:
        self.prepare(backup, restore, progress)
        return self.commit()


class Prepared:
    """A pause that has reserved all it needs and has changed nothing yet.

    ``prepare_pause()`` makes it; the constructor raises TypeError. The regions are "pausing" until ``commit()`` or
    ``abort()``.
    """

    _move: _Move | None

    def __init__(self, *args: object, **options: object) -> None:
        refuse_construction(self, "prepare_pause()")

    @classmethod
    def _of(cls, move: _Move | None) -> Prepared:
        made = cls.__new__(cls)
        made._move = move
        return made

    def commit(self) -> Transition:
        """Lets guests leave, and pauses the regions.

        Returns:
            The transition. An empty one after ``commit()`` or ``abort()``.

        Raises:
            GuestError: A guest could not leave. The regions are active again.
            DriverError: A call of the driver failed; see ``pause()``.
            BackupError: A file call failed.
        """
        move, self._move = self._move, None
        return move.commit() if move is not None else Transition()

    def abort(self) -> None:
        """Releases the reservations: the regions are active again. A no-op after ``commit()`` or ``abort()``."""
        move, self._move = self._move, None
        if move is not None:
            move.abort()


@options_by_keyword
def prepare_pause(
    tags: Selection = None,
    *,
    backup: Backup = None,
    timeout: float | None = None,
    reader_timeout: float = READERS_S,
) -> Prepared:
    """Prepares a pause without committing it, for processes that pause together or not at all.

    Args:
        tags: A tag, a Region, several of either, or None for all regions, as for ``pause()``.
        backup: Another policy for the regions, as for ``pause()``.
        timeout: Seconds for the preparation, as for ``pause()``. None: no bound.
        reader_timeout: Seconds to wait for attached processes, as for ``pause()``.

    Returns:
        The prepared pause, to commit or to abort.

    Raises:
        memsaver.Error: As from ``pause()`` before its commit. Nothing has changed.
    """
    found, guests = choose(tags)
    kept = policies.backups(backup, _tags(found, guests))
    bounds = Bounds(timeout, reader_timeout=reader_timeout)
    if not found and not guests:
        return Prepared._of(None)
    move = _Move(found, [], threading.get_ident(), bounds, guests)
    move.prepare(kept, {}, None)
    move.recorder.enter("prepared")
    return Prepared._of(move)


class _Report:
    """The progress function for the core. Catches the exceptions of the caller's function, which the core cannot."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.interrupt: BaseException | None = None  # such as Ctrl-C: raised when the transition has ended

    def __call__(self, done: int, total: int) -> None:
        try:
            self._progress(done, total)
        except Exception:
            log.exception("the progress function of a transition failed")
        except BaseException as error:
            self.interrupt = error


def _tags(cores: Iterable[Any], guests: Iterable[str] = ()) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(core.tag for core in cores), *sorted(guests)]))


def _away_tags() -> dict[str, bool]:
    """By tag, whether all of its regions are without memory."""
    found: dict[str, bool] = {}
    for each in all_regions():
        found[each.tag] = found.get(each.tag, True) and each.state in _AWAY
    return found


def _remedy(policies: Iterable[str]) -> str:
    used = set(policies)
    remedies = {
        "host": "free host memory, raise configure(host_limit=...), or pause with backup='disk' or 'none'",
        "disk": "free disk space, choose another configure(disk_dir=...), or pause with backup='none'",
    }
    return "; ".join(text for policy, text in remedies.items() if policy in used)


def _live(each: Region) -> Ranges:
    """The ranges of the region to copy: the live blocks of torch's pools, or all segments without such pools."""
    torch = loaded()
    known = torch.live(each) if torch is not None else None
    return list(each._core.live()) if known is None else known
