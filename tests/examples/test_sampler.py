"""The sampler's random numbers on the CPU; `test_kernels` has the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from examples.colocate.engine.memory import Unmanaged
from examples.colocate.engine.sampler import Sampler
from tests.examples.test_kernels import STATES

CPU = torch.device("cpu")
EQUAL = torch.zeros(4, 4000)  # logits, so that the noise alone decides


def draw(sampler: Sampler) -> list[int]:
    return sampler(EQUAL, torch.ones(4))[0].tolist()


def with_state(state: tuple[int, int]) -> Sampler:
    sampler = Sampler(CPU, state[0], Unmanaged(CPU))
    sampler.state[1] = state[1]
    return sampler


def test_all_bits_of_seed_and_count_make_random_numbers() -> None:
    drawn = [draw(with_state(state)) for state in STATES]
    assert len(set(map(tuple, drawn))) == len(STATES)
    assert drawn == [draw(with_state(state)) for state in STATES]


def test_a_sampler_is_determined_by_its_state() -> None:
    first = Sampler(CPU, 5, Unmanaged(CPU))
    for _ in range(3):
        draw(first)
    assert first.state.tolist() == [5, 3]
    second = Sampler(CPU, 0, Unmanaged(CPU))
    second.state.copy_(first.state)
    assert draw(second) == draw(first)


@pytest.mark.parametrize("calls", [0, (1 << 63) - 1, -1])
def test_the_count_of_the_sampler_wraps_around(calls: int) -> None:
    sampler = with_state((1, calls))
    draw(sampler)
    wrapped: Tensor = torch.tensor(calls) + 1
    assert sampler.state[1] == wrapped


def test_other_random_numbers_are_not_disturbed() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draw(with_state((1, 0)))
    assert torch.equal(torch.rand(3), expected)
