"""Downloads torch's CUDA wheels, without NVIDIA's libraries, for the tests in tests/torch_cuda.

    python tools/torch_wheels.py 2.11.0 2.13.0

Each is unpacked in a folder of its own under ~/.cache/memsaver-torch (or $XDG_CACHE_HOME/memsaver-torch), for the
Python that runs this. It takes 1 to 1.7 GB. A version that is there is not downloaded again. Nothing deletes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_LEFT_OUT = ("torch/include/", "torch/share/", "torch/test/")  # not needed to import torch


def folder(version: str) -> Path:
    """Where a version is, once it was downloaded. Its name has the version of Python, since wheels have it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "memsaver-torch" / f"{version}-{sys.implementation.cache_tag}"


def download(version: str) -> Path:
    target = folder(version)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        # "===": not a build of the version for the CPU, which an index may have beside it.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", made]
        subprocess.run([*pip, f"torch==={version}"], check=True)
        (wheel,) = Path(made).glob("*.whl")
        unpacked = Path(made) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if not name.startswith(_LEFT_OUT)]
            archive.extractall(unpacked, wanted)
        (unpacked / "torch" / "bin" / "torch_shm_manager").chmod(0o755)
        try:
            unpacked.rename(target)
        except OSError:
            if not target.exists():  # else another process was first
                raise
        shutil.rmtree(unpacked, ignore_errors=True)
    return target


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(download(each), flush=True)
