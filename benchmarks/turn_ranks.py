"""The cost of a group's turn over torch.distributed's store, beyond its slowest rank.

    python benchmarks/turn_ranks.py [--ranks 64] [--turns 200] [--mib 2] [--device cpu]

As many processes as ranks, as torchrun starts them, with the store in the process that started them. Every second rank
is an engine, the others are trainers, each with a region of ``--mib`` MiB that is kept on the host. The ranks take
turns: in each turn one half of them pauses, and the other half resumes. On GPUs the ranks share those of the machine.

The seconds of a turn are those from the last rank's call of ``enter()`` to the return of the last rank. The slowest
rank of a turn is the one whose own methods (prepare, commit, resume) took longest in all. Prints the difference, with
the seconds of turns and of slowest ranks, then one JSON line. Where there are fewer cores than ranks, the ranks wait
for cores as well.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as distributed

import memsaver
from memsaver.distributed import Colocated, Group
from support.arguments import add_device, count, parse, parser_for, positive
from support.environment import environment
from support.host import MIB
from support.processes import CONTEXT
from support.turn_costs import PHASES, WARM_UP, print_table, summary

TIMEOUT_S = 300.0
Row = tuple[float, float, float]  # begin and end of enter(), and the seconds in the rank's own methods


class Timed(Colocated):
    """A member that adds up the seconds in its own methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def _timed(self, call: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        try:
            return call()
        finally:
            self.seconds += time.monotonic() - begin

    def colocated_prepare(self, tags: Any, coming: Any = (), **options: Any) -> Any:
        return self._timed(lambda: super(Timed, self).colocated_prepare(tags, coming, **options))

    def colocated_commit(self) -> Any:
        return self._timed(super().colocated_commit)

    def resume(self, tags: Any = None, **options: Any) -> Any:
        return self._timed(lambda: super(Timed, self).resume(tags, **options))


def rank_of_job(rank: int, options: argparse.Namespace, port: int, host_device: str, to: Connection) -> None:
    """One rank: sends its rows at the end."""
    os.environ["MEMSAVER_HOST_DEVICE"] = host_device  # one device for all ranks
    device = "cpu" if options.device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}"
    torch.set_num_threads(1)
    role = ("engine", "trainer")[rank % 2]
    region = memsaver.region(role, device=device, backup="host")
    region.empty(int(options.mib * MIB), torch.uint8).fill_(rank % 256)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    member = Timed()
    roles: dict[str, Any] = {role: member}
    group = Group(phases=PHASES, store=store, rank=rank, world_size=options.ranks, **roles)
    rows: list[Row] = []
    for turn in range(WARM_UP + options.turns):
        member.seconds = 0.0
        begin = time.monotonic()
        group.enter(("train", "rollout")[turn % 2], timeout=TIMEOUT_S)
        rows.append((begin, time.monotonic(), member.seconds))
    group.close()
    to.send(rows[WARM_UP:])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    room = 2 * options.ranks * max(2, options.mib) + 64
    host_device = str(int(room) * MIB + os.getpid() % 1000 * 2 * MIB)  # a device that no other program uses
    processes, ends = [], []
    begin = time.monotonic()
    for rank in range(options.ranks):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=rank_of_job, args=(rank, options, store.port, host_device, theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(mine)
    try:
        rows: list[list[Row]] = [end.recv() for end in ends]
    except EOFError:
        raise SystemExit("a rank has failed, see above") from None
    finally:
        for process in processes:
            process.terminate()
    turns = [figures(ranks) for ranks in zip(*rows)]
    found = {name: summary([turn[name] for turn in turns]) for name in turns[0]}
    return {**found, "run_seconds": time.monotonic() - begin}


def figures(ranks: tuple[Row, ...]) -> dict[str, float]:
    seconds = max(end for _, end, _ in ranks) - max(begin for begin, _, _ in ranks)
    slowest = max(own for _, _, own in ranks)
    return {"beyond_seconds": seconds - slowest, "turn_seconds": seconds, "slowest_rank_seconds": slowest}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=count, default=64)
    parser.add_argument("--turns", type=count, default=200, help="turns that count")
    parser.add_argument("--mib", type=positive, default=2, help="MiB of each rank's region")
    add_device(parser, numbered=False)
    options = parse(parser)
    result = {"benchmark": "turn_ranks", **environment(options.device)}
    result |= {"ranks": options.ranks, "turns": options.turns, "mib": options.mib, **measure(options)}
    print(f"{options.ranks} ranks, {options.turns} turns, {options.mib:g} MiB a rank, {os.cpu_count()} cores")
    print_table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
