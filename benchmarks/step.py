"""Steps of the RL example, its memory by memsaver and by other ways: `python -m examples.colocate --memory WAY`.

Each way is a run of the example, one after the other, with its checks. Seconds are medians of the steps after the
first; "turns" is the time in which the GPU waits for a hand-over, without the turn that is a check. Host memory is what
the machine has less at the lowest than before the run. The wait for late regions is a part of the training; bytes are
those of the turns alone. `--model` takes a Hugging Face folder. On the CPU the example's smallest recipe counts bytes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options, Run, count
from benchmarks.harness.machine import GIB, status

DEVICES = ("cuda", "cpu")
WAYS = {
    "memsaver": (),
    "memsaver, lazy": (),
    "memsaver, late": ("--late",),
    "memsaver, vLLM": ("--engine", "vllm"),
    **{each: ("--memory", each) for each in ("driver", "torch_memory_saver", "to-cpu", "resident")},
    "to-cpu, vLLM": ("--memory", "to-cpu", "--engine", "vllm"),
}
VARIABLES = {"memsaver, lazy": {"MEMSAVER_LAZY": "1"}}
CHECK = "away"  # a turn that only the checks of the example need
NOT_LEARNED = 4  # exit status of the example, as of most short runs


def options(parser: Options) -> None:
    parser.add_argument("--model", metavar="DIR", help="by default the example's own recipe")
    parser.add_argument("--steps", type=count, default=3, help="of each run, the first of which is left out")
    parser.add_argument("--with", dest="more", default="", metavar="TEXT", help="further options of the example")
    parser.choice("--only", WAYS, "the ways")


def measure(run: Run) -> None:
    rows, lines = dict[str, Any](), dict[str, Any]()
    for way in run.options.only:
        if (found := run.attempt(way, partial(ran, run, way))) is not None:
            rows[way], lines[way] = found
            run.say(f"{way}: {rows[way]}")
    run.table("a step", rows)
    run.keep(lines=lines)


def arguments(given: Any, way: str) -> list[str]:
    """Of the example, but for the log."""
    model = ["--model", given.model] if given.model else ["--recipe", "tiny"] if given.small else []
    return [*WAYS[way], "--device", given.device, "--steps", str(given.steps), *model, *given.more.split()]


def ran(run: Run, way: str) -> tuple[Mapping[str, Any], list[Any]]:
    """The row of a way, and all lines of its log."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "output").open("w+") as output:
        log, environ = Path(folder, "log"), os.environ | VARIABLES.get(way, {})
        command = [sys.executable, "-m", "examples.colocate", "--log", str(log), *arguments(run.options, way)]
        before = least = status("/proc/meminfo")["MemAvailable"]
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            least = min(least, status("/proc/meminfo")["MemAvailable"])
            time.sleep(0.2)
        if process.returncode not in (0, NOT_LEARNED):
            output.seek(0)
            raise RuntimeError(f"status {process.returncode}: {output.read()[-2000:]}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {**row(lines, way), "host, GiB": (before - least) / GIB}, lines


def row(lines: list[Any], way: str) -> dict[str, Any]:
    steps = (found := [line for line in lines if "step" in line])[1:] or found
    parts = {part: statistics.median(step["seconds"][part] for step in steps) for part in ("rollout", "train", "sync")}
    parts["turns"] = statistics.median(sum({**step["seconds"]["turns"], CHECK: 0.0}.values()) for step in steps)
    moved = [sum(map(sum, {**step["moved"], CHECK: ()}.values())) for step in steps]
    whole = sum(parts.values())
    return {
        **{f"{part}, s": seconds for part, seconds in parts.items()},
        "all, s": whole,
        "turns, %": 100 * parts["turns"] / whole,
        "KV tokens": next(line["kv_tokens"] for line in lines if "kv_tokens" in line),
        "copied, GiB": statistics.median(moved) / GIB if way.startswith(("memsaver", "driver")) else None,
        "tokens/s": statistics.median(step["tokens"] for step in steps) / whole,
    }
