"""The fake driver's controls, for programs that run on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import memsaver
from tests.support import until

_fake = ctypes.CDLL("libcuda.so.1")
_u64, _int = ctypes.c_uint64, ctypes.c_int
for _name, _result, _arguments in (
    ("fake_kill", None, [_int, _int]),
    ("fake_launch", _u64, [_int, _u64, ctypes.c_size_t, _int]),
    ("fake_finish", _int, [_u64]),
    ("fake_broken", ctypes.c_char_p, []),
    ("fake_run", _int, [_int, _u64, ctypes.c_size_t, _int]),
    ("fake_hold", None, [ctypes.c_char_p]),
    ("fake_release", None, [ctypes.c_char_p]),
    ("fake_held", _int, [ctypes.c_char_p]),
    ("fake_waiting", _int, [_int]),
    ("fake_fail", None, [ctypes.c_char_p, _int, _int, _int, _int]),
    ("fake_calls", _u64, [ctypes.c_char_p]),
    ("fake_activate", None, [_int, _int]),
    ("fake_retained", _int, [_int]),
    ("fake_access", _u64, [_u64, ctypes.c_size_t]),
    ("fake_used_bytes", _u64, [_int]),
    ("fake_take", None, [_int, ctypes.c_int64]),
    ("fake_end_makers", None, []),
    ("fake_stop_unmap", None, [_u64]),
    ("fake_reserved_bytes", _u64, []),
    ("fake_mapped_bytes", _u64, []),
    ("fake_registered_bytes", _u64, []),
    ("fake_events", _u64, []),
):
    _function = getattr(_fake, _name)
    _function.restype, _function.argtypes = _result, _arguments

FOREVER = 1 << 30


class _Exchange:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the host's: a fake device's memory is that


class Segment:
    """A segment of a region, and the bytes that it should hold. They fault while the region is paused."""

    def __init__(self, region: memsaver.Region, nbytes: int, seed: int | None = None) -> None:
        self._region = region
        self._owner = np.from_dlpack(_Exchange(region._core.allocate_array(nbytes)))  # frees the segment as it goes
        self.address = int(self._owner.ctypes.data)
        self.nbytes = nbytes
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        self.expected = np.zeros(0, np.uint8)
        if seed is not None:
            self.fill(seed)

    def fill(self, seed: int) -> None:
        self.expected = np.random.default_rng(seed).integers(0, 256, self.nbytes, np.uint8)
        self.bytes[:] = self.expected

    def view(self) -> np.ndarray[Any, Any]:
        """The backup, where it is."""
        return np.from_dlpack(_Exchange(self._region._core.backup_view(self.address, self.nbytes)))

    def read(self) -> np.ndarray[Any, Any]:
        """A copy of the backup."""
        found = np.zeros(self.nbytes, np.uint8)
        self._region._core.backup_read(self.address, self.nbytes, found.ctypes.data)
        return found

    def check(self) -> None:
        assert np.array_equal(self.bytes, self.expected), f"{self.nbytes} bytes at {self.address:#x} differ"


def kill(device: int, code: int = 700) -> None:
    """Ends a device's context: its calls return ``code`` from now on."""
    _fake.fake_kill(device, code)


def launch(device: int, address: int = 0, nbytes: int = 0, byte: int = 0) -> int:
    """Queues a kernel that runs until :func:`finish`, and then writes to a range, where one is given."""
    return int(_fake.fake_launch(device, address, nbytes, byte))


def broken() -> list[str]:
    """The names of the calls that have broken captures."""
    text: bytes = _fake.fake_broken()
    return text.decode().split()


def finish(kernel: int) -> int:
    """Ends a kernel. Returns 0, or the code that ended its context."""
    return int(_fake.fake_finish(kernel))


def kernel(device: int, address: int, nbytes: int, byte: int = 0) -> int:
    """A kernel that runs at once. Returns 0, or the code that ended its context."""
    return int(_fake.fake_run(device, address, nbytes, byte))


@contextmanager
def held(call: str) -> Iterator[None]:
    """Calls of this name stop before they do anything, until the end of the block."""
    hold(call)
    try:
        yield
    finally:
        go_on(call)


def hold(call: str) -> None:
    """Calls of this name stop before they do anything, until :func:`go_on`."""
    _fake.fake_hold(call.encode())


def go_on(call: str) -> None:
    _fake.fake_release(call.encode())


def until_stopped(call: str, count: int = 1) -> None:
    """Waits until so many calls are stopped by :func:`hold`."""
    until(lambda: int(_fake.fake_held(call.encode())) >= count)


def until_waiting(device: int) -> None:
    """Waits until a thread waits for the device's work."""
    until(lambda: int(_fake.fake_waiting(device)) > 0)


def fail(call: str, code: int, times: int = 1, after: int = 0, happens: bool = False) -> None:
    """After ``after`` calls, the next ``times`` return ``code``; ``happens``: after taking effect."""
    _fake.fake_fail(call.encode(), code, times, after, int(happens))


def calls(call: str) -> int:
    return int(_fake.fake_calls(call.encode()))


def activate(device: int, on: bool = True) -> None:
    """Retains or releases the device's primary context, as another library in the process may."""
    _fake.fake_activate(device, int(on))


def retained(device: int) -> int:
    return int(_fake.fake_retained(device))


def access(address: int, nbytes: int) -> list[int]:
    """The devices that may access all of a range."""
    bits = int(_fake.fake_access(address, nbytes))
    return [device for device in range(64) if bits >> device & 1]


def used_bytes(device: int = 0) -> int:
    return int(_fake.fake_used_bytes(device))


def take(device: int, nbytes: int) -> None:
    """Takes memory of a device without a handle, as cudaMalloc does. Negative: gives it back."""
    _fake.fake_take(device, nbytes)


def end_makers() -> None:
    """The makers of all imported memory end. NVML lists it for this process from now on."""
    _fake.fake_end_makers()


def stop_unmap(chunks: int) -> None:
    """The next cuMemUnmap() of more chunks unmaps so many of them and fails."""
    _fake.fake_stop_unmap(chunks)


def reserved_bytes() -> int:
    return int(_fake.fake_reserved_bytes())


def mapped_bytes() -> int:
    return int(_fake.fake_mapped_bytes())


def registered_bytes() -> int:
    return int(_fake.fake_registered_bytes())


def events() -> int:
    return int(_fake.fake_events())
