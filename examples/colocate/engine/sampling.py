"""Choosing the next token, in operations that a CUDA graph can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import ops


class Sampler:
    """Samples with random numbers of its own, so that no other user of them is disturbed.

    They follow from `state`, int64 [2] in the region `buffers`: a seed, and a count of calls. All 64 bits of both are
    used. A replay of a graph counts on, and nothing of torch's generators takes part in a capture. A sampler that gets
    another's `state` draws the same numbers next.
    """

    def __init__(self, seed: int, buffers: Any) -> None:
        self.state: Tensor = buffers.empty((2,), torch.int64)
        self.state.copy_(torch.tensor([seed, 0]))

    def __call__(self, logits_BV: Tensor, temperature_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (int64 [B]) and their log-probabilities (fp32 [B]). Triton on CUDA, torch elsewhere.

        The log-probability is that of the distribution that was sampled, log_softmax(logits / t): a policy gradient,
        and the weight of a token that another program sampled, need this one. For t = 0 it is that of t = 1.

        The token is the largest of logit - t * log(noise), noise ~ Exp(1): the Gumbel-max trick, multiplied by t, so
        that t = 0 leaves the logits as they are and is greedy without a branch.
        """
        if ops.in_triton(logits_BV):
            from .kernels.sampling import sample

            return sample(logits_BV, temperature_B, self.state)
        logits = logits_BV.float()
        noise = self._noise(logits.shape).clamp_min_(1e-30)  # it may be zero, whose logarithm is not finite
        tokens_B = torch.argmax(logits - temperature_B[:, None] * noise.log_(), dim=-1)
        scaled = logits / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]
        return tokens_B, scaled.log_softmax(-1).gather(1, tokens_B[:, None]).squeeze(1)

    def _noise(self, shape: torch.Size) -> Tensor:
        """Exponential noise of the next call, on the CPU.

        NumPy's Philox takes seed and count as key and counter. Torch's generator on the CPU drops the upper 32 bits of
        its seed.
        """
        seed, calls = (value % (1 << 64) for value in self.state.tolist())
        self.state[1:].add_(1)
        counter = np.array([0, 0, calls, 0], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=seed, counter=counter))
        return torch.from_numpy(generator.standard_exponential(tuple(shape), dtype=np.float32))
