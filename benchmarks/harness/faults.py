"""Drills on a server of vLLM or SGLang with tensor parallel 2: short memory, and processes that end."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import psutil
import torch

import memsaver
from benchmarks.harness.command import Run
from benchmarks.harness.machine import GIB, MIB, used_bytes
from benchmarks.harness.models import MODELS, Model
from benchmarks.harness.pools import Brokers, shared_pool
from benchmarks.harness.processes import Process, Sample, ask_all, processes
from benchmarks.harness.servers import Server

SHARED = "memsaver, shared pool"
GPUS = ("cuda:0", "cuda:1")
PLAIN = ("out-of-memory", "trainer-killed", "killed-asleep", "killed-waking")
POOLED = ("trainer-killed", "killed-waiting", "broker-killed")
FAULTS = tuple(dict.fromkeys(PLAIN + POOLED))
HELD_S = 2.0  # for which another process holds the memory
RECOVERY_S = 60.0
KV_BYTES = 3 * GIB  # of each rank
SPARE = GIB  # of free memory that a filler leaves to others
ERROR = re.compile(r"Error|died unexpectedly|crashed|sigquit|rank \d", re.IGNORECASE)
Start = Callable[[str, Model, str, Mapping[str, str]], Server]

DESCRIPTION = """
- out-of-memory: another process holds the memory of GPU 1 while the engine resumes, and releases it after two seconds.
- trainer-killed: processes that hold the memory of both GPUs while the engine resumes get SIGKILL.
- killed-asleep, killed-waking: the worker of rank 1 gets SIGKILL while all is released, and in the middle of a resume.
- with the shared pool alone: the worker of rank 1 (killed-waiting) or both brokers (broker-killed) get SIGKILL while
  the engine waits for memory of the trainers.
"""


def drill_all(run: Run, ways: Sequence[str], faults: Sequence[str], start: Start, model: str) -> None:
    """Each fault of each way has a server of its own. Those of one way start together.

    ``start``: starts the server of a name, a model, its directory, and variables of the way.
    """
    capacity = (MODELS[model].nbytes() // len(GPUS) + KV_BYTES) // GIB * GIB + 3 * GIB  # of each pool
    for way in ways:
        baseline, drills = used_bytes(*GPUS), dict[str, Drill]()
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            MODELS[model].write(directory)
            for fault in [each for each in (POOLED if way == SHARED else PLAIN) if each in faults]:
                pool = stack.enter_context(shared_pool(capacity, *GPUS)) if way == SHARED else None
                variables = pool.variables if pool else {}
                server = start(f"{fault}-{way}", MODELS[model], directory, variables)
                stack.callback(server.close)
                drills[fault] = Drill(fault, server, pool)
            rows: dict[str, dict[str, Any]] = {}
            for fault, drill in drills.items():
                found = run.attempt(f"{fault}, {way}", drill.run)
                drill.server.close()
                if found is not None:
                    rows[fault] = {name: value for name, value in found.items() if name not in ("said", "text")}
                    run.keep(**{f"{fault}, {way}": found})
                    if "same tokens" in found:
                        run.check(f"{fault}, {way}: tokens are the same", found["same tokens"])
        run.table(way, rows)
        for _ in range(100):  # up to ten seconds
            if (left := used_bytes(*GPUS) - baseline) <= 32 * MIB:
                break
            time.sleep(0.1)
        run.check(f"{way}: no device memory is in use when all have ended", left <= 32 * MIB, f"{left // MIB} MiB")


class Call(threading.Thread):
    """A resume in the background."""

    def __init__(self, server: Server, timeout: float) -> None:
        super().__init__(daemon=True)
        self.status, self.text, self.ended = 0, "", 0.0
        self._call = partial(server.begin_resume, timeout)
        self.start()

    def run(self) -> None:
        self.status, self.text = self._call()
        self.ended = time.monotonic()


class Drill:
    """A fault of one server."""

    def __init__(self, fault: str, server: Server, pool: Brokers | None) -> None:
        self.fault, self.server, self.pool = fault, server, pool

    def run(self) -> Sample:
        server = self.server
        server.wait_ready()
        tokens, members, log_from = server.tokens(), server.processes(), len(server.log())
        server.release()
        self.began = time.monotonic()
        act: Callable[[], Call | None] = getattr(self, "_" + self.fault.replace("-", "_"))
        call, found = act(), dict[str, Any]()
        if call is not None:
            call.join(2 * RECOVERY_S)
            found = {"answer": call.status, "after, s": call.ended - self.began, "text": call.text[:400]}
        if self.fault in ("out-of-memory", "trainer-killed", "broker-killed"):
            code = call.status if call is not None else 0
            if code != 200:
                code, text = server.begin_resume(RECOVERY_S)
                found |= {"next answer": code, "text": f"{found['text']}; {text[:400]}"}
            if code == 200:
                found["same tokens"] = server.tokens() == tokens
            found["all alive"] = all(map(_runs, members))
        else:
            found |= _wait_ended(members)
        said = [line.strip()[-300:] for line in server.log()[log_from:].splitlines() if ERROR.search(line)]
        return {**found, "said": said[-40:]}

    def _out_of_memory(self) -> Call:
        return self._while_held([Process(filled, device=1)], lambda: None)

    def _trainer_killed(self) -> Call:
        holders = self._holders()
        return self._while_held(holders, lambda: list(map(Process.kill, holders)))

    def _killed_asleep(self) -> None:
        self.server.worker(1).kill()

    def _killed_waking(self) -> Call:
        worker, took_ms = self.server.worker(1), self.server.resume()
        self.server.release()
        call = Call(self.server, 2 * RECOVERY_S)
        time.sleep(took_ms / 2e3)
        self.began = time.monotonic()
        worker.kill()
        return call

    def _killed_waiting(self) -> Call:
        return self._while_held(self._holders(), self.server.worker(1).kill, to_the_end=True)

    def _broker_killed(self) -> Call:
        assert self.pool is not None
        return self._while_held(self._holders(), partial(self.pool.end, signal.SIGKILL))

    def _while_held(self, holders: list[Process], act: Callable[[], object], to_the_end: bool = False) -> Call:
        """A resume that begins while others hold the memory, then ``act``, then the end of the holders."""
        with processes(*holders):
            ask_all(holders)
            ask_all(holders)
            call = Call(self.server, 2 * RECOVERY_S)
            call.join(HELD_S)
            self.began = time.monotonic()
            act()
            if to_the_end:
                call.join(2 * RECOVERY_S)
        return call

    def _holders(self) -> list[Process]:
        if self.pool is None:
            return [Process(filled, device=rank) for rank in range(len(GPUS))]
        memory: dict[str, Any] = {"directory": self.pool.directory, "nbytes": self.pool.capacity - 2 * GIB}
        return [Process(holding, gpu=gpu, **memory) for gpu in GPUS]


def filled(device: int) -> Iterator[Sample]:
    """Starts; then by turns fills the free memory of the GPU, but for 1 GiB, with 0xA5, and releases it."""
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    yield {}
    while True:
        held = []
        while (room := torch.cuda.mem_get_info()[0] - SPARE) >= 2 * MIB:
            held.append(torch.full((min(room, 4 * GIB) // MIB * MIB,), 0xA5, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        nbytes = sum(each.nbytes for each in held)
        yield {"bytes": nbytes}
        held.clear()
        torch.cuda.empty_cache()
        yield {"bytes": nbytes}


def holding(directory: str, gpu: str, nbytes: int) -> Iterator[Sample]:
    """Starts; then holds memory of the shared pool."""
    os.environ["MEMSAVER_POOL_DIR"] = directory
    memsaver.configure(pool="shared")
    torch.cuda.set_device(gpu)
    torch.zeros(1, device=gpu)
    yield {}
    held: list[torch.Tensor] = []
    with memsaver.region("trainer", device=gpu):
        while sum(each.nbytes for each in held) < nbytes:
            held.append(torch.full((GIB // 2,), 0xA5, dtype=torch.uint8, device=gpu))
    torch.cuda.synchronize()
    yield {}


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _wait_ended(members: Sequence[psutil.Process]) -> Sample:
    """Waits until all processes of the server have ended, and kills those that have not."""
    began = time.monotonic()
    while time.monotonic() < began + RECOVERY_S and any(map(_runs, members)):
        time.sleep(0.05)
    took, left = time.monotonic() - began, [each for each in members if _runs(each)]
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    return {"ended, s": took, "left": ", ".join(map(str, left)) or None}
