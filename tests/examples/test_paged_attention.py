"""Paged attention in torch against dense attention; `test_kernels` has the Triton kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.colocate.engine import attention, ops
from tests.examples.kernel_cases import (
    PAGED_CASES,
    PAGED_TOLERANCE,
    PREFILL_CASES,
    dense_attention,
    dense_prefill,
    paged_inputs,
    prefill_inputs,
)


@pytest.mark.parametrize("name", PAGED_CASES)
def test_torch_equals_dense(name: str) -> None:
    inputs: Any = paged_inputs(name)
    out = attention.paged_decode(**inputs)
    assert out.dtype == inputs["q_BHD"].dtype
    tolerance = PAGED_TOLERANCE[PAGED_CASES[name][0]]
    torch.testing.assert_close(out.double(), dense_attention(**inputs), rtol=0, atol=tolerance)
    assert not out[inputs["lengths_B"] == 0].any()


@pytest.mark.parametrize("name", PREFILL_CASES)
def test_gathered_prefill_equals_dense(name: str) -> None:
    inputs = prefill_inputs(name)
    out = attention.paged_prefill(*inputs)
    assert out.dtype == inputs[0].dtype
    torch.testing.assert_close(
        out.double(), dense_prefill(*inputs), rtol=0, atol=PAGED_TOLERANCE[PREFILL_CASES[name][0]]
    )


def test_padding_writes_only_to_the_scratch_block() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 8)
    new = torch.ones(3, 1, 8)
    ops.write_kv(k_cache, v_cache, new, 2 * new, torch.tensor([-1, 6, 0]))
    assert k_cache.flatten(0, 1)[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert v_cache.flatten(0, 1)[:, 0, 0].tolist() == [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 3, 7])
def test_prefill_of_the_last_tokens_equals_that_of_all(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 4, 8, generator=generator)
    k, v = torch.randn(2, 7, 2, 8, generator=generator)
    whole = attention.causal_attention(q, k, v)
    torch.testing.assert_close(attention.causal_attention(q[-length:], k, v), whole[-length:])
