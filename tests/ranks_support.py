"""Ranks of a process group, each a process of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

from tests.nursery import Fork
from tests.support import ENDED


@contextmanager
def ranks(
    check: Callable[..., None], count: int, *arguments: object, timeout: float = 120, lost: Collection[int] = ()
) -> Iterator[list[Fork]]:
    """Start processes that call `check(rank, *arguments)`. The end of the with statement asserts that all have passed.

    A process that takes longer than `timeout` seconds after the body fails. `lost`: the ranks that end in the call.
    """
    with ExitStack() as stack:
        found = [
            stack.enter_context(Fork({**os.environ, "RANK": str(rank)}, check.__module__, timeout))
            for rank in range(count)
        ]
        for rank, each in enumerate(found):
            each.start(check, rank, *arguments)
        yield found
        errors = []
        for rank, each in enumerate(found):
            try:
                each.answer()
                assert rank not in lost, "it has not ended"
            except (AssertionError, TimeoutError) as error:
                if rank not in lost or str(error) != ENDED:
                    errors.append(f"rank {rank}: {error}")
        assert not errors, "\n".join(errors)


@contextmanager
def store_server() -> Iterator[tuple[Fork, int]]:
    """A process with a TCPStore, as the agent of torchrun has one, and the port."""
    with Fork({}) as server:
        server.run("import torch.distributed as distributed")
        server.run("store = distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)")
        yield server, int(server.run("print(store.port)"))


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"
