"""Log-probabilities of tokens, in chunks: the logits of all tokens never exist at the same time.

Shape suffixes: N tokens to predict, C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, temperature: float, chunk: int, with_statistics: bool
) -> Tensor:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature): fp32 [1, N], in nats.

    `with_statistics`: [3, N], with the entropy of each distribution and the variance of -log p under it, both without a
    gradient. The logits of `chunk` tokens are in memory at once, also in the backward pass, which computes them again.
    """
    parts = [
        checkpoint(
            _chunk, *rows, weight_VC, temperature, with_statistics, use_reentrant=False, preserve_rng_state=False
        )
        for rows in zip(hidden_NC.split(chunk), targets_N.split(chunk))
    ]
    return torch.cat(parts, dim=1)


def _chunk(
    hidden_NC: Tensor, targets_N: Tensor, weight_VC: Tensor, temperature: float, with_statistics: bool
) -> Tensor:
    logits_NV = F.linear(hidden_NC, weight_VC).float() / temperature
    total_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - total_N
    if not with_statistics:
        return logprobs_N[None]
    with torch.no_grad():
        logprobs_NV = logits_NV - total_N[:, None]
        probabilities_NV = logprobs_NV.exp()
        entropy_N = -(probabilities_NV * logprobs_NV).sum(-1)
        variance_N = (probabilities_NV * (logprobs_NV + entropy_N[:, None]).square()).sum(-1)
    return torch.stack((logprobs_N, entropy_N, variance_N))
