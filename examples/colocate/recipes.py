"""Named sizes and settings of the loop, each tried as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .arithmetic import VOCABULARY
from .engine import EngineConfig
from .model import ModelConfig
from .trainer import TrainerConfig

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, and how much memory each side takes.

    The KV cache and the trainer's workspace are shares of the device. At more than one half each, the two sides cannot
    be resident together. The workspace stands for what a larger model's activations would need: the trainer overwrites
    it in each of its turns.
    """

    model: ModelConfig
    engine: EngineConfig  # num_blocks is replaced by what kv_share gives
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    # The task
    largest: int = 49
    held_out: int = 256
    carry_share: float = 0.6
    slip_share: float = 0.7
    # Warm-up by demonstrations
    warm_up_steps: int = 350
    warm_up_batch: int = 128
    warm_up_rate: float = 3e-3
    # Reinforcement learning
    steps: int = 30
    prompts: int = 64
    group: int = 8
    minibatches: int = 2  # steps of the optimizer for each rollout
    rate: float = 1e-3
    # Memory
    kv_share: float = 0.55
    workspace_share: float = 0.55
    bucket_bytes: int = 128 << 10
    host_device_bytes: int = 192 * MIB  # size of the host driver's device; on CUDA the GPU's own counts
    outside_bytes: int = 6 * GIB  # of a GPU: both processes' contexts, and what torch's default pools need in a step
    # Proofs
    probes: int = 8  # prompts completed greedily before and after each pause
    proof_tokens: int = 64  # at every captured batch size, at the end
    prove_each_sync: bool = False  # that the engine has the trainer's weights; else after the first and the last
    logprob_bound: float = 1e-3  # nats between trainer's and engine's log-probability of a token, both in fp32
    threads: int = 1  # of torch in each actor, on the CPU

    def warm_up_rate_at(self, step: int) -> float:
        """Learning rate of a warm-up step: a ramp, a plateau, and down to zero over the last two fifths."""
        ramp, decay = min(20, self.warm_up_steps), 0.4 * self.warm_up_steps
        return self.warm_up_rate * min(1.0, (step + 1) / ramp, (self.warm_up_steps - step) / decay)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step of reinforcement learning: a ramp, a plateau, and down to a tenth."""
        ramp, decay = min(5, self.steps), 0.6 * self.steps
        return self.rate * min(1.0, (step + 1) / ramp, (self.steps - step) / decay + 0.1)

    def capacity(self, device_bytes: int, sharers: int = 1) -> int:
        """Of a GPU of this size, what the regions of so many pairs may take: all but what they need outside."""
        return max(device_bytes - sharers * self.outside_bytes, device_bytes // 2)

    def kv_blocks(self, device_bytes: int) -> int:
        """Blocks of the KV cache on a device of this size."""
        model = self.model
        values = 2 * model.num_layers * self.engine.block_size * model.num_kv_heads * model.head_dim
        return int(self.kv_share * device_bytes) // (values * model.dtype.itemsize)


def _model(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        max_position=128,
    )


def _engine(max_batch_size: int, block_size: int = 16) -> EngineConfig:
    # Few batch sizes, since the loop proves each of them.
    sizes = tuple(1 << exponent for exponent in range(max_batch_size.bit_length()))
    return EngineConfig(max_batch_size=max_batch_size, block_size=block_size, graph_batch_sizes=sizes)


_CPU = Recipe(model=_model(64, 2, 4, 2, 16, 192), engine=_engine(128))

RECIPES = {
    "cpu": _CPU,
    # The same task and training; a wider model, and memory to match.
    "gpu": replace(
        _CPU,
        model=_model(256, 4, 8, 4, 32, 768),
        engine=_engine(64, block_size=64),
        steps=20,
        rate=5e-4,
        bucket_bytes=4 * MIB,
    ),
    # For figures on a large GPU: random weights of the shape of Qwen2.5-1.5B, which do a step's work and learn nothing.
    "1.5b": replace(
        _CPU,
        model=ModelConfig(
            vocab_size=151936,
            hidden_size=1536,
            num_layers=28,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            intermediate_size=8960,
            max_position=128,
            tie_word_embeddings=True,
            dtype=torch.bfloat16,
        ),
        engine=_engine(64, block_size=64),
        held_out=16,
        warm_up_steps=2,
        warm_up_batch=32,
        warm_up_rate=1e-5,
        steps=3,
        prompts=8,
        group=4,
        rate=1e-6,
        kv_share=0.45,
        workspace_share=0.5,
        bucket_bytes=512 * MIB,
        outside_bytes=16 * GIB,
        proof_tokens=16,
    ),
    # For tests: nothing is learned.
    "tiny": replace(
        _CPU,
        model=_model(32, 1, 4, 2, 8, 64),
        engine=_engine(8),
        largest=9,
        held_out=16,
        warm_up_steps=4,
        warm_up_batch=16,
        steps=2,
        prompts=4,
        group=4,
        bucket_bytes=4 << 10,
        prove_each_sync=True,
        probes=4,
        proof_tokens=8,
    ),
}
