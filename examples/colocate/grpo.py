"""Group-relative policy optimization: advantages from groups of completions, and the clipped policy loss.

After "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (GRPO) and "Proximal Policy
Optimization Algorithms" (clipping), with the mean over all tokens of a batch and without a reference model. The weights
for tokens that another program sampled are truncated importance weights: Ionides, "Truncated Importance Sampling".

Shape suffixes: P prompts, G completions of each prompt, N tokens of completions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SMALLEST_DEVIATION = 1e-4  # keeps groups of equal rewards at zero
_LARGEST_LOG_RATIO = 20.0  # nats: exp(20) is 5e8, far beyond every clip, and its products stay finite in fp32


def group_advantages(rewards_PG: Tensor, zero: bool = False) -> Tensor:
    """Each completion's reward against its group, in units of the group's standard deviation: fp32 [P, G], from fp64.

    `zero` makes all of them zero: a control, in which nothing can be learned.
    """
    deviation_P1, mean_P1 = torch.std_mean(rewards_PG.double(), 1, keepdim=True, unbiased=False)
    advantages_PG = ((rewards_PG - mean_P1) / (deviation_P1 + _SMALLEST_DEVIATION)).float()
    return advantages_PG * 0.0 if zero else advantages_PG


def importance_weights(policy_N: Tensor, sampler_N: Tensor, cap: float) -> Tensor:
    """min(exp(policy - sampler), cap): how much more likely the policy's own program makes a token than the sampler's.

    Both are log-probabilities, in nats, that two programs compute from the same weights. The weights are constants of
    the loss. The cap bounds the variance that one token can cause; below 1 nothing is truncated.
    """
    return (policy_N - sampler_N).detach().clamp(max=math.log(cap)).exp()


def policy_loss(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, weights_N: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """(loss, clipped): the sum over tokens of the clipped surrogate's negative, and how many tokens the clip held back.

    `behaviour_N` are the log-probabilities under the policy that chose the tokens; both are in nats. `weights_N`
    multiply each token's part, see `importance_weights`. The caller divides by the number of tokens of all ranks.

    A ratio beyond exp(20), to either side, counts as exp(20) or exp(-20) and has no gradient.
    """
    # An infinite ratio times an advantage of zero, or times the zero gradient of a clipped token, is NaN.
    ratio_N = (logprobs_N - behaviour_N).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip) * advantages_N
    loss_N = -plain_N.minimum(clipped_N) * weights_N
    return loss_N.sum(), (clipped_N < plain_N).sum()
