"""Choosing the next token, in operations that a CUDA graph can hold."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST_NOISE = 1e-30  # exponential noise may come out as zero, whose logarithm is not finite


class Sampler:
    """Samples with a generator of its own, on the device, so that no other user of random numbers is disturbed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def renew(self) -> None:
        """Replace the generator, with another seed: one that took part in a failed capture stays unusable."""
        seed = self.generator.initial_seed() + 1
        self.generator = torch.Generator(self.generator.device).manual_seed(seed)

    def __call__(self, logits_BV: Tensor, temperature_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (int64 [B]) and their log-probabilities (fp32 [B]).

        The log-probability is that of the model's own distribution, at temperature 1, whatever the temperature the
        token was chosen with: what a policy gradient needs, and the sampling distribution itself at temperature 1.

        The token is the largest of logit - t * log(noise), noise ~ Exp(1): the Gumbel-max trick, multiplied by t, so
        that t = 0 leaves the logits as they are and is greedy without a branch.
        """
        logits = logits_BV.float()
        noise = torch.empty_like(logits).exponential_(generator=self.generator).clamp_min_(_SMALLEST_NOISE)
        tokens_B = torch.argmax(logits - temperature_B[:, None] * noise.log_(), dim=-1)
        chosen_B = logits.gather(1, tokens_B[:, None]).squeeze(1)
        return tokens_B, chosen_B - logits.logsumexp(dim=-1)
