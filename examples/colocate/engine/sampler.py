"""Choosing the next token, in operations that a CUDA graph can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SMALLEST_NOISE = 1e-30  # exponential noise may come out as zero, whose logarithm is not finite


class Sampler:
    """Samples with random numbers of its own, so that no other user of them is disturbed.

    On CUDA they follow from a seed and a count of calls, which live in the region `buffers`: a replay counts on, and
    nothing of torch's generators takes part in a capture.
    """

    def __init__(self, device: torch.device, seed: int, buffers: Any) -> None:
        self.state: Tensor = buffers.empty((2,), torch.int64)
        self.state.copy_(torch.tensor([seed, 0]))
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_BV: Tensor, temperature_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (int64 [B]) and their log-probabilities (fp32 [B]). Triton on CUDA, torch elsewhere.

        The log-probability is that of the model's own distribution, at temperature 1, whatever the temperature the
        token was chosen with: what a policy gradient needs, and the sampling distribution itself at temperature 1.

        The token is the largest of logit - t * log(noise), noise ~ Exp(1): the Gumbel-max trick, multiplied by t, so
        that t = 0 leaves the logits as they are and is greedy without a branch.
        """
        if logits_BV.is_cuda:
            from .sampling_kernel import sample

            return sample(logits_BV, temperature_B, self.state)
        logits = logits_BV.float()
        noise = torch.empty_like(logits).exponential_(generator=self._generator).clamp_min_(_SMALLEST_NOISE)
        tokens_B = torch.argmax(logits - temperature_B[:, None] * noise.log_(), dim=-1)
        chosen_B = logits.gather(1, tokens_B[:, None]).squeeze(1)
        return tokens_B, chosen_B - logits.logsumexp(dim=-1)
