"""Two engines and two ranks of a trainer, each a process, on one host device: weights without a copy in between."""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memsaver  # noqa: F401  # for statements of tests
from examples.colocate.engine import Engine, EngineConfig
from examples.colocate.model import ModelConfig
from examples.colocate.trainer import TokenBatch, Trainer, TrainerConfig
from examples.colocate.trainer.process_group import join
from tests.broker_support import Running
from tests.pool_support import Worker

# Of 17 rows the ranks have 9 and 8, of 45 they have 23 and 22.
MODEL = ModelConfig(
    vocab_size=17,
    hidden_size=34,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=45,
    max_position=16,
    dtype=torch.bfloat16,
)
TIED = replace(MODEL, tie_word_embeddings=True, dtype=torch.float32)
MODELS = {"untied, bfloat16": MODEL, "tied, float32": TIED}
HERE = "from tests.examples.test_weights_processes import *"


class EngineSide:
    """The engine's part, in a process of its own."""

    def __init__(self, which: str) -> None:
        torch.set_num_threads(1)
        self.engine = Engine(MODELS[which], EngineConfig(max_batch_size=4, block_size=4, num_blocks=16))

    def token(self) -> str:
        return base64.b64encode(self.engine.share_weights()).decode()

    def check(self, path: str) -> None:
        """All tensors are those of an engine that loaded the checkpoint."""
        other = Engine(self.engine.model_config, self.engine.config)
        other.load_weights(torch.load(path).items())
        for name, weight in self.engine.model.weights.items():
            assert torch.equal(weight.view(torch.uint8), other.model.weights[name].view(torch.uint8)), name
        other.close()


class TrainerSide:
    """The part of one of two ranks, in a process of its own."""

    def __init__(self, which: str, rank: int, meeting: str) -> None:
        torch.set_num_threads(1)
        self.trainer = Trainer(MODELS[which], TrainerConfig(seed=5), join("cpu", rank, 2, meeting))

    def train(self) -> None:
        self.trainer.warm_up(TokenBatch.build([[1, 2], [3]], [[4, 5], [6, 7]], 0), 1e-2)

    def write(self, tokens: list[str], gather: bool) -> int:
        return self.trainer.write_weights([pickle.loads(base64.b64decode(each)) for each in tokens], gather)

    def save(self, path: str) -> None:
        whole = {name: tensor for bucket in self.trainer.weight_buckets(900) for name, tensor in bucket.items()}
        if self.trainer.rank == 0:
            torch.save(whole, path)


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running("256MiB") as running:
        yield running


def both(ranks: list[Worker], *statements: str) -> list[str]:
    """Runs a statement on each rank, side by side: they meet in it."""
    for rank, statement in zip(ranks, statements * (2 if len(statements) == 1 else 1)):
        rank.send(statement)
    return [rank.answer() for rank in ranks]


@pytest.mark.parametrize("which", MODELS)
def test_two_ranks_write_the_weights_of_their_checkpoint(broker: Running, which: str, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with ExitStack() as stack:
        side = f"side = EngineSide({which!r})"
        engines = [
            stack.enter_context(Worker(broker, HERE, side, MEMSAVER_PATCHES="multiprocessing")) for _ in range(2)
        ]
        ranks = [stack.enter_context(Worker(broker, HERE)) for _ in range(2)]
        both(ranks, *(f"side = TrainerSide({which!r}, {rank}, {meeting!r})" for rank in range(2)))
        for step, gather in enumerate((False, True)):
            path = f"{tmp_path}/{step}.pt"
            both(ranks, "side.train()")
            tokens = [engine.run("print(side.token())") for engine in engines]
            if gather:  # each rank reaches its own engine alone
                both(ranks, *(f"print(side.write([{token!r}], True))" for token in tokens))
            else:
                one, other = map(int, both(ranks, f"print(side.write({tokens!r}, False))"))
                assert one > other > 0  # the first has the odd rows
            both(ranks, f"side.save({path!r})")
            for engine in engines:
                engine.run(f"side.check({path!r})")
                engine.run("memsaver.pause(); memsaver.resume()")  # no process is attached any more
                engine.run(f"side.check({path!r})")
