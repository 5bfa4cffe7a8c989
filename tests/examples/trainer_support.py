"""A small trainer's settings and samples, for the tests of the trainer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.colocate.model import ModelConfig
from examples.colocate.trainer.interface import Sample, TrainerConfig
from examples.colocate.trainer.trainer import Trainer
from examples.colocate.trainer.trainer_memory import local

TAGS = ["params", "optimizer", "grads"]
MODEL = ModelConfig(
    vocab_size=16,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position=32,
)
PLAIN = TrainerConfig(checkpoint_layers=False)


def samples(count: int = 8, seed: int = 0) -> list[Sample]:
    """Prompts of 2 to 4 tokens, completions of 1 to 5."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, row in enumerate(torch.randint(1, MODEL.vocab_size, (count, 9), generator=generator).tolist()):
        first = 2 + index % 3
        completion, advantage = row[first : 5 + index % 5], torch.randn((), generator=generator)
        found.append(Sample(row[:first], completion, [-2.0] * len(completion), float(advantage)))
    return found


def addresses(trainer: Trainer) -> dict[str, int]:
    """Of every tensor that lasts: parameters, moments, step counters, and gradients."""
    lasting = trainer.state()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        lasting[f"grads.{name}"] = parameter.grad
    return {name: local(tensor).data_ptr() for name, tensor in lasting.items()}


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Full, by name, in the model's dtype."""
    return {
        name: whole(parameter).to(trainer.model_config.dtype) for name, parameter in trainer.model.named_parameters()
    }


def whole(parameter: Tensor) -> Tensor:
    """Of all ranks. A collective."""
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()
