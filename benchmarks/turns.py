"""The turns of a step of reinforcement learning, from a shared pool and from the driver.

An engine has bf16 weights and a KV cache. A trainer has fp32 parameters, two moments and a workspace: 1.5 billion
parameters. Each role fills the memory, so the two do not fit beside each other. The phases are rollout (the engine),
train (the trainer) and sync (parameters and weights): the engine's weights go to the trainer through
torch.multiprocessing, and the trainer writes its parameters into them and casts on the way. Weights that the sync
writes are not kept over training. All contents are compared in each step.

Prints for each turn the bytes that must move, those that moved, seconds, and the ratio to plain pinned copies of the
bytes that must move. If there are fewer cores than ranks, ranks wait for cores as well.

"late": the parameters, a quarter of the layers after the other, the moments and a part of the KV cache come while the
device works for a second, and the trainer's memory leaves while it does. The turn includes the waits at first uses: of
a quarter before its forward pass. Losses equal those of the other ways.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Barrier
from typing import Any

import torch
import torch.multiprocessing  # registers the reductions of tensors  # noqa: F401
from torch import distributed

import memsaver
from benchmarks.harness.command import Options, Run, count
from benchmarks.harness.limits import Limit
from benchmarks.harness.machine import GIB, MIB, total_bytes, visible_gpus
from benchmarks.harness.pools import shared_pool
from benchmarks.harness.processes import CONTEXT, Process, Sample, ask_all, processes
from benchmarks.harness.work import Contents, Work, checksums, copy_rate, median, synchronize
from memsaver.distributed import Colocated, Group

DEVICES = ("cuda", "cpu")
POOL, LATE, DRIVER = "shared pool", "shared pool, late", "driver"
TAGS = {"engine": ("weights", "kv_cache", "kv_rest"), "trainer": ("params", "moments", "workspace")}
QUARTERS = tuple(f"params {number}" for number in range(4))  # of the layers
PHASES: dict[str, dict[str, Any]] = {
    "train": {"trainer": ["params", "moments", "workspace"]},
    "sync": {"trainer": ["params"], "engine": ["weights"]},
    "rollout": {"engine": ["weights", "kv_cache", "kv_rest"]},
}
LATE_PHASES: dict[str, dict[str, Any]] = {
    "train": {"trainer": {"resident": ["workspace"], "late": [*QUARTERS, "moments"]}},
    "sync": {"trainer": [*QUARTERS, "moments"], "engine": ["weights"]},
    "rollout": {
        "engine": {"resident": ["weights", "kv_cache"], "late": ["kv_rest"]},
        "trainer": {"lingering": [*QUARTERS, "moments"]},
    },
}
KEPT = ("weights", "params", *QUARTERS, "moments")
RULES: dict[str, Any] = {
    "backup": {"train": {"engine": {"weights": "none"}}},
    "restore": {"sync": {"engine": {"weights": False}}},
}
# Contents that are read again: those that go out, and those that come in, at the entry of each phase.
MUST_OUT: dict[str, tuple[str, ...]] = {"train": (), "sync": ("moments",), "rollout": ("params",)}
MUST_OUT_LATE: dict[str, tuple[str, ...]] = {**MUST_OUT, "sync": (), "rollout": ("params", "moments")}
MUST_IN: dict[str, tuple[str, ...]] = {"train": ("params", "moments"), "sync": (), "rollout": ()}
WARM_UP = 2  # steps
WORK_S = {"cuda": 1.0, "cpu": 0.05}  # of the device, before the first use of late memory
TIMEOUT_S = 300.0
MEMORY_S = 60.0

Turn = tuple[float, float]  # begin and end of enter()


def options(parser: Options) -> None:
    parser.choice("--only", (POOL, LATE, DRIVER), "the ways")
    parser.add_argument("--cycles", type=count, default=5, help="steps that count, after two")
    parser.add_argument("--pairs", type=count, default=1, help="of an engine and a trainer")


@dataclass(frozen=True)
class Plan:
    way: str
    pairs: int
    cycles: int
    devices: tuple[str, ...]
    sizes: dict[str, int]  # bytes of each tag of one rank
    capacity: int  # of the pool of each device

    @classmethod
    def of(cls, run: Run, way: str) -> Plan:
        gpus = visible_gpus() if run.device != "cpu" else 0
        devices = tuple(f"cuda:{index}" for index in range(min(gpus, run.options.pairs))) or ("cpu",)
        sharers = -(-run.options.pairs // len(devices))  # pairs on one device
        if run.small:
            params, rest = 2 * MIB, 8 * MIB
            capacity = sharers * 32 * MIB + 64 * MIB
        else:
            params = 4 * 1_544_000_000 // (512 * MIB) * 512 * MIB
            capacity = total_bytes(devices[0]) - (8 + 4 * sharers) * GIB  # the rest is for contexts
            rest = (capacity // sharers - 3 * params) * 9 // 10 // GIB * GIB
        sizes = {"weights": params // 2, "kv_cache": rest // 2, "kv_rest": rest - rest // 2 + 2 * params}
        sizes |= {"params": params, "moments": 2 * params}
        return cls(way, run.options.pairs, run.options.cycles, devices, {**sizes, "workspace": rest}, capacity)

    def must(self, of: dict[str, tuple[str, ...]], phase: str) -> int:
        """Bytes that must move at the entry of a phase, of all ranks."""
        return self.pairs * sum(self.sizes[tag] for tag in of[phase])


def measure(run: Run) -> None:
    losses: list[Any] = []
    with Limit(64 * MIB if run.small else 2 * GIB, run.device) as limit:
        for way in run.options.only:
            limit.measure()
            plan = Plan.of(run, way)
            found = run.attempt(way, partial(_ranks, plan))
            limit.measure()
            if found is not None:
                _report(run, plan, found, limit)
                losses.append([rank["losses"] for rank in found])
    run.check("the losses of all ways are equal", all(each == losses[0] for each in losses))


def _report(run: Run, plan: Plan, found: list[Sample], limit: Limit) -> None:
    """The tables of one source. ``found``: of each rank."""
    turns = [_seconds(each) for each in zip(*(rank["turns"] for rank in found))]
    rows: dict[str, dict[str, Any]] = {}
    for at, phase in enumerate(PHASES):
        out = plan.must(MUST_OUT_LATE if plan.way == LATE else MUST_OUT, phase)
        into = plan.must(MUST_IN, phase)
        parts = {"both": min(out, into), "out": out - min(out, into), "into": into - min(out, into)}
        bus = [limit.ms(way, nbytes / len(plan.devices)) for way, nbytes in parts.items() if nbytes]
        row: dict[str, Any] = {"must move, GiB": (out + into) / GIB, "moved, GiB": found[0]["moved"][at] / GIB}
        row["s"] = median(turns[at :: len(PHASES)])
        row["bus, s"] = sum(each or 0 for each in bus) / 1e3
        rows[f"into {phase}"] = row
    rows["all"] = {name: sum(row[name] for row in rows.values()) for name in row}
    for row in rows.values():
        row["of the bus"] = row["s"] / row["bus, s"] if row["bus, s"] else None
    run.table(f"{plan.way}, {plan.pairs} pairs", rows)
    syncs = [each for rank in found for each in rank["syncs"]]  # of the engines
    if syncs:
        took, written = (median([each[name] for each in syncs]) or 0.0 for name in ("s", "write, s"))
        rate, copy = (plan.sizes["params"] + plan.sizes["weights"]) / written / 1e9, found[0]["copy_rate"] / 1e9
        run.table(f"{plan.way}: weight sync", {"": {"s": took, "write, s": written, "GB/s": rate, "copy, GB/s": copy}})
    run.keep(**{f"samples, {plan.way}": found})


def _seconds(ranks: tuple[Turn, ...]) -> float:
    """Of one turn, from the last rank's call to the return of the last rank."""
    return max(end for _, end in ranks) - max(begin for begin, _ in ranks)


def _ranks(plan: Plan) -> list[Sample]:
    """Of each rank: its turns, bytes that moved by turn, and syncs. Engines have even numbers, trainers odd ones."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queues = [(CONTEXT.Queue(), CONTEXT.Queue()) for _ in range(plan.pairs)]
    with nullcontext() if plan.way == DRIVER else shared_pool(plan.capacity, *plan.devices) as pool:
        how: dict[str, Any] = {"port": store.port, "barrier": CONTEXT.Barrier(2 * plan.pairs), "timeout_s": 600.0}
        how |= {"plan": plan, "directory": pool.directory if pool else ""}
        ranks = [Process(rank_of_job, rank=rank, queues=queues[rank // 2], **how) for rank in range(2 * plan.pairs)]
        with processes(*ranks):
            return ask_all(ranks)


def rank_of_job(rank: int, plan: Plan, directory: str, port: int, queues: Any, barrier: Barrier) -> Sample:
    pair, role = divmod(rank, 2)
    device = plan.devices[pair % len(plan.devices)]
    os.environ["MEMSAVER_POOL_DIR"] = directory
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    memsaver.configure(pool="process" if plan.way == DRIVER else "shared", patches="multiprocessing")
    name = ("engine", "trainer")[role]
    for builder in range(2):  # one role after the other: there is no room for both
        if builder == role:
            torch.manual_seed(pair)
            member = Member({tag: plan.sizes[tag] for tag in TAGS[name]}, device, plan.way == LATE)
            member.pause(list(member.tensors))
        barrier.wait(TIMEOUT_S)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    phases, members = LATE_PHASES if plan.way == LATE else PHASES, dict[str, Any]({name: member})
    group = Group(store=store, rank=rank, world_size=2 * plan.pairs, phases=phases, **RULES, **members)
    turns: list[Turn] = []
    moved: list[int] = []
    syncs: list[Sample] = []
    for _ in range(WARM_UP + plan.cycles):
        for phase in PHASES:
            begin = time.monotonic()
            with group.enter(phase, timeout=TIMEOUT_S, memory_timeout=MEMORY_S) as turn:
                end = time.monotonic()
                end += member.wait(phase)
                turns.append((begin, end))
                moved.append(sum(each.copied_bytes for each in turn.transitions))
                member.work(phase)
                if phase == "sync":
                    syncs.append(member.sync(queues))
            barrier.wait(TIMEOUT_S)
    rate = copy_rate(device, MIB if device == "cpu" else 256 * MIB) if rank == 0 else None
    group.close()
    skipped = WARM_UP * len(PHASES)
    synced = [each for each in syncs[WARM_UP:] if each]
    figures = {"turns": turns[skipped:], "moved": moved[skipped:], "syncs": synced, "copy_rate": rate}
    return {**figures, "losses": member.losses}


class Layers(torch.nn.Module):
    """A quarter of the layers. Its forward pass is the work of the device for a while, and reads its parameters.

    The sums of integers are exact: the loss depends on no order.
    """

    def __init__(self, params: list[torch.Tensor], work: Callable[[float], None], seconds: float) -> None:
        super().__init__()
        self.params, self.work, self.seconds = params, work, seconds

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.work(self.seconds)
        for tensor in self.params:
            loss = torch.sin(loss + torch.sum(tensor.view(torch.int16), dtype=torch.float64) / tensor.numel())
        return loss


class Member(Colocated):
    """A rank: its tensors by tag."""

    def __init__(self, sizes: dict[str, int], device: str, is_late: bool) -> None:
        self.device, self.waited, self.is_late = device, 0.0, is_late
        self.work_s = WORK_S[device.partition(":")[0]]
        works = {tag: Work(8, nbytes // 8) for tag, nbytes in sizes.items()}
        if is_late and (whole := works.pop("params", None)):
            works = {**dict.fromkeys(QUARTERS, Work(2, whole.nbytes)), **works}
        self.tensors = {tag: self._allocate(tag, work) for tag, work in works.items()}
        self.params = [tensor for tag, of_tag in self.tensors.items() if "params" in tag for tensor in of_tag]
        seconds = self.work_s / len(QUARTERS) if is_late else 0.0
        quarters = (self.params[at : at + 2] for at in range(0, len(self.params), 2))
        self.model = torch.nn.Sequential(*(Layers(each, self._spend, seconds) for each in quarters))
        for tag, layers in zip(QUARTERS if is_late else (), self.model):
            layers.register_forward_pre_hook(partial(self._arrive, tag))
        self.losses: list[float] = []
        self._contents = Contents(self.params + self.tensors.get("moments", []))
        self._expected: list[int] = []  # checksums of the weights that were written

    def _allocate(self, tag: str, work: Work) -> list[torch.Tensor]:
        with memsaver.region(tag, device=self.device, backup="host" if tag in KEPT else "none"):
            return work.allocate(self.device)

    def wait(self, phase: str) -> float:
        """The work of a phase up to the first uses of all late memory. Returns the seconds of the waits there."""
        self.waited = 0.0
        if phase == "train" and self.params:
            loss = self.model(torch.zeros((), dtype=torch.float64, device=self.device))
            self.losses.append(loss.item())
            if self.is_late:
                self._arrive("moments")
        elif phase == "rollout" and not self.params and self.is_late:
            self._spend(self.work_s)
            self._arrive("kv_rest")
        return self.waited

    def _spend(self, seconds: float) -> None:
        """Uses resident memory."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            self.tensors["workspace" if self.params else "kv_cache"][0].fill_(1)
            synchronize(self.device)

    def _arrive(self, tag: str, *_: Any) -> None:
        began = time.monotonic()
        memsaver.regions.find([tag])[0].wait()
        self.waited += time.monotonic() - began

    def work(self, phase: str) -> None:
        """Compares contents in the first phase that reads them, and writes to the memory of the phase."""
        if phase == "train" and self.params:
            self._contents.check()
            self._contents.change()
        if phase == "rollout" and self._expected and checksums(self.tensors["weights"]) != self._expected:
            raise AssertionError("the engine's weights are not those that the trainer wrote")
        for tag in PHASES[phase].get("engine" if "weights" in self.tensors else "trainer", ()):  # late ones have come
            for tensor in self.tensors[tag] if tag not in KEPT else ():
                tensor.fill_(1)

    def sync(self, queues: Any) -> Sample:
        """One side of a weight sync. On the engine's: seconds of the whole, and of the writing."""
        there, back = queues
        if "weights" in self.tensors:
            begin = time.perf_counter()
            there.put(self.tensors["weights"])
            written_s = back.get(timeout=TIMEOUT_S)
            took = time.perf_counter() - begin
            self._expected = back.get(timeout=TIMEOUT_S)
            return {"s": took, "write, s": written_s}
        weights, params = there.get(timeout=TIMEOUT_S), [each.view(torch.float32) for each in self.params]
        synchronize(self.device)
        begin = time.perf_counter()
        for weight, param in zip(weights, params):
            weight.view(torch.bfloat16).copy_(param)
        synchronize(self.device)
        took = time.perf_counter() - begin
        del weights, weight  # the engine's next pause waits for this
        back.put(took)
        back.put([sums for param in params for sums in checksums([param.to(torch.bfloat16).view(torch.int64)])])
        return {}
