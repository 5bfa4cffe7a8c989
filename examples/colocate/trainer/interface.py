"""What a trainer takes and returns: settings, samples, figures, errors. All processes of a run import this module, and
none but the trainers the rest: torch's FSDP2 takes seconds to import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class TokenStatistics:
    """Sums over sampled tokens, in nats: the gap to the sampler, and a test of the sampler.

    `policy` is the trainer's log-probability of a token, `sampler` that of the program that sampled it.
    """

    tokens: float = 0.0
    gap: float = 0.0  # sum of |policy - sampler|
    largest_gap: float = 0.0  # NaN if that of any token is
    capped: float = 0.0  # importance weights that were truncated
    entropy: float = 0.0  # sum over the distributions that the tokens were drawn from
    surprise: float = 0.0  # sum of -policy - entropy: zero but for chance, if the tokens were drawn from these
    variance: float = 0.0  # sum of the variances of -policy under these

    @classmethod
    def of(
        cls, policy_N: Tensor, sampler_N: Tensor, entropy_N: Tensor, variance_N: Tensor, cap: float
    ) -> TokenStatistics:
        """`cap`: that of the weights exp(policy - sampler)."""
        gaps_N = (policy_N - sampler_N).double()
        largest = gaps_N.abs().max() if len(gaps_N) else gaps_N.new_zeros(())
        surprise, capped = -policy_N.double() - entropy_N.double(), gaps_N > math.log(cap)
        sums = (each.double().sum() for each in (capped, entropy_N, surprise, variance_N))
        found = torch.stack([gaps_N.abs().sum(), largest, *sums])
        return cls(len(gaps_N), *found.tolist())  # one copy to the host

    @classmethod
    def joined(cls, parts: Iterable[TokenStatistics]) -> TokenStatistics:
        """Those of all parts together, such as those of all ranks, or of all steps of a run."""
        figures = torch.tensor([astuple(part) for part in (cls(), *parts)], dtype=torch.float64)
        sums = figures.sum(0)
        sums[2] = figures[:, 2].max()  # torch's maximum is NaN if any number is
        return cls(*sums.tolist())

    def mean(self, name: str) -> float:
        """Of a field, over the tokens."""
        value: float = getattr(self, name)
        return value / max(self.tokens, 1.0)

    @property
    def z(self) -> float:
        """How many standard errors the tokens are less likely than draws from the trainer's distributions are.

        Within 4 of zero if they are such draws. Of a lower temperature, or a cut of unlikely tokens, it falls below, in
        proportion to the square root of the number of tokens. NaN if there is a NaN.
        """
        return self.surprise / math.sqrt(self.variance) if self.variance else 0.0


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or gone on from."""


class NonFiniteError(RuntimeError):
    """A step's loss or gradients are NaN or infinite. All ranks raise it, and nothing has changed."""
