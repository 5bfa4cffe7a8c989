"""The part of reclaim on demand that needs Python: torch's free blocks, and the log. See csrc/regions/reclaimer.h."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from memsaver import _core
from memsaver._adapter import loaded
from memsaver.errors import gib
from memsaver.process_names import process_name

log = logging.getLogger("memsaver")

_WAIT = "!"  # before the name of a device on which a call has waited for long
_EXIT_S = 4.0  # for the end of the thread

_lock = threading.Lock()
_thread: threading.Thread | None = None


def start() -> None:
    """Starts the thread of serve(), if it does not run."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=serve, name="memsaver-caches", daemon=True)
            _thread.start()
            atexit.register(stop, _thread)


def stop(thread: threading.Thread) -> None:
    """Ends a thread that answers queries before the interpreter, which would stop it at an arbitrary place."""
    _core.stop_queries()
    thread.join(_EXIT_S)


def serve() -> None:
    """Returns torch's free blocks when a call waits for memory, and logs long waits. Ends at the interpreter's exit.

    The core returns everything else. This thread gets the GIL when the threads that hold it let it go.
    """
    while (query := _core.next_cache_query()) is not None:
        try:
            if query.startswith(_WAIT):
                log_wait(query.removeprefix(_WAIT))
            else:
                _core.caches_returned(query, *_return(query))
        except Exception as error:  # the thread goes on, and a call that waits asks again
            log.warning("the memory that this process caches was not returned: %r", error)


def _return(device: str) -> tuple[int, str]:
    torch = loaded()
    if torch is None:
        return 0, ""
    try:
        return torch.return_caches(device)
    except Exception as error:
        log.warning("torch's free blocks on %s were not returned: %r", device, error)
        return 0, ""


def log_wait(device: str) -> None:
    waits, holders = _core.pool_waits(device)
    for nbytes, seconds in waits:
        log.info("waits for %s of %s since %.1f s; %s", gib(nbytes), device, seconds, describe(holders))


def describe(holders: list[tuple[int, int, int | None, str]]) -> str:
    """The other holders of memory, as text: the bytes of each, and the part that it keeps without use."""
    if not holders:
        return "the holders are not known yet"
    texts = [
        f"{process_name(pid)} (pid {pid}) holds {gib(nbytes)}" + (f", unused: {why}" if unused and why else "")
        for pid, nbytes, unused, why in holders
        if pid != os.getpid()
    ]
    return "; ".join(texts) or "no other process holds memory of the pool"
