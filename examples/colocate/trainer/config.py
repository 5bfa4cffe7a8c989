"""The trainer's settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TrainerConfig:
    """Of AdamW without weight decay, so that a step without a gradient changes nothing, and of the computation.

    Parameters, gradients and moments are in fp32, whatever `dtype` is.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    clip: float = 0.2  # how far the policy's ratio counts, to either side of one
    weight_cap: float = 2.0  # of the importance weights for tokens that another program sampled
    temperature: float = 1.0  # of the sampled distribution: logits are divided by it
    seed: int = 0  # of random initial weights
    dtype: torch.dtype = torch.float32  # of activations and gathered parameters
    micro_batch_tokens: int = 16384  # that pass through the model at once; a longer sequence passes alone
    logit_chunk: int = 1024  # tokens whose logits are in memory at once
    checkpoint_layers: bool = True  # keep a layer's input alone, and compute the rest again in the backward pass
