"""Checks of each step: a pause must change neither contents nor addresses. A check that fails raises ProofError."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from .errors import ProofError
from .model import parameter_shapes
from .recipes import MIB, Recipe
from .report import Report
from .rollout import Rollouts
from .task import Problem
from .trainer import TokenStatistics
from .turns import Turns
from .weight_sync import WeightSync

__all__ = ["ProofError", "Proofs"]


class Proofs:
    """The checks, which `report.proofs` counts by name."""

    def __init__(
        self, recipe: Recipe, turns: Turns, players: Rollouts, weights: WeightSync, probes: Sequence[Problem]
    ) -> None:
        """Notes the addresses of the engines' tensors. `probes`: problems to solve before and after a pause."""
        self.recipe, self.turns, self.players, self.probes = recipe, turns, players, list(probes)
        self.engines, self.trainers = turns.engines, turns.trainers
        self.report: Report = turns.report
        self._weights = weights
        self._addresses = ray.get([engine.addresses.remote() for engine in self.engines])

    def weights(self) -> None:
        """Each engine's tensors equal, bit for bit, a load of the trainer's checkpoint in the engine's dtype."""
        counts = [0] * len(self.engines)
        for bucket in self._weights.buckets():
            compared = ray.get([engine.compare_bucket.remote(bucket) for engine in self.engines])
            for rank, (count, differing) in enumerate(compared):
                counts[rank] += count
                if differing:
                    raise ProofError(f"engine {rank} does not have the trainer's weights: {', '.join(differing[:4])}")
        expected = len(parameter_shapes(self.recipe.model))
        if counts != [expected] * len(counts):
            raise ProofError(f"the checkpoint has {counts} weights; expected {expected}")
        self.report.proofs["weights are the checkpoint's"] += 1

    def pause(self, step: int) -> None:
        """Greedy tokens are the same before and after a pause in which the trainer overwrites its workspace."""
        before = [each.tokens for each in self.players.complete(self.probes, greedy=True)]
        self.turns.enter("away")
        ray.get([trainer.scribble.remote(step) for trainer in self.trainers])
        self.turns.enter("rollout")
        after = [each.tokens for each in self.players.complete(self.probes, greedy=True)]
        if before != after:
            raise ProofError(f"greedy tokens changed over a pause: {before} before, {after} after")
        self.addresses()
        self.report.proofs["tokens are the same"] += 1

    def room(self) -> None:
        """In the phase "train": the memory of the trainers was free before they resumed.

        With a shared pool, engines may still pause when a trainer begins to resume. Then the check is that engines hold
        no memory now.
        """
        if not self.turns.pausing:
            return
        if self.turns.pool == "shared":
            held = ray.get([engine.mapped_bytes.remote() for engine in self.engines])
            if any(held):
                raise ProofError(f"in the trainer's turn the engines hold {held} bytes")
            self.report.proofs["engines hold nothing"] += 1
            return
        for rank, before in enumerate(ray.get([trainer.before_resume.remote() for trainer in self.trainers])):
            if before is None or before.free < before.needed:
                raise ProofError(f"trainer {rank} resumed over memory that was not free: it saw {before}")
        self.report.proofs["memory was free"] += 1

    def steps(self, step: int) -> None:
        """The trainers have applied each update of the first `step` steps once."""
        taken = ray.get([trainer.steps_taken.remote() for trainer in self.trainers])
        expected = step * self.recipe.minibatches
        if taken != [expected] * len(taken):
            raise ProofError(f"in step {step} the trainers have applied {taken} updates; expected {expected}")
        self.report.proofs["each step is applied once"] += 1

    def logprobs(self, gap: TokenStatistics) -> None:
        """Engine and trainer give the tokens of a rollout the same log-probabilities, within bounds of the dtype.

        A NaN fails each comparison.
        """
        bounds = self.recipe.gap_bounds
        largest, mean = gap.largest_gap, gap.mean("gap")
        if not (largest <= bounds.largest and mean <= bounds.mean):
            raise ProofError(
                f"log-probabilities of engine and trainer differ by {largest} nats at most and {mean} in the mean of "
                f"{gap.tokens:.0f} tokens; expected {bounds.largest} and {bounds.mean} ({self.recipe.model.dtype})"
            )
        self.report.proofs["log-probabilities agree"] += 1

    def addresses(self) -> None:
        """The engines' tensors have the addresses that they had after the build."""
        if ray.get([engine.addresses.remote() for engine in self.engines]) != self._addresses:
            raise ProofError("the engine's tensors have moved")
        self.report.proofs["addresses are the same"] += 1

    def overwrite(self, seed: int) -> None:
        """Graphs decode the tokens of eager decoding, after the trainer overwrote all memory that it could allocate."""
        sizes = ray.get(self.engines[0].batch_sizes.remote())
        before = ray.get([engine.greedy.remote(size, False) for engine in self.engines for size in sizes])
        self.turns.enter("away")
        # One after the other: on the host driver all ranks share a device.
        written = [ray.get(trainer.overwrite_free.remote(seed)) for trainer in self.trainers]
        ray.get([trainer.scribble.remote(seed) for trainer in self.trainers])
        self.turns.enter("rollout")
        after = ray.get([engine.greedy.remote(size, True) for engine in self.engines for size in sizes])
        if before != after:
            wrong = [size for size, one, other in zip(sizes * len(self.engines), before, after) if one != other]
            raise ProofError(f"greedy tokens differ from the eager ones at batch sizes {wrong}")
        self.report.proofs["overwritten"] += len(after)
        self.report.say(
            f"last check: while the engine was paused, the trainer overwrote its workspace and all that was free "
            f"besides, {sum(written) / MIB:.0f} MiB; the engine then gave the same {self.recipe.proof_tokens} tokens "
            f"as before, at each of the batch sizes {', '.join(map(str, sizes))}"
        )
