"""torch's expandable segments over a fake CUDA driver (tests/fake_cuda), in an allocator that is made up: see
tests/fakes/fake_torch.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import memsaver
from memsaver import _core
from memsaver.broker import pool_client, queries
from memsaver.regions import wrapper
from tests.support import MIB, ROOT

OUT_OF_MEMORY, NOT_PERMITTED, NOT_SUPPORTED = 2, 800, 801


@functools.cache
def library() -> str:
    """The path of the compiled library, which later processes of a test run share."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = ROOT / "tests" / "fakes" / "fake_torch.cpp"
    folder = ROOT / "build" / "fake_torch"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"libc10_cuda-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            built = os.path.join(made, "built.so")
            flags = ["-std=c++17", "-shared", "-fPIC", "-O1"]
            subprocess.run([compiler, *flags, str(source), "-o", built, "-ldl", "-Wl,-z,relro"], check=True)
            os.replace(built, path)  # several processes may compile it at the same time
    return str(path)


@functools.cache
def calls() -> Any:
    return ctypes.CDLL(library())


def default_pool(tag: str = "torch", device: str = "cuda:0", backup: str = "host") -> memsaver.Region:
    """As ``memsaver.default_pool()``, over the allocator that is made up."""
    calls()
    pool_client.join(device)
    reason = _core.bind_default_pools(library())
    assert reason == "", reason
    return wrapper(_core.default_pool(tag, device, backup))


def empty_cache_on_demand() -> None:
    """Frees cached pieces when a process waits for memory, as the part that uses torch does by its empty_cache()."""

    def return_caches(device: str) -> tuple[int, str]:
        assert calls().fake_empty_cache() == 0
        return 0, ""

    queries.loaded = lambda: SimpleNamespace(return_caches=return_caches)  # type: ignore[assignment,return-value]
    queries.start()


class Segment:
    """An expandable segment of ``most`` pieces. ``map()`` and others return the driver's code."""

    def __init__(self, piece_mib: int = 32, most: int = 16, device: int = 0) -> None:
        self.piece = piece_mib * MIB
        self.number = calls().fake_segment(device, ctypes.c_size_t(self.piece), ctypes.c_size_t(most))
        assert self.number > 0
        calls().fake_segment_address.restype = ctypes.c_ulonglong
        self.address = int(calls().fake_segment_address(self.number))

    def map(self, begin: int, end: int, retries: int = 0) -> int:
        return int(calls().fake_segment_map(self.number, ctypes.c_size_t(begin), ctypes.c_size_t(end), retries))

    def unmap(self, begin: int, end: int) -> int:
        return int(calls().fake_segment_unmap(self.number, ctypes.c_size_t(begin), ctypes.c_size_t(end)))

    def cache(self, begin: int, end: int) -> None:
        calls().fake_segment_cache(self.number, ctypes.c_size_t(begin), ctypes.c_size_t(end))

    def peer(self, device: int, begin: int, end: int) -> int:
        sizes = ctypes.c_size_t(begin), ctypes.c_size_t(end)
        return int(calls().fake_segment_peer(self.number, device, *sizes))

    def export(self, piece: int) -> int:
        return int(calls().fake_segment_export(self.number, ctypes.c_size_t(piece)))

    def close(self) -> int:
        return int(calls().fake_segment_close(self.number))

    def at(self, piece: int) -> int:
        return self.address + piece * self.piece

    def write(self, piece: int, byte: int) -> None:
        ctypes.memset(self.at(piece), byte, self.piece)

    def read(self, piece: int) -> int:
        """The byte that the whole piece holds."""
        data = np.ctypeslib.as_array((ctypes.c_uint8 * self.piece).from_address(self.at(piece)))
        assert bool((data == data[0]).all())
        return int(data[0])
