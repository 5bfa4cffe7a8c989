"""What every result is kept with: when, on what, and of which commit."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from typing import Any

import torch

import memsaver


def environment() -> dict[str, Any]:
    """``MEMSAVER_COMMIT`` names the commit where the tree has no history, as in a copy."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("MEMSAVER_COMMIT", commit),
        "memsaver": memsaver.__version__,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "host",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def need_cuda() -> None:
    """Ends the benchmark with a word where there is nothing to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
