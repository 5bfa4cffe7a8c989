"""Plans of weights: fused and sharded parameters as vLLM's layers load them, also in another process."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memsaver
from memsaver.drop_in import DropInError
from memsaver.drop_in.vllm.weights import Spec, WeightReceiver, attached, make_plan
from tests.broker_support import Running
from tests.drop_in import fake_vllm
from tests.pool_support import Worker

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, VOCABULARY = 4, 2, 8, 16, 24, 30
SHAPES = {
    "q": (HEADS * SIZE, HIDDEN), "k": (KV_HEADS * SIZE, HIDDEN), "v": (KV_HEADS * SIZE, HIDDEN),
    "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,),
    "embed": (VOCABULARY, HIDDEN),
}  # fmt: skip
SPECS: dict[str, Spec] = {name: (shape, "bfloat16") for name, shape in SHAPES.items()}


class Fused(nn.Module):
    """Parameters of one layer on one of several ranks, with vLLM's ways to load them."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.heads, self.kv_heads, self.inner = HEADS // ranks, max(1, KV_HEADS // ranks), INNER // ranks
        self.vocabulary = -(-VOCABULARY // ranks // 8) * 8  # padded

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, dtype=torch.bfloat16))

        self.qkv = parameter((self.heads + 2 * self.kv_heads) * SIZE, HIDDEN)
        self.gate_up = parameter(2 * self.inner, HIDDEN)
        self.down = parameter(HIDDEN, self.inner)
        self.norm = parameter(HIDDEN)
        self.embed = parameter(self.vocabulary, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        kv_rank = self.rank * self.kv_heads // max(1, -(-self.ranks * self.kv_heads // KV_HEADS))
        for name, weight in weights:
            if name in ("q", "k", "v"):
                heads = self.heads if name == "q" else self.kv_heads
                first = {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads}[name] * SIZE
                start = self.rank * self.heads * SIZE if name == "q" else kv_rank * SIZE
                self.qkv.data.narrow(0, first, heads * SIZE).copy_(weight.narrow(0, start, heads * SIZE))
            elif name in ("gate", "up"):
                part = self.gate_up.data.narrow(0, 0 if name == "gate" else self.inner, self.inner)
                part.copy_(weight.narrow(0, self.rank * self.inner, self.inner))
            elif name == "down":
                self.down.data.copy_(weight.narrow(1, self.rank * self.inner, self.inner))
            elif name == "embed":
                rows = weight[self.rank * self.vocabulary : (self.rank + 1) * self.vocabulary]
                self.embed[: rows.shape[0]].data.copy_(rows)
                self.embed[rows.shape[0] :].data.fill_(0)
            elif name == "norm":
                self.norm.data.copy_(weight)

    def check(self, seed: int) -> None:
        """All that a load of the checkpoint writes is there, zeros of padding included."""
        loaded = Fused(self.rank, self.ranks)
        loaded.load_weights(checkpoint(seed).items())
        for name, expected in loaded.named_parameters():
            assert torch.equal(self.get_parameter(name), expected), name

    def is_untouched(self) -> bool:
        return all(bool((parameter == 7).all()) for parameter in self.parameters())


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
@pytest.mark.parametrize("bucket", [1, 100])
@pytest.mark.parametrize("is_flat", [False, True])
def test_write_equals_load_weights(rank: int, ranks: int, bucket: int, is_flat: bool) -> None:
    model = Fused(rank, ranks)
    plan = make_plan(model, SPECS)
    assert model.is_untouched()
    for seed in (1, 2):
        weights = checkpoint(seed)
        if is_flat:  # all weights in one buffer, as trainers send them
            flat = torch.cat([each.flatten() for each in weights.values()])
            parts = flat.split([each.numel() for each in weights.values()])
            weights = {name: part.view(weights[name].shape) for name, part in zip(weights, parts)}
        names = list(weights)
        for first in range(0, len(names), bucket):
            assert plan.write({name: weights[name] for name in names[first : first + bucket]}) > 0
        model.check(seed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: {"other": weights["q"]}, "there is no weight 'other'"),
        (lambda weights: {"q": weights["q"].float()}, r"'q' is torch.float32 \(32, 16\); expected torch.bfloat16"),
        (lambda weights: {"q": weights["q"][:3]}, r"'q' is torch.bfloat16 \(3, 16\)"),
        (lambda weights: {"norm": weights["norm"].repeat(2)[::2]}, "'norm' has strides"),
    ],
)
def test_write_of_other_weights_raises_and_writes_nothing(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    model, weights = Fused(0, 2), checkpoint()
    plan = make_plan(model, SPECS)
    with pytest.raises(ValueError, match=message):
        plan.write({"down": weights["down"], **change(weights)})
    assert model.is_untouched()


class Loads(nn.Module):
    """A model whose load is the given function of its parameter and the weight."""

    def __init__(self, load: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.load, self.x = load, nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self.load(self.x.data, weight)


@pytest.mark.parametrize(
    ("load", "dtype", "message"),
    [
        (lambda x, weight: x.copy_(weight * 2), "float32", "computes a tensor of shape"),
        (lambda x, weight: x.copy_(weight.flip(0)), "float32", "computes a tensor of shape"),
        (lambda x, weight: x.fill_(weight[0].item()), "float32", "reads the values of a weight"),
        (lambda x, weight: None, "float32", "stores nothing of 'x'"),
        (lambda x, weight: x.mul_(2), "float32", "changes a parameter by aten.mul_"),
        (lambda x, weight: x.copy_(weight), "bfloat16", "'x' is torch.bfloat16 and its parameter torch.float32"),
    ],
)
def test_weights_that_are_not_copied_raise(load: Callable[[Tensor, Tensor], Any], dtype: str, message: str) -> None:
    with pytest.raises(DropInError, match=message):
        make_plan(Loads(load), {"x": ((4,), dtype)})


@pytest.mark.parametrize(
    "module",
    [
        "vllm.model_executor.layers.fused_moe.runner.moe_runner",
        "vllm.model_executor.layers.mla",
        "vllm.model_executor.layers.attention.mla_attention",
    ],
)
def test_layers_that_vllm_processes_after_a_load_raise(module: str) -> None:
    """They have other names in each version: vLLM's experts are of a class MoERunner since 0.24."""
    model = Loads(lambda x, weight: x.copy_(weight))
    model.experts = type("Derived", (type("MoERunner", (nn.Module,), {"__module__": module}),), {})()
    with pytest.raises(DropInError, match="vLLM processes the weights of Derived after a load"):
        make_plan(model, {"x": ((4,), "float32")})


class EngineRank(WeightReceiver):
    """A vLLM worker with this extension."""

    def __init__(self, rank: int) -> None:
        with memsaver.region("vllm.weights", "cpu"):
            self.model = Fused(rank, 2)
        self.model_config = SimpleNamespace(quantization=None)

    def get_model(self) -> Fused:
        return self.model

    def plan(self) -> str:
        # The shapes as vLLM's serialization delivers them.
        specs: Any = json.loads(json.dumps(SPECS))
        return base64.b64encode(self.memsaver_weight_plan(specs)).decode()


def write(plan: str, seed: int) -> int:
    with attached(base64.b64decode(plan)) as weights:
        return weights.write(checkpoint(seed))


def test_trainer_writes_weights_of_each_rank_in_place(tmp_path: Path) -> None:
    """Two processes have engines of a rank each, and another one trains, over a shared pool."""
    fake_vllm.write(tmp_path)
    here = "from tests.drop_in.test_vllm_weights import *"
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    with Running("256MiB") as broker, Worker(broker, here) as trainer:
        for rank in range(2):
            made = path, here, f"engine = EngineRank({rank})"
            with Worker(broker, *made, MEMSAVER_PATCHES="multiprocessing") as engine:
                for seed in (1, 2):
                    plan = engine.run("print(engine.plan())")
                    assert int(trainer.run(f"print(write({plan!r}, {seed}))")) > 0
                    engine.run(f"engine.model.check({seed})")
                    engine.run("memsaver.pause('vllm.weights', backup='none'); memsaver.resume('vllm.weights')")
                    assert "resumed" in trainer.fails(f"write({plan!r}, 1)")  # a plan ends with the next pause
                engine.run("engine.model_config.quantization = 'fp8'")
                assert engine.fails("engine.plan()").startswith("DropInError: the model is quantized (fp8)")
                # A version with other modules of layers: its experts could not be told from other layers.
                (tmp_path / "vllm/model_executor/layers/mla.py").rename(tmp_path / "mla.py")
                assert "there is no" in (said := engine.fails("engine.plan()")) and said.endswith("layers/mla.py")
                (tmp_path / "mla.py").rename(tmp_path / "vllm/model_executor/layers/mla.py")
