"""The loads of the engine's benchmark, an engine for them, and clocks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

import memsaver
from benchmarks.harness.machine import GIB
from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.engine.benchmark import Request, Run, serve
from examples.colocate.engine.checkpoint import PRESETS
from examples.colocate.engine.model import Config
from examples.colocate.engine.parallel import ONE_RANK, Parallel

BLOCK = 16  # tokens in a KV block
_SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position": 128,
          "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 96}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests that prefill in one step and then decode together to the end."""

    model: str  # of PRESETS, with random weights
    batch: int
    prompt: int  # tokens of each
    new_tokens: int  # of each; the prefill makes the first one

    def __str__(self) -> str:
        return f"{self.model}, {self.batch} x ({self.prompt} + {self.new_tokens})"

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
        return [[draw.randrange(vocab_size) for _ in range(self.prompt)] for _ in range(self.batch)]


QWEN = [Load("qwen3-0.6b", batch, 128, 128) for batch in (1, 8, 32, 128)]
LARGE = [Load("qwen3-8b", batch, 992, 64) for batch in (1, 64)]  # a context of 1,024 in the middle of the decode


def shape_of(model: str, small: bool) -> Config:
    """A preset's shape, or with `small` a tiny one."""
    shape: Any = PRESETS[model]
    made: Config = replace(shape, **_SMALL) if small else shape
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
    if device != "cpu":
        torch.cuda.set_device(device)
    engine = Engine(shape_of(loads[0].model, small), EngineConfig(**{**config, **settings}), device, parallel)
    engine.capture()
    # Host memory for all backups. A virtual machine may report less available memory than it can get.
    rows = [row for each in memsaver.stats().devices.values() for row in each.regions]
    memsaver.configure(host_limit=2 * GIB + sum(row.allocated_bytes for row in rows if row.backup == "host"))
    return engine


def served(engine: Engine, load: Load, use_graphs: bool = True) -> Run:
    """The load to its end through `Engine.step`, greedily, nothing cached before."""
    engine.drop_prefix_cache()
    requests = [Request(0.0, prompt) for prompt in load.prompts(engine.model_config.vocab_size)]
    return serve(engine, requests, SamplingParams(0.0, load.new_tokens), encode=list, use_graphs=use_graphs)  # type: ignore[arg-type]


def step_ms(engine: Engine, load: Load) -> float:
    """The median of the decode steps of one run."""
    times = served(engine, load).requests[0].tokens_at
    return 1e3 * statistics.median(after - before for before, after in zip(times, times[1:]))


def tokens(run: Run) -> list[list[int]]:
    """Prompt and completion of each request."""
    return [request.sequence.tokens for request in run.requests if request.sequence is not None]
