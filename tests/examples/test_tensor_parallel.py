"""Two ranks that share a model, over gloo, against the same model on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.engine.tensor_parallel import Parallel
from examples.colocate.model import ModelConfig, parameter_shapes, weight_layout
from tests.examples.engine_support import QWEN, random_weights
from tests.ranks_support import ranks

SHARED = dataclasses.replace(QWEN, vocab_size=30)
CONFIGS: dict[str, ModelConfig] = {
    "qwen3": SHARED,
    "a vocabulary that is not shared": QWEN,
    "llama, tied": dataclasses.replace(SHARED, qk_norm=False, tie_word_embeddings=True),
    "qwen2.5, bf16": dataclasses.replace(SHARED, qk_norm=False, qkv_bias=True, dtype=torch.bfloat16),
}
PROMPTS, GREEDY = [[3, 1, 4, 1, 5], [9, 2]], SamplingParams(0.0, 8)


@pytest.mark.parametrize("model", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("size", [1, 2])
def test_the_parts_of_all_ranks_are_each_parameter_once(model: ModelConfig, size: int) -> None:
    """Or each of them has it whole. Parts of fused tensors lie one after the other."""
    layouts, shapes = [weight_layout(model, rank, size) for rank in range(size)], parameter_shapes(model)
    for name, shape in shapes.items():
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        parts = [layout[name] for layout in layouts]
        if parts[0].shape != shape:
            assert torch.equal(torch.cat([part.of(full) for part in parts], dim=parts[0].dim), full)
        else:
            assert all(part.shape == shape for part in parts)
    for layout in layouts:
        ends: dict[str, int] = {}
        for part in layout.values():
            assert part.row == ends.get(part.tensor, 0)
            ends[part.tensor] = part.row + part.shape[0]
        assert ends["model.layers.1.self_attn.qkv_proj.weight"] == (4 + 2 * 2) * 16 // size


def test_sizes_that_ranks_cannot_share_raise() -> None:
    with pytest.raises(ValueError, match="num_kv_heads is 2; expected a multiple of the 4 ranks"):
        weight_layout(QWEN, 0, 4)


def check_model(model: ModelConfig) -> None:
    """On one of the two ranks: the same weights from a seed, and the tokens of one rank from weights that come."""
    config = EngineConfig(max_batch_size=2, block_size=4, num_blocks=32)
    engines = [Engine(model, config, parallel=parallel) for parallel in (Parallel(), Parallel(dist.group.WORLD))]
    # A process has one region for a tag, so the two are made, and used, beside each other.
    alone, shared = engines
    whole = {name: tensor.clone() for name, tensor in alone.model.parameters.items()}
    for name, part in shared.weight_layout.items():
        assert torch.equal(shared.model.parameters[name], part.of(whole[name]))
    held = sum(weight.numel() for weight in shared.model.weights.values())
    assert held < 0.7 * sum(weight.numel() for weight in whole.values())
    weights = random_weights(model, seed=1)
    for engine in engines:
        engine.model.load_weights(weights.items())
    mine, theirs = (engine.generate(PROMPTS, GREEDY) for engine in (shared, alone))
    for one, other in zip(mine, theirs):
        if model.dtype == torch.float32:
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        else:  # sums of 8 bits are rounded elsewhere
            assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.2)


def check_rank(rank: int, meeting: str) -> None:
    # All configurations in one process group: most of the time goes into starting the processes.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    for model in CONFIGS.values():
        check_model(model)
    dist.destroy_process_group()


def test_two_ranks_compute_the_same_as_one(tmp_path: Path) -> None:
    with ranks(check_rank, 2, f"file://{tmp_path}/meeting"):
        pass
