"""The loads of the engine's benchmark, an engine for them, and clocks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import memsaver
from benchmarks.harness.machine import GIB
from benchmarks.harness.models import MODELS
from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.engine.engine_memory import EngineMemory
from examples.colocate.engine.tensor_parallel import ONE_RANK, Parallel
from examples.colocate.model import ModelConfig
from examples.colocate.savers import Resident

BLOCK = 16  # tokens in a KV block
SHORTEST = 16  # tokens of a ragged prompt, and of its completion
SMALL = ModelConfig(512, 64, 2, 4, 2, 16, 96, max_position=128)


@dataclass(frozen=True)
class Load:
    """Requests that are all there at the start.

    ``ragged``: prompts and completions of 16 tokens to these, drawn evenly.
    """

    model: str  # of MODELS, with random weights
    batch: int
    prompt: int  # tokens of each
    new_tokens: int  # of each; the prefill makes the first one
    ragged: bool = False

    def __str__(self) -> str:
        to = "up to " if self.ragged else ""
        return f"{self.model}, {self.batch} x ({to}{self.prompt} + {to}{self.new_tokens})"

    @property
    def length(self) -> int:
        """The most tokens of a request at its end."""
        return self.prompt + self.new_tokens

    @property
    def mean_context(self) -> float:
        """Tokens that a decode step attends to in each request; the mean over the steps."""
        return self.prompt + self.new_tokens / 2

    def scaled(self, small: bool) -> Load:
        """With `small` a few tokens of a few requests."""
        return replace(self, batch=min(self.batch, 4), prompt=10, new_tokens=12) if small else self

    def prompts(self, vocab_size: int) -> list[list[int]]:
        draw = random.Random(0)
        return [[draw.randrange(vocab_size) for _ in range(size)] for size in self._sizes(draw, self.prompt)]

    def completions(self) -> list[int]:
        """New tokens of each request."""
        return self._sizes(random.Random(1), self.new_tokens)

    def _sizes(self, draw: random.Random, most: int) -> list[int]:
        return [draw.randint(min(SHORTEST, most), most) if self.ragged else most for _ in range(self.batch)]


QWEN = [Load("qwen3-0.6b", batch, 128, 128) for batch in (1, 8, 32, 128)]
LARGE = [Load("qwen3-8b", batch, 992, 64) for batch in (1, 64)]  # a context of 1,024 in the middle of the decode
RAGGED = [Load("qwen3-0.6b", 256, 1024, 512, ragged=True), Load("qwen3-8b", 128, 1024, 512, ragged=True)]


def make_engine(
    loads: Iterable[Load],
    device: str,
    small: bool,
    parallel: Parallel = ONE_RANK,
    regions: bool = True,
    **settings: Any,
) -> Engine:
    """An engine with room for each of the loads, and a decode graph of each one's batch unless `settings` differ."""
    loads = list(loads)
    batch, length = max(load.batch for load in loads), max(load.length for load in loads)
    config = {
        "max_batch_size": batch,
        "block_size": BLOCK,
        "num_blocks": 1 + batch * -(-length // BLOCK),
        "graph_batch_sizes": tuple(sorted({load.batch for load in loads})),
    }
    if device != "cpu":
        torch.cuda.set_device(device)
    memory = None if regions else EngineMemory(torch.device(device), Resident)
    model = replace(SMALL if small else MODELS[loads[0].model], max_position=length)
    engine = Engine(model, EngineConfig(**{**config, **settings}), device, parallel, memory)
    engine.capture()
    # Host memory for all backups. A virtual machine may report less available memory than it can get.
    rows = [row for each in memsaver.stats().devices.values() for row in each.regions]
    memsaver.configure(host_limit=2 * GIB + sum(row.allocated_bytes for row in rows if row.backup == "host"))
    return engine


@dataclass
class Served:
    """One pass over a load: prompt and completion of each request, and the times of its decode steps."""

    tokens: list[list[int]]
    seconds: float = 0.0
    generated: int = 0
    steps_s: list[float] = field(default_factory=list)  # of steps without a request's first token
    decoded: int = 0  # tokens of these

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode steps."""
        return self.decoded / sum(self.steps_s)

    @property
    def rate(self) -> float:
        """Tokens per second, from the first request to the last token."""
        return self.generated / self.seconds

    @property
    def step_ms(self) -> float:
        """The median of the decode steps."""
        return 1e3 * statistics.median(self.steps_s)


def served(engine: Engine, load: Load, use_graphs: bool = True) -> Served:
    """The load to its end through `Engine.step`, greedily, nothing cached before."""
    engine.drop_prefix_cache()
    prompts = load.prompts(engine.model_config.vocab_size)
    begin = now = time.perf_counter()
    requests = [engine.submit(each, SamplingParams(0.0, new)) for each, new in zip(prompts, load.completions())]
    run, unfinished = Served([request.tokens for request in requests]), len(requests)
    while unfinished:
        before, advanced = now, engine.step(use_graphs)
        now = time.perf_counter()
        run.generated += len(advanced)
        unfinished -= sum(each.finish_reason is not None for each in advanced)
        if advanced and all(len(each.logprobs) > 1 for each in advanced):
            run.steps_s.append(now - before)
            run.decoded += len(advanced)
    engine.settle()
    run.seconds = time.perf_counter() - begin
    return run
