"""Two processes take turns on one GPU through a shared pool. Without a GPU they run on the host driver.

    python -m examples.two_processes

An engine and a trainer each need three fifths of the memory. The trainer starts while the engine has its memory: its
first allocation waits until the engine pauses.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Event

import torch

import memsaver

MIB = 1 << 20
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
NBYTES = 192 * MIB


def main() -> int:
    os.environ.update(MEMSAVER_POOL="shared", MEMSAVER_POOL_CAPACITY="320MiB")  # of both processes
    os.environ.setdefault("MEMSAVER_HOST_DEVICE", "320MiB")
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked child
    started, trained = context.Event(), context.Event()
    roles = [context.Process(target=role, args=(started, trained), name=role.__name__) for role in (engine, trainer)]
    for each in roles:
        each.start()
    for each in roles:
        each.join()
    return max(abs(each.exitcode or 0) for each in roles)


def engine(started: Event, trained: Event) -> None:
    weights = memsaver.region("weights", device=DEVICE, backup="host")
    tensor = weights.empty(NBYTES, torch.uint8).fill_(7)
    started.set()
    print("engine: has its memory", flush=True)
    weights.pause()  # the trainer, which waits for memory, gets it
    trained.wait(60)
    weights.resume(memory_timeout=60)  # waits until the trainer has paused
    print(f"engine: has its memory again, contents are the same: {bool((tensor == 7).all())}", flush=True)


def trainer(started: Event, trained: Event) -> None:
    started.wait(60)
    memsaver.configure(memory_timeout=60)  # the longest wait for memory, also of the first allocation
    params = memsaver.region("params", device=DEVICE, backup="host")
    params.empty(NBYTES, torch.uint8).fill_(1)
    print("trainer: has its memory", flush=True)
    trained.set()
    params.pause()


if __name__ == "__main__":
    raise SystemExit(main())
