"""vLLM's sleep mode, its own and memsaver's, in turns on one GPU.

    python benchmarks/vllm_sleep.py [--models qwen3-0.6b qwen3-8b] [--rounds 20] [--share 0.4] [--starts]

Two engines with equal weights, one in each of two processes, are awake by turns. In a round each sleeps at level 1,
wakes all; sleeps at level 1, wakes the weights, then the KV cache; sleeps at level 2, wakes the weights, gets them
written, and wakes the KV cache. After each wake-up it generates the same tokens. Prints medians, their ratio, and GB/s
of the calls that copy the weights beside plain pinned copies; then one JSON line. The exit status is 1 if tokens
differ. Needs vLLM; its weights are random. ``--share`` is the part of the GPU for each engine. ``--starts``: no rounds,
only the numbers of KV blocks, the tokens, and memsaver's account of the engine's memory awake, asleep at level 1, and
awake again; ``--ways`` takes one engine alone then. ``--uncompiled``: without
torch.compile; the engines start sooner. ``--kv-gib``: a KV cache of so many GiB; vLLM does not measure the free memory,
so other processes may use the GPU too.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from support.arguments import count, parse, parser_for, positive
from support.environment import environment, listed_bytes, nvidia_smi
from support.host import GIB, MIB
from support.servers.vllm_models import MODELS, UNCOMPILED, WAYS, Model, prompt

PROMPTS, TOKENS = 8, 32
WARM_UP = 2
COPYING = {"sleep 1": "out", "wake 1": "into", "wake 1, weights": "into"}


class Engine:
    """A vLLM engine within this process."""

    def __init__(self, model: Model, directory: str, share: float, backend: str, **options: Any) -> None:
        from vllm import LLM, SamplingParams

        if model.lora:
            model.write_lora_configs(directory, nvidia_smi("cuda:0", "--query-gpu=name")[0])
            os.environ["VLLM_TUNED_CONFIG_FOLDER"] = directory

        self._host_before = psutil.Process().memory_info().rss
        began = time.perf_counter()
        self.llm = LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_sleep_mode=True,
            gpu_memory_utilization=share,
            max_model_len=2048,
            max_num_seqs=32,
            attention_backend=backend,
            seed=0,
            **model.engine_options(),
            **options,
        )
        self.ready_s = time.perf_counter() - began
        self.sampling = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
        self._adapter = model.write_adapter(directory) if model.lora else None
        self._adapters = 0
        self.write_weights()

    def write_weights(self) -> None:
        """The same random weights each time, as an update would write them, and an adapter under a new number."""
        [self.weight_bytes] = self.llm.apply_model(_fill)
        if self._adapter is not None:
            if self._adapters:
                self.llm.llm_engine.remove_lora(self._adapters)
            self._adapters += 1

    def tokens(self) -> str:
        """A digest of greedy tokens, without cached prefixes: they change the shapes of the prefill, and near-ties."""
        self.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt(number)} for number in range(PROMPTS)]
        done = self.llm.generate(prompts, self.sampling, use_tqdm=False, lora_request=self._lora())
        return hashlib.sha256(str([list(each.outputs[0].token_ids) for each in done]).encode()).hexdigest()[:16]

    def _lora(self) -> Any:
        if self._adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter {self._adapters}", self._adapters, self._adapter)

    def introduction(self) -> dict[str, Any]:
        blocks = self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        return {
            "ready_s": self.ready_s,
            "kv_blocks": blocks,
            "weight_bytes": self.weight_bytes,
            "tokens": self.tokens(),
        }

    def round(self) -> dict[str, Any]:
        found: dict[str, Any] = {"ms": {}, "tokens": [], "asleep_bytes": {}}

        def timed(name: str, call: Callable[[], object]) -> None:
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            found["ms"][name] = (time.perf_counter() - began) * 1e3

        llm = self.llm
        timed("sleep 1", lambda: llm.sleep(level=1))
        found["asleep_bytes"]["1"] = listed_bytes("cuda:0")
        timed("wake 1", llm.wake_up)
        found["tokens"].append(self.tokens())
        llm.sleep(level=1)
        timed("wake 1, weights", lambda: llm.wake_up(tags=["weights"]))
        timed("wake 1, kv_cache", lambda: llm.wake_up(tags=["kv_cache"]))
        found["tokens"].append(self.tokens())
        timed("sleep 2", lambda: llm.sleep(level=2))
        found["asleep_bytes"]["2"] = listed_bytes("cuda:0")
        timed("wake 2, weights", lambda: llm.wake_up(tags=["weights"]))
        self.write_weights()
        timed("wake 2, kv_cache", lambda: llm.wake_up(tags=["kv_cache"]))
        found["tokens"].append(self.tokens())
        found["host_bytes"] = psutil.Process().memory_info().rss - self._host_before
        return found

    def accounts(self) -> dict[str, Any]:
        """memsaver's account of this process's memory on the device, at three moments."""
        from support.accounts import account_of

        found = {"awake": account_of("cuda:0")}
        self.llm.sleep(level=1)
        found["asleep"] = account_of("cuda:0")
        self.llm.wake_up()
        self.tokens()
        found["awake again"] = account_of("cuda:0")
        return found

    def limits(self) -> dict[str, float]:
        """Milliseconds in which plain pinned copies move the bytes of the weights, one way and the other."""
        from support.limits import PlainCopies

        copies = PlainCopies(self.weight_bytes, "cuda:0", GIB)
        return {"out": statistics.median(copies.out() for _ in range(5)),
                "into": statistics.median(copies.into() for _ in range(5))}  # fmt: skip


def _fill(model: Any) -> int:
    """Writes the parameters. Returns their bytes."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    total = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
            total += parameter.nbytes
    return total


def serve(model: Model, directory: str, share: float, backend: str, **options: Any) -> None:
    """A child: names of Engine's methods come in, and results go out, a line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    engine = Engine(model, directory, share, backend, **options)
    for name in itertools.chain(["introduction"], sys.stdin):
        print(json.dumps(getattr(engine, name.strip())()), file=answers, flush=True)


class Subject:
    """The parent's handle of a child."""

    def __init__(self, way: str, model: str, directory: str, options: argparse.Namespace) -> None:
        # One process for engine and worker. Functions travel to the worker as pickles.
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **WAYS[way]}
        environ = {key: value for key, value in {**os.environ, **variables}.items() if value}
        command = [sys.executable, __file__, "--serve", directory, "--share", str(options.share)]
        self._log = open(f"{directory}/{way}.log", "w+")  # noqa: SIM115
        command += ["--uncompiled"] if options.uncompiled else []
        command += ["--kv-gib", str(options.kv_gib)] if options.kv_gib else []
        self._process = subprocess.Popen(
            [*command, "--models", model, "--backend", options.backend],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"an engine has ended ({self._process.wait()}):\n{self._log.read()[-4000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, name: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return self.answer()

    def replaced(self) -> str:
        """The line of the drop-in in the log, or nothing."""
        self._log.seek(0)
        return next(
            (line.partition("memsaver ")[2].strip() for line in self._log if "memsaver" in line and "replaces" in line),
            "",
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def compare(model: str, options: argparse.Namespace) -> dict[str, Any]:
    about = {"model": model, "share": options.share, "uncompiled": options.uncompiled, "kv_gib": options.kv_gib}
    with tempfile.TemporaryDirectory() as directory:
        MODELS[model].write(directory)
        subjects: dict[str, Subject] = {}
        try:
            first: dict[str, dict[str, Any]] = {}
            for way in options.ways:  # one after the other: an engine measures the memory of others while it starts
                subjects[way] = Subject(way, model, directory, options)
                first[way] = subjects[way].answer()
            replaced = {way: subject.replaced() for way, subject in subjects.items()}
            assert all(bool(line) == (way == "memsaver") for way, line in replaced.items()), replaced
            if options.starts:
                accounts = subjects["memsaver"].ask("accounts") if "memsaver" in subjects else None
                return {**about, "first": first, "accounts": accounts}
            rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for number in range(WARM_UP + options.rounds):
                for way in list(WAYS)[:: 1 if number % 2 else -1]:
                    rounds[way].append(subjects[way].ask("round"))
            limits = subjects["memsaver"].ask("limits")
        finally:
            for subject in subjects.values():
                subject.close()
    return {**about, "first": first, "rounds": rounds, "limits_ms": limits}


def report_starts(found: dict[str, Any]) -> bool:
    """Prints the numbers of KV blocks. Returns whether the tokens are equal."""
    first = found["first"]
    print(f"\n{found['model']}")
    for way, each in first.items():
        print(f"{way:10}{each['kv_blocks']:10} KV blocks, tokens {each['tokens']}")
    if len(first) == 2:
        print(f"memsaver: {first['memsaver']['kv_blocks'] / first['vllm']['kv_blocks'] - 1:+.2%} KV blocks")
    if found["accounts"] is not None:
        from support.accounts import table

        print("\n".join(table(found["accounts"])))
    return len({each["tokens"] for each in first.values()}) == 1


def report(found: dict[str, Any]) -> bool:
    """Prints the table. Returns whether all tokens are equal."""
    counted = {way: found["rounds"][way][WARM_UP:] for way in WAYS}
    first, limits = found["first"], found["limits_ms"]
    nbytes = first["vllm"]["weight_bytes"]
    print(f"\n{found['model']}, {nbytes / GIB:.2f} GiB of weights; median of {len(counted['vllm'])} rounds, ms")
    print(f"{'':20}{'vLLM':>10}{'memsaver':>10}{'ratio':>8}{'GB/s':>8}{'of the bus':>12}")
    medians: dict[str, dict[str, float]] = {}
    for name in counted["vllm"][0]["ms"]:
        each = {way: statistics.median(row["ms"][name] for row in rows) for way, rows in counted.items()}
        medians[name] = each
        line = f"{name:20}{each['vllm']:10.1f}{each['memsaver']:10.1f}{each['memsaver'] / each['vllm']:8.2f}"
        if name in COPYING:
            line += f"{nbytes / each['memsaver'] / 1e6:8.1f}{limits[COPYING[name]] / each['memsaver']:12.1%}"
        print(line)
    for level in ("1", "2"):
        left = {
            way: statistics.median(row["asleep_bytes"][level] or math.nan for row in rows) / MIB  # nan: not listed
            for way, rows in counted.items()
        }
        print(f"{'left on the GPU, level ' + level:30}{left['vllm']:10.0f}{left['memsaver']:10.0f} MiB")
    host = {way: max(row["host_bytes"] for row in rows) / GIB for way, rows in counted.items()}
    print(f"{'host memory':30}{host['vllm']:10.2f}{host['memsaver']:10.2f} GiB")
    print(f"{'KV blocks':30}{first['vllm']['kv_blocks']:10}{first['memsaver']['kv_blocks']:10}")
    tokens = {each for rows in found["rounds"].values() for row in rows for each in row["tokens"]}
    tokens |= {each["tokens"] for each in first.values()}
    print("tokens: all equal" if len(tokens) == 1 else f"tokens: {len(tokens)} different sequences")
    found["medians_ms"] = medians
    return len(tokens) == 1


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--rounds", type=count, default=20, help="after two for warming up")
    parser.add_argument("--share", type=positive, default=0.4, help="of the GPU, for each of the two engines")
    parser.add_argument("--backend", default="TRITON_ATTN", help="vLLM's attention backend")
    parser.add_argument("--uncompiled", action="store_true", help="without torch.compile: the engines start sooner")
    parser.add_argument("--starts", action="store_true", help="no rounds: KV blocks and tokens alone")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), help="with --starts")
    parser.add_argument("--kv-gib", type=count, help="of each KV cache; default: the rest of the share")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.serve:
        more: dict[str, Any] = {"compilation_config": UNCOMPILED} if options.uncompiled else {}
        more |= {"kv_cache_memory_bytes": options.kv_gib * GIB} if options.kv_gib else {}
        serve(MODELS[options.models[0]], options.serve, options.share, options.backend, **more)
        return
    if len(set(options.ways)) == 1 and not options.starts:
        parser.error("one way alone has no rounds: add --starts")
    equal = True
    for model in options.models:
        found = compare(model, options)
        equal = (report_starts if options.starts else report)(found) and equal
        print(json.dumps({"benchmark": "vllm_sleep", **environment("cuda:0"), **found}))
    sys.exit(not equal)


if __name__ == "__main__":
    main()
