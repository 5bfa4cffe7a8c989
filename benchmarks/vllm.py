"""vLLM's sleep mode, its own and memsaver's: times, starts, and faults. Needs vLLM. Weights are random.

--part sleep: two engines with equal weights, one in each of two processes, are awake by turns. In a round each sleeps
at level 1, wakes all; sleeps at level 1, wakes the weights, then the KV cache; sleeps at level 2, wakes the weights,
gets them written, and wakes the KV cache. After each wake-up it generates the same tokens. Prints medians in ms,
their ratio, and the share of plain pinned copies for calls that copy the weights.

--part starts: no rounds. The numbers of KV blocks, tokens, and the ledger of memsaver's engine awake, asleep at level
1, and awake again.

--part faults, with tensor parallel 2 over HTTP (needs two GPUs):
{faults}
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import psutil
import torch

import memsaver
from benchmarks.harness import faults
from benchmarks.harness.command import Options, Run, count, number
from benchmarks.harness.limits import Limit
from benchmarks.harness.machine import GIB, MIB, listed_bytes
from benchmarks.harness.models import MODELS, UNCOMPILED, Model, prompt
from benchmarks.harness.pools import ledger_of, ledger_rows
from benchmarks.harness.processes import Process, Sample, processes
from benchmarks.harness.servers import Server, VllmServer
from benchmarks.harness.work import median, share, timed

__doc__ = __doc__.format(faults=faults.DESCRIPTION.strip())
DEVICES = ("cuda",)
WAYS = {"vllm": {"MEMSAVER_DROP_IN": ""}, "memsaver": {"MEMSAVER_DROP_IN": "vllm"}}
# One process for engine and worker. Functions travel to the worker as pickles.
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
PROMPTS, TOKENS = 8, 32
WARM_UP = 2
COPYING = {"sleep 1": "out", "wake 1": "into", "wake 1, weights": "into"}


def options(parser: Options) -> None:
    parser.add_argument("--part", choices=("sleep", "starts", "faults"), default="sleep")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--rounds", type=count, default=20, help="of sleep, after two")
    parser.add_argument("--share", type=number, default=0.4, help="of the GPU, for each of the two engines")
    parser.add_argument("--kv-gib", type=count, help="of each KV cache (default: the rest of the share)")
    parser.add_argument("--uncompiled", action="store_true", help="without torch.compile: engines start sooner")
    parser.choice("--ways", (*WAYS, faults.SHARED), "of starts and faults")
    parser.choice("--faults", faults.FAULTS, "of faults")


def measure(run: Run) -> None:
    if run.options.part == "faults":
        faults.drill_all(run, run.options.ways, run.options.faults, start_server, "wide")
        return
    for model in run.options.models:
        run.attempt(model, partial(compare, run, model))


def start_server(name: str, model: Model, directory: str, variables: Mapping[str, str]) -> Server:
    drop_in = WAYS["vllm" if name.endswith("vllm") else "memsaver"]
    return VllmServer(name, directory, directory, {**drop_in, **variables}, faults.KV_BYTES, len(faults.GPUS))


def compare(run: Run, model: str) -> None:
    part = run.options.part
    ways = [way for way in WAYS if way in run.options.ways or part == "sleep"]
    settings: dict[str, Any] = {"compilation_config": UNCOMPILED} if run.options.uncompiled else {}
    if run.options.kv_gib:  # vLLM does not measure the free memory then, so other processes may use the GPU too
        settings["kv_cache_memory_bytes"] = run.options.kv_gib * GIB
    with tempfile.TemporaryDirectory() as directory:
        MODELS[model].write(directory)
        how = {"directory": directory, "share": run.options.share, "settings": settings}
        engines = {way: Process(Engine, 600.0, VARIABLES | WAYS[way], **how) for way in ways}
        with processes(*engines.values()):
            # One after the other: an engine measures the memory of others while it starts.
            first = {way: engine.ask("introduction") for way, engine in engines.items()}
            if any(bool(each["regions"]) != (way == "memsaver") for way, each in first.items()):
                raise AssertionError(f"an engine has the allocator of another way: {first}")
            run.table(f"{model}, starts", first)
            digests = {each["tokens"] for each in first.values()}
            if part == "sleep":
                digests |= _sleep(run, model, engines, first)
            elif "memsaver" in engines:
                run.table(f"{model}, ledger", ledger_rows(engines["memsaver"].ask("ledgers")))
    run.check(f"{model}: tokens are equal", len(digests) == 1, f"{len(digests)} sequences")


def _sleep(run: Run, model: str, engines: dict[str, Process], first: dict[str, Sample]) -> set[str]:
    rounds: dict[str, list[Sample]] = {way: [] for way in engines}
    for at in range(WARM_UP + run.options.rounds):
        for way in list(engines)[:: 1 if at % 2 else -1]:
            rounds[way].append(engines[way].ask("round"))
    nbytes = first["vllm"]["weights, GiB"] * GIB
    with Limit(GIB, run.device) as limit:
        limit.measure()
    counted, rows = {way: each[WARM_UP:] for way, each in rounds.items()}, dict[str, dict[str, Any]]()
    for name in counted["vllm"][0]["ms"]:
        took = {way: statistics.median(row["ms"][name] for row in each) for way, each in counted.items()}
        rows[name] = {**took, "ratio": took["memsaver"] / took["vllm"]}
        if name in COPYING:
            rows[name]["of the limit"] = share(limit.ms(COPYING[name], nbytes), took["memsaver"])
    run.table(f"{model}, {first['vllm']['weights, GiB']:.2f} GiB of weights, ms", rows)
    memory: dict[str, dict[str, Any]] = {"host memory, grown by, GiB": {}}
    for way, each in counted.items():
        memory["host memory, grown by, GiB"][way] = max(row["host_bytes"] for row in each) / GIB
        for level in ("1", "2"):
            left = median([row["asleep"][level] for row in each if row["asleep"][level]])  # if nvidia-smi lists it
            memory.setdefault(f"asleep at level {level}, MiB", {})[way] = left / MIB if left else None
    run.table(f"{model}, memory of the process", memory)
    run.keep(**{f"rounds of {model}": rounds})
    return {digest for each in rounds.values() for row in each for digest in row["tokens"]}


class Engine:
    """A vLLM engine within this process."""

    def __init__(self, directory: str, share: float, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._host_before = psutil.Process().memory_info().rss
        began = time.perf_counter()
        self.llm = LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_sleep_mode=True,
            gpu_memory_utilization=share, max_model_len=2048, max_num_seqs=32, attention_backend="TRITON_ATTN", seed=0,
            **settings,
        )  # fmt: skip
        self._ready_s = time.perf_counter() - began
        self.sampling = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
        self.write_weights()

    def write_weights(self) -> None:
        """The same random weights each time, as an update would write them."""
        [self.weight_bytes] = self.llm.apply_model(_fill)

    def tokens(self) -> str:
        """A digest of greedy tokens, without cached prefixes: they change the shapes of the prefill, and near-ties."""
        self.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt(number)} for number in range(PROMPTS)]
        done = self.llm.generate(prompts, self.sampling, use_tqdm=False)
        return hashlib.sha256(str([list(each.outputs[0].token_ids) for each in done]).encode()).hexdigest()[:16]

    def introduction(self) -> Sample:
        regions = sum(len(device.regions) for device in memsaver.stats().devices.values())
        blocks = self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        figures = {"ready, s": self._ready_s, "KV blocks": blocks, "weights, GiB": self.weight_bytes / GIB}
        return {**figures, "tokens": self.tokens(), "regions": regions}

    def round(self) -> Sample:
        ms, tokens, asleep = dict[str, float](), list[str](), dict[str, Any]()
        llm = self.llm
        ms["sleep 1"] = timed("cuda", lambda: llm.sleep(level=1))
        asleep["1"] = listed_bytes("cuda:0")
        ms["wake 1"] = timed("cuda", llm.wake_up)
        tokens.append(self.tokens())
        llm.sleep(level=1)
        ms["wake 1, weights"] = timed("cuda", lambda: llm.wake_up(tags=["weights"]))
        ms["wake 1, kv_cache"] = timed("cuda", lambda: llm.wake_up(tags=["kv_cache"]))
        tokens.append(self.tokens())
        ms["sleep 2"] = timed("cuda", lambda: llm.sleep(level=2))
        asleep["2"] = listed_bytes("cuda:0")
        ms["wake 2, weights"] = timed("cuda", lambda: llm.wake_up(tags=["weights"]))
        self.write_weights()
        ms["wake 2, kv_cache"] = timed("cuda", lambda: llm.wake_up(tags=["kv_cache"]))
        tokens.append(self.tokens())
        host_bytes = psutil.Process().memory_info().rss - self._host_before
        return {"ms": ms, "tokens": tokens, "asleep": asleep, "host_bytes": host_bytes}

    def ledgers(self) -> dict[str, dict[str, int | None]]:
        found = {"awake": ledger_of("cuda:0")}
        self.llm.sleep(level=1)
        found["asleep"] = ledger_of("cuda:0")
        self.llm.wake_up()
        self.tokens()
        return {**found, "awake again": ledger_of("cuda:0")}


def _fill(model: Any) -> int:
    """Writes the parameters. Returns their bytes."""
    generator, total = torch.Generator(device="cuda").manual_seed(7), 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
            total += parameter.nbytes
    return total
