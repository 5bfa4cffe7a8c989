"""The engine's Triton kernels without a GPU: against torch in Triton's interpreter.

The interpreter is chosen when Triton is imported, so its cases run in a process of their own: this file as a program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.kernel_cases import (
    DTYPES,
    OPS_CASES,
    OPS_DIFFERENT,
    PAGED_CASES,
    PAGED_TOLERANCE,
    PREFILL_CASES,
    compare,
    dense_attention,
    dense_prefill,
    paged_inputs,
    prefill_inputs,
)

ROOT = Path(__file__).parents[2]
DRAWS = 48  # few, since the interpreter takes its time for each
# Seed and count of calls, as signed integers of 64 bits. Each bit of either makes other random numbers.
STATES = [(1, 0), (0, 0), (2, 0), (1 << 32, 0), (-1, 0), (1, 1), (1, 1 << 32), (1, 1 << 62), (1, -1), (0, 1 << 32)]
SPLIT = [
    "grouped",
    "odd sizes",
    "padding only",
    "all parts of a context",
    "bf16",
]  # also in two parts

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """The output of this file as a program, under Triton's interpreter."""
    return _program(TRITON_INTERPRET="1")


def _program(*arguments: str, **variables: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, __file__, *arguments], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(("name", "splits"), [(name, "1") for name in PAGED_CASES] + [(name, "2") for name in SPLIT])
def test_paged_attention_equals_dense(name: str, splits: str, interpreted: dict[str, Any]) -> None:
    found = interpreted["paged"][splits][name]
    assert found["error"] <= PAGED_TOLERANCE[PAGED_CASES[name][0]]
    assert found["padding"] == 0


@pytest.mark.parametrize("tiles", ["small", "real"])
@pytest.mark.parametrize("name", PREFILL_CASES)
def test_paged_prefill_equals_dense(name: str, tiles: str, interpreted: dict[str, Any]) -> None:
    assert interpreted["prefill"][tiles][name] <= PAGED_TOLERANCE[PREFILL_CASES[name][0]]


def test_the_launches_do_not_depend_on_the_context(interpreted: dict[str, Any]) -> None:
    for splits, kernels in ((1, ["_attend_part"]), (2, ["_attend_part", "_join_parts"])):
        short, long = interpreted["launches"][str(splits)]
        assert short == long
        assert [name for name, _ in short] == kernels


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("case", OPS_CASES)
def test_fused_kernels_equal_torch(case: str, dtype_name: str, interpreted: dict[str, Any]) -> None:
    found = interpreted["ops"][case][dtype_name]
    assert found["error"] <= 1
    assert dtype_name == "fp32" or found["different"] <= OPS_DIFFERENT


def test_greedy_tokens_are_the_largest_logits(interpreted: dict[str, Any]) -> None:
    for found in interpreted["greedy"]:
        assert found["tokens"] == found["expected"]
        assert found["error"] < 1e-5
        # Logits that are NaN give a token inside the vocabulary too: the embedding has a row for it.
        assert 0 <= found["of_nan"] < found["vocab"]


def test_samples_follow_the_logits_and_the_count_of_calls(interpreted: dict[str, Any]) -> None:
    found = interpreted["sampled"]
    assert found["counts"][0] == 0  # of probability 1e-5
    # Five standard deviations.
    for count, probability in zip(found["counts"], found["probabilities"]):
        assert abs(count / DRAWS - probability) < 5 * (probability * (1 - probability) / DRAWS) ** 0.5 + 1e-3
    assert found["first"] == found["again"] != found["next"]
    assert found["calls"] == 2
    assert len(set(found["uniform"])) >= len(found["uniform"]) - 1  # of 4,000 equal ones, each row draws its own


def test_all_bits_of_seed_and_count_make_random_numbers(interpreted: dict[str, Any]) -> None:
    drawn = interpreted["by_state"]
    assert len({tuple(tokens) for tokens in drawn}) == len(STATES)
    assert drawn == interpreted["by_state_again"]


def _interpret() -> dict[str, Any]:
    from examples.colocate.engine import fused_kernels, paged_kernel, prefill_kernel

    _mend_interpreter()
    paged: dict[int, Any] = {}
    launches: dict[int, Any] = {}
    # Few programs, because the interpreter takes its time for each, and small tiles, so that contexts have several.
    paged_kernel._TILE_BYTES = 1024
    for splits in (1, 2):
        paged_kernel._MAX_SPLITS = splits
        paged[splits] = {}
        for name in PAGED_CASES if splits == 1 else SPLIT:
            inputs = paged_inputs(name)
            out = paged_kernel.paged_decode_triton(**inputs).double()
            difference = (out - dense_attention(**inputs)).abs().max().item()
            paged[splits][name] = {
                "error": difference if difference == difference else float("inf"),
                "padding": out[inputs["lengths_B"] == 0].abs().sum().item(),
            }
        inputs = paged_inputs("grouped")
        launches[splits] = []
        for length in (1, 90):
            lengths = torch.full_like(inputs["lengths_B"], length)
            calls = _recorded(paged_kernel, "paged_decode_triton", **{**inputs, "lengths_B": lengths})
            launches[splits].append([(call.name, call.grid) for call in calls])
    prefill = {"real": _prefill()}
    # Smaller than contexts and chunks, so that there are tiles of all kinds: seen by all, masked, and ragged.
    prefill_kernel.tiling = lambda *_: prefill_kernel.Tiling(16, 16, 2, 4)
    prefill["small"] = _prefill()
    found = {case: {name: compare(fused_kernels, case, name, "cpu") for name in DTYPES} for case in OPS_CASES}
    return {
        "paged": paged,
        "prefill": prefill,
        "launches": launches,
        "ops": found,
        "greedy": _greedy(),
        "sampled": _sampled(),
        **_by_state(),
    }


def _prefill() -> dict[str, float]:
    """By case, how far the kernel is off."""
    from examples.colocate.engine import ops
    from examples.colocate.engine.attention import paged_prefill

    found = {}
    ops.in_triton = lambda tensor: True
    for name in PREFILL_CASES:
        inputs = prefill_inputs(name)
        difference = (paged_prefill(*inputs).double() - dense_prefill(*inputs)).abs().max().item()
        found[name] = difference if difference == difference else float("inf")
    ops.in_triton = lambda tensor: False
    return found


def _greedy() -> list[dict[str, Any]]:
    from examples.colocate.engine import sampling_kernel

    generator, found = torch.Generator().manual_seed(0), []
    sampling_kernel._PART = 128
    for dtype, vocab in ((torch.float32, 300), (torch.bfloat16, 777), (torch.float16, 100)):
        logits = (3 * torch.randn(3, vocab + 5, generator=generator)).to(dtype)[:, :vocab]
        logits[0, vocab // 2] = logits[0, vocab - 1] = 20.0  # the first of equals
        tokens, logprobs = sampling_kernel.sample(logits, torch.zeros(3), torch.tensor([1, 0]))
        expected, best = logits.float().log_softmax(-1).max(-1)
        error = (logprobs - expected).abs().max().item()
        of_nan, _ = sampling_kernel.sample(
            torch.full_like(logits[:1], float("nan")), torch.ones(1), torch.tensor([1, 0])
        )
        found.append(
            {
                "tokens": tokens.tolist(),
                "expected": best.tolist(),
                "error": error,
                "of_nan": of_nan.item(),
                "vocab": vocab,
            }
        )
    return found


def _sampled() -> dict[str, Any]:
    from examples.colocate.engine import sampling_kernel

    probabilities = torch.tensor([1e-5, 0.16, 0.33, 0.51])
    sampling_kernel._PART = 4096
    tokens, _ = sampling_kernel.sample(
        probabilities.log().expand(DRAWS, 4).contiguous(), torch.ones(DRAWS), torch.tensor([1, 0])
    )
    equal, state = torch.zeros(8, 4000), torch.tensor([1, 0])
    first, following = (sampling_kernel.sample(equal, torch.ones(8), state)[0].tolist() for _ in range(2))
    return {
        "counts": torch.bincount(tokens, minlength=4).tolist(),
        "probabilities": (probabilities / probabilities.sum()).tolist(),
        "first": first,
        "next": following,
        "again": sampling_kernel.sample(equal, torch.ones(8), torch.tensor([1, 0]))[0].tolist(),
        "calls": int(state[1]),
        "uniform": first,
    }


def _by_state() -> dict[str, Any]:
    from examples.colocate.engine import sampling_kernel

    def draw(state: tuple[int, int]) -> list[int]:
        tokens, _ = sampling_kernel.sample(torch.zeros(4, 4000), torch.ones(4), torch.tensor(state))
        return tokens.tolist()

    return {name: [draw(state) for state in STATES] for name in ("by_state", "by_state_again")}


def _mend_interpreter() -> None:
    """Three gaps of Triton 3.6's interpreter that the kernels meet, and a GPU does not have."""
    import numpy as np
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    # Loop bounds are made with int(array of one element), which NumPy 2.4 refuses.
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched

    # Kept as the upper halves of fp32, bf16 is cut off, not rounded ...
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, handle: Any, dtype: Any) -> Any:
        if (handle.dtype.scalar.name, dtype.scalar.name) != ("fp32", "bf16"):
            return cast(self, handle, dtype)
        bits = np.ascontiguousarray(handle.data).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # half-way cases to even
        return interpreter.TensorHandle(nearest.astype(np.uint16), dtype.scalar)

    interpreter.InterpreterBuilder.cast_impl = rounded

    # ... and matrix products take it for integers.
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


class Launch:
    """A launch that did not take place: the kernel, its grid and its arguments."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel, self.grid = kernel, list(grid)
        self.name: str = kernel.fn.__name__
        names = [parameter.name for parameter in kernel.params] if hasattr(kernel, "params") else []
        self.args = {**dict(zip(names, args)), **{name: value for name, value in options.items() if name in names}}
        self.options = {name: value for name, value in options.items() if name not in names}


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launches.append(Launch(self.kernel, grid, args, options))


def _recorded(module: Any, function: str, *args: Any, **keywords: Any) -> list[Launch]:
    """The launches of a module's kernels that one of its functions would make."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    kernels = {name: x for name, x in vars(module).items() if isinstance(x, (JITFunction, InterpretedFunction))}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Recorder(kernel, launches))
        getattr(module, function)(*args, **keywords)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return launches


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_interpret()))
