"""SGLang's release and resume of memory, by torch_memory_saver and by memsaver's drop-in, in turns on one GPU.

    python benchmarks/sglang_memory.py [--models qwen3-0.6b qwen3-8b] [--settings update backup ...] [--rounds 20]

Servers with equal weights, one for each way, and one that never releases anything. In a round each way releases the KV
cache, the weights and the graphs, and resumes in reverse, one call for each; a trainer's process sends weights of a new
version by ``update_weights_from_tensor``. After the release, and before the KV cache is back, another process fills all
free memory but 1 GiB with 0xA5. The driver scrubs this memory after its release, and "cuMemCreate" waits for the end:
hence the rest after each fill (``--rest 0``: none). Settings:

- update: no backup. The new weights arrive between the resumes of weights and KV cache.
- backup: ``--enable-weights-cpu-backup``. The weights have to come back with the resume; the new ones arrive later.
  Here torch_memory_saver runs twice: as it is, and with host memory that is kept (TMS_RETAIN_CPU_BACKUP).
- update-graphs, backup-graphs: the same with SGLANG_MEMORY_SAVER_CUDA_GRAPH.

Tokens are compared in each round with those of the server that never releases. ``--checkpoint``: this server reads the
first version from a file. Prints medians, their ratio to torch_memory_saver, GB/s of copies beside plain pinned copies,
device and host memory that a server has when all is released; then one JSON line for each setting. The exit status is 1
if tokens differ. Needs SGLang; the weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from support.arguments import count, not_negative, parse, parser_for, positive
from support.arguments import directory as writable
from support.environment import environment, nvidia_smi
from support.host import GIB, MIB, status
from support.processes import Process, Sample, ask_all, in_process
from support.servers.sglang_server import GRAPHS, WAYS, Server
from support.servers.sglang_updates import trained, update
from support.servers.vllm_models import HEAD, KV_HEADS, MODELS
from support.servers.vllm_updates import filled

SETTINGS = {"update": (False, False), "backup": (True, False), "update-graphs": (False, True),
            "backup-graphs": (True, True)}  # fmt: skip
"""Whether weights have a backup, and whether the memory of graphs is released."""

RELEASED = ("kv_cache", "weights", "cuda_graph")
WARM_UP = 2
REFERENCE_TOKENS = 4096
COPYING = {"release weights": "out", "resume weights": "into"}


def used_bytes() -> int:
    return int(nvidia_smi("cuda:0", "--query-gpu=memory.used")[0]) * MIB


def plain_copies(nbytes: int) -> Iterator[Sample]:
    """Milliseconds in which plain pinned copies move so many bytes, one way and the other."""
    from support.limits import PlainCopies

    copies = PlainCopies(nbytes, "cuda:0", GIB)
    yield {"out": statistics.median(copies.out() for _ in range(5)),
           "into": statistics.median(copies.into() for _ in range(5))}  # fmt: skip


def write_checkpoint(model: str, path: str) -> Sample:
    """The first version of the weights."""
    from safetensors.torch import save_file

    save_file({name: weight.cpu() for name, weight in MODELS[model].weights(1, "cuda:0")}, path, {"format": "pt"})
    return {}


class Setting:
    """The servers of one model and setting, and their results."""

    def __init__(self, model: str, name: str, options: argparse.Namespace, directory: str) -> None:
        self.model, self.name = model, name
        self.backup, graphs = SETTINGS[name]
        self.ways = [way for way in options.ways if self.backup or way != "tms, retained"]
        shape = MODELS[model]
        shape.write(directory)
        if options.checkpoint:
            in_process(write_checkpoint, model=model, path=f"{directory}/model.safetensors")
        per_token = 2 * shape.layers * KV_HEADS * HEAD * 2
        tokens = int(options.kv_gib * GIB) // per_token
        logs = options.logs or directory
        stem = f"{model}-{name}-"
        saver = ["--enable-memory-saver", *(["--enable-weights-cpu-backup"] if self.backup else [])]
        variables = GRAPHS if graphs else {}
        self.reference = Server(
            f"{stem}reference",
            directory,
            logs,
            {"MEMSAVER_DROP_IN": ""},
            kv_tokens=REFERENCE_TOKENS,
            load_format="auto" if options.checkpoint else "dummy",
        )
        self.servers = {
            way: Server(
                stem + way.replace(", ", "-"), directory, logs, {**WAYS[way], **variables}, *saver, kv_tokens=tokens
            )
            for way in self.ways
        }
        self.checkpoint = bool(options.checkpoint)
        self.trainers = [Process(trained, model=model, rank=0, repeats=len(self._all()))]
        self.fillers = [Process(filled, device=0)]
        self.ready_s: dict[str, float] = {}
        self.rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in self.ways}
        self.different: list[str] = []
        self.sequences: set[str] = set()
        self.rest_s: float = options.rest

    def _all(self) -> list[Server]:
        return [self.reference, *self.servers.values()]

    # A run

    def run(self, rounds: int, within_s: float = 600.0) -> None:
        for server in self._all():
            self.ready_s[server.name] = server.wait_ready()
        loaded = {way: server.preloaded() for way, server in self.servers.items()}
        assert all(found == ("memsaver" if way == "memsaver" else "tms") for way, found in loaded.items()), loaded
        ask_all(self.trainers)
        ask_all(self.fillers)
        if self.checkpoint:
            self.expected = self.reference.tokens()
            update(self.reference, self.trainers)
            self._compare("reference, updated", self.reference)
        else:
            update(self.reference, self.trainers)
            self.expected = self.reference.tokens()
        self.sequences.add(str(self.expected))
        for way, server in self.servers.items():
            update(server, self.trainers)
            self._compare(f"{way}, never released", server)
        began = time.monotonic()
        for number in range(WARM_UP + rounds):
            if number > WARM_UP and time.monotonic() - began > within_s:
                break
            before = self.expected
            update(self.reference, self.trainers)
            self.expected = self.reference.tokens()
            self.sequences.add(str(self.expected))
            for way in self.ways[:: 1 if number % 2 else -1]:
                self.rounds[way].append(self._round(way, before if self.backup else self.expected))

    def _compare(self, what: str, server: Server, expected: list[list[int]] | None = None) -> None:
        if server.tokens() != (expected or self.expected):
            self.different.append(what)

    def _round(self, way: str, expected: list[list[int]]) -> dict[str, Any]:
        server, ms = self.servers[way], dict[str, float]()
        server.flush()
        awake = used_bytes()
        for tag in RELEASED:
            ms[f"release {tag}"] = server.release(tag)
        released = used_bytes()
        filled_bytes = self._fill()
        for tag in reversed(RELEASED[1:]):
            ms[f"resume {tag}"] = server.resume(tag)
        if not self.backup:
            ms["update"] = update(server, self.trainers)
            self._fill()
        ms["resume kv_cache"] = server.resume("kv_cache")
        self._compare(f"{way}, round {len(self.rounds[way]) + 1}", server, expected)
        if self.backup:
            ms["update"] = update(server, self.trainers)
        rss = sum(each.memory_info().rss for each in server.processes())
        return {"ms": ms, "freed_bytes": awake - released, "filled_bytes": filled_bytes, "rss_bytes": rss}

    def _fill(self) -> int:
        found: int = ask_all(self.fillers)[0]["bytes"]
        ask_all(self.fillers)  # releases it
        time.sleep(self.rest_s)
        return found

    def left(self) -> dict[str, dict[str, int]]:
        """Device and host memory of each server when all is released. The end of the server releases this memory."""
        for server in self.servers.values():
            server.flush()
            server.release()
        found = {}
        for way, server in self.servers.items():
            device, host_free = used_bytes(), status("/proc/meminfo")["MemAvailable"]
            server.close(wait_s=0)
            deadline = time.monotonic() + 5
            while (gone := device - used_bytes()) < 64 * MIB and time.monotonic() < deadline:
                time.sleep(0.1)
            host = status("/proc/meminfo")["MemAvailable"] - host_free
            found[way] = {"device_bytes": gone, "host_bytes": host}
        return found

    def close(self) -> None:
        for server in self._all():
            server.close(wait_s=0)
        for process in (*self.trainers, *self.fillers):
            process.close()


def measure(model: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        setting = Setting(model, name, options, directory)
        try:
            setting.run(options.rounds, options.within)
            left = setting.left()
            plain = in_process(plain_copies, nbytes=MODELS[model].nbytes()) if setting.backup else {}
        finally:
            setting.close()
    return {
        "model": model, "setting": name, "weight_bytes": MODELS[model].nbytes(), "kv_gib": options.kv_gib,
        "rest_s": options.rest, "ready_s": setting.ready_s, "rounds": setting.rounds, "left": left, "plain_ms": plain,
        "different": setting.different, "sequences": len(setting.sequences),
    }  # fmt: skip


def medians(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, then of all releases and of all resumes of a round, for each way."""
    result: dict[str, dict[str, float]] = {}
    for way, rounds in found["rounds"].items():
        counted = [row["ms"] for row in rounds[WARM_UP:]]
        totals = [
            {**row, **{f"{verb}, all": sum(ms for name, ms in row.items() if name.startswith(verb))
                       for verb in ("release", "resume")}}
            for row in counted
        ]  # fmt: skip
        for name in totals[0]:
            result.setdefault(name, {})[way] = statistics.median(row[name] for row in totals)
    return result


def report(found: dict[str, Any]) -> bool:
    """Prints the table. Returns whether all tokens are equal."""
    ways, nbytes, plain = list(found["rounds"]), found["weight_bytes"], found["plain_ms"]
    number = len(found["rounds"][ways[0]]) - WARM_UP
    print(f"\n{found['model']}, {found['setting']}: {nbytes / GIB:.2f} GiB of weights, {found['kv_gib']:g} GiB of KV "
          f"cache; median of {number} rounds, ms")  # fmt: skip
    others = [way for way in ways if way != "memsaver"]
    compared = others[-1] if others and "memsaver" in ways else None
    heads = [*ways, *([f"/ {compared}"] if compared else [])]
    print(f"{'':20}" + "".join(f"{head:>17}" for head in heads))
    found["medians_ms"] = medians(found)
    for name, each in found["medians_ms"].items():
        line = f"{name:20}" + "".join(f"{each[way]:17.1f}" for way in ways)
        if compared:
            line += f"{each['memsaver'] / each[compared]:17.2f}"
        print(line)
        if plain.get(COPYING.get(name)):
            limit = plain[COPYING[name]]
            print(f"{'  GB/s':20}" + "".join(f"{nbytes / each[way] / 1e6:17.1f}" for way in ways))
            print(f"{'  of the bus':20}" + "".join(f"{limit / each[way]:17.1%}" for way in ways)
                  + f"   plain copies: {limit:.1f} ms, {nbytes / limit / 1e6:.1f} GB/s")  # fmt: skip
    rows: dict[str, dict[str, float]] = {
        "freed, GiB": {way: min(row["freed_bytes"] for row in found["rounds"][way]) / GIB for way in ways},
        "left on GPU, MiB": {way: found["left"][way]["device_bytes"] / MIB for way in ways},
        "host memory, GiB": {way: found["left"][way]["host_bytes"] / GIB for way in ways},
        "resident, GiB": {way: max(row["rss_bytes"] for row in found["rounds"][way]) / GIB for way in ways},
    }
    for name, each in rows.items():
        line = f"{name:20}" + "".join(f"{each[way]:17.2f}" for way in ways)
        print(line + (f"{each['memsaver'] - each[compared]:+17.2f}" if compared else ""))
    print(f"{found['sequences']} different sequences of tokens in {WARM_UP + number + 1} versions; different from the "
          f"server that never releases: {found['different'] or 'none'}", flush=True)  # fmt: skip
    return not found["different"]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--rounds", type=count, default=20, help="after two for warming up")
    parser.add_argument("--within", type=positive, default=600.0, help="seconds after which no further round begins")
    parser.add_argument("--rest", type=not_negative, default=0.5, help="seconds after each fill of the memory")
    parser.add_argument("--kv-gib", type=positive, default=8.0, help="size of each KV cache")
    parser.add_argument("--checkpoint", action="store_true", help="the reference reads its first weights from a file")
    parser.add_argument("--logs", type=writable, help="directory for the logs of the servers")
    options = parse(parser)
    about = {"benchmark": "sglang_memory", **environment("cuda:0")}
    equal = True
    for model in options.models:
        for name in options.settings:
            try:
                found = measure(model, name, options)
            except (SystemExit, AssertionError) as error:
                print(f"{model}, {name}: {error}", flush=True)
                equal = False
                continue
            equal = report(found) and equal
            print(json.dumps({**about, **found}), flush=True)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
