"""Controls of tests: failures of calls, host devices under work, a virtual clock (tests/device/controls.h).

The library is compiled on first use and kept under build/, by the text of its sources. It replaces entries of the
tables of functions in the core. Under other names it is a CUDA driver without a GPU: see tests/gpus.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memsaver import _core

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("error", "memory", "after")
FOREVER = 1 << 62
_HEADERS = ("base/clock.h", "base/files.h", "base/ranges.h", "driver/cuda_api.h", "host/calls.h")
# The result and the arguments of each function.
_TYPES = {
    "v": None, "i": ctypes.c_int, "u": ctypes.c_uint64, "z": ctypes.c_size_t, "d": ctypes.c_double,
    "s": ctypes.c_char_p, "p": ctypes.c_void_p,
}  # fmt: skip
_FUNCTIONS = {
    "install": "v p", "install_cuda": "i p", "arm": "v uis", "calls": "u ", "fail": "v siuu",
    "hold": "v siu", "stopped": "i s", "overdue": "s ", "count": "u s", "disarm": "v ", "system_files": "v s",
    "device": "i z", "stream": "u i", "write": "v uuzid", "touch": "v uuzd", "read": "v uuzdpp", "release": "v u",
    "delay_marks": "v d", "delay_copies": "v d", "support_record": "v i", "begin_capture": "v ",
    "end_capture": "i ", "broken": "s ", "kill": "v i", "is_lost": "i i", "reset": "v ", "pinned": "z ",
    "use_virtual_clock": "v i", "now": "d ", "pass": "v d",
}  # fmt: skip


def folder_of(name: str, sources: list[Path], *flags: str) -> Path:
    """A folder under build/ with a library of this name, compiled from these sources if they have changed."""
    headers = [*(ROOT / "csrc" / name for name in _HEADERS), ROOT / "tests" / "device" / "controls.h"]
    text = b"".join(each.read_bytes() for each in [*sources, *headers]) + " ".join(flags).encode()
    target = ROOT / "build" / "device" / hashlib.sha256(text).hexdigest()[:16]
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "the tests need a C++ compiler"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a run begin together, and one of them compiles
        if not target.exists():
            made = Path(tempfile.mkdtemp(dir=target.parent))
            options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Wshadow", "-shared", "-fPIC", "-pthread"]
            command = [compiler, *options, f"-I{ROOT / 'csrc'}", *map(str, sources), *flags, "-ldl"]
            subprocess.run([*command, "-o", str(made / name)], check=True)
            made.rename(target)
    return target


@functools.cache
def folder() -> Path:
    """The folder of the library, where it is libcuda.so.1 and libnvidia-ml.so.1."""
    made = folder_of("libcuda.so.1", [ROOT / "tests" / "device" / name for name in ("controls.cpp", "gpus.cpp")])
    second = made / "libnvidia-ml.so.1"  # two names of one file, which the loader opens once
    if not second.exists():
        with tempfile.TemporaryDirectory(dir=made) as other:
            os.link(made / "libcuda.so.1", Path(other) / second.name)
            os.replace(Path(other) / second.name, second)
    return made


@functools.cache
def _core_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_core.__file__))


@functools.cache
def library() -> Any:
    made = ctypes.CDLL(str(folder() / "libcuda.so.1"))
    for name, types in _FUNCTIONS.items():
        function = getattr(made, f"controls_{name}")
        result, _, arguments = types.partition(" ")
        function.restype, function.argtypes = _TYPES[result], [_TYPES[each] for each in arguments]
    made.controls_install(ctypes.cast(_core_library().memsaver_table, ctypes.c_void_p))
    return made


def _call(name: str, *arguments: Any) -> Any:
    return getattr(library(), f"controls_{name}")(*arguments)


library()  # before another thread uses the tables


def with_cuda() -> bool:
    """Failures of the CUDA driver's calls from here on. False: there is no driver."""
    return bool(_call("install_cuda", ctypes.cast(_core_library().memsaver_table, ctypes.c_void_p)))


# Failures and stops


def arm(nth: int, kind: str = "error", call: str = "") -> None:
    """The ``nth`` call from now (1: the next) fails, once. ``call``: count only calls of this name.

    ``kind``: "error"; "memory": the code of a full device; "after": the call takes effect and then reports an error.
    """
    assert nth > 0
    _call("arm", nth, KINDS.index(kind), call.encode())


def disarm() -> None:
    """Ends all failures and stops."""
    _call("disarm")


def calls() -> int:
    """The calls that can fail, since :func:`arm` or :func:`disarm`."""
    return int(_call("calls"))


def fail(call: str, code: int, times: int = 1, after: int = 0) -> None:
    """After ``after`` calls of this name, the next ``times`` return ``code``."""
    _call("fail", call.encode(), code, times, after)


def count(call: str) -> int:
    """All calls of this name so far."""
    return int(_call("count", call.encode()))


def hold(call: str, after: int = 0) -> None:
    """Calls of this name stop before they are made, until :func:`go_on`, at most for 20 seconds.

    ``after``: so many of them pass first, those included that are stopped now.
    """
    _call("hold", call.encode(), 1, after)


def go_on(call: str) -> None:
    _call("hold", call.encode(), 0, 0)
    check_stops()


def check_stops() -> None:
    """Fails if a call has gone on because its time was over: something waited for the call."""
    overdue: bytes = _call("overdue")
    assert not overdue, (
        f"{overdue.decode()} was stopped for 20 seconds: the test, or a thread of it, waits for the call"
    )


@contextmanager
def held(call: str) -> Iterator[None]:
    """Calls of this name stop before they are made, until the end of the block."""
    hold(call)
    try:
        yield
    finally:
        go_on(call)


def stopped(call: str) -> int:
    """How many calls of this name are stopped now."""
    return int(_call("stopped", call.encode()))


def system_files(folder: Path | None) -> None:
    """A file that this folder has under its full path takes the place of the system's."""
    _call("system_files", str(folder or "").encode())


# Work


def _number(device: str) -> int:
    if device != "cpu":
        return int(library().gpus_number(int(device.removeprefix("cuda:"))))
    return int(_call("device", _core.open_driver(device).memory()[1]))


def stream_create(device: str = "cpu") -> int:
    return int(_call("stream", _number(device)))


def _hold(seconds: float | None) -> float:
    return -1.0 if seconds is None else seconds


def stream_write(stream: int, address: int, nbytes: int, byte: int, hold: float | None = None) -> None:
    """A kernel that runs ``hold`` seconds after its launch, or when its stream is released (None)."""
    _call("write", stream, address, nbytes, byte, _hold(hold))


def stream_touch(stream: int, address: int, nbytes: int, hold: float | None = None) -> None:
    """A kernel that changes nothing."""
    _call("touch", stream, address, nbytes, _hold(hold))


class Read:
    """What a kernel has read."""

    _all: list[Read] = []  # a kernel may run after the test has forgotten it

    def __init__(self, stream: int, address: int, nbytes: int, hold: float | None) -> None:
        self._found = ctypes.create_string_buffer(max(nbytes, 1))
        self._nbytes = nbytes
        self._is_there = ctypes.c_int(0)
        self._all.append(self)
        _call("read", stream, address, nbytes, _hold(hold), ctypes.addressof(self._found), self._address())

    def _address(self) -> int:
        return ctypes.addressof(self._is_there)

    def bytes(self) -> bytes | None:
        """None: the kernel has not run."""
        return self._found.raw[: self._nbytes] if self._is_there.value else None


def stream_read(stream: int, address: int, nbytes: int, hold: float | None = None) -> Read:
    return Read(stream, address, nbytes, hold)


def stream_release(stream: int) -> None:
    """Returns when the kernels of the stream have run. 0: those of all streams."""
    _call("release", stream)


def marks_delay(seconds: float) -> None:
    """A mark passes at least this long after it was set."""
    _call("delay_marks", seconds)


def copies_delay(seconds: float) -> None:
    """A copy begins this long after it was queued."""
    _call("delay_copies", seconds)


def record_supported(on: bool) -> None:
    """False: the driver is older than cuCtxRecordEvent."""
    _call("support_record", int(on))


def pinned_bytes() -> int:
    """Host memory that is registered."""
    return int(_call("pinned"))


def capture_begin() -> None:
    _call("begin_capture")


def capture_end() -> bool:
    """False: a mark, a wait for the device, or an unsafe call broke it."""
    return bool(_call("end_capture"))


def broken() -> list[str]:
    """The names of the calls that have broken captures."""
    text: bytes = _call("broken")
    return text.decode().split()


def kill_context(device: str = "cpu") -> None:
    _call("kill", _number(device))


def context_lost(device: str = "cpu") -> bool:
    return bool(_call("is_lost", _number(device)))


def reset() -> None:
    """Restores the initial state of the host devices: no streams, delays or captures, and living contexts."""
    if _core.device_names():
        _call("reset")
        _core.forget_loss()
    Read._all.clear()


def virtual_clock(on: bool) -> None:
    _call("use_virtual_clock", int(on))


def clock_now() -> float:
    return float(_call("now"))


def clock_pass(seconds: float) -> None:
    """On a virtual clock."""
    _call("pass", seconds)
