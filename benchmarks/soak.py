"""A soak: random regions, frees and kills over two clients of a shared pool and its broker, and nothing may grow.

    python benchmarks/soak.py [--state soak.json] [--turns 2000] [--seconds 500] [--every 20] [--device cuda:0]

In a turn both clients make some random moves at once (new regions with every policy, allocations, frees, writes,
pauses, resumes, switches, trims, closed regions), and compare a checksum of each tensor in memory. The pool is too
small for both. In the first half of the turns each of the three processes is killed now and then; in the second half
one client alone is, and the other two processes are sampled. Every ``--every`` turns the clients release all that
they have, and the rest is sampled: device memory, pool, pinned memory, files, resident memory, addresses, descriptors,
threads.

A call ends after ``--seconds``; the same call goes on from the state in the file, with new processes. When all turns
are done, a table compares medians of the first and the last quarter of the second half's samples; where several calls
made these, their growths are added up. Then one JSON line. The exit status is 1 where a figure has grown by more than
its tolerance, a tensor's contents differ, or a process fails. ``--small``, and the host driver (``--device cpu``), have
small tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from memsaver.broker import discovery
from memsaver.broker.admin import AdminClient
from support.arguments import add_device, add_small, count, parse, parser_for, positive
from support.environment import environment
from support.footprint import HEAD, counted, growths, of_process
from support.host import MIB
from support.processes import CONTEXT
from support.soak_client import Setting, serve

NAMES = ("client a", "client b")
BROKER = "broker"
KILLED_IN_A_TURN = 1 / 30
PATIENCE_S = 60.0
SIZES = (MIB // 2, 3 * MIB, 20 * MIB, 64 * MIB), 768 * MIB  # of tensors, and of the pool
SMALL_SIZES = (64 << 10, MIB // 2, 3 * MIB), 32 * MIB


class Failure(Exception):
    """Something that the soak is there to find."""


class Broker:
    def __init__(self, device: str, capacity: int, directory: str) -> None:
        self._command = [sys.executable, "-m", "memsaver", "broker", "--device", device, "--capacity", str(capacity)]
        self._directory = Path(directory)
        self.start()

    def start(self) -> None:
        environ = {**os.environ, "MEMSAVER_POOL_DIR": str(self._directory)}
        with open(self._directory / "broker.log", "ab") as log:
            self._process = subprocess.Popen(self._command, env=environ, stderr=log)
        self.pid = self._process.pid
        until(lambda: self._path() is not None or self._process.poll() is not None, "the broker does not start")
        if self._process.poll() is not None:
            raise Failure(f"the broker ended with {self._process.returncode}: {self.last_words()}")

    def _path(self) -> Path | None:
        return next((path for path in self._directory.glob("*.sock") if discovery.accepts(path)), None)

    def last_words(self) -> str:
        return (self._directory / "broker.log").read_text()[-2000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def rest(self) -> dict[str, int]:
        """The pool's bytes, when all that is idle went back to the driver."""
        path = self._path()
        if path is None:
            raise Failure(f"the broker has gone: {self.last_words()}")
        with AdminClient(path) as admin:

            def is_given_back() -> bool:
                pool = admin.status()
                return bool(pool["idle_bytes"] == pool["total_bytes"] and pool["leaving_bytes"] == 0)

            until(is_given_back, "clients at rest hold memory of the pool")
            admin.release_idle(0)
            until(lambda: admin.status()["total_bytes"] == 0, "idle memory of the pool does not go")
            return {"pool": admin.status()["total_bytes"]}


class Client:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.start()

    def start(self) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=serve, args=(theirs, self._setting), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = int(self.hear()["ready"])

    def say(self, *request: str) -> None:
        self._connection.send(request)

    def hear(self) -> dict[str, int]:
        if not self._connection.poll(PATIENCE_S):
            raise Failure(f"process {self._process.pid} does not answer within {PATIENCE_S:.0f} s")
        try:
            reply: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(PATIENCE_S)
            words = Path(self._setting.log).read_text()[-4000:]
            raise Failure(f"process {self._process.pid} has ended ({self.ending()}): {words}") from None
        if "error" in reply:
            raise Failure(reply["error"])
        return reply

    def ending(self) -> str:
        status = self._process.exitcode
        if status is None or status >= 0:
            return f"exit status {status}"
        return signal.Signals(-status).name

    def kill(self) -> None:
        assert self._process.pid is not None  # it was started
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._connection.close()


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(f"{what} within {PATIENCE_S:.0f} s")
        time.sleep(0.005)


class Soak:
    """The processes of one call."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.options = options
        sizes, capacity = SMALL_SIZES if options.small else SIZES
        self.broker = Broker(options.device, capacity, directory)
        self.clients: dict[str, Client] = {}
        try:
            for name in NAMES:
                setting = Setting(options.device, directory, directory, f"{directory}/{name}.log", sizes)
                self.clients[name] = Client(setting)
        except BaseException:
            self.close()
            raise

    def turn(self, number: int) -> Counter[str]:
        choose = random.Random(f"{self.options.seed} {number}")
        victim = None
        if choose.random() < KILLED_IN_A_TURN:
            victim = choose.choice((*NAMES, BROKER)) if number < self.options.turns // 2 else NAMES[1]
        counts: Counter[str] = Counter()
        for name, client in self.clients.items():
            client.say("turn", f"{self.options.seed} {number} {name}")
        if victim is not None:
            counts[f"kills of {victim}"] += 1
            time.sleep(choose.random() * 0.03)
            process = self.broker if victim == BROKER else self.clients[victim]
            process.kill()
            process.start()
        for name, client in self.clients.items():
            if name != victim:
                counts.update(client.hear())
        return counts

    def sample(self) -> dict[str, dict[str, int]]:
        for client in self.clients.values():
            client.say("rest")
        figures = {name: client.hear() for name, client in self.clients.items()}
        pool = self.broker.rest()
        keeper = self.clients[NAMES[0]]
        keeper.say("rest")  # its figure of the device, now that the pool is empty
        device = keeper.hear()["device"]
        sample = {"all": {"device": device, **pool}}
        for name, client in self.clients.items():
            figures[name].pop("device")
            sample[name] = {**figures[name], **of_process(client.pid)}
        sample[BROKER] = of_process(self.broker.pid)
        return sample

    def close(self) -> None:
        for client in self.clients.values():
            client.kill()
        self.broker.kill()


class State:
    """The state between calls: the settings, turns done, counts, and samples as (call, turn, figures)."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path = path
        settings = {name: getattr(options, name) for name in ("turns", "every", "seed", "device", "small")}
        self.record: dict[str, Any] = {"settings": settings, "turn": 0, "calls": [], "counts": {}, "samples": []}
        if path.exists():
            self.record = json.loads(path.read_text())
            if self.record["settings"] != settings:
                raise SystemExit(f"{path} is of a soak with {self.record['settings']}, this is one with {settings}")

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.record))
        new.replace(self.path)

    def runs(self) -> list[list[dict[str, Any]]]:
        """The samples of the second half, those of each call together, without the client that is killed there."""
        half = self.record["settings"]["turns"] // 2
        runs: dict[int, list[dict[str, Any]]] = {}
        for call, turn, figures in self.record["samples"]:
            if turn > half:
                runs.setdefault(call, []).append({name: each for name, each in figures.items() if name != NAMES[1]})
        return list(runs.values())


def run(state: State, options: argparse.Namespace) -> str | None:
    """Turns until all are done or the time is over. Returns the failures."""
    record = state.record
    begin = time.monotonic()
    call = {**environment(options.device), "from": record["turn"]}
    record["calls"].append(call)
    failed = None
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ms"))  # short: a socket's path is in it
        try:
            soak = Soak(options, directory)
            stack.callback(soak.close)
            while record["turn"] < options.turns and time.monotonic() - begin < options.seconds:
                counts = soak.turn(record["turn"])
                record["counts"] = dict(Counter(record["counts"]) + counts)
                record["turn"] += 1
                if record["turn"] % options.every == 0:
                    record["samples"].append((len(record["calls"]), record["turn"], soak.sample()))
                    state.save()
        except Failure as failure:
            failed = f"turn {record['turn']}: {failure}"
    call.update(to=record["turn"], seconds=time.monotonic() - begin, failed=failed)
    state.save()
    return failed


def report(state: State, options: argparse.Namespace) -> bool:
    """The table, when all turns are done. Returns whether nothing has grown."""
    runs = state.runs()
    looked_at, expected = counted(runs), options.turns // 2 // options.every
    found = growths(runs)
    print(HEAD)
    for growth in found:
        print(growth.text())
    print(f"{looked_at} of the second half's {expected} samples count")
    if looked_at < expected // 2:
        print("too few: calls that end in the second half must be longer")
    rows = [{**vars(growth), "tolerance": growth.tolerance} for growth in found]
    result = {"benchmark": "soak", **state.record["settings"], **environment(options.device)}
    print(json.dumps({**result, "calls": state.record["calls"], "counts": state.record["counts"], "growth": rows}))
    return looked_at >= expected // 2 and not any(growth.is_too_much for growth in found)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--state", type=Path, default=Path("soak.json"), help="made by the first call (default: %(default)s)"
    )
    parser.add_argument("--turns", type=count, default=2000)
    parser.add_argument("--seconds", type=positive, default=500.0, help="after which this call ends")
    parser.add_argument("--every", type=count, default=20, help="turns between two samples")
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    add_small(parser)
    options = parse(parser)
    if options.device == "cpu":  # a host device of this soak's own, for all of its processes
        os.environ["MEMSAVER_HOST_DEVICE"] = str((1 << 30) + os.getpid() % 100_000 * 2 * MIB)
    state = State(options.state, options)
    failed = run(state, options) if state.record["turn"] < options.turns else None
    call = state.record["calls"][-1]
    print(
        f"turns {call['from']} to {call['to']} of {options.turns} in {call['seconds']:.0f} s; {state.record['counts']}"
    )
    if failed is not None:
        sys.exit(failed)
    if state.record["turn"] < options.turns:
        print("unfinished: the same call goes on")
    elif not report(state, options):
        sys.exit(1)


if __name__ == "__main__":
    main()
