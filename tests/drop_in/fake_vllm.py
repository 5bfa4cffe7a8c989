"""A package vllm with the names that memsaver replaces, and the surroundings that the originals have."""

from __future__ import annotations

import os
from pathlib import Path

MODULES = {
    "vllm/__init__.py": "",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/parallel_state.py": "_WORLD = None\n",
    "vllm/device_allocator/__init__.py": """
import dataclasses
from typing import Any

@dataclasses.dataclass
class AllocationData:
    handle: tuple[int, int, int, int]
    tag: str
    cpu_backup_tensor: Any = None
    is_asleep: bool = False
""",
    "vllm/device_allocator/cumem.py": """
import atexit
import logging
from vllm.device_allocator import AllocationData

logger = logging.getLogger("vllm")
cumem_available = True

def create_and_map(allocation_handle):
    raise NotImplementedError

def unmap_and_release(allocation_handle):
    raise NotImplementedError

class CuMemAllocator:
    instance = None
    default_tag = "default"

    @staticmethod
    def get_instance():
        assert cumem_available
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
            atexit.register(CuMemAllocator._shutdown_singleton)
        return CuMemAllocator.instance

    @staticmethod
    def _shutdown_singleton():
        if CuMemAllocator.instance is not None:
            CuMemAllocator.instance.release_pools()
""",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu_worker.py": """
import logging

logger = logging.getLogger("vllm")

class Worker:
    freed_bytes = 0
    rank = 0
    error = None
    call = staticmethod(lambda: None)

    def __init__(self):
        from types import SimpleNamespace

        self.parallel_config = SimpleNamespace(
            distributed_executor_backend="mp", world_size=1, data_parallel_rank=0
        )

    def wake_up(self, tags=None):
        if self.error is not None:
            raise self.error
        self.call()
        return "awake"

    def sleep(self, level=1):
        assert level in (1, 2), "level is unknown"
        assert self.freed_bytes >= 0, "Memory usage increased after sleeping."
        return level
""",
    "vllm/device_allocator/sleep_mode_backend.py": """
class CuMemBackend:
    pass

class SleepModeBackendFactory:
    registry = {}

    @classmethod
    def register_backend(cls, name, module_path, class_name):
        cls.registry[name] = module_path, class_name
""",
}
SOURCE = MODULES["vllm/device_allocator/cumem.py"]


def write(folder: Path, version: str = "9.9.9", cumem: str = SOURCE) -> None:
    """Write the package and its metadata."""
    for name, text in {**MODULES, "vllm/device_allocator/cumem.py": cumem}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def before(folder: Path) -> str:
    """A value for PYTHONPATH that has this folder first."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
