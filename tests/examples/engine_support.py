"""Helpers of the tests of the engine and its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import memsaver
from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.engine.engine_memory import EngineMemory
from examples.colocate.engine.scheduler import Chunk, Step
from examples.colocate.engine.sequence import Sequence
from examples.colocate.model import ModelConfig, parameter_shapes

CPU: Any = SimpleNamespace(empty=lambda shape, dtype: torch.empty(shape, dtype=dtype))  # in place of a region
QWEN = ModelConfig(
    vocab_size=29,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position=96,
)
MakeEngine = Callable[..., Engine]


def random_weights(model: ModelConfig, seed: int = 0, deviation: float = 0.3) -> dict[str, Tensor]:
    """Large enough for clear winners among the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(model).items():
        mean, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, deviation)
        weights[name] = (mean + spread * torch.randn(shape, generator=generator)).to(model.dtype)
    return weights


class HostGraphs(EngineMemory):
    """Captures on the CPU: a replay calls the captured function and writes to the tensors of the capture."""

    fails_at = -1  # the number of a capture
    captures = 0

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captures_graphs = True

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.captures = 0
        yield

    def warm_up(self, functions: list[Callable[[], object]]) -> None:
        for function in functions:
            function()

    def graph(self) -> tuple[Any, AbstractContextManager[Any]]:
        return SimpleNamespace(), broken_at_its_end()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        graph, outputs = super().capture(synchronise if self.captures == self.fails_at else function)
        self.captures += 1

        def replay() -> None:
            for kept, new in zip(outputs or (), function() or ()):
                kept.copy_(new)

        graph.replay = replay
        return graph, outputs


@contextmanager
def broken_at_its_end() -> Iterator[None]:
    """As a capture is whose function failed."""
    try:
        yield
    except RuntimeError:
        raise RuntimeError("the capture was invalidated") from None


def synchronise() -> None:
    raise RuntimeError("a synchronisation inside")


@contextmanager
def engine_maker(device: str = "cpu", deviation: float = 0.3, **default: Any) -> Iterator[MakeEngine]:
    """Makes engines with `random_weights`, on one thread. Afterwards all regions are active."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these tensors are too small for several
    sizes = {"max_batch_size": 4, "block_size": 4, "num_blocks": 64, **default}

    def make(model: ModelConfig = QWEN, seed: int = 0, memory: EngineMemory | None = None, **config: Any) -> Engine:
        config = {"prefix_cache": True, **sizes, **config}
        finds_blocks = config.pop("prefix_cache")
        made = Engine(model, EngineConfig(**config), device, memory=memory)
        if not finds_blocks:
            setattr(made.blocks, "publish", lambda *given: None)  # noqa: B010 a method
        made.model.load_weights(random_weights(model, seed, deviation).items())
        return made

    yield make
    memsaver.resume()
    torch.set_num_threads(threads)


def random_sequences(engine: Engine, lengths: list[int]) -> list[Sequence]:
    """Running sequences of random tokens, over a KV cache of random contents. Drops the cache's contents."""
    engine.settle()
    engine.drop_prefix_cache()
    engine.runner.kv_cache.normal_(generator=torch.Generator(engine.device).manual_seed(0))
    generator = torch.Generator().manual_seed(len(lengths))
    sequences = []
    for row, length in enumerate(lengths):
        blocks = torch.randint(engine.blocks.num_usable, (engine.blocks.blocks_for(length),), generator=generator) + 1
        blocks[-1] = 1 + row  # the one that is written is the sequence's own
        tokens = torch.randint(engine.model_config.vocab_size, (length,), generator=generator).tolist()
        sequence = Sequence(tokens, SamplingParams(0.0), length + 1, blocks=blocks.tolist(), row=row)
        sequence.num_computed = length
        sequences.append(sequence)
    return sequences


def fill_with_random_context(engine: Engine, lengths: list[int]) -> None:
    """Make the inputs of a decode step those of `random_sequences`."""
    sequences = random_sequences(engine, lengths)
    engine.runner.batch.start(sequences)
    engine.runner.batch.fill(sequences, len(sequences))


@torch.no_grad()
def graph_differences(engine: Engine) -> dict[str, float]:
    """By captured size, the largest difference of a graph's results to those of an eager step.

    Of a decode step: tokens and log-probabilities. Of a prefill, of as many tokens as the graphs have and of fewer:
    hidden states, by the norm of the difference, relative to that of a token's state.
    """
    runner, found = engine.runner, dict[str, float]()
    for size in sorted(runner.decode_graphs):
        fill_with_random_context(engine, [1 + 7 * row % (engine.model_config.max_position - 1) for row in range(size)])
        outcomes = []
        for step in (runner.decode_graphs[size].replay, lambda size=size: runner.decode_step(size)):
            runner.batch.latest.copy_(torch.arange(len(runner.batch.latest)) % engine.model_config.vocab_size)
            engine.random_state.zero_()
            step()
            outcomes.append(torch.tensor(runner.batch.read_back().wait(size), dtype=torch.float64))
        found[f"decode {size}"] = (outcomes[0] - outcomes[1]).abs().max().item()  # max() keeps NaN
    longest = engine.model_config.max_position - 1
    for size in runner.prefill_graphs.pieces:
        for count in (size, max(1, size - 7)):
            lengths = [longest] * (count // longest) + ([count % longest] if count % longest else [])
            chunks = [Chunk(each, 0, each.num_computed, True) for each in random_sequences(engine, lengths)]
            states = []
            for use_graphs in (True, False):
                state = runner.hidden(Step(chunks, prefill=True), size, len(chunks), use_graphs)[0]
                states.append(state[:count].float().clone())
            found[f"prefill {count} of {size}"] = (
                ((states[0] - states[1]).norm(dim=1) / states[1].norm(dim=1)).max().item()
            )
    return found


class DenseAttention:
    """One sequence's attention, in fp32. It keeps the keys and values it has seen."""

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
