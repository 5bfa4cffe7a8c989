"""Helpers of actors in several test files. Actors get them by value: workers cannot import this file."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

import memsaver
from tests.support import fresh_device


class Buffer:
    """The only segment of a host region, without torch, which takes long to load."""

    def __init__(self, tag: str, nbytes: int) -> None:
        self.region = memsaver.region(tag, device="cpu", backup="host")
        self._owner = self.region._core.allocate_array(nbytes)
        ((begin, _),) = self.region._core.live()
        self.array = np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(begin)), np.uint8)

    def fill(self, seed: int) -> None:
        self.array[:] = np.random.default_rng(seed).integers(0, 256, self.array.size, np.uint8)

    def holds(self, seed: int) -> bool:
        return np.array_equal(self.array, np.random.default_rng(seed).integers(0, 256, self.array.size, np.uint8))


@contextmanager
def cluster_of_one_machine(**options: Any) -> Iterator[None]:
    """A small Ray cluster of this machine alone. `options`: of ray.init()."""
    import ray

    small = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
    ray.init(address="local", **{**small, "log_to_driver": False, **options})
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def cluster_with_a_device(tests: ModuleType) -> Iterator[None]:
    """Such a cluster, with a host device of its own. `tests`: the module with the classes of the actors."""
    import ray

    for module in (tests, sys.modules[__name__]):  # workers cannot import them
        ray.cloudpickle.register_pickle_by_value(module)
    variables = {"MEMSAVER_HOST_DEVICE": fresh_device(), "OMP_NUM_THREADS": "1"}
    with cluster_of_one_machine(runtime_env={"env_vars": variables}):
        yield
