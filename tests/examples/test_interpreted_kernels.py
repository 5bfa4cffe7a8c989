"""The engine's kernels, in Triton's interpreter and in torch, against dense attention: `test_kernels` runs this file.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own. It has no correct
arithmetic of bf16: tests/gpu has that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter  # type: ignore[import-untyped]

from examples.colocate.engine import attention
from examples.colocate.engine.kernels import fused, paged_decode, paged_prefill, sampling
from tests.examples.kernel_cases import (
    OPS_CASES,
    PAGED_CASES,
    PAGED_TOLERANCE,
    PREFILL_CASES,
    check_fused,
    dense_decode,
    dense_prefill,
    paged_inputs,
    prefill_inputs,
)

DRAWS = 32  # few, since the interpreter takes its time for each


@pytest.fixture(autouse=True, scope="module")
def loop_bounds() -> None:
    """Up to Triton 3.6 loop bounds are made with int(array of one element), which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


@pytest.mark.parametrize(
    ("name", "splits"), [*((name, 1) for name in PAGED_CASES if name != "long"), ("grouped", 2), ("odd sizes", 2)]
)
def test_paged_decode_equals_dense(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small tiles, so that contexts have several."""
    monkeypatch.setattr(paged_decode, "_TILE_BYTES", 1024)
    monkeypatch.setattr(paged_decode, "_MAX_SPLITS", splits)
    inputs = paged_inputs(name)
    for way in (paged_decode.paged_decode, attention.paged_decode):
        out = way(*inputs.values())
        tolerance = PAGED_TOLERANCE[PAGED_CASES[name][0]]
        torch.testing.assert_close(out.double(), dense_decode(**inputs), rtol=0, atol=tolerance)
        assert not out[inputs["lengths_B"] == 0].any()


@pytest.mark.parametrize("name", PREFILL_CASES)
def test_paged_prefill_equals_dense(name: str) -> None:
    """Tiles of fp32 are smaller than contexts and chunks, so there are all kinds: seen by all, masked, ragged."""
    inputs = prefill_inputs(*PREFILL_CASES[name])
    for way in (paged_prefill.paged_prefill, attention.paged_prefill):
        tolerance = PAGED_TOLERANCE[PREFILL_CASES[name][0]]
        torch.testing.assert_close(way(*inputs.values()).double(), dense_prefill(**inputs), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("splits", "kernels"), [(1, ["_attend_part"]), (2, ["_attend_part", "_join_parts"])])
def test_the_launches_do_not_depend_on_the_context(
    splits: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "_MAX_SPLITS", splits)
    launches: list[tuple[str, tuple[int, ...]]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append((self.name, grid))
            return lambda *given, **options: None

    for name in ("_attend_part", "_join_parts"):
        monkeypatch.setattr(paged_decode, name, Recorder(name))
    inputs, seen = paged_inputs("grouped"), []
    for length in (1, 90):
        launches.clear()
        paged_decode.paged_decode(**{**inputs, "lengths_B": torch.full_like(inputs["lengths_B"], length)})
        seen.append(list(launches))
    assert seen[0] == seen[1] and [name for name, _ in seen[0]] == kernels


@pytest.mark.parametrize("dtype_name", ["fp32", "fp16"])
@pytest.mark.parametrize("case", OPS_CASES)
def test_fused_kernels_equal_torch(case: str, dtype_name: str) -> None:
    check_fused(fused, case, dtype_name, "cpu")


def sample(logits: Tensor, temperatures: Tensor, state: tuple[int, int] = (1, 0)) -> tuple[Tensor, Tensor]:
    return sampling.sample(logits, temperatures, torch.tensor(state))


@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 300), (torch.float16, 100)])
def test_tokens_and_logprobs_are_those_of_the_temperature(
    dtype: torch.dtype, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens are the largest logits, with log-probabilities of temperature 1."""
    monkeypatch.setattr(sampling, "_PART", 128)
    temperatures = torch.tensor([0.0, 0.0, 0.001, 0.5, 2.0])
    logits = (3 * torch.randn(5, vocab + 5, generator=torch.Generator().manual_seed(0))).to(dtype)[:, :vocab]
    logits[0, vocab // 2] = logits[0, vocab - 1] = 20.0  # the first of equals
    tokens, logprobs = sample(logits, temperatures)
    assert tokens[:2].tolist() == logits[:2].float().argmax(-1).tolist()
    divided = logits.double() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    expected = divided.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    # Logits that are NaN give a token inside the vocabulary too: the embedding has a row for it.
    assert 0 <= int(sample(torch.full_like(logits[:1], float("nan")), torch.ones(1))[0]) < vocab


def test_samples_follow_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_PART", 16)
    logits, temperature = torch.tensor([1e-5, 0.16, 0.33, 0.51]).log(), 0.5
    probabilities = (logits / temperature).softmax(0)
    tokens, _ = sample(logits.expand(DRAWS, 4).contiguous(), torch.full((DRAWS,), temperature))
    counts = torch.bincount(tokens, minlength=4)
    assert counts[0] == 0
    # Five standard deviations.
    deviation = (probabilities * (1 - probabilities) / DRAWS).sqrt()
    assert ((counts / DRAWS - probabilities).abs() < 5 * deviation + 1e-3).all()


def test_all_bits_of_seed_and_count_make_random_numbers() -> None:
    # Seed and count of calls, as signed integers of 64 bits.
    states = [(1, 0), (0, 0), (2, 0), (1 << 32, 0), (-1, 0), (1, 1), (1, 1 << 32), (1, 1 << 62), (1, -1), (0, 1 << 32)]
    equal, calls = torch.zeros(2, 4000), torch.tensor(states[0])
    drawn = [tuple(sample(equal, torch.ones(2), state)[0].tolist()) for state in states]
    assert len({token for tokens in drawn for token in tokens}) == 2 * len(states)  # each row draws its own
    for expected in (states[0], states[5]):  # the same again, and then that of the next call
        assert tuple(sampling.sample(equal, torch.ones(2), calls)[0].tolist()) == drawn[states.index(expected)]
