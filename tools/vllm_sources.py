"""Fetches the sources of published vLLM versions that the drop-in is compared with and run on, for tests.

    python tools/vllm_sources.py 0.25.0 0.33.0

pip downloads the wheel of each version, about 300 MB. The files that are needed, less than 1 MB, stay in a folder of
the user's cache, apart from the checkout: ``memsaver-vllm/VERSION``. The wheel is deleted. A version there stays.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from memsaver.drop_in.vllm import sources

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memsaver-vllm"
_PLATFORMS = ("manylinux1_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 35)))


def fetch(version: str) -> None:
    """Raises subprocess.CalledProcessError if pip finds no wheel. The cache then has no folder of this version."""
    if (CACHE / version).is_dir():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{version}-") as made:
        folder = Path(made)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
            + [f"--platform={each}" for each in _PLATFORMS]
            + ["-d", made, f"vllm=={version}"],
            check=True,
        )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "files", [name for name in archive.namelist() if _is_needed(name)])
        shutil.move(folder / "files", CACHE / version)


def _is_needed(name: str) -> bool:
    path = PurePosixPath(name)
    modules = {each.partition(":")[0].replace(".", "/") for each in sources.NEEDED}
    module = path.parent if path.name == "__init__.py" else path.with_suffix("")
    if path.suffix == ".py":
        return str(module) in modules or path.parent == PurePosixPath("vllm/device_allocator")
    return name.endswith(".dist-info/METADATA")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("expected versions of vLLM, such as: python tools/vllm_sources.py 0.25.0 0.33.0")
    for each in sys.argv[1:]:
        fetch(each)
        print(f"vLLM {each}: {CACHE / each}")
