"""Problems are dealt to engines by groups, and completions become samples. The engines are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray")

from examples.colocate import rollout  # noqa: E402
from examples.colocate.engine import Completion, SamplingParams  # noqa: E402
from examples.colocate.rollout import Rollouts  # noqa: E402
from examples.colocate.task import CharacterTokenizer, Problem, Task  # noqa: E402

DIGITS = CharacterTokenizer("0123456789\n")


class Engine:
    """Completes each prompt with itself; of the copies of a prompt, the second is cut off and the third is wrong."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], SamplingParams]] = []
        self.generate = SimpleNamespace(remote=self._generate)

    def _generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
        self.calls.append((prompts, sampling))
        found = []
        for index, prompt in enumerate(prompts):
            copy = prompts[:index].count(prompt)
            tokens = prompt if copy == 1 else [*(prompt if copy != 2 else [0]), 10]
            found.append(Completion(prompt, tokens, [-0.5] * len(tokens), "length" if copy == 1 else "stop"))
        return found


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(rollout, "answers", lambda calls, what, seconds: calls)
    problems = [Problem(str(number), {"answer": str(number)}) for number in range(10, 30)]
    return Task(problems[5:], problems[:5], DIGITS, lambda fields, text: float(text == fields["answer"]), 3)


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_an_engine_gets_whole_groups_and_completions_come_in_order(task: Task, engines: int) -> None:
    made: list[Any] = [Engine() for _ in range(engines)]
    problems = task.sample(7)
    found = Rollouts(made, task, 0.7).complete(problems, group=4)
    assert [each.prompt for each in found] == [DIGITS.encode(each.prompt) for each in problems for _ in range(4)]
    for engine in made:
        ((prompts, sampling),) = engine.calls
        assert sampling == SamplingParams(0.7, max_new_tokens=3, stop_tokens=(10,))
        assert all(prompts.count(prompt) == 4 for prompt in prompts)
    assert sum(len(engine.calls[0][0]) for engine in made) == 28


def test_a_rollout_has_advantages_by_group_and_no_reward_for_what_was_cut_off(task: Task) -> None:
    found = Rollouts([Engine(), Engine()], task, 1.0).rollout(3, 4, False)
    assert [each.advantage for each in found.samples] == pytest.approx([1.0, -1.0, -1.0, 1.0] * 3, abs=1e-3)
    assert (found.reward, found.truncated, found.num_tokens, found.length) == (0.5, 0.25, 3 * 10, 2.5)
    assert all(each.logprobs == [-0.5] * len(each.completion) for each in found.samples)
    still = Rollouts([Engine()], task, 1.0).rollout(3, 4, True)
    assert {each.advantage for each in still.samples} == {0.0}


def test_held_out_problems_are_completed_greedily(task: Task) -> None:
    engine = Engine()
    assert Rollouts([engine], task, 1.0).held_out_rewards() == [1.0] * 5
    ((prompts, sampling),) = engine.calls
    assert sampling.temperature == 0.0 and prompts == [DIGITS.encode(str(number)) for number in range(10, 15)]
