"""Additions to solve: a generated task with a small character vocabulary and a reward that can be verified.

A prompt is `"17+25="`, its answer the sum with the ones digit first, `"24"`, ended by a newline: in that order each
digit follows from the text before it, which suits a model that writes left to right.

Demonstrations often omit the carry. A model that imitates them learns to add digit by digit, and to omit the carry.
Reinforcement learning then teaches the carry from the reward alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = "0123456789+=\n "
STOP_TOKEN = VOCABULARY.index("\n")
PAD_TOKEN = VOCABULARY.index(" ")


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character. Raises ValueError for a character outside the vocabulary."""
    unknown = sorted(set(text) - set(VOCABULARY))
    if unknown:
        raise ValueError(f"text has {unknown[0]!r}; expected characters of {VOCABULARY!r}")
    return [VOCABULARY.index(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids. Raises ValueError for an id outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < len(VOCABULARY):
            raise ValueError(f"token is {token}; expected 0 to {len(VOCABULARY) - 1}")
    return "".join(VOCABULARY[token] for token in tokens)


@dataclass(frozen=True)
class Problem:
    """The sum of two numbers."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The right completion, without the newline that ends it."""
        return str(self.left + self.right)[::-1]

    @property
    def slip(self) -> str:
        """The sum without any carry."""
        left, right = str(self.left)[::-1], str(self.right)[::-1]
        digits = [
            (int(left[place : place + 1] or "0") + int(right[place : place + 1] or "0")) % 10
            for place in range(max(len(left), len(right)))
        ]
        return str(sum(digit * 10**place for place, digit in enumerate(digits)))[::-1]

    @property
    def carries(self) -> bool:
        return self.answer != self.slip


def reward(problem: Problem, completion: str) -> float:
    """1.0 for the right answer ended by a newline, else 0.0."""
    return float(completion == problem.answer + "\n")


class Arithmetic:
    """All additions up to a largest operand, split into those to train on and those held out.

    Problems that carry make up `carry_share` of both, as closely as there are enough others; the split is random,
    and disjoint.
    """

    def __init__(self, largest: int = 49, held_out: int = 256, carry_share: float = 0.6, seed: int = 0) -> None:
        if largest < 5:
            raise ValueError(f"largest is {largest}; expected 5 or more, so that there are sums that carry")
        if not 0 < carry_share < 1:
            raise ValueError(f"carry_share is {carry_share}; expected a share between 0 and 1")
        self._random = random.Random(seed)
        numbers = range(largest + 1)
        problems = [Problem(left, right) for left in numbers for right in numbers]
        carrying = [problem for problem in problems if problem.carries]
        plain = [problem for problem in problems if not problem.carries]
        self._random.shuffle(plain)
        problems = carrying + plain[: round(len(carrying) * (1 - carry_share) / carry_share)]
        self._random.shuffle(problems)
        if not 0 < held_out < len(problems):
            raise ValueError(f"held_out is {held_out}; expected 1 to {len(problems) - 1} of {len(problems)} problems")
        self.held_out, self.train = problems[:held_out], problems[held_out:]

    def random_state(self) -> list[Any]:
        """The state of the random numbers, ready for JSON. The next draws follow from it."""
        version, words, gauss = self._random.getstate()
        return [version, list(words), gauss]

    def set_random_state(self, state: Sequence[Any]) -> None:
        """Continue from the state of another instance of the same task."""
        version, words, gauss = state
        self._random.setstate((version, tuple(words), gauss))

    def sample(self, count: int) -> list[Problem]:
        """Distinct training problems."""
        if not 0 < count <= len(self.train):
            raise ValueError(f"count is {count}; expected 1 to {len(self.train)}")
        return self._random.sample(self.train, count)

    def demonstrations(self, count: int, slip_share: float) -> list[tuple[str, str]]:
        """(prompt, completion) of training problems, drawn with repetition.

        A completion omits the carry with probability `slip_share`.
        """
        if not 0 <= slip_share <= 1:
            raise ValueError(f"slip_share is {slip_share}; expected a share from 0 to 1")
        return [
            (problem.prompt, (problem.slip if self._random.random() < slip_share else problem.answer) + "\n")
            for problem in self._random.choices(self.train, k=count)
        ]

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer, with its newline."""
        return max(len(problem.answer) for problem in self.train + self.held_out) + 1
