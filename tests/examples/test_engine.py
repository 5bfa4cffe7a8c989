"""The engine against a dense forward pass of the same weights: scheduling, cache, graphs, sampling, pauses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import memsaver
from examples.colocate.engine import Engine, EngineConfig, SamplingParams, model_runner
from examples.colocate.engine.batches import Readback
from examples.colocate.engine.decoder import Decoder
from examples.colocate.engine.ops import sample
from examples.colocate.engine.sequence import Sequence
from examples.colocate.model import ModelConfig
from tests.examples.engine_support import (
    CPU,
    QWEN,
    DenseAttention,
    HostGraphs,
    MakeEngine,
    graph_differences,
    random_weights,
)

LLAMA = dataclasses.replace(QWEN, qk_norm=False, tie_word_embeddings=True, rope_theta=500.0)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


@torch.no_grad()
def dense_logits(model: ModelConfig, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits of every position [tokens, vocab] by the same decoder, which `test_models` compares, without a cache."""
    decoder = Decoder(model, CPU, CPU)
    decoder.load_weights(weights.items())
    hidden_TC = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttention())
    return decoder.logits(hidden_TC)


def tokens_of(
    engine: Engine, prompts: list[list[int]], sampling: SamplingParams = GREEDY, use_graphs: bool = True
) -> list[list[int]]:
    return [completion.tokens for completion in engine.generate(prompts, sampling, use_graphs)]


def finished(engine: Engine, requests: list[Sequence]) -> list[list[int]]:
    """The requests' tokens, once all are done."""
    while any(request.finish_reason is None for request in requests):
        engine.step()
    engine.settle()
    return [request.completion().tokens for request in requests]


@pytest.mark.parametrize(("temperature", "model"), [(0.0, QWEN), (0.0, LLAMA), (0.5, QWEN), (1.0, QWEN), (2.0, QWEN)])
def test_logprobs_are_those_of_the_distribution_sampled(
    make_engine: MakeEngine, temperature: float, model: ModelConfig
) -> None:
    """A greedy token is the most likely one; its log-probability is that of temperature 1."""
    weights, engine = random_weights(model), make_engine(model)
    for completion in engine.generate(PROMPTS, SamplingParams(temperature, max_new_tokens=12)):
        tokens = completion.prompt + completion.tokens
        logprobs = (dense_logits(model, weights, tokens) / (temperature or 1.0)).log_softmax(-1)
        first = len(completion.prompt)
        assert temperature or completion.tokens == logprobs[first - 1 : -1].argmax(-1).tolist()
        expected = [logprobs[at - 1, tokens[at]].item() for at in range(first, len(tokens))]
        assert completion.logprobs == pytest.approx(expected, abs=4e-4)
    assert engine.random_state[1] >= 12  # each step has other random numbers


def test_sampling_follows_the_distribution() -> None:
    count, temperature, logits = 2000, 0.5, torch.randn(29, generator=torch.Generator().manual_seed(0))
    drawn, _ = sample(logits.expand(count, -1), torch.full((count,), temperature), torch.zeros(2, dtype=torch.int64))
    expected = (logits / temperature).softmax(-1)
    share = torch.bincount(drawn, minlength=len(logits)) / count
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-3).all()


def test_all_bits_of_seed_and_count_make_random_numbers() -> None:
    """On the CPU; `test_interpreted_kernels` has the kernel. The count wraps around, other generators are not used."""
    logits, temperatures, now = torch.zeros(2, 4000), torch.ones(2), torch.zeros(2, dtype=torch.int64)  # noise decides
    states = [(1, 0), (0, 0), (2, 0), (1 << 32, 0), (-1, 0), (1, 1), (1, 1 << 32), (1, 1 << 62), (1, -1), (0, 1 << 32)]
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn = []
    for state in states * 2:
        now.copy_(torch.tensor(state))
        drawn.append(tuple(sample(logits, temperatures, now)[0].tolist()))
        assert now.tolist() == [state[0], state[1] + 1]
    assert len(set(drawn)) == len(states) and drawn[: len(states)] == drawn[len(states) :]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "config",
    [{"max_batch_size": 1}, {"num_blocks": 12}, *({"max_prefill_tokens": budget} for budget in (1, 3, 8))],
    ids=["one after the other", "preemption", "chunks of 1", "chunks of 3", "chunks of 8"],
)
def test_no_schedule_changes_the_tokens(make_engine: MakeEngine, config: dict[str, Any]) -> None:
    prompts = [*PROMPTS, *([token, 2 * token % 29, 7, 7, token] for token in range(4))]
    sampling = SamplingParams(0.0, max_new_tokens=20)
    expected = tokens_of(make_engine(max_batch_size=8, prefix_cache=False), prompts, sampling)
    for prefix_cache in (False, True):
        engine = make_engine(prefix_cache=prefix_cache, **config)
        assert tokens_of(engine, prompts, sampling) == expected
        assert engine.counts.tokens == len(prompts) * 20
        assert (engine.counts.preemptions > 0) == (config == {"num_blocks": 12})
        assert engine.counts.recomputed == engine.counts.preemptions
        assert engine.blocks.num_free == engine.blocks.num_usable


def test_generation_ends_at_a_stop_token_or_the_length(make_engine: MakeEngine) -> None:
    engine = make_engine(dataclasses.replace(QWEN, max_position=10))
    full = tokens_of(engine, [[3, 1, 4]])[0]
    assert len(full) == 7  # the rest of max_position
    stop = full[3]
    completion = engine.generate([[3, 1, 4]], SamplingParams(0.0, 12, stop_tokens=(stop,)))[0]
    assert completion.tokens == full[: full.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == len(completion.tokens)


def test_prefix_hits_give_the_same_tokens(make_engine: MakeEngine) -> None:
    prefix = [5, 4, 3, 2, 1, 0, 1, 2, 3]
    prompts = [[*prefix, token] for token in range(3)] + [prefix]
    prompts += [[7, 7, 7, 7, 1], [7, 7, 7, 7, *prefix[4:]]]  # the last one has a block of the others, after another one
    expected = tokens_of(make_engine(prefix_cache=False), prompts)
    engine, hits = make_engine(), []
    for _ in range(2):  # shared within one prefill, then also from the cache
        assert tokens_of(engine, prompts) == expected
        hits.append(engine.counts.prefix_hit_tokens)
    engine.drop_prefix_cache()
    engine.runner.kv_cache.fill_(float("nan"))  # as a resume without a backup may leave it
    assert tokens_of(engine, prompts) == expected
    assert [*hits, engine.counts.prefix_hit_tokens] == [28, 28 + 44, 28 + 44 + 28]


def test_new_weights_drop_the_prefix_cache(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for seed in (1, 0):
        tokens_of(engine, PROMPTS)
        engine.share_weights()  # another process writes them
        engine.model.load_weights(random_weights(QWEN, seed).items())
        assert tokens_of(engine, PROMPTS) == tokens_of(make_engine(seed=seed), PROMPTS)


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pause_of_running_requests_loses_none(make_engine: MakeEngine, prefix_cache: bool, drain: bool) -> None:
    """KV entries are computed anew. Running requests and cached prefixes never read the replaced contents."""
    engine = make_engine(max_batch_size=2, prefix_cache=prefix_cache)
    prompts = [[*range(1, 25), 3], [*range(1, 25), 5, 6], [7]]
    expected = [each.tokens for each in engine.generate(prompts, GREEDY)]
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    for _ in range(4):
        for _ in range(2):
            engine.step()
        if drain:
            with pytest.raises(RuntimeError, match="drain"):
                engine.drop_prefix_cache()
            engine.drain()
            assert engine.blocks.num_free == engine.blocks.num_usable
        memsaver.pause()
        memsaver.resume()
        engine.runner.kv_cache.fill_(float("nan"))
    assert finished(engine, requests) == expected
    assert engine.counts.tokens == 2 * sum(map(len, expected))
    assert (engine.counts.recomputed, engine.counts.preemptions) == (8, 0)  # two run in each of the four pauses


@pytest.mark.parametrize("tag", ["weights", "kv_cache", "buffers"])
def test_a_paused_engine_refuses_requests(make_engine: MakeEngine, tag: str) -> None:
    engine = make_engine()
    expected, addresses = tokens_of(engine, PROMPTS), engine.addresses()
    memsaver.pause(tag)
    with pytest.raises(memsaver.RegionPausedError, match=tag):
        engine.generate(PROMPTS, GREEDY)
    assert not engine.scheduler.waiting
    if tag == "weights":
        for call in (engine.share_weights, engine.checksums):
            with pytest.raises(memsaver.RegionPausedError, match=tag):
                call()
    memsaver.resume(tag)
    assert engine.addresses() == addresses
    assert tokens_of(engine, PROMPTS) == expected


def test_invalid_requests_raise(make_engine: MakeEngine) -> None:
    engine = make_engine(dataclasses.replace(QWEN, max_position=32), num_blocks=6)
    for bad, message in (
        ([], "0 tokens"),
        ([1] * 32, "32 tokens"),
        ([29], "has 29; expected tokens from 0 to 28"),
        ([1, -1], "has -1"),
        ([1] * 12, "needs 6 KV blocks; expected at most the cache's 5"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([[1, 2], bad], GREEDY)
        assert not engine.scheduler.waiting  # the good one is gone with the bad one
    for value in ({"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": 1e-9}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match="expected a temperature of 0"):
            SamplingParams(**value)


def test_graphs_give_the_same_tokens_also_after_a_capture_that_failed(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(), PROMPTS)
    graphs = HostGraphs()
    engine = make_engine(memory=graphs, prefill_graph_sizes=(8, 32), graph_batch_sizes=(2, 4))
    assert tokens_of(engine, PROMPTS) == expected  # padded, before there are graphs
    for graphs.fails_at in (3, 7):  # a prefill, then a decode step
        with pytest.raises(RuntimeError, match="a synchronisation inside"):
            engine.capture()
        engine.drop_prefix_cache()
        assert tokens_of(engine, PROMPTS) == expected
        assert engine.counts.decode_replays == 0 and not engine.runner.decode_graphs
    graphs.fails_at = -1
    engine.capture()
    assert sorted(engine.runner.decode_graphs) == [2, 4] and graphs.captures == 3 + 3 + 1 + 1
    for use_graphs in (True, False):
        engine.drop_prefix_cache()
        before = engine.counts.decode_replays, engine.counts.prefill_replays
        assert tokens_of(engine, PROMPTS, use_graphs=use_graphs) == expected
        assert (engine.counts.decode_replays > before[0] and engine.counts.prefill_replays > before[1]) == use_graphs
        assert tokens_of(engine, PROMPTS[:1], use_graphs=use_graphs) == expected[:1]
    assert set(graph_differences(engine).values()) == {0.0}
    pieces = engine.runner.prefill_graphs.pieces[8]
    pieces[1] = pieces[0]  # a layer that runs twice
    assert graph_differences(engine)["prefill 1 of 8"] > 0.1


def test_compiled_sizes_give_the_same_tokens(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced in one piece, as for any other backend; compiling in C++ would take a minute.
    monkeypatch.setattr(model_runner, "BACKEND", "eager")
    model = dataclasses.replace(QWEN, num_layers=1)
    engine = make_engine(model, graph_batch_sizes=(4,), compile_batch_sizes=(4,))
    assert tokens_of(engine, PROMPTS) == tokens_of(make_engine(model), PROMPTS)


def test_all_memory_that_graphs_use_is_in_regions(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_graph_sizes=(8, 16))
    memory = engine.memory
    ranges = [
        range(begin, begin + nbytes)
        for region in (memory.weights, memory.kv_cache, memory.buffers)
        for begin, nbytes in region._core.live()
    ]
    addresses = engine.addresses()
    assert {"kv_cache", "random_state", "cos", "inputs", "attended_THD", "model.norm.weight"} <= set(addresses)
    for name, address in addresses.items():
        assert any(address in part for part in ranges), name


def test_a_wait_that_is_interrupted_loses_no_token(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(make_engine(), PROMPTS)
    engine = make_engine()
    sequences = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Readback, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.drain()
    assert finished(engine, sequences) == expected


def test_sizes_follow_the_limits() -> None:
    assert EngineConfig(max_batch_size=12).batch_sizes() == tuple(range(1, 13))
    assert EngineConfig(max_batch_size=130).batch_sizes() == (*range(1, 33), 64, 96, 128, 130)
    assert EngineConfig(max_batch_size=100, graph_batch_sizes=(40, 2, 40)).batch_sizes() == (2, 40, 100)
    assert EngineConfig(max_batch_size=64, graph_batch_sizes=()).batch_sizes() == (64,)
    assert EngineConfig(num_blocks=1024).prefill_sizes(on_cuda=True) == (512, 1024, 2048, 4096)
    assert EngineConfig(num_blocks=100).prefill_sizes(on_cuda=True) == (512, 1024)
    assert EngineConfig(num_blocks=1024, max_prefill_tokens=600).prefill_sizes(on_cuda=True) == (512,)
    assert EngineConfig(num_blocks=1024).prefill_sizes(on_cuda=False) == ()
    assert EngineConfig(prefill_graph_sizes=(64, 8, 64)).prefill_sizes(on_cuda=False) == (8, 64)
