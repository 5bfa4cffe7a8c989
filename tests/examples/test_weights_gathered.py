"""Two ranks gather their shards: bit for bit the cast of the whole, in few collectives of the engine's dtype."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from examples.colocate.trainer.weights import WeightWriter, weight_buckets
from tests.ranks_support import ranks

RANKS = 2
# Rows that the ranks share evenly or not; of one row the second rank has none.
SHAPES = {"even": (8, 6), "odd": (5, 7), "one": (1, 3), "vector": (9,), "large": (64, 40), "deep": (3, 2, 5)}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    # Half-way between two numbers of bf16 and of fp16, too large for fp16, too small, and not numbers.
    tensors["odd"].flatten()[:8] = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1e6, 1e-42, float("inf"), float("nan"), -0.0]
    )
    return tensors


class Counted:
    """Collectives, and the bytes that this rank sent in them."""

    def __init__(self) -> None:
        self.collectives, self.nbytes = 0, 0


@contextmanager
def counted() -> Iterator[Counted]:
    found = Counted()
    names = ("all_gather", "all_gather_into_tensor", "all_gather_single")  # the last one since torch 2.13
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def count(name: str) -> Any:
        def call(output: Any, tensor: Tensor, *more: Any, **options: Any) -> Any:
            found.collectives += 1
            found.nbytes += tensor.nbytes
            return originals[name](output, tensor, *more, **options)

        return call

    try:
        for name in originals:
            setattr(dist, name, count(name))
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def check(rank: int, meeting: str) -> None:
    """On each rank."""
    warnings.simplefilter("error", FutureWarning)  # of deprecated collectives
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    mesh, model, tensors = init_device_mesh("cpu", (RANKS,)), nn.Module(), whole()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])))
    padded = sum(-(-tensor.shape[0] // RANKS) * tensor[0].numel() for tensor in tensors.values())
    for dtype in DTYPES:
        expected = {name: bits(tensor.to(dtype)) for name, tensor in tensors.items()}
        # All at once; some at a time; each alone, where the bound is less than any tensor.
        for max_bytes, collectives in ((1 << 20, 1), (400, None), (1, len(SHAPES))):
            writer = WeightWriter(model, max_bytes)
            # Rank 1 has targets twice, which is its own business.
            targets = [
                {name: torch.full(shape, 7, dtype=dtype) for name, shape in SHAPES.items()} for _ in range(1 + rank)
            ]
            with counted() as found:
                written = writer.write(targets, dtype, gather=True)
            assert written == (1 + rank) * sum(map(len, expected.values()))
            for target in targets:
                assert {name: bits(tensor) for name, tensor in target.items()} == expected
            assert 1 < found.collectives < len(SHAPES) if collectives is None else found.collectives == collectives
            assert found.nbytes == padded * dtype.itemsize  # cast before it is sent
            with counted() as found:
                buckets = list(weight_buckets(model, max_bytes, dtype))
            assert found.collectives == len(buckets)
            assert {name: bits(tensor) for bucket in buckets for name, tensor in bucket.items()} == expected
    with counted() as found:
        WeightWriter(model).write([], torch.bfloat16, gather=True)
    assert found.collectives == 1  # also for ranks without targets
    dist.destroy_process_group()


def test_two_ranks_gather_the_cast_of_the_whole(tmp_path: Path) -> None:
    with ranks(check, RANKS, f"file://{tmp_path}/meeting"):
        pass


def test_a_bucket_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is 0; expected a positive number"):
        WeightWriter(nn.Linear(2, 2), 0)
