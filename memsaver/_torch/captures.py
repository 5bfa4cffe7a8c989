"""Captures of CUDA graphs by torch, of which the core is told: a device-wide wait would break one under way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memsaver import _adapter, _core

_under_way: dict[int, tuple[weakref.finalize[Any, Any], Any]] = {}  # the end and the pool, by the id of the graph
Failed = Callable[[torch.cuda.CUDAGraph, tuple[int, int]], object]
"""Called with a graph whose capture could not end, and the id of its pool."""


def begin(graph: torch.cuda.CUDAGraph, pool: Any, call: Callable[[], None]) -> None:
    """Begins a capture by a function of torch."""
    if id(graph) in _under_way:  # a memsaver.CUDAGraph, whose method calls that of torch
        call()
        return
    _core.capture_begins()
    ends = weakref.finalize(graph, _ended, id(graph))  # also when a graph goes away in mid-capture
    ends.atexit = False
    _under_way[id(graph)] = ends, pool
    try:
        call()
    except BaseException:
        ends()
        raise


def end(graph: torch.cuda.CUDAGraph, call: Callable[[], None], failed: Failed) -> None:
    """Ends a capture by a function of torch."""
    ends, pool = _under_way.pop(id(graph), (lambda: None, None))
    try:
        call()
    except BaseException:
        if pool is not None:
            failed(graph, tuple(pool))
        raise
    finally:
        ends()


def _ended(key: int) -> None:
    _under_way.pop(key, None)
    _core.capture_ends()


def observe(failed: Failed) -> None:
    """Extends the methods of torch.cuda.CUDAGraph: see docs/what-it-touches.md."""
    original_begin, original_end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end

    def capture_begin(graph: torch.cuda.CUDAGraph, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        begin(graph, pool, partial(original_begin, graph, pool, *args, **kwargs))

    def capture_end(graph: torch.cuda.CUDAGraph) -> None:
        end(graph, partial(original_end, graph), failed)

    torch.cuda.CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign,assignment]
    torch.cuda.CUDAGraph.capture_end = capture_end  # type: ignore[method-assign,assignment]
    _adapter.note("captures")
