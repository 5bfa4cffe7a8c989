"""Settings, samples, figures and errors: the types of the trainer's arguments and results.

All processes of a run import this module. Trainers alone import the rest of the package: torch's FSDP2 takes seconds to
import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainerConfig:
    """Of AdamW without weight decay, so that a step without a gradient changes nothing, and of the computation.

    Parameters, gradients and moments are in fp32 for every `dtype`.
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


@dataclass(frozen=True)
class StepMetrics:
    """Figures of a step over all ranks: `loss` per token; `clipped`, the share of tokens whose ratio was clipped."""

    loss: float
    grad_norm: float  # before clipping
    clipped: float


@dataclass(frozen=True)
class Sample:
    """A prompt and its completion, as token ids, a token or more of each.

    `logprobs`: of the completion's tokens, in nats, from the program that sampled them; None: zeros. `advantage`: the
    worth of the completion. Both matter to policy-gradient steps alone.
    """

    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None = None
    advantage: float = 0.0

    @property
    def length(self) -> int:
        """Tokens that the model reads: all but the last one, which nothing follows."""
        return len(self.prompt) + len(self.completion) - 1


class TokenStatistics(NamedTuple):
    """Of sampled tokens, in nats, the variance in their square: [N]. After `joined` in fp64, on the host."""

    policy_N: Tensor  # their log-probabilities by the trainer
    sampler_N: Tensor  # and by the program that sampled them
    entropy_N: Tensor  # of the distributions that they were drawn from, by the trainer
    variance_N: Tensor  # of -log p under these

    @classmethod
    def joined(cls, parts: Iterable[TokenStatistics]) -> TokenStatistics:
        """Those of all parts together, such as those of all ranks."""
        return cls(*torch.cat([torch.stack(part) for part in parts], dim=1).double().cpu())  # one copy to the host

    @property
    def gap_N(self) -> Tensor:
        return (self.policy_N - self.sampler_N).abs()

    def capped_N(self, cap: float) -> Tensor:
        """Where the importance weight exp(policy - sampler) exceeds its cap."""
        return self.policy_N - self.sampler_N > math.log(cap)

    @property
    def surprise(self) -> tuple[float, float]:
        """The sum of -policy - entropy, zero but for chance if the tokens are draws from the trainer's distributions,
        and its variance then.
        """
        return float(-(self.policy_N + self.entropy_N).sum()), float(self.variance_N.sum())


def standard_errors(surprise: float, variance: float) -> float:
    """How many standard errors tokens are less likely than draws from the trainer's distributions are.

    Within 4 of zero if they are such draws. Of a lower temperature, or a cut of unlikely tokens, it falls below, in
    proportion to the square root of the number of tokens. NaN if there is a NaN.
    """
    return surprise / math.sqrt(variance) if variance else 0.0


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or gone on from."""


class NonFiniteError(RuntimeError):
    """A step's loss or gradients are NaN or infinite. All ranks raise it, and nothing has changed."""
