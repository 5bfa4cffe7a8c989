"""Faults of vLLM with tensor parallel 2, with its own sleep mode and memsaver's: short memory, processes that end.

    python benchmarks/vllm_faults.py [--model wide] [--only out-of-memory ...] [--ways vllm memsaver] [--together]

- out-of-memory: another process holds the memory of GPU 1 while the weights wake up. It releases it; the call is made
  again.
- killed-asleep, killed-waking: the worker of rank 1 gets SIGKILL while it sleeps, and in the middle of a wake-up.
- terminated: the server gets SIGTERM in the middle of a wake-up, whose client hangs up after three seconds. A front end
  that has not ended ten seconds later is listed as left, and killed.
- trainer-killed: another process holds the memory of both GPUs while the engine wakes up, and gets SIGKILL.
- with the shared pool alone: the worker of rank 1 (killed-waiting) or both brokers (broker-killed) get SIGKILL while
  the engine waits for the trainers' memory.

Prints lines for each: the answers, seconds until the engine has recovered or all of its processes have ended, whether
its tokens are the same, the last errors of its log, and device memory that is still in use when all have ended; and a
JSON line for each. ``memsaver`` releases memory to the driver; ``memsaver, shared pool`` to the pool. Needs vLLM.
``--together`` starts all servers at once, before the first fault: it takes less time. Device memory that is still in
use is then known for all faults together only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from support.arguments import directory as writable
from support.arguments import parse, parser_for, positive
from support.environment import environment
from support.host import GIB, MIB
from support.processes import Process, ask_all, side_by_side
from support.servers.faults import RECOVERY_S, Brokers, Calling, holding, runs, stranded, used_bytes, wait_ended
from support.servers.vllm_models import MODELS, WAYS
from support.servers.vllm_server import Server
from support.servers.vllm_updates import filled

SHARED = "memsaver, shared pool"
GPUS = ("cuda:0", "cuda:1")
ENDING = ("killed-asleep", "killed-waking", "terminated")  # no server survives them
POOLED = ("trainer-killed", "killed-waiting", "broker-killed")  # with the shared pool; each has a pool of its own
PARTS = ("out-of-memory", *ENDING, *POOLED)
PATIENCE_S = 3.0  # of the client of a server that gets SIGTERM
END_S = 10.0  # in which the front end of such a server has to end
ERROR = re.compile(r"Error|died unexpectedly|rank \d")


class Faults:
    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.options, self.directory = options, directory
        self.environment = environment("cuda:0")
        share_bytes = int(options.share * torch.cuda.mem_get_info()[1])
        self.baseline = used_bytes(GPUS)  # with the context of this process
        # A fixed KV cache: vLLM does not measure the memory of servers that start at the same time.
        self.kv_cache_bytes = share_bytes - MODELS[options.model].nbytes() // len(GPUS) - 5 * GIB
        self.pool_bytes = share_bytes // GIB * GIB + 6 * GIB
        self._servers = 0
        self._started: list[tuple[str, Brokers | None, Server]] = []
        self._pools: dict[str, Brokers] = {}
        self._log_from = 0

    # Servers

    def start_all(self) -> None:
        """Starts the servers that the faults need."""
        for way in self.options.ways:
            only = self.options.only
            pools: list[Brokers | None]
            if way == SHARED:
                pools = [self.pool(fault) for fault in POOLED if fault in only]
            else:  # the other faults leave a server as it was
                several = sum(fault in only for fault in ENDING)
                pools = [None] * max(several, "out-of-memory" in only or "trainer-killed" in only)
            self._started += [(way, pool, self.start(way, pool)) for pool in pools]

    def start(self, way: str, pool: Brokers | None) -> Server:
        fork = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}  # starts sooner
        variables = {**WAYS["vllm" if way == "vllm" else "memsaver"], **fork}
        if pool is not None:
            variables |= pool.variables()
        self._servers += 1
        name = f"{self._servers}-{way.replace(', ', '-').replace(' ', '-')}"
        kv_cache = ("--kv-cache-memory-bytes", str(self.kv_cache_bytes))
        return Server(
            name, self.directory, self.options.logs or self.directory, variables, "--enable-sleep-mode", *kv_cache,
            share=self.options.share,
        )  # fmt: skip

    def serve(self, way: str, pool: Brokers | None = None) -> tuple[Server, list[list[int]]]:
        server = next((each[2] for each in self._started if each[:2] == (way, pool)), None)
        if server is None:
            server = self.start(way, pool)
        else:
            self._started.remove((way, pool, server))
        server.wait_ready()
        return server, server.tokens()

    def close(self) -> None:
        """Ends servers that no fault has needed, and all brokers."""
        for _, _, server in self._started:
            server.close()
        self._started.clear()
        for fault in list(self._pools):
            self.close_pool(fault)

    # Pools

    def pool(self, fault: str) -> Brokers:
        """The pool of a fault."""
        if fault not in self._pools:
            self._pools[fault] = Brokers(os.path.join(self.directory, f"pool-{fault}"), GPUS, self.pool_bytes)
        return self._pools[fault]

    def close_pool(self, fault: str) -> None:
        self._pools.pop(fault).stop()

    # Results

    def add(self, fault: str, way: str, server: Server, began: float, **found: Any) -> None:
        log = server.log()
        said = [line.strip() for line in log[self._log_from :].splitlines() if ERROR.search(line)]
        self._log_from = len(log)
        row = {"fault": fault, "way": way, "seconds": time.monotonic() - began, **found, "said": said[-40:]}
        self.keep(row)
        print(f"{fault:16}{way:24}{row['seconds']:6.1f} s  {found}", flush=True)
        for line in said[-3:]:
            print(f"    {line[-300:]}")

    def keep(self, row: dict[str, Any]) -> None:
        """Prints the JSON line of a fault."""
        about = {"benchmark": "vllm_faults", **self.environment, "model": self.options.model}
        print(json.dumps({**about, **row}), flush=True)

    def ends(self, server: Server, members: list[psutil.Process], bound_s: float = RECOVERY_S) -> dict[str, Any]:
        """Waits until all processes of the server have ended. Kills those that have not."""
        found = wait_ended(server, members, bound_s)
        server.close()
        return {**found, **self.stranded()}

    def stranded(self) -> dict[str, Any]:
        """Device memory that stays in use, of both GPUs together, up to ten seconds after all have ended."""
        if self._started or self._pools:
            return {}  # other servers or brokers have memory
        return {"stranded_bytes": stranded(GPUS, self.baseline)}

    # Faults

    def plain(self, way: str) -> None:
        """Those that need no shared pool. A server is used again as long as it recovers."""
        acts: dict[str, Callable[[str, Server, list[list[int]]], bool]] = {
            "out-of-memory": self.out_of_memory, "trainer-killed": self.trainer_killed_outside,
            "killed-asleep": self.killed_asleep, "killed-waking": self.killed_waking, "terminated": self.terminated,
        }  # fmt: skip
        served: tuple[Server, list[list[int]]] | None = None
        for fault, act in acts.items():
            if fault not in self.options.only:
                continue
            served = served or self.serve(way)
            self._log_from = len(served[0].log())
            try:
                recovered = act(way, *served)
            except SystemExit as error:
                print(f"{fault}, {way}: {error}", flush=True)
                recovered = False
            if not recovered:
                served[0].close()
                served = None
        if served is not None:
            served[0].close()

    def out_of_memory(self, way: str, server: Server, tokens: list[list[int]]) -> bool:
        members = server.processes()
        server.post("/sleep", level=1)
        filler = Process(filled, device=1)
        filler.ask()
        filler.ask()
        began = time.monotonic()
        first, text = server.call("POST", "/wake_up", tags="weights", timeout=RECOVERY_S)
        filler.close()
        again = self.wake_again(server)
        compared = self.compare(server, tokens, again)
        self.add("out-of-memory", way, server, began, first=first, text=text[:300], **again,
                 all_alive=all(map(runs, members)), **compared)  # fmt: skip
        return compared["same_tokens"] is not None

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

    def killed_asleep(self, way: str, server: Server, tokens: list[list[int]]) -> bool:
        members, worker = server.processes(), server.worker(1)
        server.post("/sleep", level=1)
        began = time.monotonic()
        worker.kill()
        found = self.ends(server, members)
        self.add("killed-asleep", way, server, began, **found)
        return False

    def waking(self, server: Server, timeout: float = 2 * RECOVERY_S) -> Calling:
        """A wake-up that is half done."""
        server.post("/sleep", level=1)
        took_ms = server.post("/wake_up")
        server.post("/sleep", level=1)
        call = Calling(lambda: server.call("POST", "/wake_up", timeout=timeout))
        time.sleep(took_ms / 2e3)
        return call

    def killed_waking(self, way: str, server: Server, tokens: list[list[int]]) -> bool:
        members, worker = server.processes(), server.worker(1)
        call = self.waking(server)
        began = time.monotonic()
        worker.kill()
        call.join(RECOVERY_S)
        found = {"answer": (call.status, call.text[:300]), "answered_s": call.ended - began}
        found |= self.ends(server, members)
        self.add("killed-waking", way, server, began, **found)
        return False

    def terminated(self, way: str, server: Server, tokens: list[list[int]]) -> bool:
        members = server.processes()
        engine = [each for each in members[1:] if "VLLM::" in " ".join(each.cmdline())]
        call = self.waking(server, PATIENCE_S)
        began = time.monotonic()
        server.send(signal.SIGTERM)
        while time.monotonic() < began + RECOVERY_S and any(map(runs, engine)):
            time.sleep(0.02)
        found: dict[str, Any] = {"engine_ended_s": time.monotonic() - began, "front_end_runs": runs(members[0])}
        call.join(RECOVERY_S)
        found |= {"answer": (call.status, call.text[:300]), "answered_s": call.ended - began}
        found |= self.ends(server, members, END_S)  # counts from the answer
        self.add("terminated", way, server, began, **found)
        return False

    def trainer_killed_outside(self, way: str, server: Server, tokens: list[list[int]]) -> bool:
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
        compared = self.compare(server, tokens, again)
        self.add("trainer-killed", way, server, began, first=first, text=text[:300], **again, **compared)
        return compared["same_tokens"] is not None

    def shared(self) -> None:
        """Those of the shared pool, and a worker that is killed while it waits for memory."""
        for fault in POOLED:
            if fault not in self.options.only:
                continue
            pool = self.pool(fault)
            memory: dict[str, Any] = {"pool_directory": pool.directory, "capacity": self.pool_bytes, "spare": 2 * GIB}
            trainers = [Process(holding, gpu=gpu, **memory) for gpu in GPUS]
            pids = [each["pid"] for each in ask_all(trainers)]
            server, tokens = self.serve(SHARED, pool)
            self._log_from = len(server.log())
            try:
                self.while_waiting(fault, server, tokens, trainers, pids)
            except SystemExit as error:
                print(f"{fault}, {SHARED}: {error}", flush=True)
            finally:
                for each in trainers:
                    each.close()
                server.close()
                self.close_pool(fault)

    def all_ended(self) -> None:
        found = self.stranded()
        print(f"{found['stranded_bytes'] / MIB:.0f} MiB are in use when all have ended", flush=True)
        self.keep({"fault": "all ended", "way": list(self.options.ways), **found})

    def while_waiting(
        self, fault: str, server: Server, tokens: list[list[int]], trainers: list[Process], pids: list[int]
    ) -> None:
        members = server.processes()
        server.post("/sleep", level=1)
        ask_all(trainers)  # take the memory
        call = Calling(lambda: server.call("POST", "/wake_up", timeout=2 * RECOVERY_S))
        time.sleep(1.0)
        assert call.is_alive(), (call.status, call.text)
        began = time.monotonic()
        found: dict[str, Any] = {}
        if fault == "trainer-killed":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        elif fault == "broker-killed":
            self.pool(fault).kill()
            found["released"] = [each.get("error") for each in side_by_side(trainers)]
        else:
            server.worker(1).kill()
        call.join(RECOVERY_S)
        found |= {"answer": (call.status, call.text[:400]), "answered_s": call.ended - began}
        if fault == "killed-waiting":
            found |= self.ends(server, members)
        else:
            status = call.status
            if fault == "broker-killed":  # the next call gets an answer of its own
                status, text = server.call("POST", "/wake_up", timeout=RECOVERY_S)
                found["next"] = (status, text[:400])
            found |= self.compare(server, tokens, {"again": [status, status]})
        found["all_alive"] = all(map(runs, members))
        self.add(fault, SHARED, server, began, **found)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="wide")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, SHARED), default=(*WAYS, SHARED))
    parser.add_argument("--share", type=positive, default=0.3, help="of each GPU, for a server; a pool has 6 GiB more")
    parser.add_argument("--together", action="store_true", help="start all servers before the first fault")
    parser.add_argument("--logs", type=writable, help="directory for the logs of the servers")
    options = parse(parser)
    with tempfile.TemporaryDirectory() as directory:
        MODELS[options.model].write(directory)
        faults = Faults(options, directory)
        try:
            if options.together:
                faults.start_all()
            for way in options.ways:
                try:
                    faults.shared() if way == SHARED else faults.plain(way)
                except (SystemExit, AssertionError) as error:
                    print(f"{way}: {error}", flush=True)
        finally:
            faults.close()
        faults.all_ended()


if __name__ == "__main__":
    main()
