"""Captures of CUDA graphs that torch did not begin. The library cannot detect them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memsaver import _core


@contextmanager
def capturing() -> Iterator[None]:
    """Announces a capture that torch did not begin, such as one by CuPy, by cuda.core, or by C++ code.

    A wait for the device, or a mark on all of its streams, breaks every capture under way in the process, and streams
    cannot be enumerated. Within the block the library does neither, on all threads: a pause, a switch that pauses,
    ``memsaver.trim()`` and the end of an attachment raise memsaver.Error before they wait, and memory that is freed in
    a region is not reused until the end of the block. Entering the block waits for device-wide waits under way. Blocks
    can be nested, also over threads; the end of the last one counts.

    Captures by torch, those by ``memsaver.graph()`` included, need no such block.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> with memsaver.capturing():
        ...     # stream.begin_capture(); scale(x, out=y); graph = stream.end_capture()
        ...     try:
        ...         kv.pause()
        ...     except memsaver.Error as error:
        ...         print(type(error).__name__, kv.state)
        Error active
    """
    _core.capture_begins()
    try:
        yield
    finally:
        _core.capture_ends()
