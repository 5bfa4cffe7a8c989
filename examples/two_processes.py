"""Two processes take turns on one GPU through a shared pool. Without a GPU they run on the host driver.

python -m examples.two_processes
"""

import multiprocessing

import torch

import memsaver


def role(name: str, value: int) -> None:
    memsaver.configure(pool="shared", pool_capacity="96MiB", memory_timeout=60)  # before regions are made
    region = memsaver.region(name, backup="host")
    tensor = region.empty(64 << 20, torch.uint8)  # waits up to 60 s for memory that the other process holds
    tensor.fill_(value)
    for _ in range(3):
        region.pause()  # the other process, which waits, gets the memory
        region.resume()  # waits up to 60 s until the other process has paused
        print(f"{name}: has its contents: {bool((tensor == value).all())}", flush=True)
    region.pause()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked child
    roles = [context.Process(target=role, args=each) for each in (("engine", 1), ("trainer", 2))]
    for each in roles:
        each.start()
    for each in roles:
        each.join()
    raise SystemExit(max(abs(each.exitcode or 0) for each in roles))
