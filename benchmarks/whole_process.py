"""A trainer that leaves its GPUs whole: FSDP2 on a mesh of two dimensions, with NCCL and workspaces as guests.

Two ranks, each with a GPU of its own. The trainer has five process groups: the world, those of the mesh, and two
more. All of its tensors are in one region. It runs three times: undisturbed; with a turn that pauses everything,
region and guests, after half of the steps, while a prefetch (unshard(async_op=True)) has not been waited for; and
with a turn in which rank 1 is killed while everything is paused. A fourth process is the floor: one step of the same
trainer over torch's fake process group, without NCCL, whose tensors and caches are freed after it.

Prints the ledger of each rank's device at the floor, before the pause, paused, and after the resume; memory in use of
the whole device by nvidia-smi (no other program may use it); the times of the turn and of each group. Losses are
compared with the undisturbed run's. On the host driver the groups are gloo's, and the region has one small tensor.
"""

from __future__ import annotations

import argparse
import gc
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memsaver
from benchmarks.harness.command import Options, Run, count
from benchmarks.harness.machine import MIB, used_bytes
from benchmarks.harness.pools import ledger_of, ledger_rows
from benchmarks.harness.processes import Process, Sample, ask_all, in_process, processes
from memsaver.distributed import Colocated, Group
from memsaver.guests import ProcessGroups, Workspaces

DEVICES, GPUS = ("cuda", "cpu"), 2
RANKS = 2
TAG = "trainer"
PHASES: dict[str, dict[str, list[str]]] = {"train": {"trainer": [TAG]}, "away": {"trainer": []}}
TIMEOUT_S = 120.0
BOUND = timedelta(seconds=TIMEOUT_S)


def options(parser: Options) -> None:
    parser.size("--layers", count, 16, 2, "of the trainer")
    parser.size("--width", count, 4096, 16, "of each layer")
    parser.size("--batch", count, 2048, 4, "of each rank")
    parser.add_argument("--steps", type=count, default=6)


def measure(run: Run) -> None:
    floor = in_process(at_floor, options=run.options)
    calm, turned = ranks("calm", run.options), ranks("paused", run.options)
    for rank, each in enumerate(turned):
        moments = {"floor": floor, **{name: each[name] for name in ("before", "paused", "resumed")}}
        rows = ledger_rows({name: at["ledger"] for name, at in moments.items()})
        rows["in use, by nvidia-smi"] = {f"{name}, MiB": at["used_bytes"] / MIB for name, at in moments.items()}
        run.table(f"ledger of rank {rank}", rows)
        rows = {"the turn": {"pause, ms": 1e3 * each["pause_s"], "resume, ms": 1e3 * each["resume_s"]}}
        run.table(f"times of rank {rank}", rows)
    equal = all(one[key] == other[key] for one, other in zip(calm, turned) for key in ("losses", "reduced"))
    run.check("losses and sums are those of the undisturbed run", equal)
    [survivor] = ranks("killed", run.options)
    run.table("rank 1 killed", {"error of rank 0": {"after, s": survivor["error_s"], "cause": survivor["cause"]}})
    run.keep(killed=survivor, losses=[each["losses"] for each in turned])


def ranks(way: str, options: argparse.Namespace) -> list[Sample]:
    """The results of both ranks, or of the one that survives. ``way``: "calm", "paused" or "killed"."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"way": way, "port": store.port, "folder": folder, "options": options}
        both = [Process(rank_of_job, TIMEOUT_S + 60, rank=rank, **how) for rank in range(RANKS)]
        with processes(*both):
            if way != "killed":
                return ask_all(both)
            for each in both:
                each.send()
            found: Sample = both[0].answer()
            return [found]


def at_floor(options: argparse.Namespace) -> Sample:
    """Memory in use after one step without NCCL, when torch has released its pools and workspaces."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = _place(0, options.device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    memsaver.region(TAG, device=str(device))  # opens the device, whose ledger is read
    trainer = Trainer(options, device)
    trainer.step(0)
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return _moment(device)


def rank_of_job(way: str, rank: int, port: int, folder: str, options: argparse.Namespace) -> Sample:
    device = _place(rank, options.device)
    on_gpu = device.type == "cuda"
    guests = ProcessGroups(TAG, backends=["nccl" if on_gpu else "gloo"])
    for guest in (guests, Workspaces(TAG)):
        memsaver.register(guest)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=BOUND)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=BOUND)
    region = memsaver.region(TAG, device=str(device), backup="host")
    group = Group(phases=PHASES, trainer=Colocated())
    group.enter("train", timeout=TIMEOUT_S)
    figures = region.empty((2,), torch.float32).fill_(1)
    found: Sample = {"losses": []}
    with region if on_gpu else nullcontext():  # FSDP2 resizes storages, which torch cannot do on the host driver
        trainer = Trainer(options, device)
        more = [dist.new_group(list(range(RANKS))) for _ in figures]
        for number in range(options.steps):
            if way != "calm" and number == options.steps // 2:
                prefetch: Any = trainer.model[0].unshard(async_op=True)  # type: ignore[operator]
                found |= _away(way, rank, folder, group, guests, device)
                if "error" in found:
                    return found
                prefetch.wait()
            for at, each in enumerate(more):
                dist.all_reduce(figures[at : at + 1], group=each)
            found["losses"].append(trainer.step(number))
    group.close()
    return found | {"reduced": figures.tolist()}


def _away(way: str, rank: int, folder: str, group: Group, guests: Any, device: torch.device) -> Sample:
    """Pauses everything, and resumes it."""
    found: Sample = {"before": _moment(device)}
    begin = time.monotonic()
    group.enter("away", timeout=TIMEOUT_S)
    found |= {"pause_s": time.monotonic() - begin, "paused": _moment(device)}
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
        cause, error_s = type(error.__cause__).__name__, time.monotonic() - float(killed.read_text())
        return {"error": str(error), "cause": cause, "error_s": error_s}
    if way == "killed":
        raise AssertionError("the turn has succeeded although rank 1 was killed")
    resume_s = time.monotonic() - begin
    return found | {"resume_s": resume_s, "resumed": _moment(device)}


def _moment(device: torch.device) -> Sample:
    return {"used_bytes": used_bytes(str(device)), "ledger": ledger_of(str(device))}


def _place(rank: int, device: str) -> torch.device:
    """Chooses the device of a rank."""
    if device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


class Trainer:
    """FSDP2 with hybrid sharding on a mesh of one replica and two shards."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device, self.shape = device, (options.batch, options.width)
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        mesh = init_device_mesh(device.type, (1, RANKS), mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(0)
        width = options.width
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(options.layers)]
        self.model = nn.Sequential(*layers).to(device, self.dtype)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> float:
        generator = torch.Generator(self.device).manual_seed(RANKS * number + dist.get_rank())
        batch = torch.randn(self.shape, device=self.device, dtype=self.dtype, generator=generator)
        loss = (self.model(batch) - batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())
