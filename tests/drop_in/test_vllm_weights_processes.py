"""A trainer's process writes weights into the fused parameters of another process, over a shared pool."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver
from memsaver.drop_in.vllm.weights import attached
from memsaver.drop_in.vllm.worker_extension import WeightReceiver
from tests.broker_support import Running
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


def test_trainer_writes_weights_of_each_rank_in_place(broker: Running) -> None:
    with Worker(broker, HERE) as trainer:
        for rank in range(RANKS):
            with Worker(broker, HERE, f"engine = EngineRank({rank})") as engine:
                for seed in (1, 2):
                    engine.run("memsaver.pause('vllm.weights', backup='none'); memsaver.resume('vllm.weights')")
                    plan = engine.run("print(engine.plan())")
                    assert int(trainer.run(f"print(write({plan!r}, {seed}))")) > 0
                    engine.run(f"engine.check({rank}, {seed})")


def test_plan_ends_with_the_next_pause(broker: Running) -> None:
    with Worker(broker, HERE, "engine = EngineRank(0)") as engine, Worker(broker, HERE) as trainer:
        plan = engine.run("print(engine.plan())")
        engine.run("memsaver.pause(); memsaver.resume()")
        assert "resumed" in trainer.fails(f"write({plan!r}, 1)")


def test_quantized_model_is_refused(broker: Running) -> None:
    with Worker(broker, HERE, "engine = EngineRank(0, 'fp8')") as engine:
        assert engine.fails("engine.plan()").startswith("DropInError: the model is quantized (fp8)")
