"""The gap between the log-probabilities of the program that sampled tokens and the trainer's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LogprobGap:
    """Of some tokens: absolute differences, in nats, and how many importance weights were truncated."""

    largest: float  # NaN if that of any token is
    total: float  # the sum of all
    truncated: int
    tokens: int

    @classmethod
    def of(cls, policy_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, cap: float) -> LogprobGap:
        """Where the mask is true. `cap`: that of the weights exp(policy - sampler)."""
        gaps = (policy_BT - sampler_BT)[mask_BT].double()
        if not gaps.numel():
            return cls(0.0, 0.0, 0, 0)
        # torch's maximum is NaN if any gap is.
        return cls(float(gaps.abs().max()), float(gaps.abs().sum()), int((gaps > math.log(cap)).sum()), gaps.numel())

    @classmethod
    def joined(cls, parts: Sequence[LogprobGap]) -> LogprobGap:
        """That of all parts together, such as those of all ranks."""
        largest = [part.largest for part in parts]
        # Python's maximum of 0.0 and NaN is 0.0, or NaN, by their order.
        return cls(
            math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0),
            sum(part.total for part in parts),
            sum(part.truncated for part in parts),
            sum(part.tokens for part in parts),
        )

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def truncated_share(self) -> float:
        return self.truncated / self.tokens if self.tokens else 0.0
