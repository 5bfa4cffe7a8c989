"""The optimizer's switches."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerConfig:
    """Of AdamW without weight decay, so that a step without a gradient changes nothing.

    Raises ValueError for bad values.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    clip: float = 0.2  # how far the policy's ratio counts, to either side of one
    weight_cap: float = 2.0  # of the importance weights for tokens that another program sampled
    seed: int = 0  # of the initial weights

    def __post_init__(self) -> None:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas are {self.betas}; expected two numbers from 0 to below 1")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; expected a positive number")
        if not 0 < self.clip < 1:
            raise ValueError(f"clip is {self.clip}; expected a number between 0 and 1")
        if not 1 <= self.weight_cap < math.inf:
            raise ValueError(f"weight_cap is {self.weight_cap}; expected a finite number of 1 or more")
