"""The generated task: its texts, its split, its demonstrations and its reward."""

from __future__ import annotations

import pytest

from examples.colocate.arithmetic import VOCABULARY, Arithmetic, Problem, decode, encode, reward


def test_text_survives_encoding() -> None:
    text = "17+25=24\n "
    assert decode(encode(text)) == text
    assert sorted(encode(VOCABULARY)) == list(range(len(VOCABULARY)))


@pytest.mark.parametrize(
    ("left", "right", "answer", "slip"),
    [(17, 25, "24", "23"), (12, 13, "52", "52"), (9, 1, "01", "0"), (49, 49, "89", "88"), (0, 0, "0", "0")],
)
def test_a_problem_has_the_right_answer_and_slip(left: int, right: int, answer: str, slip: str) -> None:
    problem = Problem(left, right)
    assert problem.prompt == f"{left}+{right}="
    assert (problem.answer, problem.slip) == (answer, slip)
    assert problem.carries == (answer != slip)


def test_reward_takes_the_whole_answer_and_nothing_else() -> None:
    problem = Problem(17, 25)
    assert reward(problem, "24\n") == 1.0
    for wrong in ("24", "42\n", "23\n", "24\n\n", " 24\n", "", "\n", "242\n"):
        assert reward(problem, wrong) == 0.0


def test_held_out_problems_are_never_trained_on() -> None:
    task = Arithmetic(largest=19, held_out=64, seed=3)
    held_out = set(task.held_out)
    assert len(held_out) == 64
    assert not held_out & set(task.train)
    for _ in range(20):
        assert not held_out & set(task.sample(32))
        prompts = {prompt for prompt, _ in task.demonstrations(64, 0.5)}
        assert not prompts & {problem.prompt for problem in held_out}


def test_the_seed_decides() -> None:
    one, same, other = (Arithmetic(seed=seed) for seed in (1, 1, 2))
    assert one.held_out == same.held_out != other.held_out
    assert one.sample(8) == same.sample(8)
    assert one.demonstrations(8, 0.5) == same.demonstrations(8, 0.5)
