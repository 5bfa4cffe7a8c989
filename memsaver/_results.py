"""The result of a transition, now or later; threads that run functions for later results; the last transitions.

Also the progress of a transition under way: a bar, or lines of the log.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, TypeVar

from memsaver import _core, trace
from memsaver.errors import gib

log = logging.getLogger("memsaver")

_T = TypeVar("_T")
_EXIT_S = 4.0  # at the exit of the interpreter, for calls of daemon threads under way


@dataclass(frozen=True)
class Transition:
    """The result of a pause, a resume or a switch.

    Attributes:
        paused: Tags of the regions that were active and are paused, and those of the guests that left.
        resumed: Tags of the regions that were paused and are active, and those of the guests that came back.
        released_bytes: Device memory that was released, without free blocks of torch's default pool.
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

    ``memsaver.start()`` returns it. ``result()`` and ``await`` return the ``Transition`` or raise its error. A
    transition cannot be cancelled: ``cancel()`` returns False.

    Examples:
        >>> region = memsaver.region("optimizer", device="cpu", backup="host")
        >>> memsaver.start(pause=region).result(timeout=60).paused
        ('optimizer',)
    """

    def __await__(self) -> Generator[Any, None, Transition]:
        import asyncio  # which takes longer to import than all of memsaver

        return (yield from asyncio.wrap_future(self).__await__())


def in_thread(function: Callable[[], _T], name: str, future: Future[_T] | None = None) -> Future[_T]:
    """Runs a function in a thread of its own. The interpreter waits for the thread. It cannot be cancelled."""
    future = Future() if future is None else future
    future.set_running_or_notify_cancel()
    threading.Thread(target=_in_background, args=(future, function), name=name).start()
    return future


def _in_background(future: Future[_T], function: Callable[[], _T]) -> None:
    _core.in_background()  # waits of the core end with the interpreter
    run_into(future, function)


def run_into(future: Future[_T], function: Callable[[], _T]) -> None:
    """Calls a function, and sets its result or error."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


_daemons: dict[threading.Thread, Callable[[], object]] = {}  # that run, and the functions that end them


def daemon(function: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None) -> threading.Thread:
    """Runs a function in a thread for which the exit of the interpreter waits 4 s at most. It calls ``stop`` first.

    A thread that returns from a call of torch after the end of the interpreter has begun aborts the process.
    """

    def run() -> None:
        try:
            function()
        finally:
            _daemons.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _daemons[thread] = stop
    try:
        thread.start()
    except BaseException:
        _daemons.pop(thread, None)
        raise
    return thread


@atexit.register
def _end_daemons() -> None:
    for stop in list(_daemons.values()):
        stop()
    until = time.monotonic() + _EXIT_S
    for thread in list(_daemons):
        thread.join(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_daemons.clear)


class Lane:
    """Runs functions one after the other in a daemon thread, which ends with this object."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        end = partial(self._calls.put, None)
        weakref.finalize(self, end).atexit = False
        daemon(partial(_work, self._calls), name, end)

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.put(partial(run_into, future, function))
        return future


def _work(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # and its result


_KEPT = 1000


@dataclass(frozen=True)
class TransitionStage:
    """A step of a transition.

    Attributes:
        name: A wait of ``WaitTimeoutError.stage`` or ``OutOfMemoryError.stage``; ``"guests prepare"``,
            ``"guests leave"`` or ``"guests come back"``, the method of a guest; ``"rebuild"``: of a ``Derived``;
            ``"compare"``: the checksums for ``same_as``; ``"prepared"``, the wait for the commit by a group; or
            ``"move"``: chunks and contents move.
        began_s: Seconds from the begin of the transition to that of the stage.
        seconds: Its duration, until now if it has not ended.
        guest: The name of the guest, if a method of a guest runs, or the tag of a region to rebuild or compare.
    """

    name: str
    began_s: float
    seconds: float
    guest: str | None = None


@dataclass(frozen=True)
class TransitionRecord:
    """A transition of this process: one that has ended, or one under way.

    Attributes:
        number: Its number in the process. Transitions are numbered from 1.
        began: When it began, as ``time.time()``.
        thread: The name of the thread that began it.
        pause: The tags of the regions and guests to pause.
        resume: The tags of the regions and guests to resume.
        outcome: ``"running"``, ``"done"``, ``"failed"``, or ``"aborted"``: a group or the caller took it back.
        error: The class and the message of its error. None if it has not failed.
        stages: Its stages in the order of their begins. The last one is the current one, or the one in which it ended.
            A device that waits for its turn beside another adds its stages between those of the other.
        seconds: Its duration until now, or until its end.
        released_bytes: Device memory that was released. 0 until its end.
        restored_bytes: Device memory that was mapped. 0 until its end.
        copied_bytes: Contents that were copied. 0 until its end.
    """

    number: int
    began: float
    thread: str
    pause: tuple[str, ...]
    resume: tuple[str, ...]
    outcome: str
    error: str | None
    stages: tuple[TransitionStage, ...]
    seconds: float
    released_bytes: int = 0
    restored_bytes: int = 0
    copied_bytes: int = 0


class Recorder:
    """Notes one transition. Its thread writes, any thread reads."""

    def __init__(self, pause: Iterable[str], resume: Iterable[str], move: Callable[[], Any]) -> None:
        """``move``: returns the object whose ``core`` is the transition of the core. None: it was dropped."""
        self._move = move
        self._trace = trace.active
        self._before = None if self._trace is None else _core.region_memory()
        self._number, self._began, self._since = next(_numbers), time.time(), time.monotonic()
        self._thread = threading.current_thread().name
        self._pause, self._resume = tuple(pause), tuple(resume)
        self._end_range = trace.begin_range(trace.title_of(self._pause, self._resume)) if trace.has_ranges else None
        self._own: list[tuple[str, float, str | None]] = []  # name, begin, guest
        self._ended: TransitionRecord | None = None
        _recorders.append(self)

    @property
    def core(self) -> Any:
        """The transition of the core. None: it is not made yet, or was dropped."""
        move = self._move()
        return None if move is None else move.core

    @property
    def is_unmade(self) -> bool:
        """Whether another thread still makes the transition, or was interrupted there."""
        return self._ended is None and self.core is None and self._move() is not None

    def enter(self, stage: str, guest: str | None = None) -> None:
        self._own.append((stage, time.monotonic() - self._since, guest))

    def end(self, outcome: str, error: BaseException | None = None, **nbytes: int) -> None:
        """Notes the end. Later calls have no effect."""
        with _adding:
            if self._ended is not None:
                return
            text = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
            core = self.core
            events = () if core is None else core.events
            self._ended = self._record(outcome, text, **nbytes)
            _add(self._ended, error, events)
        if self._end_range is not None:
            self._end_range()
        if self._trace is not None:
            self._trace.transition(self._before, self._since, self._ended, events)

    def record(self) -> TransitionRecord:
        if self._ended is None and self._move() is None:
            self.end("aborted")
        running = self._record("running", None)
        return self._ended or running  # it may have ended meanwhile

    def _record(self, outcome: str, error: str | None, **nbytes: int) -> TransitionRecord:
        core = self.core
        begins = [*((name, began, None) for name, began in (() if core is None else core.stages)), *self._own]
        begins.sort(key=lambda each: each[1])
        seconds = time.monotonic() - self._since
        ends = [*(began for _, began, _ in begins[1:]), seconds]
        stages = tuple(TransitionStage(name, at, end - at, guest) for (name, at, guest), end in zip(begins, ends))
        return TransitionRecord(
            self._number, self._began, self._thread, self._pause, self._resume, outcome, error, stages, seconds,
            **nbytes,
        )  # fmt: skip


_numbers = itertools.count(1)
_recorders: deque[Recorder] = deque(maxlen=_KEPT)
_totals: defaultdict[tuple[str, ...], float] = defaultdict(float)  # by figure and its labels
_adding = threading.RLock()  # a finalizer may end another transition in the thread that has it
os.register_at_fork(before=_adding.acquire, after_in_parent=_adding.release, after_in_child=_adding.release)


def _add(ended: TransitionRecord, error: BaseException | None, events: Iterable[tuple[Any, ...]]) -> None:
    kind = "switch" if ended.pause and ended.resume else "pause" if ended.pause else "resume"
    _totals["transitions", kind, ended.outcome] += 1
    _totals["transitions_seconds", kind, ended.outcome] += ended.seconds
    for stage in ended.stages:
        _totals["stages", stage.name] += 1
        _totals["stages_seconds", stage.name] += stage.seconds
    if error is not None:
        _totals["failures", type(error).__name__] += 1
    _totals[("released_bytes",)] += ended.released_bytes
    _totals[("restored_bytes",)] += ended.restored_bytes
    _add_events(events)


def _add_events(events: Iterable[tuple[Any, ...]]) -> None:
    for _, what, began, until, nbytes, _ in events:  # of the core: "waits", "copies in" or "copies out"
        name, *direction = what.split()
        _totals[name, *direction] += 1
        _totals[f"{name}_seconds", *direction] += until - began
        _totals[f"{name}_bytes", *direction] += nbytes


def add_copies(device: str, began: float, until: float, nbytes: int) -> None:
    """Adds copies of offered contents to the sums, and to the trace. Begin and end are as ``time.monotonic()``."""
    with _adding:
        _add_events([(device, "copies out", began, until, nbytes, ())])
    if (writer := trace.active) is not None:
        track = f"{device} copies of offers"
        writer.event("X", "copies", "copies out", began, {"bytes": nbytes}, track=track, until=until)


def totals() -> dict[tuple[str, ...], float]:
    """Sums over all transitions that have ended, by figure and its labels. They never decrease."""
    with _adding:
        return dict(_totals)


def history() -> list[TransitionRecord]:
    """Returns the last 1,000 transitions of this process, with their stages. Those under way are among them.

    Transitions of all threads are in it, and those of phases and groups. Calls that select nothing are not.

    Returns:
        The transitions in the order of their begins: dataclasses of ``memsaver.figures``.

    Examples:
        >>> _ = memsaver.region("weights", device="cpu", backup="host").pause()
        >>> last = memsaver.history()[-1]
        >>> last.pause, last.resume, last.outcome, last.stages[0].name
        (('weights',), (), 'done', 'queue')
    """
    return [each.record() for each in list(_recorders) if not each.is_unmade]


_DRAW_S, _LOG_S = 0.1, 1.0  # between two looks at the progress
_CLOSE_S = 1.0  # for the last drawing: a terminal may be stopped


Display = Callable[[Recorder], AbstractContextManager[None]]


def display(progress: bool) -> Display | None:
    """Returns a function: during its context a thread shows the progress of the transition. None: it is not wanted.

    Raises TypeError unless a bool, ModuleNotFoundError with the extra to install if a bar needs it.
    """
    if progress is False:
        return None
    if progress is not True:
        raise TypeError(f"progress is {progress!r}, expected True or False")
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        is_terminal = False
    if not is_terminal:
        return partial(_shown, None)
    try:
        tqdm = import_module("tqdm").tqdm
    except ModuleNotFoundError:
        text = "progress=True needs tqdm; expected it from pip install 'memsaver[progress]'"
        raise ModuleNotFoundError(text, name="tqdm") from None
    # It starts no thread, and has a lock of its own: after an error of the terminal tqdm does not release the lock.
    return partial(_shown, type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": threading.RLock()}))


@contextmanager
def _shown(bar: Any, recorder: Recorder) -> Iterator[None]:
    """``bar``: its class. None: lines of the log."""
    ended = threading.Event()
    thread = daemon(partial(_show, recorder, ended, bar), "memsaver progress", ended.set)
    try:
        yield
    finally:
        ended.set()
        thread.join(_CLOSE_S)


def _show(recorder: Recorder, ended: threading.Event, bar: Any) -> None:
    title = trace.title_of(recorder._pause, recorder._resume)

    def look() -> tuple[int, int, str]:
        stages = recorder.record().stages
        return *recorder.core.progress, stages[-1].name if stages else ""

    with suppress(Exception):  # of the terminal, or since the transition was dropped
        if bar is None:
            while not ended.wait(_LOG_S) and recorder._ended is None:
                copied, planned, stage = look()
                log.info("%s: %s of %s copied, in stage %r", title, gib(copied), gib(planned), stage)
            return
        with bar(desc=title, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as drawn:
            is_last = False
            while not is_last:
                is_last = ended.wait(_DRAW_S) or recorder._ended is not None  # an interrupt has no time for `ended`
                drawn.n, drawn.total, stage = look()
                drawn.set_postfix_str(stage)
