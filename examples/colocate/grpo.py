"""Group-relative policy optimization: advantages from groups of completions, and the clipped policy loss.

After "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (GRPO) and "Proximal Policy
Optimization Algorithms" (clipping), with the mean over all tokens of a batch and without a reference model.

Shape suffixes: P prompts, G completions of each prompt, B completions, T positions.
"""

from __future__ import annotations

from torch import Tensor

_SMALLEST_DEVIATION = 1e-4  # keeps groups of equal rewards at zero


def group_advantages(rewards_PG: Tensor, zero: bool = False) -> Tensor:
    """Each completion's reward against its group, in units of the group's standard deviation: fp32 [P, G].

    `zero` makes all of them zero: a control, in which nothing can be learned.
    """
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ValueError(f"rewards have shape {tuple(rewards_PG.shape)}; expected [prompts, 2 completions or more]")
    rewards_PG = rewards_PG.float()
    mean_P1 = rewards_PG.mean(1, keepdim=True)
    deviation_P1 = rewards_PG.std(1, keepdim=True, unbiased=False)
    advantages_PG = (rewards_PG - mean_P1) / (deviation_P1 + _SMALLEST_DEVIATION)
    return advantages_PG * 0.0 if zero else advantages_PG


def policy_loss(
    logprobs_BT: Tensor, behaviour_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """(loss, clipped): the sum over tokens of the clipped surrogate's negative, and how many tokens the clip held back.

    `behaviour_BT` are the log-probabilities under the policy that chose the tokens; both are in nats. Only tokens where
    `mask_BT` is true count. The caller divides by the number of tokens, which only it knows for all ranks.
    """
    if not 0 < clip < 1:
        raise ValueError(f"clip is {clip}; expected a number between 0 and 1")
    # Masked first: what stands at other positions must not reach the exponential.
    ratio_BT = (logprobs_BT - behaviour_BT).masked_fill(~mask_BT, 0.0).exp()
    advantages_B1 = advantages_B[:, None]
    plain_BT = ratio_BT * advantages_B1
    clipped_BT = ratio_BT.clamp(1 - clip, 1 + clip) * advantages_B1
    held_BT = (clipped_BT < plain_BT) & mask_BT
    loss_BT = -plain_BT.minimum(clipped_BT)
    return loss_BT.masked_fill(~mask_BT, 0.0).sum(), held_BT.sum()
