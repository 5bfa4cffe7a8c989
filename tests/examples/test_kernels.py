"""The engine's kernels: `test_interpreted_kernels`, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from examples.colocate.engine import ops
from tests.support import run_program


def test_kernels_equal_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_interpreted_kernels.py"]
    variables = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(command, cwd=Path(__file__).parent, env=variables, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_padding_writes_only_to_the_scratch_block() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 8)
    new = torch.ones(3, 1, 8)
    ops.write_kv(k_cache, v_cache, new, 2 * new, torch.tensor([0, 6, 0]))
    assert k_cache.flatten(0, 1)[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert v_cache.flatten(0, 1)[:, 0, 0].tolist() == [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
