"""Ranks of a process group, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any


@contextmanager
def ranks(
    check: Callable[..., None], count: int, *arguments: Any, timeout: float = 120, killed: Collection[int] = ()
) -> Iterator[list[BaseProcess]]:
    """Start processes that call `check(rank, *arguments)`. The end of the with statement asserts that all have passed.

    Each process has `timeout` seconds after the body to end. Then it is killed, and the assertion fails. `killed`: the
    ranks that are to end by SIGKILL instead.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_run, args=(check, rank, *arguments)) for rank in range(count)
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


def leave(status: int = 0) -> None:
    """End this process without the interpreter's finalization.

    If an object of the interpreter still refers to a process group of gloo, finalization may destroy the group's
    threads before they are joined, and std::terminate ends the process: pytorch/pytorch#190489.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(check: Callable[..., None], rank: int, *arguments: Any) -> None:
    try:
        check(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()
