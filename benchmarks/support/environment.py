"""The origin of a result, kept with it: date, machine and commit."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import memsaver

TREE = Path(__file__).resolve().parent


def environment(device: str = "cuda") -> dict[str, Any]:
    """Of a benchmark on a device. ``MEMSAVER_TEST_COMMIT`` names the commit of a tree without history, as of a copy."""
    on_gpu = device != "cpu"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("MEMSAVER_TEST_COMMIT")
        or _said("git", "-C", str(TREE), "rev-parse", "--short", "HEAD"),
        "memsaver": memsaver.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"host, {os.cpu_count()} cores",
        "driver": _said(*_smi(device, "--query-gpu=driver_version")) if on_gpu else None,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def need_cuda(device: str = "cuda", count: int = 1) -> None:
    """Ends the benchmark with a word where the device, or so many of its kind, is not there to be measured."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cpu" and seen < max(count, 1 + _index(device)):
        what = device if _index(device) else f"{count} CUDA devices" if count > 1 else "a CUDA device"
        raise SystemExit(f"this benchmark needs {what}, and torch sees {seen or 'none'}")


def nvidia_smi(device: str, query: str) -> list[str]:
    """The rows that answer a query about one device, without units; asked without making a context."""
    command = _smi(device, query)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def listed_bytes(device: str) -> int | None:
    """Device memory of this process as nvidia-smi lists it. None where it does not, as in some virtual machines."""
    if device == "cpu":
        return None
    rows = [row.split(",") for row in nvidia_smi(device, "--query-compute-apps=pid,used_memory")]
    mine = [int(used) for pid, used in rows if pid.strip() == str(os.getpid()) and used.strip().isdigit()]
    return mine[0] << 20 if mine else None


def _smi(device: str, query: str) -> list[str]:
    # nvidia-smi counts all of the machine's devices, and accepts the names of CUDA_VISIBLE_DEVICES.
    index, visible = _index(device), os.environ.get("CUDA_VISIBLE_DEVICES")
    which = visible.split(",")[index] if visible else str(index)
    return ["nvidia-smi", "-i", which, query, "--format=csv,noheader,nounits"]


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _said(*command: str) -> str | None:
    """The first line that a command printed; None where there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
