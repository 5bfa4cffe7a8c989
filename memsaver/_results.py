"""The result of a transition, now or later, and the threads that run functions for later results."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")
_EXIT_S = 2.0  # at the exit of the interpreter, for calls of daemon threads under way


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

    ``pause()``, ``resume()`` and ``switch()`` return it with ``wait=False``. ``result()`` and ``await`` return the
    ``Transition`` or raise its error. A transition cannot be cancelled: ``cancel()`` returns False.

    Attributes:
        pause: Tags of the regions and guests to pause.
        resume: Tags of the regions and guests to resume.

    Examples:
        >>> region = memsaver.region("optimizer", device="cpu", backup="host")
        >>> moving = region.pause(wait=False)
        >>> moving.result(timeout=60).paused
        ('optimizer',)
        >>> moving
        <memsaver.TransitionFuture pause=('optimizer',), done>
    """

    pause: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()

    def __repr__(self) -> str:
        tags = [f"{name}={tags!r}" for name, tags in (("pause", self.pause), ("resume", self.resume)) if tags]
        state = "running"
        if self.done():
            state = "done" if self.exception() is None else f"failed: {self.exception()!r}"
        return f"<memsaver.TransitionFuture {', '.join([*tags, state])}>"

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


def in_thread(function: Callable[[], _T], name: str, future: Future[_T] | None = None) -> Future[_T]:
    """Runs a function in a thread of its own. The interpreter waits for the thread. It cannot be cancelled."""
    future = Future() if future is None else future
    future.set_running_or_notify_cancel()
    threading.Thread(target=run_into, args=(future, function), name=name).start()
    return future


def run_into(future: Future[_T], function: Callable[[], _T]) -> None:
    """Calls a function, and sets its result or error."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


_daemons: dict[threading.Thread, Callable[[], object]] = {}  # that run, and the functions that end them


def daemon(function: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None) -> threading.Thread:
    """Runs a function in a thread for which the exit of the interpreter waits 2 s at most. It calls ``stop`` first.

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
