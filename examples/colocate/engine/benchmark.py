"""Serves a batch of requests and prints how fast: a table, then one JSON line.

    python -m examples.colocate.engine.benchmark --model qwen3-0.6b --num-requests 64 --max-new-tokens 256

`--model` is a folder of a Hugging Face checkpoint, or a name of a shape, which gets random weights: see --help. With
several GPUs `torchrun --nproc-per-node 2 -m examples.colocate.engine.benchmark` is tensor parallel over them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import memsaver

from ..arguments import integer, positive
from ..provenance import provenance
from .checkpoint import DTYPES, PRESETS, CheckpointError, eos_tokens, load_config, named_tensors
from .config import EngineConfig
from .engine import Engine
from .model import Config
from .parallel import ONE_RANK, Parallel
from .profile import profile_replays
from .sequence import SamplingParams, Sequence
from .verify import VerificationError, verify

MIB = 1 << 20
Encode = Callable[[str], list[int]]


@dataclass
class Request:
    """A request's way through the engine, in seconds since the run began."""

    arrival: float
    prompt: list[int] | str
    sequence: Sequence | None = None
    tokens_at: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.tokens_at[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.tokens_at[-1] - self.arrival

    @property
    def per_token(self) -> float:
        """Between two tokens after the first; 0 where there is none."""
        return (self.tokens_at[-1] - self.tokens_at[0]) / max(1, len(self.tokens_at) - 1)


@dataclass
class Run:
    """One pass over all requests."""

    requests: list[Request]
    total: float = 0.0  # seconds
    decode: float = 0.0  # of it, the part before the results of a decode step

    def figures(self) -> dict[str, float]:
        tokens = sum(len(request.tokens_at) for request in self.requests)
        decoded = tokens - len(self.requests)
        found = {
            "total_s": self.total,
            "decode_s": self.decode,
            "completion_tokens": tokens,
            "tokens_per_s_decode": decoded / self.decode if self.decode else 0.0,
            "tokens_per_s_total": tokens / self.total,
        }
        for name, each in (("ttft", "first_token"), ("tpot", "per_token"), ("latency", "latency")):
            seconds = [getattr(request, each) for request in self.requests]
            found[f"{name}_p50_ms"] = 1e3 * statistics.median(seconds)
            found[f"{name}_mean_ms"] = 1e3 * statistics.fmean(seconds)
        return found


def tokenizer(folder: Path | None, vocab_size: int) -> Encode:
    """The checkpoint's own, if it has one; otherwise a text's bytes are its tokens."""
    if folder is not None and any(folder.glob("tokenizer*")):
        from transformers import AutoTokenizer

        encode: Encode = AutoTokenizer.from_pretrained(folder).encode
        return encode
    return lambda text: [byte % vocab_size for byte in text.encode()]


def serve(
    engine: Engine,
    requests: list[Request],
    sampling: SamplingParams,
    encode: Encode,
    online: bool = False,
    use_graphs: bool | None = None,
) -> Run:
    """All requests to their end. Offline all are there at the start, online each comes at its arrival."""
    run, waiting = Run(requests), list(requests)
    by_sequence: dict[Sequence, Request] = {}
    unfinished = len(requests)
    begin = now = time.perf_counter()
    while unfinished:
        while waiting and (not online or waiting[0].arrival <= now - begin):
            request = waiting.pop(0)
            if not online:
                request.arrival = 0.0
            prompt = encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
            request.sequence = engine.submit(prompt, sampling)
            by_sequence[request.sequence] = request
        if waiting and not engine.scheduler.busy:
            time.sleep(max(0.0, waiting[0].arrival - (time.perf_counter() - begin)))
            now = time.perf_counter()
            continue
        before = now
        advanced = engine.step(use_graphs)
        now = time.perf_counter()
        for sequence in advanced:
            by_sequence[sequence].tokens_at.append(now - begin)
            unfinished -= sequence.finish_reason is not None
        if advanced and all(len(by_sequence[sequence].tokens_at) > 1 for sequence in advanced):
            run.decode += now - before
    engine.settle()
    run.total = now - begin
    return run


def make_requests(arguments: argparse.Namespace, vocab_size: int, encode: Encode, repeat: int) -> list[Request]:
    draw = random.Random(arguments.seed + repeat)
    requests: list[Request] = []
    arrival = 0.0
    for _ in range(arguments.num_requests):
        prompt: list[int] | str = arguments.prompt
        if arguments.prompt_tokens:
            prompt = [draw.randrange(vocab_size) for _ in range(arguments.prompt_tokens)]
        elif arguments.pretok:
            prompt = encode(arguments.prompt)
        requests.append(Request(arrival, prompt))
        arrival += draw.expovariate(arguments.request_rate)
    return requests


def build_engine(arguments: argparse.Namespace, parallel: Parallel) -> tuple[Engine, Encode, SamplingParams]:
    """The engine with its weights and graphs, its tokenizer, and the sampling of all requests."""
    folder = None if arguments.model in PRESETS else Path(arguments.model)
    if folder is not None and not folder.is_dir():
        raise CheckpointError(
            f"--model is {arguments.model!r}; expected a checkpoint's folder, or one of {', '.join(PRESETS)}"
        )
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    model: Config = PRESETS[arguments.model] if folder is None else load_config(folder, dtype)
    if folder is None and dtype is not None:
        model = replace(model, dtype=dtype)  # type: ignore[type-var]
    encode = tokenizer(folder, model.vocab_size)
    prompt_tokens = arguments.prompt_tokens or len(encode(arguments.prompt))
    length = prompt_tokens + arguments.max_new_tokens
    if length > model.max_position:
        raise ValueError(
            f"a prompt of {prompt_tokens} and --max-new-tokens {arguments.max_new_tokens} make {length} tokens; "
            f"expected at most the model's {model.max_position}"
        )
    blocks = 1 + arguments.max_batch_size * -(-length // arguments.block_size)
    config = EngineConfig(
        max_batch_size=arguments.max_batch_size,
        block_size=arguments.block_size,
        num_blocks=arguments.num_blocks or blocks,
        max_model_len=length,
        use_graphs=arguments.cuda_graph,
        graph_batch_sizes=arguments.graph_sizes,
        prefill_graph_sizes=arguments.prefill_graph_sizes,
        compile_batch_sizes=arguments.compile_sizes,
        use_kernel=arguments.paged_attn,
        freeze_gc=arguments.freeze_gc,
        use_regions=arguments.regions,
        seed=arguments.seed,
        prefix_cache=not arguments.no_prefix_cache,
    )
    engine = Engine(model, config, arguments.device, parallel)
    if folder is not None:
        engine.load_weights(named_tensors(folder, dtype))
    engine.capture()
    stops = () if arguments.no_stop_on_eos or folder is None else eos_tokens(folder)
    sampling = SamplingParams(arguments.temperature, arguments.max_new_tokens, stops)
    # All requests have the same shape, so an error of one is an error of all. It is raised here, before the runs.
    engine.cancel(engine.submit([0] * arguments.prompt_tokens or encode(arguments.prompt), sampling))
    return engine, encode, sampling


def left_behind(engine: Engine) -> dict[str, int]:
    """Bytes of the device in use before and after a pause of all regions, by the driver's word.

    Of all processes together: on a device that is otherwise idle, of this one.
    """

    def used() -> int:
        row = memsaver.stats().asdict()["devices"][str(engine.device)]
        return int(row["total_bytes"] - row["free_bytes"])

    engine.drain()
    active = used()
    memsaver.pause()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    paused = used()
    memsaver.resume()
    engine.drop_prefix_cache()
    return {"active_bytes": active, "paused_bytes": paused}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.colocate.engine.benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    switch = argparse.BooleanOptionalAction
    add = parser.add_argument
    some, any_number = integer(1), integer(0)
    add("--model", default="gpt2", help=f"a checkpoint's folder, or {', '.join(PRESETS)} with random weights")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=DTYPES, help="of weights and KV cache, if not the model's own")
    add("--prompt", default="The memory of a GPU changes hands twice in every step of", help="of every request")
    add("--prompt-tokens", type=any_number, default=0, help="random prompts of so many tokens, not --prompt")
    add("--num-requests", type=some, default=64, help="in each run")
    add("--max-new-tokens", type=some, default=128, help="of each request")
    add("--mode", choices=["online", "offline"], default="offline", help="offline: all requests are there at the start")
    add("--request-rate", type=positive, default=16.0, help="requests that arrive in a second, online, at random")
    add("--max-batch-size", type=some, default=64, help="sequences that run together; the KV cache has room for all")
    add("--block-size", type=some, default=16, help="tokens in a KV block")
    add("--num-blocks", type=any_number, default=0, help="KV blocks; 0: as many as a full batch needs")
    add("--paged-attn", action=switch, default=True, help="paged attention as a kernel, on CUDA; otherwise in torch")
    add("--cuda-graph", action=switch, default=True, help="there are none on the CPU")
    add("--graph-sizes", type=_sizes, help="batch sizes to capture, such as 1,8,64; None: 1 to 32, then every 32")
    add("--prefill-graph-sizes", type=_sizes, help="token counts to capture, '' for none; None: 512 to 4096")
    add("--compile-sizes", type=_sizes, default=(), help="batch sizes whose decode step goes through torch.compile")
    add("--freeze-gc", action=switch, default=True, help="no garbage collection during captures")
    add("--regions", action=switch, default=True, help="memory that can be paused; otherwise torch's own")
    add("--temperature", type=float, default=0.0, help="0: the likeliest token")
    add("--no-stop-on-eos", action="store_true", help="go on behind the checkpoint's end tokens")
    add("--no-prefix-cache", action="store_true", help="compute prompts that begin alike each anew")
    add("--pretok", action="store_true", help="tokenize before the clock starts")
    add("--warmup-runs", type=any_number, default=1, help="runs before them")
    add("--repeat-runs", type=some, default=3, help="runs of which the medians are printed")
    add("--verify", action="store_true", help="first compare every graph with its eager step; needs graphs")
    add(
        "--profile",
        type=any_number,
        default=0,
        help="then profile so many replays of the largest batch; on the CPU operators",
    )
    add("--seed", type=int, default=0, help="of random weights, prompts, arrivals and sampling")
    return parser.parse_args(argv)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(integer(1)(part) for part in text.split(",") if part)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", arguments.device):
        sys.exit(f"--device is {arguments.device!r}; expected 'cpu', 'cuda', or one such as 'cuda:0'")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"--device is {arguments.device!r}, and torch sees no CUDA device; expected 'cpu'")
    parallel = _parallel(arguments)
    if parallel.size > 1 and arguments.mode == "online":
        sys.exit("--mode online is for one rank, expected offline: ranks would admit requests by clocks of their own")
    talks, begin = parallel.rank == 0, time.monotonic()
    try:
        engine, encode, sampling = build_engine(arguments, parallel)
        if talks:
            print(f"ready after {time.monotonic() - begin:.1f} s; {_graphs_in_words(engine)}", flush=True)
        verified = verify(engine) if arguments.verify else []
    except (ValueError, VerificationError, memsaver.Error, torch.OutOfMemoryError) as error:
        sys.exit(str(error))
    if talks and arguments.verify and not verified:
        print("nothing to verify without graphs")
    for row in verified if talks else ():
        print(f"{row.name}: {row.compared} tokens differ by up to {row.difference:.2g} of {row.tolerance:g}")
    runs = []
    for repeat in range(arguments.warmup_runs + arguments.repeat_runs):
        engine.drop_prefix_cache()
        requests = make_requests(arguments, engine.model_config.vocab_size, encode, repeat)
        run = serve(engine, requests, sampling, encode, arguments.mode == "online")
        runs.append(run.figures())
    runs = runs[arguments.warmup_runs :]
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    about: dict[str, Any] = {}
    if arguments.profile:
        profiled = profile_replays(engine, arguments.max_batch_size, arguments.profile)
        about["profile"] = asdict(profiled)
        if talks:
            print(profiled.table())
    left = left_behind(engine) if arguments.regions else {}
    if talks:
        for name, value in {**figures, **{name: value / MIB for name, value in left.items()}}.items():
            print(f"{name.replace('bytes', 'MiB'):>22} {value:12.2f}")
        told = {name: value for name, value in vars(arguments).items() if name not in ("verify", "profile")}
        about["captures"] = [asdict(each) for each in engine.graphs.captures]
        about["verified"] = [asdict(each) for each in verified]
        where = {"benchmark": "serving", **provenance(engine.device.type)}
        print(json.dumps({**where, **told, **figures, **left, **about}))
    engine.close()


def _graphs_in_words(engine: Engine) -> str:
    if engine.graphs.captures:
        return "\n" + engine.graphs.table()
    compiled = "; --compile-sizes are compiled when they first run" if engine.config.compile_batch_sizes else ""
    return ("no graphs" if engine.graphs.available else "no graphs on the CPU") + compiled


def _parallel(arguments: argparse.Namespace) -> Parallel:
    """The ranks that torchrun started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ONE_RANK
    if arguments.device == "cuda":
        arguments.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(arguments.device)
    # Buffers of captured graphs must not be registered with NCCL: after a pause their memory is another.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    on_gpu = arguments.device.startswith("cuda")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=torch.device(arguments.device) if on_gpu else None)
    return Parallel(dist.group.WORLD)


if __name__ == "__main__":
    main()
