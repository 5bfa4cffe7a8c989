"""Helpers of actors in several test files. Actors get them by value: workers cannot import this file."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import memsaver
from memsaver.turns.members import Colocated


class Buffer:
    """The only segment of a host region, without torch, which takes long to load."""

    def __init__(self, tag: str, nbytes: int, **options: Any) -> None:
        self.region = memsaver.region(tag, device="cpu", backup="host", **options)
        self._owner = self.region._core.allocate_array(nbytes)
        ((self.address, _),) = self.region._core.live()
        self.array = np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(self.address)), np.uint8)

    def fill(self, seed: int) -> None:
        self.array[:] = np.random.default_rng(seed).integers(0, 256, self.array.size, np.uint8)

    def holds(self, seed: int) -> bool:
        return np.array_equal(self.array, np.random.default_rng(seed).integers(0, 256, self.array.size, np.uint8))


def use(device: str) -> None:
    """In an actor: a host device, if it is not given by the environment. An environment of its own is slow to make."""
    if device:
        memsaver.configure(host_device=device)


class Member(Colocated):
    """A rank with one buffer, with contents by a seed. It ends or fails where a test says so."""

    def __init__(self, device: str, tag: str, nbytes: int, seed: int = 1, **options: Any) -> None:
        use(device)
        self.seed, self.dies, self.breaks = seed, "", False
        self.asks: Any = None  # an actor that it calls after a resume
        self.buffer = Buffer(tag, nbytes, **options)
        self.buffer.fill(seed)

    def look(self) -> tuple[str, bool]:
        """The state of the region, and whether its contents are intact if it is active."""
        state = self.buffer.region.state
        return state, state != "active" or self.buffer.holds(self.seed)

    def do(self, what: str) -> Any:
        """Evaluates an expression, in which the actor is `self`."""
        return eval(what, {"self": self, "memsaver": memsaver})

    def set(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def _reach(self, step: str) -> None:
        if step == self.dies:
            os.kill(os.getpid(), 9)

    def colocated_drain(self, tags: Any) -> None:
        self._reach("drain")

    def colocated_commit(self) -> Any:
        self._reach("commit")
        return super().colocated_commit()

    def resume(self, tags: Any = None, restore: Any = True, **bounds: Any) -> Any:
        if self.breaks:
            self.breaks = False
            raise memsaver.BackupError("broken for the test", needed_bytes=1, held_bytes=0)
        done = super().resume(tags, restore=restore, **bounds)
        if self.asks is not None:
            import ray

            ray.get(self.asks.look.remote())
        return done


def look(*actors: Any) -> list[str]:
    """The states of the regions of actors, whose contents are intact."""
    import ray

    found = ray.get([actor.look.remote() for actor in actors])
    assert all(each[1] for each in found)
    return [each[0] for each in found]


@contextmanager
def cluster_of_one_machine(**options: Any) -> Iterator[None]:
    """A small Ray cluster of this machine alone. `options`: of ray.init()."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    small = {"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
    ray.init(address="local", **{**small, "log_to_driver": False, **options})
    try:
        yield
    finally:
        ray.shutdown()
