"""Faults of SGLang with tensor parallel 2, with torch_memory_saver and memsaver's drop-in.

    python benchmarks/sglang_faults.py [--model wide] [--only out-of-memory ...] [--ways tms memsaver]

- out-of-memory: another process holds the memory of GPU 1 while the engine resumes, and releases it after two seconds.
- trainer-killed: another process holds the memory of both GPUs while the engine resumes, and gets SIGKILL.
- killed-released, killed-resuming: the scheduler of rank 1 gets SIGKILL while all is released, and in the middle of a
  resume.
- terminated: the server gets SIGTERM in the middle of a resume.
- with the shared pool alone: the scheduler of rank 1 (killed-waiting) or both brokers (broker-killed) get SIGKILL while
  the engine waits for memory of the trainers.

Each fault has a server of its own. Those of one way start together. Prints lines for each fault: the answer to the
resume, seconds until the engine has recovered or all of its processes have ended, whether its tokens are the same, the
last errors of its log; for each way the device memory that is still in use when all have ended; and JSON lines.
SGLang ends a scheduler that gets an exception. Needs SGLang.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

from support.arguments import directory as writable
from support.arguments import parse, parser_for, positive
from support.environment import environment, need_cuda
from support.host import GIB, MIB
from support.processes import Process, ask_all, side_by_side
from support.servers.faults import RECOVERY_S, Brokers, Calling, holding, runs, stranded, used_bytes, wait_ended
from support.servers.sglang_server import WAYS, Server
from support.servers.vllm_models import HEAD, KV_HEADS, MODELS
from support.servers.vllm_updates import filled

SHARED = "memsaver, shared pool"
GPUS = ("cuda:0", "cuda:1")
PLAIN = ("out-of-memory", "trainer-killed", "killed-released", "killed-resuming", "terminated")
POOLED = ("trainer-killed", "killed-waiting", "broker-killed")
PARTS = tuple(dict.fromkeys(PLAIN + POOLED))
HELD_S = 2.0
ERROR = re.compile(r"Error|crashed|rank \d|TP\d.*(rror|xception)|sigquit", re.IGNORECASE)


class Drill:
    """One server, and a fault of it."""

    def __init__(self, fault: str, way: str, options: argparse.Namespace, directory: str) -> None:
        self.fault, self.way, self.options = fault, way, options
        shape = MODELS[options.model]
        kv_tokens = int(options.kv_gib * GIB) // (2 * shape.layers * KV_HEADS * HEAD * 2 // len(GPUS))
        variables = dict(WAYS["memsaver" if way == SHARED else way])
        self.brokers: Brokers | None = None
        if way == SHARED:
            weights = shape.nbytes() // len(GPUS)
            capacity = (weights + int(options.kv_gib * GIB)) // GIB * GIB + 3 * GIB
            self.brokers = Brokers(f"{directory}/pool-{fault}", GPUS, capacity)
            variables |= self.brokers.variables()
        name = f"{fault}-{way.replace(', ', '-').replace(' ', '-')}"
        saver = ("--enable-memory-saver", "--enable-weights-cpu-backup")
        self.server = Server(
            name, directory, options.logs or directory, variables, *saver, kv_tokens=kv_tokens, ranks=len(GPUS)
        )

    def run(self) -> dict[str, Any]:
        self.server.wait_ready()
        tokens = self.server.tokens()
        members = self.server.processes()
        log_from = len(self.server.log())
        self.server.release()
        self.began = time.monotonic()
        act: Callable[[], Calling | None] = getattr(self, self.fault.replace("-", "_"))
        call = act()
        found: dict[str, Any] = {}
        if call is not None:
            call.join(2 * RECOVERY_S)
            found = {"answer": [call.status, call.text[:300]], "answered_s": call.ended - self.began}
        if call is not None and call.status == 200 and self.fault not in ("killed-resuming", "terminated"):
            found["same_tokens"] = self._tokens() == tokens
            found["all_alive"] = all(map(runs, members))
        else:
            found |= wait_ended(self.server, members)
        found["seconds"] = time.monotonic() - self.began
        said = [line.strip() for line in self.server.log()[log_from:].splitlines() if ERROR.search(line)]
        return {"fault": self.fault, "way": self.way, **found, "said": said[-40:]}

    def _tokens(self) -> list[list[int]] | None:
        try:
            return self.server.tokens()
        except SystemExit:  # it has ended
            return None

    def close(self) -> None:
        self.server.close(wait_s=0)
        if self.brokers is not None:
            self.brokers.stop()

    def _resuming(self) -> Calling:
        body = {"tags": None}
        return Calling(lambda: self.server.call("POST", "/resume_memory_occupation", body, timeout=2 * RECOVERY_S))

    def _half_done(self) -> Calling:
        took_ms = self.server.resume()
        self.server.flush()
        self.server.release()
        call = self._resuming()
        time.sleep(took_ms / 2e3)
        self.began = time.monotonic()
        return call

    # The faults

    def out_of_memory(self) -> Calling:
        filler = Process(filled, device=1)
        ask_all([filler])
        ask_all([filler])
        self.began = time.monotonic()
        call = self._resuming()
        call.join(HELD_S)
        filler.close()
        return call

    def trainer_killed(self) -> Calling:
        trainers = self._trainers()
        self.began = time.monotonic()
        call = self._resuming()
        call.join(HELD_S)
        for each in trainers:
            each._process.kill()
            each.close()
        return call

    def killed_released(self) -> None:
        self.server.worker(1).kill()

    def killed_resuming(self) -> Calling:
        worker = self.server.worker(1)
        call = self._half_done()
        worker.kill()
        return call

    def terminated(self) -> Calling:
        call = self._half_done()
        self.server.send(signal.SIGTERM)
        return call

    def killed_waiting(self) -> Calling:
        worker = self.server.worker(1)
        return self._while_waiting(worker.kill)

    def broker_killed(self) -> Calling:
        assert self.brokers is not None
        return self._while_waiting(self.brokers.kill)

    def _while_waiting(self, act: Callable[[], object]) -> Calling:
        trainers = self._trainers()
        call = self._resuming()
        call.join(HELD_S)
        self.began = time.monotonic()
        act()
        if self.fault == "broker-killed":
            side_by_side(trainers)  # release, so that the engine can go on
        call.join(2 * RECOVERY_S)
        for each in trainers:
            each.close()
        return call

    def _trainers(self) -> list[Process]:
        """Processes that hold the memory of both GPUs."""
        if self.brokers is not None:
            pool: dict[str, Any] = {
                "pool_directory": self.brokers.directory,
                "capacity": self.brokers.capacity,
                "spare": 2 * GIB,
            }
            trainers = [Process(holding, gpu=gpu, **pool) for gpu in GPUS]
        else:
            trainers = [Process(filled, device=rank) for rank in range(len(GPUS))]
        for _ in range(2):  # they start, and take the memory
            ask_all(trainers)
        return trainers


def measure(way: str, options: argparse.Namespace, directory: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """Runs the faults of a way."""
    baseline = used_bytes(GPUS)
    drills: list[Drill] = []
    try:
        for fault in POOLED if way == SHARED else PLAIN:
            if fault in options.only:
                drills.append(Drill(fault, way, options, directory))
        for drill in drills:
            try:
                row = drill.run()
            except (SystemExit, AssertionError) as error:
                row = {"fault": drill.fault, "way": way, "failed": str(error)[-2000:]}
            drill.server.close(wait_s=0)
            keep(row)
    finally:
        for drill in drills:
            drill.close()
    keep({"fault": "all ended", "way": way, "stranded_bytes": stranded(GPUS, baseline)})


def report(row: dict[str, Any]) -> None:
    shown = {name: value for name, value in row.items() if name not in ("fault", "way", "said")}
    if "stranded_bytes" in row:
        shown = {"in use when all have ended, MiB": row["stranded_bytes"] // MIB}
    print(f"{row['fault']:16}{row['way']:24}{shown}", flush=True)
    for line in row.get("said", ())[-3:]:
        print(f"    {line[-300:]}")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="wide")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", nargs="+", choices=("tms", "memsaver", SHARED), default=("tms", "memsaver", SHARED))
    parser.add_argument("--kv-gib", type=positive, default=3.0, help="size of each KV cache on each GPU")
    parser.add_argument("--logs", type=writable, help="directory for the logs of the servers")
    options = parse(parser)
    need_cuda(count=len(GPUS))
    about = {"benchmark": "sglang_faults", **environment("cuda:0"), "model": options.model}

    def keep(row: dict[str, Any]) -> None:
        report(row)
        print(json.dumps({**about, **row}), flush=True)

    for way in options.ways:
        with tempfile.TemporaryDirectory() as directory:
            MODELS[options.model].write(directory)
            measure(way, options, directory, keep)


if __name__ == "__main__":
    main()
