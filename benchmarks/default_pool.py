"""torch's default pool, with expandable segments, as a region: its speed, its room, and its pauses.

    python benchmarks/default_pool.py [--cap-gib 12] [--steps 50] [--rounds 4] [--batch 16]

Trainers of one seed, each in a process of its own. "plain" has torch with expandable segments, and no memsaver.
"taken" calls memsaver.default_pool() before its first allocation. "shared" does so too, and takes its memory from a
shared pool. torch has a cap of device memory in the first two. In "shared" the capacity of the pool is the cap.
Prints one JSON line with:

- pauses: of "taken". Seconds, bytes that left the device by nvidia-smi, torch's reserved bytes before, and chunks by
  size. The losses of all following steps are compared with plain torch's. "host" is the region's own policy, which
  copies blocks in use. "emptied" also calls torch.cuda.empty_cache() while the memory is away. "none" keeps no
  contents, and a new trainer follows. During each pause torch allocates a tensor, whose contents are compared after
  the resume.
- recovery: of "shared". The broker refuses memory, torch frees its cached blocks and tries again.
- speed: seconds of --steps steps of varied lengths in "plain" and "taken", from an empty cache on, in turns. Wanted: at
  most 1 % more, as the median of the pairs' ratios.
- largest_...: the largest micro-batch with which so many steps have enough memory, and the steps of each batch that was
  tried. Wanted: at least 97 % of "plain".

"holds" says for each condition whether it was met. No other program may use the device.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from support.arguments import count, parse, parser_for, positive
from support.broker import broker
from support.environment import environment, nvidia_smi
from support.host import GIB, MIB
from support.processes import last_line, search_path

Reply = dict[str, Any]
SPEED, BATCH, RELEASED = 0.01, 0.97, 0.99  # the bounds of the conditions
TRAINERS = ("plain", "taken", "shared")
PAUSES = ("host", "host", "emptied")  # each with steps before and after it. Last comes one with "none"
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Failed(Exception):
    """A trainer's request that failed: its error, in one line."""


class Process:
    """A trainer's process. ``variables``: of its environment, beside this process's."""

    def __init__(self, name: str, **variables: str) -> None:
        self.name = name
        inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        environ = {"PYTHONPATH": search_path(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # a workspace of one size
        self._log = tempfile.NamedTemporaryFile(prefix=f"default-pool-{name}-")  # noqa: SIM115  (until close())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "support.default_pool_trainer"],  # -P: not of the current directory
            env={**inherited, **environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def send(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, and reply() says how
            self._process.stdin.write((json.dumps({"do": do, **arguments}) + "\n").encode())
            self._process.stdin.flush()

    def reply(self, timeout_s: float = 60.0) -> Reply:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise Failed(f"{self.name}: no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(10)
            with open(self._log.name, errors="replace") as log:
                raise Failed(f"{self.name}: ended with {self._process.returncode}: {last_line(log.read())}")
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise Failed(f"{self.name}: {reply['error']}")
        return reply

    def ask(self, do: str, **arguments: object) -> Reply:
        self.send(do, **arguments)
        return self.reply()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # a request that it has not read
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def smi_bytes(figure: str = "used") -> int:
    """Of the whole device, by nvidia-smi."""
    return int(nvidia_smi("cuda:0", f"--query-gpu=memory.{figure}")[0]) * MIB


def speed(plain: Process, taken: Process, batch: int, options: argparse.Namespace) -> Reply:
    """Rounds in the order plain, taken, taken, plain, ... The first of each is not counted."""
    seconds: dict[str, list[float]] = {"plain": [], "taken": []}
    losses = {}
    for number in range(options.rounds + 1):
        for process in (plain, taken) if number % 2 == 0 else (taken, plain):
            process.ask("reset")
            found = process.ask("steps", batch=batch, count=options.steps, empty=True)
            losses[process.name] = found["losses"]
            if number > 0:
                seconds[process.name].append(found["seconds"])
    ratios = [one / other for one, other in zip(seconds["taken"], seconds["plain"])]
    return {
        "batch": batch,
        "seconds": seconds,
        "steps_per_s": {name: options.steps / statistics.median(each) for name, each in seconds.items()},
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "losses_equal": losses["plain"] == losses["taken"],
    }


def guess(process: Process, cap_bytes: int, batch: int, steps: int) -> int:
    """The batch at which the peak should reach the cap, by the peaks of two smaller ones."""
    peaks = []
    for each in (batch, 2 * batch):
        process.ask("reset")
        peaks.append(process.ask("steps", batch=each, count=steps, empty=True)["peak_bytes"]["reserved"])
    return max(2, int(batch + batch * (cap_bytes - peaks[0]) / max(1, peaks[1] - peaks[0])))


def largest(process: Process, near: int, steps: int) -> Reply:
    """By halving between a batch that fits and one that does not; the first two are sought around ``near``."""
    probes: dict[int, Reply] = {0: {"fits": True}}

    def fits(batch: int) -> bool:
        if batch not in probes:
            probes[batch] = process.ask("fits", batch=batch, count=steps)
        return bool(probes[batch]["fits"])

    stride = max(1, near // 24)
    low = high = near
    while not fits(low):
        low = max(0, low - stride)
    while fits(high):
        high += stride
    low = max(batch for batch, probe in probes.items() if probe["fits"])
    high = min(batch for batch, probe in probes.items() if not probe["fits"] and batch > low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"batch": low, "probes": {str(batch): probes[batch] for batch in sorted(probes) if batch > 0}}


def pauses(process: Process, expected: list[str], batch: int) -> Reply:
    """Pauses before every part of the steps whose losses are expected, but the first; at the end one without backup."""
    part = len(expected) // (len(PAUSES) + 1)
    process.ask("reset")
    losses = process.ask("steps", batch=batch, count=part, empty=True)["losses"]
    equal, rounds = losses == expected[:part], []
    for number, kind in enumerate((*PAUSES, "none"), 1):
        before = smi_bytes()
        left = process.ask("pause", backup="none" if kind == "none" else None)
        away = smi_bytes()
        process.ask("allocate", value=number)
        emptied = process.ask("empty_cache") if kind == "emptied" else None
        back = process.ask("resume")
        contents = process.ask("check", value=number)
        smi = {"before": before, "paused": away, "resumed": smi_bytes(), "released": before - away}
        if kind == "none":  # the parameters are lost
            process.ask("reset")
            losses = []
        found = process.ask("steps", batch=batch, count=part)
        losses += found["losses"]
        equal = equal and losses == expected[: len(losses)]
        each = {"kind": kind, "pause": left, "resume": back, "smi_bytes": smi, "allocated": contents}
        rounds.append({**each, "emptied": emptied, "steps_s": found["seconds"]})
    return {"batch": batch, "rounds": rounds, "losses_equal": equal, "steps": part * (len(PAUSES) + 2)}


def measure(options: argparse.Namespace, plain: Process, taken: Process, shared: Process) -> Reply:
    cap_bytes = int(options.cap_gib * GIB)
    result: Reply = {}

    def attempt(name: str, part: Callable[[], Reply]) -> Reply:
        """Keeps and prints a part's result, or its error: the other parts go on."""
        begin = time.monotonic()
        try:
            found = part()
        except Failed as error:
            found = {"error": str(error)}
        result[name] = {**found, "part_s": time.monotonic() - begin}
        print(f"{name}: {json.dumps(result[name])}", flush=True)
        return found

    for process in (plain, taken, shared):
        process.send("begin", kind=process.name, cap_gib=options.cap_gib)
    for process in (plain, taken, shared):
        process.reply(120)
    near = guess(plain, cap_bytes, options.batch, options.steps)
    batch = max(1, int(0.8 * near))
    plain.ask("reset")
    expected = plain.ask("steps", batch=batch, count=options.steps, empty=True)["losses"]
    attempt("pauses", lambda: pauses(taken, expected, batch))
    attempt("recovery", lambda: shared.ask("recovery", cap_bytes=cap_bytes))
    attempt("speed", lambda: speed(plain, taken, batch, options))
    most = attempt("largest_plain", lambda: largest(plain, near, options.steps)).get("batch", near)
    attempt("largest_taken", lambda: largest(taken, most, options.steps))
    attempt("largest_shared", lambda: largest(shared, most, options.steps))
    return {**result, "holds": holds(result, cap_bytes)}


def of_default_pool(pause: Reply) -> int:
    """torch's reserved bytes without those of other pools, which stay: pools of earlier pauses have cached memory."""
    return int(pause["reserved_bytes"] - pause["other_pools_bytes"])


def holds(result: Reply, cap_bytes: int) -> dict[str, bool]:
    most = {name: result[f"largest_{name}"].get("batch", 0) for name in TRAINERS}
    rounds = result["pauses"].get("rounds", [])
    recovery = result["recovery"]
    return {
        "speed": result["speed"].get("ratio", 2.0) <= 1 + SPEED,
        "batch": most["plain"] > 0 and min(most["taken"], most["shared"]) >= BATCH * most["plain"],
        "losses": bool(result["speed"].get("losses_equal")) and bool(result["pauses"].get("losses_equal")),
        "memory": bool(rounds)
        and all(each["smi_bytes"]["released"] >= RELEASED * of_default_pool(each["pause"]) for each in rounds),
        "allocated": bool(rounds)
        and all(each["allocated"]["contents_right"] and each["allocated"]["outside"] for each in rounds),
        "recovery": bool(recovery.get("contents_right"))
        and bool(recovery.get("too_much_raised"))
        and recovery["retries"] > 0
        and recovery["peak_bytes"] <= cap_bytes,
    }


def trainers(options: argparse.Namespace) -> Reply:
    with broker("cuda:0", int(options.cap_gib * GIB)) as directory:
        processes = [
            Process("plain", PYTORCH_ALLOC_CONF="expandable_segments:True"),
            Process("taken"),
            Process("shared", MEMSAVER_POOL_DIR=directory),
        ]
        try:
            return measure(options, *processes)
        finally:
            for process in processes:
                process.close()


def enough_steps(text: str) -> int:
    fewest = len(PAUSES) + 1
    if count(text) < fewest:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of {fewest} or more: one for each pause")
    return int(text)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--cap-gib", type=positive, default=12.0, help="device memory of each trainer")
    parser.add_argument("--steps", type=enough_steps, default=50, help="of a round, each of another length")
    parser.add_argument("--rounds", type=count, default=4, help="of the comparison of speeds")
    parser.add_argument("--batch", type=count, default=16, help="the first that is tried; it must fit twice")
    options = parse(parser)
    begin = time.monotonic()
    total = smi_bytes("total")
    if len(TRAINERS) * options.cap_gib * GIB > total:
        raise SystemExit(f"--cap-gib is {options.cap_gib:g}, expected less than a third of {total / GIB:.0f} GiB")
    try:
        found = trainers(options)
    except Failed as error:
        raise SystemExit(str(error)) from None
    result = {"benchmark": "default_pool", **environment(), "cap_gib": options.cap_gib, "steps": options.steps}
    print(json.dumps({**result, **found, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
