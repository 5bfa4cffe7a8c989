"""Paged decode attention against dense attention: torch here, the Triton kernel in Triton's interpreter.

The interpreter is chosen when Triton is imported, so its cases run in a process of their own: this file as a program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.colocate.engine import attention

ROOT = Path(__file__).parents[2]
BLOCKS = 40
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# How far a result may be off: rounding of the result itself, and of softmax weights to V's dtype before their product.
TOLERANCE = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}
CASES = {
    # name: dtype, query heads, kv heads, head dimension, tokens in a block, lengths
    "grouped": ("fp32", 8, 2, 32, 16, [0, 1, 15, 16, 17, 100]),
    "one head each": ("fp32", 2, 2, 16, 8, [33, 0, 7]),
    "one kv head": ("fp32", 6, 1, 64, 4, [5, 70]),
    "odd sizes": ("fp32", 3, 1, 24, 5, [1, 12, 0]),
    "padding only": ("fp32", 4, 2, 16, 16, [0, 0]),
    "all parts of a context": ("fp32", 2, 1, 16, 16, [530]),
    "fp16": ("fp16", 4, 2, 32, 16, [1, 31, 130]),
    "bf16": ("bf16", 4, 2, 32, 16, [1, 31, 130]),
}


def paged_inputs(name: str) -> dict[str, Tensor]:
    """Random queries and a cache whose unused slots are NaN, with blocks in random order."""
    dtype_name, heads, kv_heads, head_dim, block_size, lengths = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    caches = torch.full((2, BLOCKS, block_size, kv_heads, head_dim), float("nan"))
    order = (torch.randperm(BLOCKS - 1, generator=generator) + 1).tolist()
    width = max(1, max(-(-length // block_size) for length in lengths))
    table = torch.full((len(lengths), width), BLOCKS - 1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(-(-length // block_size)):
            block = order.pop()
            table[row, index] = block
            live = min(block_size, length - index * block_size)
            caches[:, block, :live] = torch.randn(2, live, kv_heads, head_dim, generator=generator)
    q = torch.randn(len(lengths), heads, head_dim, generator=generator)
    k_cache, v_cache = caches.to(DTYPES[dtype_name])
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    return {
        "q_BHD": q.to(DTYPES[dtype_name]),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table,
        "lengths_B": lengths_B,
    }


def dense_attention(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths_B: Tensor) -> Tensor:
    """Each sequence by itself in fp64, from K and V laid out in order."""
    out = torch.zeros(q_BHD.shape, dtype=torch.float64)
    group = q_BHD.shape[1] // k_cache.shape[2]
    for row, length in enumerate(lengths_B.tolist()):
        if length:
            k, v = (cache[block_table[row].long()].flatten(0, 1)[:length].double() for cache in (k_cache, v_cache))
            for head in range(q_BHD.shape[1]):
                scores = k[:, head // group] @ q_BHD[row, head].double() / q_BHD.shape[2] ** 0.5
                out[row, head] = scores.softmax(0) @ v[:, head // group]
    return out


@pytest.mark.parametrize("name", CASES)
def test_torch_equals_dense(name: str) -> None:
    inputs = paged_inputs(name)
    out = attention.paged_decode(**inputs)
    assert out.dtype == inputs["q_BHD"].dtype
    torch.testing.assert_close(out.double(), dense_attention(**inputs), rtol=0, atol=TOLERANCE[CASES[name][0]])
    assert not out[inputs["lengths_B"] == 0].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs = paged_inputs("grouped")
    with pytest.raises(ValueError, match="k_cache is .* expected"):
        attention.paged_decode(**{**inputs, "k_cache": inputs["k_cache"][..., :16]})
    with pytest.raises(ValueError, match="block_table is .* expected"):
        attention.paged_decode(**{**inputs, "block_table": inputs["block_table"][:2]})


def test_padding_writes_to_the_scratch_block_only() -> None:
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 8)
    new = torch.ones(3, 1, 8)
    attention.write_kv(k_cache, v_cache, new, 2 * new, torch.tensor([-1, 6, 0]))
    assert k_cache.flatten(0, 1)[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert v_cache.flatten(0, 1)[:, 0, 0].tolist() == [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 3, 7])
def test_prefill_of_the_last_tokens_equals_that_of_all(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 4, 8, generator=generator)
    k, v = torch.randn(2, 7, 2, 8, generator=generator)
    whole = attention.causal_attention(q, k, v)
    torch.testing.assert_close(attention.causal_attention(q[-length:], k, v), whole[-length:])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What this file prints as a program, under Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_torch(name: str, interpreted: dict[str, Any]) -> None:
    assert interpreted["errors"][name] <= TOLERANCE[CASES[name][0]]
    assert interpreted["padding"][name] == 0


def test_the_grid_does_not_depend_on_the_context(interpreted: dict[str, Any]) -> None:
    short, long = interpreted["grids"]
    assert short == long
    assert len(short) == 2  # one kernel attends, one joins


def _interpret() -> dict[str, Any]:
    from examples.colocate.engine import paged_kernel

    _mend_interpreter()
    paged_kernel._MAX_SPLITS = 4  # the interpreter takes its time for each program
    errors, padding, grids = {}, {}, []
    for name in CASES:
        inputs = paged_inputs(name)
        out = paged_kernel.paged_decode_triton(**inputs).double()
        difference = (out - dense_attention(**inputs)).abs().max().item()
        errors[name] = difference if difference == difference else float("inf")
        padding[name] = out[inputs["lengths_B"] == 0].abs().sum().item()
    attend, join = paged_kernel._attend_part, paged_kernel._join_parts
    inputs = paged_inputs("grouped")
    for length in (1, 90):
        seen: list[list[int]] = []
        paged_kernel._attend_part = _Recorder(attend, seen)
        paged_kernel._join_parts = _Recorder(join, seen)
        lengths = torch.full_like(inputs["lengths_B"], length)
        paged_kernel.paged_decode_triton(**{**inputs, "lengths_B": lengths})
        grids.append(seen)
    return {"errors": errors, "padding": padding, "grids": grids}


def _mend_interpreter() -> None:
    """Two gaps of Triton 3.6's interpreter that the kernel meets, and a GPU does not have."""
    import numpy as np
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    # Loop bounds are made with int(array of one element), which NumPy 2.4 refuses.
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched

    # Matrix products take bf16, kept as the upper halves of fp32, for integers.
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


class _Recorder:
    """A kernel that notes its grids."""

    def __init__(self, kernel: Any, seen: list[list[int]]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(list(grid))
        return self.kernel[grid]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_interpret()))
