"""What a figure is kept with: when, on what, and of which commit."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import torch


def provenance(device: str) -> dict[str, Any]:
    """Of figures from this kind of device, ready for JSON. ``MEMSAVER_COMMIT`` names that of a copy without git."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("MEMSAVER_COMMIT") or _commit(),
        "hardware": _hardware(device),
        "torch": torch.__version__,
    }


def _commit() -> str:
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here: the figures count for more
        return ""


def _hardware(device: str) -> str:
    if device != "cuda":
        return f"host, {os.cpu_count()} cores"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "GPUs of other nodes"
