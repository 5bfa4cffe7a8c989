"""One client of the soak: a process that does random things to regions of a shared pool, and checks their contents."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

import memsaver

MOST_REGIONS = 5
MOVES = 4, 10  # of a turn, at least and at most
WEIGHTS = {
    "allocate": 5, "resume": 4, "pause": 3, "new": 2, "free": 2, "write": 2, "switch": 2, "trim": 1, "close": 1,
}  # fmt: skip
REST_S = 30.0  # in which a client gets rid of all it has, also where its broker was just killed
POLICIES = ("none", "host", "disk")
SHORTAGES = (memsaver.OutOfMemoryError, memsaver.BrokerError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Setting:
    device: str
    pool_dir: str
    disk_dir: str
    log: str
    sizes: tuple[int, ...]  # bytes of tensors


@dataclass(eq=False)
class Block:
    tensor: torch.Tensor
    checksum: int


@dataclass(eq=False)
class Held:
    region: memsaver.Region
    blocks: list[Block] = field(default_factory=list)


class Client:
    """Shortages, and a broker that is away, are part of the life of a client; contents that differ are not."""

    def __init__(self, setting: Setting) -> None:
        os.environ["MEMSAVER_POOL_DIR"] = setting.pool_dir
        self.device = setting.device
        self.sizes = setting.sizes
        if self.device != "cpu":
            torch.cuda.set_device(self.device)
        memsaver.configure(pool="shared", disk_dir=setting.disk_dir)
        # Joins the pool now: a first region of a later turn, in which the broker is dead, would start another broker.
        memsaver.region("first", self.device).close()
        self.held: list[Held] = []
        self._numbers = itertools.count()
        self._weights = torch.arange(1, 2 * max(self.sizes) // 8, 2, dtype=torch.int64, device=self.device)
        gc.freeze()  # keeps the objects of the imports out of later collections

    def checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Odd weights modulo 2 to the 64: bytes that changed, and bytes that changed places, show."""
        return (tensor * self._weights[: tensor.numel()]).sum()

    def turn(self, seed: str) -> dict[str, int]:
        """Some random moves, then a look at all contents. Returns how often each kind of move was made."""
        choose = random.Random(seed)
        counts: Counter[str] = Counter()
        for _ in range(choose.randint(*MOVES)):
            [move] = choose.choices(*zip(*WEIGHTS.items()))
            try:
                if getattr(self, f"_{move}")(choose):
                    counts[move] += 1
            except SHORTAGES as error:
                counts[type(error).__name__] += 1
                if isinstance(error, memsaver.BrokerError):
                    time.sleep(0.005)
        counts["checked"] += self.check()
        return dict(counts)

    def check(self) -> int:
        """Looks at the contents of all active regions. Returns how many tensors these are."""
        found = [(held, block) for held in self.held if held.region.state == "active" for block in held.blocks]
        if found:
            sums = torch.stack([self.checksum(block.tensor) for _, block in found]).tolist()
            for (held, block), checksum in zip(found, sums):
                if checksum != block.checksum:
                    what = f"{block.tensor.nbytes} bytes of {held.region}"
                    raise AssertionError(f"{what} have the checksum {checksum}, not {block.checksum}")
        return len(found)

    def rest(self) -> dict[str, int]:
        """Releases all that can be released. Returns the rest, in bytes."""
        deadline = time.monotonic() + REST_S
        while self.held:
            try:
                self._drop(self.held[-1])
            except SHORTAGES:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        gc.collect()
        memsaver.release_host_memory()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        memsaver.release_host_memory()  # memory that was pinned in advance meanwhile
        stats = memsaver.stats().asdict()
        row = stats["devices"][self.device]
        return {
            "device": row["total_bytes"] - row["free_bytes"],
            "pinned": row["host_held_bytes"],
            "disk": row["disk_held_bytes"],
            "unreleased": stats["unreleased_bytes"],
        }

    # Moves: whether there was anything to do

    def _new(self, choose: random.Random) -> bool:
        if len(self.held) == MOST_REGIONS:
            return False
        tag = f"region {os.getpid()}-{next(self._numbers)}"
        self.held.append(Held(memsaver.region(tag, self.device, choose.choice(POLICIES))))
        return True

    def _allocate(self, choose: random.Random) -> bool:
        held = self._one(choose, "active")
        if held is None:
            return False
        tensor = held.region.empty((choose.choice(self.sizes) // 8,), torch.int64)
        tensor.random_()
        held.blocks.append(Block(tensor, int(self.checksum(tensor))))
        return True

    def _free(self, choose: random.Random) -> bool:
        held = self._one(choose)  # a paused one's tensors can be freed too
        if held is None or not held.blocks:
            return False
        held.blocks.pop(choose.randrange(len(held.blocks)))
        return True

    def _write(self, choose: random.Random) -> bool:
        held = self._one(choose, "active")
        if held is None or not held.blocks:
            return False
        block = choose.choice(held.blocks)
        block.tensor.add_(choose.randrange(1, 1000))
        block.checksum = int(self.checksum(block.tensor))
        return True

    def _pause(self, choose: random.Random) -> bool:
        held = self._one(choose, "active")
        return held is not None and bool(held.region.pause().paused)

    def _resume(self, choose: random.Random) -> bool:
        held = self._one(choose, "paused")
        if held is None:
            return False
        try:
            held.region.resume(memory_timeout=choose.choice((0, 0.02, 0.2)))
        finally:
            if held.region.state == "active":
                self._came_back(held)
        return True

    def _switch(self, choose: random.Random) -> bool:
        out, into = self._one(choose, "active"), self._one(choose, "paused")
        if out is None or into is None:
            return False
        try:
            memsaver.switch(pause=out.region.tag, resume=into.region.tag, memory_timeout=choose.choice((0, 0.02)))
        finally:
            if into.region.state == "active":
                self._came_back(into)
        return True

    def _trim(self, choose: random.Random) -> bool:
        held = self._one(choose, "active")
        if held is None:
            return False
        memsaver.trim(held.region.tag)
        return True

    def _close(self, choose: random.Random) -> bool:
        held = self._one(choose)
        if held is None:
            return False
        self._drop(held)
        return True

    def _one(self, choose: random.Random, state: str | None = None) -> Held | None:
        found = [held for held in self.held if state in (None, held.region.state)]
        return choose.choice(found) if found else None

    def _drop(self, held: Held) -> None:
        held.blocks.clear()
        held.region.close()
        self.held.remove(held)

    def _came_back(self, held: Held) -> None:
        if held.region.backup == "none":
            for block in held.blocks:
                block.tensor.random_()
                block.checksum = int(self.checksum(block.tensor))


def serve(connection: Connection, setting: Setting) -> None:
    """In the child: one reply for each request, until the parent hangs up."""
    output = os.open(setting.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable(all_threads=True)  # a signal that ends the process leaves the stacks of its threads in the log
    try:
        client = Client(setting)
        connection.send({"ready": os.getpid()})
        while (request := _received(connection)) is not None:
            name, *arguments = request
            connection.send(getattr(client, name)(*arguments))
    except BaseException:
        connection.send({"error": traceback.format_exc()})
    os._exit(0)


def _received(connection: Connection) -> tuple[str, ...] | None:
    """None: the parent has hung up."""
    try:
        request: tuple[str, ...] = connection.recv()
    except EOFError:
        return None
    return request
