"""Common parts of the benchmarks of the example's engine: loads, an engine for them, a clock, and the promises."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

import memsaver
from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.engine.benchmark import Request, Run, serve
from examples.colocate.engine.checkpoint import PRESETS
from examples.colocate.engine.gpt2 import GPT2Config
from examples.colocate.engine.model import Config
from examples.colocate.engine.parallel import ONE_RANK, Parallel
from support.host import GIB
from support.processes import Sample

BLOCK = 16  # tokens in a KV block
TIMEOUT_S = 300.0  # of a process, for one sample
_SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position": 128}
_SMALL_DECODER = {"num_kv_heads": 2, "head_dim": 16, "intermediate_size": 96}


@dataclass(frozen=True)
class Load:
    """Requests that prefill in one step and then decode together to the end."""

    model: str  # of PRESETS, with random weights
    batch: int
    prompt: int  # tokens of each
    new_tokens: int  # of each; the first comes of the prefill

    def __str__(self) -> str:
        return f"{self.model}, {self.batch} x ({self.prompt} + {self.new_tokens})"

    @property
    def length(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt + self.new_tokens

    @property
    def mean_context(self) -> float:
        """Tokens that a decode step attends to in each request, its own included; mean over the steps."""
        return self.prompt + self.new_tokens / 2

    def scaled(self, small: bool) -> Load:
        """With `small` a few tokens of a few requests."""
        return replace(self, batch=min(self.batch, 4), prompt=10, new_tokens=12) if small else self

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(vocab_size) for _ in range(self.prompt)] for _ in range(self.batch)]


def shape_of(model: str, small: bool) -> Config:
    """A preset's shape, or with `small` a tiny one of its kind."""
    shape: Any = PRESETS[model]
    small_shape = {**_SMALL, **({} if isinstance(shape, GPT2Config) else _SMALL_DECODER)}
    made: Config = replace(shape, **small_shape) if small else shape
    return made


def make_engine(
    loads: Iterable[Load], device: str, small: bool, parallel: Parallel = ONE_RANK, **settings: Any
) -> Engine:
    """An engine with room for each of the loads, and a decode graph of each one's batch unless `settings` differ."""
    loads = list(loads)
    batch, length = max(load.batch for load in loads), max(load.length for load in loads)
    config = {
        "max_batch_size": batch,
        "block_size": BLOCK,
        "num_blocks": 1 + batch * -(-length // BLOCK),
        "max_model_len": length,
        "max_prefill_tokens": max(load.batch * load.prompt for load in loads),
        "graph_batch_sizes": tuple(sorted({load.batch for load in loads})),
    }
    use(device)
    # Pinning in the background would disturb the measurement.
    memsaver.configure(backup_ahead=False)
    engine = Engine(shape_of(loads[0].model, small), EngineConfig(**{**config, **settings}), device, parallel)
    engine.capture()
    return engine


def use(device: str) -> None:
    """Launch on this GPU from now on, and record events there."""
    if device != "cpu":
        torch.cuda.set_device(device)


def allow_backups() -> None:
    """Host memory for all backups. A virtual machine may report less available memory than it can get."""
    rows = [region for row in memsaver.stats().asdict()["devices"].values() for region in row["regions"]]
    memsaver.configure(host_limit=2 * GIB + sum(row["allocated_bytes"] for row in rows if row["backup"] == "host"))


def served(engine: Engine, load: Load, use_graphs: bool = True, seed: int = 0) -> Run:
    """The load to its end through `Engine.step`, greedily, nothing cached before. The same seed is the same prompts."""
    engine.drop_prefix_cache()
    requests = [Request(0.0, prompt) for prompt in load.prompts(engine.model_config.vocab_size, seed)]
    sampling = SamplingParams(0.0, load.new_tokens)
    return serve(engine, requests, sampling, encode=list, use_graphs=use_graphs)  # type: ignore[arg-type]


def decode_rate(engine: Engine, load: Load, use_graphs: bool = True) -> float:
    """Tokens per second of decode steps."""
    return served(engine, load, use_graphs).figures()["tokens_per_s_decode"]


def step_ms(run: Run) -> float:
    """A decode step's median."""
    times = run.requests[0].tokens_at
    return 1e3 * statistics.median(after - before for before, after in zip(times, times[1:]))


def tokens_of(run: Run) -> list[list[int]]:
    """Prompt and completion of each request."""
    return [request.sequence.tokens for request in run.requests if request.sequence is not None]


def take_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The samples of each way. The ways take turns, after one round that does not count."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 + rounds):
        for way, measure in ways.items():
            samples[way].append(measure())
    return {way: each[1:] for way, each in samples.items()}


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {way: statistics.median(each) for way, each in samples.items()}


def ratio(samples: dict[str, list[float]], one: str, other: str) -> float:
    """The median over the rounds of one to the other: a machine's speed drifts, within a round it hardly does."""
    return statistics.median(each / compared for each, compared in zip(samples[one], samples[other]))


class Clock:
    """Moments on the device's own time line, for which the host does not wait; without CUDA, the host's."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def intervals_ms(self) -> list[float]:
        """From each mark to the next."""
        pairs = list(zip(self._marks, self._marks[1:]))
        if not self._on_gpu:
            return [1e3 * (after - before) for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels in Triton that are compiled, or read from Triton's cache on disk, while this is open."""
    names: list[str] = []
    try:
        from triton import knobs  # type: ignore[import-untyped]
    except ImportError:  # as on machines without a GPU: nothing compiles there
        yield names
        return
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **given: names.append(given["fn"].name)
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def copy_bandwidth(device: str, nbytes: int) -> float:
    """Bytes per second of a plain copy on the device, read and written ones: the median of ten."""
    source = torch.empty(nbytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    clock = Clock(device)
    for _ in range(13):
        clock.mark()
        target.copy_(source)
    clock.mark()
    return 2 * source.nbytes / (1e-3 * statistics.median(clock.intervals_ms()[3:]))


def promise(number: int, what: str, figure: str, met: bool | None) -> Sample:
    """The promise of a number (see `engine.py`), and the figure. `met` None: the figure does not decide it."""
    return {"promise": number, "what": what, "figure": figure, "met": met}


def promise_line(row: Sample) -> str:
    met = {True: "met", False: "NOT met", None: "says nothing at this size"}[row["met"]]
    return f"  promise {row['promise']}: {row['what']}: {row['figure']}: {met}"


def in_full(small: bool, met: bool) -> bool | None:
    """Whether a promise is met. None for tiny shapes, and so on the CPU: they do not decide it."""
    return None if small else met
