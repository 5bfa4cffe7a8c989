"""An engine of two ranks, and trainers of two and of one, each rank a process, on one host device: no copy between.

Beside it each process of the engine has an engine of one rank. The processes meet in a store.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memsaver
from examples.colocate.engine import Engine, EngineConfig
from examples.colocate.engine.tensor_parallel import ONE_RANK, Parallel
from examples.colocate.model import EngineWeights, ModelConfig, weight_layout
from examples.colocate.process_group import join
from examples.colocate.trainer.trainer import Trainer
from tests.broker_support import Running
from tests.examples.trainer_support import PLAIN, samples, weights
from tests.ranks_support import free_address, ranks

# Of 17 rows the trainer's ranks have 9 and 8. Of 36 and 46 columns the engine's ranks have halves.
MODEL = ModelConfig(
    vocab_size=17,
    hidden_size=34,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=46,
    max_position=16,
    dtype=torch.bfloat16,
    qk_norm=False,
    qkv_bias=True,
)


def test_one_and_two_ranks_write_the_weights_of_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into an engine of two ranks, and engines of one."""
    with Running("256MiB") as broker:
        for name, value in {**broker.environment, "MEMSAVER_POOL": "shared"}.items():
            monkeypatch.setenv(name, value)
        with ranks(side, 4, [free_address() for _ in range(2)], tmp_path):
            pass


def side(number: int, meetings: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    role, rank = divmod(number, 2)
    store = dist.FileStore(str(folder / "store"), 4)
    store.set_timeout(timedelta(seconds=40))  # for a process that has failed
    (engine_side, trainer_side)[role](rank, meetings[role], folder, store)


def engine_side(rank: int, meeting: str, folder: Path, store: Any) -> None:
    """One of two ranks: all tensors are those of an engine that loaded the checkpoint, the checksums the trainer's."""
    memsaver.configure(patches="multiprocessing")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    engines = [engine(Parallel(dist.group.WORLD)), engine(ONE_RANK)]
    for step in range(3):
        shared = [(each.share_weights(), each.weight_layout) for each in engines]
        store.set(f"tokens {step} {rank}", pickle.dumps(shared))
        store.wait([f"saved {step}"])
        full, *checksums = torch.load(folder / str(step))
        for _ in range(2):
            for mine, sums in zip(engines, (checksums[rank], checksums[2])):
                other = engine(mine.model.parallel)
                other.model.load_weights(full.items())
                for name, weight in mine.model.weights.items():
                    assert torch.equal(weight.view(torch.uint8), other.model.weights[name].view(torch.uint8)), name
                assert mine.checksums() == sums
            memsaver.pause()  # no process is attached any more
            memsaver.resume()


def engine(parallel: Parallel) -> Engine:
    return Engine(MODEL, EngineConfig(max_batch_size=4, block_size=4, num_blocks=16), parallel=parallel)


def trainer_side(rank: int, meeting: str, folder: Path, store: Any) -> None:
    """One of two ranks; the first one is alone thereafter."""

    def made(*where: Any) -> Trainer:
        return Trainer(MODEL, replace(PLAIN, seed=5), join("cpu", *where))

    def write(step: int, steps: int, engines: tuple[int, ...], gather: bool) -> int:
        for _ in range(steps):
            trainer.warm_up([each for each in samples() if each.length < 16], 1e-2)
        shared = [pair for each in engines for pair in pickle.loads(store.get(f"tokens {step} {each}"))]
        written = trainer.weights.write([EngineWeights(pickle.loads(one), layout) for one, layout in shared], gather)
        layouts = [weight_layout(MODEL, *place) for place in ((0, 2), (1, 2), (0, 1))]
        found = (weights(trainer), *(trainer.weights.checksums(layout) for layout in layouts))
        if trainer.rank == 0:
            torch.save(found, folder / str(step))
            store.set(f"saved {step}", "")
        return written

    trainer = made(rank, 2, meeting)
    written: list[Any] = [None, None]
    dist.all_gather_object(written, write(0, 1, (0, 1), gather=False))
    assert written[0] > written[1] > 0  # the first has the odd rows
    write(1, 1, (rank,), gather=True)  # each rank reaches the engines of its own process alone
    dist.destroy_process_group()
    if rank == 0:
        del trainer
        trainer = made()
        write(2, 3, (0, 1), gather=False)
