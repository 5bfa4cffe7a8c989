"""Memory in use of a rank after each stage: of its context, kernels, NCCL and workspaces."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import memsaver
from memsaver.guests import HostCache, ProcessGroups, Workspaces
from support.accounts import account_of, bytes_of
from support.environment import nvidia_smi
from support.sharded_trainer import RANKS, Trainer, dtype_of, free_caches, init_fake, place

_TAG = "trainer"
_MIB = 1 << 20
_STACK_SIZE = 0  # CU_LIMIT_STACK_SIZE
_LIMITS = {"stack": _STACK_SIZE, "printf": 1, "heap": 2}  # of CUlimit, in bytes: of a thread, of the device twice


def stages_of_rank(rank: int, port: int, wait_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """The moments of one rank, in order. Both ranks run at the same time, each with a device of its own.

    The trainer runs twice: in the stages of the floor over a fake group, and later over NCCL. A communicator of one
    rank has hardly any buffers, so that stage has the code that NCCL loads. The driver raises the limit of a thread's
    stack for a kernel that needs more, and keeps that memory. "stacks as at first" sets the limit to its value of
    "context made".
    """
    return {"stages": [{"stage": name, **figures} for name, figures in _stages(rank, port, wait_s, options)]}


def _stages(rank: int, port: int, wait_s: float, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    on_gpu = options.device != "cpu"

    def now(name: str) -> tuple[str, dict[str, Any]]:
        if on_gpu:
            torch.cuda.synchronize()
        return name, _figures(device)

    yield "no context", {"used_mib": _used_mib(f"cuda:{rank}") if on_gpu else 0}
    device = place(rank, options.device)
    if on_gpu:
        torch.cuda.synchronize()
    region = memsaver.region(_TAG, device=str(device), backup="host")
    # FSDP2 resizes storages, which torch cannot do in regions of the host driver.
    within = region if on_gpu else nullcontext()
    stack = _limit(_STACK_SIZE) if on_gpu else 0
    yield now("context made")
    torch.ones(1, device=device).add_(1)
    yield now("first kernels")
    square = torch.ones(256, 256, device=device, dtype=dtype_of(device))
    square @ square
    yield now("first product of cuBLAS")
    del square
    init_fake(rank)
    with within:
        trainer = Trainer(options, device)
        trainer.step(0)
    yield now("a step over a fake group")
    del trainer
    free_caches()
    yield now("trainer freed, caches empty (the floor)")
    dist.destroy_process_group()

    guests = ProcessGroups(_TAG, backends=["nccl" if on_gpu else "gloo"])
    workspaces, host_cache = Workspaces(_TAG), HostCache(_TAG)
    timeout = timedelta(seconds=wait_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    name = "nccl" if on_gpu else "gloo"
    dist.init_process_group(name, store=store, rank=rank, world_size=RANKS, timeout=timeout)
    yield now("world made, not connected")
    figures = torch.ones(RANKS, device=device)
    alone = [dist.new_group([each]) for each in range(RANKS)][rank]
    dist.all_reduce(figures, group=alone)
    yield now("a group of this rank alone, one collective")
    dist.destroy_process_group(alone)
    yield now("that group destroyed")
    dist.all_reduce(figures)
    yield now("one collective of the world")
    more = []
    for at in range(RANKS):
        more.append(dist.new_group(list(range(RANKS))))
        dist.all_reduce(figures, group=more[at])
        yield now(f"further group {at + 1}, one collective")
    gathered = torch.empty(RANKS * RANKS, device=device)
    dist.all_gather_into_tensor(gathered, figures)
    dist.reduce_scatter_tensor(figures, gathered)
    yield now("an all-gather and a reduce-scatter of the world")
    del gathered, figures
    with within:
        trainer = Trainer(options, device)
        trainer.step(0)
    yield now("a step over the mesh's groups")
    trainer.step(1)
    yield now("a second step")
    guests.prepare()
    guests.leave()
    yield now("groups closed")
    workspaces.prepare()
    host_cache.prepare()
    host_cache.leave()
    yield now("caches empty")
    memsaver.pause(_TAG)
    yield now("region paused")
    if on_gpu:
        _call("cuCtxSetLimit", ctypes.c_int(_STACK_SIZE), ctypes.c_size_t(stack))
        yield now("stacks as at first")
    memsaver.resume(_TAG)
    guests.come_back()
    del trainer
    dist.destroy_process_group()
    free_caches()
    region.pause()
    yield now("all groups destroyed, trainer freed")


def _figures(device: torch.device) -> dict[str, Any]:
    account = account_of(str(device))
    on_gpu = device.type == "cuda"
    limits = {name: _limit(code) for name, code in _LIMITS.items()} if on_gpu else {}
    return {"used_mib": _used_mib(str(device)) if on_gpu else 0, "limits": limits, "account": account}


def _used_mib(device: str) -> int:
    return int(nvidia_smi(device, "--query-gpu=memory.used")[0])


def _limit(code: int) -> int:
    value = ctypes.c_size_t()
    _call("cuCtxGetLimit", ctypes.byref(value), ctypes.c_int(code))
    return value.value


def _call(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} returned {status}, expected 0")


def lines_of(stages: list[dict[str, Any]]) -> list[str]:
    """A line for each stage, in MiB, and the limit of a thread's stack in bytes.

    ``rest``: in use beside regions and torch's pools, with the driver's own memory. ``context``: with the growth of the
    stacks.
    """
    width = max(len(each["stage"]) for each in stages)
    heads = ("in use", "change", "regions", "torch", "rest", "change", "context", "unknown", "stack/B")
    lines = [f"{'MiB':<{width}}" + "".join(f"{head:>9}" for head in heads)]
    last_used = last_rest = 0.0
    for each in stages:
        used, account = each["used_mib"], each.get("account")
        if account is None:
            cells: list[object] = [used, "", "", "", used]
            rest = used
        else:
            regions = bytes_of(account, "region", "retained") / _MIB
            torchs = bytes_of(account, "torch", "torch allocated", "torch cached") / _MIB
            rest = used - regions - torchs
            cells = [used, f"{used - last_used:+.0f}", f"{regions:.1f}", f"{torchs:.1f}", f"{rest:.1f}"]
            cells += [f"{rest - last_rest:+.1f}", _mib(bytes_of(account, "context"))]
            cells += [_mib(None if account["listed_bytes"] is None else bytes_of(account, "unknown"))]
            cells += [each["limits"].get("stack", "-")]
        lines.append(f"{each['stage']:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
        last_used, last_rest = used, rest
    return lines


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _MIB:.1f}"
