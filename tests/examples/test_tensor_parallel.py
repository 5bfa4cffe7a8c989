"""Two ranks that share a model, over gloo, against the same model on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from examples.colocate.engine.checkpoint import build
from examples.colocate.engine.gpt2 import GPT2Config
from examples.colocate.engine.model import Config, Model
from examples.colocate.engine.parallel import Parallel
from tests.examples.engine_support import CPU, QWEN, DenseAttention
from tests.ranks_support import ranks

SHARED = dataclasses.replace(QWEN, vocab_size=30)
GPT2 = GPT2Config(vocab_size=31, hidden_size=32, num_layers=2, num_heads=4, max_position=32, inner_size=40)
CONFIGS: dict[str, Config] = {
    "qwen": SHARED,
    "qwen, a vocabulary that is not shared": QWEN,
    "llama, tied": dataclasses.replace(SHARED, qk_norm=False, tie_word_embeddings=True),
    "gpt2, a vocabulary that is not shared": GPT2,
    "gpt2": dataclasses.replace(GPT2, vocab_size=30),
}


def weights(model: Model) -> dict[str, Tensor]:
    """Large enough for clear winners among the logits."""
    generator = torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(each.shape, generator=generator) for name, each in model.parameters.items()}


@torch.no_grad()
def greedy(model: Model) -> tuple[list[int], Tensor]:
    """Tokens after a prompt, and the logits that chose them."""
    attention, tokens, logits = DenseAttention(), torch.tensor([3, 1, 4, 1, 5]), []
    position = 0
    chosen: list[int] = []
    for _ in range(8):
        positions = torch.arange(position, position + len(tokens))
        logits.append(model.logits(model.forward(tokens, positions, attention)))
        position += len(tokens)
        tokens = logits[-1][-1:].argmax(-1)
        chosen.append(int(tokens))
    return chosen, torch.cat(logits)


def check_rank(config: Config) -> None:
    """On one of the two ranks: the same weights from a seed, the same logits and tokens from a checkpoint."""
    alone = build(config, CPU, CPU)
    model = build(config, CPU, CPU, Parallel(dist.group.WORLD))
    alone.initialize(seed=5)
    model.initialize(seed=5)
    held = sum(weight.numel() for weight in model.weights.values())
    assert held < 0.7 * sum(weight.numel() for weight in alone.weights.values())
    torch.testing.assert_close(greedy(model)[1], greedy(alone)[1], atol=1e-5, rtol=0)
    full = weights(alone)
    for each in (alone, model):
        each.load_weights(full.items())
    tokens, logits = greedy(model)
    expected_tokens, expected = greedy(alone)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert tokens == expected_tokens


def check_ranks(rank: int, meeting: str) -> None:
    # All configurations in one process group: most of the time goes into starting the processes.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    for config in CONFIGS.values():
        check_rank(config)
    dist.destroy_process_group()


def test_two_ranks_compute_the_same_as_one(tmp_path: Path) -> None:
    with ranks(check_ranks, 2, f"file://{tmp_path}/meeting"):
        pass
