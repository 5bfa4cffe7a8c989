"""A thread that answers requests of the core for which Python is needed: see csrc/pool/queries.h."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from memsaver import _core, ledger
from memsaver._adapter import loaded
from memsaver._results import add_copies, daemon
from memsaver.errors import gib
from memsaver.process_names import process_name

log = logging.getLogger("memsaver")

_lock = threading.Lock()
_thread: threading.Thread | None = None


def start() -> None:
    """Starts the thread, if it does not run."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = daemon(_serve, "memsaver-queries", _core.stop_queries)


def _serve() -> None:
    """Gets the GIL when the threads that hold it let it go. The core does everything that needs no Python."""
    answers: dict[str, Callable[[str], None]] = {
        "caches": _return_caches, "report": _report, "wait": log_wait, "copies": _note_copies,
    }  # fmt: skip
    while (query := _core.next_query()) is not None:
        kind, text = query
        try:
            answers[kind](text)
        except Exception as error:  # the thread goes on, and the request is repeated
            log.warning("a request of the memory of %s was not answered (%s): %r", text.partition(" ")[0], kind, error)


def _note_copies(text: str) -> None:
    device, began, ended, nbytes = text.split()
    add_copies(device, int(began) / 1e9, int(ended) / 1e9, int(nbytes))


def _report(device: str) -> None:
    try:
        _core.send_report(device, ledger.encoded(device))
    except Exception as error:  # the broker is answered without a report
        log.debug("no report of %s was sent: %r", device, error)


def _return_caches(device: str) -> None:
    """Returns torch's free blocks."""
    torch, found = loaded(), (0, "")
    try:
        found = (0, "") if torch is None else torch.return_caches(device)
    finally:
        _core.caches_returned(device, *found)


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
