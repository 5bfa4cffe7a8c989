"""Checks of each step, around the methods of the loop. One that fails raises CheckError and ends the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import torch

from memsaver.ray import Turn

from ..engine import Completion
from ..loop import Loop
from ..options import Options
from ..recipes import Recipe
from ..rollout import Rollout
from ..task import Task
from ..trainer.interface import Sample, StepMetrics, TokenStatistics, standard_errors
from .checked_actors import CheckedEngine, CheckedTrainer, CheckError

# Nats between the engine's log-probability of a token and the trainer's: of one token at most, and in the mean. Wrong
# weights, masks or positions make gaps of several nats. In fp32 sums have another order; bf16 rounds each activation.
GAP_BOUNDS = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (1.0, 0.05)}
Z_BOUND = 5.0  # standard errors
COUNTS = ("prefix_hit_tokens", "preemptions", "recomputed")


class CheckedLoop(Loop):
    """A loop that checks its own assumptions. `passed`: how often each check has held."""

    kinds = {"engine": CheckedEngine, "trainer": CheckedTrainer}

    def __init__(self, options: Options, recipe: Recipe, task: Task) -> None:
        super().__init__(options, recipe, task)
        self.exact = {recipe.model.dtype, recipe.trainer.dtype} == {torch.float32}
        self.bounds = GAP_BOUNDS[torch.float32 if self.exact else torch.bfloat16]
        self.passed: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # of the engines, over all steps
        self.surprise = [0.0, 0.0]  # of all steps: see TokenStatistics

    def set_up(self) -> None:
        super().set_up()
        self._addresses = self.ask("engine.addresses")
        self._layouts = self.ask("engine.weight_layout")[: self.options.engine_ranks]
        self._counted = self._count()
        self._written: list[dict[str, int]] = []  # those of the weights that each rank of an engine should have

    def phases(self) -> dict[str, dict[str, Any]]:
        return {**super().phases(), "away": {}}

    def backups(self) -> dict[str, dict[str, dict[str, str]]]:
        return {**super().backups(), "away": {"engine": {self.tags["engine"][0]: "host"}}}  # no sync follows

    def enter(self, phase: str) -> Turn:
        """The engines' weights are the same after a pause, under the same addresses."""
        if self.group.entered == "train":
            self.call("trainer", "keep")
        turn = super().enter(phase)
        if phase == "train":
            held = self.call("engine", "mapped_bytes", self.tags["engine"])
            if self.options.memory != "resident":
                self.check("the engines' memory is free", not any(held), f"they hold {held} bytes")
        if phase == "rollout":
            if self.options.memory != "to-cpu":
                same = self.ask("engine.addresses") == self._addresses
                self.check("addresses are the same", same, "tensors moved")
            self._engines_have(self._written, "weights outlast a pause")
        return turn

    def write_weights(self) -> None:
        """Each engine's weights are, bit for bit, the trainer's."""
        super().write_weights()
        self._written = [self.ask("trainer.weights.checksums", each)[0] for each in self._layouts]
        self._engines_have(self._written, "weights are the trainer's")

    def rollout(self) -> Rollout:
        """Before it: running requests survive a pause in which the trainers overwrite all free memory."""
        prompts = self.rollouts.prompts(self.task.held_out[: self.recipe.probes])
        sampling = self.rollouts.sampling(greedy=True)
        before = self.call("engine", "generate", prompts, sampling)
        self.call("engine", "start", prompts, sampling)
        self.enter("away")
        self.call("trainer", "overwrite")
        self.enter("rollout")
        after = self.call("engine", "finish")
        self._check_probes([(one, *other) for sides in zip(before, after) for one, other in zip(*sides)])
        rollout = super().rollout()
        if not self.options.zero_advantages:
            # In fp32 the mean of eight rewards of 0.1 is another number.
            deviation, mean = torch.std_mean(rollout.rewards.double(), 1, keepdim=True, unbiased=False)
            expected = ((rollout.rewards - mean) / (deviation + 1e-4)).flatten()
            found = torch.tensor([each.advantage for each in rollout.samples])
            wrong = int(((found - expected).abs() > 1e-3).sum())
            self.check("advantages are of the group", wrong == 0, f"{wrong} are not (reward - mean) / deviation")
        return rollout

    def train(self, samples: Sequence[Sample]) -> tuple[StepMetrics, TokenStatistics]:
        """The tokens are those of the trainer's policy. Each is learned from, and each update applied, once."""
        metrics, found = super().train(samples)
        (most, mean), largest_gap, mean_gap = self.bounds, float(found.gap_N.max()), float(found.gap_N.mean())
        is_near = largest_gap <= most and mean_gap <= mean  # False for NaN
        text = f"they differ by {largest_gap:.2g} nats at most and {mean_gap:.2g} in the mean"
        self.check("log-probabilities agree", is_near, f"{text}; expected {most:g} and {mean:g}")
        sampled = torch.tensor([value for each in samples for value in each.logprobs or ()]).double()
        is_whole = torch.equal(sampled.sort().values, found.sampler_N.sort().values)
        text = f"the trainers had {len(found.gap_N)} tokens, or others than the {len(sampled)} that were sampled"
        self.check("each token is learned from once", is_whole, text)
        self.surprise = [sum(pair) for pair in zip(self.surprise, found.surprise)]
        z = standard_errors(*self.surprise)
        text = f"mean(-log p) is {z:+.1f} standard errors from the entropy; expected {Z_BOUND:g} at most"
        self.check("tokens are the policy's", abs(z) <= Z_BOUND, text)
        due = (self.steps_done + 1) * self.recipe.minibatches
        taken = self.ask("trainer.steps_taken")
        self.check("each update is applied once", set(taken) == {due}, f"{taken} updates; expected {due}")
        return metrics, found

    def report(self, rollout: Rollout, metrics: StepMetrics, statistics: TokenStatistics) -> None:
        """Also a line of the log."""
        super().report(rollout, metrics, statistics)
        now = self._count()
        counts, self._counted = now - self._counted, now
        self.counts += counts
        capped_N = statistics.capped_N(self.recipe.trainer.weight_cap)
        moved = {
            turn.phase: [sum(each.copied_bytes for ranks in side.values() for each in ranks) for side in sides]
            for turn in self.turns
            for sides in [(turn.paused, turn.resumed)]
        }
        self.write_log(
            {
                "step": self.steps_done,
                **{name: getattr(rollout, name) for name in ("reward", "length", "truncated")},
                **asdict(metrics),
                "entropy": float(statistics.entropy_N.mean()),
                "gap": float(statistics.gap_N.mean()),
                "capped": float(capped_N.double().mean()),
                "largest_gap": float(statistics.gap_N.max()),
                "tokens": len(statistics.gap_N),
                "z": standard_errors(*self.surprise),
                "seconds": {**self.seconds, "turns": {turn.phase: turn.seconds for turn in self.turns}},
                "tokens_per_second": rollout.num_tokens / self.seconds["rollout"],
                "moved": moved,  # by phase: bytes out and in of the turn into it
                **{name: counts[name] for name in COUNTS},
            }
        )

    def check_counts(self) -> None:
        """At the end of a run: its checks had something to check, if the task and the memory allow that."""
        block, encode = self.recipe.engine.block_size, self.task.tokenizer.encode
        shares_blocks = any(len(encode(each.prompt)) > block for each in self.task.train)
        # With a model a cache of all free memory may be large enough.
        possible = {"prefix_hit_tokens": shares_blocks, "preemptions": not self.options.model}
        for name in COUNTS:
            if possible.get(name, True):
                self.check(f"{name} above zero", self.counts[name] > 0, f"they are {self.counts[name]}")

    def check(self, name: str, holds: bool, found: str) -> None:
        """Raises CheckError if it does not hold."""
        if not holds:
            raise CheckError(f"{name}: {found[:400]}, in step {self.steps_done + 1}")
        self.passed[name] += 1

    def _check_probes(self, probes: Sequence[tuple[Completion, int, Completion]]) -> None:
        """Each is a completion without a pause, the number of its tokens at the pause, and the one with the pause.
        One that had ended before the pause proves nothing; a step without others does not count.

        In fp32 all tokens are the same. Recomputing in bf16 rounds otherwise, which can choose between two tokens: the
        first token after the pause is the same for half of the requests, and all before the first difference agree.
        """
        running = [probe for probe in probes if probe[1] < len(probe[0].tokens)]
        if not running:
            return
        same, gaps = 0, [0.0]
        for one, kept, other in running:
            pairs = zip(zip(one.tokens, one.logprobs), zip(other.tokens, other.logprobs))
            agree = list(takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))
            gaps += [abs(ours[1] - theirs[1]) for ours, theirs in agree]
            same += one.tokens == other.tokens if self.exact else len(agree) > kept
        gap = float(torch.tensor(gaps).max())  # NaN if one is
        needed = len(running) if self.exact else len(running) / 2
        text = f"{same} of {len(running)} completions are the same, log-probabilities differ by {gap:.2g}"
        self.check("tokens are the same after a pause", same >= needed and gap <= self.bounds[0], text)

    def write_log(self, line: Mapping[str, Any]) -> None:
        """At once: it outlasts any later error."""
        if self.options.log is not None:
            with open(self.options.log, "a") as file:
                file.write(json.dumps(line, default=str) + "\n")

    def _engines_have(self, expected: list[dict[str, int]], name: str) -> None:
        for rank, found in enumerate(self.ask("engine.checksums") if expected else ()):
            wanted = expected[rank % len(expected)]
            wrong = [each for each in {**found, **wanted} if found.get(each) != wanted.get(each)]
            self.check(name, not wrong, f"engine {rank} has others: {', '.join(wrong[:4])}")

    def _count(self) -> Counter[str]:
        return sum((Counter(vars(each)) for each in self.ask("engine.counts")[:: self.options.engine_ranks]), Counter())


def verdict(before: Sequence[float], after: Sequence[float]) -> tuple[bool, str]:
    """Whether rewards of the same problems have risen by more than two standard errors, and that in words."""
    rises = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    rise, error = float(rises.mean()), float(rises.std()) / math.sqrt(len(rises))
    learned = rise > 2 * error
    text = f"held-out reward {sum(before) / len(before):.3f} -> {sum(after) / len(after):.3f}"
    said = "learned" if learned else "NOT learned"
    return learned, f"{text}, {rise:+.3f} with a standard error of {error:.3f}: {said}"
