"""The loop with actors that are objects of one process: each wrong change ends a run with the name of a check."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from examples.colocate import loop as example  # noqa: E402
from examples.colocate import rollout  # noqa: E402
from examples.colocate.checks.checked_actors import CheckError  # noqa: E402
from examples.colocate.checks.checked_loop import CheckedLoop, verdict  # noqa: E402
from examples.colocate.checks.recovery import RecoverableLoop  # noqa: E402
from examples.colocate.engine import EngineConfig  # noqa: E402
from examples.colocate.engine.block_manager import BlockManager  # noqa: E402
from examples.colocate.options import parse  # noqa: E402
from examples.colocate.trainer.interface import NonFiniteError, Sample  # noqa: E402
from memsaver import regions  # noqa: E402
from memsaver.config import parse_size  # noqa: E402
from tests.examples.faults import FAULTS, Fault  # noqa: E402
from tests.examples.model_support import save_model, save_tokenizer  # noqa: E402

pytestmark = pytest.mark.alone  # the loop turns its process into a client of a small shared pool

DEVICE_BYTES = parse_size(os.environ.get("MEMSAVER_HOST_DEVICE", "96MiB"), "host_device")


class Local(example.Loop):
    """Its actors are objects of this process, which answer at once."""

    def place(self) -> None:
        pass

    def make(self, role: str) -> list[Any]:
        return [self.kinds[role](self.recipe, self.options, 0)]

    def call(self, role: str, method: str, *arguments: Any, **named: Any) -> list[Any]:
        return [getattr(self.actors[role][0], method)(*arguments, **named)]

    def set_up(self) -> None:
        super().set_up()
        generate = self.actors["engine"][0].generate
        self.rollouts.engines = [SimpleNamespace(generate=SimpleNamespace(remote=generate))]


class LocalLoop(Local, RecoverableLoop):
    pass


Run = Callable[..., LocalLoop]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def imports() -> None:
    """Their objects stay out of the collections around each test."""
    importlib.import_module("examples.colocate.trainer.trainer")
    importlib.import_module("torch._dynamo")  # by the first parameter that FSDP2 shards
    gc.freeze()


@pytest.fixture
def run(imports: None, monkeypatch: Patch) -> Iterator[Run]:
    """Runs a loop up to the verdict. Named arguments change its recipe, "tiny" if no other is named."""
    monkeypatch.setattr(rollout, "answers", lambda calls, what, seconds: list(calls))
    made: list[LocalLoop] = []

    def run(*arguments: str, **recipe: Any) -> LocalLoop:
        options, chosen, task = parse(["--device", "cpu", "--recipe", "tiny", *arguments])
        if chosen.warm_up_steps:  # of arithmetic: hardly a completion is right
            task.reward = lambda fields, text: text.count("1") / max(1, len(text))
        options.host_device = DEVICE_BYTES
        close(made)
        made.append(LocalLoop(options, dataclasses.replace(chosen, **recipe), task))
        try:
            made[-1].run()
            made[-1].check_counts()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they have tensors
            raise error.with_traceback(None) from None
        return made[-1]

    yield run
    close(made)


def close(made: list[LocalLoop]) -> None:
    """End loops, and close the regions of their actors."""
    made.clear()
    gc.collect()
    for region in regions.all_regions():
        region.close()


def test_the_loop_runs_without_checks(run: Run) -> None:
    options, recipe, task = parse(["--device", "cpu", "--recipe", "tiny"])
    options.host_device = DEVICE_BYTES
    loop = Local(options, recipe, task)
    loop.set_up()
    loop.begin()
    loop.step()
    assert (loop.steps_done, loop.group.entered, len(loop.warm)) == (1, "rollout", recipe.held_out)
    assert [turn.phase for turn in loop.turns] == ["train", "sync", "rollout"]
    assert loop.seconds.keys() == {"rollout", "train", "sync", "step"}


HONEST = {
    "the engines' memory is free": 3,
    "weights are the trainer's": 3,  # after the warm-up, and after each step
    "addresses are the same": 5,
    "weights outlast a pause": 5,
    "tokens are the same after a pause": 2,
    "advantages are of the group": 2,
    "log-probabilities agree": 2,
    "each token is learned from once": 2,
    "tokens are the policy's": 2,
    "each update is applied once": 2,
    "prefix_hit_tokens above zero": 1,
    "preemptions above zero": 1,
    "recomputed above zero": 1,
}


def test_an_honest_run_passes_its_checks(run: Run, tmp_path: Path) -> None:
    """Late moments give the same weights, and are not copied in turns."""
    moved, written = list[Any](), list[Any]()
    for number, arguments in enumerate(((), ("--late",))):
        loop = run(*arguments, "--log", str(log := tmp_path / str(number)))
        assert dict(loop.passed) == HONEST
        written.append(loop._written)
        moved.append(json.loads(log.read_text().splitlines()[-1])["moved"])
        del loop  # with its regions, which the next one makes anew
    assert written[0] == written[1]
    plain, late = moved
    assert plain["sync"][0] > 0 and late["sync"] == [0, 0]  # moments leave
    assert plain["train"][1] > 2.9 * late["train"][1] > 0  # parameters and moments, parameters


@pytest.mark.parametrize("saver", ["driver", "resident", "to-cpu"])
def test_the_checks_hold_with_each_saver(run: Run, saver: str) -> None:
    void = {"resident": "the engines' memory is free", "to-cpu": "addresses are the same"}
    assert run("--memory", saver).passed == {name: count for name, count in HONEST.items() if name != void.get(saver)}


def test_what_savers_need(capsys: pytest.CaptureFixture[str]) -> None:
    for saver, needs in (
        ((), "--memory torch_memory_saver needs a GPU and the package torch_memory_saver"),
        (("--late",), "--late needs --memory memsaver or driver; it is 'torch_memory_saver'"),
    ):
        with pytest.raises(SystemExit):
            parse(["--device", "cpu", "--memory", "torch_memory_saver", *saver])
        assert needs in capsys.readouterr().err


@pytest.mark.parametrize("fault", {each.change: each for each in FAULTS}.values(), ids=lambda fault: fault.name)
def test_a_wrong_change_ends_the_run(run: Run, monkeypatch: Patch, fault: Fault) -> None:
    fault.plant(monkeypatch)
    with pytest.raises((CheckError, memsaver.Error), match=f"{fault.check}: "):
        run(*fault.arguments, warm_up_steps=1)


def test_rewards_whose_mean_is_rounded_pass(run: Run, monkeypatch: Patch) -> None:
    """In fp32 that of eight rewards of 0.1 is less than each of them."""
    monkeypatch.setattr(rollout.Rollouts, "rewards", lambda self, problems, completions: [0.1] * len(completions))
    loop = run("--steps", "1", group=8)
    assert loop.passed["advantages are of the group"] == 1


@pytest.mark.parametrize("name", ["prefix_hit_tokens", "preemptions"])
def test_a_run_without_its_pressure_is_void(run: Run, monkeypatch: Patch, name: str) -> None:
    if name == "prefix_hit_tokens":
        monkeypatch.setattr(BlockManager, "publish", lambda *given: None)
    with pytest.raises(CheckError, match=f"{name} above zero: they are 0"):
        run("--steps", "1", kv_blocks=1000 if name == "preemptions" else 64)


def test_prompts_of_less_than_a_block_need_no_prefix_hits(run: Run) -> None:
    loop = run("--steps", "1")
    loop.counts["prefix_hit_tokens"] = 0
    with pytest.raises(CheckError, match="prefix_hit_tokens"):
        loop.check_counts()
    longest = max(len(loop.task.tokenizer.encode(each.prompt)) for each in loop.task.train)
    loop.recipe = dataclasses.replace(loop.recipe, engine=EngineConfig(block_size=longest))
    loop.check_counts()


def test_a_step_that_is_not_finite_ends_the_run(run: Run, monkeypatch: Patch) -> None:
    step = example.TrainerActor.train

    def wrong(self: example.TrainerActor, samples: Sequence[Sample], rate: float) -> Any:
        return step(self, [dataclasses.replace(each, advantage=math.nan) for each in samples], rate)

    monkeypatch.setattr(example.TrainerActor, "train", wrong)
    with pytest.raises(NonFiniteError, match="optimizer step 1 was not applied: the gradient norm is nan"):
        run()


def test_zero_advantages_leave_the_weights_as_they_are(run: Run, monkeypatch: Patch) -> None:
    write, written = CheckedLoop.write_weights, list[list[dict[str, int]]]()

    def recorded(self: CheckedLoop) -> None:
        write(self)
        written.append(self._written)  # checksums

    monkeypatch.setattr(CheckedLoop, "write_weights", recorded)
    loop = run("--zero-advantages", "--steps", "1")
    assert len(written) == 2 and written[1] == written[0]
    rewards = loop.rollouts.held_out_rewards()
    assert rewards == loop.warm and verdict(loop.warm, rewards)[0] is False


def test_a_verdict_counts_in_standard_errors() -> None:
    before = [0.0] * 50 + [1.0] * 50
    assert verdict(before, [0.0] * 30 + [1.0] * 70)[0]
    assert not verdict(before, [1.0, 1.0, *before[2:]])[0]  # +0.02, of 0.014
    learned, text = verdict(before, [0.0] * 100)
    assert not learned and "0.500 -> 0.000, -0.500 with a standard error of 0.050: NOT learned" in text


def test_a_run_learns(run: Run) -> None:
    loop = run("--steps", "5", "--prompts", "16", group=8, rate=1e-2)
    assert verdict(loop.warm, loop.rollouts.held_out_rewards())[0]


def test_a_model_of_a_folder_runs_with_the_users_prompts(run: Run, tmp_path: Path) -> None:
    """bf16 on both sides. The model is random: the reward is for any completion that ends. `test_loop` has a Qwen3."""
    words = ["<eos>", *"0123456789+=?"]
    save_tokenizer(tmp_path, words)
    save_model(tmp_path, "Qwen2", vocab_size=len(words), max_position_embeddings=64, head_dim=8)
    (tmp_path / "prompts").write_text("\n".join(f'{{"prompt": "{a}+{b}="}}' for a in range(9) for b in range(9)))
    (tmp_path / "reward.py").write_text("def reward(fields, text): return 1 - len(text) / 16")
    task = ("--task", str(tmp_path / "prompts"), "--reward", str(tmp_path / "reward.py"), "--held-out", "9")
    log = tmp_path / "log"
    sizes = ("--steps", "2", "--rate", "1e-3", "--prompts", "4", "--max-new-tokens", "16", "--log", str(log))
    engine = EngineConfig(max_batch_size=16, block_size=2)
    loop = run("--model", str(tmp_path), *task, *sizes, engine=engine, kv_blocks=80, group=4)
    assert loop.recipe.model.dtype == loop.recipe.trainer.dtype == torch.bfloat16
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    gaps = [line["gap"] for line in lines if "gap" in line]  # in fp32 they are nearly zero
    assert loop.passed["weights are the trainer's"] == 3 and len(gaps) == 2 and min(gaps) > 1e-6
