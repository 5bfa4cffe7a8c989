"""From problems to completions, rewards, and batches to train on."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The engines, as one: problems are dealt out to all of them."""

    def __init__(self, engines: Sequence[Any], task: Arithmetic) -> None:
        self.engines, self.task = list(engines), task

    def complete(self, problems: Sequence[Problem], temperature: float) -> list[Completion]:
        """One completion of each problem, in their order. At temperature 0 it is greedy."""
        sampling = SamplingParams(temperature, max_new_tokens=self.task.longest_answer, stop_tokens=(STOP_TOKEN,))
        prompts = [encode(problem.prompt) for problem in problems]
        count = len(self.engines)
        dealt = ray.get(
            [engine.generate.remote(prompts[rank::count], sampling) for rank, engine in enumerate(self.engines)]
        )
        return [dealt[index % count][index // count] for index in range(len(prompts))]

    def greedy_reward(self, problems: Sequence[Problem]) -> float:
        """Mean reward of greedy completions."""
        completions = self.complete(problems, temperature=0.0)
        return sum(_rewards(problems, completions)) / len(problems)

    def rollout(self, prompts: int, group: int, zero_advantages: bool) -> Rollout:
        """Sampled completions, `group` of each of so many training problems, with their advantages."""
        problems = [problem for problem in self.task.sample(prompts) for _ in range(group)]
        completions = self.complete(problems, temperature=1.0)
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
    """What a completion says; nothing where a model with a larger vocabulary speaks beyond the task's."""
    return decode(tokens) if all(token < len(VOCABULARY) for token in tokens) else ""
