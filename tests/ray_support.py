"""Helpers of actors in several test files. Actors get them by value: workers cannot import this file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import memsaver


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
