"""Graphs against eager steps, for every captured size, on random contents of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import Engine
from .prefill_batch import PrefillBatch
from .scheduler import Chunk, Step
from .sequence import SamplingParams, Sequence

# Largest difference of a log-probability. The same kernels with the same arguments give the same bits; torch.compile
# fuses and so rounds elsewhere, and a prefill's matrix products are chosen by the number of tokens, padding included.
_SAME = 0.0
_OTHER_ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class VerificationError(RuntimeError):
    """A graph's results are further from the eager step's than rounding explains."""


@dataclass(frozen=True)
class Verified:
    """Greedy tokens and their log-probabilities, by a graph and eagerly."""

    what: str
    compared: int
    differing_tokens: int
    difference: float  # the largest, of log-probabilities
    tolerance: float

    @property
    def holds(self) -> bool:
        """A token may differ only where rounding may: between two that are as likely, within the tolerance."""
        return self.difference <= self.tolerance and (self.differing_tokens == 0 or self.tolerance > 0)


@torch.no_grad()
def verify(engine: Engine, seed: int = 0) -> list[Verified]:
    """Compare for every captured size; the results, largest size last.

    Overwrites the KV cache and forgets what it held: a RuntimeError while requests are running. Raises
    VerificationError where a difference is beyond its tolerance. Without graphs there is nothing to compare.
    """
    generator = _prepare(engine, seed)
    rows = [_decode(engine, size, generator) for size in engine.captured_batch_sizes]
    for size in sorted(engine.prefill_runner.pieces):
        rows += [_prefill(engine, count, size, generator) for count in (size, max(1, size - 7))]
    failed = [row for row in rows if not row.holds]
    if failed:
        raise VerificationError(
            "; ".join(
                f"{row.what}: {row.differing_tokens} of {row.compared} tokens differ, log-probabilities by up to "
                f"{row.difference:.3g}, expected at most {row.tolerance:.3g}"
                for row in failed
            )
        )
    return rows


def fill_with_random_context(engine: Engine, size: int, context: int, seed: int = 0) -> None:
    """Make the inputs of a decode step those of so many sequences of `context` tokens, over a random KV cache.

    Forgets what the cache held: a RuntimeError while requests are running.
    """
    sequences = _sequences(engine, [context] * size, _prepare(engine, seed), shared=True)
    engine.batch.fill(list(sequences), size, engine.config.block_size)


def _prepare(engine: Engine, seed: int) -> torch.Generator:
    engine.settle()
    engine.drop_prefix_cache()
    engine.kv_cache.normal_()
    return torch.Generator().manual_seed(seed)


def _decode(engine: Engine, size: int, generator: torch.Generator) -> Verified:
    batch, compiled = engine.batch, size in engine.config.compile_batch_sizes
    most = engine.max_model_len - 1
    lengths = (torch.randint(most, (size,), generator=generator) + 1).tolist()
    sequences = list(_sequences(engine, lengths, generator, shared=True))
    batch.fill(sequences, size, engine.config.block_size)
    latest = torch.randint(engine.model_config.vocab_size, batch.latest.shape, generator=generator)
    outcomes = []
    for step in (engine.runner.graphs[size].replay, lambda: engine.decode_step(size, compiled=False)):
        batch.latest.copy_(latest)
        step()
        outcomes.append(batch.read_back().wait(size))
    tolerance = _OTHER_ROUNDING[engine.model_config.dtype] if compiled else _SAME
    return _compared(f"decode {size}", outcomes, tolerance)


def _prefill(engine: Engine, count: int, size: int, generator: torch.Generator) -> Verified:
    longest = engine.max_model_len - 1
    lengths = [longest] * (count // longest) + ([count % longest] if count % longest else [])
    sequences = _sequences(engine, lengths, generator, shared=False)
    chunks = [Chunk(each, 0, len(each.tokens), samples=True) for each in sequences]
    outcomes = []
    for padded, use_graphs in ((size, True), (count, False)):
        batch = PrefillBatch.build(Step(chunks, prefill=True), padded, engine.kv_caches, engine.config.block_size)
        hidden_TC = engine.prefill_runner.run(batch.tokens_T, batch.positions_T, batch.attention, use_graphs)
        outcomes.append(_greedy(engine.model.logits(hidden_TC[batch.last_B])))
    return _compared(f"prefill {count} of {size}", outcomes, _OTHER_ROUNDING[engine.model_config.dtype])


def _sequences(engine: Engine, lengths: list[int], generator: torch.Generator, shared: bool) -> Iterator[Sequence]:
    """Of random tokens and blocks.

    Where blocks may be shared they are if there are too few; no two sequences have their last token in the same one.
    """
    usable = engine.blocks.num_usable
    order = (torch.randperm(usable, generator=generator) + 1).tolist()
    shared = shared and sum(map(engine.blocks.blocks_for, lengths)) > usable
    for row, length in enumerate(lengths):
        tokens = torch.randint(engine.model_config.vocab_size, (length,), generator=generator).tolist()
        sequence = Sequence(tokens, SamplingParams(temperature=0.0), length + 1)
        needed = engine.blocks.blocks_for(length)
        if shared:
            sequence.blocks = (torch.randint(usable, (needed,), generator=generator) + 1).tolist()
            sequence.blocks[-1] = order[row]
        else:
            sequence.blocks, order = order[:needed], order[needed:]
        sequence.num_computed, sequence.row = length, row
        yield sequence


def _greedy(logits_BV: Tensor) -> tuple[list[int], list[float]]:
    logprobs_B, tokens_B = logits_BV.float().log_softmax(-1).max(-1)
    return tokens_B.tolist(), logprobs_B.tolist()


def _compared(what: str, outcomes: list[tuple[list[int], list[float]]], tolerance: float) -> Verified:
    (tokens, logprobs), (expected, expected_logprobs) = outcomes
    differing = sum(one != other for one, other in zip(tokens, expected))
    difference = max(abs(one - other) for one, other in zip(logprobs, expected_logprobs))
    return Verified(what, len(tokens), differing, difference, tolerance)
