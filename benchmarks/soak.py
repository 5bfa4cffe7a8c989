"""A soak: random regions, frees and kills over two clients of a shared pool and its broker, and nothing may grow.

In a turn both clients make some random moves at once: new regions with every policy, allocations, frees, writes,
pauses, resumes, switches, trims, closed regions. Then they compare the checksum of each tensor in memory. The pool is
too small for both. Each word that a client writes has its pid, and new allocations and resumes without contents are
checked for words of other processes. In the first half of the turns each of the three processes is killed now and
then. In the second half client b alone is killed, and the other two processes are sampled: every --every turns the
clients release all that they have, and the rest is device memory, pool, pinned memory, files, resident memory,
addresses, descriptors, threads. A figure fails if the median of its last quarter exceeds that of its first quarter by
more than its tolerance.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field

import torch

import memsaver
from benchmarks.harness.command import Options, Run, count
from benchmarks.harness.machine import KIB, MIB, status
from benchmarks.harness.pools import Brokers, shared_pool
from benchmarks.harness.processes import Process, Sample
from benchmarks.harness.work import checksums
from memsaver import cli

DEVICES = ("cuda", "cpu")
BROKER, KEPT, KILLED = "broker", "client a", "client b"
KILLED_IN_A_TURN = 1 / 30
WAIT_S = 60.0
MOST_REGIONS = 5
MOVES = {"allocate": 5, "resume": 4, "pause": 3, "new": 2, "free": 2, "write": 2, "switch": 2, "trim": 1, "close": 1}
POLICIES = ("none", "host", "disk")
SHORTAGES = (memsaver.OutOfMemoryError, memsaver.BrokerError, torch.OutOfMemoryError)
# The most growth of a figure between the medians of the first and the last quarter of its samples.
TOLERANCES = {
    "device": 32 * MIB,  # a context loads kernels when they are first used
    "pool": 0,
    "pinned": 2 * MIB,
    "disk": 2 * MIB,
    "resident": 16 * MIB,  # the interpreter and malloc keep some freed memory
    "addresses": 256 * MIB,  # malloc reserves 64 MiB for a thread that finds none free
    "descriptors": 2,
    "threads": 1,
    "unreleased": 0,
}
OWN = (1 << 22) - 1  # the bits of a word that have the pid of its writer
FEWEST = 10  # samples, for quarters that mean something; the first two do not count


def options(parser: Options) -> None:
    parser.size("--turns", count, 2000, 80, "of both clients")
    parser.size("--every", count, 20, 4, "turns between two samples")
    parser.add_argument("--seed", type=int, default=0)


def measure(run: Run) -> None:
    options, counts = run.options, Counter[str]()
    small = (64 * KIB, MIB // 2, 3 * MIB), 32 * MIB
    sizes, capacity = small if run.small else ((MIB // 2, 3 * MIB, 20 * MIB, 64 * MIB), 768 * MIB)
    samples: list[dict[str, dict[str, float]]] = []
    with shared_pool(capacity, run.device) as pool, ExitStack() as stack:
        os.environ["MEMSAVER_POOL_DIR"] = pool.directory  # of the commands of this process

        def start() -> Process:
            made = Process(Client, WAIT_S, directory=pool.directory, sizes=sizes, device=run.device)
            stack.callback(made.close)
            made.ask("rest")  # it joins the pool now: in a later turn the broker may be dead
            return made

        clients = {name: start() for name in (KEPT, KILLED)}
        for turn in range(options.turns):
            choose, victim = random.Random(f"{options.seed} {turn}"), None
            if choose.random() < KILLED_IN_A_TURN:
                victim = choose.choice((KEPT, KILLED, BROKER)) if turn < options.turns // 2 else KILLED
            for name, client in clients.items():
                client.send("turn", seed=f"{options.seed} {turn} {name}")
            if victim is not None:
                counts[f"kills of {victim}"] += 1
                time.sleep(choose.random() * 0.03)
                if victim == BROKER:
                    pool.end(signal.SIGKILL)
                    pool.start(run.device)
                else:
                    clients[victim].kill()
                    clients[victim] = start()
            for name, client in clients.items():
                if name != victim:
                    counts.update(client.answer())
            if turn >= options.turns // 2 and (turn + 1) % options.every == 0:
                samples.append(_sample(run.device, clients, pool))
                run.keep(counts=dict(counts), samples=samples)
    run.say(f"{options.turns} turns: {dict(counts)}")
    rows = growths(samples)
    run.table("growth, MiB or a number", rows)
    grown = [name for name, row in rows.items() if row["grown"] > row["tolerance"]]
    run.check("no figure has grown by more than its tolerance", not grown, ", ".join(grown))
    run.check(f"{FEWEST} samples or more", len(samples) >= FEWEST, len(samples))


def _sample(device: str, clients: dict[str, Process], pool: Brokers) -> dict[str, dict[str, float]]:
    rest = {name: client.ask("rest") for name, client in clients.items()}
    left = _pool_rest()
    found = {"all": {"device": clients[KEPT].ask("rest")["device"], "pool": left}}  # now that the pool is empty
    rest[KEPT].pop("device")
    found[KEPT] = rest[KEPT] | of_process(clients[KEPT].pid)
    return found | {BROKER: of_process(pool.pids[device])}


def _pool_rest() -> int:
    """The bytes of the pool, when all that is idle has returned to the driver."""
    deadline, left = time.monotonic() + WAIT_S, -1
    while left and time.monotonic() < deadline:
        with redirect_stdout(io.StringIO()) as out:
            cli.main(["trim"])
            out.truncate(0)
            out.seek(0)
            cli.main(["top", "--json"])
        left = json.loads(out.getvalue())["pools"][0]["total_bytes"]
    return left


def of_process(pid: int) -> dict[str, float]:
    memory = status(f"/proc/{pid}/status")
    descriptors, threads = (len(os.listdir(f"/proc/{pid}/{folder}")) for folder in ("fd", "task"))
    sizes = {"resident": memory["VmRSS"], "addresses": memory["VmSize"]}
    return {**sizes, "descriptors": descriptors, "threads": threads}


def growths(samples: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """A row for each figure of each holder, in MiB, or as a number. The first two samples do not count."""
    rows: dict[str, dict[str, float]] = {}
    counted = samples[2:]
    quarter = max(1, len(counted) // 4)
    for holder, figures in (counted[0] if counted else {}).items():
        for figure in figures:
            unit = 1 if figure in ("descriptors", "threads") else MIB
            series = [sample[holder][figure] / unit for sample in counted]
            first, last = statistics.median(series[:quarter]), statistics.median(series[-quarter:])
            tolerance = TOLERANCES[figure] / unit
            rows[f"{holder}, {figure}"] = {"first": first, "last": last, "grown": last - first, "tolerance": tolerance}
    return rows


@dataclass(eq=False)
class Held:
    region: memsaver.Region
    tensors: list[torch.Tensor] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


class Client:
    """Shortages, and a broker that is away, are expected by a client. Contents that differ are not."""

    def __init__(self, directory: str, sizes: tuple[int, ...], device: str) -> None:
        os.environ["MEMSAVER_POOL_DIR"] = directory
        self.device, self.sizes = device, sizes
        if device != "cpu":
            torch.cuda.set_device(device)
        memsaver.configure(pool="shared", disk_dir=directory)
        # Joins the pool. A first region of a later turn, in which the broker is dead, would start another broker.
        memsaver.region("first", device).close()
        self.held: list[Held] = []
        self._numbers = itertools.count()
        gc.freeze()  # keeps the objects of the imports out of later collections

    def turn(self, seed: str) -> dict[str, int]:
        """Some random moves, then a check of all contents. Returns the number of moves of each kind."""
        choose, counts = random.Random(seed), Counter[str]()
        for _ in range(choose.randint(4, 10)):
            [move] = choose.choices(*zip(*MOVES.items()))
            try:
                counts[move] += self._move(move, choose)
            except SHORTAGES as error:
                counts[type(error).__name__] += 1
                if isinstance(error, memsaver.BrokerError):
                    time.sleep(0.005)
        for held in self.held:
            if held.region.state == "active":
                if checksums(held.tensors) != held.sums:
                    raise AssertionError(f"contents of {held.region} differ")
                counts["checked"] += len(held.tensors)
        return dict(counts)

    def rest(self) -> Sample:
        """Releases all that can be released. Returns the rest, in bytes."""
        deadline = time.monotonic() + WAIT_S / 2
        while self.held:
            try:
                self._close(self.held[-1])
            except SHORTAGES:  # the broker was just killed
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        gc.collect()
        for _ in range(2):  # twice: memory may be pinned in advance meanwhile
            memsaver.release_host_memory()
            if self.device != "cpu":
                torch.cuda.empty_cache()
        stats = memsaver.stats()
        row = stats.devices[self.device]
        return {"device": (row.total_bytes or 0) - (row.free_bytes or 0), "pinned": row.host_held_bytes,
                "disk": row.disk_held_bytes, "unreleased": stats.unreleased_bytes}  # fmt: skip

    def _move(self, move: str, choose: random.Random) -> bool:
        """Whether there was anything to do."""
        if move == "new":
            if len(self.held) < MOST_REGIONS:
                tag = f"region {os.getpid()}-{next(self._numbers)}"
                self.held.append(Held(memsaver.region(tag, self.device, choose.choice(POLICIES))))
            return True
        active, paused = ([held for held in self.held if held.region.state == state] for state in ("active", "paused"))
        full = [held for held in (self.held if move == "free" else active) if held.tensors]
        kinds = {"resume": paused, "close": self.held, "free": full, "write": full, "switch": active if paused else []}
        if not (found := kinds.get(move, active)):
            return False
        held = into = choose.choice(found)
        at = choose.randrange(len(held.tensors)) if held.tensors else 0
        try:
            if move == "allocate":
                held.tensors.append(held.region.empty((choose.choice(self.sizes) // 8,), torch.int64))
                held.sums.append(0)
                _write_anew(held, len(held.tensors) - 1)
            elif move == "free":
                del held.tensors[at], held.sums[at]
            elif move == "write":
                held.tensors[at].add_(choose.randrange(1, 1000) << 22)
                held.sums[at : at + 1] = checksums([held.tensors[at]])
            elif move == "pause":
                held.region.pause()
            elif move == "trim":
                memsaver.trim(held.region.tag)
            elif move == "close":
                self._close(held)
            elif move == "resume":
                held.region.resume(memory_timeout=choose.choice((0, 0.02, 0.2)))
            else:
                into = choose.choice(paused)
                memsaver.switch(pause=held.region.tag, resume=into.region.tag, memory_timeout=choose.choice((0, 0.02)))
        finally:  # also of a switch whose second half failed
            if move in ("resume", "switch") and into.region.state == "active" and into.region.backup == "none":
                _write_anew(into)
        return True

    def _close(self, held: Held) -> None:
        held.tensors.clear()
        held.sums.clear()
        held.region.close()
        self.held.remove(held)


def _write_anew(held: Held, begin: int = 0) -> None:
    """Checks that memory without contents has words of this process alone, and zeros. Then writes it.

    A function of its own: a local variable would keep a tensor as long as the traceback of an error.
    """
    for tensor in held.tensors[begin:]:
        strange = int(((tensor != 0) & ((tensor & OWN) != os.getpid())).sum())
        if strange:
            raise AssertionError(f"{strange} of {len(tensor)} words in memory of {held.region} are of other processes")
        tensor.random_(1 << 40).mul_(1 << 22).add_(os.getpid())
    held.sums[begin:] = checksums(held.tensors[begin:])
