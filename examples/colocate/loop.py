"""The RL loop: an engine and a trainer, Ray actors on the same device, take turns through memsaver.

`Loop.step` is a step. The rest of this file has all that it needs: the actors, the phases, and the way of the weights.
`python -m examples.colocate` runs it with checks, checkpoints and a log, which `checks/` attaches.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from memsaver.ray import Group, Turn

from .engine import Completion, Engine, SamplingParams
from .engine.engine_memory import EngineMemory
from .engine.tensor_parallel import Parallel
from .model import EngineWeights, WeightPart
from .options import Options
from .process_group import join
from .recipes import Recipe
from .rollout import Rollout, Rollouts, answers
from .savers import REGIONS, packed
from .task import Task
from .trainer.interface import Sample, StepMetrics, TokenStatistics
from .vllm_engine import VllmEngine
from .worker import Worker

if TYPE_CHECKING:
    from .trainer.trainer import Trainer


class EngineActor(Worker):
    """An engine that serves, or a rank of one with tensor parallel, and that can pause between two calls."""

    engine: Engine | VllmEngine

    def setup(self, addresses: Sequence[str]) -> list[str]:
        """Build the engine and capture its graphs. Returns the tags of its regions, of the weights first.

        `addresses`: of all ranks of all engines; those of an engine meet at the first one's.
        """
        recipe, size = self.recipe, self.options.engine_ranks
        number, rank = divmod(self.rank, size)
        group = join(self.device.type, rank, size, addresses[number * size]).get_group() if size > 1 else None
        blocks = recipe.kv_blocks or recipe.blocks_that_fit(self.own_bytes, size, self.options.memory == "resident")
        config = replace(recipe.engine, num_blocks=blocks, seed=1000 * self.options.seed + number)
        if self.options.engine == "vllm":
            self.engine = VllmEngine(recipe.model, config, self.options.model, self.options.in_regions)
        else:
            memory = EngineMemory(self.device, REGIONS[self.options.memory])
            self.engine = Engine(recipe.model, config, self.device, Parallel(group), memory)
        self.engine.capture()
        return list(self.engine.tags)

    def colocated_drain(self, tags: Sequence[str]) -> None:
        self.engine.drain()  # requests that run are computed again after the pause
        self.release_cache()

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
        return self.engine.generate(prompts, sampling)

    def share_weights(self) -> tuple[str, bytes, dict[str, WeightPart]]:
        """The UUID of the device, the pickled weights, and their layout."""
        return self.uuid(), self.engine.share_weights(), self.engine.weight_layout

    def take_weights(self, sent: Sequence[bytes]) -> None:
        """The result of `TrainerActor.send_weights`."""
        self.engine.take_weights(pickle.loads(sent[self.rank]))


class TrainerActor(Worker):
    """A rank of the trainer."""

    trainer: Trainer
    sent: Any = ()

    def setup(self, addresses: Sequence[str]) -> list[str]:
        """Build the trainer, whose ranks meet at the first address. Returns the tags of its regions."""
        from .trainer.trainer import Trainer  # slow to import, and for trainers alone

        if self.options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first handle is made
            torch.use_deterministic_algorithms(True)
        mesh = join(self.device.type, self.rank, self.options.ranks, addresses[0])
        config = replace(self.recipe.trainer, seed=self.options.seed)
        self.trainer = Trainer(self.recipe.model, config, mesh, self.options.model, REGIONS[self.options.memory])
        self.release_cache()
        return self.trainer.memory.tags

    def colocated_drain(self, tags: Sequence[str]) -> None:
        self.sent = ()
        self.release_cache()  # of activations

    def train(self, samples: Sequence[Sample], rate: float) -> tuple[StepMetrics, TokenStatistics]:
        """Policy-gradient steps on parts of a rollout. Returns their mean metrics, and statistics of the tokens."""
        parts = [samples[part :: self.recipe.minibatches] for part in range(self.recipe.minibatches)]
        # All before the first step: they are compared with the policy that the engines had.
        prepared = [self.trainer.recompute(part) for part in parts]
        metrics = [self.trainer.train_step(batch, rate) for batch, _ in prepared]
        mean = StepMetrics(*(sum(column) / len(metrics) for column in zip(*map(astuple, metrics))))
        return mean, TokenStatistics.joined([statistics for _, statistics in prepared])

    def write_weights(self, shared: Sequence[tuple[str, bytes, dict[str, WeightPart]]], trainers: set[str]) -> None:
        """Write this rank's shards into the tensors of the engines.

        `shared`: of all engines. `trainers`: the UUIDs of the devices of all ranks. A rank reaches the engines on its
        own device alone: if there are other devices, the ranks gather each parameter first.
        """
        gather = len(trainers.union(uuid for uuid, *_ in shared)) > 1
        own = self.uuid()
        here = [EngineWeights(pickle.loads(weights), layout) for uuid, weights, layout in shared if uuid == own]
        self.trainer.weights.write(here, gather)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the engines read them next

    def send_weights(self, layouts: Sequence[dict[str, WeightPart]]) -> list[bytes]:
        """For engines whose memory no other process can write: copies of their weights, from the first rank."""
        made = [packed(self.trainer.weights, layout, self.device) for layout in layouts]
        self.sent = [copy for copy, _ in made]
        return [pickled for _, pickled in made if self.rank == 0]


class Loop:
    """One run: `set_up`, `begin`, and then steps."""

    kinds: dict[str, type[Worker]] = {"engine": EngineActor, "trainer": TrainerActor}

    def __init__(self, options: Options, recipe: Recipe, task: Task) -> None:
        """Makes the actors, an engine and a trainer for each rank, in an initialized Ray."""
        self.options, self.recipe, self.task = options, recipe, task
        self.steps_done = 0
        self.seconds: dict[str, float] = {}  # of the parts of the present step
        self.turns: list[Turn] = []  # of the present step
        self.warm: list[float] = []  # rewards of the held-out problems after the warm-up
        self.tags: dict[str, list[str]] = {}  # of the regions of each role that is built
        self.place()
        self.actors = {role: self.make(role) for role in self.kinds}

    def place(self) -> None:
        """Reserve a GPU, or a part of this machine, for the actors of each rank."""
        gpus = 1.0 if self.options.device == "cuda" else 0.0
        self._placement = ray.util.placement_group([{"CPU": 2.0, "GPU": gpus}] * self.options.pairs)
        ray.get(self._placement.ready(), timeout=self.options.answer_within)
        self._shares = {"num_cpus": 1, "num_gpus": gpus / 2}

    def make(self, role: str) -> list[Any]:
        """New actors of a role, by rank."""
        kind, made = ray.remote(self.kinds[role]), []
        for rank in range(self.options.count(role)):
            place = PlacementGroupSchedulingStrategy(self._placement, rank)
            actor = kind.options(**self._shares, scheduling_strategy=place)
            made.append(actor.remote(self.recipe, self.options, rank))
        return made

    def call(self, role: str, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """The answers of all actors of a role, by rank. Raises HungError after `--answer-within` seconds."""
        calls = [getattr(actor, method).remote(*arguments, **named) for actor in self.actors[role]]
        return answers(calls, f"{role}.{method}", self.options.answer_within)

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """`Worker.ask` of all actors of a role, by rank. The name begins with the role: `ask("engine.checksums")`."""
        return self.call(name.partition(".")[0], "ask", name, *arguments)

    def set_up(self) -> None:
        """Build each role that is not yet, and the group of all actors."""
        for role in [each for each in self.kinds if each not in self.tags]:
            self.tags[role] = self.call(role, "setup", self.call(role, "address"))[0]
            if role == "engine":  # before the trainers take its memory
                self.pause(role)
        self.trainers_on = set(self.call("trainer", "uuid")) if self.options.in_regions else set[str]()
        overwritten = {self.tags["engine"][0]: False}
        restore = {"sync": {"engine": overwritten}} if self.options.in_regions else None
        self.group = Group(**self.actors, phases=self.phases(), backup=self.backups(), restore=restore, lazy=None)
        temperature, seconds = self.recipe.trainer.temperature, self.options.answer_within
        self.rollouts = Rollouts(self.actors["engine"], self.task, temperature, seconds, self.options.engine_ranks)

    def pause(self, role: str) -> None:
        """All regions of a role, outside of a turn. A sync brings the engines' weights."""
        lost = {self.tags[role][0]: "none"} if role == "engine" and self.options.in_regions else None
        self.call(role, "pause", backup=lost)

    def phases(self) -> dict[str, dict[str, Any]]:
        """The tags that are resident in each phase, by role. All others are paused."""
        engine, trainer = self.tags["engine"], self.tags["trainer"]
        late = ["optimizer"] if self.options.late else []  # the first update waits for it
        train = {"resident": [tag for tag in trainer if tag not in late], "late": late}
        # Gathering takes memory of torch's default pool, which is a region on a GPU.
        written = {"resident": [tag for tag in trainer if tag in ("params", "torch")], "lingering": late}
        sync = {"engine": engine[:1], "trainer": written}
        return {"rollout": {"engine": engine}, "train": {"trainer": train}, "sync": sync}

    def backups(self) -> dict[str, dict[str, dict[str, str]]]:
        """Other policies than those of the regions: the sync overwrites the engines' weights before they are read."""
        return {"train": {"engine": {self.tags["engine"][0]: "none"}}} if self.options.in_regions else {}

    def enter(self, phase: str) -> Turn:
        """All actors together pause and resume regions. An actor that hangs ends the turn with an error."""
        turn = self.group.enter(phase, timeout=self.options.answer_within, memory_timeout=60.0)
        self.turns.append(turn)
        return turn

    def begin(self) -> None:
        """From initial weights to the first rollout: a supervised warm-up, and the first sync."""
        recipe = self.recipe
        self.enter("train")
        for step in range(recipe.warm_up_steps):
            batch = self.task.demonstrations(recipe.warm_up_batch)
            metrics = self.ask("trainer.warm_up", batch, recipe.warm_up_rate_at(step))[0]
            if (step + 1) % 50 == 0 or step + 1 == recipe.warm_up_steps:
                self.say(f"warm-up, {step + 1} of {recipe.warm_up_steps} steps: loss {metrics.loss:.3f}")
        self.ask("trainer.reset_optimizer")
        self.bring_weights()
        self.warm = self.rollouts.held_out_rewards()
        self.say(f"held-out greedy reward after the warm-up: {sum(self.warm) / len(self.warm):.3f}")

    def step(self) -> None:
        """One step. The phase is "rollout" before and after."""
        self.seconds, self.turns, began = {}, [], time.perf_counter()
        rollout = self.rollout()
        self.enter("train")
        metrics, statistics = self.train(rollout.samples)
        self.bring_weights()
        self.steps_done += 1
        self.seconds["step"] = time.perf_counter() - began
        self.report(rollout, metrics, statistics)

    def rollout(self) -> Rollout:
        """The engines complete problems, in groups."""
        began = time.perf_counter()
        rollout = self.rollouts.rollout(self.recipe.prompts, self.recipe.group, self.options.zero_advantages)
        self.seconds["rollout"] = time.perf_counter() - began
        return rollout

    def train(self, samples: Sequence[Sample]) -> tuple[StepMetrics, TokenStatistics]:
        """The trainers learn from all samples."""
        began = time.perf_counter()
        found = self.call("trainer", "train", samples, self.recipe.rate_at(self.steps_done))
        self.seconds["train"] = time.perf_counter() - began
        return found[0][0], TokenStatistics.joined([statistics for _, statistics in found])

    def bring_weights(self) -> None:
        """From "train" to "rollout", with the trainers' weights in the engines.

        If the write fails, the group knows that the engines' weights are not whole.
        """
        with self.enter("sync"):
            self.write_weights()
        self.enter("rollout")

    def write_weights(self) -> None:
        """The trainers write into the engines' own tensors, in the phase "sync"."""
        began = time.perf_counter()
        if self.options.in_regions:
            self.call("trainer", "write_weights", self.call("engine", "share_weights"), self.trainers_on)
        else:
            layouts = self.ask("engine.weight_layout")
            self.call("engine", "take_weights", self.call("trainer", "send_weights", layouts)[0])
        self.seconds["sync"] = time.perf_counter() - began

    def report(self, rollout: Rollout, metrics: StepMetrics, statistics: TokenStatistics) -> None:
        """Of the step that is done."""
        switched = sum(turn.seconds for turn in self.turns)
        self.say(
            f"step {self.steps_done} of {self.recipe.steps}: reward {rollout.reward:.3f}, loss {metrics.loss:+.4f}, "
            f"entropy {statistics.entropy_N.mean():.3f}, {rollout.length:.1f} tokens, {self.seconds['step']:.2f} s, "
            f"{switched:.2f} of them in turns"
        )

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """End all actors."""
        for actors in self.actors.values():
            for actor in actors:
                ray.kill(actor)
        ray.util.remove_placement_group(self._placement)
