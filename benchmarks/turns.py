"""The loop's turns for a model of 1.5 billion parameters: a shared pool, the driver as the source, and ``.to("cpu")``.

    python benchmarks/turns.py [--cycles 5] [--only pool driver offload] [--ranks 1] [--small]

The same loop each time (examples/colocate), with the engine and the trainer as two Ray actors: rollout, training,
weight sync, rollout. The trainer has fp32 weights, gradients and AdamW's moments, the engine bf16 weights and a KV
cache; KV cache and workspace are so large that the two do not fit beside each other. Prints for each turn the bytes
that must move over the bus, counted by hand (examples/colocate/traffic.py), the ratio of the bytes that moved to them,
its seconds, and the ratio of its seconds to those of plain pinned copies of the bytes that must move, in the same run.
Bytes that go out and come in at once count at the rate of both ways at once. (Of ``.to("cpu")``, the bytes that it
moved.)
Then the pinned host memory that each side holds, and the weight sync: bytes read and written over its seconds, against
a plain copy on the device. Then one JSON line. Needs about 25 GiB of host memory for backups, and some for Ray's
object store.

``--small`` runs it on a tiny model. With ``--device cpu`` it does so on the host driver; figures mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Here, and in Ray's workers.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

import ray  # noqa: E402

from examples.colocate import loop  # noqa: E402
from examples.colocate.report import Report  # noqa: E402
from examples.colocate.rollout import demonstration_batch  # noqa: E402
from examples.colocate.traffic import Contents  # noqa: E402
from support.arguments import add_device, add_small, count, parse, parser_for  # noqa: E402
from support.environment import environment  # noqa: E402
from support.host import GIB, MIB  # noqa: E402
from support.limits import Limit  # noqa: E402
from support.offload import OffloadingLoop  # noqa: E402
from support.switches import free_bytes  # noqa: E402
from support.work import size  # noqa: E402

PHASES = ("train", "sync", "rollout")
SUBJECTS = {"pool": "shared pool", "driver": "driver as the source", "offload": '.to("cpu")'}
WARM_UP = 2
GONE_S = 60.0

Turn = dict[str, float]


class Measured:
    """One subject's loop, and the figures of its turns."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        pool = "shared" if name == "pool" else "process"
        arguments = ["--device", options.device, "--recipe", options.recipe, "--pool", pool]
        arguments += ["--ranks", str(options.ranks), "--ranks-per-gpu", str(options.ranks)]
        self.options = loop.parse(arguments)
        recipe = loop.chosen_recipe(self.options)
        if name == "offload":
            recipe = replace(recipe, engine=replace(recipe.engine, use_graphs=False))
        kind = OffloadingLoop if name == "offload" else loop.Loop
        self.recipe, self.loop = recipe, kind(self.options, recipe, Report(settings={}))
        self.copy_bytes = options.copy_bytes
        self.turns: dict[str, list[Turn]] = {phase: [] for phase in PHASES}
        self.syncs: list[dict[str, float]] = []
        self.constants = 0  # bytes that the engines keep over training, of all ranks
        self.host_bytes: dict[str, int] = {}  # pinned by all ranks of a role

    def run(self, cycles: int) -> None:
        running, recipe = self.loop, self.recipe
        running.set_up()
        for cycle in range(WARM_UP + cycles):
            self._enter("train")
            batch = ray.put([demonstration_batch(running.task, recipe.warm_up_batch, recipe.slip_share)])
            ray.get([trainer.warm_up.remote(batch, [recipe.warm_up_rate]) for trainer in running.trainers])
            self._enter("sync")
            begin = time.perf_counter()
            written = running.weights.bring()
            sync = {"seconds": time.perf_counter() - begin}
            if written:
                span = max(each.ended for each in written) - min(each.began for each in written)
                sync |= {"bytes": sum(each.nbytes for each in written), "write_seconds": span}
                sync |= {"attached_seconds": max(each.seconds for each in written)}
            self.syncs.append(sync)
            if cycle == WARM_UP + cycles - 1:
                running.proofs.weights()
            self._enter("rollout")
            running.players.rollout(recipe.prompts, recipe.group, zero_advantages=False)
        self._look()
        self.turns = {phase: found[-cycles:] for phase, found in self.turns.items()}
        self.syncs = self.syncs[-cycles:]

    def copy_rate(self) -> float:
        """Bytes per second, read plus written, of a plain copy on the device."""
        rate: float = ray.get(self.loop.trainers[0].copy_rate.remote(self.copy_bytes))
        return rate

    def _enter(self, phase: str) -> None:
        turns = self.loop.turns
        if self.name == "offload":
            self.turns[phase].append(self._offload(phase))
            return
        turn = turns.enter(phase)
        assert turn is not None
        moved = turns.moved[-1]
        self.turns[phase].append({"seconds": turn.seconds, "out_bytes": moved.out_bytes, "in_bytes": moved.in_bytes})

    def _offload(self, phase: str) -> Turn:
        """First the pauses, then the resumes."""
        phases, running = self.loop.turns.phases, self.loop
        begin = time.perf_counter()
        found = {}
        for verb in ("pause", "resume"):
            calls = []
            for role, actors in (("engine", running.engines), ("trainer", running.trainers)):
                coming = phases[phase].get(role, [])
                every = {tag for each in phases.values() for tag in each.get(role, [])}
                tags = coming if verb == "resume" else sorted(every - set(coming))
                backup = running.turns.BACKUP.get(phase, {}).get(role)
                policy = {"backup": backup} if verb == "pause" else {}
                calls += [getattr(actor, verb).remote(tags, **policy) for actor in actors]
            found[verb] = sum(each.copied_bytes for each in ray.get(calls))
        return {"seconds": time.perf_counter() - begin, "out_bytes": found["pause"], "in_bytes": found["resume"]}

    def _look(self) -> None:
        if self.name == "offload":
            return
        self.constants = sum(ray.get([engine.constant_bytes.remote() for engine in self.loop.engines]))
        for role, actors in (("engine", self.loop.engines), ("trainer", self.loop.trainers)):
            rows = [
                row
                for each in ray.get([actor.stats.remote() for actor in actors])
                for row in each.asdict()["devices"].values()
            ]
            self.host_bytes[role] = sum(row["host_held_bytes"] for row in rows)

    def must_move(self, before: str, after: str) -> tuple[int, int]:
        """Bytes out, and in, that the turn from one phase to another cannot do without."""
        return Contents.of(self.recipe.model, len(self.loop.engines), self.constants).must_move(before, after)


@contextmanager
def own_broker() -> Iterator[None]:
    """Sockets in a directory of this benchmark's own; the broker that was started for it ends with it."""
    directory = tempfile.mkdtemp(prefix="memsaver-")
    os.environ["MEMSAVER_POOL_DIR"] = directory
    try:
        yield
    finally:
        for lock in Path(directory).glob("*.lock"):
            if (pid := int(lock.read_text() or 0)) > 0:
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        del os.environ["MEMSAVER_POOL_DIR"]
        shutil.rmtree(directory)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + GONE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def measure(name: str, options: argparse.Namespace, limit: Limit) -> dict[str, Any]:
    """Turns and syncs of a subject, with the bus measured right before and after."""
    free, since = 0 if options.device == "cpu" else free_bytes("cuda:0"), len(limit.all)
    limit.measure()
    with own_broker():
        begin = time.monotonic()
        loop.start_ray(loop.parse(["--device", options.device, "--ranks", str(options.ranks)]))
        try:
            measured = Measured(name, options)
            with closing(measured.loop):
                measured.run(options.cycles)
                copy_rate = measured.copy_rate()
        finally:
            ray.shutdown()
    wait_until(lambda: options.device == "cpu" or free_bytes("cuda:0") >= free - GIB)
    limit.measure()
    turns: dict[str, dict[str, Any]] = {}
    for before, after in zip(PHASES[-1:] + PHASES[:-1], PHASES):
        found = measured.turns[after]
        medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
        turns[f"{before} -> {after}"] = medians | {"all_seconds": [each["seconds"] for each in found]}
    result: dict[str, Any] = {"turns": turns, "syncs": measured.syncs, "copy_bytes_per_s": copy_rate}
    if name != "offload":
        result["host_held_bytes"] = measured.host_bytes
        for (before, after), turn in zip(zip(PHASES[-1:] + PHASES[:-1], PHASES), turns.values()):
            turn["must_out_bytes"], turn["must_in_bytes"] = measured.must_move(before, after)
            turn["moved_to_must"] = moved_to_must(turn)
            turn["bus_seconds"] = bus_seconds(limit, turn["must_out_bytes"], turn["must_in_bytes"], since)
    return result | {"bus": limit.all[since:], "run_seconds": time.monotonic() - begin}


def moved_to_must(turn: dict[str, Any]) -> float | None:
    """Bytes that moved to those that have to. None where none have to."""
    must = turn["must_out_bytes"] + turn["must_in_bytes"]
    return (turn["out_bytes"] + turn["in_bytes"]) / must if must else None


def bus_seconds(limit: Limit, out: int, into: int, since: int) -> float:
    """Of plain pinned copies: as much as goes both ways at once does, the rest one way."""
    both = min(out, into)
    parts = (("both", both), ("out", out - both), ("into", into - both))
    return sum((limit.milliseconds(way, nbytes, since) or 0.0) for way, nbytes in parts if nbytes) / 1e3


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{SUBJECTS[name]}")
    print(f"  {'turn':20}{'out':>15}{'in':>15}{'moved':>7}{'seconds':>9}{'bus':>9}{'ratio':>7}")
    rows = dict(result["turns"])
    rows["all"] = {
        key: sum(turn.get(key, 0) for turn in rows.values())
        for key in ("seconds", "must_out_bytes", "must_in_bytes", "bus_seconds", "out_bytes", "in_bytes")
    }
    if name != "offload":
        rows["all"]["moved_to_must"] = moved_to_must(rows["all"])
    result["all"] = rows["all"]
    for turn, row in rows.items():
        must = "must_" if row.get("bus_seconds") else ""
        line = f"  {turn:20}{size(row[must + 'out_bytes']):>15}{size(row[must + 'in_bytes']):>15}"
        line += f"{row.get('moved_to_must') or float('nan'):>7.3f}{row['seconds']:>9.3f}"
        if must:
            line += f"{row['bus_seconds']:>9.3f}{row['seconds'] / row['bus_seconds']:>7.2f}"
        print(line)
    if name != "offload":
        held = ", ".join(f"{size(nbytes)} by the {role}" for role, nbytes in result["host_held_bytes"].items())
        print(f"  pinned host memory: {held}")
    seconds = statistics.median(sync["seconds"] for sync in result["syncs"])
    line = f"  weight sync: {seconds:.3f} s from call to return"
    if "bytes" in result["syncs"][0]:
        rate = statistics.median(sync["bytes"] / sync["write_seconds"] for sync in result["syncs"])
        share = rate / result["copy_bytes_per_s"]
        result["sync_share_of_copy"] = share
        line += (
            f"; {size(result['syncs'][0]['bytes'])} read and written at {rate / 1e9:.1f} GB/s, {100 * share:.0f} % of "
            f"a plain copy's {result['copy_bytes_per_s'] / 1e9:.1f}"
        )
    print(line, flush=True)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--cycles", type=count, default=5, help="steps that count")
    parser.add_argument("--only", nargs="+", choices=tuple(SUBJECTS), default=tuple(SUBJECTS))
    add_device(parser, numbered=False)
    parser.add_argument(
        "--ranks", type=count, default=1, help="pairs of an engine and a trainer's rank, all on one device"
    )
    add_small(parser)
    options = parse(parser)
    options.recipe = "tiny" if options.small else "1.5b"
    options.copy_bytes = 16 * MIB if options.small else GIB
    begin = time.monotonic()
    limit = Limit(64 * MIB if options.small else 2 * GIB, "cpu" if options.device == "cpu" else "cuda:0")
    result: dict[str, Any] = {"benchmark": "turns", **environment(options.device)}
    result |= {"recipe": options.recipe, "ranks": options.ranks, "cycles": options.cycles, "subjects": {}}
    for name in options.only:
        result["subjects"][name] = measure(name, options, limit)
        show(name, result["subjects"][name])
    limit.close()
    if limit.error is not None:
        print(f"\nthe bus could not be measured: {limit.error}")
    print(json.dumps({**result, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
