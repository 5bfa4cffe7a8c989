"""The trace of this process, in the Trace Event format of ui.perfetto.dev and chrome://tracing, and ranges of NVTX."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaver.trace.writer import Writer

log = logging.getLogger("memsaver")

active: Writer | None = None  # None: nothing is traced
has_ranges = False  # transitions are ranges of NVTX, by the option nvtx


def set_nvtx(wanted: bool) -> None:
    global has_ranges
    has_ranges = wanted


def title_of(pause: Iterable[str], resume: Iterable[str]) -> str:
    """Of a transition of these tags: ``"pause weights, kv_cache; resume params"``."""
    return "; ".join(f"{verb} {', '.join(tags)}" for verb, tags in (("pause", pause), ("resume", resume)) if tags)


def begin_range(name: str) -> Callable[[], object]:
    """Begins a range of NVTX. Returns a function that ends it, in any thread. An error ends all ranges, and is logged.

    The package nvtx makes it where torch is not imported.
    """
    try:
        if (ranges := sys.modules.get("torch.cuda.nvtx")) is not None:
            return partial(ranges.range_end, ranges.range_start(name))
        ranges = import_module("nvtx")
        return partial(ranges.end_range, ranges.start_range(name))
    except Exception as error:
        set_nvtx(False)
        log.error("the ranges of NVTX end: %r; expected torch's build for CUDA, or the package nvtx", error)
        return lambda: None


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
