"""The engine on a GPU: compiled kernels, and graphs against eager steps, across pauses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from inspect import unwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memsaver
from examples.colocate.engine import Engine, SamplingParams, attention, ops
from examples.colocate.model import ModelConfig
from tests.examples.engine_support import MakeEngine, engine_maker
from tests.examples.kernel_cases import (
    LARGE_OPS_CASES,
    PAGED_TOLERANCE,
    check_fused,
    dense_prefill,
    prefill_inputs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    max_position=256,
    dtype=torch.bfloat16,
)
TAGS = ["weights", "kv_cache", "buffers", "cuda_graph"]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64)
TOLERANCE = {**PAGED_TOLERANCE, "fp32": 5e-6}
paged_decode_torch = unwrap(attention.paged_decode)
# The interpreter runs the kernels with other sizes and types (tests/examples). Compiling one takes seconds.
SIZES = [  # dtype, heads, kv heads, head dimension, tokens in a block
    ("bf16", 16, 8, 128, 16),
    ("fp16", 14, 2, 64, 32),
    ("fp32", 3, 1, 80, 8),
    ("bf16", 2, 1, 256, 16),
]


@pytest.mark.parametrize(("dtype_name", "heads", "kv_heads", "head_dim", "block_size"), SIZES)
def test_paged_prefill_equals_dense(dtype_name: str, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    chunks = [(1, 1), (1, 700), (70, 70), (127, 128), (128, 1000), (129, 129), (300, 2048), (513, 1025)]
    inputs = prefill_inputs(dtype_name, heads, kv_heads, head_dim, block_size, chunks, "cuda")
    out = attention.paged_prefill(*inputs.values())
    tolerance = TOLERANCE[dtype_name]
    torch.testing.assert_close(out.double(), dense_prefill(**inputs), rtol=0, atol=tolerance)
    gathered = unwrap(attention.paged_prefill)(*inputs.values())
    torch.testing.assert_close(gathered.double(), out.double(), rtol=0, atol=2 * tolerance)


@pytest.mark.parametrize("case", ["norm of an odd size", "norm of nothing", *LARGE_OPS_CASES])
def test_fused_kernels_equal_torch(case: str) -> None:
    from examples.colocate.engine.kernels import fused

    for dtype_name in ("bf16", "fp32"):
        check_fused(fused, case, dtype_name, "cuda")


def test_caches_beyond_32_bit_indices_are_addressed_correctly() -> None:
    heads, kv_heads, head_dim, block_size = 32, 8, 128, 16
    num_blocks = (1 << 31) // (block_size * kv_heads * head_dim) + 2
    k_cache, v_cache = torch.empty(
        2, num_blocks, block_size, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda"
    )  # 8.6 GB
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = torch.randn(3, 2, heads, head_dim, generator=generator, device="cuda").bfloat16()
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    last = num_blocks - 1
    ops.write_kv(k_cache, v_cache, k, v, last * block_size + torch.arange(2, device="cuda"))
    assert torch.equal(k_cache[last, :2], k)
    assert torch.equal(v_cache[last, :2], v)
    table = torch.full((1, 1), last, dtype=torch.int32, device="cuda")
    lengths_B = torch.tensor([2], dtype=torch.int32, device="cuda")
    out = attention.paged_decode(q[:1], k_cache, v_cache, table, lengths_B)
    k_part, v_part = (cache[last:].float() for cache in (k_cache, v_cache))
    expected = paged_decode_torch(q[:1].float(), k_part, v_part, torch.zeros_like(table), lengths_B)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=1.6e-2)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    sizes: dict[str, Any] = {"max_batch_size": 8, "block_size": 16, "num_blocks": 128}
    with engine_maker("cuda", 0.1, **sizes, prefix_cache=False, graph_batch_sizes=(1, 2, 4, 8)) as make:
        yield lambda model=MODEL, **config: make(model, **config)


def prompts_of(count: int) -> list[list[int]]:
    return [[(7 * row + 3 * at) % MODEL.vocab_size for at in range(3 + 5 * row)] for row in range(count)]


def greedy(engine: Engine, count: int, use_graphs: bool) -> list[list[int]]:
    return [completion.tokens for completion in engine.generate(prompts_of(count), GREEDY, use_graphs)]


def overwrite_free_memory() -> None:
    """Fills free memory of the device with bytes that are NaN in every floating type, then frees it."""
    free, _ = torch.cuda.mem_get_info()
    filler = torch.full((min(free - (1 << 30), 8 << 30),), 0xFF, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del filler
    torch.cuda.empty_cache()


def test_prefix_hits_after_a_pause_come_from_new_contents(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=True, block_size=16)
    engine.capture()
    prompt = [[at % MODEL.vocab_size for at in range(70)]]
    first = engine.generate(prompt, GREEDY)[0].tokens
    again = engine.generate(prompt, GREEDY)[0].tokens  # a hit; other shapes, hence other rounding, from here on
    memsaver.pause(TAGS)
    overwrite_free_memory()
    memsaver.resume(TAGS)
    engine.drop_prefix_cache()
    assert engine.generate(prompt, GREEDY)[0].tokens == first
    assert engine.generate(prompt, GREEDY)[0].tokens == again


def test_graphs_refuse_while_their_pool_is_paused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = greedy(engine, 2, use_graphs=False)
    engine.capture()
    memsaver.pause("cuda_graph")
    with pytest.raises(memsaver.RegionPausedError, match="cuda_graph"):
        greedy(engine, 2, use_graphs=True)
    assert greedy(engine, 2, use_graphs=False) == expected
    memsaver.resume("cuda_graph")
    assert greedy(engine, 2, use_graphs=True) == expected


def test_logprobs_and_sampling_in_graphs(make_engine: MakeEngine) -> None:
    engine = make_engine(dataclasses.replace(MODEL, dtype=torch.float32))
    engine.capture()
    sampling = SamplingParams(temperature=0.7, max_new_tokens=16)
    sampled = [engine.generate(prompts_of(4), sampling) for _ in range(2)]
    assert sampled[0] != sampled[1]  # every replay draws anew
    for completion in sampled[0]:
        whole = torch.tensor(completion.prompt + completion.tokens, device="cuda")
        logprobs = (full_logits(engine, whole) / 0.7).log_softmax(-1)
        first = len(completion.prompt)
        expected = [logprobs[at - 1, whole[at]].item() for at in range(first, len(whole))]
        assert completion.logprobs == pytest.approx(expected, abs=2e-3)


@torch.no_grad()
def full_logits(engine: Engine, tokens: Tensor) -> Tensor:
    """The engine's own model with dense causal attention, fp32 [tokens, vocab]."""

    def dense(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q_HTD, k_HTD, v_HTD = (each.transpose(0, 1) for each in (q_THD, k_TKD, v_TKD))
        return F.scaled_dot_product_attention(q_HTD, k_HTD, v_HTD, is_causal=True, enable_gqa=True).transpose(0, 1)

    positions = torch.arange(len(tokens), device="cuda")
    return engine.model.logits(engine.model.forward(tokens, positions, dense)).float()


def test_a_failing_capture_leaves_the_engine_serving(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    expected = {size: greedy(engine, size, use_graphs=False) for size in (2, 5)}
    step = engine.runner.decode_step

    def synchronising(size: int) -> None:
        step(size)
        if size == 2:  # the third size: two graphs are there already
            engine.runner.batch.outputs.sum().item()

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode_step", synchronising)
        with pytest.raises(RuntimeError, match="captur"):
            engine.capture()
    assert not engine.runner.decode_graphs
    for size, tokens in expected.items():
        assert greedy(engine, size, use_graphs=True) == tokens
    assert engine.counts.decode_replays == 0
    torch.rand(1, device="cuda")  # torch's own generator has recovered as well
    engine.capture()
    assert sorted(engine.runner.decode_graphs) == [1, 2, 4, 8]
    for size, tokens in expected.items():
        assert greedy(engine, size, use_graphs=True) == tokens
    assert engine.counts.decode_replays > 0


def test_all_permanent_tensors_are_in_regions(make_engine: MakeEngine) -> None:
    def outside(engine: Engine) -> int:
        """Bytes that torch holds outside of the engine's regions."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        memory = engine.memory
        regions = [memory.weights, memory.kv_cache, memory.buffers, memory.cuda_graph]
        inside = sum(int(region.allocated_bytes) for region in regions if region is not None)
        return torch.cuda.memory_reserved() - inside

    engine = make_engine(num_blocks=1 << 16)
    before = outside(engine)
    engine.capture()
    greedy(engine, 8, use_graphs=True)
    weights = sum(weight.nbytes for weight in engine.model.weights.values())
    assert outside(engine) - before < 192 << 20  # workspaces of cuBLAS; the KV cache alone is more
    assert engine.runner.kv_cache.nbytes > 192 << 20
    assert memsaver.pause(TAGS).released_bytes >= weights + engine.runner.kv_cache.nbytes
