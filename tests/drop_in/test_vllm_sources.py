"""The comparison of vLLM's sources with the parts that memsaver knows, and the drop-in over the real allocators.

``python tools/vllm_sources.py VERSION...`` fetches the sources of published versions. Tests without them are skipped.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from memsaver.drop_in.vllm import sources
from tests.drop_in import fake_vllm
from tests.drop_in.fake_vllm import CUMEM, WORKER
from tests.support import ROOT, run_python
from tools.vllm_sources import CACHE

VERSIONS = (
    "0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0",
    "0.32.0", "0.33.0",
)  # fmt: skip
SLEEP = "def sleep(self, offload_tags=None):"
END = '    logger.info("asleep")\n'
# The modules that vllm.device_allocator imports, without the rest of vLLM.
SURROUNDINGS = {
    "vllm/__init__.py": "",
    "vllm/logger.py": "from logging import getLogger as init_logger\n",
    "vllm/platforms.py": """
import types
current_platform = types.SimpleNamespace(is_rocm=lambda: False, is_cuda_alike=lambda: True)
""",
    "vllm/utils/__init__.py": "",
    "vllm/utils/system_utils.py": "def find_loaded_library(name):\n    return name\n",
    "vllm/utils/platform_utils.py": "def is_pin_memory_available():\n    return False\n",
    "vllm/utils/torch_utils.py": "PIN_MEMORY = False\n",
    "vllm/utils/mem_utils.py": "",
    "vllm/cumem_allocator.py": "init_module = python_create_and_map = python_unmap_and_release = None\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/device_communicators/__init__.py": "",
    "vllm/distributed/device_communicators/cuda_wrapper.py": "class CudaRTLibrary: pass\n",
}
# As a worker calls it: by the backend where vLLM has one, with the tags that vLLM's own backend keeps.
PROGRAM = """
import importlib, importlib.util
from memsaver import drop_in
drop_in.install("vllm")
module = importlib.import_module("vllm.device_allocator.cumem")
import torch
from vllm.device_allocator import get_mem_allocator_instance
allocator = get_mem_allocator_instance()
assert allocator is module.CuMemAllocator.instance
tags = "weights", "kv_cache", "runtime"
kept = {}
for number, tag in enumerate(tags):
    with allocator.use_memory_pool(tag):
        kept[tag] = torch.full((1 << 20,), float(number + 1))

def asleep():
    datas = allocator.pointer_to_data.values()
    assert all(isinstance(data, module.AllocationData) for data in datas)
    return {data.tag for data in datas if data.is_asleep}

def holds(tag):
    return bool((kept[tag] == tags.index(tag) + 1).all())

if importlib.util.find_spec("vllm.device_allocator.sleep_mode_backend"):
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    backend = CuMemBackend()
    suspend, resume = backend.suspend, backend.resume
else:
    suspend, resume = lambda level: allocator.sleep(("weights",) if level == 1 else ()), allocator.wake_up
deferrable = getattr(module, "DEFERRABLE_TAGS", tags)
used = allocator.get_current_usage()
for level in (1, 2):
    suspend(level)
    assert asleep() == set(tags)
    resume(["weights"])
    assert asleep() == set(deferrable) - {"weights"} and holds("weights") == (level == 1)
    resume(["kv_cache", "runtime"])
    assert asleep() == set() and allocator.get_current_usage() == used and not kept["kv_cache"].any()
    for number, tag in enumerate(tags):
        kept[tag].fill_(number + 1)
allocator.discard("kv_cache")
assert asleep() == {"kv_cache"} and holds("weights") and holds("runtime")
resume(None)
allocator.release_pools()
assert asleep() == set()
print(drop_in.status()["vllm"].state)
"""


@pytest.mark.parametrize(
    ("file", "old", "new", "difference"),
    [
        (CUMEM, SLEEP, "def sleep(self, offload_tags=None, level=1):",
         "CuMemAllocator has no line 'def sleep(self, offload_tags=None):'"),
        (CUMEM, "def unmap_and_release", "async def unmap_and_release",
         "the module has no line 'def unmap_and_release(allocation_handle):'"),
        (CUMEM, "class CuMemAllocator", "class Allocator", "there is no class CuMemAllocator"),
        (CUMEM, "            create_and_map(data.handle)", "            cumem_available or create_and_map(data.handle)",
         "CuMemAllocator.wake_up uses cumem_available, which memsaver does not know"),
        (CUMEM, "            create_and_map(data.handle)", "            self.restore(data)",
         "CuMemAllocator.wake_up uses self.restore, which memsaver does not know"),
        (CUMEM, f"    {SLEEP}", f"    {SLEEP}\n        from vllm.tiers import demote; demote()",
         "CuMemAllocator.sleep uses demote, which memsaver does not know"),
        (WORKER, "assert freed_bytes >= 0,", "assert freed_bytes > 0,",
         "Worker has no line \"assert freed_bytes >= 0, 'Memory usage increased after sleeping.'\""),
        (WORKER, END, f"{END}        self._answer('')\n",
         "Worker.sleep has \"self._answer('')\" after its assertion, expected lines of the log alone"),
        ("vllm/distributed/parallel_state.py", "_WORLD", "_STATE", "the module has no line '_WORLD'"),
    ],
)  # fmt: skip
def test_difference_is_named_with_its_file(tmp_path: Path, file: str, old: str, new: str, difference: str) -> None:
    fake_vllm.write(tmp_path)
    path = tmp_path / file
    assert path.read_text().count(old) >= 1
    path.write_text(path.read_text().replace(old, new))
    assert list(sources.differences(tmp_path / "vllm")) == [f"{path}: {difference}"]


def test_missing_file_is_named(tmp_path: Path) -> None:
    fake_vllm.write(tmp_path)
    (tmp_path / "vllm/config/parallel.py").unlink()
    [difference] = sources.differences(tmp_path / "vllm")
    assert re.fullmatch(r"there is no .*parallel\.py", difference)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SLEEP, 'def sleep(self, offload_tags: "tuple[str, ...] | None" = None) -> None:'),
        ("            create_and_map(data.handle)", "            atexit.register(print), create_and_map(data.handle)"),
        ("self, tag=None):\n        pass", "self, tag=None):\n        self.anything()"),
        ("    def wake_up", "    def prefetch(self, tags):\n        unmap_and_release(self.more)\n\n    def wake_up"),
        ("    def close(self):\n        self.release_pools()\n", ""),
        ("cumem_available = True", "try:\n    cumem_available = True\nexcept OSError:\n    cumem_available = False"),
    ],
)  # fmt: skip
def test_other_changes_are_accepted(tmp_path: Path, old: str, new: str) -> None:
    fake_vllm.write(tmp_path)
    path = tmp_path / CUMEM
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert not list(sources.differences(tmp_path / "vllm"))


@pytest.mark.parametrize("version", VERSIONS)
def test_drop_in_replaces_the_allocator_of_each_version(version: str, tmp_path: Path) -> None:
    if not (CACHE / version).is_dir():
        pytest.skip(f"no sources of vLLM: python tools/vllm_sources.py {version} fetches them")
    shutil.copytree(CACHE / version, tmp_path, dirs_exist_ok=True)
    assert not list(sources.differences(tmp_path / "vllm"))
    for name, text in SURROUNDINGS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = run_python(PROGRAM, MEMSAVER_DROP_IN="vllm", PYTHONPATH=fake_vllm.before(tmp_path))
    assert done.stdout.strip() == "active", done.stderr


def test_page_names_each_version_that_was_run() -> None:
    rows = re.findall(r"^\| ([\d., ]+) \|", (ROOT / "docs/frameworks.md").read_text(), flags=re.MULTILINE)
    assert sorted(each.strip() for row in rows for each in row.split(",")) == sorted(VERSIONS)
