"""From problems to completions, rewards, and samples to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from .engine import Completion, SamplingParams
from .grpo import group_advantages
from .task import Problem, Task
from .trainer import Sample


@dataclass(frozen=True)
class Rollout:
    """Completions of a step's problems, groups side by side."""

    samples: list[Sample]
    reward: float  # mean
    length: float  # mean, in tokens
    truncated: float  # share of the completions that reached the longest length

    @property
    def num_tokens(self) -> int:
        return sum(len(each.completion) for each in self.samples)


class Rollouts:
    """All engines together: each gets a part of the problems."""

    def __init__(self, engines: Sequence[Any], task: Task, temperature: float) -> None:
        """`temperature`: of sampled completions."""
        self.engines, self.task, self.temperature = list(engines), task, temperature

    def complete(
        self,
        problems: Sequence[Problem],
        group: int = 1,
        greedy: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """`group` completions of each problem, side by side, in the order of the problems.

        An engine gets whole groups, and so computes a prompt once. `meanwhile` is called once, while the engines work.
        """
        task, count = self.task, len(self.engines)
        sampling = SamplingParams(
            0.0 if greedy else self.temperature, task.max_new_tokens, stop_tokens=task.tokenizer.stop_tokens
        )
        prompts = [task.tokenizer.encode_prompt(problem.prompt) for problem in problems]
        calls = [
            engine.generate.remote([prompt for prompt in prompts[rank::count] for _ in range(group)], sampling)
            for rank, engine in enumerate(self.engines)
        ]
        meanwhile()
        dealt = ray.get(calls)
        return [
            dealt[index % count][index // count * group + each]
            for index in range(len(prompts))
            for each in range(group)
        ]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        """Of as many completions of each problem. One that was cut off has no reward."""
        group, task = len(completions) // len(problems), self.task
        return [
            task.reward(problems[index // group].fields, task.tokenizer.decode(each.tokens))
            if each.finish_reason == "stop"
            else 0.0
            for index, each in enumerate(completions)
        ]

    def held_out_rewards(self) -> list[float]:
        """Of greedy completions of all held-out problems."""
        return self.rewards(self.task.held_out, self.complete(self.task.held_out, greedy=True))

    def rollout(
        self, prompts: int, group: int, zero_advantages: bool, meanwhile: Callable[[], None] = lambda: None
    ) -> Rollout:
        """Sampled completions, `group` of each of so many training problems, with their advantages."""
        problems = self.task.sample(prompts)
        completions = self.complete(problems, group, meanwhile=meanwhile)
        rewards = torch.tensor(self.rewards(problems, completions))
        advantages = group_advantages(rewards.view(prompts, group), zero_advantages).flatten().tolist()
        samples = [
            Sample(each.prompt, each.tokens, each.logprobs, advantage)
            for each, advantage in zip(completions, advantages)
        ]
        tokens, cut = (
            sum(len(each.tokens) for each in completions),
            [each.finish_reason == "length" for each in completions],
        )
        return Rollout(samples, float(rewards.mean()), tokens / len(samples), sum(cut) / len(samples))
