"""An engine of two ranks, and trainers of two and of one, each rank a process, on one host device: no copy between.

Beside it each process of the engine has an engine of one rank.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import memsaver  # noqa: F401  # for statements of tests
from examples.colocate.engine import Engine, EngineConfig
from examples.colocate.engine.tensor_parallel import ONE_RANK, Parallel
from examples.colocate.model import EngineWeights, ModelConfig, weight_layout
from examples.colocate.process_group import join
from examples.colocate.trainer.trainer import Trainer
from tests.broker_support import Running
from tests.examples.trainer_support import PLAIN, samples, weights
from tests.pool_support import Worker
from tests.ranks_support import free_address

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
HERE = "from tests.examples.test_weights_processes import *"


class EngineSide:
    """The part of one of two ranks, in a process of its own, and an engine of one rank."""

    def __init__(self, rank: int, meeting: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        self.engines = [self._make(Parallel(dist.group.WORLD)), self._make(ONE_RANK)]

    def tokens(self) -> list[str]:
        """Of both engines."""
        return [
            base64.b64encode(pickle.dumps((each.share_weights(), each.weight_layout))).decode() for each in self.engines
        ]

    def check(self, path: str) -> None:
        """All tensors are those of an engine that loaded the checkpoint, and the checksums those of the trainer."""
        weights, *checksums = torch.load(path)
        for engine, sums in zip(self.engines, (checksums[self.engines[0].model.parallel.rank], checksums[2])):
            other = self._make(engine.model.parallel)
            other.model.load_weights(weights.items())
            for name, weight in engine.model.weights.items():
                assert torch.equal(weight.view(torch.uint8), other.model.weights[name].view(torch.uint8)), name
            assert engine.checksums() == sums

    def _make(self, parallel: Parallel) -> Engine:
        return Engine(MODEL, EngineConfig(max_batch_size=4, block_size=4, num_blocks=16), parallel=parallel)


class TrainerSide:
    """The part of one of some ranks, in a process of its own."""

    def __init__(self, rank: int, meeting: str, count: int = 2) -> None:
        torch.set_num_threads(1)
        self.trainer = Trainer(MODEL, replace(PLAIN, seed=5), join("cpu", rank, count, meeting))

    def train(self) -> None:
        self.trainer.warm_up([each for each in samples() if each.length < 16], 1e-2)

    def write(self, tokens: list[str], gather: bool) -> int:
        shared = [pickle.loads(base64.b64decode(each)) for each in tokens]
        return self.trainer.weights.write([EngineWeights(pickle.loads(one), layout) for one, layout in shared], gather)

    def save(self, path: str) -> None:
        whole = weights(self.trainer)
        layouts = [weight_layout(MODEL, rank, size) for rank, size in ((0, 2), (1, 2), (0, 1))]
        checksums = [self.trainer.weights.checksums(layout) for layout in layouts]
        if self.trainer.rank == 0:
            torch.save((whole, *checksums), path)


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running("256MiB") as running:
        yield running


def both(ranks: list[Worker], *statements: str) -> list[str]:
    """Runs a statement on each rank, side by side: they meet in it."""
    for rank, statement in zip(ranks, statements * (2 if len(statements) == 1 else 1)):
        rank.send(statement)
    return [rank.answer() for rank in ranks]


def test_one_and_two_ranks_write_the_weights_of_their_checkpoint(broker: Running, tmp_path: Path) -> None:
    """Into an engine of two ranks, and engines of one."""
    meetings = [free_address() for _ in range(3)]
    with ExitStack() as stack:
        engines = [stack.enter_context(Worker(broker, HERE, MEMSAVER_PATCHES="multiprocessing")) for _ in range(2)]
        ranks = [stack.enter_context(Worker(broker, HERE)) for _ in range(2)]
        both(engines, *(f"side = EngineSide({rank}, {meetings[0]!r})" for rank in range(2)))
        both(ranks, *(f"side = TrainerSide({rank}, {meetings[1]!r})" for rank in range(2)))
        for step, gather in enumerate((False, True)):
            path = f"{tmp_path}/{step}.pt"
            both(ranks, "side.train()")
            tokens = [engine.run("print(*side.tokens())").split() for engine in engines]
            if gather:  # each rank reaches the engines of its own process alone
                both(ranks, *(f"print(side.write({mine!r}, True))" for mine in tokens))
            else:
                one, other = map(int, both(ranks, f"print(side.write({tokens[0] + tokens[1]!r}, False))"))
                assert one > other > 0  # the first has the odd rows
            both(ranks, f"side.save({path!r})")
            check(engines, path)
        alone, path = stack.enter_context(Worker(broker, HERE)), f"{tmp_path}/alone.pt"
        alone.run(f"side = TrainerSide(0, {meetings[2]!r}, 1); side.train(); side.train(); side.train()")
        tokens = [engine.run("print(*side.tokens())").split() for engine in engines]
        alone.run(f"side.write({tokens[0] + tokens[1]!r}, False); side.save({path!r})")
        check(engines, path)


def check(engines: list[Worker], path: str) -> None:
    for engine in engines:
        engine.run(f"side.check({path!r})")
        engine.run("memsaver.pause(); memsaver.resume()")  # no process is attached any more
        engine.run(f"side.check({path!r})")
