"""Advantages of groups, and the clipped loss."""

from __future__ import annotations

import math

import pytest
import torch

from examples.colocate.grpo import group_advantages, importance_weights, policy_loss


def test_advantages_are_relative_to_the_group() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]))
    assert torch.allclose(advantages[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3)
    assert torch.equal(advantages[1], torch.zeros(4))
    assert torch.allclose(advantages.mean(1), torch.zeros(3), atol=1e-6)
    assert advantages[2, 3] == pytest.approx(math.sqrt(3), rel=1e-3)


def loss_of(ratio: float, advantage: float, clip: float = 0.2) -> tuple[float, int, float]:
    """Loss, clipped tokens, and the gradient by the log-probability of one token."""
    logprob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, clipped = policy_loss(logprob, torch.zeros(1, 1), torch.tensor([advantage]), mask, clip)
    loss.backward()
    assert logprob.grad is not None
    return loss.item(), int(clipped), logprob.grad.item()


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(advantage: float) -> None:
    loss, clipped, gradient = loss_of(1.0, advantage)
    assert (loss, clipped) == (-advantage, 0)
    assert gradient == pytest.approx(-advantage)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_a_ratio_beyond_the_clip_is_clipped(ratio: float, advantage: float) -> None:
    loss, clipped, gradient = loss_of(ratio, advantage)
    assert clipped == 1
    assert gradient == 0.0
    assert loss == pytest.approx(-advantage * min(max(ratio, 0.8), 1.2))


@pytest.mark.parametrize(("ratio", "advantage"), [(0.5, 1.0), (1.5, -1.0)])
def test_a_ratio_in_the_wrong_direction_is_not_clipped(ratio: float, advantage: float) -> None:
    loss, clipped, gradient = loss_of(ratio, advantage)
    assert clipped == 0
    assert loss == pytest.approx(-advantage * ratio)
    assert gradient == pytest.approx(-advantage * ratio)


def test_masked_positions_do_not_affect_the_loss() -> None:
    logprobs = torch.tensor([[-1.0, 500.0, float("nan")]], requires_grad=True)
    behaviour = torch.tensor([[-1.0, -500.0, 0.0]])
    mask = torch.tensor([[True, False, False]])
    loss, clipped = policy_loss(logprobs, behaviour, torch.tensor([2.0]), mask, 0.2)
    loss.backward()
    assert (loss.item(), clipped.item()) == (-2.0, 0)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, torch.tensor([[-2.0, 0.0, 0.0]]))


def far_off(logprob: float, behaviour: float, advantage: float) -> tuple[float, float]:
    """Loss of one token, and its gradient by the log-probability."""
    logprobs = torch.tensor([[logprob]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, torch.tensor([[behaviour]]), torch.tensor([advantage]), mask, 0.2)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("behaviour", [-95.0, -1e30, -math.inf])
def test_a_token_that_was_next_to_impossible_keeps_the_loss_finite(behaviour: float, advantage: float) -> None:
    loss, gradient = far_off(-1.0, behaviour, advantage)
    assert math.isfinite(loss) and gradient == 0.0
    loss, gradient = far_off(behaviour, -1.0, advantage)
    assert loss == pytest.approx(0.2 * 4 * (advantage < 0), abs=1e-6)
    assert gradient == 0.0


@pytest.mark.parametrize("log_ratio", [-19.9, -3.0, 0.0, 0.1, 3.0, 19.9])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_up_to_twenty_nats_the_gradient_follows_the_ratio(log_ratio: float, advantage: float) -> None:
    _, gradient = far_off(log_ratio, 0.0, advantage)
    clipped = (advantage > 0 and log_ratio > math.log(1.2)) or (advantage < 0 and log_ratio < math.log(0.8))
    assert gradient == (0.0 if clipped else pytest.approx(-advantage * math.exp(log_ratio), rel=1e-5))


def test_weights_are_ratios_up_to_the_cap() -> None:
    policy = torch.tensor([[-1.0, -2.0, -1.0, 0.0]], requires_grad=True)
    weights = importance_weights(policy, torch.tensor([[-1.5, -1.0, -95.0, -math.inf]]), 2.0)
    assert weights.tolist() == [pytest.approx([math.exp(0.5), math.exp(-1.0), 2.0, 2.0])]
    assert not weights.requires_grad
    with pytest.raises(ValueError, match="cap is 0.5; expected a number of 1 or more"):
        importance_weights(policy, policy, 0.5)


def test_a_tokens_weight_multiplies_its_loss_and_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    weights = torch.tensor([[0.5, 2.0, float("nan")]])
    loss, clipped = policy_loss(logprobs, logprobs.detach(), torch.tensor([2.0]), mask, 0.2, weights)
    loss.backward()
    assert (loss.item(), int(clipped)) == (-5.0, 0)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, torch.tensor([[-1.0, -4.0, 0.0]]))
