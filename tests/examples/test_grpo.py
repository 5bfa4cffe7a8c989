"""Advantages of groups, and the clipped loss."""

from __future__ import annotations

import math

import pytest
import torch

from examples.colocate.grpo import group_advantages, importance_weights, policy_loss


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    advantages = group_advantages(rewards)
    assert torch.allclose(advantages[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3)
    assert torch.equal(advantages[1], torch.zeros(4))
    assert torch.allclose(advantages.mean(1), torch.zeros(3), atol=1e-6)
    assert advantages[2, 3] == pytest.approx(math.sqrt(3), rel=1e-3)
    assert torch.equal(group_advantages(rewards, zero=True), torch.zeros(3, 4))
    step = 2.0**-10
    near = group_advantages(torch.tensor([[1000.0, 1000.0 + step, 1000.0 + step]]))  # fp32 has no number for their mean
    assert near[0, 0] == pytest.approx(-2 * step / (math.sqrt(2) * step + 3e-4), rel=1e-6)


def loss_of(logprob: float, behaviour: float, advantage: float) -> tuple[float, int, float]:
    """Loss of one token, whether it is clipped, and the gradient by its log-probability."""
    logprobs = torch.tensor([logprob], requires_grad=True)
    one = torch.ones(1)
    loss, clipped = policy_loss(logprobs, behaviour * one, advantage * one, one, 0.2)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), int(clipped), logprobs.grad.item()


@pytest.mark.parametrize("log_ratio", [-19.9, -3.0, -0.3, 0.0, 0.1, 0.3, 3.0, 19.9])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_ratio_is_clipped_in_the_direction_of_the_advantage_alone(log_ratio: float, advantage: float) -> None:
    loss, clipped, gradient = loss_of(log_ratio, 0.0, advantage)
    ratio = math.exp(log_ratio)
    if (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8):
        assert (clipped, gradient) == (1, 0.0)
        assert loss == pytest.approx(-advantage * min(max(ratio, 0.8), 1.2))
    else:
        assert clipped == 0
        assert loss == pytest.approx(-advantage * ratio, rel=1e-5)
        assert gradient == pytest.approx(-advantage * ratio, rel=1e-5)


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("behaviour", [-95.0, -1e30, -math.inf])
def test_a_token_that_was_next_to_impossible_keeps_the_loss_finite(behaviour: float, advantage: float) -> None:
    loss, _, gradient = loss_of(-1.0, behaviour, advantage)
    assert math.isfinite(loss) and gradient == 0.0
    loss, _, gradient = loss_of(behaviour, -1.0, advantage)
    assert loss == pytest.approx(0.2 * 4 * (advantage < 0), abs=1e-6)
    assert gradient == 0.0


def test_the_loss_is_the_sum_over_tokens() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -0.5], requires_grad=True)
    advantages, weights = torch.tensor([2.0, 2.0, 1.0]), torch.tensor([0.5, 2.0, 1.0])
    loss, clipped = policy_loss(logprobs, torch.full((3,), -1.0), advantages, weights, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-6.2) and int(clipped) == 1
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-1.0, -4.0, 0.0])


def test_weights_are_ratios_up_to_the_cap() -> None:
    policy = torch.tensor([-1.0, -2.0, -1.0, 0.0], requires_grad=True)
    weights = importance_weights(policy, torch.tensor([-1.5, -1.0, -95.0, -math.inf]), 2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), math.exp(-1.0), 2.0, 2.0])
    assert not weights.requires_grad
