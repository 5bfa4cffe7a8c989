"""A trainer that leaves its GPUs whole: FSDP2 on a mesh of two dimensions, with NCCL and workspaces as guests.

    python benchmarks/whole_process.py [--layers 16] [--width 4096] [--batch 2048] [--steps 6] [--device cpu]

Two ranks, each with a GPU of its own. The trainer has five process groups: the world, those of the mesh, and two more.
All of its tensors are in one region. It runs three times: undisturbed; with a turn that pauses everything, region and
guests, after half of the steps, while a prefetch (``unshard(async_op=True)``) has not been waited for; and with a turn
in which rank 1 is killed while everything is paused. A fourth process is the floor: one step of the same trainer over
torch's fake process group, without NCCL, whose tensors and caches are freed after it.

Prints for each rank the device memory in use before the pause and while it is paused, the difference to the floor,
the seconds of both turns, those of each group, and whether the groups were suspended or opened anew; whether the losses
equal those of the undisturbed run; and the seconds from the kill to the error of the other rank. Then one JSON line.
Memory in use is that of the whole device by nvidia-smi: no other program may use it. With ``--device cpu`` the groups
are gloo's, the region has one small tensor, and memory is not measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arguments import add_device, count, parse, parser_for
from environment import environment, need_cuda, nvidia_smi
from processes import Process, ask_all, in_process, side_by_side
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memsaver
from memsaver.distributed import Colocated, Group
from memsaver.guests import HostCache, ProcessGroups, Workspaces, for_nccl

RANKS = 2
TAG = "trainer"
PHASES: dict[str, dict[str, list[str]]] = {"train": {"trainer": [TAG]}, "away": {"trainer": []}}
TIMEOUT_S = 120.0
RATE = 1e-3


class Trainer:
    """FSDP2 with hybrid sharding on a mesh of one replica and two shards."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        mesh = init_device_mesh(device.type, (1, RANKS), mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(0)
        width = options.width
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(options.layers)]
        self.model = nn.Sequential(*layers).to(device, dtype)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.dtype = dtype

    def step(self, number: int) -> float:
        generator = torch.Generator(self.device).manual_seed(RANKS * number + dist.get_rank())
        shape = (self.options.batch, self.options.width)
        batch = torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)
        loss = (self.model(batch) - batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def prefetch(self) -> Any:
        """Begins to gather the parameters of the first layer. Returns a handle with ``wait()``."""
        return self.model[0].unshard(async_op=True)  # type: ignore[operator]  # fully_shard() adds the method


def used_mib(rank: int, device: str) -> int:
    return 0 if device == "cpu" else int(nvidia_smi(f"cuda:{rank}", "--query-gpu=memory.used")[0])


def place(rank: int, device: str) -> torch.device:
    if device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def floor(options: argparse.Namespace) -> dict[str, Any]:
    """Memory in use after one step without NCCL, once torch has released its pools and workspaces."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = place(0, options.device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    trainer = Trainer(options, device)
    trainer.step(0)
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return {"used_mib": used_mib(0, options.device)}


def rank_of_job(way: str, rank: int, port: int, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """One rank. ``way``: "calm", "paused" or "killed"."""
    device = place(rank, options.device)
    on_gpu = device.type == "cuda"
    guests = for_nccl(TAG) if on_gpu else ProcessGroups(TAG, backends=["gloo"])
    for guest in (guests, Workspaces(TAG), HostCache(TAG)):
        memsaver.register(guest)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S)
    )
    region = memsaver.region(TAG, device=str(device), backup="host")
    group = Group(phases=PHASES, trainer=Colocated())
    group.enter("train", timeout=TIMEOUT_S)
    figures = region.empty((2,), torch.float32).fill_(1)
    # FSDP2 resizes storages, which torch cannot do in regions of the host driver.
    with region if on_gpu else nullcontext():
        trainer = Trainer(options, device)
        more = [dist.new_group(list(range(RANKS))) for _ in figures]
        found: dict[str, Any] = {"losses": []}
        for number in range(options.steps):
            if way != "calm" and number == options.steps // 2:
                prefetch = trainer.prefetch()
                found |= away(way, rank, folder, group, guests, options)
                if "error" in found:
                    return found
                prefetch.wait()
            for at, each in enumerate(more):
                dist.all_reduce(figures[at : at + 1], group=each)
            found["losses"].append(trainer.step(number))
    found["reduced"] = figures.tolist()
    group.close()
    return found


def away(way: str, rank: int, folder: str, group: Group, guests: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Pauses everything, and resumes it."""
    found: dict[str, Any] = {"used_mib": used_mib(rank, options.device), "guest": type(guests).__name__}
    begin = time.monotonic()
    group.enter("away", timeout=TIMEOUT_S)
    found |= {"pause_s": time.monotonic() - begin, "paused_mib": used_mib(rank, options.device)}
    killed = Path(folder, "killed")
    if way == "killed" and rank == 1:
        killed.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        group.enter("train", timeout=TIMEOUT_S)
    except memsaver.Error as error:
        if way != "killed":
            raise
        cause = type(error.__cause__).__name__
        return found | {"error": str(error), "cause": cause, "error_s": time.monotonic() - float(killed.read_text())}
    found["resume_s"] = time.monotonic() - begin
    found["groups_s"] = guests.seconds_by_group
    return found


def run(way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of both ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            Process(rank_of_job, TIMEOUT_S, way=way, rank=rank, port=store.port, folder=folder, options=options)
            for rank in range(RANKS)
        ]
        try:
            if way != "killed":
                return ask_all(ranks)
            survivor = side_by_side(ranks)[0]
            if "error_s" not in survivor:
                raise SystemExit(f"a turn with a killed rank gave {survivor}")
            return [survivor]
        finally:
            for each in ranks:
                each.close()


def print_ranks(found: dict[str, list[dict[str, Any]]], floor_mib: int) -> None:
    for rank, each in enumerate(found["paused"]):
        beyond = each["paused_mib"] - floor_mib
        print(f"rank {rank}: {each['used_mib']} MiB in use, {each['paused_mib']} MiB paused, ", end="")
        print(f"{beyond:+d} MiB to the floor of {floor_mib} MiB")
        how = "suspended" if each["guest"] == "Communicators" else "closed and opened anew"
        print(f"  pause {each['pause_s'] * 1e3:.0f} ms, resume {each['resume_s'] * 1e3:.0f} ms; groups were {how}:")
        for name, seconds in each["groups_s"].items():
            print(f"    {name:>4}: {' and '.join(f'{part * 1e3:.1f} ms' for part in seconds)}")
    killed = found["killed"][0]
    print(f"rank 1 killed: rank 0 raised after {killed['error_s']:.1f} s ({killed['cause']}): {killed['error']}")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--layers", type=count)
    parser.add_argument("--width", type=count)
    parser.add_argument("--batch", type=count)
    parser.add_argument("--steps", type=count, default=6)
    add_device(parser, numbered=False)
    options = parse(parser, layers=(16, 2), width=(4096, 16), batch=(2048, 4))
    if options.device != "cpu":
        need_cuda(count=RANKS)
    at_first = in_process(floor, options=options)
    if "error" in at_first:
        raise SystemExit(f"{at_first['error']}\n{at_first.get('traceback', '')}")
    found = {way: run(way, options) for way in ("calm", "paused", "killed")}
    print_ranks(found, at_first["used_mib"])
    equal = all(
        one[name] == other[name] for one, other in zip(found["calm"], found["paused"]) for name in ("losses", "reduced")
    )
    print("losses " + ("equal" if equal else "DIFFER"))
    sizes = {name: getattr(options, name) for name in ("layers", "width", "batch", "steps")}
    result = {"benchmark": "whole_process", **environment(options.device), **sizes}
    print(json.dumps({**result, "floor_mib": at_first["used_mib"], "equal": equal, "ways": found}))
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
