"""Two ranks of a trainer, run once for all tests: they train as one does, and write the weights that one has."""

from __future__ import annotations

import math
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import memsaver
from examples.colocate.model import WeightPart, bit_sum
from examples.colocate.trainer import EngineWeights, NonFiniteError, Trainer
from examples.colocate.trainer.process_group import join
from examples.colocate.trainer.weights import WeightWriter
from tests.examples.trainer_support import MODEL, PLAIN, TAGS, samples, weights
from tests.ranks_support import ranks

RANKS = 2
# Nine samples in rows of 14 tokens: one rank has a row more than the other.
SETTINGS = replace(PLAIN, seed=7, micro_batch_tokens=14, checkpoint_layers=True)
# Rows that the ranks share evenly or not; of one row the second rank has none.
SHAPES = {"even": (8, 6), "odd": (5, 7), "one": (1, 4), "vector": (9,), "large": (64, 40), "deep": (3, 2, 5)}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WHOLE = {name: WeightPart(name, shape, 0, 0, shape[0], name, 0) for name, shape in SHAPES.items()}
# Slices of rows and of columns, such as those of the ranks of an engine; one of a single row, two that ranks share.
SLICES = WHOLE | {
    "even": WeightPart("even", (8, 6), 0, 2, 4, "even", 0),
    "odd": WeightPart("odd", (5, 7), 0, 4, 1, "odd", 0),
    "one": WeightPart("one", (1, 4), 1, 2, 2, "one", 0),
    "vector": WeightPart("vector", (9,), 0, 3, 3, "vector", 0),
    "large": WeightPart("large", (64, 40), 1, 20, 20, "large", 0),
}


def test_two_ranks_train_the_same_as_one(found: list[dict[Any, Any]]) -> None:
    alone = Trainer(MODEL, SETTINGS, join("cpu"))
    metrics = train_a_little(alone)
    expected = weights(alone)
    for each in found:
        assert each["micro_batches"] == found[0]["micro_batches"]
        for reduce_once in (False, True):
            assert each["metrics", reduce_once] == pytest.approx(metrics, rel=1e-4)
            for name, tensor in each["weights", reduce_once].items():
                assert torch.allclose(tensor, expected[name], atol=1e-4), name
    assert sum(each["rows"] for each in found) < RANKS * found[0]["micro_batches"]  # some row was empty


def test_a_step_that_is_not_finite_on_one_rank_is_refused_by_all(found: list[dict[Any, Any]]) -> None:
    for each in found:
        step, _, losses = each["refused"]
        assert step == 4 and [math.isnan(loss) for loss in losses].count(True) == 1
        assert losses[0] == pytest.approx(found[0]["refused"][2][0], nan_ok=True)


def test_two_ranks_continue_from_their_checkpoint(found: list[dict[Any, Any]]) -> None:
    for each in found:
        assert each["saved"] == each["loaded"] != each["moved on"]


def test_each_rank_reads_its_rows_of_a_model(found: list[dict[Any, Any]], stored: dict[str, Tensor]) -> None:
    for each in found:
        assert each["pretrained"].keys() == stored.keys()
        assert all(torch.equal(each["pretrained"][name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks_gather_the_cast_of_the_whole(found: list[dict[Any, Any]], dtype: torch.dtype) -> None:
    for way, layout in (("gathered", WHOLE), ("gathered slices", SLICES)):
        for each in found:
            assert each[way, dtype] == bits(layout, dtype)
    for layout, name in ((WHOLE, "whole"), (SLICES, "slices")):
        for each in found:
            assert each[name, dtype] == bits(layout, dtype)
            sums = {key: int(bit_sum(part.of(whole()[key].to(dtype)))) for key, part in layout.items()}
            assert each[name, dtype, "checksums"] == sums
    padded = sum(-(-shape[0] // RANKS) * torch.Size(shape[1:]).numel() for shape in SHAPES.values())
    for each in found:
        assert each["sent", dtype] == padded * dtype.itemsize  # cast before it is sent


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    """Parameters of a checkpoint."""
    return weights(Trainer(MODEL, replace(PLAIN, seed=8), join("cpu")))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, stored: dict[str, Tensor]) -> list[dict[Any, Any]]:
    """Of each rank, what it has found."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = tmp_path_factory.mktemp("ranks")
    save_file(stored, folder / "model.safetensors")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with ranks(rank_side, RANKS, meeting, folder):
        pass
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(RANKS)]


def rank_side(rank: int, meeting: str, folder: Path) -> None:
    warnings.simplefilter("error", FutureWarning)  # of deprecated collectives
    torch.set_num_threads(1)
    mesh = join("cpu", rank, RANKS, meeting)
    found = trained(mesh, folder)
    for dtype in DTYPES:
        found |= written(mesh, dtype)
    torch.save(found, folder / f"rank{rank}")
    dist.destroy_process_group()


def trained(mesh: Any, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for reduce_once in (False, True):
        trainer = Trainer(MODEL, replace(SETTINGS, reduce_once=reduce_once), mesh)
        found["metrics", reduce_once], found["weights", reduce_once] = train_a_little(trainer), weights(trainer)
    dealt = trainer.deal(samples(9))
    found["micro_batches"] = len(dealt.micro_batches)
    found["rows"] = sum(len(each.targets_N) > 0 for each in dealt.micro_batches)
    bad = [replace(each, advantage=math.nan) if index == 1 else each for index, each in enumerate(samples(9))]
    with pytest.raises(NonFiniteError) as refused:
        trainer.train_step(trainer.deal(bad), 1e-3)
    found["refused"], found["saved"] = refused.value.args, trainer.checksums()
    trainer.save(folder / "saved")
    trainer.warm_up(samples(9), 1e-3)
    found["moved on"] = trainer.checksums()
    trainer.load(folder / "saved")
    found["loaded"] = trainer.checksums()
    return found | {"pretrained": weights(Trainer(MODEL, SETTINGS, mesh, folder))}


def train_a_little(trainer: Trainer) -> list[float]:
    """Runs steps with a pause between them. Returns their metrics."""
    metrics = [trainer.warm_up(samples(9), 1e-3)]
    memsaver.pause(TAGS)
    memsaver.resume(TAGS)
    dealt, _ = trainer.recompute(samples(9))
    metrics += [trainer.train_step(dealt, 1e-3), trainer.train_step(dealt, 1e-3)]
    return [figure for each in metrics for figure in (each.loss, each.grad_norm, each.clipped)]


def written(mesh: Any, dtype: torch.dtype) -> dict[Any, Any]:
    model, found = nn.Module(), dict[Any, Any]()
    for name, tensor in whole().items():
        model.register_parameter(name, nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])))
    writer, rank, integer = WeightWriter(model, dtype), dist.get_rank(), INTEGERS[dtype.itemsize]
    for layout, way in ((WHOLE, "whole"), (SLICES, "slices")):
        engine = empty(layout, dtype)
        writer.write([engine])
        # Each rank has written its rows: their sum is whole, if no row was written twice.
        sums = {name: tensor.view(integer).long() for name, tensor in engine.tensors.items()}
        for tensor in sums.values():
            dist.all_reduce(tensor)
        found[way, dtype] = {name: raw(tensor.to(integer)) for name, tensor in sums.items()}
        found[way, dtype, "checksums"] = writer.checksums(layout)
    engines = [empty(WHOLE, dtype), empty(SLICES, dtype)]
    with counted() as sent:
        nbytes = writer.write(engines, gather=True)
    assert nbytes == sum(tensor.nbytes for each in engines for tensor in each.tensors.values())
    found["sent", dtype] = sum(sent)
    writer.write(engines[:rank], gather=True)  # rank 0 has none, which is its own business
    for way, engine in zip(("gathered", "gathered slices"), engines):
        found[way, dtype] = {name: raw(tensor) for name, tensor in engine.tensors.items()}
    return found


INTEGERS = {2: torch.int16, 4: torch.int32}


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    # Half-way between two numbers of bf16 and of fp16, too large for fp16, too small, and not numbers.
    tensors["odd"].flatten()[:8] = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1e6, 1e-42, float("inf"), float("nan"), -0.0]
    )
    return tensors


def empty(layout: dict[str, WeightPart], dtype: torch.dtype) -> EngineWeights:
    return EngineWeights({name: torch.zeros(part.shape, dtype=dtype) for name, part in layout.items()}, layout)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def bits(layout: dict[str, WeightPart], dtype: torch.dtype) -> dict[str, bytes]:
    return {name: raw(part.of(whole()[name]).to(dtype)) for name, part in layout.items()}


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sent in each collective that gathers."""
    found: list[int] = []
    names = [
        name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)
    ]  # by torch's version
    originals = {name: getattr(dist, name) for name in names}

    def counting(original: Any) -> Any:
        def call(output: Any, tensor: Tensor, *more: Any, **options: Any) -> Any:
            found.append(tensor.nbytes)
            return original(output, tensor, *more, **options)

        return call

    try:
        for name, original in originals.items():
            setattr(dist, name, counting(original))
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
