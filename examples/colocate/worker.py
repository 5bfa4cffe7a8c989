"""The device of an actor, and the memory that all processes on it share."""

from __future__ import annotations

import socket
from operator import attrgetter
from typing import Any

import ray
import torch

import memsaver
from memsaver.ray import Colocated

from .options import Options
from .recipes import MIB, Recipe


class Worker(Colocated):
    """Base of both actors: a rank's device, and the pool that all processes there take memory from."""

    def __init__(self, recipe: Recipe, options: Options, rank: int) -> None:
        self.recipe, self.options, self.rank, self.sharers = recipe, options, rank, options.sharers
        if options.device == "cuda":
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)
            device_bytes = torch.cuda.get_device_properties(0).total_memory
            available = max(device_bytes - recipe.outside_bytes, device_bytes // 2)
            self.capacity = available - available % (2 * MIB)  # whole chunks of the smallest size
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
            memsaver.configure(host_device=options.host_device)
            self.capacity = self.sharers * recipe.host_bytes
        if options.in_regions:
            # A pause in one process and a resume in another run at the same time, through the pool's chunks. Sent
            # tensors keep their memory: the trainer gets the engine's own weights.
            pool = "shared" if options.memory == "memsaver" else "process"
            memsaver.configure(pool=pool, pool_capacity=self.capacity, patches="multiprocessing")
        self.own_bytes = self.capacity // self.sharers

    def release_cache(self) -> None:
        """Wait for the device, and return the free memory of torch's default pool."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def ask(self, name: str, *arguments: Any) -> Any:
        """The value of an attribute of this actor, such as `engine.config`, or the result of calling it."""
        found = attrgetter(name)(self)
        return found(*arguments) if callable(found) else found

    def address(self) -> str:
        """A free address of this node, where ranks meet."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def uuid(self) -> str:
        """Of the device."""
        return str(memsaver.stats().devices[str(self.device)].uuid)
