"""The RL loop: an engine and a trainer, two Ray actors on one device, take turns through memsaver.

    python -m examples.colocate.loop --help

A step has these parts: sample completions; pause the engine and train; release the optimizer and resume the engine's
weights; the trainer writes them; release the parameters and resume the KV cache and the graphs. Each step checks that
the pauses changed neither contents nor addresses (`proofs.py`), and raises otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import ray

from .actors import EngineWorker, TrainerWorker
from .arithmetic import arithmetic
from .checkpoints import Checkpoints, LoopState, settings_of
from .cluster import start_ray
from .drill import Drill
from .errors import out_of_memory
from .options import chosen_recipe, parse
from .picture import write
from .proofs import Proofs
from .recipes import Recipe
from .recorder import Recorder
from .report import Recovery, Report, StepRow
from .rollout import Rollouts
from .summary import capacity, introduction, opening, show_end, step_drawing, write_json
from .trainer import TokenStatistics
from .turns import Turns
from .weight_sync import WeightSync
from .workers import Workers

__all__ = ["OUT_OF_MEMORY_STATUS", "Loop", "chosen_recipe", "main", "out_of_memory", "parse", "start_ray"]

OUT_OF_MEMORY_STATUS = 3
_WARM_UP_CHUNK = 50  # steps between two lines of progress
_MOST_LOSSES = 3  # deaths since the last checkpoint; more have a cause that a restart does not remove


class Loop:
    """One run: actors, turns and report."""

    engine_worker, trainer_worker = EngineWorker, TrainerWorker
    turns: Turns
    weights: WeightSync
    proofs: Proofs

    def __init__(self, options: argparse.Namespace, recipe: Recipe, report: Report) -> None:
        """Makes the actors. Raises CheckpointError before that if this run cannot continue from the checkpoints."""
        self.options, self.recipe, self.report = options, recipe, report
        self.task = arithmetic(
            recipe.largest, recipe.terms, recipe.problems, recipe.held_out, recipe.slip_share, options.seed
        )
        self.step = 0  # steps done
        self.checkpoints = Checkpoints(options.checkpoint_dir) if options.checkpoint_dir else None
        self._drill = Drill(options.kill, report)
        self._losses = 0  # since the last checkpoint
        self._missing: Sequence[str] = ("engine", "trainer")  # roles to build
        self._tags: dict[str, list[str]] = {}  # of the regions, by role
        self._goes_back = bool(options.resume)  # to the newest checkpoint
        if self.checkpoints is not None:
            self.checkpoints.check_start(self._settings(), options.resume, options.kill)
        self.workers = Workers({"engine": self.engine_worker, "trainer": self.trainer_worker}, options, recipe)
        self._adopt_workers()
        self.recorder = Recorder(report, options.picture_steps if options.picture else 0)

    def introduce(self) -> None:
        """Say how much memory both roles need, and why they take turns."""
        engine, trainer = ray.get([actors[0].demand.remote() for actors in (self.engines, self.trainers)])
        memory = ray.get(self.trainers[0].memory.remote())
        whole, pairs = ray.get(self.trainers[0].device_bytes.remote()), self.workers.sharers
        report, pausing = self.report, self.options.pause
        report.device_bytes, report.devices = memory.total, self.options.ranks // pairs
        report.wanted_bytes = pairs * (engine.nbytes + trainer.nbytes)
        report.say(capacity(memory.total, whole, self.recipe, self.options.device))
        for line in introduction(engine, trainer, memory.total, pairs, pausing):
            report.say(line)

    def set_up(self) -> None:
        """Build both roles, one after the other: the engine pauses before the trainer allocates its memory."""
        options, workers = self.options, self.workers
        if options.pause:
            for role in ("engine", "trainer"):
                if role not in self._missing:
                    self._pause(role)
        if self.report.recoveries:
            workers.await_memory(self._missing)
        for role in self._missing:
            self.report.say(f"building the {role}")
            self._tags[role] = workers.build(role)
            if role == "engine" and options.pause:
                self._pause(role)
        self._missing = ()
        self._adopt_workers()
        self.turns = Turns(self.engines, self.trainers, self._tags, self.report, options.pause, options.pool)
        self.weights = WeightSync(self.engines, self.trainers, options.sync, self.report)
        probes = self.task.held_out[: self.recipe.probes]
        self.proofs = Proofs(self.recipe, self.turns, self.players, self.weights, probes)

    def run(self) -> None:
        """Build both roles, then do all steps, up to the last evaluation or to `--stop-after`.

        If actors die, new actors replace them, and the run continues from the newest checkpoint. Without a checkpoint,
        and after several deaths since the last one, raises the error by which the loop noticed the death.
        """
        while True:
            try:
                self._go_on()
                return
            except Exception as error:
                self._replace_lost(error)

    def close(self) -> None:
        """End the actors."""
        self.workers.close()

    def _pause(self, role: str) -> None:
        # The next sync overwrites the engines' weights before they are read.
        self.workers.pause(role, {"weights": "none"} if role == "engine" else None)

    def _adopt_workers(self) -> None:
        self.engines, self.trainers = self.workers.by_role["engine"], self.workers.by_role["trainer"]
        self.players = Rollouts(self.engines, self.task, self.recipe.trainer.temperature)

    def _go_on(self) -> None:
        """From the present step to the end of the run."""
        if self._missing:
            self.set_up()
        if self._goes_back:
            self._go_back()
        elif self.step == 0:
            self._begin()
        last = min(self.recipe.steps, self.options.stop_after or self.recipe.steps)
        while self.step < last:
            with self.recorder.step(self.step + 1, last, self.workers):
                self._step(self.step, last)
            if self.step == 1:
                print("\n".join(step_drawing(self.report)), flush=True)
        self.recorder.finish(self.workers)
        if last < self.recipe.steps:
            self.report.say(f"stopped after step {last} of {self.recipe.steps}; --resume goes on")
        else:
            self._end()
        self.report.tokens, self.report.replays = (
            sum(column) for column in zip(*ray.get([engine.counters.remote() for engine in self.engines]))
        )

    def _begin(self) -> None:
        self._warm_up()
        self._save(0)
        self.sync(prove=True)
        self.turns.enter("rollout")
        self._evaluate("warm-up")
        self._commit(0)

    def _end(self) -> None:
        if self.options.prove_overwrite:
            self.proofs.overwrite(self.options.seed)
        self._evaluate("end")

    def _warm_up(self) -> None:
        recipe = self.recipe
        self.turns.enter("train")
        for first in range(0, recipe.warm_up_steps, _WARM_UP_CHUNK):
            steps = range(first, min(first + _WARM_UP_CHUNK, recipe.warm_up_steps))
            batches = ray.put([self.task.demonstrations(recipe.warm_up_batch) for _ in steps])
            rates = [recipe.warm_up_rate_at(step) for step in steps]
            metrics = ray.get([trainer.warm_up.remote(batches, rates) for trainer in self.trainers])[0]
            self.report.say(f"warm-up, {steps.stop} of {recipe.warm_up_steps} steps: loss {metrics.loss:.3f}")
        ray.get([trainer.end_warm_up.remote() for trainer in self.trainers])
        self.turns.look("train")

    def _step(self, step: int, last: int) -> None:
        """One step. The phase is "rollout" before and after. `last`: the steps of this run."""
        recipe, report, turns = self.recipe, self.report, self.turns
        began, moved = time.perf_counter(), report.transition_seconds
        self.proofs.pause(step)
        kill_engine = self._drill.of_step("engine", step + 1, self.workers)
        kill_trainer = self._drill.of_step("trainer", step + 1, self.workers)
        rollout_began = time.perf_counter()
        rollout = self.players.rollout(recipe.prompts, recipe.group, self.options.zero_advantages, kill_engine)
        rollout_seconds = time.perf_counter() - rollout_began
        report.rollout_seconds += rollout_seconds
        report.rollout_tokens += rollout.num_tokens

        turns.enter("train")
        self.proofs.room()
        batch = ray.put(rollout.samples)
        gaps = ray.get([trainer.recompute.remote(batch, recipe.minibatches) for trainer in self.trainers])
        gap = TokenStatistics.joined(gaps)
        self.proofs.logprobs(gap)
        rate = recipe.rate_at(step)
        training = [trainer.train.remote(rate) for trainer in self.trainers]
        kill_trainer()
        metrics = ray.get(training)[0]
        self.proofs.steps(step + 1)
        due = (step + 1) % self.options.checkpoint_every == 0 or step + 1 == last
        if due:
            self._save(step + 1)
        turns.look("train")

        self.sync(prove=recipe.prove_each_sync or step + 1 == recipe.steps)
        turns.enter("rollout")
        self.proofs.addresses()
        if self.options.eval_every and (step + 1) % self.options.eval_every == 0:
            self._evaluate(f"step {step + 1}")
        report.add(
            StepRow(
                step=step + 1,
                reward=rollout.reward,
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
                clipped=metrics.clipped,
                logprob_gap=gap.largest_gap,
                logprob_gap_mean=gap.mean("gap"),
                truncated=gap.mean("capped"),
                tokens_per_second=rollout.num_tokens / rollout_seconds,
                transition_seconds=report.transition_seconds - moved,
                seconds=time.perf_counter() - began,
            ),
            recipe.steps,
        )
        self.step = step + 1
        if due:
            self._commit(step + 1)

    def _settings(self) -> dict[str, Any]:
        """The settings that the curve depends on."""
        names = ("device", "ranks", "ranks_per_gpu", "pool", "sync", "seed", "zero_advantages", "eval_every")
        return {name: getattr(self.options, name) for name in names} | settings_of(self.recipe, "recipe.")

    def _save(self, step: int) -> None:
        """The trainers write their part of a checkpoint, in the phase "train"."""
        if self.checkpoints is not None:
            folder = self.checkpoints.begin(step)
            ray.get([trainer.save.remote(folder) for trainer in self.trainers])

    def _commit(self, step: int) -> None:
        """Write the rest of the checkpoint and give it its name, after the whole step, in the phase "rollout"."""
        if self.checkpoints is None:
            return
        engines = ray.get([engine.random_state.remote() for engine in self.engines])
        report = self.report
        state = LoopState(step, self._settings(), self.task.random_state(), engines, report.rows, report.held_out)
        path = self.checkpoints.commit(state)
        self._losses = 0
        report.say(f"checkpoint: {path}")

    def _go_back(self) -> None:
        """Load the newest checkpoint, in any phase: weights, optimizer, random numbers, and the curve."""
        assert self.checkpoints is not None
        path, state = self.checkpoints.newest()
        self.turns.enter("train")
        ray.get([trainer.load.remote(path) for trainer in self.trainers])
        self.sync(prove=True)
        self.turns.enter("rollout")
        ray.get([engine.set_random_state.remote(each) for engine, each in zip(self.engines, state.engines)])
        self.task.set_random_state(state.task)
        self.report.rows, self.report.held_out = list(state.rows), dict(state.held_out)
        self.step, self._goes_back = state.step, False
        self.report.went_back(state.step)
        self.report.say(f"going on after step {state.step}, from {path}")

    def _replace_lost(self, error: Exception) -> None:
        """Replace all actors of each role in which an actor has died. Raises the error if no actor has died."""
        began = time.perf_counter()
        if self.checkpoints is None or self.checkpoints.latest() is None or self._losses >= _MOST_LOSSES:
            raise error
        lost = self.workers.lost()
        if not lost:
            raise error
        self._losses += 1
        names = [f"{role} {rank}" for role, ranks in lost.items() for rank in ranks]
        self.report.say(f"lost {', '.join(names)} in step {self.step + 1}: {type(error).__name__}")
        self.report.recoveries.append(Recovery(self.step + 1, names, began))
        self._missing = sorted({*self._missing, *lost})  # engines first
        self._goes_back = True
        for role in lost:
            self.workers.replace(role)
        self._adopt_workers()

    def sync(self, prove: bool) -> None:
        """Bring the trainer's weights to the engines, in the phase "sync"."""
        with self.turns.phase("sync"):
            self.weights.bring()
            if prove:
                self.proofs.weights()

    def _evaluate(self, when: str) -> None:
        rewards = self.players.held_out_rewards()
        self.report.held_out[when] = sum(rewards) / len(rewards)
        self.report.say(f"held-out greedy reward, {when}: {self.report.held_out[when]:.3f}")


def main(arguments: list[str] | None = None) -> int:
    """Run the loop. Returns the exit status: 0, or OUT_OF_MEMORY_STATUS if the device was too small."""
    options = parse(arguments)
    recipe, files = chosen_recipe(options), ("json", "picture", "picture_steps")
    report = Report(settings={name: value for name, value in vars(options).items() if name not in files})
    report.say(opening(recipe, options.device, options.ranks))
    timeline = None
    started_here = not ray.is_initialized()
    if started_here:
        start_ray(options)
    try:
        with closing(Loop(options, recipe, report)) as loop:
            loop.introduce()
            loop.run()
            timeline = loop.recorder.timeline
    except Exception as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        report.out_of_memory = str(reason).splitlines()[0]
        report.say(f"out of memory: {report.out_of_memory}")
    finally:
        if started_here:
            ray.shutdown()
    show_end(report, recipe)
    if options.picture:
        write(timeline, Path(options.picture))
    write_json(report, options.json)
    return OUT_OF_MEMORY_STATUS if report.out_of_memory else 0


if __name__ == "__main__":
    sys.exit(main())
