"""The two sides as Ray actors: an engine, and a rank of the trainer. They never meet; only the loop knows both."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from typing import Any

import ray
import torch
from torch import Tensor

import memsaver
from memsaver.ray import Colocated

from .engine import Completion, Engine, SamplingParams
from .recipes import Recipe
from .trainer import StepMetrics, TokenBatch, Trainer
from .trainer.process_group import join, of_all_ranks

_SPARE_BYTES = 256 << 20  # left free on a GPU when all else is overwritten


@dataclass(frozen=True)
class Memory:
    """A device as its driver sees it, or its shared pool as the broker does, in bytes."""

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


@dataclass(frozen=True)
class WeightsWritten:
    """How a rank of the trainer wrote weights into engines: bytes read and written, and seconds."""

    way: str  # "shards", each rank's into all engines, or "gathered", full ones into the rank's own engine
    nbytes: int  # read and written, without what was gathered
    began: float  # the writing alone, by the machine's monotonic clock
    ended: float
    seconds: float  # with attaching and leaving

    @property
    def write_seconds(self) -> float:
        return self.ended - self.began


class Worker(Colocated):
    """What both actors share: a device and its figures."""

    largest: str  # tag of the region that takes most

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        rank: int,
        ranks: int,
        sharers: int,
        seed: int,
        pool: str,
        host_device_bytes: int,
    ) -> None:
        """`sharers`: how many of the ranks are on this device."""
        self.recipe, self.rank, self.ranks, self.sharers = recipe, rank, ranks, sharers
        self.seed, self.pool = seed, pool
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.capacity = recipe.capacity(torch.cuda.get_device_properties(self.device).total_memory, sharers)
        else:
            torch.set_num_threads(recipe.threads)
            memsaver.configure(host_device=host_device_bytes)
            self.capacity = host_device_bytes
        self._join()

    def _join(self) -> None:
        """Make the device's first region, and with it join the device's pool; from now on stats() names it."""
        memsaver.configure(pool_capacity=self.capacity, pool=self.pool)
        memsaver.region(self.largest, device=str(self.device))

    def memory(self) -> Memory:
        row = self._figures()
        if row["pool"] is None:
            return Memory(row["total_bytes"], row["free_bytes"])
        return Memory(self.capacity, row["pool"]["available_bytes"])

    def mapped_bytes(self) -> int:
        """Of the device's memory, what this actor's regions hold."""
        return sum(row["mapped_bytes"] for row in self._figures()["regions"])

    def _figures(self) -> dict[str, Any]:
        row: dict[str, Any] = self.stats()["devices"][str(self.device)]
        return row

    def _own_bytes(self) -> int:
        """What there is for this rank of its device."""
        return self.capacity // self.sharers

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release_cache(self) -> None:
        self._synchronize()
        torch.cuda.empty_cache()  # nothing, where CUDA is not in use


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

    def colocated_drain(self, tags: Sequence[str]) -> None:
        """Drain, synchronise, and give back what torch's default pool holds."""
        self.engine.drain()
        self._release_cache()

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
        return self.engine.generate(prompts, sampling)

    def share_weights(self) -> memsaver.Token:
        return self.engine.share_weights()

    def compare_bucket(self, bucket: dict[str, Tensor]) -> tuple[int, list[str]]:
        """How many weights these are, and the names of those that the engine has otherwise."""
        return len(bucket), self.engine.differing_weights(bucket.items())

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
    _uuid: str  # of this rank's device
    _devices: set[str]  # of all ranks of the trainer

    def meeting_point(self) -> str:
        """Where the ranks can meet: an address of this node with a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def setup(self, init_method: str | None) -> list[str]:
        """Build the trainer. Returns the tags of its regions."""
        mesh = join(self.device.type, self.rank, self.ranks, init_method, self.sharers)
        self._uuid = self._figures()["uuid"]
        self._devices = set(of_all_ranks(self._uuid))
        self.trainer = Trainer(self.recipe.model, replace(self.recipe.trainer, seed=self.seed), mesh)
        region = memsaver.region("workspace", device=str(self.device))
        self._workspace = region.empty((int(self.recipe.workspace_share * self._own_bytes()) // 8,), torch.int64)
        self.trainer.release_activations()
        return ["params", "optimizer", "grads", "workspace"]

    def colocated_drain(self, tags: Sequence[str]) -> None:
        self.trainer.release_activations()

    def resume(
        self, tags: memsaver.regions.Tags = None, restore: bool = True, timeout: float = 0.0
    ) -> memsaver.Transition:
        """Resume, and remember what was free before; in a shared pool that says nothing, as others may still pause."""
        if self.pool == "shared":
            return super().resume(tags, restore, timeout)
        found = memsaver.regions.find(tags)
        needed = sum(region.allocated_bytes for region in found if region.state == "paused")
        before = BeforeResume(self.memory().free, needed)
        done = super().resume([region.tag for region in found], restore, timeout)
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

    def write_weights(self, tokens: Sequence[memsaver.Token]) -> WeightsWritten:
        """Write the weights into engines' own, without a copy in between. All ranks get the tokens of all engines.

        Where all are on one device, every rank writes its shards into every engine. A rank on a device of its own does
        not reach the other engines: there all gather, and write full weights to the engine that is beside them.
        """
        gather = len(self._devices | {token.device_uuid for token in tokens}) > 1
        self._synchronize()
        begin = time.perf_counter()
        with ExitStack() as leases:
            targets = [leases.enter_context(memsaver.attach(each)) for each in tokens if each.device_uuid == self._uuid]
            attached = time.perf_counter()
            written = self.trainer.write_weights(targets, gather)
            self._synchronize()
            ended = time.perf_counter()
        read = written * 4 // self.recipe.model.dtype.itemsize  # from fp32
        way = "gathered" if gather else "shards"
        return WeightsWritten(way, read + written, attached, ended, time.perf_counter() - begin)

    def copy_rate(self, nbytes: int, repeats: int = 5) -> float:
        """Bytes per second, read plus written, of plain copies on the device: the best of a few."""
        source, target = (torch.ones(nbytes // 8, dtype=torch.int64, device=self.device) for _ in range(2))
        seconds = []
        for _ in range(repeats):
            self._synchronize()
            begin = time.perf_counter()
            target.copy_(source)
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        del source, target
        self._release_cache()
        return 2 * nbytes / min(seconds)

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
        in_region = self.device.type == "cpu" or self.pool == "shared"
        if in_region:
            taken = memsaver.region("overwrite", device=str(self.device)).empty((count,), torch.int64)
        else:
            taken = torch.empty(count, dtype=torch.int64, device=self.device)
        taken.random_(generator=torch.Generator(self.device).manual_seed(seed))
        del taken
        self._release_cache()
        if in_region:
            memsaver.trim("overwrite")
        return 8 * count
