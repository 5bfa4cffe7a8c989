"""Programs with real actors, in one cluster: a run of the loop that several tests read, one in which actors die, and
the smallest program.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="needs ray")
pytest.importorskip("transformers", reason="models are written by it")

import memsaver  # noqa: E402
from benchmarks.step import row as row_of  # noqa: E402
from examples import two_actors  # noqa: E402
from examples.colocate import __main__ as command  # noqa: E402
from examples.colocate import countdown  # noqa: E402
from examples.colocate.checks.checked_actors import CheckedTrainer  # noqa: E402
from examples.colocate.loop import TrainerActor  # noqa: E402
from examples.colocate.model import EngineWeights, parameter_shapes  # noqa: E402
from examples.colocate.model.folder import load_config  # noqa: E402
from examples.colocate.rollout import HungError, answers  # noqa: E402
from examples.colocate.task import TaskError  # noqa: E402
from tests.examples.model_support import save_model, save_tokenizer  # noqa: E402
from tests.ray_nursery import forked_workers  # noqa: E402
from tests.support import fresh_device  # noqa: E402

# One rank of a model is a trainer's, or an engine's of two.
RUN = (
    *("--device", "cpu", "--ranks", "2", "--engine-ranks", "2", "--steps", "3", "--prompts", "3", "--held-out", "4"),
    *("--max-new-tokens", "16", "--kv-blocks", "40", "--rate", "1e-3", "--deterministic", "--checkpoint-every", "2"),
)
# A run of one kind takes a quarter of a minute.
KINDS = ("Qwen3", "Qwen2") if os.environ.get("MEMSAVER_TEST_MODELS") == "all" else ("Qwen3",)


# Of the actors. Those of Ray's own are imported by each of them.
MODULES = (
    *("examples.colocate.engine", "examples.colocate.trainer.trainer"),
    *("transformers.generation", "transformers.models.qwen3.modeling_qwen3"),
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("MEMSAVER_HOST_DEVICE", fresh_device())  # of actors that choose none
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with forked_workers(*MODULES):
            ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
            yield
            ray.shutdown()


@dataclass
class Run:
    status: int
    lines: list[dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The last line of each step."""
        return list({line["step"]: line for line in self.lines if "step" in line}.values())

    def curve(self) -> list[Any]:
        """All that a run learned, which nothing but its settings decides."""
        names = ("step", "reward", "loss", "grad_norm", "clipped", "entropy", "gap", "largest_gap", "z", "length")
        return [[row[name] for name in names] for row in self.steps]


def run(folder: Path, log: Path, *arguments: str) -> Run:
    status = command.main([*RUN, "--model", str(folder), "--log", str(log), *arguments])
    return Run(status, [json.loads(line) for line in log.read_text().splitlines()])


@pytest.fixture(scope="module", params=KINDS)
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Run]]:
    """A model, beside it checkpoints, and a run that learns countdown, by a reward that a random model gets."""
    folder = tmp_path_factory.mktemp("whole")
    words = ["<eos>", *sorted({*countdown._PROMPT, *"0123456789,"}), "?"]  # few: a random model ends a text soon
    save_tokenizer(folder, words)
    save_model(
        folder, request.param, vocab_size=len(words), max_position_embeddings=320, head_dim=8, num_hidden_layers=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(countdown, "reward", lambda fields, text: len(text) / 16)
        yield folder, run(folder, folder / "log.jsonl", "--checkpoint-dir", str(folder / "checkpoints"))


def test_a_run_passes_its_checks_and_says_whether_it_learned(whole: tuple[Path, Run]) -> None:
    _, found = whole
    assert len(found.steps) == 3 and len({row["loss"] for row in found.steps}) > 1
    assert all(row["prefix_hit_tokens"] > 0 and row["recomputed"] > 0 for row in found.steps)
    assert sum(row["grad_norm"] > 0 for row in found.steps) > 1
    end = found.lines[-1]
    assert end["after"] == "end"
    assert found.status == (0 if end["learned"] else command.NOT_LEARNED)


def test_a_benchmark_reads_the_log(whole: tuple[Path, Run]) -> None:
    found, seconds = row_of(whole[1].lines, "memsaver"), [each["seconds"] for each in whole[1].steps[1:]]
    assert found["rollout, s"] == sum(each["rollout"] for each in seconds) / 2
    assert found["turns, s"] == sum(sum(each["turns"].values()) - each["turns"]["away"] for each in seconds) / 2 > 0
    assert found["all, s"] == sum(found[f"{part}, s"] for part in ("rollout", "train", "sync", "turns"))
    moved = [sum(map(sum, (moved := each["moved"]).values())) - sum(moved["away"]) for each in whole[1].steps[1:]]
    assert found["copied, GiB"] * 2**30 == sum(moved) / 2 and found["KV tokens"] == 16 * 40


def test_the_turns_move_no_more_than_they_must(whole: tuple[Path, Run]) -> None:
    """By hand, from shapes: torch rounds a tensor up to 512 bytes. Both ranks together have each parameter once."""

    def nbytes(values: int) -> int:
        return -(-4 * values // 512) * 512

    params = moments = 0
    for shape in parameter_shapes(load_config(whole[0])).values():
        rows, row = shape[0], torch.Size(shape[1:]).numel()
        shards = [nbytes(min(-(-rows // 2), rows - first) * row) for first in (0, -(-rows // 2))]
        params += sum(shards)
        moments += 2 * sum(shards) + 2 * 512  # and a counter on each rank
    for step in whole[1].steps:
        moved = step["moved"]
        out, into = moved["rollout"]
        buffers = moved["train"][0]
        assert 0 < buffers < 1 << 20 and into == buffers  # the weights come without their contents
        assert moved["train"][1] == pytest.approx(params + moments, rel=0.02)
        assert moved["sync"] == [pytest.approx(moments, rel=0.02), 0]
        assert out == pytest.approx(params, rel=0.02)


def test_two_ranks_that_die_are_replaced_and_give_the_identical_curve_also_when_resumed(
    whole: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, undisturbed = whole
    made = folder / "checkpoints"
    assert sorted(each.name for each in made.iterdir()) == ["step-00000002", "step-00000003"]
    kept = ("--checkpoint-dir", str(tmp_path))
    shutil.copytree(made / "step-00000002", tmp_path / "step-00000002")
    (tmp_path / "partial-00000003").mkdir()  # never taken
    (tmp_path / "task").write_text('{"prompt": "1"}\n' * 9)
    (tmp_path / "reward").write_text("def reward(fields, text): return 0.0")
    task = ("--task", str(tmp_path / "task"), "--reward", str(tmp_path / "reward"))
    for other, text in (
        ((), "step-00000002' already; expected"),
        (("--resume", "--seed", "1"), "seed is '0'; expected '1'"),
        (("--resume", "--engines", "2"), "engines is '1'; expected '2'"),
        (("--resume", *task), f"task is 'None'; expected '{tmp_path / 'task'}'"),
    ):
        assert command.main([*RUN, "--model", str(folder), *kept, *other]) == command.FAILED
        assert text in capsys.readouterr().err
    # The engine dies in the rollout, the trainer when the step is done again: neither update is applied twice.
    resumed = run(folder, tmp_path / "log", *kept, "--kill", "trainer:3,engine:3", "--resume")
    assert resumed.status == undisturbed.status
    assert [line["lost"] for line in resumed.lines if "lost" in line] == [["engine"], ["trainer"]]
    assert [line["went_back_to"] for line in resumed.lines if "went_back_to" in line] == [2, 2, 2]
    assert resumed.curve() == undisturbed.curve()[2:]
    assert resumed.lines[-1] == undisturbed.lines[-1]
    one, other = (json.loads((each / "step-00000003/loop.json").read_text()) for each in (made, tmp_path))
    assert all(one[name] == other[name] for name in ("step", "settings", "task", "engines", "warm", "surprise"))


@pytest.mark.parametrize(("engines", "gathers"), [("a", False), ("b", True), ("ab", True)])
def test_ranks_gather_if_an_engine_is_on_another_device_than_a_rank(engines: str, gathers: bool) -> None:
    actor: Any = object.__new__(TrainerActor)
    actor.device, actor.uuid, written = torch.device("cpu"), lambda: "a", list[Any]()
    actor.trainer = SimpleNamespace(weights=SimpleNamespace(write=lambda *given: written.append(given)))
    actor.write_weights([(uuid, pickle.dumps({}), {}) for uuid in engines], {"a"})
    assert written == [([EngineWeights({}, {})] * engines.count("a"), gathers)]
    written.clear()
    actor.write_weights([("a", pickle.dumps({}), {})], {"a", "b"})  # a rank without an engine
    assert written == [([EngineWeights({}, {})], True)]


def test_an_actor_that_a_recovery_has_paused_overwrites_free_memory() -> None:
    actor: Any = object.__new__(CheckedTrainer)
    actor.device, actor.rank, actor.sharers, actor.free_bytes = torch.device("cpu"), 0, 1, lambda: 1 << 20
    assert actor.overwrite() == 1 << 20
    memsaver.pause("overwrite")
    assert actor.overwrite() == 1 << 20


def test_an_actor_that_hangs_is_named_after_a_bound() -> None:
    class Actor:
        def answer(self) -> int:
            return 1

        def hang(self) -> None:
            threading.Event().wait()

    one, other = (ray.remote(num_cpus=0)(Actor).remote() for _ in range(2))
    assert answers([one.answer.remote(), other.answer.remote()], "engine.answer", 60) == [1, 1]
    with pytest.raises(HungError, match=r"engine.hang\(\) of rank 1 has not answered in 0.2 s"):
        answers([one.answer.remote(), other.hang.remote()], "engine.hang", 0.2)
    for actor in (one, other):
        ray.kill(actor)


def test_the_end_of_a_run_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a reward that is no number, and of a run that has gone further than it is asked to."""

    def fail() -> None:
        raise TaskError("reward() returned nan; expected a finite number")

    loop = SimpleNamespace(
        run=fail, close=lambda: None, write_log=lambda line: None, check_counts=lambda: None, passed={}, counts={},
        last=1, steps_done=2, warm=[0.0, 1.0], rollouts=SimpleNamespace(held_out_rewards=lambda: [1.0, 1.0]),
    )  # fmt: skip
    monkeypatch.setattr(command, "RecoverableLoop", lambda *given: loop)
    arguments = ["--device", "cpu", "--recipe", "tiny"]
    assert command.main(arguments) == command.FAILED
    assert capsys.readouterr().err == "FAILED: reward() returned nan; expected a finite number\n"
    loop.run = lambda: None
    assert command.main(arguments) == command.NOT_LEARNED
    assert "held-out reward 0.500 -> 1.000" in capsys.readouterr().out


def test_two_actors_take_turns_and_learn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Engine(two_actors.Engine):
        def setup(self, path: str | None) -> None:
            super().setup(path)
            self.constants = [each.clone() for each in self.model.buffers()]

        def generate(self, prompts: torch.Tensor) -> torch.Tensor:
            assert self.constants and all(map(torch.equal, self.constants, self.model.buffers()))
            return super().generate(prompts)

    monkeypatch.setattr(two_actors, "Engine", Engine)
    monkeypatch.setattr(two_actors, "DEVICE", "cpu")
    monkeypatch.setattr(sys, "argv", ["two_actors", "--steps", "13"])
    two_actors.main()
    rewards = [float(each) for each in re.findall(r"step \d+: reward ([\d.]+)", capsys.readouterr().out)]
    assert len(rewards) == 13
    assert max(rewards[-3:]) > rewards[0] + 0.08


def test_settings_of_a_folder_do_not_change_how_the_engine_samples(tmp_path: Path) -> None:
    """The trainer learns from samples of the model's own distribution."""
    model = save_model(tmp_path, "Qwen3", vocab_size=16, max_position_embeddings=64, head_dim=8)
    model.generation_config.update(do_sample=True, temperature=1e-3, top_p=1e-3)
    model.save_pretrained(tmp_path)
    engine = ray.remote(num_cpus=0)(two_actors.Engine).remote()
    ray.get(engine.setup.remote(str(tmp_path)))
    tokens = ray.get(engine.generate.remote(torch.zeros(two_actors.SAMPLES, two_actors.PROMPT, dtype=torch.int64)))
    assert len(tokens.unique(dim=0)) > 1
    ray.kill(engine)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--steps 0", "--steps: '0'; expected an integer of 1 or more"),
        ("--prompts 3841", "--prompts is 3841; expected at most the 3840 problems to train on"),
        ("--kv-blocks 9", "--kv-blocks is 9; expected 10 or more: the prompt '12+34=21,64 "),
        ("--max-new-tokens 3", "--max-new-tokens needs --model"),
        ("--engine vllm", "--engine is 'vllm'; expected it with --device cuda and --model"),
        ("--log .", "Is a directory: "),
        ("--checkpoint-dir old", "File exists: "),
        ("--resume", "--resume needs --checkpoint-dir"),
        ("--kill actor:1", "--kill: 'actor:1'; expected engine:STEP or trainer:STEP"),
        ("--steps 3 --checkpoint-dir . --kill engine:4", "--kill: engine:4; expected a step of the run, 1 to 3"),
        ("--device cuda", "--device is 'cuda' and this machine has no CUDA device"),
        ("--model .", "expected the config.json of a model"),
        ("--task prompts.jsonl", "--task needs --reward and --model"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("kept")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "RecoverableLoop", None)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["old"]
