"""A task of the user: prompts from JSON lines, a reward from a Python file, the tokenizer of a model's folder."""

from __future__ import annotations

import json
import math
import random
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .task import Problem, Task, TaskError, Tokenizer

Reward = Callable[[Mapping[str, Any], str], float]


def prompts(
    path: Path, reward_path: Path, tokenizer: Tokenizer, held_out: int = 64, max_new_tokens: int = 512, seed: int = 0
) -> Task:
    """Each line is an object with a text `prompt`. The function `reward(fields, completion)` gets all of its fields."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        raise TaskError(f"{path}: {error}; expected JSON lines") from error
    problems = [_problem(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    random.Random(seed).shuffle(problems)
    reward = load_reward(reward_path)
    return Task(problems[held_out:], problems[:held_out], tokenizer, reward, max_new_tokens, seed=seed)


def _problem(line: str, where: str) -> Problem:
    try:
        fields = json.loads(line)
        return Problem(fields["prompt"] + "", fields)
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{where}: {line[:80]!r}; expected a JSON object with a text 'prompt'") from error


def load_reward(path: Path) -> Reward:
    """The function `reward(fields, completion)` of a Python file, which is run. Its results are checked."""
    try:
        function = runpy.run_path(str(path), run_name="reward")["reward"]
        if not callable(function):
            raise TypeError(f"reward is {function!r}")
    except Exception as error:
        expected = "a Python file with a function reward(fields, completion)"
        raise TaskError(f"{path}: {error!r}; expected {expected}") from error

    def reward(fields: Mapping[str, Any], completion: str) -> float:
        value = function(fields, completion)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TaskError(f"{path}: reward() returned {value!r}; expected a finite number")
        return float(value)

    return reward


class TextTokenizer:
    """That of a Hugging Face folder. Its end-of-text token ends a completion."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # slow to import

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise TaskError(f"{folder}: {error}; expected a folder with a tokenizer") from error
        if self._tokenizer.eos_token_id is None:
            raise TaskError(f"{folder}: the tokenizer has no end-of-text token; expected one, to end completions")
        self.stop_tokens: tuple[int, ...] = (self._tokenizer.eos_token_id,)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
