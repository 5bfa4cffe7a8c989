"""A shared pool for the time of a measurement, a device that is full, and the ledger of a device."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch

import memsaver
from benchmarks.harness.machine import GIB, MIB
from benchmarks.harness.processes import Process, Sample, processes

_CONTEXTS = 4 * GIB  # of a full device, left for the contexts of processes


class Brokers:
    """A shared pool in a directory, with a broker for each device. ``variables``: of processes that use it."""

    def __init__(self, directory: str, capacity: int, *devices: str) -> None:
        self.directory, self.capacity = directory, capacity
        self.variables = {"MEMSAVER_POOL": "shared", "MEMSAVER_POOL_DIR": directory}
        self.variables["MEMSAVER_POOL_CAPACITY"] = str(capacity)
        self.pids: dict[str, int] = {}
        for device in devices:
            self.start(device)

    def start(self, device: str) -> None:
        """Starts the broker of a device, also in the place of one that has ended."""
        command = [sys.executable, "-m", "memsaver", "broker", "--detach", "--device", device]
        command += ["--capacity", str(self.capacity)]
        environ = {**os.environ, **self.variables}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        said = re.search(r"runs with pid (\d+)", done.stdout)
        if said is None:
            raise RuntimeError(f"the broker of {device} has not started: {done.stdout}{done.stderr}")
        self.pids[device] = int(said[1])

    def end(self, number: signal.Signals) -> None:
        """Sends a signal to the brokers, and waits for their ends."""
        for pid in self.pids.values():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                process.send_signal(number)
                process.wait(20)


@contextmanager
def shared_pool(capacity: int, *devices: str) -> Iterator[Brokers]:
    """A pool of this benchmark's own, in a directory with a short name, since sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="ms") as directory:
        brokers = Brokers(directory, capacity, *devices)
        try:
            yield brokers
        finally:
            brokers.end(signal.SIGTERM)


@contextmanager
def full_device(device: str, room: int) -> Iterator[None]:
    """Another process holds all of a GPU but ``room`` bytes, and 4 GiB for contexts."""
    if device == "cpu":
        yield
        return
    process = Process(_ballast, room=room + _CONTEXTS, device=device)
    with processes(process):
        process.ask()
        yield


def _ballast(room: int, device: str) -> Iterator[Sample]:
    torch.cuda.set_device(device)
    held = torch.empty(max(torch.cuda.mem_get_info()[0] - room, 2 * MIB), dtype=torch.uint8, device=device)
    yield {"bytes": held.numel()}


def free_bytes(device: str) -> int:
    """Of a device that this process uses."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else memsaver.stats().devices[device].free_bytes or 0


# The ledger


def ledger_of(device: str) -> dict[str, int | None]:
    """Bytes in use on a device that memsaver has opened: each kind of this process, and the other bytes.

    ``"unlisted"`` has the unknown memory of the process if the driver does not list it.
    """
    figures = memsaver.stats().devices[device]
    found: dict[str, int | None] = {}
    rest = {"unknown": 0, "other processes": 0, "unlisted": 0}
    for row in figures.ledger.rows:
        name = f"{row.kind} {row.label}".strip() if row.pid == os.getpid() else "other processes"
        name = "unlisted" if row.pid is None else name
        where: dict[str, Any] = rest if name in rest else found
        where[name] = where.get(name, 0) + row.bytes
    found |= rest
    return {**found, "in use": figures.ledger.used_bytes}


def ledger_rows(moments: Mapping[str, Mapping[str, int | None]]) -> dict[str, dict[str, float | None]]:
    """The rows of a table with a column in MiB for each moment. A kind that a moment lacks has 0 bytes then."""
    kinds = dict.fromkeys(kind for ledger in moments.values() for kind in ledger)
    last = ("unknown", "other processes", "unlisted", "in use")
    names = [kind for kind in kinds if kind not in last] + [kind for kind in last if kind in kinds]
    rows: dict[str, dict[str, float | None]] = {}
    for name in names:
        found = {moment: ledger.get(name, 0) for moment, ledger in moments.items()}
        rows[name] = {f"{at}, MiB": None if value is None else value / MIB for at, value in found.items()}
    return rows
