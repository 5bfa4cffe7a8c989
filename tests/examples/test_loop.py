"""The loop, tiny, with real actors on the host driver."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import memsaver

ray = pytest.importorskip("ray", reason="needs ray")

from examples.colocate import loop, picture  # noqa: E402
from examples.colocate.actors import TrainerWorker  # noqa: E402
from examples.colocate.proofs import ProofError, Proofs  # noqa: E402
from examples.colocate.recipes import GIB, MIB, RECIPES, in_chunks  # noqa: E402
from examples.colocate.report import Report  # noqa: E402
from examples.colocate.summary import size  # noqa: E402
from examples.colocate.timeline import Timeline  # noqa: E402
from examples.colocate.traffic import Contents  # noqa: E402
from examples.colocate.trainer import CheckpointError, NonFiniteError, Sample, TokenStatistics  # noqa: E402
from examples.colocate.weight_sync import WeightSync  # noqa: E402

SLOW = pytest.mark.skipif("MEMSAVER_TEST_SLOW" not in os.environ, reason="takes long: MEMSAVER_TEST_SLOW=1 runs it")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


HOLDERS = (("rollout", "engine"), ("train", "trainer"))


def assert_is_held(held: int, demand: int, ranks: int = 1) -> None:
    """A thread of autograd may still hold a gradient when the next is allocated: one more chunk for each rank."""
    assert ranks * demand <= held <= ranks * (demand + 2 * MIB), (held, demand, ranks)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and figures of a run."""
    path = tmp_path / "figures.json"
    status = loop.main(["--recipe", "tiny", "--device", "cpu", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


@dataclass
class Whole:
    """A run of three steps, which several tests read."""

    folder: Path
    figures: dict[str, Any]
    printed: list[str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    drawn = ["--picture", str(folder / "memory.svg")] if find_spec("matplotlib") else []
    with redirect_stdout(StringIO()) as printed:
        status, figures = run(folder, "--steps", "3", *drawn)
    assert status == 0
    lines = printed.getvalue().splitlines()
    return Whole(folder, figures, [line for line in lines if not line.startswith("picture: ")])


def test_a_run_passes_its_checks(whole: Whole) -> None:
    figures, printed = whole.figures, whole.printed
    assert figures["proofs_passed"] == {
        "weights are the checkpoint's": 4,  # after the warm-up, and after each step
        "tokens are the same": 3,
        "addresses are the same": 6,
        "engines hold nothing": 3,
        "log-probabilities agree": 3,
        "each step is applied once": 3,
        "overwritten": 4,  # batch sizes
    }
    assert len(figures["steps"]) == 3
    assert figures["tokens"] > 0 and figures["pauses"] > 0 and figures["transition_seconds"] > 0
    assert figures["out_of_memory"] is None
    used, total = figures["used_bytes_by_phase"], figures["device_bytes"]
    assert used.keys() == {"rollout", "away", "train", "sync"}
    assert total / 2 < used["rollout"] <= total and total / 2 < used["train"] <= total
    assert used["sync"] < total / 4
    assert not any(line.startswith("{") for line in printed)  # the JSON is in the file alone
    assert "share the host driver" in printed[0] and "4 steps of supervised warm-up, then 3 steps" in printed[0]
    assert "3 steps of reinforcement learning, too few to learn" in printed[0]
    assert "192.0 MiB of the recipe" in printed[1] and "regions may take all of it" in printed[1]
    assert "both do not fit: they take turns" in printed[3]
    recipe = RECIPES["tiny"]
    engine, trainer = recipe.engine_demand(total).nbytes, recipe.trainer_demand(total, 1).nbytes
    for (phase, role), demand in zip(HOLDERS, (engine, trainer)):
        assert_is_held(figures["held_bytes_by_phase"][phase][role], demand)
    assert f"in whole chunks the engine needs {size(engine)}" in printed[2] and f"trainer {size(trainer)}" in printed[2]
    share = f"{100 * (engine + trainer) / total:.0f} % of"
    assert f"{size(engine + trainer)}, {share} {size(total)}" in printed[3]
    rows = {line.split()[0]: line for line in printed if "|" in line}
    assert rows.keys() == {"rollout", "away", "train", "sync"}
    assert "E" in rows["rollout"].split("|")[1] and "T" not in rows["rollout"].split("|")[1]
    assert "T" in rows["train"].split("|")[1] and "E" not in rows["train"].split("|")[1]
    verdict = {line.split()[0]: line for line in printed if line[:1].isalpha()}
    assert "all 26 checks held" in verdict["proofs"]
    warm_up, end = figures["held_out_after_warm_up"], figures["held_out_at_end"]
    assert f"{warm_up:.3f} -> {end:.3f} on held-out problems" in verdict["reward"]
    assert f"{sum(row['transition_seconds'] for row in figures['steps']):.1f} of" in verdict["transitions"]
    assert "graphs replayed (no GPU)" in verdict["transitions"]
    assert "--no-pause" in verdict["try"]
    result = " ".join(" ".join(printed[printed.index(verdict["Result:"]) :]).split())
    seconds = {name: sum(row[name] for row in figures["steps"]) for name in ("transition_seconds", "seconds")}
    most = max(held["engine"] + held["trainer"] for held in figures["held_bytes_by_phase"].values())
    assert_is_held(most, max(engine, trainer))
    assert result == (
        f"Result: both need {share} the device; at most {size(most)} was in use in any phase; no "
        f"contents were lost, and no address changed; transitions took "
        f"{100 * seconds['transition_seconds'] / seconds['seconds']:.0f} % of the time of the steps."
    )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SLOW)])
def test_the_turns_move_no_more_than_they_must(ranks: int) -> None:
    options = loop.parse(["--recipe", "tiny", "--device", "cpu", "--steps", "3", "--ranks", str(ranks)])
    with closing(loop.Loop(options, loop.chosen_recipe(options), Report(settings={}))) as running:
        running.run()
        constants = sum(ray.get([engine.constant_bytes.remote() for engine in running.engines]))
    contents = Contents.of(running.recipe.model, ranks, constants)
    first, *turns = running.turns.moved
    assert (first.before, first.after, first.out_bytes, first.in_bytes) == (None, "train", 0, 0)  # as they were made
    step = ["rollout", "away", "rollout", "train", "sync"]
    assert [turn.before for turn in turns] == ["train", "sync", *step, *step, *step, "rollout", "away"]
    must, moved = 0, 0
    for turn in turns[2:]:  # the first rollout finds the engine's constants in their first backup
        out, into = contents.must_move(turn.before or "", turn.after)
        must += out + into
        moved += turn.out_bytes + turn.in_bytes
        for had_to, did in ((out, turn.out_bytes), (into, turn.in_bytes)):
            assert had_to <= did <= 1.02 * had_to, turn
    assert 0 < must <= moved <= 1.02 * must
    print(f"{moved} bytes moved, {must} by hand")


def test_weights_that_are_not_the_trainers_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightSync, "_write", lambda self: [])
    with pytest.raises(ProofError, match="engine 0 does not have the trainer's weights: model"):
        run(tmp_path)


@SLOW
def test_a_log_probability_of_rank_1_that_is_not_a_number_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WrongTrainer(TrainerWorker):
        """Of rank 1: what the engine says of a token is NaN."""

        def recompute(self, samples: Sequence[Sample], minibatches: int) -> TokenStatistics:
            if self.rank:
                samples = [replace(each, logprobs=[math.nan] * len(each.completion)) for each in samples]
            return super().recompute(samples, minibatches)

    monkeypatch.setattr(loop.Loop, "trainer_worker", WrongTrainer)
    with pytest.raises(ProofError, match=r"differ by nan nats at most and nan in the mean"):
        run(tmp_path, "--ranks", "2", "--warm-up-steps", "0")


@pytest.mark.parametrize(
    ("dtype", "largest", "mean"),
    [("float32", 2e-3, 0.0), ("float32", 9e-4, 2e-4), ("bfloat16", 1.1, 0.01), ("bfloat16", 0.2, 0.06)],
)
def test_log_probabilities_have_a_bound_in_each_dtype(dtype: str, largest: float, mean: float) -> None:
    recipe = loop.chosen_recipe(loop.parse(["--recipe", "tiny", "--device", "cpu", "--engine-dtype", dtype]))
    report = Report(settings={})
    judge = SimpleNamespace(recipe=recipe, report=report)
    bounds = recipe.gap_bounds
    Proofs.logprobs(judge, TokenStatistics(100, 100 * bounds.mean, bounds.largest))  # type: ignore[arg-type]
    assert report.proofs["log-probabilities agree"] == 1
    with pytest.raises(ProofError, match=f"differ by {largest} nats at most and {mean} in the mean of 100 tokens"):
        Proofs.logprobs(judge, TokenStatistics(100, 100 * mean, largest))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--pool process --sync attach", "needs --pool shared"),
        ("--steps -1", "--steps: '-1', expected an integer of 0 or more"),
        ("--ranks 3 --ranks-per-gpu 2", "--ranks-per-gpu is 2, expected a divisor of --ranks, 3"),
        ("--kv-share 0", "--kv-share: '0', expected a share above 0 and up to 1"),
        ("--json .", "--json: '.', expected a file that can be written"),
        ("--checkpoint-dir old", "--checkpoint-dir: 'old', expected a directory that can be written to"),
        ("--resume", "--resume needs --checkpoint-dir"),
        ("--kill actor:1", "--kill: 'actor:1', expected engine:STEP or trainer:STEP"),
        ("--steps 3 --checkpoint-dir . --kill engine:4", "--kill: engine:4, expected a step of the run, 1 to 3"),
        ("--picture memory.pdf", "--picture: 'memory.pdf', expected a name that ends in .svg or .png"),
        ("--device cuda", "--device is 'cuda' and this machine has no CUDA device"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("kept")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loop, "Loop", None)
    with pytest.raises(SystemExit) as ended:
        loop.main(arguments.split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["old"]


def test_a_run_without_pausing_runs_out_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, figures = run(tmp_path, "--no-pause", "--picture", str(tmp_path / "none.svg"))
    assert status == loop.OUT_OF_MEMORY_STATUS
    assert "out of memory" in figures["out_of_memory"]
    assert figures["steps"] == []
    printed = capsys.readouterr().out
    assert "--no-pause releases nothing: expect out of memory" in printed and "the same without --no-pause" in printed
    assert "Result:       out of memory; both need 1" in printed and "and --no-pause keeps both resident." in printed
    assert "none.svg: the run did not reach the steps to draw" in printed and not (tmp_path / "none.svg").exists()


@pytest.mark.parametrize(
    ("nbytes", "backup", "chunks"),
    [
        (1, False, 2 * MIB),
        (3 * MIB, True, 4 * MIB),
        (118 * MIB, False, 128 * MIB),
        (134 * MIB, False, 160 * MIB),
        (230 * MIB, True, 256 * MIB),
        (GIB, True, GIB),
        (GIB - 20 * MIB, False, GIB),
    ],
)
def test_a_large_region_takes_chunks_as_large_as_its_allowance_permits(nbytes: int, backup: bool, chunks: int) -> None:
    assert in_chunks(nbytes, backup) == chunks
    with closing(memsaver.region("chunks", device="cpu", backup="host" if backup else "none")) as region:
        kept = region.empty((nbytes,), torch.uint8)
        assert region.mapped_bytes == chunks
        del kept


def test_the_capacity_of_a_recipe_is_one_that_a_pool_can_have() -> None:
    """Otherwise the pool has less, and a wait until all of it is free never ends."""
    capacity = RECIPES["gpu"].capacity(143_667_429_376)  # an H200, no whole number of chunks
    assert 0 < 143_667_429_376 - RECIPES["gpu"].outside_bytes - capacity < 2 * MIB
    memsaver.configure(pool_capacity=capacity)
    try:
        assert memsaver.stats().options["pool_capacity"] == capacity
    finally:
        memsaver.configure(pool_capacity=None)


@pytest.fixture(scope="module")
def timeline(whole: Whole) -> Timeline:
    """The timeline of the last two of three steps, as the run kept it beside its picture."""
    pytest.importorskip("matplotlib")
    assert (whole.folder / "memory.svg").stat().st_size > 0
    return Timeline.load(whole.folder / "memory.samples.json")


def test_every_phase_has_a_band_and_the_memory_of_its_own_regions(timeline: Timeline) -> None:
    step = ["rollout", "away", "rollout", "train", "sync", "rollout"]
    assert [span.name for span in timeline.phases] == [*step, *step[1:]]
    for one, next_one in zip(timeline.phases, timeline.phases[1:]):
        assert one.begin < one.end <= next_one.begin
    resident = {"rollout": {"engine"}, "away": {"trainer"}, "train": {"trainer"}, "sync": {"engine", "trainer"}}
    seen = set()
    for span in timeline.phases:
        for each in timeline.processes:
            for sample in each.samples:
                if span.begin <= sample.time <= span.end:
                    seen.add((span.name, each.role))
                    assert (sum(sample.regions.values()) > 0) == (each.role in resident[span.name]), (span, sample)
    assert {("train", "engine"), ("train", "trainer"), ("rollout", "engine"), ("rollout", "trainer")} <= seen


def test_a_picture_names_phases_regions_and_the_capacity(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    picture.draw(timeline, path)
    texts = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    for phase in ("rollout", "away (check)", "train", "sync"):
        assert phase in texts
    for label in ("engine: KV cache", "engine: weights", "trainer: workspace", "trainer: parameters", "GiB"):
        assert label in texts
    capacity = timeline.processes[0].device_bytes / (1 << 30)
    assert f"capacity {capacity:.3g} GiB" in texts
    assert any("does not fit" in text for text in texts if text)
    assert any("host driver" in text and "steps 2 to 3" in text for text in texts if text)


@SLOW
def test_two_ranks_with_zero_advantages_leave_the_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    sync = loop.Loop.sync

    def noting_sync(self: loop.Loop, prove: bool) -> None:
        sync(self, prove)
        found.append({name: tensor for bucket in self.weights.buckets() for name, tensor in ray.get(bucket).items()})

    monkeypatch.setattr(loop.Loop, "sync", noting_sync)
    status, figures = run(tmp_path, "--ranks", "2", "--zero-advantages")
    assert status == 0
    assert figures["proofs_passed"]["tokens are the same"] == 2
    assert figures["proofs_passed"]["log-probabilities agree"] == 2
    assert figures["held_out_after_warm_up"] == figures["held_out_at_end"]
    assert len(found) == 3  # after the warm-up, and after each step
    for later in found[1:]:
        assert all(torch.equal(tensor, later[name]) for name, tensor in found[0].items())


LEARNING = ("--steps", "5", "--warm-up-steps", "300", "--eval-every", "2", "--checkpoint-every", "2", "--deterministic")


def curve(figures: dict[str, Any]) -> list[Any]:
    """All that a run learned, which nothing but its settings decides."""
    names = ("step", "reward", "loss", "grad_norm", "clipped", "logprob_gap", "logprob_gap_mean", "truncated")
    return [figures["held_out"], *([row[name] for name in names] for row in figures["steps"])]


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@SLOW
def test_a_run_that_was_stopped_and_resumed_gives_the_identical_curve(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    kept = ("--checkpoint-dir", str(folder))
    _, undisturbed = run(tmp_path, *LEARNING)
    assert len({row["loss"] for row in undisturbed["steps"]}) > 1 and undisturbed["resumed_at"] is None
    _, stopped = run(tmp_path, *LEARNING, *kept, "--stop-after", "3")
    assert curve(stopped)[1:] == curve(undisturbed)[1:4] and "end" not in stopped["held_out"]
    assert names(folder) == ["step-00000002", "step-00000003"]
    shutil.copytree(folder / "step-00000003", folder / "step-00000005.partial")  # half-written: never taken
    with pytest.raises(CheckpointError, match="step-00000003' already; expected a folder without, or --resume"):
        run(tmp_path, *LEARNING, *kept)
    for other, text in (
        (("--seed", "1"), "seed is 0; expected 1"),
        (("--ranks", "2"), "ranks is 1; expected 2"),
        (("--steps", "6"), "recipe.steps is 5; expected 6"),
    ):
        with pytest.raises(CheckpointError, match=f"step-00000003: {text}"):
            run(tmp_path, *LEARNING, *kept, "--resume", *other)
    with pytest.raises(ValueError, match="--kill: engine:3, expected a step after that of .*step-00000003', 3"):
        run(tmp_path, *LEARNING, *kept, "--resume", "--kill", "engine:3")
    _, resumed = run(tmp_path, *LEARNING, *kept, "--resume")
    assert resumed["resumed_at"] == 3
    assert resumed["proofs_passed"]["each step is applied once"] == 2  # steps 4 and 5
    assert curve(resumed) == curve(undisturbed)
    assert names(folder) == ["step-00000004", "step-00000005"]


def drill(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Figures of a run of two ranks."""
    status, figures = run(tmp_path, "--ranks", "2", *arguments)
    assert status == 0
    return figures


def test_two_ranks_that_die_are_replaced_and_give_the_identical_curve_also_when_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    short = ("--steps", "3", "--warm-up-steps", "100", "--eval-every", "2", "--deterministic")
    kept = ("--checkpoint-dir", str(folder), "--checkpoint-every", "2")
    undisturbed = drill(tmp_path, *short, *kept)
    assert names(folder) == ["step-00000002", "step-00000003"]
    assert len({row["loss"] for row in undisturbed["steps"]}) > 1
    shutil.rmtree(folder / "step-00000003")
    resumed = drill(tmp_path, *short, *kept, "--kill", "trainer:3,engine:3", "--resume")
    assert resumed["resumed_at"] == 2
    # The engine dies in the rollout, the trainer when the step is done again: neither update is applied twice.
    assert [(each["step"], each["lost"]) for each in resumed["recoveries"]] == [(3, ["engine 1"]), (3, ["trainer 1"])]
    assert resumed["proofs_passed"]["each step is applied once"] == 1
    assert curve(resumed) == curve(undisturbed)


@SLOW
def test_a_drill_of_fifteen_steps_gives_the_identical_curve(tmp_path: Path) -> None:
    long = ("--steps", "15", "--warm-up-steps", "300", "--eval-every", "5")
    undisturbed = drill(tmp_path, *long)
    kept = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "3")
    killed = drill(tmp_path, *long, *kept, "--kill", "trainer:5,engine:10,trainer:15")
    assert [(each["step"], each["back_to"]) for each in killed["recoveries"]] == [(5, 3), (10, 9), (15, 12)]
    assert curve(killed) == curve(undisturbed)


@SLOW
def test_a_step_that_is_not_finite_ends_the_run_with_all_actors_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PoisonedTrainer(TrainerWorker):
        """Advantages are NaN."""

        def recompute(self, samples: Sequence[Sample], minibatches: int) -> TokenStatistics:
            return super().recompute([replace(each, advantage=math.nan) for each in samples], minibatches)

    monkeypatch.setattr(loop.Loop, "trainer_worker", PoisonedTrainer)
    with pytest.raises(NonFiniteError, match="optimizer step 1 was not applied: the gradient norm is nan"):
        run(tmp_path, "--warm-up-steps", "0", "--checkpoint-dir", str(tmp_path / "checkpoints"))


def test_actors_that_die_again_and_again_end_the_run(tmp_path: Path) -> None:
    replaced: list[Any] = []
    checkpoints = SimpleNamespace(latest=lambda: tmp_path)
    workers = SimpleNamespace(lost=lambda: {"engine": [0]}, replace=replaced.append)
    dying: Any = SimpleNamespace(
        checkpoints=checkpoints, workers=workers, report=Report(settings={}), step=3, _losses=0, _missing=(),
        _adopt_workers=lambda: None,
    )  # fmt: skip
    error = RuntimeError("died")
    for _ in range(3):
        loop.Loop._replace_lost(dying, error)
    with pytest.raises(RuntimeError, match="died"):
        loop.Loop._replace_lost(dying, error)
    assert replaced == ["engine"] * 3 and dying._missing == ["engine"] and dying._goes_back
    for change in ({"checkpoints": None}, {"workers": SimpleNamespace(lost=dict)}):
        with pytest.raises(RuntimeError, match="died"):
            loop.Loop._replace_lost(SimpleNamespace(**{**vars(dying), "_losses": 0, **change}), error)  # type: ignore[arg-type]
