"""Named sizes and settings of the loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .arithmetic import VOCABULARY
from .engine import EngineConfig
from .model import ModelConfig, parameter_shapes
from .model.folder import load_config
from .trainer.interface import TrainerConfig

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Recipe:
    """The model, the training, and the memory.

    `kv_blocks`: of the KV cache; None: as many as there is room for beside the weights, since the trainer is away.
    """

    model: ModelConfig
    engine: EngineConfig  # with other num_blocks
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    kv_blocks: int | None = None
    # The task: arithmetic's sizes, and the problems of each task that makes them
    largest: int = 24
    terms: int = 4
    problems: int = 4096
    held_out: int = 256
    slip_share: float = 0.7
    max_new_tokens: int = 512  # of other tasks than arithmetic
    # Warm-up by demonstrations
    warm_up_steps: int = 350
    warm_up_batch: int = 64
    warm_up_rate: float = 6e-3
    # Reinforcement learning
    steps: int = 30
    prompts: int = 48
    group: int = 8
    minibatches: int = 2  # steps of the optimizer for each rollout
    rate: float = 1.5e-3
    # Memory
    host_bytes: int = 10 * MIB  # of the host device, for a pair: less than both roles need
    outside_bytes: int = 6 * GIB  # of a GPU, for a pair: contexts, and torch's default pool of the engine
    probes: int = 8  # requests that are running in a pause of each step

    def warm_up_rate_at(self, step: int) -> float:
        """Learning rate of a warm-up step: a ramp, a plateau, and down to zero over the last two fifths."""
        ramp, decay = min(20, self.warm_up_steps), 0.4 * self.warm_up_steps
        return self.warm_up_rate * min(1.0, (step + 1) / ramp, (self.warm_up_steps - step) / decay)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step of reinforcement learning: a ramp, a plateau, and down to a tenth."""
        ramp, decay = min(5, self.steps), 0.6 * self.steps
        return self.rate * min(1.0, (step + 1) / ramp, (self.steps - step) / decay + 0.1)

    def blocks_that_fit(self, nbytes: int, ranks: int = 1, beside_trainer: bool = False) -> int:
        """KV blocks of one of an engine's ranks that may take so many bytes. A tenth is left for buffers and graphs.

        `beside_trainer`: of all parameters in fp32, with gradients and moments, and a quarter more for activations.
        """
        model, weights = self.model, num_parameters(self.model)
        values = 2 * model.num_layers * self.engine.block_size * model.num_kv_heads * model.head_dim // ranks
        left = 9 * nbytes // 10 - weights // ranks * model.dtype.itemsize - (20 * weights if beside_trainer else 0)
        return left // (values * model.dtype.itemsize)


def num_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def of_folder(folder: Path) -> Recipe:
    """For a model in a Hugging Face folder: bf16 on both sides, fp32 parameters, no warm-up."""
    model = load_config(folder, torch.bfloat16)
    trainer_bytes = 16 * num_parameters(model)  # fp32: parameters, gradients, moments
    return Recipe(
        model=replace(model, max_position=min(model.max_position, 4096)),
        engine=EngineConfig(max_batch_size=256),
        trainer=TrainerConfig(dtype=torch.bfloat16),
        warm_up_steps=0,
        held_out=128,
        steps=50,
        prompts=64,
        rate=1e-6,
        host_bytes=64 * MIB + trainer_bytes * 5 // 4 // (2 * MIB) * (2 * MIB),
        outside_bytes=8 * GIB,
    )


def _model(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> ModelConfig:
    return ModelConfig(len(VOCABULARY), hidden, layers, heads, kv_heads, head_dim, inner, max_position=128)


# Blocks are small, so that prompts share full ones, and too few for a whole batch, so that requests are preempted.
_CPU = Recipe(
    model=_model(64, 2, 4, 2, 16, 192),
    engine=EngineConfig(max_batch_size=128, block_size=4),
    trainer=TrainerConfig(checkpoint_layers=False),
    kv_blocks=500,
)

RECIPES = {
    "cpu": _CPU,
    # The same task and training; a wider model, and fewer steps.
    "gpu": replace(_CPU, model=_model(256, 4, 8, 4, 32, 768), steps=20, rate=5e-4),
    # For tests: little is learned.
    "tiny": replace(
        _CPU,
        model=_model(32, 2, 4, 2, 8, 64),
        engine=EngineConfig(max_batch_size=16, block_size=2, graph_batch_sizes=(1, 2, 4, 8, 16)),
        kv_blocks=64,
        largest=9,
        terms=2,
        problems=48,
        held_out=16,
        warm_up_steps=4,
        warm_up_batch=16,
        steps=2,
        prompts=4,
        group=4,
        probes=4,
    ),
}
