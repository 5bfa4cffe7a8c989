"""One transition of regions and guests, in its two halves."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from memsaver import _core, _guests, _results
from memsaver._adapter import loaded, with_torch
from memsaver._results import Transition
from memsaver.errors import BackupError, Error, RebuildError, RegionPausedError
from memsaver.policies import Bounds, Derived, LazyMode
from memsaver.regions import Chosen, Ranges, Region, all_regions, rebuilding, tags_of, wrapper

log = logging.getLogger("memsaver")

_verify = False
_stale = "off"
_lazy: LazyMode = False
_AWAY = ("paused", "lost")  # states of regions without memory


def set_verify(wanted: bool) -> None:
    """Turns the comparison of contents before a pause with those after the resume on or off."""
    global _verify
    if _verify and not wanted:
        with_torch("memsaver._torch.checksums").forget_all()
    _verify = wanted


def set_stale(mode: str) -> None:
    """Memory that comes back without contents is filled with a pattern unless the mode is ``"off"``."""
    global _stale
    if _stale != "off" and mode == "off":
        with_torch("memsaver._torch.stale").forget_all()
    _stale = mode


def stale() -> str:
    return _stale


def set_lazy(wanted: LazyMode) -> None:
    """Whether pauses are lazy that do not say so themselves."""
    global _lazy
    _lazy = wanted


class Move:
    """One transition of regions and guests. Its construction queues it at its regions and starts its bounds.

    It ends by ``commit()``, ``fail()`` or ``abort()``, or when its last reference is dropped. It is in no cycle of
    references: so an interrupted or dropped transition leaves the queues without the garbage collector.

    Guests leave at the beginning of the second half, and come back at its end: a group commits once all ranks have
    prepared, and guests that come back may need the other ranks.
    """

    core: Any = None  # None: the constructor has not set it yet, or was interrupted

    def __init__(
        self,
        pause: Chosen,
        resume: Chosen,
        thread: int | None,
        bounds: Bounds,
        backup: Mapping[str, str],
        restore: Mapping[str, bool],
        lazy: Mapping[str, LazyMode],
    ) -> None:
        """``backup``, ``restore`` and ``lazy`` are by tag. Defaults: the region's own policy, and True."""
        self._pause, self._pause_guests = set(pause.regions), pause.guests
        self._thread, self._backup, self._restore = thread, backup, restore
        until = None if bounds.timeout is None else time.monotonic() + bounds.timeout
        self.recorder = _results.Recorder(pause.tags, resume.tags, weakref.ref(self))
        self._ends: list[Callable[[], object]] = []  # of the expectation of this pause
        self._guests = _guests.Moves({*resume.tags}, self.recorder.enter, _settled_tags, until)
        self._pausing: list[Region] = []
        self._kept: dict[str, str] = {}  # by tag, the policies of this pause that keep contents
        self._rebuilt: list[Region] = []  # regions to rebuild, each after its sources
        self._blank: list[Region] = []  # regions to fill: they resume without contents
        self._failed: Exception | None = None  # of a rebuild
        self._differing: Exception | None = None  # found by the comparison of contents
        self._restored: list[Any] = []  # regions that resume with their contents
        self._until = until
        lazily = {each: lazy.get(each.tag, _lazy if each.same_as is None else False) for each in pause.regions}
        pinned = [each for each in pause.regions if backup.get(each.tag, each.backup) == "host"]
        ahead = [each._handle for each in pinned if lazily[each] == "copy"]
        # Last: an interrupt before leaves nothing in the queues, also while its traceback keeps this object.
        self.core = _core.Transition(
            [each._handle for each in pause.regions],
            [each._handle for each in resume.regions],
            bounds.timeout,
            bounds.memory_timeout,
            bounds.reader_timeout,
            [each._handle for each, mode in lazily.items() if mode],
            ahead,
        )

    def prepare(self) -> None:
        """Reserves everything the transition needs. If it raises, nothing has changed, and the caller calls fail()."""
        move = self.core
        try:
            if self._pause and (torch := loaded()) is not None:
                self._ends.append(torch.expect_pause(list(self._pause)))
            move.begin()
            self._pausing = leaving = [wrapper(each) for each in move.pausing]
            resuming = move.resuming
            derived = {each for each in leaving if isinstance(each.backup, Derived) and each.tag not in self._backup}
            kept = ["none" if each in derived else self._backup.get(each.tag, str(each.backup)) for each in leaving]
            self._kept = {each.tag: policy for each, policy in zip(leaving, kept) if policy != "none"}
            restored = [self._restore.get(each.tag, True) for each in resuming]
            self._restored = [each for each, wanted in zip(resuming, restored) if wanted]
            coming = [wrapper(each) for each in self._restored]
            self._hold_sources(coming)
            if _stale != "off":
                every = map(wrapper, resuming)
                full = {each for each in coming if each._core.keeps_contents}
                self._blank = [each for each in every if each not in full and not each.written_in_use]
                if self._blank:
                    _check_no_capture("a fill for the option 'stale'")
            if leaving and (torch := loaded()) is not None:
                torch.check_pausable(leaving, self._thread)
            self._guests.prepare(self._paused_tags())
            live = [_live(each) if policy != "none" else [] for each, policy in zip(leaving, kept)]
            common: list[Any] = []
            try:
                common += [self._compared(*each) for each in zip(leaving, kept, live)]
                move.prepare(kept, live, restored, common)
            finally:
                common.clear()  # the traceback of an error would keep them
            if _verify:  # from here on nothing uses the regions
                live = [_live(each) if each in derived else ranges for each, ranges in zip(leaving, live)]
                self._record_contents(leaving, live)
        except BackupError as error:
            if self._kept:
                error._name_regions(self._kept)
            raise

    def _compared(self, region: Region, policy: str, live: Ranges) -> Any:
        """The copy of this pause that processes keep together. None: it keeps none, or has one already.

        Raises SameError if the contents differ from those of other processes.
        """
        if region.same_as is None or policy != "host" or region._core.sealed:
            return None
        parts = region._core.segments(live)
        if not parts or region in map(wrapper, self.core.continued):
            return None
        self.recorder.enter("compare", region.tag)
        _core.wait_idle(region.device, self._left())  # raises during a capture
        sums = with_torch("memsaver._torch.checksums").block_sums(region.device, parts, _core.COMMON_BLOCK)
        return _core.common_backup(region._common, parts, sums, self._left())

    def _left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def fail(self, error: BaseException) -> None:
        """Ends the transition with an error. Steps before its commit are undone. It can be called again."""
        self.recorder.end("failed", error)
        self.abort()

    def abort(self) -> None:
        """Ends the transition, and undoes all steps before its commit. It can be called again."""
        try:
            self._drop()
        except BaseException:  # an interrupt
            self._drop()
            raise
        if (torch := loaded()) is not None:
            torch.refresh()

    def __del__(self) -> None:
        if self.core is not None:
            self._drop()

    def _drop(self) -> None:
        """``abort()`` also from a finalizer, in any thread."""
        self.core.abort()
        _call_all(self._ends)
        self.recorder.end("aborted")

    def _paused_tags(self) -> Set[str]:
        """The tags that are paused after this transition, all of their regions included, of those that it pauses.

        For guests: without guests, none.
        """
        if not _guests.tags():
            return frozenset()
        others = {each.tag for each in all_regions() if each not in self._pause and not _is_away(each)}
        return {*self._pause_guests, *(each.tag for each in self._pause)} - others

    def commit(self) -> Transition:
        """Lets guests leave, and moves the regions. If it raises, the transition has ended."""
        try:
            return self._commit()
        except BaseException as error:
            self.fail(error)
            raise

    def _commit(self) -> Transition:
        move = self.core
        begun = False
        try:
            self._guests.leave(self._paused_tags())
            begun = True
            done = move.run(self._arrived if _verify or self._rebuilt or self._blank else None)
        except BaseException as raised:
            move.abort()
            error = self._failed or raised
            if begun and isinstance(error, Error):
                error._name_paused(tags_of(self._pausing), tags_of(move.discarded))
            committed = begun and (not self._pausing or any(each.state in _AWAY for each in self._pausing))
            self._guests.settle(self._paused_tags(), _away_tags(), committed, error)
            if self._failed is not None:
                raise self._failed from self._failed.__cause__
            raise
        finally:
            _call_all(self._ends)
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
            error.resumed = tags_of(move.resuming, self._guests.resumed)
            raise
        seconds = done.pop("seconds") + self._guests.seconds  # the rest are bytes
        paused, resumed = tags_of(move.pausing, self._guests.paused), tags_of(move.resuming, self._guests.resumed)
        outcome = Transition(paused, resumed, **done, seconds=seconds)
        log.debug("%s", outcome)
        self.recorder.end("done", **done)
        return outcome

    def _hold_sources(self, coming: Sequence[Region]) -> None:
        """Finds the regions to rebuild, and holds the active sources of them: a pause waits. Nothing has changed yet.

        Raises RegionPausedError if a source has no contents then, ValueError if it does not exist.
        """
        derived: dict[Region, Any] = {each: each.backup for each in coming if is_rebuilt(each)}
        if not derived:
            return
        _check_no_capture("a rebuild")
        every, held = all_regions(), []
        with_contents = {each for each in coming if each in derived or has_contents(each)}
        for each, source in [(each, source) for each, policy in derived.items() for source in policy.after]:
            found = [other for other in every if other.tag == source]
            if not found:
                raise ValueError(f"region {each.tag!r} is derived from {source!r}, and there is no region of this tag")
            held += [other._core for other in found if other not in with_contents]
        if (away := _core.acquire(held)) is not None:
            fault = "is paused" if away.state == "paused" else "comes without contents"
            raise RegionPausedError(
                f"a region to resume is derived from {away.tag!r}, which {fault}: expected it to be active, or to "
                "resume in the same call with contents",
                tag=away.tag,
                state=away.state,
            )
        self._ends.append(partial(_core.release, held))
        order: dict[str, set[str]] = {}
        for each, policy in derived.items():
            order.setdefault(each.tag, set()).update(policy.after)
        try:
            tags = list(TopologicalSorter(order).static_order())
        except CycleError as error:
            raise ValueError(f"these regions are derived from each other: {', '.join(error.args[1])}") from None
        self._rebuilt = sorted(derived, key=lambda each: tags.index(each.tag))

    def _record_contents(self, leaving: Sequence[Region], live: Sequence[Ranges]) -> None:
        checksums = with_torch("memsaver._torch.checksums")
        partly_unmapped = {wrapper(each) for each in self.core.continued}
        for each, ranges in zip(leaving, live):
            if each not in partly_unmapped:  # else an earlier pause has recorded them, and failed later
                checksums.record(each, ranges)

    def _arrived(self) -> bool:
        """The core calls this before the regions are active, and takes no exception. False: they have to be paused."""
        for each in self._blank:
            with_torch("memsaver._torch.stale").fill(each)
        for each in {each.device: each for each in self._blank}.values():
            _core.open_driver(each.device).synchronize()  # nothing may be written before
        for each in self._rebuilt:
            self.recorder.enter("rebuild", each.tag)
            try:
                try:
                    with rebuilding():
                        each.backup.rebuild()  # type: ignore[union-attr]
                finally:
                    each._core.release_unused(None)  # waits for the device. Raises during a capture
            except Exception as error:
                self._failed = RebuildError(f"region {each.tag!r} could not be rebuilt: {error!r}", tag=each.tag)
                self._failed.__cause__ = error
                _core.open_driver(each.device).synchronize()  # no kernel may write to memory that is released next
                return False
        try:
            for each in map(wrapper, self._restored if _verify else ()):
                with_torch("memsaver._torch.checksums").check(each)
        except Exception as error:
            self._differing = error
        return True


def _check_no_capture(step: str) -> None:
    if _core.capturing():
        raise Error(f"a CUDA graph is being captured, and {step} waits for the device: end the capture first")


def has_contents(region: Region) -> bool:
    """Whether a resume of a paused region brings contents, or there are none to bring."""
    return bool(region._core.keeps_contents or not region.allocated_bytes)


def is_rebuilt(region: Region) -> bool:
    """Whether a resume of a paused region computes its contents: its pause has kept none."""
    return isinstance(region.backup, Derived) and not region._core.keeps_contents


def _call_all(functions: list[Callable[[], object]]) -> None:
    """Calls the functions, and empties the list. An interrupted call is made again by the next one."""
    while functions:
        functions[-1]()
        functions.pop()


def _is_away(each: Region) -> bool:
    return each._handle.closed or each._handle.state in _AWAY


def active(regions: Iterable[Region]) -> list[Region]:
    """Those that are active. Regions that another thread has closed since they were selected have nothing to pause."""
    return [each for each in regions if not each._handle.closed and each._handle.state == "active"]


def _away_tags() -> dict[str, bool]:
    """By tag, whether all of its regions are without memory."""
    return {tag: found == {_AWAY[0]} for tag, found in _states().items()}


def _settled_tags() -> dict[str, bool]:
    """As ``_away_tags()``, without the tags of regions that are pausing or resuming, unless another one is active."""
    return {tag: "active" not in each for tag, each in _states().items() if "active" in each or each == {_AWAY[0]}}


def _states() -> dict[str, set[str]]:
    """By tag, the states of its regions. All states without memory count as the first one of these."""
    found: dict[str, set[str]] = {}
    for each in all_regions():
        found.setdefault(each.tag, set()).add(_AWAY[0] if _is_away(each) else each._handle.state)
    return found


def _live(each: Region) -> Ranges:
    """The ranges of the region to copy: the live blocks of torch's pools, or all segments without such pools."""
    torch = loaded()
    known = torch.live(each) if torch is not None else None
    return list(each._core.live()) if known is None else known
