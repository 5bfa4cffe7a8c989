"""Attention in torch against dense attention, and the engine's Triton kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.colocate.engine import attention, ops
from tests.examples.kernel_cases import (
    PAGED_CASES,
    PAGED_TOLERANCE,
    PREFILL_CASES,
    dense_decode,
    dense_prefill,
    paged_inputs,
    prefill_inputs,
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_equal_torch_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_interpreted_kernels.py"]
    variables = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PAGED_CASES)
def test_paged_decode_in_torch_equals_dense(name: str) -> None:
    inputs: Any = paged_inputs(name)
    out = attention.paged_decode(**inputs)
    tolerance = PAGED_TOLERANCE[PAGED_CASES[name][0]]
    assert out.dtype == inputs["q_BHD"].dtype
    torch.testing.assert_close(out.double(), dense_decode(**inputs), rtol=0, atol=tolerance)
    assert not out[inputs["lengths_B"] == 0].any()


@pytest.mark.parametrize("name", PREFILL_CASES)
def test_paged_prefill_in_torch_equals_dense(name: str) -> None:
    inputs = prefill_inputs(*PREFILL_CASES[name])
    out = attention.paged_prefill(*inputs)
    tolerance = PAGED_TOLERANCE[PREFILL_CASES[name][0]]
    torch.testing.assert_close(out.double(), dense_prefill(*inputs), rtol=0, atol=tolerance)


def test_padding_writes_only_to_the_scratch_block() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 8)
    new = torch.ones(3, 1, 8)
    ops.write_kv(k_cache, v_cache, new, 2 * new, torch.tensor([0, 6, 0]))
    assert k_cache.flatten(0, 1)[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert v_cache.flatten(0, 1)[:, 0, 0].tolist() == [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
