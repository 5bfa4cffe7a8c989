"""Named sizes and settings of the loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from .arithmetic import VOCABULARY
from .engine import EngineConfig
from .model import ModelConfig, parameter_shapes
from .trainer import TrainerConfig

MIB = 1 << 20
GIB = 1 << 30
_CHUNKS = (GIB, 256 * MIB, 32 * MIB, 2 * MIB)  # sizes of the library's chunks


@dataclass(frozen=True)
class GapBounds:
    """How far the engine's log-probabilities may be from the trainer's, in nats: of one token, and in the mean."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Demand:
    """The device memory that an actor's regions will hold, in bytes of whole chunks, and its largest part in words."""

    nbytes: int
    largest: str


# By the engine's dtype; the trainer computes in fp32. Wrong weights, masks or positions make gaps of several nats.
GAP_BOUNDS = {
    # Sums in another order: 1e-6 on the CPU, below 1e-3 on a GPU.
    torch.float32: GapBounds(largest=1e-3, mean=1e-4),
    # Rounding to 8 bits, 0.4 % of each activation and logit: 0.004 in the mean, and 0.3 at most, over 18,000 tokens of
    # the recipe "cpu". The mean's bound is a quarter of the clip, so that the mismatch stays small beside it.
    torch.bfloat16: GapBounds(largest=1.0, mean=0.05),
}


@dataclass(frozen=True)
class Recipe:
    """The model, the task, the training, and the memory of each role.

    The KV cache and the trainer's workspace are shares of the device. At more than one half each, the two cannot be
    resident together. The workspace stands for the activations of a larger model. The trainer overwrites it when it
    checks the pause, and at the end.
    """

    model: ModelConfig
    engine: EngineConfig  # num_blocks is replaced: it follows from kv_share
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    # The task
    largest: int = 24
    terms: int = 4
    problems: int = 4096
    held_out: int = 256
    slip_share: float = 0.7
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
    kv_share: float = 0.55
    workspace_share: float = 0.55
    bucket_bytes: int = 128 << 10
    host_device_bytes: int = 192 * MIB  # size of the host driver's device; on CUDA the GPU's own counts
    outside_bytes: int = 6 * GIB  # of a GPU: both processes' contexts, and torch's default pools in a step
    # Proofs
    probes: int = 8  # prompts completed greedily before and after each pause
    proof_tokens: int = 64  # at every captured batch size, at the end
    prove_each_sync: bool = False  # that the engine has the trainer's weights; else after the first and the last
    threads: int = 1  # of torch in each actor, on the CPU
    deterministic: bool = False  # the trainers use torch's deterministic algorithms

    def warm_up_rate_at(self, step: int) -> float:
        """Learning rate of a warm-up step: a ramp, a plateau, and down to zero over the last two fifths."""
        ramp, decay = min(20, self.warm_up_steps), 0.4 * self.warm_up_steps
        return self.warm_up_rate * min(1.0, (step + 1) / ramp, (self.warm_up_steps - step) / decay)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step of reinforcement learning: a ramp, a plateau, and down to a tenth."""
        ramp, decay = min(5, self.steps), 0.6 * self.steps
        return self.rate * min(1.0, (step + 1) / ramp, (self.steps - step) / decay + 0.1)

    @property
    def gap_bounds(self) -> GapBounds:
        """Of the engine's dtype."""
        return GAP_BOUNDS[self.model.dtype]

    def capacity(self, device_bytes: int, sharers: int = 1) -> int:
        """The bytes of a GPU that the regions of `sharers` pairs may take: all but `outside_bytes` of each pair.

        In whole chunks of the smallest size, as the pool's capacity is.
        """
        available = max(device_bytes - sharers * self.outside_bytes, device_bytes // 2)
        return available - available % _CHUNKS[-1]

    def kv_blocks(self, device_bytes: int) -> int:
        """Blocks of the KV cache on a device of this size."""
        return int(self.kv_share * device_bytes) // self._block_bytes()

    def engine_demand(self, device_bytes: int) -> Demand:
        """Of an engine on a device of this size: KV cache, weights and buffers, without the pool of its graphs."""
        cache = self.kv_blocks(device_bytes) * self._block_bytes()
        weights = self._parameters() * self.model.dtype.itemsize
        # The buffers are smaller than the smallest chunk.
        return Demand(in_chunks(cache) + in_chunks(weights, backup=True) + _CHUNKS[-1], "mostly the KV cache")

    def trainer_demand(self, device_bytes: int, ranks: int) -> Demand:
        """Of one of `ranks` trainers on a device of this size: workspace, parameters, gradients and both moments."""
        shard = 4 * self._parameters() // ranks  # fp32
        state = in_chunks(shard, backup=True) + in_chunks(2 * shard, backup=True) + in_chunks(shard)
        return Demand(in_chunks(int(self.workspace_share * device_bytes)) + state, "mostly the workspace")

    def _block_bytes(self) -> int:
        model = self.model
        values = 2 * model.num_layers * self.engine.block_size * model.num_kv_heads * model.head_dim
        return values * model.dtype.itemsize

    def _parameters(self) -> int:
        return sum(math.prod(shape) for shape in parameter_shapes(self.model).values())


def in_chunks(nbytes: int, backup: bool = False) -> int:
    """The bytes of the chunks that a region of one tensor maps. `backup`: the region keeps its contents in pauses.

    Chunks have fixed sizes. A larger one than needed is taken while the excess is at most 5 % and 48 MiB, and at most
    the tensor's bytes. One of 1 GiB has no excess, and regions with a backup have none of that size.
    """
    allowance = min(nbytes, nbytes // 20 + 48 * MIB)
    mapped = 0
    while mapped < nbytes:
        for chunk in _CHUNKS[backup:]:
            excess = mapped + chunk - nbytes
            if excess <= (0 if chunk == GIB else allowance) or chunk == _CHUNKS[-1]:
                mapped += chunk
                break
    return mapped


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


_CPU = Recipe(model=_model(64, 2, 4, 2, 16, 192), engine=_engine(128), trainer=TrainerConfig(checkpoint_layers=False))

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
        trainer=TrainerConfig(dtype=torch.bfloat16),
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
        terms=2,
        problems=48,
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
