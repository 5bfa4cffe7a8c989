"""Two ranks of a trainer, run once for all tests: they train as one does."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import memsaver
from examples.colocate.process_group import join
from examples.colocate.trainer.interface import NonFiniteError
from examples.colocate.trainer.trainer import Trainer
from tests.examples.trainer_support import MODEL, PLAIN, TAGS, samples, weights
from tests.ranks_support import free_address, ranks

RANKS = 2
# Nine samples in rows of 14 tokens: one rank has a row more than the other.
SETTINGS = replace(PLAIN, seed=7, micro_batch_tokens=14, checkpoint_layers=True)


def test_two_ranks_train_the_same_as_one(found: list[dict[str, Any]]) -> None:
    alone = Trainer(MODEL, SETTINGS, join("cpu"))
    metrics = train_a_little(alone)
    expected = weights(alone)
    for each in found:
        assert each["micro_batches"] == found[0]["micro_batches"]
        assert each["metrics"] == pytest.approx(metrics, rel=1e-4)
        for name, tensor in each["weights"].items():
            assert torch.allclose(tensor, expected[name], atol=1e-4), name
    assert sum(each["rows"] for each in found) < RANKS * found[0]["micro_batches"]  # some row was empty


def test_a_step_that_is_not_finite_on_one_rank_is_refused_by_all(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["refused"] == found[0]["refused"]
        losses = re.fullmatch(r"optimizer step 4 was not .* ranks are \[(.*), (.*)\]; expected .*", each["refused"])
        assert losses is not None and losses.groups().count("nan") == 1


def test_two_ranks_continue_from_their_checkpoint(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["saved"] == each["loaded"] != each["moved on"]


def test_each_rank_reads_its_rows_of_a_model(found: list[dict[str, Any]], stored: dict[str, Tensor]) -> None:
    for each in found:
        assert each["pretrained"].keys() == stored.keys()
        assert all(torch.equal(each["pretrained"][name], tensor) for name, tensor in stored.items())


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    """Parameters of a checkpoint."""
    return weights(Trainer(MODEL, replace(PLAIN, seed=8), join("cpu")))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, stored: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Of each rank, what it has found."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = tmp_path_factory.mktemp("ranks")
    save_file(stored, folder / "model.safetensors")
    with ranks(rank_side, RANKS, free_address(), folder):
        pass
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(RANKS)]


def rank_side(rank: int, meeting: str, folder: Path) -> None:
    warnings.simplefilter("error", FutureWarning)  # of deprecated collectives
    torch.set_num_threads(1)
    mesh = join("cpu", rank, RANKS, meeting)
    found = trained(mesh, folder)
    torch.save(found, folder / f"rank{rank}")
    dist.destroy_process_group()


def trained(mesh: Any, folder: Path) -> dict[str, Any]:
    trainer = Trainer(MODEL, SETTINGS, mesh)
    found: dict[str, Any] = {"metrics": train_a_little(trainer), "weights": weights(trainer)}
    dealt = trainer.deal(samples(9))
    found["micro_batches"] = len(dealt.micro_batches)
    found["rows"] = sum(len(each.targets_N) > 0 for each in dealt.micro_batches)
    bad = [replace(each, advantage=math.nan) if index == 1 else each for index, each in enumerate(samples(9))]
    with pytest.raises(NonFiniteError) as refused:
        trainer.train_step(trainer.deal(bad), 1e-3)
    found["refused"], found["saved"] = str(refused.value), trainer.checksums()
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
