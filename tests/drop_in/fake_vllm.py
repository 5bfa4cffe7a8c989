"""A package vllm with the names that memsaver replaces or relies on, and the surroundings that the originals have."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memsaver import drop_in, regions
from memsaver.drop_in.vllm import sources

CUMEM = "vllm/device_allocator/cumem.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
MODULES = {  # and an empty __init__.py in each folder without one
    "vllm/distributed/parallel_state.py": """
class GroupCoordinator:
    rank: int
    ranks: list[int]

_WORLD = None
""",
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
    CUMEM: """
import atexit
import logging

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
        CuMemAllocator.instance = CuMemAllocator.instance or CuMemAllocator()
        return CuMemAllocator.instance

    def __init__(self):
        self.pointer_to_data = {}

    def use_memory_pool(self, tag=None):
        pass

    def get_current_usage(self):
        return len(self.pointer_to_data)

    def close(self):
        self.release_pools()

    def sleep(self, offload_tags=None):
        for data in self.pointer_to_data.values():
            unmap_and_release(data.handle)

    def wake_up(self, tags=None):
        for data in self.pointer_to_data.values():
            create_and_map(data.handle)
""",
    "vllm/v1/executor/multiproc_executor.py": """

class MultiprocExecutor:
    pass
""",
    "vllm/v1/worker/worker_base.py": """
class WorkerBase:
    def __init__(self, vllm_config, rank):
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.rank = rank
""",
    WORKER: """
import logging
from vllm.v1.worker.worker_base import WorkerBase

logger = logging.getLogger("vllm")

class Worker(WorkerBase):
    freed_bytes = 0
    error = None
    call = staticmethod(lambda: None)

    def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False):
        super().__init__(vllm_config, rank)

    def wake_up(self, tags=None):
        return self._answer("awake")

    def discard(self, tags):
        return self._answer("discarded")

    def _answer(self, text):
        if self.error is not None:
            raise self.error
        self.call()
        return text

    def get_model(self):
        return self.model_runner.model

    def execute_model(self, scheduler_output):
        return self._answer("executed")

    def sleep(self, level=1):
        assert level in (1, 2), "level is unknown"
        freed_bytes = self.freed_bytes
        assert freed_bytes >= 0, "Memory usage increased after sleeping."
        logger.info("asleep")
""",
    "vllm/config/vllm.py": """
import dataclasses
from typing import Any

@dataclasses.dataclass
class VllmConfig:
    model_config: Any
    parallel_config: Any
    kv_transfer_config: Any = None
""",
    "vllm/config/model.py": """
class ModelConfig:
    enable_cumem_allocator: bool = True
""",
    "vllm/config/kv_transfer.py": """
class KVTransferConfig:
    kv_connector: str | None = "NixlConnector"

    @property
    def is_kv_transfer_instance(self):
        return self.kv_connector is not None
""",
    "vllm/config/parallel.py": """
class ParallelConfig:
    world_size: int = 1
    data_parallel_rank: int = 0
    distributed_executor_backend: object = "mp"
""",
}
Load = Callable[..., ModuleType]


def write(folder: Path) -> None:
    """Write the package and its metadata, with the version 9.9.9."""
    for name, text in MODULES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    info = folder / "vllm-9.9.9.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports the module of the allocator with the drop-in installed."""
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEMSAVER_DROP_IN", "vllm")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(drop_in, "_states", {})

    def load(more: str = "") -> ModuleType:
        """``more`` stands at the end of the module."""
        path = tmp_path / CUMEM
        path.write_text(path.read_text() + more)
        drop_in.install("vllm")
        return importlib.import_module(sources.MODULE)

    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    for region in regions.all_regions():
        if region.tag.startswith("vllm."):
            region.resume()
            region.close()


def worker(rank: int = 0, world_size: int = 1, replica: int = 0, transfer: Any = None, cumem: bool = True) -> Any:
    """A worker of the package, which is imported here. ``transfer``: the name of a KV connector; "": of none."""
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu_worker import Worker

    model, parallel, kv = ModelConfig(), ParallelConfig(), None if transfer is None else KVTransferConfig()
    model.enable_cumem_allocator = cumem
    parallel.world_size, parallel.data_parallel_rank = world_size, replica
    if kv is not None:
        kv.kv_connector = transfer or None
    return Worker(VllmConfig(model, parallel, kv), local_rank=rank, rank=rank, distributed_init_method="")


def before(folder: Path) -> str:
    """A value for PYTHONPATH that has this folder first."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
