"""Pause and resume, ours beside torch_memory_saver, on the same work in one run.

    python benchmarks/pause_resume.py [--rounds 3] [--cycles 3] [--scale 1.0] [--no-peer]

Prints a table of milliseconds (medians), then one JSON line with every sample. Subjects take turns, each time in a new
process, because a machine's speed drifts over seconds. Contents are random and compared whole after every cycle where
they are backed up. The limit is measured in the same run: plain copies between the device and pinned memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from environment import environment, need_cuda

GIB = 1 << 30
MIB = 1 << 20

# name -> (tensors, bytes each, backed up)
WORK = {
    "64 GiB without backup, 2 tensors": (2, 32 * GIB, False),
    "16 GiB backed up, 256 tensors": (256, 64 * MIB, True),
    "8 GiB backed up, 4096 tensors": (4096, 2 * MIB, True),
}
SUBJECTS = ("memsaver", "memsaver, retained", "torch_memory_saver", "torch_memory_saver, backups retained")


class Ours:
    def __init__(self, backed_up: bool, retained: bool) -> None:
        import memsaver

        if retained:
            memsaver.configure(retain="100GiB")
        self._region = memsaver.region("work", device="cuda:0", backup="host" if backed_up else "none")

    def region(self) -> AbstractContextManager[object]:
        return self._region

    def pause(self) -> None:
        self._region.pause()

    def resume(self) -> None:
        self._region.resume()


class TorchMemorySaver:
    """The peer with its hook through torch's allocator: as a library, without LD_PRELOAD."""

    def __init__(self, backed_up: bool, retained: bool) -> None:
        from torch_memory_saver import torch_memory_saver

        torch_memory_saver.hook_mode = "torch"
        self._saver = torch_memory_saver
        self._backed_up = backed_up
        if retained:
            torch_memory_saver.retain_cpu_backup = True

    def region(self) -> AbstractContextManager[object]:
        region: AbstractContextManager[object] = self._saver.region(tag="work", enable_cpu_backup=self._backed_up)
        return region

    def pause(self) -> None:
        self._saver.pause("work")

    def resume(self) -> None:
        self._saver.resume("work")


def milliseconds(call: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def measure_subject(subject: str, work: str, cycles: int, scale: float) -> dict[str, Any]:
    """Runs in a process of its own: a first and `cycles` later cycles of pause and resume, in ms."""
    import torch

    name, _, variant = subject.partition(", ")
    count, nbytes, backed_up = WORK[work]
    nbytes = int(nbytes * scale) // (2 * MIB) * 2 * MIB
    saver = (Ours if name == "memsaver" else TorchMemorySaver)(backed_up, bool(variant))
    with saver.region():
        tensors = [torch.empty(nbytes // 8, dtype=torch.int64, device="cuda") for _ in range(count)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    if backed_up:
        for tensor in tensors:
            tensor.random_()
        kept = [tensor.clone() for tensor in tensors]
    pauses, resumes = [], []
    for _ in range(cycles + 1):
        pauses.append(milliseconds(saver.pause))
        resumes.append(milliseconds(saver.resume))
        if backed_up:
            for tensor, expected in zip(tensors, kept):
                if not torch.equal(tensor, expected):
                    raise SystemExit(f"{subject}: contents differ after a cycle")
    if addresses != [tensor.data_ptr() for tensor in tensors]:
        raise SystemExit(f"{subject}: addresses changed")
    return {"bytes": count * nbytes, "pause_ms": pauses, "resume_ms": resumes}


def measure_handover(cycles: int, scale: float) -> dict[str, Any]:
    """64 GiB out of one region and into another, chunks handed on within the process."""
    import torch

    import memsaver

    memsaver.configure(retain="100GiB")
    nbytes = int(64 * GIB * scale)
    regions = [memsaver.region(f"side {i}", device="cuda:0") for i in range(2)]
    regions[0].empty((1,))
    tensors = []
    for region in regions:
        tensors += [region.empty((nbytes // 2,), torch.uint8) for _ in range(2)]
        region.pause()
    regions[0].resume()
    switches = []
    warm_up = 6
    for cycle in range(4 * cycles + warm_up):
        out, into = regions[cycle % 2], regions[1 - cycle % 2]
        switches.append(milliseconds(partial(memsaver.switch, pause=out.tag, resume=into.tag)))
        tensors[2 * (1 - cycle % 2)].fill_(1)  # the memory is really there
    return {"switch_ms": statistics.median(switches[warm_up:]), "bytes": nbytes, "all_switch_ms": switches}


def measure_limit(cycles: int) -> dict[str, Any]:
    """Pinned copies of 64 MiB pieces, one way each, and what the driver takes to make and release memory."""
    import torch

    host = torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    step = 64 * MIB

    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        for at in range(0, 2 * GIB, step):
            to[at : at + step].copy_(source[at : at + step], non_blocking=True)

    copy(host, device)
    out = statistics.median(milliseconds(lambda: copy(host, device)) for _ in range(cycles))
    into = statistics.median(milliseconds(lambda: copy(device, host)) for _ in range(cycles))
    return {"out_gb_per_s": 2 * GIB / out / 1e6, "in_gb_per_s": 2 * GIB / into / 1e6}


def in_process(arguments: list[str]) -> dict[str, Any]:
    """This script in a new process; its last line is JSON. An error comes back as such."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


class Samples:
    """What the processes of one subject measured, in ms; `first` are each process's first cycles."""

    def __init__(self) -> None:
        self.first_pause_ms: list[float] = []
        self.first_resume_ms: list[float] = []
        self.pause_ms: list[float] = []
        self.resume_ms: list[float] = []
        self.error: str | None = None

    def add(self, result: dict[str, Any]) -> None:
        if "error" in result:
            self.error = result["error"]
            return
        for name in ("pause_ms", "resume_ms"):
            first, *later = result[name]
            getattr(self, f"first_{name}").append(first)
            getattr(self, name).extend(later)

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        columns = (self.first_pause_ms, self.first_resume_ms, self.pause_ms, self.resume_ms)
        return " ".join(f"{statistics.median(column):{width}.1f}" for column, width in zip(columns, (12, 13, 8, 8)))


def subjects(work: str, no_peer: bool) -> list[str]:
    """Those that differ on this work: without a backup there is none to retain."""
    left_out = ("torch_memory_saver",) if no_peer else () if WORK[work][2] else ("backups retained",)
    return [subject for subject in SUBJECTS if not any(part in subject for part in left_out)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes for each subject")
    parser.add_argument("--cycles", type=int, default=3, help="in each process, after a first")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes, for small devices")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("SUBJECT", "WORK"), help=argparse.SUPPRESS)
    parser.add_argument("--handover", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    need_cuda()
    if options.one:
        print(json.dumps(measure_subject(*options.one, options.cycles, options.scale)), flush=True)
        os._exit(0)  # the peer ends a process that goes down in order with an error of its own
    if options.handover:
        print(json.dumps(measure_handover(options.cycles, options.scale)))
        return
    if options.limit:
        print(json.dumps(measure_limit(options.cycles)))
        return

    common = ["--cycles", str(options.cycles), "--scale", str(options.scale)]
    limit = in_process([*common, "--limit"])
    results: dict[str, Any] = {"benchmark": "pause_resume", **environment(), "limit": limit, "work": {}}
    print(f"limit: {limit}", flush=True)
    for work in WORK:
        print(f"\n{work}\n{'':40} {'first pause':>12} {'first resume':>13} {'pause':>8} {'resume':>8}   ms")
        rows = results["work"][work] = {subject: Samples() for subject in subjects(work, options.no_peer)}
        for _ in range(options.rounds):
            for subject, row in rows.items():
                row.add(in_process([*common, "--one", subject, work]))
        for subject, row in rows.items():
            print(f"{subject:40} {row}", flush=True)
    handover = in_process([*common, "--handover"])
    results["handover"] = handover
    print(f"\n64 GiB out of one region, into another: {handover.get('switch_ms', handover.get('error'))} ms")
    print(json.dumps(results, default=vars))


if __name__ == "__main__":
    main()
