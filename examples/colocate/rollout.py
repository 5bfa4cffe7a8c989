"""From problems to completions, rewards, and samples to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError
from torch import Tensor

from .engine import Completion, SamplingParams
from .grpo import group_advantages
from .task import Problem, Task
from .trainer.interface import Sample


class HungError(RuntimeError):
    """An actor has not answered in time."""


def answers(calls: Sequence[Any], what: str, seconds: float) -> list[Any]:
    """The results of calls to the actors of a role, by rank. Raises HungError, which names the ranks that hang."""
    try:
        found: list[Any] = ray.get(list(calls), timeout=seconds)
        return found
    except GetTimeoutError:
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        ranks = ", ".join(str(rank) for rank, call in enumerate(calls) if call in late)
        raise HungError(f"{what}() of rank {ranks} has not answered in {seconds:g} s") from None


@dataclass(frozen=True)
class Rollout:
    """Completions of a step's problems, groups side by side."""

    samples: list[Sample]
    rewards: Tensor  # of the completions: fp32 [prompts, group]
    truncated: float  # share of the completions that reached the longest length

    @property
    def reward(self) -> float:
        """The mean."""
        return float(self.rewards.mean())

    @property
    def length(self) -> float:
        """The mean, in tokens."""
        return self.num_tokens / len(self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(each.completion) for each in self.samples)


class Rollouts:
    """All engines together: each gets a part of the problems."""

    def __init__(
        self, engines: Sequence[Any], task: Task, temperature: float, answer_within: float = 600.0, ranks: int = 1
    ) -> None:
        """`temperature`: of sampled completions. `answer_within`: seconds. `ranks`: of each engine, side by side."""
        self.engines, self.task, self.temperature = list(engines), task, temperature
        self.answer_within, self.ranks = answer_within, ranks

    def sampling(self, greedy: bool) -> SamplingParams:
        temperature = 0.0 if greedy else self.temperature
        return SamplingParams(temperature, self.task.max_new_tokens, stop_tokens=self.task.tokenizer.stop_tokens)

    def prompts(self, problems: Sequence[Problem]) -> list[list[int]]:
        return [self.task.tokenizer.encode(problem.prompt) for problem in problems]

    def complete(self, problems: Sequence[Problem], group: int = 1, greedy: bool = False) -> list[Completion]:
        """`group` completions of each problem, side by side, in the order of the problems.

        An engine gets whole groups, and so computes a prompt once. All ranks of an engine get the same call.
        """
        count, sampling = len(self.engines) // self.ranks, self.sampling(greedy)
        prompts = self.prompts(problems)
        dealt = [[prompt for prompt in prompts[number::count] for _ in range(group)] for number in range(count)]
        calls = [actor.generate.remote(dealt[at // self.ranks], sampling) for at, actor in enumerate(self.engines)]
        found = [iter(part) for part in answers(calls, "engine.generate", self.answer_within)[:: self.ranks]]
        return [next(found[at % count]) for at in range(len(prompts)) for _ in range(group)]

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

    def rollout(self, prompts: int, group: int, zero_advantages: bool) -> Rollout:
        """Sampled completions, `group` of each of so many training problems, with their advantages."""
        problems = self.task.sample(prompts)
        completions = self.complete(problems, group)
        rewards = torch.tensor(self.rewards(problems, completions)).view(prompts, group)
        advantages = group_advantages(rewards, zero_advantages).flatten().tolist()
        samples = [Sample(each.prompt, each.tokens, each.logprobs, own) for each, own in zip(completions, advantages)]
        truncated = sum(each.finish_reason == "length" for each in completions) / len(completions)
        return Rollout(samples, rewards, truncated)
