"""The RL loop: an engine and a trainer, two Ray actors on one device, take turns through memsaver.

    python -m examples.colocate.loop --help

A step: sample completions; drain, engine out; trainer in, train; optimizer out, engine's weights in; the trainer writes
them; parameters out, KV cache and graphs in; go on. Each step checks what must hold across the pauses, and raises
otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import ray
import torch

import memsaver
from memsaver.ray import placement

from .actors import EngineWorker, TrainerWorker, WeightsWritten
from .arguments import integer, share
from .arithmetic import Arithmetic
from .model import parameter_shapes
from .recipes import MIB, RECIPES, Recipe
from .report import Report, StepRow
from .rollout import Players, demonstration_batch
from .turns import ProofError, Turns

OUT_OF_MEMORY_STATUS = 3
_runs = itertools.count()
_WARM_UP_CHUNK = 50  # steps between two lines of progress


class Loop:
    """One run: actors, turns and report."""

    engine_worker, trainer_worker = EngineWorker, TrainerWorker
    turns: Turns

    def __init__(self, options: argparse.Namespace, recipe: Recipe, report: Report) -> None:
        self.options, self.recipe, self.report = options, recipe, report
        self.task = Arithmetic(recipe.largest, recipe.held_out, recipe.carry_share, options.seed)
        each = options.ranks_per_gpu
        self._placement, gpus = placement(ranks=options.ranks // each, roles=2 * each)
        placements = [gpus[rank // each] for rank in range(options.ranks)]
        sharers = options.ranks if options.device == "cpu" else each
        # The host driver's device is named by its size: this run gets one of its own.
        host_device = recipe.host_device_bytes + (os.getpid() + next(_runs)) % 32 * 2 * MIB

        def actors(worker: Any) -> list[Any]:
            remote = ray.remote(worker)
            return [
                remote.options(**placed).remote(
                    recipe, options.device, rank, options.ranks, sharers, options.seed, options.pool, host_device
                )
                for rank, placed in enumerate(placements)
            ]

        self.engines, self.trainers = actors(self.engine_worker), actors(self.trainer_worker)
        self.players = Players(self.engines, self.task)

    def set_up(self) -> None:
        """Build both sides, one after the other: what the engine takes would not fit beside the trainer."""
        options, say = self.options, self.report.say
        say("building the engine")
        engine_tags = ray.get([engine.setup.remote() for engine in self.engines])[0]
        if options.pause:
            ray.get([engine.pause.remote() for engine in self.engines])
        say("building the trainer")
        meeting = ray.get(self.trainers[0].meeting_point.remote()) if len(self.trainers) > 1 else None
        trainer_tags = ray.get([trainer.setup.remote(meeting) for trainer in self.trainers])[0]
        tags = {"engine": engine_tags, "trainer": trainer_tags}
        self.turns = Turns(self.engines, self.trainers, tags, self.report, options.pause, options.pool)

    def run(self) -> None:
        """Everything, from building both sides to the last evaluation."""
        self.set_up()
        self.addresses = ray.get([engine.addresses.remote() for engine in self.engines])
        self._warm_up()
        self.sync(prove=True)
        self.turns.enter("rollout")
        self._evaluate("warm-up")
        for step in range(self.recipe.steps):
            self._step(step)
        if self.options.prove_overwrite:
            self._prove_overwrite()
        self._evaluate("end")
        self.report.tokens, self.report.replays = (
            sum(column) for column in zip(*ray.get([engine.counters.remote() for engine in self.engines]))
        )

    def close(self) -> None:
        """End the actors."""
        for actor in (*self.engines, *self.trainers):
            ray.kill(actor)
        ray.util.remove_placement_group(self._placement)

    def _warm_up(self) -> None:
        recipe = self.recipe
        self.turns.enter("train")
        for first in range(0, recipe.warm_up_steps, _WARM_UP_CHUNK):
            steps = range(first, min(first + _WARM_UP_CHUNK, recipe.warm_up_steps))
            batches = ray.put([demonstration_batch(self.task, recipe.warm_up_batch, recipe.slip_share) for _ in steps])
            rates = [recipe.warm_up_rate_at(step) for step in steps]
            metrics = ray.get([trainer.warm_up.remote(batches, rates) for trainer in self.trainers])[0]
            self.report.say(f"warm-up, {steps.stop} of {recipe.warm_up_steps} steps: loss {metrics.loss:.3f}")
        ray.get([trainer.end_warm_up.remote() for trainer in self.trainers])
        self.turns.look("train")

    def _step(self, step: int) -> None:
        """From one rollout to the next; the engine's turn before and after."""
        recipe, report, turns = self.recipe, self.report, self.turns
        began, moved = time.perf_counter(), report.transition_seconds
        self._prove_pause(step)
        rollout_began = time.perf_counter()
        rollout = self.players.rollout(recipe.prompts, recipe.group, self.options.zero_advantages)
        rollout_seconds = time.perf_counter() - rollout_began
        report.rollout_seconds += rollout_seconds
        report.rollout_tokens += rollout.num_tokens

        turns.enter("train")
        turns.prove_room()
        batch = ray.put(rollout.batch)
        gap = max(ray.get([trainer.logprob_gap.remote(batch) for trainer in self.trainers]))
        if recipe.model.dtype == torch.float32:  # the trainer's
            if not gap <= recipe.logprob_bound:
                raise ProofError(f"log-probabilities of one token differ by {gap}; expected {recipe.logprob_bound}")
            report.proofs["log-probabilities agree"] += 1
        rate = recipe.rate_at(step)
        metrics = ray.get([trainer.train.remote(batch, recipe.minibatches, rate) for trainer in self.trainers])[0]
        turns.look("train")

        self.sync(prove=recipe.prove_each_sync or step + 1 == recipe.steps)
        turns.enter("rollout")
        self._prove_addresses()
        if self.options.eval_every and (step + 1) % self.options.eval_every == 0:
            self._evaluate(f"step {step + 1}")
        report.add(
            StepRow(
                step=step + 1,
                reward=rollout.reward,
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
                clipped=metrics.clipped,
                logprob_gap=gap,
                tokens_per_second=rollout.num_tokens / rollout_seconds,
                transition_seconds=report.transition_seconds - moved,
                seconds=time.perf_counter() - began,
            ),
            recipe.steps,
        )

    def sync(self, prove: bool) -> None:
        """Bring the engines the trainer's weights, in a turn for that."""
        self.turns.enter("sync")
        self.bring_weights()
        if prove:
            self.prove_weights()

    def bring_weights(self) -> list[WeightsWritten]:
        """Within the turn. Returns how each rank wrote them; nothing where buckets were sent."""
        began = time.perf_counter()
        written = self._write() if self.options.sync == "attach" else self._send()
        self.report.sync_seconds.append(time.perf_counter() - began)
        return written

    def _write(self) -> list[WeightsWritten]:
        """The trainer writes into the engines' own weights."""
        tokens = ray.get([engine.share_weights.remote() for engine in self.engines])
        written: list[WeightsWritten] = ray.get([trainer.write_weights.remote(tokens) for trainer in self.trainers])
        return written

    def _send(self) -> list[WeightsWritten]:
        """One bounded bucket on its way while the next is gathered."""
        loading: list[Any] = []
        for bucket in self._buckets():
            ray.get(loading)
            loading = [engine.load_bucket.remote(bucket) for engine in self.engines]
        ray.get([*loading, *(engine.end_load.remote() for engine in self.engines)])
        return []

    def prove_weights(self) -> None:
        """Each engine's tensors are, bit for bit, what a load of the trainer's checkpoint in its dtype would give."""
        counts = [0] * len(self.engines)
        for bucket in self._buckets():
            compared = ray.get([engine.compare_bucket.remote(bucket) for engine in self.engines])
            for rank, (count, differing) in enumerate(compared):
                counts[rank] += count
                if differing:
                    raise ProofError(f"engine {rank} does not have the trainer's weights: {', '.join(differing[:4])}")
        expected = len(parameter_shapes(self.recipe.model))
        if counts != [expected] * len(counts):
            raise ProofError(f"the checkpoint has {counts} weights; expected {expected}")
        self.report.proofs["weights are the checkpoint's"] += 1

    def _buckets(self) -> Iterator[Any]:
        """References to the buckets, whose contents go from actor to actor."""
        ray.get([trainer.begin_sync.remote() for trainer in self.trainers])
        while True:
            pairs = [trainer.next_bucket.options(num_returns=2).remote() for trainer in self.trainers]
            if not ray.get([more for more, _ in pairs])[0]:
                return
            yield pairs[0][1]

    def _evaluate(self, when: str) -> None:
        self.report.held_out[when] = self.players.greedy_reward(self.task.held_out)
        self.report.say(f"held-out greedy reward, {when}: {self.report.held_out[when]:.3f}")

    def _prove_pause(self, step: int) -> None:
        """Greedy tokens are the same before and after a pause in which the trainer writes over the engine's memory."""
        probes = self.task.held_out[: self.recipe.probes]
        before = [each.tokens for each in self.players.complete(probes, temperature=0.0)]
        self.turns.enter("away")
        ray.get([trainer.scribble.remote(step) for trainer in self.trainers])
        self.turns.enter("rollout")
        after = [each.tokens for each in self.players.complete(probes, temperature=0.0)]
        if before != after:
            raise ProofError(f"greedy tokens changed over a pause: {before} before, {after} after")
        self._prove_addresses()
        self.report.proofs["tokens are the same"] += 1

    def _prove_addresses(self) -> None:
        if ray.get([engine.addresses.remote() for engine in self.engines]) != self.addresses:
            raise ProofError("the engine's tensors have moved")
        self.report.proofs["addresses are the same"] += 1

    def _prove_overwrite(self) -> None:
        """Graphs decode, after the trainer wrote over all memory it gained, what was decoded eagerly before."""
        sizes = ray.get(self.engines[0].batch_sizes.remote())
        before = ray.get([engine.greedy.remote(size, False) for engine in self.engines for size in sizes])
        self.turns.enter("away")
        # One after the other: on the host driver all ranks share a device.
        written = [ray.get(trainer.overwrite_free.remote(self.options.seed)) for trainer in self.trainers]
        ray.get([trainer.scribble.remote(self.options.seed) for trainer in self.trainers])
        self.turns.enter("rollout")
        after = ray.get([engine.greedy.remote(size, True) for engine in self.engines for size in sizes])
        if before != after:
            wrong = [size for size, one, other in zip(sizes * len(self.engines), before, after) if one != other]
            raise ProofError(f"greedy tokens differ from the eager ones at batch sizes {wrong}")
        self.report.proofs["overwritten"] += len(after)
        self.report.say(
            f"{sum(written) / MIB:.0f} MiB overwritten beside the workspace; {self.recipe.proof_tokens} greedy tokens "
            f"at batch sizes {', '.join(map(str, sizes))} are the same"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m examples.colocate.loop", description=__doc__.split("\n")[0])
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--recipe", choices=tuple(RECIPES), help="sizes and settings; by default the device's")
    parser.add_argument("--ranks", type=integer(1), default=1, help="engines and trainers, a pair for each GPU")
    parser.add_argument("--ranks-per-gpu", type=integer(1), default=1, help="pairs that share a GPU")
    parser.add_argument(
        "--pool", choices=("shared", "process"), default="shared", help="where device memory comes from"
    )
    parser.add_argument(
        "--sync", choices=("attach", "buckets"), help="how weights travel; by default attach, with a shared pool"
    )
    parser.add_argument("--engine-dtype", choices=("float32", "bfloat16"), help="by default the recipe's")
    parser.add_argument("--steps", type=integer(0), help="steps of reinforcement learning")
    parser.add_argument("--warm-up-steps", type=integer(0), help="supervised steps before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero-advantages", action="store_true", help="control: nothing can be learned")
    parser.add_argument("--pause", action=flag, default=True, help="without, both sides stay resident")
    parser.add_argument("--prove-overwrite", action=flag, default=True, help="overwrite all free memory at the end")
    parser.add_argument("--kv-share", type=share, help="of the device's memory, for the engine's KV cache")
    parser.add_argument("--workspace-share", type=share, help="of the device's memory, for the trainer's workspace")
    parser.add_argument("--eval-every", type=integer(0), default=0, help="steps between held-out evaluations")
    parser.add_argument("--address", help="of a Ray cluster to join; by default a local one is started")
    parser.add_argument("--json", type=_file, metavar="FILE", help="file that gets the JSON line too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not on_gpu and options.address is None:
        parser.error(
            "--device is 'cuda' and this machine has no CUDA device, expected 'cpu', or --address of a cluster"
        )
    if options.ranks % options.ranks_per_gpu:
        parser.error(f"--ranks-per-gpu is {options.ranks_per_gpu}, expected a divisor of --ranks, {options.ranks}")
    options.sync = options.sync or ("attach" if options.pool == "shared" else "buckets")
    if options.sync == "attach" and options.pool != "shared":
        parser.error("--sync attach needs --pool shared: other memory cannot be attached to")
    return options


def _file(text: str) -> str:
    """Checked before the run rather than after it."""
    path = os.path.abspath(text)
    folder = os.path.dirname(path)
    if os.path.exists(path):
        fit = not os.path.isdir(path) and os.access(path, os.W_OK)
    else:
        fit = os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
    if not fit:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a file that can be written, in a directory that exists")
    return path


def chosen_recipe(options: argparse.Namespace) -> Recipe:
    """The named recipe, with what the options say in place of its own figures."""
    recipe = RECIPES[options.recipe or ("gpu" if options.device == "cuda" else "cpu")]
    named = {name: getattr(options, name) for name in ("steps", "warm_up_steps", "kv_share", "workspace_share")}
    if options.engine_dtype is not None:
        recipe = replace(recipe, model=replace(recipe.model, dtype=getattr(torch, options.engine_dtype)))
    return replace(recipe, **{name: value for name, value in named.items() if value is not None})


def main(arguments: list[str] | None = None) -> int:
    """Run the loop. Returns the exit status: 0, or OUT_OF_MEMORY_STATUS where the device was too small."""
    options = parse(arguments)
    report = Report(settings={name: value for name, value in vars(options).items() if name != "json"})
    started_here = not ray.is_initialized()
    if started_here:
        start_ray(options)
    try:
        with closing(Loop(options, chosen_recipe(options), report)) as loop:
            loop.run()
    except Exception as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        report.out_of_memory = str(reason).splitlines()[0]
        report.say(f"out of memory: {report.out_of_memory}")
    finally:
        if started_here:
            ray.shutdown()
    report.finish(options.json)
    return OUT_OF_MEMORY_STATUS if report.out_of_memory else 0


def start_ray(options: argparse.Namespace) -> None:
    """Join a cluster, or start one of this machine's own with room for all actors."""
    # Actors without a share of a GPU see none, as Ray will have it by default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local: dict[str, Any] = {}
    if options.address is None:
        local = {"num_cpus": max(os.cpu_count() or 1, 2 * options.ranks), "include_dashboard": False}
    ray.init(address=options.address or "local", logging_level=logging.ERROR, **local)


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error among the causes of this one that says that a device was too small, if there is one."""
    found = None
    while error is not None:
        if isinstance(error, (memsaver.OutOfMemoryError, torch.OutOfMemoryError)):
            found = error  # Ray's own error is one as well: the innermost speaks plainly
        inner = getattr(error, "cause", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__
    return found


if __name__ == "__main__":
    sys.exit(main())
