"""NCCL's calls, of the library that this process has loaded: those that suspend and resume a communicator, and take
memory.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from pathlib import Path

from memsaver.errors import Error

SUSPENDS_SINCE = 22907  # 2.29.7, as ncclGetVersion() writes it

# Of nccl.h.
_SUCCESS, _IN_PROGRESS = 0, 7
_SUSPEND_MEM = 1
_STAT_SUSPEND, _STAT_SUSPENDED, _STAT_PERSIST = 0, 1, 2

_POLL_S = 0.001
_MAPS = Path("/proc/self/maps")
# torch's wheels load the first. Builds with NCCL inside have its calls in the second.
_NAMES = re.compile(r"/(libnccl\.so[.\d]*|libtorch_cuda\.so)$")


class Library:
    """A library with NCCL's calls. ``path``: its file.

    Raises memsaver.Error if it has none of them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._calls = ctypes.CDLL(path)
        version = ctypes.c_int()
        if not hasattr(self._calls, "ncclGetVersion"):
            raise Error(f"{path} has no ncclGetVersion(), expected a library with NCCL")
        self._check("ncclGetVersion", self._calls.ncclGetVersion(ctypes.byref(version)))
        self.version = version.value

    @property
    def can_suspend(self) -> bool:
        return self.version >= SUSPENDS_SINCE and all(
            hasattr(self._calls, name) for name in ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
        )

    def allocate_and_free(self, meanwhile: Callable[[], object]) -> None:
        """Takes a little memory of the current device, which initialises NCCL, and frees it. Raises memsaver.Error."""
        address = ctypes.c_void_p()
        self._check("ncclMemAlloc", self._calls.ncclMemAlloc(ctypes.byref(address), ctypes.c_size_t(1)))
        try:
            meanwhile()
        finally:
            self._check("ncclMemFree", self._calls.ncclMemFree(address))

    def suspend(self, communicator: int) -> None:
        """Releases the memory of a communicator. Collective over its ranks; raises memsaver.Error."""
        handle = ctypes.c_void_p(communicator)
        self._finish("ncclCommSuspend", communicator, self._calls.ncclCommSuspend(handle, ctypes.c_int(_SUSPEND_MEM)))

    def resume(self, communicator: int) -> None:
        """Takes the memory back, under the same addresses. Collective over its ranks; raises memsaver.Error."""
        self._finish("ncclCommResume", communicator, self._calls.ncclCommResume(ctypes.c_void_p(communicator)))

    def held_bytes(self, communicator: int) -> int:
        """Device memory of a communicator, as far as NCCL counts it. Raises memsaver.Error."""
        suspended = self._stat(communicator, _STAT_SUSPENDED)
        return self._stat(communicator, _STAT_PERSIST) + (0 if suspended else self._stat(communicator, _STAT_SUSPEND))

    def device(self, communicator: int) -> int | None:
        """The device of a communicator, or None if NCCL does not return it."""
        device = ctypes.c_int(-1)
        if not hasattr(self._calls, "ncclCommCuDevice"):
            return None
        result = self._calls.ncclCommCuDevice(ctypes.c_void_p(communicator), ctypes.byref(device))
        return device.value if result == _SUCCESS and device.value >= 0 else None

    def _stat(self, communicator: int, stat: int) -> int:
        value = ctypes.c_uint64()
        handle = ctypes.c_void_p(communicator)
        result = self._calls.ncclCommMemStats(handle, ctypes.c_int(stat), ctypes.byref(value))
        self._check("ncclCommMemStats", result)
        return value.value

    def _finish(self, call: str, communicator: int, result: int) -> None:
        """Calls on a communicator that does not block return before they have ended."""
        state = ctypes.c_int(result)
        while state.value == _IN_PROGRESS:
            time.sleep(_POLL_S)
            handle = ctypes.c_void_p(communicator)
            self._check("ncclCommGetAsyncError", self._calls.ncclCommGetAsyncError(handle, ctypes.byref(state)))
        self._check(call, state.value)

    def _check(self, call: str, result: int) -> None:
        if result == _SUCCESS:
            return
        described = f"error {result}"
        if hasattr(self._calls, "ncclGetErrorString"):
            self._calls.ncclGetErrorString.restype = ctypes.c_char_p
            described += f", {self._calls.ncclGetErrorString(result).decode()}"
        raise Error(f"{call}() of {self.path} failed: {described}")


def loaded(maps: Path = _MAPS) -> Library | None:
    """NCCL as this process has loaded it, or None. ``maps``: the kernel's list of the files in its memory."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    for path in sorted(filter(_NAMES.search, paths), key=lambda path: Path(path).name):  # libnccl first
        try:
            return Library(path)
        except (Error, OSError):
            continue
    return None
