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
    "torch_memory_saver": ("--memory", "torch_memory_saver"),
    "to-cpu": ("--memory", "to-cpu"),
    "resident": ("--memory", "resident"),
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


def ran(run: Run, way: str) -> tuple[Mapping[str, Any], list[Any]]:
    """The row of a way, and all lines of its log."""
    with tempfile.TemporaryDirectory() as folder:
        log, command = Path(folder, "log"), [sys.executable, "-m", "examples.colocate", *WAYS[way], "--log"]
        command += [str(log), "--device", run.options.device, "--steps", str(run.options.steps)]
        command += ["--model", run.options.model] if run.options.model else []
        command += ["--recipe", "tiny"] if run.small and not run.options.model else []
        before = least = status("/proc/meminfo")["MemAvailable"]
        with Path(folder, "output").open("w+") as output:
            process = subprocess.Popen(
                [*command, *run.options.more.split()],
                env=os.environ | VARIABLES.get(way, {}), stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            while process.poll() is None:
                least = min(least, status("/proc/meminfo")["MemAvailable"])
                time.sleep(0.2)
            if process.returncode not in (0, NOT_LEARNED):
                output.seek(0)
                raise RuntimeError(f"status {process.returncode}: {output.read()[-2000:]}")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if "step" in line][min(1, run.options.steps - 1) :]
    tokens = next(line["kv_tokens"] for line in lines if "kv_tokens" in line)
    parts = {part: statistics.median(step["seconds"][part] for step in steps) for part in ("rollout", "train", "sync")}
    parts["turns"] = statistics.median(
        sum(seconds for phase, seconds in step["seconds"]["turns"].items() if phase != CHECK) for step in steps
    )
    moved = [sum(sum(both) for phase, both in step["moved"].items() if phase != CHECK) for step in steps]
    whole = sum(parts.values())
    return {
        **{f"{part}, s": seconds for part, seconds in parts.items()},
        "all, s": whole,
        "turns, %": 100 * parts["turns"] / whole,
        "KV tokens": tokens,
        "copied, GiB": statistics.median(moved) / GIB if way.startswith("memsaver") else None,
        "tokens/s": statistics.median(step["tokens"] for step in steps) / whole,
        "host, GiB": (before - least) / GIB,
    }, lines
