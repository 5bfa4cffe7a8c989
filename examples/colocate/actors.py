"""The Ray actors: an engine, and a rank of the trainer. Neither has a handle of the other."""

from __future__ import annotations

import os
import pickle
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

import memsaver
from memsaver.ray import Colocated

from .engine import Completion, Engine, SamplingParams
from .model import WeightPart
from .recipes import Demand, Recipe
from .sampler import Sampler
from .timeline import BOOT_ID, ProcessSamples
from .trainer import EngineWeights, RankBatch, Sample, StepMetrics, TokenStatistics, Trainer
from .trainer.process_group import join

_POLL_S = 0.05
_SPARE_BYTES = 256 << 20  # left free on a GPU when all else is overwritten


@dataclass(frozen=True)
class Memory:
    """A device by its driver's figures, or its shared pool by the broker's, in bytes."""

    total: int
    free: int

    @property
    def used(self) -> int:
        return self.total - self.free


@dataclass(frozen=True)
class BeforeResume:
    """The device right before an actor resumed: free bytes, and the bytes that the resume takes."""

    free: int
    needed: int


@dataclass(frozen=True)
class WeightsWritten:
    """Figures of the write of a rank of the trainer into engines: bytes read and written, and seconds."""

    way: str  # "shards", each rank's into all engines, or "gathered", full ones into the rank's own engine
    nbytes: int  # read and written, without the gathering
    began: float  # the writing alone, by the machine's monotonic clock
    ended: float
    seconds: float  # with attaching and leaving


class Worker(Colocated):
    """Base of both actors: a device and its figures."""

    role: str
    largest: str  # tag of the largest region

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
        """`sharers`: the number of ranks on this device."""
        self._sampler = Sampler()
        self.recipe, self.rank, self.ranks, self.sharers = recipe, rank, ranks, sharers
        self.seed, self.pool = seed, pool
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if recipe.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first handle is made
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.capacity = recipe.capacity(torch.cuda.get_device_properties(self.device).total_memory, sharers)
        else:
            torch.set_num_threads(recipe.threads)
            memsaver.configure(host_device=host_device_bytes)
            self.capacity = host_device_bytes
        self._join()

    def _join(self) -> None:
        """Make the device's first region. This joins the device's pool, and stats() has the device from now on."""
        memsaver.configure(pool_capacity=self.capacity, pool=self.pool, patches="multiprocessing")
        memsaver.region(self.largest, device=str(self.device))

    def device_bytes(self) -> int:
        """The bytes of the device, of which the regions may take a part."""
        return int(self._figures()["total_bytes"])

    def memory(self) -> Memory:
        row = self._figures()
        if row["pool"] is None:
            return Memory(row["total_bytes"], row["free_bytes"])
        return Memory(self.capacity, row["pool"]["available_bytes"])

    def await_memory(self, held: int, timeout: float) -> None:
        """Wait until only `held` bytes of the regions' capacity are in use, or the timeout is over."""
        until = time.monotonic() + timeout
        while self.memory().free < self.capacity - held and time.monotonic() < until:
            time.sleep(_POLL_S)

    def resume(
        self, tags: memsaver.regions.Selection = None, *, restore: memsaver.policies.Restore = True, **bounds: Any
    ) -> memsaver.Transition:
        with self._sampler.around():
            return super().resume(tags, restore=restore, **bounds)

    def colocated_commit(self) -> memsaver.Transition:
        with self._sampler.around():
            return super().colocated_commit()

    def start_sampling(self) -> None:
        """Sample the memory of the regions until `stop_sampling`. No effect while sampling."""
        self._sampler.start()

    def stop_sampling(self) -> ProcessSamples:
        """End the sampling and return the samples."""
        row = self._figures()
        return ProcessSamples(
            self.role,
            self.rank,
            os.getpid(),
            row["uuid"],
            row["total_bytes"],
            BOOT_ID.read_text().strip(),
            self._sampler.stop(),
        )

    def demand(self) -> Demand:
        """The device memory that this actor's regions will hold once it is built."""
        if self.role == "engine":
            return self.recipe.engine_demand(self._own_bytes())
        return self.recipe.trainer_demand(self._own_bytes(), self.ranks)

    def mapped_bytes(self) -> int:
        """Bytes of device memory that this actor's regions hold."""
        return sum(row["mapped_bytes"] for row in self._figures()["regions"])

    def _figures(self) -> dict[str, Any]:
        row: dict[str, Any] = memsaver.stats().asdict()["devices"][str(self.device)]
        return row

    def _own_bytes(self) -> int:
        """This rank's share of its device."""
        return self.capacity // self.sharers

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release_cache(self) -> None:
        self._synchronize()
        torch.cuda.empty_cache()  # no effect without CUDA


class EngineWorker(Worker):
    """An engine that serves, and that pauses between two calls."""

    role, largest = "engine", "kv_cache"
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
        """Drain, synchronise, and release the free memory of torch's default pool."""
        self.engine.drain()
        self._release_cache()

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
        return self.engine.generate(prompts, sampling)

    def share_weights(self) -> tuple[str, bytes, dict[str, WeightPart]]:
        """The UUID of the device, the pickled weights, and their layout."""
        return self._figures()["uuid"], self.engine.share_weights(), self.engine.weight_layout

    def compare_bucket(self, bucket: dict[str, Tensor]) -> tuple[int, list[str]]:
        """The number of these weights, and the names of those that differ from the engine's."""
        return len(bucket), self.engine.differing_weights(bucket.items())

    def load_bucket(self, bucket: dict[str, Tensor]) -> None:
        """Overwrite some of the weights."""
        self.engine.load_weights(bucket.items(), partial=True)

    def end_load(self) -> None:
        """Raises ValueError if weights are missing."""
        self.engine.load_weights(())

    def constant_bytes(self) -> int:
        """Bytes of contents that are written once: the buffers, and the graphs' memory between replays."""
        rows = self._figures()["regions"]
        return sum(row["allocated_bytes"] for row in rows if row["tag"] in ("buffers", "cuda_graph"))

    def addresses(self) -> dict[str, int]:
        return self.engine.addresses()

    def random_state(self) -> list[int]:
        """The sampler's state: its seed, and the number of its calls."""
        state: list[int] = self.engine.runner.sampler.state.tolist()
        return state

    def set_random_state(self, state: list[int]) -> None:
        self.engine.runner.sampler.state.copy_(torch.tensor(state))

    def counters(self) -> tuple[int, int]:
        """Tokens generated and graphs replayed so far."""
        counts = self.engine.counts
        return counts.tokens, counts.decode_replays

    def batch_sizes(self) -> tuple[int, ...]:
        """The captured batch sizes; without graphs, the sizes to which steps are padded."""
        return self.engine.captured_batch_sizes or self.engine.config.batch_sizes()

    def greedy(self, size: int, use_graphs: bool) -> list[list[int]]:
        """Tokens of `size` sequences decoded together: random prompts, the same in each call."""
        draw = random.Random(size)
        prompts = [[draw.randrange(self.recipe.model.vocab_size) for _ in range(8)] for _ in range(size)]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.recipe.proof_tokens)
        return [each.tokens for each in self.engine.generate(prompts, sampling, use_graphs=use_graphs)]


class TrainerWorker(Worker):
    """A rank of the trainer, and its workspace."""

    role, largest = "trainer", "workspace"
    trainer: Trainer
    _before_resume: BeforeResume | None = None
    _minibatches: Sequence[RankBatch] = ()  # of this rank, each of them for one step
    _workspace: Tensor
    _buckets: Iterator[dict[str, Tensor]] = iter(())
    _uuid: str  # of this rank's device
    _devices: set[str]  # of all ranks of the trainer

    def meeting_point(self) -> str:
        """The rendezvous of the ranks: an address of this node with a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def setup(self, init_method: str | None) -> list[str]:
        """Build the trainer. Returns the tags of its regions."""
        mesh = join(self.device.type, self.rank, self.ranks, init_method, self.sharers)
        torch.use_deterministic_algorithms(self.recipe.deterministic)
        self._uuid = self._figures()["uuid"]
        uuids = [self._uuid] * self.ranks
        torch.distributed.all_gather_object(uuids, self._uuid)
        self._devices = set(uuids)
        self.trainer = Trainer(self.recipe.model, replace(self.recipe.trainer, seed=self.seed), mesh)
        region = memsaver.region("workspace", device=str(self.device))
        self._workspace = region.empty((int(self.recipe.workspace_share * self._own_bytes()) // 8,), torch.int64)
        self.trainer.release_activations()
        return [*self.trainer.memory.tags, "workspace"]

    def colocated_drain(self, tags: Sequence[str]) -> None:
        self.trainer.release_activations()

    def resume(
        self, tags: memsaver.regions.Selection = None, *, restore: memsaver.policies.Restore = True, **bounds: Any
    ) -> memsaver.Transition:
        """Resume, and keep the free bytes before. Not with a shared pool, where other processes may still pause."""
        if self.pool == "shared":
            return super().resume(tags, restore=restore, **bounds)
        found = memsaver.regions.find(tags)
        needed = sum(region.allocated_bytes for region in found if region.state == "paused")
        before = BeforeResume(self.memory().free, needed)
        done = super().resume([region.tag for region in found], restore=restore, **bounds)
        self._before_resume = before
        return done

    def before_resume(self) -> BeforeResume | None:
        """The device before the last resume; None before the first."""
        return self._before_resume

    def warm_up(self, batches: Sequence[Sequence[Sample]], rates: Sequence[float]) -> StepMetrics:
        """Supervised steps, one for each batch. Returns the last one's metrics."""
        for batch, rate in zip(batches, rates):
            metrics = self.trainer.warm_up(batch, rate)
        return metrics

    def end_warm_up(self) -> None:
        self.trainer.reset_optimizer()

    def recompute(self, samples: Sequence[Sample], minibatches: int) -> TokenStatistics:
        """Prepare a rollout for training, in parts. Returns statistics of this rank's part of the tokens.

        All parts are recomputed before the first step: each is compared with the policy that the engines had.
        """
        found = [self.trainer.recompute(samples[part::minibatches]) for part in range(minibatches)]
        self._minibatches = [own for own, _ in found]
        return TokenStatistics.joined([statistics for _, statistics in found])

    def train(self, rate: float) -> StepMetrics:
        """Policy-gradient steps, one for each recomputed part. Returns the mean of their metrics."""
        minibatches, self._minibatches = self._minibatches, []
        if not minibatches:
            raise RuntimeError("there is nothing to train on, expected a call of recompute() before")
        metrics = [self.trainer.train_step(own, rate) for own in minibatches]
        return StepMetrics(*(sum(column) / len(minibatches) for column in zip(*map(astuple, metrics))))

    def steps_taken(self) -> int:
        """Updates of the weights since the warm-up."""
        return self.trainer.steps_taken

    def save(self, folder: Path) -> None:
        self.trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._minibatches = []
        self.trainer.load(folder)

    def write_weights(self, shared: Sequence[tuple[str, bytes, dict[str, WeightPart]]]) -> WeightsWritten:
        """Write the weights into the engines' tensors, without a copy in between. `shared`: of all engines.

        If all are on one device, every rank writes its shards into every engine. A rank on a device of its own does
        not reach the other engines: there all ranks gather, and each writes full weights into the engine on its device.
        """
        gather = len(self._devices | {uuid for uuid, *_ in shared}) > 1
        self._synchronize()
        begin = time.perf_counter()
        here = [(weights, layout) for uuid, weights, layout in shared if uuid == self._uuid]
        targets = [EngineWeights(pickle.loads(weights), layout) for weights, layout in here]
        attached = time.perf_counter()
        written = self.trainer.weights.write(targets, gather)
        self._synchronize()
        ended = time.perf_counter()
        targets.clear()  # the engines' next pause waits for the end of these
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
        self._buckets = self.trainer.weights.buckets(self.recipe.bucket_bytes)

    def next_bucket(self) -> tuple[bool, dict[str, Tensor]]:
        """(True, the next bucket), or (False, {}) at the end. All ranks gather; rank 0 alone returns the contents."""
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
