"""A trainer's process writes weights into the fused parameters of another process, over a shared pool."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver
from memsaver.drop_in.vllm.weights import attached
from memsaver.drop_in.vllm.worker_extension import WeightReceiver
from tests.broker_support import Running
from tests.drop_in import fake_vllm
from tests.drop_in.test_vllm_weights import Fused, checkpoint, specs_of
from tests.pool_support import Worker

HERE = "from tests.drop_in.test_vllm_weights_processes import *"
RANKS = 2


class EngineRank(WeightReceiver):
    """A vLLM worker with this extension."""

    def __init__(self, rank: int, quantization: str | None = None) -> None:
        with memsaver.region("vllm.weights", "cpu"):
            self.model = Fused(rank, RANKS)
        self.model_config = SimpleNamespace(quantization=quantization)

    def get_model(self) -> Fused:
        return self.model

    def plan(self) -> str:
        # The shapes as vLLM's serialization delivers them.
        specs: Any = json.loads(json.dumps(specs_of(checkpoint())))
        return base64.b64encode(self.memsaver_weight_plan(specs)).decode()

    def check(self, rank: int, seed: int) -> None:
        """All that a load writes is there, zeros of padding included."""
        loaded = Fused(rank, RANKS)
        loaded.load_weights(iter(checkpoint(seed).items()))
        for name, expected in loaded.named_parameters():
            assert torch.equal(self.model.get_parameter(name), expected), name


def write(plan: str, seed: int) -> int:
    with attached(base64.b64decode(plan)) as weights:
        return weights.write(checkpoint(seed))


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running("256MiB") as running:
        yield running


@pytest.fixture
def engine_of(broker: Running, tmp_path: Path) -> Callable[..., Worker]:
    """Makes a process with vLLM that has the engine of a rank."""
    fake_vllm.write(tmp_path)
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    return lambda *arguments: Worker(
        broker, path, HERE, f"engine = EngineRank(*{arguments!r})", MEMSAVER_PATCHES="multiprocessing"
    )


def test_trainer_writes_weights_of_each_rank_in_place(broker: Running, engine_of: Callable[..., Worker]) -> None:
    with Worker(broker, HERE) as trainer:
        for rank in range(RANKS):
            with engine_of(rank) as engine:
                for seed in (1, 2):
                    engine.run("memsaver.pause('vllm.weights', backup='none'); memsaver.resume('vllm.weights')")
                    plan = engine.run("print(engine.plan())")
                    assert int(trainer.run(f"print(write({plan!r}, {seed}))")) > 0
                    engine.run(f"engine.check({rank}, {seed})")


def test_plan_ends_with_the_next_pause(broker: Running, engine_of: Callable[..., Worker]) -> None:
    with engine_of(0) as engine, Worker(broker, HERE) as trainer:
        plan = engine.run("print(engine.plan())")
        engine.run("memsaver.pause(); memsaver.resume()")
        assert "resumed" in trainer.fails(f"write({plan!r}, 1)")


def test_version_with_other_modules_of_layers_is_refused(engine_of: Callable[..., Worker], tmp_path: Path) -> None:
    """Its experts could not be told from other layers."""
    with engine_of(0) as engine:
        (tmp_path / "vllm/model_executor/layers/mla.py").unlink()
        assert "there is no" in (said := engine.fails("engine.plan()")) and said.endswith("layers/mla.py")


def test_quantized_model_is_refused(engine_of: Callable[..., Worker]) -> None:
    with engine_of(0, "fp8") as engine:
        assert engine.fails("engine.plan()").startswith("DropInError: the model is quantized (fp8)")
