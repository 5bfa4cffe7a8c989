"""The benchmark of torch's default pool: its trainer on the CPU, and its figures of trainers that are made up."""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from support import default_pool_trainer

    return default_pool_trainer


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import default_pool

    return default_pool


def test_trainers_of_one_seed_have_the_same_losses(trainer: Any) -> None:
    shape = trainer.Shape(width=32, layers=2, heads=2, words=64, longest=16)
    one, other = trainer.Trainer(shape, "cpu"), trainer.Trainer(shape, "cpu")
    losses = one.steps(batch=2, count=4)
    assert losses == other.steps(batch=2, count=4) and len(set(losses)) == 4 == one.done
    one.reset()
    assert one.steps(batch=2, count=4) == losses


def test_a_pause_is_reported_with_its_bytes_and_chunks(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    region = memsaver.region("torch", device="cpu", backup="host")
    monkeypatch.setattr(memsaver, "default_pool", lambda: region)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pools = {(0, 0): 36 * MIB, (0, 1): 2 * MIB}
    listed = [{"segment_pool_id": pool, "total_size": size} for pool, size in pools.items()]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: listed)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: sum(pools.values()))
    subject = trainer.DefaultPool(shared=False)
    small, tensor = region.empty((4 * MIB,), torch.uint8), region.empty((32 * MIB,), torch.uint8).fill_(5)
    left = subject.pause(None)
    assert left["released_bytes"] == left["copied_bytes"] == 36 * MIB and left["chunks_by_mib"] == {"2": 2, "32": 1}
    assert left["reserved_bytes"] == 38 * MIB and left["other_pools_bytes"] == 2 * MIB
    assert "move" in [name for name, _ in left["stages"]]
    subject.allocate(7)
    back = subject.resume()
    assert back["stages"] == [[stage.name, stage.seconds] for stage in memsaver.history()[-1].stages]
    chunks_bytes = sum(int(mib) * number * MIB for mib, number in back["chunks_by_mib"].items())
    assert back["restored_bytes"] == chunks_bytes == region.mapped_bytes
    assert subject.check(7) == {"contents_right": True, "outside": True}
    assert trainer.holds_only(tensor, 5) and small.numel() == 4 * MIB
    subject.allocate(7)
    assert subject.check(8) == {"contents_right": False, "outside": True}
    subject.meanwhile = tensor
    assert subject.check(5) == {"contents_right": True, "outside": False}
    assert subject.pause("none")["copied_bytes"] == 0
    json.dumps([left, back])


class Steps:
    """Replies as a trainer's: step n has the loss n, and ``room`` is the largest batch that fits.

    Between the resumes ``wrong_after`` and the next, numbered from 1, the losses are others.
    """

    def __init__(self, name: str, room: int = 0, step_s: float = 0.0, wrong_after: int | None = None) -> None:
        self.name, self.room, self.step_s, self.wrong_after = name, room, step_s, wrong_after
        self.done = self.resumes = 0
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append((do, arguments))
        reply: dict[str, Any] = getattr(self, do, lambda **_: {})(**arguments)
        return reply

    def reset(self) -> dict[str, Any]:
        self.done = 0
        return {}

    def steps(self, batch: int, count: int, empty: bool = False) -> dict[str, Any]:
        first, self.done = self.done, self.done + count
        losses = [f"{number}{'!' * (self.resumes == self.wrong_after)}" for number in range(first, self.done)]
        return {"seconds": self.step_s * count, "losses": losses, "peak_bytes": {"reserved": (batch + 4) * GIB}}

    def fits(self, batch: int, count: int) -> dict[str, Any]:
        return {"fits": batch <= self.room}

    def resume(self) -> dict[str, Any]:
        self.resumes += 1
        return {}


@pytest.mark.parametrize("near", [1, 2, 50, 98, 99, 100, 101, 102, 110, 1000])
def test_the_largest_batch_is_found_from_any_guess(benchmark: Any, near: int) -> None:
    process = Steps("plain", room=100)
    found = benchmark.largest(process, near, 50)
    assert found["batch"] == 100 and found["probes"]["100"]["fits"] and not found["probes"]["101"]["fits"]
    batches = [arguments["batch"] for _, arguments in process.asked]
    assert len(batches) == len(set(batches)) == len(found["probes"])


def test_no_batch_may_fit(benchmark: Any) -> None:
    process = Steps("plain", room=0)
    assert benchmark.largest(process, 51, 50)["batch"] == 0
    assert min(arguments["batch"] for _, arguments in process.asked) == 1


def test_the_guess_is_where_the_peak_reaches_the_cap(benchmark: Any) -> None:
    assert benchmark.guess(Steps("plain"), 12 * GIB, 2, 50) == 8


def test_rounds_take_turns_and_the_first_is_not_counted(benchmark: Any) -> None:
    order: list[str] = []

    class Noted(Steps):
        def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
            if do == "steps":
                order.append(self.name)
            return super().ask(do, **arguments)

    plain, taken = Noted("plain", step_s=1.0), Noted("taken", step_s=1.5)
    found = benchmark.speed(plain, taken, 8, Namespace(rounds=3, steps=10))
    assert order == ["plain", "taken", "taken", "plain"] * 2
    assert found["ratios"] == [1.5] * 3 and found["ratio"] == 1.5 and found["losses_equal"]
    assert found["steps_per_s"]["plain"] == 1.0
    wrong = Noted("taken", step_s=1.5, wrong_after=0)
    assert not benchmark.speed(plain, wrong, 8, Namespace(rounds=1, steps=10))["losses_equal"]


@pytest.mark.parametrize("wrong_after", [None, 0, 1, 2, 3, 4])
def test_the_losses_after_each_pause_are_compared(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, wrong_after: int | None
) -> None:
    used = iter(range(0, -100, -1))
    monkeypatch.setattr(benchmark, "smi_bytes", lambda: next(used))
    process = Steps("taken", wrong_after=wrong_after)
    found = benchmark.pauses(process, [str(number) for number in range(50)], 8)
    assert found["losses_equal"] == (wrong_after is None)
    asked = [each for each, _ in process.asked if each not in ("steps", "reset")]
    each = ["pause", "allocate", "resume", "check"]
    assert asked == [*each, *each, "pause", "allocate", "empty_cache", "resume", "check", *each]
    policies = [arguments["backup"] for do, arguments in process.asked if do == "pause"]
    assert policies == [None, None, None, "none"]
    assert [row["smi_bytes"]["released"] for row in found["rounds"]] == [1, 1, 1, 1]
    counted = sum(arguments["count"] for do, arguments in process.asked if do == "steps")
    assert counted == found["steps"] == 60


def result() -> dict[str, Any]:
    """All conditions are met, some just so."""
    pause = {"reserved_bytes": 10_100, "other_pools_bytes": 100}
    row = {"pause": pause, "smi_bytes": {"released": 9_900}, "allocated": {"contents_right": True, "outside": True}}
    return {
        "pauses": {"rounds": [copy.deepcopy(row) for _ in range(4)], "losses_equal": True},
        "speed": {"ratio": 1.01, "losses_equal": True},
        "largest_plain": {"batch": 100}, "largest_taken": {"batch": 97}, "largest_shared": {"batch": 97},
        "recovery": {"contents_right": True, "too_much_raised": True, "retries": 1, "peak_bytes": 12 * GIB},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "path", "value"),
    [
        ("speed", "speed ratio", 1.02), ("speed", "speed", {"error": "x"}),
        ("batch", "largest_taken batch", 96), ("batch", "largest_shared batch", 96),
        ("batch", "largest_shared", {"error": "x"}), ("batch", "largest_plain", {"error": "x"}),
        ("losses", "speed losses_equal", False), ("losses", "pauses losses_equal", False),
        ("memory", "pauses rounds 2 smi_bytes released", 9_899), ("memory", "pauses rounds", []),
        ("allocated", "pauses rounds 3 allocated contents_right", False), ("allocated", "pauses rounds", []),
        ("allocated", "pauses rounds 0 allocated outside", False),
        ("recovery", "recovery retries", 0), ("recovery", "recovery contents_right", False),
        ("recovery", "recovery too_much_raised", False), ("recovery", "recovery peak_bytes", 12 * GIB + 1),
        ("recovery", "recovery", {"error": "x"}),
    ],
)  # fmt: skip
def test_each_condition_fails_by_its_figures(benchmark: Any, condition: str, path: str, value: Any) -> None:
    found = result()
    assert set(benchmark.holds(found, 12 * GIB).values()) == {True}
    at: Any = found
    *names, last = [int(name) if name.isdecimal() else name for name in path.split(" ")]
    for name in names:
        at = at[name]
    at[last] = value
    assert not benchmark.holds(found, 12 * GIB)[condition]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_failed_request_names_the_trainer_and_the_error(benchmark: Any) -> None:
    process = benchmark.Process("taken")
    try:
        with pytest.raises(benchmark.Failed, match=r"^taken: \w+: "):
            process.ask("begin", kind="taken", cap_gib=1.0)
        process.send("not a request")
        with pytest.raises(benchmark.Failed, match=r"^taken: AttributeError: "):
            process.reply()
        process._process.kill()
        with pytest.raises(benchmark.Failed, match=r"^taken: ended with -9: "):
            process.ask("reset")
    finally:
        process.close()
