"""torch's pools over regions of the host driver, in an allocator that is made up: see tests/fakes/fake_torch.cpp."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from typing import Any

import pytest

import memsaver
from memsaver import _core
from tests.support import ROOT

_numbers = itertools.count(1)


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
    loaded = ctypes.CDLL(library())
    loaded.fake_malloc.restype = ctypes.c_void_p
    return loaded


def bind(version: tuple[int, int] = (2, 11)) -> str:
    """Binds the allocator in the core, once in a process. Returns the reason why it is not used."""
    calls()
    return _core.bind_torch_pools(library(), *version)


class Pool:
    """A pool over a region, lent to a thread as after ``RegionPools.lend()``."""

    def __init__(self, region: memsaver.Region, uses: int = 1) -> None:
        self.number = next(_numbers)
        self.id = 0, self.number
        alloc, free = region._core.entry_points()
        calls().fake_pool(ctypes.c_ulonglong(self.number), ctypes.c_void_p(alloc), ctypes.c_void_p(free))
        _core.add_torch_pool(self.id, region._core, uses)

    def malloc(self, nbytes: int) -> int | None:
        found: int | None = self._call("malloc", ctypes.c_size_t(nbytes))
        return found

    def free(self, address: int | None) -> None:
        """The block is torch's from now on: cached."""
        self._call("free", ctypes.c_void_p(address))

    def use(self, change: int) -> None:
        self._call("use", ctypes.c_int(change))

    @property
    def is_there(self) -> bool:
        return bool(self._call("is_there"))

    def take_back(self) -> None:
        _core.take_back_torch_pool(self.id)

    def lend(self) -> bool:
        return _core.lend_torch_pool(self.id)

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(calls(), f"fake_{name}")(ctypes.c_ulonglong(self.number), *arguments)


def cached(region: memsaver.Region, *sizes: int) -> Pool:
    """A pool that no thread uses, with free blocks of these sizes."""
    pool = Pool(region)
    for address in [pool.malloc(nbytes) for nbytes in sizes]:
        assert address is not None
        pool.free(address)
    pool.take_back()
    return pool
