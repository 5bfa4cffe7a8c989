"""GPUs without a GPU. Tests that are marked ``gpus`` run in a process whose CUDA driver and NVML are tests/device: one
process for all such tests of a file. Their memory is that of host devices (csrc/host), so processes share it.

Each test takes GPUs that no other test of its process has used: :func:`gpu` and :func:`gpus`. Their options:

=============== ====================================================================================================
exports         0: no POSIX descriptors, and cuMemCreate refuses them with 801
refusal         the code with which cuMemCreate refuses them, whatever the attribute of the device says
fabric          1: cuMemCreate knows fabric handles; otherwise the code with which it refuses them
virtual_memory  0: none
granularity     of mappings, in bytes, as the driver reports it
reach           ordinals of the GPUs whose memory it can access: "3,5". Default: all that one call makes
numa            the NUMA node of the system that its memory is
mps             1: an MPS server runs the work of all processes. -1: the driver is too old to tell
mig             1: NVML has it under MIG-
occupied        bytes that no listed process has
context         bytes of a context
own_pid         the number under which NVML lists this process, as in a container
processes       "4711:1024,...": pids and bytes that NVML lists beside this process
record          0, of the first GPU of a process: the driver is older than cuCtxRecordEvent
=============== ====================================================================================================
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

import numpy as np

import memsaver
from memsaver import _core
from tests import controls
from tests.broker_support import Running
from tests.support import holds, random_bytes, until

GIB = 1 << 30


def environment(known: str = "") -> dict[str, str]:
    """The variables with which a process finds the driver. It has two GPUs that no test uses, or :func:`entries`."""
    path = os.pathsep.join(filter(None, [str(controls.folder()), os.environ.get("LD_LIBRARY_PATH", "")]))
    core = {"MEMSAVER_TEST_CORE": str(_core.__file__), "MEMSAVER_TEST_GPUS": known or entries(range(2), GIB)}
    return {"LD_LIBRARY_PATH": path, **core}


def entries(ordinals: range, memory: int, **options: object) -> str:
    """GPUs that can access each other's memory, as the driver reads them."""
    options.setdefault("reach", ",".join(map(str, ordinals)))
    words = " ".join(f"{name}={value}" for name, value in options.items())
    # The size makes the device of a process its own: less than a page more than was asked for.
    return ";".join(f"{memory + os.getpid() % 8191 * 256 + each % 256} {words}" for each in ordinals)


def gpus(count: int, memory: int = 8 * GIB, **options: object) -> list[str]:
    """Adds GPUs to this process, and to the processes that it starts from now on. Returns their names."""
    known = os.environ["MEMSAVER_TEST_GPUS"]
    first = known.count(";") + 1
    ordinals = range(first, first + count)
    os.environ["MEMSAVER_TEST_GPUS"] = f"{known};{entries(ordinals, memory, **options)}"
    return [f"cuda:{ordinal}" for ordinal in ordinals]


def gpu(**options: Any) -> str:
    [name] = gpus(1, **options)
    return name


def change(device: str, **options: object) -> None:
    """Changes options of a GPU: the last value of an option counts."""
    known = os.environ["MEMSAVER_TEST_GPUS"].split(";")
    known[ordinal(device)] += "".join(f" {name}={value}" for name, value in options.items())
    os.environ["MEMSAVER_TEST_GPUS"] = ";".join(known)


def ordinal(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def call(name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
    """Calls a function of tests/device/gpus.cpp, or the driver's of this name."""
    function = getattr(controls.library(), name)
    function.restype = result
    return function(*arguments)


def driver_call(name: str) -> Any:
    """A function of the driver, as the core finds it."""
    found, status = ctypes.c_void_p(), ctypes.c_int()
    version, flags = 13000, ctypes.c_ulonglong(0)
    look_up = controls.library().cuGetProcAddress_v2
    assert look_up(name.encode(), ctypes.byref(found), version, flags, ctypes.byref(status)) == 0
    assert found.value is not None
    return ctypes.CFUNCTYPE(ctypes.c_int)(found.value)


def may_access(devices: list[str], address: int, nbytes: int) -> list[str]:
    """Those of the devices that may access all of a range."""
    where = ctypes.c_ulonglong(address), ctypes.c_size_t(nbytes)
    return [device for device in devices if call("gpus_may_access", ordinal(device), *where)]


def retained(device: str) -> int:
    """How often the primary context of a GPU is retained."""
    return int(call("gpus_retained", ordinal(device)))


def activate(device: str, on: bool = True) -> None:
    """Retains or releases the primary context of a GPU, as another library in the process may."""
    if on:
        call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), ordinal(device))
    else:
        call("cuDevicePrimaryCtxRelease", ordinal(device))


def take(device: str, nbytes: int) -> int:
    """Takes memory of a GPU without a handle, as cudaMalloc does. Returns its address."""
    return int(call("gpus_take", ordinal(device), ctypes.c_size_t(nbytes), result=ctypes.c_ulonglong))


def give(device: str, address: int) -> None:
    """Gives memory of :func:`take` back."""
    call("gpus_give", ordinal(device), ctypes.c_ulonglong(address))


def launch(device: str, address: int = 0, nbytes: int = 0, byte: int = 0) -> int:
    """Queues a kernel on a stream of its own, which ends with :func:`finish` and then writes to a range."""
    stream = controls.stream_create(device)
    controls.stream_write(stream, address, nbytes, byte)
    return stream


finish = controls.stream_release


class _Exchange:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the host's: memory of these devices is that


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
        self.expected = random_bytes(self.nbytes, seed)
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
        assert len(self.expected) == self.nbytes
        assert holds(self.address, self.expected), f"{self.nbytes} bytes at {self.address:#x} differ"


class GpuBroker(Running):
    """The broker of a GPU, with chunks of up to 1 GiB. This process, which must be ``isolated``, is its client."""

    def __init__(self, device: str, capacity: str = "1GiB") -> None:
        self.device = device
        super().__init__(capacity, "--device", device)
        os.environ["MEMSAVER_POOL_DIR"] = str(self.directory)
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
        memsaver.configure(pool="shared")

    def stop(self) -> None:
        self.kill(signal.SIGTERM)
        until(lambda: not _core.connected(self.device))
