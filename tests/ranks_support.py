"""Ranks of a process group, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor", "tests.preloaded"]


@contextmanager
def ranks(
    check: Callable[..., None], count: int, *arguments: Any, timeout: float = 120, killed: Collection[int] = ()
) -> Iterator[list[Any]]:
    """Start processes that call `check(rank, *arguments)`. The end of the with statement asserts that all have passed.

    Each process has `timeout` seconds after the body to end. Then it is killed, and the assertion fails. `killed`: the
    ranks that are to end by SIGKILL instead. The processes are forked from one that has loaded torch, and nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [
        context.Process(target=_run, args=(dict(os.environ), pickle.dumps((check, (rank, *arguments)))))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(count)]
    assert [process.exitcode for process in processes] == expected


@contextmanager
def store_server() -> Iterator[tuple[Any, int]]:
    """A process with a TCPStore, as the agent of torchrun has one, and the port."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(connection: Any) -> None:
    import torch.distributed as distributed

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()  # until the process is killed


def leave(status: int = 0) -> None:
    """End this process without the interpreter's finalization.

    If an object of the interpreter still refers to a process group of gloo, finalization may destroy the group's
    threads before they are joined, and std::terminate ends the process: pytorch/pytorch#190489.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(environment: dict[str, str], call: bytes) -> None:
    os.environ.clear()
    os.environ.update(environment)  # before memsaver is imported
    try:
        check, arguments = pickle.loads(call)
        check(*arguments)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"
