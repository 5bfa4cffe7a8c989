"""The layers as pure functions: one arithmetic for the engine and the trainer, so that their log-probabilities agree.

Shape suffixes: T tokens, H heads, D head dimension, C hidden size, P positions; `...` is any leading shape.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension of x [..., C], in fp32, returned in x's dtype."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every position's angles, each fp32 [P, D / 2], on the CPU: the same values for every device."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_frequencies is not None:
        frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float64, device="cpu")
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float64, device="cpu"), frequencies)
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., T, H, D] by its positions' angles: cos and sin are table rows [..., T, D / 2].

    The halves of D form the pairs, as in Hugging Face checkpoints of this family.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times the other half, elementwise."""
    return F.silu(gate) * up
