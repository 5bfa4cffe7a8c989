"""The two sides as Ray actors: an engine, and a rank of the trainer. They never meet; only the loop knows both."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import ray
import torch
from torch import Tensor

import memsaver
from memsaver.ray import Colocated

from .engine import Completion, Engine, SamplingParams
from .recipes import Recipe
from .trainer import StepMetrics, TokenBatch, Trainer
from .trainer.process_group import join

_SPARE_BYTES = 256 << 20  # left free on a GPU when all else is overwritten


@dataclass(frozen=True)
class Memory:
    """A device as its driver sees it, in bytes."""

    total: int
    free: int

    @property
    def used(self) -> int:
        return self.total - self.free


@dataclass(frozen=True)
class BeforeResume:
    """What an actor saw of the device right before it resumed: bytes free, and bytes it was about to take."""

    free: int
    needed: int


class Worker(Colocated):
    """What both actors share: a device and its figures."""

    largest: str  # tag of the region that takes most

    def __init__(self, recipe: Recipe, device: str, rank: int, ranks: int, seed: int, host_device_bytes: int) -> None:
        self.recipe, self.rank, self.ranks, self.seed = recipe, rank, ranks, seed
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(recipe.threads)
            memsaver.configure(host_device=host_device_bytes)
        memsaver.region(self.largest, device=str(self.device))  # from now on stats() names the device

    def memory(self) -> Memory:
        row = self.stats()["devices"][str(self.device)]
        return Memory(row["total_bytes"], row["free_bytes"])

    def _own_bytes(self) -> int:
        """What there is for this rank: a GPU of its own, or its part of the host's device."""
        return self.memory().total // (self.ranks if self.device.type == "cpu" else 1)

    def _release_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


class EngineWorker(Worker):
    """An engine that serves, and gives way between two calls."""

    largest = "kv_cache"
    engine: Engine

    def setup(self) -> list[str]:
        """Build the engine and capture its graphs. Returns the tags of its regions."""
        blocks = self.recipe.kv_blocks(self._own_bytes())
        config = replace(self.recipe.engine, num_blocks=blocks, seed=1000 * self.seed + self.rank)
        self.engine = Engine(self.recipe.model, config, self.device)
        self.engine.capture()
        tags = ["weights", "buffers", "kv_cache"]
        return [*tags, "cuda_graph"] if self.engine.captured_batch_sizes else tags

    def pause(self, tags: memsaver.regions.Tags = None, backup: str | None = None) -> memsaver.Transition:
        """Drain, synchronise, and give back what torch's default pool holds; then pause."""
        self.engine.drain()
        self._release_cache()
        return super().pause(tags, backup)

    def resume(
        self, tags: memsaver.regions.Tags = None, restore: bool = True, timeout: float = 0.0
    ) -> memsaver.Transition:
        done = super().resume(tags, restore, timeout)
        if "kv_cache" in done.resumed:
            self.engine.drop_prefix_cache()  # it names blocks whose contents are gone
        return done

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
        return self.engine.generate(prompts, sampling)

    def load_bucket(self, bucket: dict[str, Tensor]) -> None:
        """Overwrite some of the weights."""
        self.engine.load_weights(bucket.items(), partial=True)

    def end_load(self) -> None:
        """Raises ValueError if not all weights have come."""
        self.engine.load_weights(())

    def addresses(self) -> dict[str, int]:
        return self.engine.addresses()

    def counters(self) -> tuple[int, int]:
        """Tokens generated and graphs replayed so far."""
        return self.engine.tokens_generated, self.engine.replays

    def batch_sizes(self) -> tuple[int, ...]:
        """Captured ones; where there are no graphs, those that steps are padded to."""
        return self.engine.captured_batch_sizes or self.engine.config.batch_sizes()

    def greedy(self, size: int, use_graphs: bool) -> list[list[int]]:
        """Tokens of `size` sequences decoded together: random prompts, the same in each call."""
        draw = random.Random(size)
        prompts = [[draw.randrange(self.recipe.model.vocab_size) for _ in range(8)] for _ in range(size)]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.recipe.proof_tokens)
        return [each.tokens for each in self.engine.generate(prompts, sampling, use_graphs=use_graphs)]


class TrainerWorker(Worker):
    """A rank of the trainer, and the memory that it works in."""

    largest = "workspace"
    trainer: Trainer
    _before_resume: BeforeResume | None = None
    _workspace: Tensor
    _buckets: Iterator[dict[str, Tensor]] = iter(())

    def meeting_point(self) -> str:
        """Where the ranks can meet: an address of this node with a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def setup(self, init_method: str | None) -> list[str]:
        """Build the trainer. Returns the tags of its regions."""
        mesh = join(self.device.type, self.rank, self.ranks, init_method)
        self.trainer = Trainer(self.recipe.model, replace(self.recipe.trainer, seed=self.seed), mesh)
        region = memsaver.region("workspace", device=str(self.device))
        self._workspace = region.empty((int(self.recipe.workspace_share * self._own_bytes()) // 8,), torch.int64)
        self.trainer.release_activations()
        return ["params", "optimizer", "grads", "workspace"]

    def pause(self, tags: memsaver.regions.Tags = None, backup: str | None = None) -> memsaver.Transition:
        self.trainer.release_activations()
        return super().pause(tags, backup)

    def resume(
        self, tags: memsaver.regions.Tags = None, restore: bool = True, timeout: float = 0.0
    ) -> memsaver.Transition:
        """Resume, and remember what was free before."""
        rows = self.stats()["devices"][str(self.device)]["regions"]
        named = [tags] if isinstance(tags, str) else None if tags is None else list(tags)
        coming = [row for row in rows if row["state"] == "paused" and (named is None or row["tag"] in named)]
        before = BeforeResume(self.memory().free, sum(row["allocated_bytes"] for row in coming))
        done = super().resume(named, restore, timeout)
        self._before_resume = before
        return done

    def before_resume(self) -> BeforeResume | None:
        """What the last resume found; None before the first."""
        return self._before_resume

    def warm_up(self, batches: Sequence[TokenBatch], rates: Sequence[float]) -> StepMetrics:
        """Supervised steps, one for each batch. Returns the last one's metrics."""
        for batch, rate in zip(batches, rates):
            metrics = self.trainer.warm_up(batch, rate)
        return metrics

    def end_warm_up(self) -> None:
        self.trainer.reset_optimizer()

    def logprob_gap(self, batch: TokenBatch) -> float:
        """The largest difference, in nats, between this rank's log-probabilities and those in the batch."""
        own = batch.shard(self.trainer.rank, self.trainer.world_size)
        gap_BT = (self.trainer.logprobs(batch) - own.behaviour_BT).abs()
        return float(gap_BT[own.mask_BT].max()) if own.num_targets else 0.0

    def train(self, batch: TokenBatch, minibatches: int, rate: float) -> StepMetrics:
        """Policy-gradient steps, one for each part of the batch. Returns the mean of their metrics."""
        parts = [self.trainer.train_step(batch.shard(part, minibatches), rate) for part in range(minibatches)]
        return StepMetrics(*(sum(column) / minibatches for column in zip(*map(astuple, parts))))

    def addresses(self) -> dict[str, int]:
        return self.trainer.addresses()

    def begin_sync(self) -> None:
        self._buckets = self.trainer.weight_buckets(self.recipe.bucket_bytes)

    def next_bucket(self) -> tuple[bool, dict[str, Tensor]]:
        """(whether there was one, the bucket). All ranks gather it together; the first one's alone is not empty."""
        bucket = next(self._buckets, None)
        return bucket is not None, (bucket or {}) if self.rank == 0 else {}

    def scribble(self, seed: int) -> None:
        """Overwrite the whole workspace with random bytes."""
        generator = torch.Generator(self.device).manual_seed(seed)
        self._workspace.random_(generator=generator)

    def overwrite_free(self, seed: int) -> int:
        """Take all memory that is free, overwrite it with random bytes, and give it back. Returns its bytes."""
        spare = _SPARE_BYTES if self.device.type == "cuda" else 0
        count = max(self.memory().free - spare, 0) // 8
        if self.device.type == "cuda":
            taken = torch.empty(count, dtype=torch.int64, device=self.device)
        else:
            taken = memsaver.region("overwrite", device="cpu").empty((count,), torch.int64)
        taken.random_(generator=torch.Generator(self.device).manual_seed(seed))
        del taken
        self._release_cache()
        return 8 * count
