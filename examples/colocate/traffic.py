"""The bytes that the loop's turns have to move, counted by hand from shapes: no figure of memsaver goes in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .model import ModelConfig, parameter_shapes

_ROUNDED = 512  # bytes: torch's allocator, and a region of the host driver, round a tensor up to this
_MASTER_BYTES = 4  # per value of the trainer: parameters and both moments are fp32

# Contents that are read again after a turn have to go out and come back. Others do not: the KV cache is filled again,
# gradients are zeroed, the workspace is overwritten. The sync overwrites the engine's weights after training; only over
# "away" they stay the same.
_OUT = {
    ("rollout", "away"): ("weights", "constants"),
    ("rollout", "train"): ("constants",),
    ("train", "sync"): ("optimizer",),
    ("sync", "rollout"): ("params",),
}
_IN = {
    ("away", "rollout"): ("weights", "constants"),
    ("rollout", "train"): ("params", "optimizer"),
    ("sync", "rollout"): ("constants",),
}


@dataclass(frozen=True)
class Contents:
    """Bytes of contents that last, of all ranks together."""

    weights: int
    constants: int  # the engines' buffers, and their graphs' memory between replays
    params: int
    optimizer: int  # both moments, and a step counter for each parameter

    @classmethod
    def of(cls, model: ModelConfig, ranks: int, constants: int) -> Contents:
        """``ranks`` pairs: an engine has the whole model, a rank of the trainer its rows of each parameter."""
        named = parameter_shapes(model)
        shards = [shard for shape in named.values() for shard in _shards(shape, ranks)]
        params = _nbytes(shards, _MASTER_BYTES)
        counters = ranks * len(named) * _ROUNDED
        weights = ranks * _nbytes(map(math.prod, named.values()), model.dtype.itemsize)
        return cls(weights=weights, constants=constants, params=params, optimizer=2 * params + counters)

    def must_move(self, before: str, after: str) -> tuple[int, int]:
        """Bytes out, and in, that the turn from one phase to the next cannot do without.

        Raises ValueError for a turn that no step of the loop has.
        """
        turn = before, after
        if turn not in _OUT and turn not in _IN:
            raise ValueError(f"there is no turn {before!r} -> {after!r}, expected one of {sorted({*_OUT, *_IN})}")
        out, into = (sum(getattr(self, name) for name in moved.get(turn, ())) for moved in (_OUT, _IN))
        return out, into


def _shards(shape: tuple[int, ...], ranks: int) -> list[int]:
    """Values on each rank: FSDP2 gives all but the last ones equally many rows."""
    rows, per_rank = shape[0], -(-shape[0] // ranks)
    counts = [min(per_rank, max(0, rows - rank * per_rank)) for rank in range(ranks)]
    return [count * math.prod(shape[1:]) for count in counts]


def _nbytes(sizes: Iterable[int], itemsize: int) -> int:
    return sum(-(-size * itemsize // _ROUNDED) * _ROUNDED for size in sizes)
