"""Choosing the next token, in operations that a CUDA graph can hold."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import ops


@ops.triton_on_cuda("sampling")
def sample(logits_BV: Tensor, temperature_B: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (int64 [B]) and their log-probabilities (fp32 [B]).

    Random numbers follow from `state`, int64 [2]: a seed, and a count of calls, which goes up by one, also in a graph.

    The log-probability is that of the distribution that was sampled, log_softmax(logits / t): a policy gradient,
    and the weight of a token that another program sampled, need this one. For t = 0 it is that of t = 1.

    The token is the largest of logit - t * log(noise), noise ~ Exp(1): the Gumbel-max trick, multiplied by t, so
    that t = 0 leaves the logits as they are and is greedy without a branch.
    """
    # NumPy's Philox takes seed and count as key and counter. Torch's generator on the CPU drops the upper 32 bits of
    # its seed.
    seed, calls = (value % (1 << 64) for value in state.tolist())
    state[1:].add_(1)
    generator = np.random.Generator(np.random.Philox(key=seed, counter=np.array([0, 0, calls, 0], np.uint64)))
    noise = torch.from_numpy(generator.standard_exponential(tuple(logits_BV.shape), dtype=np.float32))
    logits = logits_BV.float()
    # It may be zero, whose logarithm is not finite.
    tokens_B = torch.argmax(logits - temperature_B[:, None] * noise.clamp_min_(1e-30).log_(), dim=-1)
    scaled = logits / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    return tokens_B, scaled.log_softmax(-1).gather(1, tokens_B[:, None]).squeeze(1)
