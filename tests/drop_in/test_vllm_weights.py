"""Plans of weights: fused and sharded parameters as vLLM's layers load them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.vllm.weights import AttachedWeights, Spec, WeightPlan, find_pieces

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, VOCABULARY = 4, 2, 8, 16, 24, 30


class Fused(nn.Module):
    """Parameters of one layer on one of several ranks, with vLLM's ways to load them."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.heads, self.kv_heads, self.inner = HEADS // ranks, max(1, KV_HEADS // ranks), INNER // ranks
        self.vocabulary = -(-VOCABULARY // ranks // 8) * 8  # padded
        dtype = torch.bfloat16
        self.qkv = nn.Parameter(torch.full(((self.heads + 2 * self.kv_heads) * SIZE, HIDDEN), 7.0, dtype=dtype))
        self.gate_up = nn.Parameter(torch.full((2 * self.inner, HIDDEN), 7.0, dtype=dtype))
        self.down = nn.Parameter(torch.full((HIDDEN, self.inner), 7.0, dtype=dtype))
        self.norm = nn.Parameter(torch.full((HIDDEN,), 7.0, dtype=dtype))
        self.embed = nn.Parameter(torch.full((self.vocabulary, HIDDEN), 7.0, dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        kv_rank = self.rank * self.kv_heads // max(1, -(-self.ranks * self.kv_heads // KV_HEADS))
        for name, weight in weights:
            if name in ("q", "k", "v"):
                heads = self.heads if name == "q" else self.kv_heads
                first = {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads}[name] * SIZE
                start = self.rank * self.heads * SIZE if name == "q" else kv_rank * SIZE
                part = self.qkv.data.narrow(0, first, heads * SIZE)
                part.copy_(weight.narrow(0, start, heads * SIZE))
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
            loaded.add(name)
        return loaded


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (HEADS * SIZE, HIDDEN), "k": (KV_HEADS * SIZE, HIDDEN), "v": (KV_HEADS * SIZE, HIDDEN),
        "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,),
        "embed": (VOCABULARY, HIDDEN),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def specs_of(weights: dict[str, Tensor]) -> dict[str, Spec]:
    return {name: (tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in weights.items()}


def writer(model: Fused, weights: dict[str, Tensor]) -> AttachedWeights:
    """Targets in this process, which an attachment maps in another."""
    pieces, targets = find_pieces(model, specs_of(weights))
    plan = WeightPlan(specs_of(weights), tuple(pieces), None)  # type: ignore[arg-type]
    return AttachedWeights(pickle.loads(pickle.dumps(plan)), targets)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
@pytest.mark.parametrize("bucket", [1, 100])
@pytest.mark.parametrize("is_flat", [False, True])
def test_write_equals_load_weights(rank: int, ranks: int, bucket: int, is_flat: bool) -> None:
    loaded, written, weights = Fused(rank, ranks), Fused(rank, ranks), checkpoint()
    loaded.load_weights(iter(weights.items()))
    if is_flat:  # all weights in one buffer, as trainers send them
        flat = torch.cat([each.flatten() for each in weights.values()])
        parts = flat.split([each.numel() for each in weights.values()])
        weights = {name: part.view(weights[name].shape) for name, part in zip(weights, parts)}
    target = writer(written, weights)
    for parameter in written.parameters():
        assert bool((parameter == 7).all())  # the plan has changed nothing
    names = list(weights)
    for first in range(0, len(names), bucket):
        some = {name: weights[name] for name in names[first : first + bucket]}
        assert target.write(some) > 0
    for name, parameter in loaded.named_parameters():
        expected, found = parameter.data, written.get_parameter(name).data
        assert torch.equal(found, expected), name


def test_plan_is_valid_for_later_weights() -> None:
    loaded, written = Fused(0, 2), Fused(0, 2)
    target = writer(written, checkpoint())
    target.write(checkpoint(1))
    target.write(checkpoint(2))
    loaded.load_weights(iter(checkpoint(2).items()))
    assert torch.equal(written.qkv, loaded.qkv)


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
    target = writer(model, weights)
    with pytest.raises(ValueError, match=message):
        target.write({"down": weights["down"], **change(weights)})
    assert bool((model.down == 7).all())


class Loads(nn.Module):
    """A model whose load is the given function of its parameter and the weight."""

    def __init__(self, load: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.load, self.x = load, nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self.load(self.x.data, weight)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda x, weight: x.copy_(weight * 2), "computes a tensor of shape"),
        (lambda x, weight: x.copy_(weight.flip(0)), "computes a tensor of shape"),
        (lambda x, weight: x.fill_(weight[0].item()), "reads the values of a weight"),
        (lambda x, weight: None, "stores nothing of 'x'"),
        (lambda x, weight: x.mul_(2), "changes a parameter by aten.mul_"),
    ],
)
def test_weights_that_are_not_copied_raise(load: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises(DropInError, match=message):
        find_pieces(Loads(load), {"x": ((4,), "float32")})


def test_weights_of_another_dtype_raise() -> None:
    with pytest.raises(DropInError, match="'x' is torch.bfloat16 and its parameter torch.float32"):
        find_pieces(Loads(lambda x, weight: x.copy_(weight)), {"x": ((4,), "bfloat16")})


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
        find_pieces(model, {"x": ((4,), "float32")})
