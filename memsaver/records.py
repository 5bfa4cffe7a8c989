"""The last transitions of the process, with their stages."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from memsaver import _core
from memsaver.errors import gib

log = logging.getLogger("memsaver")

_KEPT = 1000


@dataclass(frozen=True)
class TransitionStage:
    """A step of a transition.

    Attributes:
        name: The waits of ``WaitTimeoutError.stage`` and ``OutOfMemoryError.stage``: ``"queue"``, ``"readers"``,
            ``"launches"``, ``"device"``, ``"memory"``, ``"backup"``, ``"guests"``. ``"guests prepare"``,
            ``"guests leave"``, ``"guests come back"``: the method of a guest. ``"prepared"``: the transition waits for
            its commit by a group. ``"move"``: chunks and contents move.
        began_s: Seconds from the begin of the transition to that of the stage.
        seconds: Its duration: until the next stage began, until the end of the transition, or until now.
        guest: The name of the guest, if a method of a guest runs.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> _ = kv.pause()
        >>> memsaver.history()[-1].stages[0].name
        'queue'
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

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> _ = kv.pause()
        >>> last = memsaver.history()[-1]
        >>> last.pause, last.outcome, last.stages[-1].name
        (('kv_cache',), 'done', 'move')
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

    def asdict(self) -> dict[str, Any]:
        """Returns the record as a dictionary for JSON.

        Returns:
            The attributes by name. Stages are dictionaries too.

        Examples:
            >>> kv = memsaver.region("kv_cache", device="cpu")
            >>> _ = kv.pause()
            >>> memsaver.history()[-1].asdict()["outcome"]
            'done'
        """
        return asdict(self)


class Recorder:
    """Notes one transition. Its thread writes, any thread reads."""

    def __init__(self, pause: Iterable[str], resume: Iterable[str]) -> None:
        self._number, self._began, self._since = next(_numbers), time.time(), time.monotonic()
        self._thread = threading.current_thread().name
        self._pause, self._resume = tuple(pause), tuple(resume)
        self.core_stages: Callable[[], list[tuple[str, float]] | None] = lambda: None
        """Returns the stages of the core so far, with their seconds. None: the transition was dropped."""
        self._own: list[tuple[str, float, str | None]] = []  # name, begin, guest
        self._ended: TransitionRecord | None = None
        _recorders.append(self)

    def enter(self, stage: str, guest: str | None = None) -> None:
        self._own.append((stage, time.monotonic() - self._since, guest))

    def end(self, outcome: str, error: BaseException | None = None, **nbytes: int) -> None:
        """Notes the end. Later calls have no effect."""
        if self._ended is None:
            text = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
            self._ended = self._record(outcome, text, **nbytes)
            _log_unreleased()

    def record(self) -> TransitionRecord:
        if self._ended is None and self.core_stages() is None:
            self.end("aborted")
        running = self._record("running", None)
        return self._ended or running  # it may have ended meanwhile

    def _record(self, outcome: str, error: str | None, **nbytes: int) -> TransitionRecord:
        begins = [*((name, began, None) for name, began in self.core_stages() or ()), *self._own]
        begins.sort(key=lambda each: each[1])
        seconds = time.monotonic() - self._since
        ends = [*(began for _, began, _ in begins[1:]), seconds]
        stages = tuple(TransitionStage(name, at, end - at, guest) for (name, at, guest), end in zip(begins, ends))
        return TransitionRecord(
            self._number, self._began, self._thread, self._pause, self._resume, outcome, error, stages, seconds,
            **nbytes,
        )  # fmt: skip


def _log_unreleased() -> None:
    """Warns once if the driver has refused to release memory."""
    global _is_logged
    nbytes = _core.unreleased_bytes()
    if nbytes and not _is_logged:
        _is_logged = True
        log.warning("the driver failed to release %s: they may be lost until this process ends", gib(nbytes))


_is_logged = False
_numbers = itertools.count(1)
_recorders: deque[Recorder] = deque(maxlen=_KEPT)


def history() -> list[TransitionRecord]:
    """Returns the last 1,000 transitions of this process, with their stages. Those under way are among them.

    Transitions of all threads are in it, and those of phases and groups. Calls that select nothing are not.

    Returns:
        The transitions in the order of their begins.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> _ = weights.pause(), weights.resume()
        >>> for each in memsaver.history()[-2:]:
        ...     print(each.pause, each.resume, each.outcome)
        ('weights',) () done
        () ('weights',) done
    """
    return [each.record() for each in list(_recorders)]
