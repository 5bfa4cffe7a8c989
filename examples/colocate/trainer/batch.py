"""Completions to learn from, packed end to end into rows of tokens.

Shape suffixes: T tokens of a row, S sequences in it, N tokens to predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from .interface import Sample


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads, and what it learns from: sequences end to end in one row."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, within the sequence
    slots_T: Tensor  # int64: where a token is if all sequences are padded to the longest, one after the other
    bounds: Tensor  # int32 [S + 1]: where the sequences begin and end
    longest: int  # tokens of a sequence
    predictors_N: Tensor  # int64: places of the tokens before those to predict
    targets_N: Tensor  # int64: the tokens to predict
    behaviour_N: Tensor  # fp32: their log-probabilities, in nats, under the policy that chose them
    advantages_N: Tensor  # fp32
    weights_N: Tensor  # fp32: factors of their losses

    @classmethod
    def pack(cls, samples: Sequence[Sample], device: torch.device | str) -> MicroBatch:
        """Without samples: a row that predicts nothing, for a rank that has to run beside the others."""
        lengths = [sample.length for sample in samples] or [1]
        bounds, longest = [0, *accumulate(lengths)], max(lengths)
        tokens = [token for each in samples for token in (*each.prompt, *each.completion[:-1])] or [0]
        predictors, behaviour, advantages = list[int](), list[float](), list[float]()
        for end, each in zip(bounds[1:], samples):
            count = len(each.completion)
            predictors += range(end - count, end)
            behaviour += each.logprobs or [0.0] * count
            advantages += [each.advantage] * count
        tensor = partial(torch.tensor, device=device)
        return cls(
            tensor(tokens),
            tensor([position for length in lengths for position in range(length)]),
            tensor([row * longest + place for row, length in enumerate(lengths) for place in range(length)]),
            tensor(bounds, dtype=torch.int32),
            longest,
            tensor(predictors, dtype=torch.int64),
            tensor([token for each in samples for token in each.completion], dtype=torch.int64),
            tensor(behaviour),
            tensor(advantages),
            torch.ones(len(predictors), device=device),
        )


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a batch: as many micro-batches as every other rank has."""

    micro_batches: list[MicroBatch]
    num_targets: int  # tokens that all ranks together learn from

    @classmethod
    def deal(
        cls, samples: Sequence[Sample], rank: int, ranks: int, max_tokens: int, device: torch.device | str = "cpu"
    ) -> RankBatch:
        """Rows of at most `max_tokens` tokens, or of one longer sequence. All ranks call it with the same samples."""
        if not samples:
            raise ValueError("there are no samples; expected one or more")
        # Sequences of like lengths share a row: where attention pads them, it pads little.
        ordered = sorted(samples, key=lambda sample: sample.length, reverse=True)
        rows = [_rows(ordered[each::ranks], max_tokens) for each in range(ranks)]
        # A forward or backward pass is a collective, so the ranks have to run the same number of them.
        missing = max(map(len, rows)) - len(rows[rank])
        micro_batches = [MicroBatch.pack(row, device) for row in rows[rank] + [[]] * missing]
        return cls(micro_batches, sum(len(sample.completion) for sample in samples))


def _rows(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    rows: list[list[Sample]] = [[]]
    for sample in samples:
        if rows[-1] and sum(each.length for each in rows[-1]) + sample.length > max_tokens:
            rows.append([])
        rows[-1].append(sample)
    return rows
