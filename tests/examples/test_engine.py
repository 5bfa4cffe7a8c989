"""The engine against a dense forward pass of the same weights, written here without any of its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import memsaver
from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.engine.decode_batch import Readback
from examples.colocate.engine.gpt2 import GPT2Config
from examples.colocate.engine.graph_pool import GraphPool
from examples.colocate.engine.sequence import Sequence
from examples.colocate.engine.verify import VerificationError, verify
from examples.colocate.model import ModelConfig
from tests.examples.engine_support import QWEN, MakeEngine, engines, one_thread, random_weights  # noqa: F401

GPT2 = GPT2Config(29, 32, num_layers=2, num_heads=4, max_position=96)
LLAMA = dataclasses.replace(QWEN, qk_norm=False, tie_word_embeddings=True, rope_theta=500.0)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


def dense_logits(model: ModelConfig, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits of every position, fp64 [tokens, vocab]: no cache, one head at a time."""
    w = {name: weight.double() for name, weight in weights.items()}
    count, half = len(tokens), model.head_dim // 2

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weight

    frequency = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(count, half, dtype=torch.float64), torch.arange(count)[:, None] * frequency)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[:, :half], x[:, half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=1)

    x = w["model.embed_tokens.weight"][tokens]
    hidden_from_future = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)
    for index in range(model.num_layers):
        layer = f"model.layers.{index}."
        y = norm(x, w[layer + "input_layernorm.weight"])
        heads = []
        for head in range(model.num_heads):
            kv_head = head * model.num_kv_heads // model.num_heads
            parts = []
            for part, number in (("q", head), ("k", kv_head), ("v", kv_head)):
                rows = slice(number * model.head_dim, (number + 1) * model.head_dim)
                z = y @ w[layer + f"self_attn.{part}_proj.weight"][rows].T
                if part != "v":
                    z = rotate(norm(z, w[layer + f"self_attn.{part}_norm.weight"]) if model.qk_norm else z)
                parts.append(z)
            q, k, v = parts
            heads.append((q @ k.T / model.head_dim**0.5 + hidden_from_future).softmax(-1) @ v)
        x = x + torch.cat(heads, dim=1) @ w[layer + "self_attn.o_proj.weight"].T
        y = norm(x, w[layer + "post_attention_layernorm.weight"])
        gate, up = y @ w[layer + "mlp.gate_proj.weight"].T, y @ w[layer + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[layer + "mlp.down_proj.weight"].T
    head_name = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    return norm(x, w["model.norm.weight"]) @ w[head_name].T


def dense_greedy(model: ModelConfig, weights: dict[str, Tensor], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(model, weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def make_engine(engines: list[Engine]) -> MakeEngine:  # noqa: F811
    """Engines with `random_weights`."""

    def make(model: ModelConfig = QWEN, weights_seed: int = 0, **config: Any) -> Engine:
        engine = Engine(
            model, EngineConfig(**{"max_batch_size": 4, "block_size": 4, "num_blocks": 64, **config}), "cpu"
        )
        engines.append(engine)
        engine.load_weights(random_weights(model, weights_seed).items())
        return engine

    return make


def tokens_of(engine: Engine, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.tokens for completion in engine.generate(prompts, sampling)]


def cached(engine: Engine, prompt: list[int]) -> list[int]:
    """Blocks that a request with this prompt would share."""
    return engine.blocks.cached_blocks(Sequence(prompt, GREEDY, len(prompt) + 1))


@pytest.mark.parametrize("model", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_greedy_equals_dense(make_engine: MakeEngine, model: ModelConfig) -> None:
    weights = random_weights(model)
    expected = [dense_greedy(model, weights, prompt, GREEDY.max_new_tokens) for prompt in PROMPTS]
    assert tokens_of(make_engine(model), PROMPTS) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_temperature_one(make_engine: MakeEngine, temperature: float) -> None:
    weights = random_weights(QWEN)
    for completion in make_engine().generate(PROMPTS, SamplingParams(temperature, max_new_tokens=8)):
        tokens = completion.prompt + completion.tokens
        logprobs = dense_logits(QWEN, weights, tokens).log_softmax(-1)
        first = len(completion.prompt)
        expected = [logprobs[at - 1, tokens[at]].item() for at in range(first, len(tokens))]
        assert completion.logprobs == pytest.approx(expected, abs=2e-4)


def test_sampling_follows_the_distribution(make_engine: MakeEngine) -> None:
    count = 2000
    engine = make_engine(max_batch_size=64)
    drawn = torch.tensor([tokens[0] for tokens in tokens_of(engine, [[3, 1]] * count, SamplingParams(1.0, 1))])
    expected = dense_logits(QWEN, random_weights(QWEN), [3, 1])[-1].softmax(-1)
    share = torch.bincount(drawn, minlength=QWEN.vocab_size) / count
    assert (share - expected).abs().max() < 4 * (0.25 / count) ** 0.5  # four standard deviations at the most


def test_the_seed_decides(make_engine: MakeEngine) -> None:
    first, again, other = (tokens_of(make_engine(seed=seed), PROMPTS, SamplingParams(1.0)) for seed in (0, 0, 1))
    assert first == again != other


def test_requests_beyond_the_batch_size_give_the_same_tokens(make_engine: MakeEngine) -> None:
    prompts = [[token, token + 1] for token in range(11)]
    alone = [tokens_of(make_engine(max_batch_size=1), [prompt])[0] for prompt in prompts]
    engine = make_engine(max_batch_size=3)
    assert tokens_of(engine, prompts) == alone
    assert engine.tokens_generated == len(prompts) * GREEDY.max_new_tokens
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_generation_ends_at_a_stop_token_or_the_length(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=10)
    full = tokens_of(engine, [[3, 1, 4]])[0]
    assert len(full) == 7  # the rest of max_model_len
    stop = full[3]
    completion = engine.generate([[3, 1, 4]], SamplingParams(0.0, 12, stop_tokens=(stop,)))[0]
    assert completion.tokens == full[: full.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == len(completion.tokens)


def test_preemption_gives_the_same_tokens(make_engine: MakeEngine) -> None:
    prompts = [[token, 2 * token % 29, 7, 7, token] for token in range(4)]
    sampling = SamplingParams(0.0, max_new_tokens=20)
    expected = tokens_of(make_engine(), prompts, sampling)
    for prefix_cache in (False, True):
        engine = make_engine(num_blocks=12, prefix_cache=prefix_cache)
        assert tokens_of(engine, prompts, sampling) == expected
        assert engine.scheduler.preemptions > 0
        assert engine.blocks.num_free == engine.blocks.num_usable


def test_prefix_hits_give_the_same_tokens(make_engine: MakeEngine) -> None:
    prefix = [5, 4, 3, 2, 1, 0, 1, 2, 3]
    prompts = [[*prefix, token] for token in range(3)] + [prefix]
    expected = tokens_of(make_engine(prefix_cache=False), prompts)
    engine = make_engine()
    assert tokens_of(engine, prompts) == expected  # shared within one prefill
    assert len(cached(engine, prompts[0])) == 2
    assert tokens_of(engine, prompts) == expected  # from the cache
    engine.drop_prefix_cache()
    assert cached(engine, prompts[0]) == []
    engine.kv_cache.fill_(float("nan"))  # as a resume without a backup may leave it
    assert tokens_of(engine, prompts) == expected


def test_loading_weights_clears_the_prefix_cache(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens_of(engine, PROMPTS)
    engine.load_weights(random_weights(QWEN, seed=1).items())
    assert tokens_of(engine, PROMPTS) == tokens_of(make_engine(weights_seed=1), PROMPTS)


def test_drain_leaves_waiting_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_size=2)
    sequences = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="drain"):
        engine.drop_prefix_cache()
    engine.drain()
    assert [sequence.finish_reason for sequence in sequences] == ["length", "length", None, None]
    assert engine.blocks.num_free == engine.blocks.num_usable
    engine.drop_prefix_cache()
    while sequences[3].finish_reason is None:
        engine.step()
    assert [sequence.completion().tokens for sequence in sequences] == tokens_of(make_engine(), PROMPTS)


def test_a_failed_step_leaves_the_engine_serving(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    expected = tokens_of(engine, PROMPTS)

    def fail(*args: object) -> None:
        raise RuntimeError("a kernel failed")

    for broken in ("prefill", "_decode"):
        with monkeypatch.context() as patch:
            patch.setattr(engine, broken, fail)
            with pytest.raises(RuntimeError, match="a kernel failed"):
                tokens_of(engine, PROMPTS)
        assert engine.blocks.num_free == engine.blocks.num_usable
        assert tokens_of(engine, PROMPTS) == expected


@pytest.mark.parametrize("tag", ["weights", "kv_cache", "buffers"])
def test_a_paused_engine_refuses_requests(make_engine: MakeEngine, tag: str) -> None:
    engine = make_engine()
    expected = tokens_of(engine, PROMPTS)
    addresses = engine.addresses()
    memsaver.pause(tag)
    with pytest.raises(memsaver.RegionPausedError, match=tag):
        engine.generate(PROMPTS, GREEDY)
    assert not engine.scheduler.waiting
    if tag == "weights":
        with pytest.raises(memsaver.RegionPausedError, match=tag):
            engine.load_weights(random_weights(QWEN).items())
    memsaver.resume(tag)
    engine.drop_prefix_cache()
    assert engine.addresses() == addresses
    assert tokens_of(engine, PROMPTS) == expected


def test_loading_checks_every_tensor(make_engine: MakeEngine) -> None:
    engine = make_engine()
    good = random_weights(QWEN, seed=1)
    name = "model.layers.1.self_attn.k_proj.weight"
    before = {known: tensor.clone() for known, tensor in engine.model.parameters.items()}
    for bad, message in (
        (good[name][:-1], r"k_proj.weight' is torch.float32 \(31, 32\); expected torch.float32 \(32, 32\)"),
        (good[name].half(), r"is torch.float16 \(32, 32\); expected torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_weights([(name, bad)])
        assert torch.equal(engine.model.parameters[name], before[name])
    with pytest.raises(ValueError, match="'lm_tail.weight' is unexpected"):
        engine.load_weights([("lm_tail.weight", good[name])])
    with pytest.raises(ValueError, match="comes twice"):
        engine.load_weights([(name, good[name]), (name, good[name])])
    with pytest.raises(ValueError, match=f"missing: {name}"):
        engine.load_weights((known, tensor) for known, tensor in good.items() if known != name)


def test_invalid_requests_raise(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=32, num_blocks=6)
    bad_prompt: Any
    for bad_prompt, message in (
        ([], "0 tokens"),
        ([1] * 32, "32 tokens"),
        ([29], "token 29"),
        ([-1], "token -1"),
        ([1, 2.0], "has 2.0 at 1; expected integers"),
        (["a"], "has 'a' at 0; expected integers"),
        (3, "prompt is 3; expected a list of token ids"),
        (torch.tensor(3), r"prompt is tensor\(3\); expected a list"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            engine.generate([[1, 2], bad_prompt], GREEDY)
        assert not engine.scheduler.waiting  # the good one is gone with the bad one
    sequence = engine.submit(torch.tensor([1, 2]), GREEDY)  # type: ignore[arg-type]
    assert sequence.prompt == [1, 2] and type(sequence.prompt[0]) is int
    engine.cancel(sequence)
    with pytest.raises(ValueError, match="needs 6 KV blocks; expected at most the cache's 5"):
        engine.generate([[1] * 12], GREEDY)
    bad: dict[str, Any]
    for bad in (
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e39},
        {"temperature": "hot"},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"stop_tokens": 5},
        {"stop_tokens": ("a",)},
    ):
        with pytest.raises(ValueError, match="expected"):
            SamplingParams(**bad)
    for bad in (
        {"max_batch_size": 0},
        {"max_batch_size": 2.5},
        {"num_blocks": "8"},
        {"max_model_len": 10.0},
        {"max_model_len": 1},
        {"graph_batch_sizes": (33,)},
        {"prefill_graph_sizes": (0,)},
        {"prefill_graph_sizes": (128,), "max_prefill_tokens": 64},
        {"compile_batch_sizes": (33,)},
        {"compile_batch_sizes": tuple(range(1, 10))},
    ):
        with pytest.raises(ValueError, match="expected"):
            EngineConfig(**bad)
    for bad in ({"num_kv_heads": 3}, {"head_dim": 15}, {"vocab_size": 0}, {"dtype": torch.int8}, {"norm_eps": 0}):
        with pytest.raises(ValueError, match="expected"):
            dataclasses.replace(QWEN, **bad)
    with pytest.raises(ValueError, match="max_model_len is 97; expected at most 96"):
        make_engine(max_model_len=97)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_prompts_in_chunks_give_the_same_tokens(make_engine: MakeEngine, prefix_cache: bool) -> None:
    expected = tokens_of(make_engine(), PROMPTS)
    for budget in (1, 3, 8):
        engine = make_engine(max_prefill_tokens=budget, prefix_cache=prefix_cache)
        assert tokens_of(engine, PROMPTS) == expected
        assert engine.blocks.num_free == engine.blocks.num_usable


def test_cancelled_requests_leave_the_others_alone(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(), PROMPTS)
    engine = make_engine(max_batch_size=2)
    sequences = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
    engine.cancel(sequences[0])  # in flight
    engine.cancel(sequences[3])  # waiting
    while any(each.finish_reason is None for each in sequences):
        engine.step()
    engine.settle()
    assert [each.finish_reason for each in sequences] == ["cancelled", "length", "length", "cancelled"]
    assert [each.completion().tokens for each in sequences[1:3]] == expected[1:3]
    partial = sequences[0].completion().tokens
    assert partial == expected[0][: len(partial)] and 0 < len(partial) < len(expected[0])
    assert sequences[3].completion().tokens == []
    assert engine.blocks.num_free == engine.blocks.num_usable
    engine.cancel(sequences[1])
    assert sequences[1].finish_reason == "length"


@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_a_pause_without_a_drain_loses_no_request(make_engine: MakeEngine, keeps_prefixes: bool) -> None:
    """KV entries are computed anew. Running requests and cached prefixes never read the replaced contents."""
    engine = make_engine(max_batch_size=2, prefix_cache=keeps_prefixes)
    prompts = [[*range(1, 25), 3], [*range(1, 25), 5, 6], [7]]
    expected = [each.tokens for each in engine.generate(prompts, GREEDY)]
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    advanced = 0
    for _ in range(4):
        for _ in range(2):
            advanced += len(engine.step())
        memsaver.pause()
        memsaver.resume()
        engine.kv_cache.fill_(float("nan"))
    while any(request.finish_reason is None for request in requests):
        advanced += len(engine.step())
    assert [request.completion().tokens for request in requests] == expected
    assert advanced == sum(map(len, expected))
    assert engine.scheduler.preemptions > 2


class HostGraphs(GraphPool):
    """Captures on the CPU: a replay calls the captured function and writes to the tensors of the capture."""

    fails_at = -1

    @property
    def available(self) -> bool:
        return True

    @contextmanager
    def open(self) -> Iterator[None]:
        yield

    def warm_up(self, functions: list[Callable[[], object]]) -> None:
        for function in functions:
            function()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        if len(self.captures) == self.fails_at:
            raise RuntimeError("a synchronisation inside")
        outputs = function()

        def replay() -> None:
            for kept, new in zip(outputs or (), function() or ()):
                kept.copy_(new)

        self._graphs += 1
        return SimpleNamespace(replay=replay), outputs

    def _held_bytes(self) -> int:
        return 0


def with_host_graphs(engine: Engine) -> Engine:
    pool = HostGraphs(engine.memory, engine.device)
    engine.graphs = engine.runner.pool = engine.prefill_runner.pool = pool
    return engine


def test_decode_and_prefill_by_graphs_give_the_same_tokens(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(), PROMPTS)
    engine = with_host_graphs(make_engine(prefill_graph_sizes=(8, 32), graph_batch_sizes=(2, 4), max_prefill_tokens=32))
    engine.capture()
    assert engine.captured_batch_sizes == (2, 4)
    assert [(each.name, each.graphs) for each in engine.graphs.captures] == [
        ("prefill 32", 3), ("prefill 8", 3), ("decode 4", 1), ("decode 2", 1),
    ]  # fmt: skip
    assert engine.graphs.table().splitlines()[-1].split()[:2] == ["all", "8"]
    for _ in range(2):
        engine.drop_prefix_cache()
        assert tokens_of(engine, PROMPTS) == expected
    for prompt, tokens in zip(PROMPTS, expected):
        assert tokens_of(engine, [prompt]) == [tokens]
    assert engine.replays > 0 and engine.prefill_runner.replays > 0
    before = engine.replays, engine.prefill_runner.replays
    assert [each.tokens for each in engine.generate(PROMPTS, GREEDY, use_graphs=False)] == expected
    assert (engine.replays, engine.prefill_runner.replays) == before


@pytest.mark.parametrize("model", [QWEN, GPT2], ids=["qwen", "gpt2"])
def test_padded_prefills_give_the_same_tokens_in_every_way(make_engine: MakeEngine, model: Any) -> None:
    """Before graphs there are, by graphs, eagerly beside them, and after a capture that failed."""
    prompts = [[1 + at % 15 for at in range(length)] for length in (3, 7, 13, 5)]
    expected = tokens_of(make_engine(model), prompts)
    engine = with_host_graphs(make_engine(model, prefill_graph_sizes=(8, 16), graph_batch_sizes=(2, 4)))
    assert tokens_of(engine, prompts) == expected
    engine.graphs.fails_at = 3  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a synchronisation inside"):
        engine.capture()
    engine.drop_prefix_cache()
    assert tokens_of(engine, prompts) == expected
    engine.graphs.fails_at = -1  # type: ignore[attr-defined]
    engine.capture()
    for use_graphs in (True, False):
        engine.drop_prefix_cache()
        assert [each.tokens for each in engine.generate(prompts, GREEDY, use_graphs)] == expected
    assert engine.prefill_runner.replays > 0


def test_verification_compares_every_size(make_engine: MakeEngine) -> None:
    engine = with_host_graphs(make_engine(prefill_graph_sizes=(8, 48), graph_batch_sizes=(1, 3), max_model_len=32))
    assert verify(engine) == []  # nothing is captured yet
    engine.capture()
    rows = verify(engine)
    assert [row.name for row in rows] == [
        "decode 1", "decode 3", "prefill 8 of 8", "prefill 1 of 8", "prefill 48 of 48", "prefill 41 of 48",
    ]  # fmt: skip
    assert [row.compared for row in rows] == [1, 3, 8, 1, 48, 41]
    assert all(row.holds for row in rows)
    assert tokens_of(engine, PROMPTS) == tokens_of(make_engine(), PROMPTS)
    running = engine.submit([1, 2, 3], GREEDY)
    engine.step()
    with pytest.raises(RuntimeError, match="drain"):
        verify(engine)
    engine.cancel(running)


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_verification_sees_a_graph_that_is_wrong(make_engine: MakeEngine, wrong: float) -> None:
    engine = with_host_graphs(make_engine(prefill_graph_sizes=(8,), graph_batch_sizes=(3,)))
    engine.capture()
    graph, pieces = engine.runner.graphs[3], engine.prefill_runner.pieces
    right = graph.replay

    def last_is_wrong() -> None:
        right()
        engine.batch.outputs.view(torch.float32)[1, 2] = wrong

    graph.replay = last_is_wrong  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match="decode 3: results of 3 tokens differ by up to .*, expected at most 0"):
        verify(engine)
    graph.replay = right  # type: ignore[method-assign]

    layers, last = pieces[8][:-1], pieces[8][-1]
    last_right = last.graph.replay

    def one_token_is_wrong() -> None:
        last_right()
        last.outputs[0][0] = wrong  # the first, which nothing is sampled from

    last.graph.replay = one_token_is_wrong  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match="prefill 8 of 8: .*; prefill 1 of 8"):
        verify(engine)
    last.graph.replay = last_right  # type: ignore[method-assign]
    pieces[8] = [layers[0], layers[0], last]  # a layer that runs twice
    with pytest.raises(VerificationError, match="prefill 8 of 8"):
        verify(engine)


def test_compiled_sizes_give_the_same_tokens(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine(), PROMPTS)
    # Traced in one piece, as for any other backend; compiling in C++ would take a minute.
    engine = make_engine(graph_batch_sizes=(4,), compile_batch_sizes=(4,), compile_backend="eager")
    assert tokens_of(engine, PROMPTS) == expected
    with_host_graphs(engine).capture()
    assert tokens_of(engine, PROMPTS) == expected
    assert [row.name for row in verify(engine)] == ["decode 4", "compiled 4"]


def test_all_memory_that_graphs_use_is_in_regions(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_graph_sizes=(8, 16))
    ranges = [
        range(begin, begin + nbytes) for region in engine.memory.of_a_step for begin, nbytes in region._core.live()
    ]
    addresses = engine.addresses()
    assert len(addresses) > 10 and any("prefill" in name for name in addresses)
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
    engine.drain()
    assert [each.completion().tokens for each in sequences] == expected


def test_default_graph_batch_sizes_follow_max_batch_size() -> None:
    assert EngineConfig(max_batch_size=12).batch_sizes() == tuple(range(1, 13))
    assert EngineConfig(max_batch_size=1).batch_sizes() == (1,)
    assert EngineConfig(max_batch_size=130).batch_sizes() == (*range(1, 33), 64, 96, 128, 130)
    assert EngineConfig(graph_batch_sizes=(8, 2, 8)).batch_sizes() == (2, 8)


def test_batches_beyond_the_largest_graph_have_few_sizes() -> None:
    assert EngineConfig(max_batch_size=130).eager_batch_sizes() == ()
    assert EngineConfig(max_batch_size=100, graph_batch_sizes=(2, 40)).eager_batch_sizes() == (64, 96, 100)
    assert EngineConfig(max_batch_size=8, graph_batch_sizes=(2,)).eager_batch_sizes() == (8,)
    assert EngineConfig(max_batch_size=64, graph_batch_sizes=()).eager_batch_sizes() == (32, 64)


def test_prefill_sizes_are_those_that_a_step_can_have() -> None:
    assert EngineConfig(num_blocks=1024).prefill_sizes(on_cuda=True) == (512, 1024, 2048, 4096)
    assert EngineConfig(num_blocks=100).prefill_sizes(on_cuda=True) == (512, 1024)
    assert EngineConfig(num_blocks=1024, max_prefill_tokens=600).prefill_sizes(on_cuda=True) == (512,)
    assert EngineConfig(num_blocks=1024).prefill_sizes(on_cuda=False) == ()
    assert EngineConfig(prefill_graph_sizes=(64, 8, 64)).prefill_sizes(on_cuda=False) == (8, 64)
    assert EngineConfig(prefill_graph_sizes=(64,), use_graphs=False).prefill_sizes(on_cuda=True) == ()
