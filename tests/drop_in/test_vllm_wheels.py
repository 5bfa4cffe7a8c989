"""The sources of published vLLM wheels against the reviewed ones, and the drop-in over the real module.

``MEMSAVER_TEST_WHEELS=0.25.0,0.33.0`` names the versions. Each downloads about 300 MB.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from memsaver.drop_in.vllm import sources
from tests.drop_in.fake_vllm import before
from tests.support import run_python

VERSIONS = list(filter(None, os.environ.get("MEMSAVER_TEST_WHEELS", "").split(",")))
# The modules that vllm.device_allocator imports, without the rest of vLLM.
SURROUNDINGS = {
    "vllm/__init__.py": "",
    "vllm/logger.py": "from logging import getLogger as init_logger\n",
    "vllm/platforms.py": "import types\ncurrent_platform = types.SimpleNamespace(is_rocm=lambda: False)\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/system_utils.py": "def find_loaded_library(name):\n    return name\n",
    "vllm/utils/torch_utils.py": "PIN_MEMORY = False\n",
    "vllm/utils/mem_utils.py": "",
    "vllm/cumem_allocator.py": "init_module = python_create_and_map = python_unmap_and_release = None\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/device_communicators/__init__.py": "",
    "vllm/distributed/device_communicators/cuda_wrapper.py": "class CudaRTLibrary: pass\n",
}
PROGRAM = """
import importlib, sys
from memsaver import drop_in
drop_in.install("vllm")
module = importlib.import_module("vllm.device_allocator.cumem")
import torch
allocator = module.CuMemAllocator.get_instance()
with allocator.use_memory_pool("weights"):
    weights = torch.full((1 << 20,), 3.0)
with allocator.use_memory_pool("kv_cache"):
    cache = torch.full((1 << 20,), 4.0)
used = allocator.get_current_usage()
allocator.sleep(offload_tags=("weights",))
assert all(data.is_asleep for data in allocator.pointer_to_data.values())
assert all(isinstance(data, module.AllocationData) for data in allocator.pointer_to_data.values())
allocator.wake_up()
assert bool((weights == 3).all()) and allocator.get_current_usage() == used == 8 << 20
print(drop_in.status()["vllm"].state)
"""

pytestmark = pytest.mark.skipif(not VERSIONS, reason="downloads wheels: MEMSAVER_TEST_WHEELS=0.25.0 names versions")


@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_has_a_reviewed_source_that_the_drop_in_replaces(version: str, tmp_path: Path) -> None:
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 35)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        + ["--platform=manylinux1_x86_64", *platforms, "-d", str(tmp_path), f"vllm=={version}"],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = ("vllm/device_allocator/", "vllm/v1/worker/gpu_worker.py", ".dist-info/METADATA")
        archive.extractall(tmp_path, [name for name in archive.namelist() if any(part in name for part in wanted)])
    wheel.unlink()
    assert sources.digest((tmp_path / "vllm/device_allocator/cumem.py").read_text()) in sources.REVIEWED
    worker = (tmp_path / "vllm/v1/worker/gpu_worker.py").read_text()
    sources.check_worker(worker)
    check_assertion(worker)
    for name, text in SURROUNDINGS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text)
    done = run_python(PROGRAM, MEMSAVER_DROP_IN="vllm", PYTHONPATH=before(tmp_path))
    assert done.stdout.strip() == "active", done.stderr


def check_assertion(source: str) -> None:
    """With a shared pool memsaver passes the assertion of a sleep, and so all that follows it: one line of the log."""
    [worker] = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == "Worker"]
    [sleep] = [each for each in worker.body if isinstance(each, ast.FunctionDef) and each.name == "sleep"]
    [at] = [number for number, each in enumerate(sleep.body) if isinstance(each, ast.Assert)]
    assert ast.unparse(sleep.body[at]) == "assert freed_bytes >= 0, 'Memory usage increased after sleeping.'"
    assert all(ast.unparse(each).startswith("logger.info(") for each in sleep.body[at + 1 :])
