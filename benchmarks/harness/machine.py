"""The machine: the origin of a result, figures of devices and processes, and host memory without memsaver."""

from __future__ import annotations

import datetime
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import memsaver

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
_SLAB = GIB  # pinned and touched at a time
_SHARE = 64 * MIB  # touched by one thread at a time
_PAGE = 4096


def environment(device: str) -> dict[str, Any]:
    """The origin of a result. ``MEMSAVER_TEST_COMMIT`` names the commit of a tree without history."""
    on_gpu, tree = device != "cpu", str(Path(__file__).parent)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("MEMSAVER_TEST_COMMIT") or _said("git", "-C", tree, "rev-parse", "--short", "HEAD"),
        "memsaver": memsaver.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"host, {os.cpu_count()} cores",
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def nvidia_smi(device: str, figures: str, query: str = "gpu") -> list[str]:
    """The rows that answer a query about one device, without units. It makes no context."""
    # nvidia-smi counts all devices of the machine, and accepts the names of CUDA_VISIBLE_DEVICES.
    index, visible = int(device.partition(":")[2] or 0), os.environ.get("CUDA_VISIBLE_DEVICES")
    which = visible.split(",")[index] if visible else str(index)
    command = ["nvidia-smi", "-i", which, f"--query-{query}={figures}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def used_bytes(*devices: str) -> int:
    """Device memory in use by all processes, on all of these devices together."""
    return sum(0 if each == "cpu" else int(nvidia_smi(each, "memory.used")[0]) * MIB for each in devices)


def total_bytes(device: str) -> int:
    return int(nvidia_smi(device, "memory.total")[0]) * MIB


def listed_bytes(device: str, *pids: int) -> int | None:
    """Device memory of processes as nvidia-smi lists it, by default of this one. None if it does not, as in some
    virtual machines."""
    rows = [row.split(",") for row in nvidia_smi(device, "pid,used_memory", "compute-apps")]
    found = [used for pid, used in rows if int(pid) in (pids or (os.getpid(),)) and used.strip().isdigit()]
    return sum(map(int, found)) * MIB if found else None


def status(path: str = "/proc/self/status") -> dict[str, int]:
    """The lines of such a file that are in kB, in bytes."""
    with open(path) as lines:
        parts = [line.partition(":") for line in lines if line.endswith("kB\n")]
    return {name: int(value.split()[0]) * KIB for name, _, value in parts}


def anonymous(nbytes: int) -> torch.Tensor:
    """Host memory of the system, not yet touched, in huge pages if it has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def touch(memory: torch.Tensor) -> float:
    """Makes memory real. Returns seconds. The first touch in a virtual machine is slow, since the machine may grow."""

    def fill(begin: int) -> None:
        memory[begin : begin + _SHARE : _PAGE].fill_(1)

    begun = time.perf_counter()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for slab in range(0, memory.numel(), _SLAB):
            list(pool.map(fill, range(slab, min(slab + _SLAB, memory.numel()), _SHARE)))
    return time.perf_counter() - begun


def pinned(nbytes: int) -> torch.Tensor:
    """Host memory that CUDA copies at full rate, until the process ends. cudaMallocHost needs ten times as long."""
    memory = anonymous(nbytes)
    touch(memory)
    for slab in range(0, nbytes, _SLAB):
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr() + slab, min(_SLAB, nbytes - slab), 0)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister returned {int(error)} at {slab} of {nbytes} bytes, expected 0")
    return memory


def _said(*command: str) -> str | None:
    """The first line that a command printed; None if there is none."""
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[0]
    return None
