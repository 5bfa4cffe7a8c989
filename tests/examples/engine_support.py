"""Helpers of the tests of the engine and its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import memsaver
from examples.colocate.engine import Engine
from examples.colocate.engine.checkpoint import build
from examples.colocate.engine.memory import Unmanaged
from examples.colocate.engine.model import Config
from examples.colocate.model import ModelConfig, parameter_shapes

CPU = Unmanaged(torch.device("cpu"))  # in place of a region
QWEN = ModelConfig(
    vocab_size=29,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position=96,
)
MakeEngine = Callable[..., Engine]


def random_weights(model: Config, seed: int = 0, deviation: float = 0.3) -> dict[str, Tensor]:
    """Large enough for clear winners among the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    if isinstance(model, ModelConfig):
        shapes = parameter_shapes(model)
    else:
        shapes = {name: parameter.shape for name, parameter in build(model, CPU, CPU).layout().items()}
    for name, shape in shapes.items():
        mean, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, deviation)
        weights[name] = (mean + spread * torch.randn(shape, generator=generator)).to(model.dtype)
    return weights


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """A list for the test's engines. After the test they are closed, and all regions are active."""
    made: list[Engine] = []
    yield made
    memsaver.resume()
    for engine in made:
        engine.close()


class DenseAttention:
    """One sequence's attention, in fp32. It keeps the keys and values it has seen."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if layer in self.seen:
            k_TKD, v_TKD = (torch.cat(pair) for pair in zip(self.seen[layer], (k_TKD, v_TKD)))
        self.seen[layer] = k_TKD, v_TKD
        group, new, length = q_THD.shape[1] // k_TKD.shape[1], len(q_THD), len(k_TKD)
        q_THD, k_LHD, v_LHD = (x.float() for x in (q_THD, *(y.repeat_interleave(group, 1) for y in (k_TKD, v_TKD))))
        scores = torch.einsum("thd,lhd->htl", q_THD, k_LHD) / q_THD.shape[-1] ** 0.5
        scores.masked_fill_(torch.ones(new, length, dtype=torch.bool).triu(length - new + 1), float("-inf"))
        return torch.einsum("htl,lhd->thd", scores.softmax(-1), v_LHD).to(k_TKD.dtype)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread: these tensors are too small for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
