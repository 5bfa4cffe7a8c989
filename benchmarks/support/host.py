"""Plain host memory: taken, touched by threads and pinned, without memsaver."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10
SLAB = GIB  # pinned and touched at a time
SHARE = 64 * MIB  # touched by one thread at a time
PAGE = 4096
THREADS = 16
SCARCE = 8 * GIB
MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number


def anonymous(nbytes: int, node: int = -1) -> torch.Tensor:
    """Bytes from the system, of huge pages and of a NUMA node (-1: any) where it has them; not there before a touch."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a wish, as the node is
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if node >= 0 and platform.machine() in MBIND:
        preferred, mask = 1, ctypes.c_ulong(1 << node)
        call = [ctypes.c_long(MBIND[platform.machine()]), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_ulong(nbytes)]
        ctypes.CDLL(None).syscall(
            *call, ctypes.c_int(preferred), ctypes.byref(mask), ctypes.c_ulong(64), ctypes.c_uint(0)
        )
    return tensor


def touch(memory: torch.Tensor) -> None:
    """Makes it real, in threads; in one where memory is scarce: a machine that grows with its use does so slowly."""

    def fill(begin: int) -> None:
        memory[begin : begin + SHARE : PAGE].fill_(1)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for slab in range(0, memory.numel(), SLAB):
            shares = range(slab, min(slab + SLAB, memory.numel()), SHARE)
            if status("/proc/meminfo").get("MemAvailable", SCARCE) < SCARCE:
                for share in shares:
                    fill(share)
            else:
                list(pool.map(fill, shares))


def touch_once(nbytes: int) -> float:
    """Has the system hand out this much and takes none of it; seconds. Memory of a virtual machine is slow once."""
    begin = time.perf_counter()
    touch(anonymous(nbytes))
    return time.perf_counter() - begin


def pinned(nbytes: int, node: int = -1) -> torch.Tensor:
    """Bytes that CUDA copies at full rate, for the rest of the process. cudaMallocHost needs ten times as long."""
    memory = anonymous(nbytes, node)
    touch(memory)
    for slab in range(0, nbytes, SLAB):
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr() + slab, min(SLAB, nbytes - slab), 0)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister: error {int(error)} at {slab} of {nbytes} bytes")
    return memory


def status(path: str = "/proc/self/status") -> dict[str, int]:
    """The lines of such a file that are in kB, in bytes."""
    found = {}
    with open(path) as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if value.endswith("kB\n"):
                found[name] = int(value.split()[0]) << 10
    return found
