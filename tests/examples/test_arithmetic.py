"""The generated task: its texts, its split, its demonstrations and its reward."""

from __future__ import annotations

import pytest

from examples.colocate.arithmetic import VOCABULARY, Arithmetic, Problem, decode, encode, reward


def test_text_survives_encoding() -> None:
    text = "17+25=24\n "
    assert decode(encode(text)) == text
    assert sorted(encode(VOCABULARY)) == list(range(len(VOCABULARY)))


@pytest.mark.parametrize("text", ["17-25", "x", "1+1=2\r"])
def test_unknown_characters_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected characters of"):
        encode(text)


@pytest.mark.parametrize("token", [-1, len(VOCABULARY)])
def test_unknown_tokens_are_named(token: int) -> None:
    with pytest.raises(ValueError, match=f"token is {token}"):
        decode([token])


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


def test_carry_share_sets_the_share_of_problems_with_a_carry() -> None:
    task = Arithmetic(largest=49, held_out=256, carry_share=0.6)
    problems = task.train + task.held_out
    assert len(set(problems)) == len(problems)
    assert sum(problem.carries for problem in problems) / len(problems) == pytest.approx(0.6, abs=0.01)


def test_the_seed_decides() -> None:
    one, same, other = (Arithmetic(seed=seed) for seed in (1, 1, 2))
    assert one.held_out == same.held_out != other.held_out
    assert one.sample(8) == same.sample(8)
    assert one.demonstrations(8, 0.5) == same.demonstrations(8, 0.5)


@pytest.mark.parametrize("slip_share", [0.0, 1.0])
def test_demonstrations_contain_the_given_share_of_slips(slip_share: float) -> None:
    task = Arithmetic(largest=9, held_out=8)
    wanted = {problem.prompt: (problem.slip if slip_share else problem.answer) + "\n" for problem in task.train}
    for prompt, completion in task.demonstrations(200, slip_share):
        assert completion == wanted[prompt]
        assert len(completion) <= task.longest_answer


@pytest.mark.parametrize(
    "wrong", [{"largest": 4}, {"held_out": 0}, {"held_out": 10**6}, {"carry_share": 0.0}, {"carry_share": 1.0}]
)
def test_impossible_tasks_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*expected"):
        Arithmetic(**wrong)  # type: ignore[arg-type]


def test_wrong_requests_are_refused() -> None:
    task = Arithmetic(largest=9, held_out=8)
    with pytest.raises(ValueError, match="count is 0"):
        task.sample(0)
    with pytest.raises(ValueError, match="expected 1 to"):
        task.sample(10**6)
    with pytest.raises(ValueError, match="slip_share is 1.5"):
        task.demonstrations(1, 1.5)
