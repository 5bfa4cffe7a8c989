"""Chains of sums with their steps: a generated task that a small model learns from scratch in two minutes.

A prompt is an example, the same in all prompts, and a problem: `"12+34=21,64 17+25+09="`. Its completion has the first
number, and the sum after each further one: `"71,24,15"` for 17, 42 and 51. All numbers have as many digits, and in
completions the ones digit comes first: each digit then follows from the text before it, which suits a model that writes
left to right. The reward is for the last number alone.

Demonstrations often omit every carry. A model that imitates them learns to add digit by digit, mostly without carrying.
Reinforcement learning then teaches the carry from the reward alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations_with_replacement
from typing import Any

from .task import CharacterTokenizer, Problem, Task

VOCABULARY = "0123456789+=, \n"
_DIGITS = 2


def arithmetic(
    largest: int = 24, terms: int = 4, problems: int = 4096, held_out: int = 256, slip_share: float = 0.7, seed: int = 0
) -> Task:
    """Sums of `terms` numbers up to `largest`. `slip_share`: of demonstrations, those that omit carries.

    Each problem has other numbers: those of a held-out one are in no other problem, in any order.
    """
    draw, every = random.Random(seed), list(combinations_with_replacement(range(largest + 1), terms))
    found = [draw.sample(numbers, terms) for numbers in draw.sample(every, problems)]
    example = f"{_sum([12, 34])}{steps([12, 34])} "
    made = [Problem(example + _sum(numbers), {"numbers": numbers}) for numbers in found]

    def demonstrate(fields: Mapping[str, Any], draw: random.Random) -> str:
        return steps(fields["numbers"], _add_digits if draw.random() < slip_share else int.__add__)

    tokens = terms * (_DIGITS + 1)
    return Task(made[held_out:], made[:held_out], CharacterTokenizer(VOCABULARY), reward, tokens, demonstrate, seed)


def reward(fields: Mapping[str, Any], completion: str) -> float:
    """1.0 if the last number of a completion is the sum of all, else 0.0."""
    return float(completion.rpartition(",")[2] == _reversed(sum(fields["numbers"])))


def steps(numbers: Sequence[int], add: Callable[[int, int], int] = int.__add__) -> str:
    """The completion: the first number, and the sum after each further one."""
    return ",".join(map(_reversed, accumulate(numbers, add)))


def _sum(numbers: Sequence[int]) -> str:
    return "+".join(f"{number:0{_DIGITS}}" for number in numbers) + "="


def _reversed(number: int) -> str:
    return f"{number:0{_DIGITS}}"[::-1]


def _add_digits(one: int, other: int) -> int:
    """The sum without a carry, of numbers of two digits."""
    return (one // 10 + other // 10) % 10 * 10 + (one + other) % 10
