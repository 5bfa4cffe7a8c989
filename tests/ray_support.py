"""What actors of several test files share. They get it by value: workers cannot import it."""

from __future__ import annotations

import ctypes

import numpy as np

import memsaver


class Buffer:
    """The only segment of a host region, without torch, which takes long to load."""

    def __init__(self, tag: str, nbytes: int) -> None:
        self.region = memsaver.region(tag, device="cpu", backup="host")
        self._owner = self.region._core.allocate_array(nbytes)
        ((offset, _),) = self.region._core.live()
        self.array = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.region._core.base + offset), np.uint8)

    def fill(self, seed: int) -> None:
        self.array[:] = np.random.default_rng(seed).integers(0, 256, self.array.size, np.uint8)

    def holds(self, seed: int) -> bool:
        return np.array_equal(self.array, np.random.default_rng(seed).integers(0, 256, self.array.size, np.uint8))
