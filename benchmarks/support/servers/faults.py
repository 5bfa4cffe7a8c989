"""Common parts of drills: calls in the background, processes that hold memory, and waits for the end of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch

import memsaver
from support.environment import nvidia_smi
from support.host import GIB, MIB
from support.processes import Sample
from support.servers.engine_server import EngineServer

RECOVERY_S = 60.0


class Calling(threading.Thread):
    """A call of a server in the background: ``call()`` returns status and text."""

    def __init__(self, call: Callable[[], tuple[int, str]]) -> None:
        super().__init__(daemon=True)
        self.status, self.text, self.ended = 0, "", 0.0
        self._call = call
        self.start()

    def run(self) -> None:
        self.status, self.text = self._call()
        self.ended = time.monotonic()


class Brokers:
    """A shared pool in a directory, with a broker for each GPU."""

    def __init__(self, directory: str, gpus: Sequence[str], capacity: int) -> None:
        self.directory, self.capacity = directory, capacity
        os.mkdir(directory, 0o700)
        for gpu in gpus:
            self._run("--detach", "--device", gpu, "--capacity", str(capacity))

    def variables(self) -> dict[str, str]:
        """Of a process that takes its memory from the pool."""
        return {"MEMSAVER_POOL": "shared", "MEMSAVER_POOL_DIR": self.directory,
                "MEMSAVER_POOL_CAPACITY": str(self.capacity)}  # fmt: skip

    def kill(self) -> None:
        words = {"memsaver", "broker"}
        for each in psutil.process_iter(["cmdline"]):
            if words <= set(each.info["cmdline"] or ()) and each.environ().get("MEMSAVER_POOL_DIR") == self.directory:
                each.kill()

    def stop(self) -> None:
        self._run("--stop")

    def _run(self, *arguments: str) -> None:
        environ = {**os.environ, "MEMSAVER_POOL_DIR": self.directory}
        command = [sys.executable, "-m", "memsaver", "broker", *arguments]
        subprocess.run(command, check="--stop" not in arguments, env=environ, stdout=subprocess.DEVNULL)


def holding(pool_directory: str, gpu: str, capacity: int, spare: int) -> Iterator[Sample]:
    """A trainer: starts, holds all memory of the shared pool but ``spare`` bytes, and releases it by a pause."""
    os.environ["MEMSAVER_POOL_DIR"] = pool_directory
    memsaver.configure(pool="shared", pool_capacity=capacity)
    torch.cuda.set_device(gpu)
    torch.zeros(1, device=gpu)
    yield {"pid": os.getpid()}
    region = memsaver.region("trainer", device=gpu)
    held: list[torch.Tensor] = []
    with region:
        while sum(each.nbytes for each in held) < capacity - spare:
            held.append(torch.full((GIB // 2,), 0xA5, dtype=torch.uint8, device=gpu))
    torch.cuda.synchronize()
    yield {}
    region.pause()
    yield {}


def used_bytes(gpus: Sequence[str]) -> int:
    """Of all GPUs together."""
    return sum(int(nvidia_smi(gpu, "--query-gpu=memory.used")[0]) * MIB for gpu in gpus)


def stranded(gpus: Sequence[str], baseline: int) -> int:
    """Device memory beyond the baseline that stays in use, up to ten seconds after all have ended."""
    for _ in range(100):
        if (found := used_bytes(gpus) - baseline) <= 32 * MIB:
            break
        time.sleep(0.1)
    return found


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_ended(server: EngineServer, members: Sequence[psutil.Process], bound_s: float = RECOVERY_S) -> dict[str, Any]:
    """Waits until all processes of the server have ended, and kills those that have not."""
    began = time.monotonic()
    unhealthy = None
    while time.monotonic() < began + bound_s and any(map(runs, members)):
        if unhealthy is None and not server.healthy():
            unhealthy = time.monotonic() - began
        time.sleep(0.05)
    took = time.monotonic() - began
    left = [each for each in members if runs(each)]
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    return {"unhealthy_s": unhealthy, "ended_s": took, "left": [str(each) for each in left]}
