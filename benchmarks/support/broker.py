"""A broker for the time of a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def broker(device: str, capacity: int) -> Iterator[str]:
    """A broker of this program's own. Yields the directory of its socket, for ``MEMSAVER_POOL_DIR``."""
    with tempfile.TemporaryDirectory(prefix="memsaver-") as directory:
        command = [sys.executable, "-m", "memsaver", "broker", "--device", device, "--capacity", str(capacity)]
        environ = {**os.environ, "MEMSAVER_POOL_DIR": directory}
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environ)
        try:
            while not any(name.endswith(".sock") for name in os.listdir(directory)):
                if process.poll() is not None:
                    raise RuntimeError(f"the broker ended with {process.returncode}")
                time.sleep(0.01)
            yield directory
        finally:
            process.terminate()
            process.wait()
