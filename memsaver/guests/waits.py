"""Calls that may block for ever, within a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from memsaver._results import daemon, run_into

_T = TypeVar("_T")
_WATCH_S = 0.1


def within(
    function: Callable[[], _T],
    timeout: float,
    otherwise: str,
    *,
    device: int | None = None,
    discard: Callable[[_T], object] | None = None,
    watch: Callable[[], None] | None = None,
) -> _T:
    """The result of a function that runs in a thread of its own, since calls of a library cannot be interrupted.

    Raises its error, or TimeoutError after ``timeout`` seconds; ``otherwise`` begins the text. The thread then goes on,
    and the exit of the interpreter waits 2 s for it at most. ``device``: of CUDA, current in the thread; None: not set.
    ``discard``: called with a result that comes too late. ``watch``: called every 0.1 s meanwhile; its error ends the
    wait.
    """

    def run() -> _T:
        if device is not None:
            import torch

            torch.cuda.set_device(device)  # it is of a thread
        return function()

    def drop(future: Future[_T]) -> None:
        if discard is not None and future.exception() is None:
            discard(future.result())

    future: Future[_T] = Future()
    until = time.monotonic() + timeout
    try:
        daemon(partial(run_into, future, run), "memsaver guest")
        while wait([future], max(0.0, min(until - time.monotonic(), timeout if watch is None else _WATCH_S))).not_done:
            if time.monotonic() >= until:
                raise TimeoutError(f"{otherwise} within {round(timeout, 2):g} s")
            if watch is not None:
                watch()
    except BaseException:
        future.add_done_callback(drop)
        raise
    return future.result()


def current_device() -> int | None:
    """The device of CUDA that is current in this thread, or None before torch uses CUDA."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None
