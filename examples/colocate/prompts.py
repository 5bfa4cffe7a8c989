"""A task of the user: prompts from JSON lines, a reward from a Python file, the tokenizer of a model's folder."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .task import Problem, Task, TaskError, Tokenizer

Reward = Callable[[Mapping[str, Any], str], float]


def prompts(
    path: Path,
    reward_path: Path,
    tokenizer: Tokenizer,
    held_out: int = 64,
    max_new_tokens: int = 512,
    seed: int = 0,
) -> Task:
    """Each line is an object with a text `prompt`. The function `reward(fields, completion)` gets all of its fields."""
    problems = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            fields = json.loads(line)
            if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"]:
                raise TaskError(f"{path}, line {number}: {line[:80]!r}; expected an object with a text 'prompt'")
            problems.append(Problem(fields["prompt"], fields))
    except (OSError, UnicodeError, json.JSONDecodeError) as error:
        raise TaskError(f"{path}: {error}; expected JSON lines") from error
    random.Random(seed).shuffle(problems)
    reward = load_reward(reward_path)
    return Task(problems[held_out:], problems[:held_out], tokenizer, reward, max_new_tokens, seed=seed)


def load_reward(path: Path) -> Reward:
    """The function `reward(fields, completion)` of a Python file, which is run. Its results are checked."""
    spec = importlib.util.spec_from_file_location("user_reward", path)
    try:
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = module.reward
        if not callable(function):
            raise TypeError(f"reward is {function!r}")
    except Exception as error:
        raise TaskError(
            f"{path}: {error!r}; expected a Python file with a function reward(fields, completion)"
        ) from error

    def reward(fields: Mapping[str, Any], completion: str) -> float:
        value = function(fields, completion)
        if not isinstance(value, (int, float)) or value != value:
            raise TaskError(f"{path}: reward() returned {value!r}; expected a number")
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

    def encode_prompt(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def encode_completion(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), *self.stop_tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
