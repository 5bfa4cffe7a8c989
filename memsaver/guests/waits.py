"""Calls that may block for ever, within a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from memsaver._results import daemon

_T = TypeVar("_T")
_WATCH_S = 0.1


class Call(Generic[_T]):
    """A function that runs in a thread of its own, since calls of a driver or of a library cannot be interrupted.

    The exit of the interpreter waits 2 s for it at most. ``device``: of CUDA, current in the thread; None: not set.
    ``discard``: called with the result of a call that is abandoned.
    """

    def __init__(
        self, function: Callable[[], _T], device: int | None = None, discard: Callable[[_T], object] | None = None
    ) -> None:
        self._function, self._device, self._discard = function, device, discard
        self._lock = threading.Lock()
        self._abandoned = False
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        daemon(self._run, "memsaver guest")

    def wait(self, timeout: float) -> bool:
        """Whether the call has ended, after a wait of at most ``timeout`` seconds."""
        return self._ended.wait(max(0.0, timeout))

    def result(self) -> _T:
        """The result of a call that has ended. Raises its error."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def abandon(self) -> None:
        """Nobody will ask for the result. The call goes on."""
        with self._lock:
            self._abandoned = True
            results, self._results = self._results, []
        if self._discard is not None:
            for each in results:
                self._discard(each)

    def _run(self) -> None:
        try:
            if self._device is not None:
                import torch

                torch.cuda.set_device(self._device)  # it is of a thread
            result = self._function()
            with self._lock:
                abandoned = self._abandoned
                if not abandoned:
                    self._results.append(result)
            if abandoned and self._discard is not None:
                self._discard(result)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


def within(
    function: Callable[[], _T],
    timeout: float,
    otherwise: str,
    *,
    device: int | None = None,
    discard: Callable[[_T], object] | None = None,
    watch: Callable[[], None] | None = None,
) -> _T:
    """The result of a function that runs in a thread of its own.

    Raises its error, or TimeoutError after ``timeout`` seconds; ``otherwise`` begins the text. The thread then goes on.
    ``watch``: called every 0.1 s meanwhile; its error ends the wait. Others: as for ``Call``.
    """
    call = Call(function, device, discard)
    until = time.monotonic() + timeout
    try:
        while not call.wait(min(until - time.monotonic(), timeout if watch is None else _WATCH_S)):
            if time.monotonic() >= until:
                raise TimeoutError(f"{otherwise} within {round(timeout, 2):g} s")
            if watch is not None:
                watch()
    except BaseException:
        call.abandon()
        raise
    return call.result()


def current_device() -> int | None:
    """The device of CUDA that is current in this thread, or None before torch uses CUDA."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None
