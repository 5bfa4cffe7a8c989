"""A task: problems to train on and others held out, the reward of a completion, and demonstrations for a warm-up."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .trainer.interface import Sample


class TaskError(ValueError):
    """A task's file, folder or setting is not as expected."""


@dataclass(frozen=True)
class Problem:
    """A prompt, and the fields that the reward reads."""

    prompt: str
    fields: Mapping[str, Any]


class Tokenizer(Protocol):
    """Text to token ids and back. A completion ends with a stop token, which is no part of its text."""

    stop_tokens: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class CharacterTokenizer:
    """A token for each character of a vocabulary, whose last one ends a completion."""

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.stop_tokens: tuple[int, ...] = (len(vocabulary) - 1,)

    def encode(self, text: str) -> list[int]:
        return [self.vocabulary.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.vocabulary[token] for token in tokens if token not in self.stop_tokens)


@dataclass
class Task:
    """What a run learns. A function makes one: `arithmetic`, `countdown`, `prompts`, or one of the user's.

    `reward(fields, completion)`: the worth of a completion's text, such as 0 or 1. `demonstrate(fields, random)`: the
    text of a completion to imitate; None: there are no demonstrations. Raises TaskError without problems of both kinds.
    """

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    tokenizer: Tokenizer
    reward: Callable[[Mapping[str, Any], str], float]
    max_new_tokens: int
    demonstrate: Callable[[Mapping[str, Any], random.Random], str] | None = None
    seed: int = 0
    draws: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.train or not self.held_out:
            raise TaskError(f"{len(self.train)} problems to train on, {len(self.held_out)} held out; expected both")
        self.draws = random.Random(self.seed)

    def sample(self, count: int) -> list[Problem]:
        """Distinct problems to train on."""
        if not 0 < count <= len(self.train):
            raise TaskError(f"count is {count}; expected 1 to {len(self.train)}")
        return self.draws.sample(self.train, count)

    def demonstrations(self, count: int) -> list[Sample]:
        """Completions to imitate, of problems to train on, which are drawn with repetition."""
        if self.demonstrate is None:
            raise TaskError("the task has no demonstrations; expected a run without a warm-up")
        encode, stop = self.tokenizer.encode, self.tokenizer.stop_tokens
        return [
            Sample(encode(problem.prompt), [*encode(self.demonstrate(problem.fields, self.draws)), *stop])
            for problem in self.draws.choices(self.train, k=count)
        ]

    def set_random_state(self, state: Sequence[Any]) -> None:
        """Continue from `draws.getstate()` of another instance of the same task, also after a way through JSON."""
        version, words, gauss = state
        self.draws.setstate((version, tuple(words), gauss))
