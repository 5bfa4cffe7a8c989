"""The trace of this process, in the Trace Event format, which ui.perfetto.dev and chrome://tracing read."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaver.trace.writer import Writer

active: Writer | None = None  # None: nothing is traced


def write_to(path: str | None) -> None:
    """Begins a trace, or ends it (None)."""
    global active
    former, active = active, None
    if former is not None:
        former.end()
    if path is not None:
        from memsaver.trace.writer import Writer  # which takes long to import

        active = Writer(path)


@atexit.register
def _end() -> None:
    if active is not None:
        active.end(exits=True)


def _begin_anew() -> None:
    global active
    if active is not None:
        active = type(active)(active.path)


os.register_at_fork(after_in_child=_begin_anew)
