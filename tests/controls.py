"""Controls of tests: failures of calls, a host device under work, a virtual clock (tests/device/controls.h).

The library is compiled on first use and kept under build/, by the text of its sources. It replaces entries of the
tables of functions in the core.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from memsaver import _core

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("error", "memory", "after", "lost")
_HEADERS = ("base/clock.h", "base/files.h", "driver/cuda_api.h", "host/calls.h")
_u64, _size, _int, _double, _pointer = (
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_double,
    ctypes.c_void_p,
)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "install": (None, [_pointer]),
    "install_cuda": (_int, [_pointer]),
    "arm": (None, [_u64, _int, ctypes.c_char_p]),
    "disarm": (None, []),
    "calls": (_u64, []),
    "new_stream": (_u64, []),
    "write": (None, [_u64, _u64, _size, _int, _double]),
    "touch": (None, [_u64, _u64, _size, _double]),
    "read": (None, [_u64, _u64, _size, _double, _pointer, _pointer]),
    "release_stream": (None, [_u64]),
    "release_streams": (None, []),
    "delay_marks": (None, [_double]),
    "delay_copies": (None, [_double]),
    "keep_busy": (None, [_double]),
    "support_record": (None, [_int]),
    "begin_capture": (None, []),
    "end_capture": (_int, []),
    "kill_context": (None, []),
    "context_lost": (_int, []),
    "reset": (None, []),
    "use_virtual_clock": (None, [_int]),
    "now": (_double, []),
    "pass": (None, [_double]),
}


def _built() -> Path:
    source = ROOT / "tests" / "device" / "controls.cpp"
    files = [source, source.with_suffix(".h"), *(ROOT / "csrc" / name for name in _HEADERS)]
    target = (
        ROOT / "build" / "controls" / hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:16]
    )
    library = target / "controls.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "the controls of the tests need a C++ compiler"
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent))  # several runs may build it at once
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Wshadow", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(made / library.name)], check=True)
    try:
        made.rename(target)
    except OSError:  # another was first
        shutil.rmtree(made)
    return library


@functools.cache
def _core_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_core.__file__))


@functools.cache
def _library() -> Any:
    made = ctypes.CDLL(str(_built()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(made, f"controls_{name}")
        function.restype, function.argtypes = result, arguments
    made.controls_install(ctypes.cast(_core_library().memsaver_table, ctypes.c_void_p))
    return made


def _call(name: str, *arguments: Any) -> Any:
    return getattr(_library(), f"controls_{name}")(*arguments)


_library()  # before another thread uses the tables


def with_cuda() -> bool:
    """Failures of the CUDA driver's calls from here on. False: there is no driver."""
    return bool(_call("install_cuda", ctypes.cast(_core_library().memsaver_table, ctypes.c_void_p)))


def arm(nth: int, kind: str = "error", call: str = "") -> None:
    """The ``nth`` call from now (1: the next) fails, once. ``call``: count only calls of this name.

    ``kind``: "error"; "memory": the code of a full device; "after": the call takes effect and then reports an error;
    "lost": the context is dead from this call on.
    """
    assert nth > 0
    _call("arm", nth, KINDS.index(kind), call.encode())


def disarm() -> None:
    _call("disarm")


def calls() -> int:
    """The calls that can fail, since :func:`arm` or :func:`disarm`."""
    return int(_call("calls"))


def _device() -> None:
    _core.open_driver("cpu")


def stream_create() -> int:
    _device()
    return int(_call("new_stream"))


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
        _call(
            "read",
            stream,
            address,
            nbytes,
            _hold(hold),
            ctypes.addressof(self._found),
            ctypes.addressof(self._is_there),
        )

    def bytes(self) -> bytes | None:
        """None: the kernel has not run."""
        return self._found.raw[: self._nbytes] if self._is_there.value else None


def stream_read(stream: int, address: int, nbytes: int, hold: float | None = None) -> Read:
    return Read(stream, address, nbytes, hold)


def stream_release(stream: int) -> None:
    """Returns when the kernels of the stream have run."""
    _call("release_stream", stream)


def stream_release_all() -> None:
    _call("release_streams")


def marks_delay(seconds: float) -> None:
    """A mark passes at least this long after it was set."""
    _call("delay_marks", seconds)


def copies_delay(seconds: float) -> None:
    """A copy begins this long after it was queued."""
    _call("delay_copies", seconds)


def busy(seconds: float) -> None:
    """As if a kernel were always in flight that ends this much later."""
    _call("keep_busy", seconds)


def record_supported(on: bool) -> None:
    """False: the driver is older than cuCtxRecordEvent."""
    _call("support_record", int(on))


def capture_begin() -> None:
    _call("begin_capture")


def capture_end() -> bool:
    """False: a mark or a wait for the device broke it."""
    return bool(_call("end_capture"))


def kill_context() -> None:
    _device()
    _call("kill_context")


def context_lost() -> bool:
    _device()
    return bool(_call("context_lost"))


def reset() -> None:
    """Restores the initial state of the host device: no streams, delays or captures, and a live context."""
    if "cpu" in _core.device_names():
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
