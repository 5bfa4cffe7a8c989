"""From problems to completions, rewards, and batches to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from .arithmetic import PAD_TOKEN, STOP_TOKEN, VOCABULARY, Arithmetic, Problem, decode, encode, reward
from .engine import Completion, SamplingParams
from .grpo import group_advantages
from .trainer import TokenBatch


@dataclass(frozen=True)
class Rollout:
    """Completions of a step's problems, groups side by side, and their mean reward."""

    batch: TokenBatch
    reward: float
    num_tokens: int  # of the completions


class Players:
    """All engines together: each gets a part of the problems."""

    def __init__(self, engines: Sequence[Any], task: Arithmetic) -> None:
        self.engines, self.task = list(engines), task

    def complete(
        self, problems: Sequence[Problem], temperature: float, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """One completion of each problem, in their order. At temperature 0 it is greedy. `meanwhile` is called once,
        while the engines work.
        """
        sampling = SamplingParams(temperature, max_new_tokens=self.task.longest_answer, stop_tokens=(STOP_TOKEN,))
        prompts = [encode(problem.prompt) for problem in problems]
        count = len(self.engines)
        calls = [engine.generate.remote(prompts[rank::count], sampling) for rank, engine in enumerate(self.engines)]
        meanwhile()
        dealt = ray.get(calls)
        return [dealt[index % count][index // count] for index in range(len(prompts))]

    def greedy_reward(self, problems: Sequence[Problem]) -> float:
        """Mean reward of greedy completions."""
        completions = self.complete(problems, temperature=0.0)
        return sum(_rewards(problems, completions)) / len(problems)

    def rollout(
        self, prompts: int, group: int, zero_advantages: bool, meanwhile: Callable[[], None] = lambda: None
    ) -> Rollout:
        """Sampled completions, `group` of each of so many training problems, with their advantages."""
        problems = [problem for problem in self.task.sample(prompts) for _ in range(group)]
        completions = self.complete(problems, 1.0, meanwhile)
        rewards = torch.tensor(_rewards(problems, completions))
        batch = TokenBatch.build(
            [each.prompt for each in completions],
            [each.tokens for each in completions],
            PAD_TOKEN,
            [each.logprobs for each in completions],
            group_advantages(rewards.view(prompts, group), zero_advantages).flatten(),
        )
        return Rollout(batch, float(rewards.mean()), sum(len(each.tokens) for each in completions))


def demonstration_batch(task: Arithmetic, count: int, slip_share: float) -> TokenBatch:
    """Demonstrations to imitate."""
    pairs = task.demonstrations(count, slip_share)
    return TokenBatch.build([encode(prompt) for prompt, _ in pairs], [encode(text) for _, text in pairs], PAD_TOKEN)


def _rewards(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
    return [reward(problem, _text(each.tokens)) for problem, each in zip(problems, completions)]


def _text(tokens: Sequence[int]) -> str:
    """The text of a completion; empty for tokens outside the task's vocabulary, which a larger model can sample."""
    return decode(tokens) if all(token < len(VOCABULARY) for token in tokens) else ""
