"""Countdown: write an expression of some numbers, each used once at most, that gives a target.

The task of "TinyZero", for a model with a text tokenizer. A completion ends with its answer in tags:
`<answer>(3 + 7) * 25</answer>`.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from .task import Problem, Task, Tokenizer

_PROMPT = (
    "Write an arithmetic expression of the numbers {numbers} that equals {target}. Use each number at most once, "
    "and only + - * / and parentheses. Think first, then give the expression in <answer> </answer> tags, such as "
    "<answer>(1 + 2) * 3</answer>.\n"
)
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 200  # characters of an answer: bounds the depth of its parentheses


def countdown(
    tokenizer: Tokenizer, problems: int, held_out: int, max_new_tokens: int = 512, count: int = 3, seed: int = 0
) -> Task:
    """Targets up to 1000 of `count` numbers from 1 to 50. No held-out numbers and target are trained on."""
    draw, found = random.Random(seed), dict[tuple[int, ...], Problem]()
    while len(found) < problems:
        numbers = [draw.randint(1, 50) for _ in range(count)]
        solution = str(numbers[0])
        for number in numbers[1:]:
            solution = f"({solution} {draw.choice('+-*')} {number})"
        target = value(solution, numbers)
        if target is not None and 0 < target <= 1000:
            shown = draw.sample(numbers, count)
            fields = {"numbers": shown, "target": int(target), "solution": solution[1:-1]}
            found.setdefault((*sorted(numbers), int(target)), Problem(_PROMPT.format(**fields), fields))
    made = list(found.values())
    return Task(made[held_out:], made[:held_out], tokenizer, reward, max_new_tokens, seed=seed)


def reward(fields: Mapping[str, Any], completion: str) -> float:
    """1.0 if the last answer in tags uses each number at most once and gives the target, else 0.0."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return float(bool(answers) and value(answers[-1].strip(), fields["numbers"]) == fields["target"])


def value(expression: str, numbers: list[int]) -> Fraction | None:
    """Of an expression of + - * / and some of the numbers, each once at most; None for any other text."""
    if len(expression) > _LONGEST:
        return None
    try:
        node = ast.parse(expression, mode="eval").body
        used = Counter(each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
        return _evaluate(node) if used <= Counter(numbers) else None
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.AST) -> Fraction:
    """Of the nodes that it knows; the text is never run."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return Fraction(_OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    raise ValueError(f"{ast.dump(node)} is no number and no operation")
