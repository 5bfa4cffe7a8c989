"""Advantages of groups, and the clipped loss."""

from __future__ import annotations

import math

import pytest
import torch

from examples.colocate.grpo import group_advantages, policy_loss


def test_advantages_are_relative_to_the_group() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]))
    assert torch.allclose(advantages[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3)
    assert torch.equal(advantages[1], torch.zeros(4))
    assert torch.allclose(advantages.mean(1), torch.zeros(3), atol=1e-6)
    assert advantages[2, 3] == pytest.approx(math.sqrt(3), rel=1e-3)


def test_zero_advantages_are_a_control() -> None:
    assert torch.equal(group_advantages(torch.tensor([[1.0, 0.0]]), zero=True), torch.zeros(1, 2))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2, 2)])
def test_rewards_come_in_groups(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected .prompts, 2 completions or more"):
        group_advantages(torch.zeros(shape))


def loss_of(ratio: float, advantage: float, clip: float = 0.2) -> tuple[float, int, float]:
    """Loss, clipped tokens, and the gradient by the log-probability of one token."""
    logprob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, clipped = policy_loss(logprob, torch.zeros(1, 1), torch.tensor([advantage]), mask, clip)
    loss.backward()
    assert logprob.grad is not None
    return loss.item(), int(clipped), logprob.grad.item()


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_on_the_behaviour_policy_it_is_the_policy_gradient(advantage: float) -> None:
    loss, clipped, gradient = loss_of(1.0, advantage)
    assert (loss, clipped) == (-advantage, 0)
    assert gradient == pytest.approx(-advantage)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_what_went_far_enough_is_clipped(ratio: float, advantage: float) -> None:
    loss, clipped, gradient = loss_of(ratio, advantage)
    assert clipped == 1
    assert gradient == 0.0
    assert loss == pytest.approx(-advantage * min(max(ratio, 0.8), 1.2))


@pytest.mark.parametrize(("ratio", "advantage"), [(0.5, 1.0), (1.5, -1.0)])
def test_what_went_the_wrong_way_is_not_clipped(ratio: float, advantage: float) -> None:
    loss, clipped, gradient = loss_of(ratio, advantage)
    assert clipped == 0
    assert loss == pytest.approx(-advantage * ratio)
    assert gradient == pytest.approx(-advantage * ratio)


def test_masked_positions_do_not_matter() -> None:
    logprobs = torch.tensor([[-1.0, 500.0, float("nan")]], requires_grad=True)
    behaviour = torch.tensor([[-1.0, -500.0, 0.0]])
    mask = torch.tensor([[True, False, False]])
    loss, _ = policy_loss(logprobs, behaviour, torch.tensor([2.0]), mask, 0.2)
    loss.backward()
    assert loss.item() == -2.0
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, torch.tensor([[-2.0, 0.0, 0.0]]))


@pytest.mark.parametrize("clip", [0.0, 1.0, -0.1])
def test_clip_is_checked(clip: float) -> None:
    with pytest.raises(ValueError, match=f"clip is {clip}"):
        loss_of(1.0, 1.0, clip)
