"""A trainer that leaves its GPUs whole: FSDP2 on a mesh of two dimensions, with NCCL and workspaces as guests.

    python benchmarks/whole_process.py [--layers 16] [--width 4096] [--batch 2048] [--steps 6] [--stages] [--device cpu]

Two ranks, each with a GPU of its own. The trainer has five process groups: the world, those of the mesh, and two more.
All of its tensors are in one region. It runs three times: undisturbed; with a turn that pauses everything, region and
guests, after half of the steps, while a prefetch (``unshard(async_op=True)``) has not been waited for; and with a turn
in which rank 1 is killed while everything is paused. A fourth process is the floor: one step of the same trainer over
torch's fake process group, without NCCL, whose tensors and caches are freed after it.

Prints for each rank the device memory in use before the pause and while it is paused, the difference to the floor, and
the account of the device (``stats().devices[...].ledger``) at the floor, before the pause, while everything is paused,
and after the resume. Then the seconds of both turns, those of each group, and whether the groups were suspended or
opened anew; whether the losses equal those of the undisturbed run; the seconds from the kill to the error of the other
rank; and one JSON line.
Memory in use is that of the whole device by nvidia-smi: no other program may use it. With ``--device cpu`` the groups
are gloo's, the region has one small tensor, nvidia-smi is not asked, and the account is the host driver's.

``--stages`` runs none of this. Two ranks print the device memory in use after each stage: the context, first kernels, a
step, NCCL's world and further groups, groups closed, caches empty, the region paused.
"""

from __future__ import annotations

import argparse
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

import memsaver
from memsaver.distributed import Colocated, Group
from memsaver.guests import HostCache, ProcessGroups, Stacks, Workspaces
from support.accounts import account_of, table
from support.arguments import add_device, count, parse, parser_for
from support.environment import environment, need_cuda, nvidia_smi
from support.memory_stages import lines_of, stages_of_rank
from support.processes import Process, ask_all, in_process, side_by_side
from support.sharded_trainer import RANKS, Trainer, free_caches, init_fake, place

TAG = "trainer"
PHASES: dict[str, dict[str, list[str]]] = {"train": {"trainer": [TAG]}, "away": {"trainer": []}}
TIMEOUT_S = 120.0


def moment(device: torch.device) -> dict[str, Any]:
    """The memory in use of the device, by nvidia-smi, and its account."""
    used = 0 if device.type == "cpu" else int(nvidia_smi(str(device), "--query-gpu=memory.used")[0])
    return {"used_mib": used, "account": account_of(str(device))}


def floor(options: argparse.Namespace) -> dict[str, Any]:
    """Memory in use after one step without NCCL, once torch has released its pools and workspaces."""
    device = place(0, options.device)
    init_fake(0)
    memsaver.region(TAG, device=str(device))  # opens the device, whose account is read; nothing is allocated in it
    trainer = Trainer(options, device)
    trainer.step(0)
    del trainer
    free_caches()
    return moment(device)


def rank_of_job(way: str, rank: int, port: int, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """One rank. ``way``: "calm", "paused" or "killed"."""
    device = place(rank, options.device)
    on_gpu = device.type == "cuda"
    guests = ProcessGroups(TAG, backends=["nccl" if on_gpu else "gloo"])
    for guest in (guests, Workspaces(TAG), HostCache(TAG), Stacks(TAG)):
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
                found |= away(way, rank, folder, group, guests, device)
                if "error" in found:
                    return found
                prefetch.wait()
            for at, each in enumerate(more):
                dist.all_reduce(figures[at : at + 1], group=each)
            found["losses"].append(trainer.step(number))
    found["reduced"] = figures.tolist()
    group.close()
    return found


def away(way: str, rank: int, folder: str, group: Group, guests: Any, device: torch.device) -> dict[str, Any]:
    """Pauses everything, and resumes it."""
    found: dict[str, Any] = {"before": moment(device)}
    begin = time.monotonic()
    group.enter("away", timeout=TIMEOUT_S)
    found |= {"pause_s": time.monotonic() - begin, "paused": moment(device)}
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
    found |= {"resume_s": time.monotonic() - begin, "resumed": moment(device)}
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


def run_stages(options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The stages of both ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        Process(stages_of_rank, TIMEOUT_S, rank=rank, port=store.port, wait_s=TIMEOUT_S, options=options)
        for rank in range(RANKS)
    ]
    try:
        return [each["stages"] for each in ask_all(ranks)]
    finally:
        for each in ranks:
            each.close()


def print_ranks(found: dict[str, list[dict[str, Any]]], at_floor: dict[str, Any]) -> None:
    for rank, each in enumerate(found["paused"]):
        used, paused, least = (of["used_mib"] for of in (each["before"], each["paused"], at_floor))
        print(f"rank {rank}: {used} MiB in use, {paused} MiB paused, ", end="")
        print(f"{paused - least:+d} MiB to the floor of {least} MiB")
        print(f"  pause {each['pause_s'] * 1e3:.0f} ms, resume {each['resume_s'] * 1e3:.0f} ms; by group:")
        for name, seconds in each["groups_s"].items():
            print(f"    {name:>4}: {' and '.join(f'{part * 1e3:.1f} ms' for part in seconds)}")
        moments = {"floor": at_floor, **{name: each[name] for name in ("before", "paused", "resumed")}}
        for line in table({name: of["account"] for name, of in moments.items()}):
            print(f"  {line}")
    killed = found["killed"][0]
    print(f"rank 1 killed: rank 0 raised after {killed['error_s']:.1f} s ({killed['cause']}): {killed['error']}")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--layers", type=count)
    parser.add_argument("--width", type=count)
    parser.add_argument("--batch", type=count)
    parser.add_argument("--steps", type=count, default=6)
    parser.add_argument(
        "--stages", action="store_true", help="print the memory in use after each stage, and nothing else"
    )
    add_device(parser, numbered=False)
    options = parse(parser, layers=(16, 2), width=(4096, 16), batch=(2048, 4))
    if options.device != "cpu":
        need_cuda(count=RANKS)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "batch", "steps")}
    result = {"benchmark": "whole_process", **environment(options.device), **sizes}
    if options.stages:
        stages = run_stages(options)
        for rank, each in enumerate(stages):
            print(f"rank {rank}:", *lines_of(each), sep="\n  ")
        print(json.dumps({**result, "stages": stages}))
        return
    at_first = in_process(floor, options=options)
    if "error" in at_first:
        raise SystemExit(f"{at_first['error']}\n{at_first.get('traceback', '')}")
    found = {way: run(way, options) for way in ("calm", "paused", "killed")}
    print_ranks(found, at_first)
    equal = all(
        one[name] == other[name] for one, other in zip(found["calm"], found["paused"]) for name in ("losses", "reduced")
    )
    print("losses " + ("equal" if equal else "DIFFER"))
    print(json.dumps({**result, "floor": at_first, "equal": equal, "ways": found}))
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
