"""Trim: regions return chunks that they do not need, and contents move out of large chunks with holes."""

from __future__ import annotations

import time
from functools import partial

from memsaver import _core
from memsaver._adapter import loaded
from memsaver._arguments import Bounds
from memsaver._moves import active
from memsaver.regions import Region, Selection, find


def tighten(each: Region) -> None:
    """As ``trim()`` of one region. torch's pools are not changed."""
    _core.trim(each._core, partial(_is_free, each))


def _is_free(each: Region) -> bool:
    """Whether no thread is inside a region, so that its contents can move."""
    return (torch := loaded()) is None or not torch.is_entered(each)


def trim(tags: Selection = None, *, timeout: float | None = None) -> None:
    """Releases memory that active regions hold and do not need, after waiting for the device. Contents are kept.

    Afterwards a region maps at most its allocated bytes plus 5 % plus 48 MiB, as far as free memory allows. If large
    chunks have holes, contents move to smaller chunks under the same addresses. Nothing else may use the region
    meanwhile, as in a pause. A region keeps its chunks while a thread is inside it or another process is attached. A
    thread that enters it, and a guarded replay, wait for the chunk that moves.

    A pool of torch cannot shrink, so a new pool takes its place. Segments with live tensors are freed after the tensors
    by ``torch.cuda.empty_cache()``. Pools with graphs are not changed.

    Args:
        tags: A tag, a Region, several of either, or None for all regions.
        timeout: Seconds to wait for the device's work, transitions and guarded replays. None: no bound.

    Raises:
        TypeError: ``tags`` is not a selection.
        ValueError: A tag has no region, or ``timeout`` is negative.
        WaitTimeoutError: ``timeout`` ended a wait.
        memsaver.Error: A graph is being captured.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> kept = kv.empty((16 << 20,), torch.uint8)
        >>> freed = kv.empty((128 << 20,), torch.uint8)
        >>> del freed
        >>> memsaver.trim("kv_cache")
        >>> kv.mapped_bytes <= kv.allocated_bytes * 1.05 + (48 << 20)
        True
    """
    bound = Bounds(timeout).timeout
    deadline = None if bound is None else time.monotonic() + bound
    chosen = active(find(tags))
    if (torch := loaded()) is not None:
        torch.trim(chosen)
    for each in chosen:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        _core.trim(each._handle, partial(_is_free, each), left)
