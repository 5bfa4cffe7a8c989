"""The end of vLLM's engine, which ends the waits of its workers.

vLLM's executor closes a pipe when it shuts down, for example after the end of one worker. The others then have five
seconds to return from their call, four more after SIGTERM, which vLLM ignores by then, and get SIGKILL. A wake-up may
wait longer for memory.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsaver.errors import Error

_MONITOR = "DeathPipeMonitor"  # the thread of a worker that reads the pipe: it ends when the pipe is closed
_LOOK_S = 0.1
_found: threading.Thread | None = None


class EndedError(Error):
    """The engine has ended or shuts down."""


@contextmanager
def bounding() -> Iterator[None]:
    """Within the with statement, a wait of the main thread raises EndedError when the engine shuts down.

    A no-op in other threads, and where vLLM has no such pipe: the engine is in this process, or Ray has the workers.
    """
    monitor = _monitor()
    previous: Any = signal.getsignal(signal.SIGTERM)  # vLLM's
    if monitor is None or not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    over = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not monitor.is_alive():
            raise EndedError("vLLM's engine has ended or shuts down, and this worker ends with it")
        previous(number, frame)

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if not monitor.is_alive():
                _thread.interrupt_main(signal.SIGTERM)  # runs the handler in the main thread; sends no signal
                return

    signal.signal(signal.SIGTERM, handle)
    threading.Thread(target=watch, name="memsaver engine", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, previous)


def _monitor() -> threading.Thread | None:
    """vLLM's thread, also after its end if an earlier call has found it."""
    global _found
    if _found is None:
        _found = next((each for each in threading.enumerate() if each.name == _MONITOR), None)
    return _found
