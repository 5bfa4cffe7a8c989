"""What follows when memory is short or a process ends: vLLM with tensor parallel 2, its own sleep mode and memsaver's.

    python benchmarks/vllm_faults.py [--model wide] [--only out-of-memory ...] [--ways vllm memsaver]

- out-of-memory: another process holds the memory of GPU 1 while the weights wake up. It releases it; the call is made
  again.
- killed-asleep, killed-waking: the worker of rank 1 gets SIGKILL while it sleeps, and in the middle of a wake-up.
- terminated: the server gets SIGTERM in the middle of a wake-up.
- trainer-killed: another process holds the memory of both GPUs while the engine wakes up, and gets SIGKILL.
- broker-killed (with the shared pool alone): both brokers get SIGKILL while the engine waits for the trainers' memory.

Prints a line for each: the answers, seconds until the engine has recovered or all of its processes have ended, whether
its tokens are the same, the last error of its log, and device memory that is still in use when all have ended. Then one
JSON line for each. ``memsaver`` releases memory to the driver; ``memsaver, shared pool`` to the pool. Needs vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from arguments import directory as writable
from arguments import parse, parser_for
from environment import environment, nvidia_smi
from host import GIB, MIB
from processes import Process, Sample, side_by_side
from vllm_models import MODELS
from vllm_server import WAYS, Server
from vllm_updates import filled

import memsaver

SHARED = "memsaver, shared pool"
PARTS = ("out-of-memory", "killed-asleep", "killed-waking", "terminated", "trainer-killed", "broker-killed")
GPUS = ("cuda:0", "cuda:1")
SHARE = 0.3
POOL = 48 * GIB
RECOVERY_S = 60.0
ERROR = re.compile(r"Error|died unexpectedly|rank \d")


def used_bytes() -> list[int]:
    return [int(nvidia_smi(gpu, "--query-gpu=memory.used")[0]) * MIB for gpu in GPUS]


def holding(pool_directory: str, gpu: str, nbytes: int) -> Iterator[Sample]:
    """A trainer: holds memory of the shared pool, then releases it by a pause."""
    os.environ["MEMSAVER_POOL_DIR"] = pool_directory
    memsaver.configure(pool="shared", pool_capacity=POOL)
    torch.cuda.set_device(gpu)
    region = memsaver.region("trainer", device=gpu)
    held: list[torch.Tensor] = []
    with region:
        while sum(each.nbytes for each in held) < nbytes:
            held.append(torch.full((GIB,), 0xA5, dtype=torch.uint8, device=gpu))
    torch.cuda.synchronize()
    yield {"pid": os.getpid()}
    region.pause()
    yield {}


class Calling(threading.Thread):
    """A call of the server in the background."""

    def __init__(self, server: Server, path: str, **query: Any) -> None:
        super().__init__(daemon=True)
        self.status, self.text, self.ended = 0, "", 0.0
        self._call = lambda: server.call("POST", path, timeout=2 * RECOVERY_S, **query)
        self.start()

    def run(self) -> None:
        self.status, self.text = self._call()
        self.ended = time.monotonic()


class Faults:
    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.options, self.directory = options, directory
        self.baseline = used_bytes()
        self.rows: list[dict[str, Any]] = []
        self._servers = 0
        self._log_from = 0

    # Servers

    def serve(self, way: str, pool: str = "") -> tuple[Server, list[list[int]]]:
        variables = dict(WAYS["vllm" if way == "vllm" else "memsaver"])
        if pool:
            variables |= {"MEMSAVER_POOL": "shared", "MEMSAVER_POOL_DIR": pool, "MEMSAVER_POOL_CAPACITY": str(POOL)}
        self._servers += 1
        name = f"{self._servers}-{way.replace(', ', '-').replace(' ', '-')}"
        server = Server(
            name, self.directory, self.options.logs or self.directory, variables, "--enable-sleep-mode", share=SHARE
        )
        server.wait_ready()
        return server, server.tokens()

    def add(self, fault: str, way: str, server: Server, began: float, **found: Any) -> None:
        log = server.log()
        said = [line.strip() for line in log[self._log_from :].splitlines() if ERROR.search(line)]
        self._log_from = len(log)
        row = {"fault": fault, "way": way, "seconds": time.monotonic() - began, **found, "said": said[-40:]}
        self.rows.append(row)
        print(f"{fault:16}{way:24}{row['seconds']:6.1f} s  {found}", flush=True)
        for line in said[-3:]:
            print(f"    {line[-300:]}")

    def ends(self, server: Server, members: list[psutil.Process]) -> dict[str, Any]:
        """Waits until all processes of the server have ended."""
        began = time.monotonic()
        unhealthy = None
        while time.monotonic() < began + RECOVERY_S and (left := [each for each in members if each.is_running()]):
            if unhealthy is None and not server.healthy():
                unhealthy = time.monotonic() - began
            left = psutil.wait_procs(left, timeout=0.1)[1]
            if not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]:
                break
        took = time.monotonic() - began
        left = [each for each in members if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        server.close()
        for each in left:
            each.kill()
        return {"unhealthy_s": unhealthy, "ended_s": took, "left": [str(each) for each in left]}

    def stranded(self) -> int:
        """Device memory that stays in use, of both GPUs together, up to ten seconds after all have ended."""
        for _ in range(100):
            if (found := sum(used_bytes()) - sum(self.baseline)) <= 32 * MIB:
                break
            time.sleep(0.1)
        return found

    # Faults

    def plain(self, way: str) -> None:
        """Those that need no shared pool."""
        wanted = [part for part in self.options.only if part in PARTS[:5]]
        if {"out-of-memory", "killed-asleep", "trainer-killed"}.intersection(wanted):
            server, tokens = self.serve(way)
            self._log_from = len(server.log())
            if "out-of-memory" in wanted:
                self.out_of_memory(way, server, tokens)
            if "trainer-killed" in wanted and way == "vllm":
                self.trainer_killed_outside(way, server, tokens)
            if "killed-asleep" in wanted:
                self.killed(way, server, asleep=True)
            else:
                server.close()
        if "killed-waking" in wanted:
            server, _ = self.serve(way)
            self._log_from = len(server.log())
            self.killed(way, server, asleep=False)
        if "terminated" in wanted:
            server, _ = self.serve(way)
            self._log_from = len(server.log())
            self.terminated(way, server)

    def out_of_memory(self, way: str, server: Server, tokens: list[list[int]]) -> None:
        members = server.processes()
        server.post("/sleep", level=1)
        filler = Process(filled, device=1)
        filler.ask()
        filler.ask()
        began = time.monotonic()
        first, text = server.call("POST", "/wake_up", tags="weights", timeout=RECOVERY_S)
        filler.close()
        again = self.wake_again(server)
        alive = all(each.is_running() for each in members)
        self.add("out-of-memory", way, server, began, first=first, text=text[:300], **again, all_alive=alive,
                 **self.compare(server, tokens, again))  # fmt: skip

    def wake_again(self, server: Server) -> dict[str, Any]:
        statuses = [server.call("POST", "/wake_up", tags=tag, timeout=RECOVERY_S) for tag in ("weights", "kv_cache")]
        return {"again": [status for status, _ in statuses], "again_text": [text[:200] for _, text in statuses]}

    def compare(self, server: Server, tokens: list[list[int]], again: dict[str, Any]) -> dict[str, Any]:
        if again["again"] != [200, 200] or not server.healthy():
            return {"same_tokens": None}
        try:
            return {"same_tokens": server.tokens() == tokens}
        except SystemExit as error:
            return {"same_tokens": None, "completion": str(error)[:200]}

    def killed(self, way: str, server: Server, asleep: bool) -> None:
        members = server.processes()
        worker = server.worker(1)
        if not server.healthy():
            server.close()
            return
        server.post("/sleep", level=1)
        call = None
        if not asleep:
            took_ms = server.post("/wake_up")
            server.post("/sleep", level=1)
            call = Calling(server, "/wake_up")
            time.sleep(took_ms / 2e3)
        began = time.monotonic()
        worker.kill()
        if call is not None:
            call.join(RECOVERY_S)
        found = {"answer": None if call is None else (call.status, call.text[:300]), **self.ends(server, members)}
        seconds = time.monotonic()
        found["stranded_bytes"] = self.stranded()
        self.add("killed-asleep" if asleep else "killed-waking", way, server, began, **found,
                 stranded_after_s=time.monotonic() - seconds)  # fmt: skip

    def terminated(self, way: str, server: Server) -> None:
        members = server.processes()
        server.post("/sleep", level=1)
        took_ms = server.post("/wake_up")
        server.post("/sleep", level=1)
        call = Calling(server, "/wake_up")
        time.sleep(took_ms / 2e3)
        began = time.monotonic()
        server.send(signal.SIGTERM)
        found = self.ends(server, members)
        self.add("terminated", way, server, began, answer=(call.status, call.text[:200]), **found,
                 stranded_bytes=self.stranded())  # fmt: skip

    def trainer_killed_outside(self, way: str, server: Server, tokens: list[list[int]]) -> None:
        if not server.healthy():
            return
        server.post("/sleep", level=1)
        fillers = [Process(filled, device=rank) for rank in range(2)]
        for _ in range(2):
            side_by_side(fillers)
        began = time.monotonic()
        first, text = server.call("POST", "/wake_up", timeout=RECOVERY_S)
        for each in fillers:
            each._process.kill()
            each.close()
        status, again_text = server.call("POST", "/wake_up", timeout=RECOVERY_S)
        again = {"again": [status, status], "again_text": again_text[:200]}
        self.add("trainer-killed", way, server, began, first=first, text=text[:300], **again,
                 **self.compare(server, tokens, again))  # fmt: skip

    def shared(self) -> None:
        """Those of the shared pool, and a worker that is killed while it waits for memory."""
        pool = os.path.join(self.directory, "pool")
        os.mkdir(pool, 0o700)
        command = [sys.executable, "-m", "memsaver", "broker"]
        environ = {**os.environ, "MEMSAVER_POOL_DIR": pool}
        for gpu in GPUS:
            started = [*command, "--detach", "--device", gpu, "--capacity", str(POOL)]
            subprocess.run(started, check=True, env=environ, stdout=subprocess.DEVNULL)
        try:
            server, tokens = self.serve(SHARED, pool)
            self._log_from = len(server.log())
            for fault in ("trainer-killed", "broker-killed", "killed-waking"):
                if fault in self.options.only:
                    self.while_waiting(fault, server, tokens, pool)
            if server.healthy():
                server.close()
        finally:
            subprocess.run([*command, "--stop"], check=False, env=environ)
        print(f"shared pool: {self.stranded() / MIB:.0f} MiB are in use when all have ended", flush=True)

    def while_waiting(self, fault: str, server: Server, tokens: list[list[int]], pool: str) -> None:
        members = server.processes()
        server.post("/sleep", level=1)
        trainers = [Process(holding, pool_directory=pool, gpu=gpu, nbytes=POOL - 2 * GIB) for gpu in GPUS]
        pids = [each["pid"] for each in side_by_side(trainers)]
        call = Calling(server, "/wake_up")
        time.sleep(1.0)
        assert call.is_alive(), (call.status, call.text)
        began = time.monotonic()
        found: dict[str, Any] = {}
        if fault == "trainer-killed":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        elif fault == "broker-killed":
            for killed in brokers():
                killed.kill()
            found["released"] = [each.get("error") for each in side_by_side(trainers)]
        else:
            server.worker(1).kill()
        call.join(RECOVERY_S)
        found |= {"answer": (call.status, call.text[:300]), "answered_s": call.ended - began}
        if fault == "killed-waking":
            found |= self.ends(server, members)
        else:
            found |= self.compare(server, tokens, {"again": [call.status, call.status]})
        for each in trainers:
            each.close()
        self.add(fault, SHARED, server, began, **found)


def brokers() -> list[psutil.Process]:
    return [
        each for each in psutil.process_iter(["cmdline"]) if {"memsaver", "broker"} <= set(each.info["cmdline"] or ())
    ]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="wide")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, SHARED), default=(*WAYS, SHARED))
    parser.add_argument("--logs", type=writable, help="directory for the logs of the servers")
    options = parse(parser)
    with tempfile.TemporaryDirectory() as directory:
        MODELS[options.model].write(directory)
        faults = Faults(options, directory)
        for way in options.ways:
            try:
                faults.shared() if way == SHARED else faults.plain(way)
            except (SystemExit, AssertionError) as error:
                print(f"{way}: {error}", flush=True)
    for row in faults.rows:
        print(json.dumps({"benchmark": "vllm_faults", **environment("cuda:0"), "model": options.model, **row}))


if __name__ == "__main__":
    main()
