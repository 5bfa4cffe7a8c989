"""The types of the fixtures in conftest.py, and the second process on the same GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch

import memsaver

Make = Callable[..., memsaver.Region]  # fresh
Inside = Callable[[torch.Tensor, memsaver.Region], bool]

# Takes all free memory of the device on command, fills it with random bytes, and frees it.
NEIGHBOUR = """
import sys, torch
torch.zeros(1, device="cuda")
held = []
print("ready", flush=True)
for line in sys.stdin:
    command = line.split()
    if command[0] == "overwrite":
        taken, taking = 0, []
        size = 1 << 30
        while size >= 32 << 20:
            try:
                block = torch.empty(size // 8, dtype=torch.int64, device="cuda")
            except torch.OutOfMemoryError:
                size //= 2
                continue
            block.random_()
            taking.append(block)
            taken += size
        torch.cuda.synchronize()
        block = taking = None
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
    """The second process. Each call returns when the process has executed the command."""

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

    def hold(self, keep: int) -> None:
        """Takes all free memory but ``keep`` bytes. What torch caches in this process is free then, too."""
        torch.cuda.empty_cache()
        self.tell(f"hold {keep}")

    def overwrite(self) -> int:
        """Overwrites all free memory with random bytes and frees it again. Returns the bytes."""
        return int(self.tell("overwrite"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
