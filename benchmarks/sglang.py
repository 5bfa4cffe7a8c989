"""SGLang's release and resume of memory, by torch_memory_saver and by memsaver's drop-in: times, and faults.

Needs SGLang. Weights are random. --part memory: servers with equal weights on one GPU, one for each way, and one that
never releases anything. In a round each way releases the KV cache, the weights and the graphs, and resumes in
reverse, one call for each; a trainer's process sends weights of a new version by update_weights_from_tensor. After
the release, and before the KV cache is back, another process fills all free memory but 1 GiB with 0xA5. The driver
scrubs this memory when it is released, and cuMemCreate waits for the end: hence --rest seconds after each fill.
Settings:

- update: no backup. The new weights arrive between the resumes of weights and KV cache.
- backup: --enable-weights-cpu-backup. The weights have to come back with the resume; the new ones arrive later. Here
  torch_memory_saver also runs with host memory that is kept (TMS_RETAIN_CPU_BACKUP).
- update-graphs, backup-graphs: the same with SGLANG_MEMORY_SAVER_CUDA_GRAPH.

Tokens are compared in each round with those of the server that never releases. --part faults, with tensor parallel 2
and a backup of the weights (needs two GPUs; SGLang ends a scheduler that gets an exception):
{faults}
"""

from __future__ import annotations

import base64
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from benchmarks.harness import faults
from benchmarks.harness.command import Options, Run, count, not_negative, number
from benchmarks.harness.faults import filled
from benchmarks.harness.limits import Limit
from benchmarks.harness.machine import GIB, MIB, listed_bytes
from benchmarks.harness.models import MODELS, Model
from benchmarks.harness.processes import Process, Sample, processes
from benchmarks.harness.servers import Server, SglangServer
from benchmarks.harness.work import share

__doc__ = __doc__.format(faults=faults.DESCRIPTION.strip())
DEVICES = ("cuda",)
SETTINGS = ("update", "backup", "update-graphs", "backup-graphs")
RETAINED = "tms, retained"
START = subprocess.run(
    [sys.executable, "-m", "memsaver", "drop-in", "path"], capture_output=True, text=True, check=True
)
WAYS = {
    "tms": {"MEMSAVER_DROP_IN": ""},
    RETAINED: {"MEMSAVER_DROP_IN": "", "TMS_RETAIN_CPU_BACKUP": "1"},
    "memsaver": {
        "MEMSAVER_DROP_IN": "tms",
        "PYTHONPATH": os.pathsep.join([START.stdout.strip(), *filter(None, [os.environ.get("PYTHONPATH")])]),
    },
}
SAVER, BACKUP = "--enable-memory-saver", "--enable-weights-cpu-backup"
WARM_UP = 2
TAGS = ("kv_cache", "weights", "cuda_graph")
BUCKET = 512 * MIB
COPYING = {"release weights": "out", "resume weights": "into"}


def options(parser: Options) -> None:
    parser.add_argument("--part", choices=("memory", "faults"), default="memory")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["qwen3-0.6b", "qwen3-8b"])
    parser.choice("--settings", SETTINGS, "of memory")
    parser.choice("--ways", (*WAYS, faults.SHARED), "of both parts")
    parser.add_argument("--rounds", type=count, default=20, help="of memory, after two")
    parser.add_argument("--rest", type=not_negative, default=0.5, help="seconds after each fill of the memory")
    parser.add_argument("--kv-gib", type=number, default=8.0, help="of each KV cache, in the part memory")
    parser.choice("--faults", faults.FAULTS, "of faults")


def measure(run: Run) -> None:
    if run.options.part == "faults":
        ways = [way for way in run.options.ways if way != RETAINED]
        faults.drill_all(run, ways, run.options.faults, start_server, "wide")
        return
    for model in run.options.models:
        for setting in run.options.settings:
            run.attempt(f"{model}, {setting}", partial(memory, run, model, setting))


def start_server(name: str, model: Model, directory: str, variables: Mapping[str, str]) -> Server:
    ranks = len(faults.GPUS)
    drop_in = WAYS["tms" if name.endswith("tms") else "memsaver"]
    kv_tokens = faults.KV_BYTES // (model.kv_bytes() // ranks)
    return SglangServer(name, directory, directory, {**drop_in, **variables}, kv_tokens, ranks, SAVER, BACKUP)


def memory(run: Run, model: str, setting: str) -> None:
    shape, backup, graphs = MODELS[model], setting.startswith("backup"), setting.endswith("graphs")
    ways = [way for way in run.options.ways if way in WAYS and (backup or way != RETAINED)]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        shape.write(directory)
        options = {"reference": (), **dict.fromkeys(ways, (SAVER, BACKUP) if backup else (SAVER,))}
        servers: dict[str, SglangServer] = {}
        for way, given in options.items():
            variables = {**WAYS.get(way, WAYS["tms"]), "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1" if graphs else ""}
            tokens = int(run.options.kv_gib * GIB) // shape.kv_bytes() if given else 4096
            servers[way] = SglangServer(way, directory, directory, variables, tokens, 1, *given)
            stack.callback(servers[way].close)
        for way, server in servers.items():
            server.wait_ready()
            if way in ways and preloaded(server) != ("memsaver" if way == "memsaver" else "tms"):
                raise AssertionError(f"the server of {way} has loaded the library of {preloaded(server)!r}")
        trainer, filler = Process(trained, model=model, repeats=len(servers)), Process(filled, device=0)
        stack.enter_context(processes(trainer, filler))
        rounds = Rounds(backup, servers, trainer, filler, run.options.rest)
        rounds.run(run.options.rounds)
        left = {}
        for way, server in rounds.servers.items():
            server.release()
            nbytes = listed_bytes("cuda:0", *(each.pid for each in server.processes()))
            left[way] = {"left on the GPU, MiB": nbytes / MIB if nbytes else None}
    with Limit(GIB, run.device) as limit:
        if backup:
            limit.measure()
    _report(run, f"{model}, {setting}", shape.nbytes(), limit, rounds, left)


class Rounds:
    """Updates, releases and resumes of servers, and their results. Tokens are compared with the reference's."""

    def __init__(self, backup: bool, servers: dict[str, Any], trainer: Any, filler: Any, rest_s: float) -> None:
        self.backup, self.reference = backup, servers["reference"]
        self.servers = {way: server for way, server in servers.items() if way != "reference"}
        self._trainer, self._filler, self._rest_s = trainer, filler, rest_s
        self.found: dict[str, list[dict[str, float]]] = {way: [] for way in self.servers}
        self.different: list[str] = []
        self.sequences: set[str] = set()

    def run(self, rounds: int) -> None:
        self._trainer.ask()
        self._filler.ask()
        expected = self._new_version()
        for way, server in self.servers.items():
            self._update(server)
            self._compare(f"{way}, never released", server, expected)
        for at in range(WARM_UP + rounds):
            before, expected = expected, self._new_version()
            for way in list(self.servers)[:: 1 if at % 2 else -1]:
                self.found[way].append(self._round(way, before if self.backup else expected))

    def _new_version(self) -> list[list[int]]:
        self._update(self.reference)
        found: list[list[int]] = self.reference.tokens()
        self.sequences.add(str(found))
        return found

    def _update(self, server: Any) -> float:
        """Sends a version of the weights, bucket by bucket. Milliseconds of the server's calls."""
        took, last = 0.0, False
        while not last:
            bucket = self._trainer.ask()
            body = {"serialized_named_tensors": [bucket["payload"]], "flush_cache": False}
            took += server.post("/update_weights_from_tensor", body)
            last = bucket["last"]
        return took

    def _compare(self, what: str, server: Any, expected: list[list[int]]) -> None:
        if server.tokens() != expected:
            self.different.append(what)

    def _round(self, way: str, expected: list[list[int]]) -> dict[str, float]:
        server, ms = self.servers[way], dict[str, float]()
        server.flush()
        for tag in TAGS:
            ms[f"release {tag}"] = server.post("/release_memory_occupation", {"tags": [tag]})
        self._fill()
        for tag in reversed(TAGS[1:]):
            ms[f"resume {tag}"] = server.post("/resume_memory_occupation", {"tags": [tag]})
        if not self.backup:
            ms["update"] = self._update(server)
            self._fill()
        ms["resume kv_cache"] = server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        self._compare(f"{way}, round {len(self.found[way]) + 1}", server, expected)
        if self.backup:
            ms["update"] = self._update(server)
        for verb in ("release", "resume"):
            ms[f"{verb}, all"] = sum(took for name, took in ms.items() if name.startswith(f"{verb} "))
        return ms

    def _fill(self) -> None:
        self._filler.ask()
        self._filler.ask()  # releases it
        time.sleep(self._rest_s)


def _report(run: Run, title: str, nbytes: int, limit: Limit, rounds: Rounds, left: Any) -> None:
    ways = list(rounds.found)
    others = [way for way in ways if way != "memsaver"]
    rows: dict[str, dict[str, Any]] = {}
    for name in rounds.found[ways[0]][0]:
        took = {way: statistics.median(row[name] for row in each[WARM_UP:]) for way, each in rounds.found.items()}
        rows[name] = dict(took)
        if others and "memsaver" in ways:
            rows[name][f"ratio to {others[-1]}"] = took["memsaver"] / took[others[-1]]
        if name in COPYING:
            rows[name]["memsaver: of the limit"] = share(limit.ms(COPYING[name], nbytes), took.get("memsaver"))
    run.table(f"{title}, {nbytes / GIB:.2f} GiB of weights, ms", rows)
    run.table(f"{title}: left when all is released", left)
    run.keep(**{f"rounds, {title}": rounds.found})
    what = f"{title}: tokens are those of the server that never releases"
    run.check(what, not rounds.different, ", ".join(rounds.different))
    run.check(f"{title}: each version has tokens of its own", len(rounds.sequences) == len(rounds.found[ways[0]]) + 1)


def preloaded(server: Server) -> str:
    """Whose library the scheduler of rank 0 has loaded: ``"tms"``, ``"memsaver"`` or ``""``."""
    paths = {each.path for each in server.worker(0).memory_maps()}
    theirs = any("torch_memory_saver_hook_mode_preload" in path and "/memsaver/" not in path for path in paths)
    ours = any("/memsaver/drop_in/tms/" in path for path in paths)
    return ", ".join(name for name, loaded in {"tms": theirs, "memsaver": ours}.items() if loaded)


def trained(model: str, repeats: int) -> Iterator[Sample]:
    """A trainer: each answer after the first is a bucket of weights by CUDA IPC, and whether it is the version's last.

    ``repeats``: how often a version is sent, to another engine each time.
    """
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    yield {}
    version = 0
    while True:
        version += 1
        for _ in range(repeats):
            # A bucket is new memory each time: the engine may still copy from the one before when it has answered.
            weights: list[tuple[str, torch.Tensor]] = []
            for name, weight in MODELS[model].weights(version, "cuda"):
                if weights and sum(each.nbytes for _, each in weights) + weight.nbytes > BUCKET:
                    yield {"last": False, "payload": _payload(weights)}
                    weights = []
                weights.append((name, weight))
            yield {"last": True, "payload": _payload(weights)}
            weights.clear()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def _payload(weights: list[tuple[str, torch.Tensor]]) -> str:
    """As SGLang's ``MultiprocessingSerializer.serialize(..., output_str=True)``, in one tensor."""
    bucket = torch.cat([weight.view(-1) for _, weight in weights])
    parts = bucket.split([weight.numel() for _, weight in weights])
    torch.cuda.synchronize()
    buffer = io.BytesIO()
    named = [(name, part.view(weight.shape)) for (name, weight), part in zip(weights, parts, strict=True)]
    ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()
