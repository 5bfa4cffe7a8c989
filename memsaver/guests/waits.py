"""Calls that may block for ever, within a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(function: Callable[[], _T], timeout: float, otherwise: str) -> _T:
    """The result of a function that runs in a thread of its own.

    Raises its error, or TimeoutError after ``timeout`` seconds; ``otherwise`` begins the text. The thread then goes on,
    since calls of a driver or of a library cannot be interrupted. The interpreter does not wait for it.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="memsaver guest", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise TimeoutError(f"{otherwise} within {timeout:g} s")
    if errors:
        raise errors[0]
    return results[0]
