"""The cost of a group's turn over Ray actors on several raylets, and how soon a raylet that was killed is named.

    python benchmarks/turn_nodes.py [--ranks 64] [--raylets 4] [--turns 200] [--mib 2] [--kill-ranks 8]

The raylets run on this machine, each with a host device of its own. Every second rank is an engine, the others are
trainers, each an actor with a region of ``--mib`` MiB that is kept on the host. In each turn one half of them pauses,
and the other half resumes. This benchmark runs on the host driver alone.

The seconds of a turn are those of ``Group.enter()``. The slowest rank of a turn is the one whose own methods (prepare,
commit, resume) took longest in all. Prints the difference, with the seconds of turns and of slowest ranks.

Then, for each half of a turn, ``--kill-ranks`` new actors take a turn in which an actor of the last raylet waits in
that half, and that raylet is killed. Prints the seconds from the kill to the error of ``enter()``, and the rank that
the error names. Last comes one JSON line. Where there are fewer cores than ranks, the ranks wait for cores as well.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import memsaver
from memsaver.ray import Colocated, Group
from support.arguments import count, parser_for, positive
from support.environment import environment
from support.host import MIB
from support.turn_costs import PHASES, WARM_UP, print_table, summary

TIMEOUT_S = 300.0
START_S = 600.0  # of all actors; with fewer cores than ranks most of it is their imports
HALVES = {"first": "colocated_prepare", "second": "colocated_commit"}
Call = tuple[float, float]  # begin and end


class Member(Colocated):
    """A rank: a region, and the times of its own methods."""

    def __init__(self, role: str, nbytes: int) -> None:
        self.region = memsaver.region(role, device="cpu", backup="host")
        self.owner = self.region._core.allocate_array(nbytes)
        self.calls: list[Call] = []
        self.stalls: tuple[str, str] | None = None

    def ready(self) -> None:
        """Returns once the actor has started."""

    def stall(self, method: str, marker: str) -> None:
        """The next call of a method makes the file ``marker`` and never ends."""
        self.stalls = (method, marker)

    def times(self) -> list[Call]:
        return self.calls

    def colocated_prepare(self, *args: Any, **options: Any) -> Any:
        return self._timed("colocated_prepare", *args, **options)

    def colocated_commit(self, *args: Any, **options: Any) -> Any:
        return self._timed("colocated_commit", *args, **options)

    def resume(self, *args: Any, **options: Any) -> Any:
        return self._timed("resume", *args, **options)

    def _timed(self, method: str, *args: Any, **options: Any) -> Any:
        if self.stalls is not None and self.stalls[0] == method:
            Path(self.stalls[1]).touch()
            threading.Event().wait()
        begin = time.monotonic()
        try:
            return getattr(super(), method)(*args, **options)
        finally:
            self.calls.append((begin, time.monotonic()))


@contextmanager
def raylets(how_many: int, device_bytes: int) -> Iterator[list[Any]]:
    """A cluster of several raylets on this machine. The first one belongs to its driver, this process."""
    cluster = Cluster()
    nodes = []
    for number in range(how_many):
        variables = {
            # A size is a device: each raylet has one of its own.
            "MEMSAVER_HOST_DEVICE": str(device_bytes + (os.getpid() % 1000 * 16 + number) * 2 * MIB),
            "MEMSAVER_BACKUP_AHEAD": "off",
            "OMP_NUM_THREADS": "1",
        }
        nodes.append(
            cluster.add_node(
                num_cpus=1, num_gpus=0, object_store_memory=80 * MIB, include_dashboard=False, env_vars=variables
            )
        )
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def started(nodes: list[Any], ranks: int, mib: float) -> list[Any]:
    """Actors of both roles by turns, an equal number of them on each raylet."""
    actors = []
    for rank in range(ranks):
        where = NodeAffinitySchedulingStrategy(nodes[rank * len(nodes) // ranks].node_id, soft=False)
        actor = ray.remote(Member).options(num_cpus=0, scheduling_strategy=where)
        actors.append(actor.remote(("engine", "trainer")[rank % 2], int(mib * MIB)))
    ray.get([each.ready.remote() for each in actors], timeout=START_S)
    return actors


def measure_turns(options: argparse.Namespace, device_bytes: int) -> dict[str, Any]:
    with raylets(options.raylets, device_bytes) as nodes:
        actors = started(nodes, options.ranks, options.mib)
        group = Group(engine=actors[0::2], trainer=actors[1::2], phases=PHASES)
        windows: list[Call] = []
        for turn in range(WARM_UP + options.turns):
            begin = time.monotonic()
            group.enter(("train", "rollout")[turn % 2], timeout=TIMEOUT_S)
            windows.append((begin, time.monotonic()))
        calls = ray.get([each.times.remote() for each in actors])
    rows = [figures(window, calls) for window in windows[WARM_UP:]]
    return {name: summary([row[name] for row in rows]) for name in rows[0]}


def figures(window: Call, calls: list[list[Call]]) -> dict[str, float]:
    """``calls``: those of each rank in all turns. The raylets run on this machine, so all share one clock."""
    begin, end = window
    slowest = max(sum(until - since for since, until in each if begin <= since < end) for each in calls)
    return {"beyond_seconds": end - begin - slowest, "turn_seconds": end - begin, "slowest_rank_seconds": slowest}


def measure_kill(options: argparse.Namespace, device_bytes: int, method: str) -> dict[str, Any]:
    with raylets(options.raylets, device_bytes) as nodes, tempfile.TemporaryDirectory() as folder:
        actors = started(nodes, options.kill_ranks, options.mib)
        group = Group(engine=actors[0::2], trainer=actors[1::2], phases=PHASES)
        group.enter("train", timeout=TIMEOUT_S)  # the trainers are resident, and pause in the turn that follows
        trainers = len(actors[1::2])
        marker = Path(folder, "waits")
        ray.get(actors[2 * trainers - 1].stall.remote(method, str(marker)))
        errors: list[BaseException] = []

        def enter() -> None:
            try:
                group.enter("rollout", timeout=TIMEOUT_S)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        while not marker.exists() and thread.is_alive():
            time.sleep(0.005)
        since = time.monotonic()
        nodes[-1].kill_raylet()
        thread.join()
        seconds = time.monotonic() - since
    if not errors:
        raise SystemExit("a turn has succeeded although a raylet was killed")
    error = errors[0]
    if not isinstance(error, memsaver.Error):
        raise error
    return {
        "seconds": seconds,
        "role": getattr(error, "role", None),
        "rank": getattr(error, "rank", None),
        "cause": type(error.__cause__).__name__,
        "error": str(error).splitlines()[0],
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=count, default=64)
    parser.add_argument("--raylets", type=count, default=4)
    parser.add_argument("--turns", type=count, default=200, help="turns that count")
    parser.add_argument("--mib", type=positive, default=2, help="MiB of each rank's region")
    parser.add_argument("--kill-ranks", type=count, default=8, help="ranks of the turns in which a raylet is killed")
    options = parser.parse_args()
    for name in ("ranks", "kill_ranks"):
        if (given := getattr(options, name)) % (2 * options.raylets):
            option = "--" + name.replace("_", "-")
            parser.error(f"argument {option}: {given}, expected a multiple of {2 * options.raylets}")
    device_bytes = int(2 * options.ranks * max(2.0, options.mib) + 64) * MIB
    result = {"benchmark": "turn_nodes", **environment("cpu")}
    result |= {"ray": ray.__version__, "ranks": options.ranks, "raylets": options.raylets, "turns": options.turns}
    result |= {"mib": options.mib, "kill_ranks": options.kill_ranks, **measure_turns(options, device_bytes)}
    print(f"{options.ranks} actors on {options.raylets} raylets, {options.turns} turns, {os.cpu_count()} cores")
    print_table(result)
    result["kills"] = {half: measure_kill(options, device_bytes, method) for half, method in HALVES.items()}
    for half, found in result["kills"].items():
        print(f"  a raylet killed in the {half} half: named after {found['seconds']:.1f} s: {found['error']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
