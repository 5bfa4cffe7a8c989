"""torch's expandable segments, in an allocator that is made up, on GPUs that are (tests/gpus.py)."""

from __future__ import annotations

import ctypes
import functools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

import memsaver
from memsaver import _core
from memsaver.broker import pool_client, queries
from memsaver.regions import wrapper
from tests import controls
from tests.gpus import ordinal
from tests.support import MIB, ROOT

OUT_OF_MEMORY, NOT_PERMITTED, NOT_SUPPORTED = 2, 800, 801
_allocator = threading.RLock()  # as the mutex of torch's allocator, held over its calls of the driver


@functools.cache
def library() -> str:
    """The path of the library with torch's calls (tests/device/torch.cpp)."""
    source = ROOT / "tests" / "device" / "torch.cpp"
    name = "libc10_cuda.so"
    return str(controls.folder_of(name, [source], "-fno-optimize-sibling-calls", "-Wl,-z,relro") / name)


@functools.cache
def calls() -> Any:
    return ctypes.CDLL(library())


def default_pool(device: str, tag: str = "torch", backup: str = "host") -> memsaver.Region:
    """As ``memsaver.default_pool()``, over the allocator that is made up."""
    calls()  # loads the library
    pool_client.join(device)
    reason = _core.bind_default_pools(library())
    assert reason == "", reason
    return wrapper(_core.default_pool(tag, device, backup))


def empty_cache() -> int:
    with _allocator:
        cached = [(segment, piece) for segment in Segment.all for piece in sorted(segment.cached)]
        return next((code for segment, piece in cached if (code := segment.unmap(piece, piece + 1))), 0)


def empty_cache_on_demand() -> None:
    """Frees cached pieces when a process waits for memory, as the part that uses torch does by its empty_cache()."""

    def return_caches(device: str) -> tuple[int, str]:
        assert empty_cache() == 0
        return 0, ""

    queries.loaded = lambda: SimpleNamespace(return_caches=return_caches)  # type: ignore[assignment,return-value]
    queries.start()


class Segment:
    """torch's ExpandableSegment: addresses for ``most`` pieces. ``map()`` and others return the driver's code."""

    all: list[Segment] = []

    def __init__(self, device: str, piece_mib: int = 2, most: int = 16, at: int = 0, handle_types: int = 1) -> None:
        self.piece, self.most = piece_mib * MIB, most
        self.device, self.handle_types = ordinal(device), handle_types
        self.handles: dict[int, int] = {}
        self.cached: set[int] = set()  # pieces that are free blocks
        address = ctypes.c_uint64()
        wanted = ctypes.c_uint64(at)
        assert calls().torch_reserve(ctypes.byref(address), ctypes.c_size_t(self.piece * most), wanted) == 0
        self.address = address.value
        self.all.append(self)

    def _range(self, begin: int, end: int) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
        return ctypes.c_uint64(self.at(begin)), ctypes.c_size_t((end - begin) * self.piece)

    def map(self, begin: int, end: int, retries: int = 0) -> int:
        """Creates all pieces first, as torch does. Frees cached pieces and tries again if there is no memory."""
        with _allocator:
            assert not any(piece in self.handles for piece in range(begin, end)), "torch's assertion"
            for piece in range(begin, end):
                handle, size = ctypes.c_uint64(), ctypes.c_size_t(self.piece)
                code = int(calls().torch_create(ctypes.byref(handle), size, self.handle_types, self.device))
                self.handles[piece] = handle.value
                if code not in (0, OUT_OF_MEMORY):
                    return code  # as in torch, the handles stay
                if code == OUT_OF_MEMORY:
                    del self.handles[piece]
                    for made in range(begin, piece):
                        calls().torch_release(ctypes.c_uint64(self.handles.pop(made)))
                    return code if retries == 0 else empty_cache() or self.map(begin, end, retries - 1)
            for piece in range(begin, end):
                handle = ctypes.c_uint64(self.handles[piece])
                if code := int(calls().torch_map(*self._range(piece, piece + 1), handle)):
                    return code
            return self.peer(self.device, begin, end)

    def unmap(self, begin: int, end: int) -> int:
        with _allocator:
            for piece in range(begin, end):
                code = int(calls().torch_unmap(*self._range(piece, piece + 1)))
                if code := code or int(calls().torch_release(ctypes.c_uint64(self.handles[piece]))):
                    return code
                del self.handles[piece]
                self.cached.discard(piece)
            return 0

    def peer(self, device: int, begin: int, end: int) -> int:
        """Gives access to a device."""
        with _allocator:
            return int(calls().torch_allow(*self._range(begin, end), device))

    def export(self, piece: int) -> int:
        with _allocator:
            return int(calls().torch_export(ctypes.c_uint64(self.handles[piece])))

    def close(self) -> int:
        with _allocator:
            self.all.remove(self)
            for piece in list(self.handles):
                if code := self.unmap(piece, piece + 1):
                    return code
            return int(calls().torch_free(*self._range(0, self.most)))

    def at(self, piece: int) -> int:
        return self.address + piece * self.piece

    def write(self, piece: int, byte: int) -> None:
        ctypes.memset(self.at(piece), byte, self.piece)

    def read(self, piece: int) -> int:
        """The byte that the whole piece holds."""
        data = np.ctypeslib.as_array((ctypes.c_uint8 * self.piece).from_address(self.at(piece)))
        assert bool((data == data[0]).all())
        return int(data[0])
