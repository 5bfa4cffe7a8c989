"""A trial: torch's default pool, with expandable segments, as memory that can leave the device and return.

    python benchmarks/default_pool.py [--cap-gib 12] [--steps 50] [--rounds 4] [--segments-mib 128]

default_pool.c is compiled and preloaded into a trainer ("taken"). It takes the place of the driver's functions that
torch fetches through cudaGetDriverEntryPointByVersion. Another trainer has plain torch ("plain"). Both have
expandable segments, the same seed, and a cap of device memory. Prints one JSON line with:

- speed: seconds of --steps steps of varied lengths, from an empty cache on, in turns. Wanted: at most 1 % more,
  as the median of the pairs' ratios.
- largest_...: the largest micro-batch with which so many steps have enough memory. "limited" has no cap in torch:
  cuMemCreate fails at the same bytes. Wanted: at least 97 % of plain torch's.
- pauses: of everything in the pool. Seconds by stage, bytes that left the device by nvidia-smi, and whether the losses
  of all following steps equal plain torch's. "live" copies chunks with a block in use to the host, "all" every chunk;
  "emptied" calls empty_cache() while the memory is away. "none" keeps no contents.
- recovery: torch frees cached blocks and tries again when the driver has no memory; no unmapping beside queued work.
- segments_N: the same pauses with other sizes of torch's pieces (large_segment_size_mb).

"holds" says for each condition whether it was met. No other program may use the device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import count, parse, parser_for, positive
from environment import environment, nvidia_smi
from host import GIB, MIB
from processes import last_line

HERE = Path(__file__).resolve().parent
Reply = dict[str, Any]
SPEED, BATCH, RELEASED = 0.01, 0.97, 0.99  # the bounds of the conditions


def compiled(folder: str) -> str:
    """The library's path. Ends the benchmark where there is no compiler."""
    library = os.path.join(folder, "libdefault_pool.so")
    flags = ["-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"]
    compiler = os.environ.get("CC", "gcc")
    try:
        subprocess.run([compiler, *flags, str(HERE / "default_pool.c"), "-o", library, "-ldl"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{compiler} has not compiled default_pool.c: {error}") from None
    return library


class Failed(Exception):
    """A trainer's request that failed: its error, in one line."""


class Process:
    """A trainer's process. ``segment_mib``: the size of the pieces of torch's large segments, where not torch's own."""

    def __init__(self, name: str, library: str | None, segment_mib: int | None = None) -> None:
        self.name = name
        settings = "expandable_segments:True" + (f",large_segment_size_mb:{segment_mib}" if segment_mib else "")
        changes = {"PYTORCH_ALLOC_CONF": settings, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # of one size: deterministic
        if library:
            changes["LD_PRELOAD"] = " ".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
        self._log = tempfile.NamedTemporaryFile(prefix=f"default-pool-{name}-")  # noqa: SIM115  (until close())
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "default_pool_trainer.py")],
            env={**{name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}, **changes},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def send(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"do": do, **arguments}) + "\n").encode())
            self._process.stdin.flush()
        except OSError:  # it has ended, and reply() says how
            pass

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
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def used_bytes() -> int:
    """Of the whole device, by nvidia-smi."""
    return int(nvidia_smi("cuda:0", "--query-gpu=memory.used")[0]) * MIB


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
    probes: dict[int, bool] = {}

    def fits(batch: int) -> bool:
        if batch not in probes:
            probes[batch] = batch < 1 or process.ask("fits", batch=batch, count=steps)["fits"]
        return probes[batch]

    stride = max(1, near // 24)
    low = high = near
    while not fits(low):
        low = max(0, low - stride)
    while fits(high):
        high += stride
    low = max(batch for batch, fit in probes.items() if fit)
    high = min(batch for batch, fit in probes.items() if not fit and batch > low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"batch": low, "probes": {str(batch): fit for batch, fit in sorted(probes.items())}}


def pauses(process: Process, expected: list[str], batch: int, kinds: tuple[str, ...]) -> Reply:
    """Pauses before every part of the steps whose losses are expected, but the first; at the end one without backup."""
    part = len(expected) // (len(kinds) + 1)
    process.ask("reset")
    losses = process.ask("steps", batch=batch, count=part, empty=True)["losses"]
    rounds = []
    for kind in (*kinds, "none"):
        before = used_bytes()
        left = process.ask("pause", backup="live" if kind == "emptied" else kind)
        if kind == "emptied":
            process.ask("empty_cache")
        away = used_bytes()
        stats = process.ask("stats")
        back = process.ask("resume")
        smi = {"before": before, "paused": away, "resumed": used_bytes(), "released": before - away}
        each = {"kind": kind, "pause": left, "resume": back, "smi_bytes": smi, "chunks_by_mib": stats["chunks_by_mib"]}
        if kind == "none":  # the parameters are lost
            process.ask("reset")
        else:
            found = process.ask("steps", batch=batch, count=part)
            losses += found["losses"]
            each["steps_s"] = found["seconds"]
        rounds.append(each)
    return {"batch": batch, "rounds": rounds, "losses_equal": losses == expected[: len(losses)], "steps": len(losses)}


def trial(options: argparse.Namespace, library: str) -> Reply:
    cap_bytes = int(options.cap_gib * GIB)
    processes = [Process("plain", None), Process("taken", library)]
    processes += [Process(f"taken-{mib}", library, mib) for mib in options.segments_mib]
    plain, taken, *others = processes
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

    try:
        for process in processes:
            process.send("begin", cap_gib=options.cap_gib, library=None if process is plain else library)
        for process in (plain, taken):
            process.reply(120)
        near = guess(plain, cap_bytes, options.batch, options.steps)
        batch = max(1, int(0.8 * near))
        plain.ask("reset")
        expected = plain.ask("steps", batch=batch, count=options.steps, empty=True)["losses"]
        attempt("pauses", lambda: pauses(taken, expected, batch, ("live", "live", "all", "emptied")))
        attempt("recovery", lambda: taken.ask("recovery", spare_bytes=4 * GIB))
        attempt("speed", lambda: speed(plain, taken, batch, options))
        most = attempt("largest_plain", lambda: largest(plain, near, options.steps)).get("batch", near)
        attempt("largest_taken", lambda: largest(taken, most, options.steps))
        attempt("largest_limited", lambda: limited(taken, most, cap_bytes, options))
        attempt("stats", lambda: taken.ask("stats"))
        for process, mib in zip(others, options.segments_mib):
            attempt(f"segments_{mib}", functools.partial(segments, process, expected, batch, most, options))
    finally:
        for process in processes:
            process.close()
    return {**result, "holds": holds(result)}


def limited(process: Process, near: int, cap_bytes: int, options: argparse.Namespace) -> Reply:
    """The driver's functions refuse at the cap, and torch's own cap is out of the way."""
    process.ask("fraction", cap_gib=1e6)
    process.ask("limit", nbytes=cap_bytes)
    try:
        return largest(process, near, options.steps)
    finally:
        process.ask("limit", nbytes=0)
        process.ask("fraction", cap_gib=options.cap_gib)


def segments(process: Process, expected: list[str], batch: int, most: int, options: argparse.Namespace) -> Reply:
    process.reply(120)
    reply = pauses(process, expected, batch, ("live", "live"))
    for share in (1.0, BATCH):
        found = process.ask("fits", batch=int(share * most), count=options.steps)
        reply[f"fits_{share}_of_largest"] = found["fits"]
    return reply


def holds(result: Reply) -> dict[str, bool]:
    most = {name: result[f"largest_{name}"].get("batch", 0) for name in ("plain", "taken", "limited")}
    rounds = result["pauses"].get("rounds", [])
    recovery = result["recovery"]
    return {
        "speed": result["speed"].get("ratio", 2.0) <= 1 + SPEED,
        "batch": most["plain"] > 0 and min(most["taken"], most["limited"]) >= BATCH * most["plain"],
        "losses": bool(result["speed"].get("losses_equal")) and bool(result["pauses"].get("losses_equal")),
        "memory": bool(rounds)
        and all(each["smi_bytes"]["released"] >= RELEASED * each["pause"]["reserved_bytes"] for each in rounds),
        "recovery": bool(recovery.get("contents_right"))
        and bool(recovery.get("too_much_raised"))
        and recovery["retries"] > 0
        and recovery["refused_by_limit"] > 0
        and recovery["checked_unmaps"] > 0
        and recovery["busy_unmaps"] == 0,
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--cap-gib", type=positive, default=12.0, help="device memory of each trainer")
    parser.add_argument("--steps", type=count, default=50, help="of a round, each of another length")
    parser.add_argument("--rounds", type=count, default=4, help="of the comparison of speeds")
    parser.add_argument("--batch", type=count, default=16, help="the first that is tried; it must fit twice")
    parser.add_argument("--segments-mib", type=count, nargs="*", default=[128], help="sizes of torch's pieces")
    options = parse(parser)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="default-pool-") as folder:
        try:
            found = trial(options, compiled(folder))
        except Failed as error:
            raise SystemExit(str(error)) from None
    result = {"benchmark": "default_pool", **environment(), "cap_gib": options.cap_gib, "steps": options.steps}
    print(json.dumps({**result, **found, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
