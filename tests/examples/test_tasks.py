"""The tasks: texts, splits, demonstrations, rewards, and the errors of a user's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.colocate import arithmetic as sums
from examples.colocate import countdown as games
from examples.colocate.arithmetic import arithmetic
from examples.colocate.countdown import countdown
from examples.colocate.options import _check_task
from examples.colocate.prompts import TextTokenizer, load_reward, prompts
from examples.colocate.recipes import RECIPES
from examples.colocate.task import CharacterTokenizer, Task, TaskError
from tests.examples.model_support import save_tokenizer

CHARACTERS = CharacterTokenizer("".join(map(chr, range(32, 127))) + "\n")


def test_an_answer_has_all_sums_and_a_slip_omits_carries() -> None:
    assert sums.steps([17, 25, 9]) == "71,24,15"
    assert sums.steps([17, 25, 9], sums._add_digits) == "71,23,13"
    assert sums.steps([12, 13], sums._add_digits) == sums.steps([12, 13]) == "21,52"


def test_the_reward_of_arithmetic_is_that_of_the_last_number() -> None:
    fields = {"numbers": [17, 25, 9]}
    for right in ("71,24,15", "15", "71,23,15"):
        assert sums.reward(fields, right) == 1.0
    for wrong in ("", "51", "71,24", "71,24,15,", "71,24,15 ", "71,24,151", "?"):
        assert sums.reward(fields, wrong) == 0.0


def test_prompts_of_arithmetic_share_a_prefix_and_completions_fill_blocks() -> None:
    task = arithmetic()
    prefix = "12+34=21,64 "
    for problem, sample in zip(task.sample(50), task.demonstrations(50)):
        assert problem.prompt.startswith(prefix) and problem.prompt.endswith("=")
        assert 8 <= len(sample.completion) <= task.max_new_tokens <= 30
        assert sample.completion[-1] in task.tokenizer.stop_tokens
        answer = sums.steps(problem.fields["numbers"])
        assert task.tokenizer.decode([*task.tokenizer.encode(answer), *task.tokenizer.stop_tokens]) == answer
        assert task.reward(problem.fields, answer) == 1.0


def test_problems_are_split_by_unordered_operands() -> None:
    task = arithmetic(problems=2000, held_out=500, seed=3)
    operands = [tuple(sorted(problem.fields["numbers"])) for problem in (*task.held_out, *task.train)]
    assert (len(task.held_out), len(task.train), len(set(operands))) == (500, 1500, 2000)
    held_out = {problem.prompt for problem in task.held_out}
    shown = {task.tokenizer.decode(each.prompt) for each in task.demonstrations(500)}
    assert not held_out & (shown | {problem.prompt for problem in task.sample(500)})


def test_demonstrations_slip_as_often_as_they_are_told_to() -> None:
    for share in (0.0, 1.0):
        task = arithmetic(slip_share=share)
        rights = 0.0
        for each in task.demonstrations(200):
            prompt, completion = map(task.tokenizer.decode, (each.prompt, each.completion))
            numbers = [int(number) for number in prompt.split()[1][:-1].split("+")]
            rights += sums.reward({"numbers": numbers}, completion)
        assert rights == 200 if share == 0 else 0 < rights < 70  # about one problem in six has no carry


@pytest.mark.parametrize("make", [arithmetic, lambda seed=0: countdown(CHARACTERS, problems=64, held_out=8, seed=seed)])
def test_the_seed_decides_and_a_task_continues_from_a_saved_state(make: Any) -> None:
    one, same, other = (make(seed=seed) for seed in (1, 1, 2))
    assert one.held_out == same.held_out != other.held_out
    assert one.sample(8) == same.sample(8)
    same.set_random_state(json.loads(json.dumps(one.draws.getstate())))
    assert one.sample(8) == same.sample(8)


def test_countdown_accepts_each_number_once_and_the_target_alone() -> None:
    fields = {"numbers": [3, 7, 25, 25], "target": 46}
    for right in ("3 * 7 + 25", "25+(7*3)", "(3 * (7))+25", "25+25-7+3"):
        assert games.reward(fields, f"so <answer>1</answer>, no: <answer> {right} </answer>") == 1.0, right
    for wrong in (
        "46", "3*7", "7*3+25+0", "3*7+25*1", "3.0*7+25", "7*7-3", "3*7+25=46", "25+7*3)", "3**7",
        "__import__('os')", "3 if 7 else 25", "[3*7+25][0]", "-3*-7+25", "True*3*7+25", "1/0",
        "(" * 150 + "3" + ")" * 150, "", "x", "3*7+25\x00",
    ):  # fmt: skip
        assert games.reward(fields, f"<answer>{wrong}</answer>") == 0.0, wrong
    assert games.reward(fields, "3 * 7 + 25") == 0.0  # without tags
    assert games.value("(7 - 1/3) * 3", [1, 3, 3, 7]) == 20  # exactly, where floats are not


def test_countdown_has_a_solution_for_each_problem() -> None:
    task = countdown(CHARACTERS, count=4, problems=200, held_out=50)
    keys = [(*sorted(each.fields["numbers"]), each.fields["target"]) for each in (*task.train, *task.held_out)]
    assert (len(task.train), len(task.held_out), len(set(keys))) == (150, 50, 200)
    for problem in task.train:
        assert 0 < problem.fields["target"] <= 1000
        assert task.reward(problem.fields, f"<answer>{problem.fields['solution']}</answer>") == 1.0
        assert str(problem.fields["numbers"]) in problem.prompt and str(problem.fields["target"]) in problem.prompt


def test_a_text_tokenizer_is_that_of_a_folder(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ["<eos>", "two", "plus", "is", "four", "?"], between=" ")
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.encode("two plus two is") == [1, 2, 1, 3] and tokenizer.stop_tokens == (0,)
    assert tokenizer.decode([4, 0]) == "four"
    with pytest.raises(TaskError, match="expected a folder with a tokenizer"):
        TextTokenizer(tmp_path / "nowhere")


def written(
    folder: Path, lines: list[str], code: str = "def reward(fields, text): return fields['answer'] == text"
) -> Task:
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "reward.py").write_text(code)
    return prompts(folder / "prompts.jsonl", folder / "reward.py", CHARACTERS, held_out=1)


def test_prompts_and_reward_of_the_user(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"1+{each}=", "answer": str(1 + each)}) for each in range(5)]
    task = written(tmp_path, lines)
    assert (len(task.train), len(task.held_out)) == (4, 1)
    assert {each.prompt for each in (*task.train, *task.held_out)} == {f"1+{each}=" for each in range(5)}
    for problem in task.train:
        assert task.reward(problem.fields, problem.fields["answer"]) == 1.0 and task.reward(problem.fields, "x") == 0.0
    with pytest.raises(TaskError, match="expected JSON lines"):
        prompts(tmp_path / "nowhere", tmp_path / "reward.py", CHARACTERS)
    with pytest.raises(TaskError, match="has no demonstrations"):
        task.demonstrations(1)
    with pytest.raises(TaskError, match="count is 5; expected 1 to 4"):
        task.sample(5)


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (['{"prompt": "a"}', '{"text": "b"}'], "line 2: .*expected a JSON object with a text 'prompt'"),
        (['{"prompt": 3}'], "line 1: .*expected a JSON object with a text 'prompt'"),
        (["[]"], "line 1: .*expected a JSON object with a text 'prompt'"),
        (['{"prompt": "a"}', "", "b"], "line 3: 'b'; expected a JSON object with a text 'prompt'"),
        (['{"prompt": "a"}'], "0 problems to train on, 1 held out; expected both"),
    ],
)
def test_wrong_prompts_are_refused(tmp_path: Path, lines: list[str], match: str) -> None:
    with pytest.raises(TaskError, match=match):
        written(tmp_path, lines)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "the prompt '' has 0 tokens, up to number 0; expected 1 to 127, of a vocabulary of 15"),
        ("!" * 128, "has 128 tokens, up to number 1; expected 1 to 127"),
        ("!z", "the prompt '!z' has 2 tokens, up to number 90; expected 1 to 127, of a vocabulary of 15"),
        ("!" * 50, "--kv-blocks is 40; expected 65 or more: the prompt '!+' has 50 tokens"),
    ],
)
def test_a_prompt_that_would_end_a_later_step_is_refused(tmp_path: Path, prompt: str, match: str) -> None:
    recipe = replace(RECIPES["tiny"], prompts=1, warm_up_steps=0, kv_blocks=40)
    lines = [json.dumps({"prompt": each}) for each in ("!", prompt)]
    _check_task(recipe, replace(written(tmp_path, lines[:1] * 2), max_new_tokens=8))
    with pytest.raises(TaskError, match=match):
        _check_task(recipe, replace(written(tmp_path, lines), max_new_tokens=80))
    with pytest.raises(TaskError, match="--warm-up-steps is 1; expected 0: the task has no demonstrations"):
        _check_task(replace(recipe, warm_up_steps=1), written(tmp_path, lines))


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("def other(): pass", "KeyError.'reward'.*expected a Python file with a function reward"),
        ("def reward(", "SyntaxError.*expected a Python file"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'.*expected a Python file"),
        ("reward = 3", "expected a Python file with a function reward"),
        ("def reward(fields, text): return 'good'", "returned 'good'; expected a finite number"),
        ("def reward(fields, text): return float('nan')", "returned nan; expected a finite number"),
    ],
)
def test_a_wrong_reward_is_refused(tmp_path: Path, code: str, match: str) -> None:
    (tmp_path / "reward.py").write_text(code)
    with pytest.raises(TaskError, match=match):
        load_reward(tmp_path / "reward.py")({}, "")
    with pytest.raises(TaskError, match="expected a Python file"):
        load_reward(tmp_path / "nowhere.py")
