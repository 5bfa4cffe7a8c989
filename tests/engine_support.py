"""What tests of the engine's models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from examples.colocate.engine.memory import Unmanaged

CPU = Unmanaged(torch.device("cpu"))  # in place of a region


class DenseAttention:
    """One sequence's attention, in fp32; keeps what it saw."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if layer in self.seen:
            k_TKD, v_TKD = (torch.cat(pair) for pair in zip(self.seen[layer], (k_TKD, v_TKD)))
        self.seen[layer] = k_TKD, v_TKD
        group, new, length = q_THD.shape[1] // k_TKD.shape[1], len(q_THD), len(k_TKD)
        q_THD, k_LHD, v_LHD = (x.float() for x in (q_THD, *(y.repeat_interleave(group, 1) for y in (k_TKD, v_TKD))))
        scores = torch.einsum("thd,lhd->htl", q_THD, k_LHD) / q_THD.shape[-1] ** 0.5
        scores.masked_fill_(torch.ones(new, length, dtype=torch.bool).triu(length - new + 1), float("-inf"))
        return torch.einsum("htl,lhd->thd", scores.softmax(-1), v_LHD).to(k_TKD.dtype)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are so small that threads of torch would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
