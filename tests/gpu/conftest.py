"""What the GPU tests share: a second process on the same GPU, and fresh regions."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import memsaver

_numbers = itertools.count()

# A process that, told so, takes all memory the device has, fills it with random bytes, and lets go.
NEIGHBOUR = """
import sys, torch
torch.zeros(1, device="cuda")
held = []
print("ready", flush=True)
for line in sys.stdin:
    command = line.split()
    if command[0] == "overwrite":
        taken = 0
        size = 1 << 30
        while size >= 32 << 20:
            try:
                block = torch.empty(size // 8, dtype=torch.int64, device="cuda")
            except torch.OutOfMemoryError:
                size //= 2
                continue
            block.random_()
            held.append(block)
            taken += size
        torch.cuda.synchronize()
        held.clear()
        torch.cuda.empty_cache()
        print(taken, flush=True)
    elif command[0] == "hold":  # all but this many bytes
        keep = int(command[1])
        free = torch.cuda.mem_get_info()[0]
        held.append(torch.empty(max(0, free - keep), dtype=torch.uint8, device="cuda"))
        print(held[-1].numel(), flush=True)
    elif command[0] == "release":
        held.clear()
        torch.cuda.empty_cache()
        print("released", flush=True)
"""


class Neighbour:
    """The other process; each call returns when it has done what it was told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process ended"
        return line.strip()

    def tell(self, command: str) -> str:
        self.tell_only(command)
        return self._answer()

    def tell_only(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def overwrite(self) -> int:
        """Bytes of device memory that it gained, overwrote with random bytes and freed again."""
        return int(self.tell("overwrite"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    other = Neighbour()
    yield other
    other.close()


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[Callable[..., memsaver.Region]]:
    """Makes regions with tags of their own, and leaves them active."""
    made: list[memsaver.Region] = []

    def make(name: str = "region", backup: str = "none", **options: object) -> memsaver.Region:
        made.append(memsaver.region(f"{name}-{next(_numbers)}", device="cuda:0", backup=backup, **options))
        return made[-1]

    yield make
    torch.cuda.synchronize()
    for region in made:
        region.resume()
        region.thaw()
    torch.cuda.empty_cache()
    memsaver.trim([region.tag for region in made])
    memsaver.configure(retain=0)


@pytest.fixture
def driver_free() -> Callable[[], int]:
    """The driver's figure of free bytes, for the whole device."""
    return lambda: torch.cuda.mem_get_info()[0]


@pytest.fixture
def inside() -> Callable[[torch.Tensor, memsaver.Region], bool]:
    """Whether a tensor's memory belongs to a region."""

    def check(tensor: torch.Tensor, region: memsaver.Region) -> bool:
        base = region._core.base
        return bool(base <= tensor.data_ptr() < base + region._core.span)

    return check
