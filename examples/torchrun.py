"""Ranks of torchrun that enter phases together, without Ray. It needs no GPU.

    torchrun --standalone --nproc-per-node 2 examples/torchrun.py

Each process has a trainer's parameters and an engine's KV cache. Only one of the two has memory at a time.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as distributed

import memsaver
from memsaver.distributed import Colocated, Group

PHASES = {"rollout": {"worker": ["kv_cache"]}, "train": {"worker": ["params"]}}


def main() -> None:
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if device != "cpu" else "gloo")
    params = memsaver.region("params", device=device, backup="host")
    weight = params.empty((1024, 1024), torch.float32)
    weight.fill_(1.0)
    params.pause()  # otherwise there may be no room for the KV cache
    kv = memsaver.region("kv_cache", device=device)
    cache = kv.empty((1024, 1024), torch.float32)

    group = Group(phases=PHASES, worker=Colocated())  # the same in all processes
    group.enter("rollout", timeout=60)
    cache.zero_()
    show(group, kv, params)
    group.enter("train", timeout=60)
    weight.add_(1.0)
    assert weight.sum().item() == 2.0 * weight.numel()
    show(group, kv, params)
    group.close()
    distributed.destroy_process_group()


def show(group: Group, *regions: memsaver.Region) -> None:
    states = ", ".join(f"{region.tag} {region.state}" for region in regions)
    print(f"rank {distributed.get_rank()}: in {group.entered}: {states}", flush=True)


if __name__ == "__main__":
    main()
