"""Sums over the sampled tokens of a rollout: the gap to the sampler, and a test of the sampler."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStatistics:
    """In nats. `policy` is the trainer's log-probability of a token, `sampler` that of the program that sampled it."""

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
