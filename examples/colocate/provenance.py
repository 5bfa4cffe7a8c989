"""The origin of a figure: date, hardware, commit."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import torch


def provenance(device: str) -> dict[str, Any]:
    """The origin of figures from this kind of device, ready for JSON. ``MEMSAVER_TEST_COMMIT`` overrides git."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("MEMSAVER_TEST_COMMIT") or _commit(),
        "hardware": _hardware(device),
        "torch": torch.__version__,
    }


def _commit() -> str:
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:  # without git the figures come without a commit
        return ""


def _hardware(device: str) -> str:
    if device != "cuda":
        return f"host, {os.cpu_count()} cores"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "GPUs of other nodes"
