"""Graphs against eager steps, for every captured size, on random contents of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .engine import Engine
from .prefill_batch import PrefillBatch
from .scheduler import Chunk, Step
from .sequence import SamplingParams, Sequence

# Of a token's hidden state, or its logits: the norm of the difference, relative to the norm of either. Matrix
# products are chosen by the number of tokens, padding included, and torch.compile fuses: both then round elsewhere,
# while results that have nothing to do with each other differ by more than 1.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class VerificationError(RuntimeError):
    """A graph's results are further from the eager step's than rounding explains."""


@dataclass(frozen=True)
class Verified:
    """Results of two ways to compute the same, token by token."""

    name: str
    compared: int  # tokens
    difference: float  # the largest of a token; NaN where a result is
    tolerance: float  # 0: the same kernels on the same arguments give the same bits

    @property
    def holds(self) -> bool:
        """Not of NaN, which no comparison holds of."""
        return self.difference <= self.tolerance


@torch.no_grad()
def verify(engine: Engine) -> list[Verified]:
    """Compare for every captured size; the results, largest size last.

    - "decode N": a graph's tokens and log-probabilities are the eager step's, bit for bit;
    - "compiled N": the logits of a step that goes through torch.compile, against one that does not;
    - "prefill M of N": hidden states of M tokens, by the pieces' graphs for N and eagerly.

    Overwrites the KV cache and drops its contents. Raises RuntimeError while requests are running, ValueError where the
    cache has too few blocks, VerificationError where a difference is beyond its tolerance. Without graphs there is
    nothing to compare.
    """
    with engine.on_device():
        generator = _prepare(engine)
        rows: list[Verified] = []
        for size in engine.captured_batch_sizes:
            rows += _decode(engine, size, generator)
        for size in sorted(engine.prefill_runner.pieces):
            rows += [_prefill(engine, count, size, generator) for count in (size, max(1, size - 7))]
    failed = [row for row in rows if not row.holds]
    if failed:
        raise VerificationError(
            "; ".join(
                f"{row.name}: results of {row.compared} tokens differ by up to {row.difference:.3g}, "
                f"expected at most {row.tolerance:.3g}"
                for row in failed
            )
        )
    return rows


def fill_with_random_context(engine: Engine, size: int, context: int) -> None:
    """Make the inputs of a decode step those of so many sequences of `context` tokens, over a random KV cache.

    Drops the contents of the cache. Raises RuntimeError while requests are running.
    """
    sequences = _sequences(engine, [context] * size, _prepare(engine))
    engine.batch.fill(list(sequences), size)


def _prepare(engine: Engine) -> torch.Generator:
    engine.settle()
    engine.drop_prefix_cache()
    engine.kv_cache.normal_(generator=torch.Generator(engine.device).manual_seed(0))
    return torch.Generator().manual_seed(0)


def _decode(engine: Engine, size: int, generator: torch.Generator) -> list[Verified]:
    batch = engine.batch
    lengths = (torch.randint(engine.max_model_len - 1, (size,), generator=generator, device="cpu") + 1).tolist()
    batch.fill(list(_sequences(engine, lengths, generator)), size)
    latest = torch.randint(engine.model_config.vocab_size, batch.latest.shape, generator=generator, device="cpu")
    outcomes = []
    for step in (engine.runner.graphs[size].replay, partial(engine.decode_step, size)):
        batch.latest.copy_(latest)
        engine.sampler.state.zero_()
        step()
        outcomes.append(torch.tensor(batch.read_back().wait(size), dtype=torch.float64))
    difference = (outcomes[0] - outcomes[1]).abs().max().item()  # max() keeps NaN
    found = [Verified(f"decode {size}", size, difference, tolerance=0.0)]
    if size in engine.config.compile_batch_sizes:
        batch.latest.copy_(latest)
        found.append(_compared(f"compiled {size}", engine.compiled_logits(size), engine.decode_logits(size)))
    return found


def _prefill(engine: Engine, count: int, size: int, generator: torch.Generator) -> Verified:
    longest = engine.max_model_len - 1
    lengths = [longest] * (count // longest) + ([count % longest] if count % longest else [])
    sequences = _sequences(engine, lengths, generator)  # whole prompts read no block, so they may share some
    chunks = [Chunk(each, 0, len(each.tokens), samples=True) for each in sequences]
    outcomes = []
    for padded, use_graphs in ((size, True), (count, False)):
        batch = PrefillBatch.build(Step(chunks, prefill=True), padded, engine.kv_caches)
        hidden_TC = engine.prefill_runner.run(batch.tokens_T, batch.positions_T, batch.attention, use_graphs)
        outcomes.append(hidden_TC[:count].clone())
    return _compared(f"prefill {count} of {size}", outcomes[0], outcomes[1])


def _compared(name: str, one: Tensor, other: Tensor) -> Verified:
    """Row by row."""
    norms = other.float().norm(dim=-1)
    difference = ((one.float() - other.float()).norm(dim=-1) / norms).max().item()
    return Verified(name, len(one), difference, _ROUNDING[one.dtype])


def _sequences(engine: Engine, lengths: list[int], generator: torch.Generator) -> Iterator[Sequence]:
    """Of random tokens and blocks, which they share if there are too few; each has its last token in one of its own."""
    usable, needed_in_all = engine.blocks.num_usable, sum(map(engine.blocks.blocks_for, lengths))
    if usable < len(lengths):
        raise ValueError(f"the KV cache has {usable} blocks; expected {len(lengths)} or more for as many sequences")
    order = (torch.randperm(usable, generator=generator, device="cpu") + 1).tolist()
    shared = needed_in_all > usable
    for row, length in enumerate(lengths):
        tokens = torch.randint(engine.model_config.vocab_size, (length,), generator=generator, device="cpu").tolist()
        sequence = Sequence(tokens, SamplingParams(temperature=0.0), length + 1)
        needed = engine.blocks.blocks_for(length)
        if shared:
            sequence.blocks = (torch.randint(usable, (needed,), generator=generator, device="cpu") + 1).tolist()
            sequence.blocks[-1] = order[row]
        else:
            sequence.blocks, order = order[:needed], order[needed:]
        sequence.num_computed, sequence.row = length, row
        yield sequence
