"""Benchmarks as commands on the host driver, with contents that are spoiled, and on engines that are made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The smallest run of each benchmark that has a host device, and titles of its tables.
RUNS = {
    "pause_resume --scale 0.001 --cycles 1": ["with backup 'host'", "first pause", "out and in", "region to region"],
    "handover --scale 0.0001 --cycles 1 --rounds 1": ["4 MiB without backup", "from process to process"],
    "together --gib 0.004 --cycles 1": ["GB/s"],
    "scale --regions 5 --tensors 20 --cycles 1": ["5 regions", "in tensors"],
    "disk --gib 0.01 --rounds 1": ["on disk"],
    "small --cycles 5 --rounds 1": ["us"],
    "turns --cycles 1": ["shared pool, 1 pairs", "driver, 1 pairs", "weight sync"],
    "whole_process --steps 2": ["ledger of rank 1", "rank 1 killed"],
    "soak --turns 40 --every 2": ["growth"],
    "engine --only regions parallel": ["tokens/s of decode"],
}
LISTED = (ROOT / "docs/benchmarks.md").read_text().partition("fields of the line are ")[2].partition(".")[0]
FIELDS = re.findall(r"`(\w+)`", LISTED)

# Each resume changes one bit of one tensor in the regions that it resumes, while there is the file "spoil".
SPOILED = """
import gc, os, sys
import memsaver.transitions
file = os.path.join(os.path.dirname(__file__), "spoil")
real = memsaver.transitions.transition
def spoiled(pause, resume, *given, **options):
    done = real(pause, resume, *given, **options)
    if not os.path.exists(file):
        return done
    import torch
    regions = resume.regions
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.numel() and any(region.owns(each.data_ptr()) for region in regions):
            each.view(-1)[each.numel() // 2] += 1
            break
    return done
for module in list(sys.modules.values()):
    if getattr(module, "transition", None) is real:
        module.transition = spoiled
"""


# One process for all runs: the server of its processes loads each module once.
PROGRAM = """
import contextlib, io, json, sys
from benchmarks.__main__ import main
from benchmarks.harness.processes import CONTEXT
loaded = ["torch.distributed.fsdp", "memsaver.distributed", "benchmarks.engine", "benchmarks.harness.subjects"]
CONTEXT.set_forkserver_preload([*loaded, "tests.preloaded"])
if __name__ == "__main__":
    for line in sys.stdin:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(line.split())
        print(json.dumps([code, out.getvalue()]), flush=True)
"""
Ran = Callable[[str], tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ran(folder: Path) -> Iterator[Ran]:
    """A function that runs a benchmark. Returns the exit status, the JSON line and everything that was printed."""
    environ = {**os.environ, "MEMSAVER_TEST_COMMIT": "abc1234"}
    environ.pop("MEMSAVER_HOST_DEVICE", None)  # a run has one of its own
    (folder / "program.py").write_text(PROGRAM)
    (folder / "sitecustomize.py").write_text(SPOILED)
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "program"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environ, text=True, **pipes) as process:
        asked, answered = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def ran(line: str) -> tuple[int, dict[str, Any], str]:
            given = f"{line} --device cpu" + (f" --disk-dir {folder}" if line.startswith("disk") else "")
            print(given, file=asked, flush=True)
            code, text = json.loads(answered.readline())
            return code, json.loads(text.splitlines()[-1]), text

        yield ran
        asked.close()


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.split(" ")[0])
def test_a_small_run_prints_its_tables_and_a_json_line(line: str, ran: Ran) -> None:
    code, found, text = ran(line)
    assert (code, found["failures"]) == (0, []), text
    assert len(FIELDS) == 13 and set(FIELDS) <= set(found) and found["commit"] == "abc1234"
    assert found["benchmark"] in line and found["device"].startswith("host, ") and found["options"]["small"]
    assert all(any(title in each for each in found["tables"]) for title in RUNS[line]), found["tables"]
    assert all(rows and all(rows.values()) for rows in found["tables"].values())


SPOILT = ["pause_resume --scale 0.0001 --cycles 1 --only switch", "soak --turns 8", "turns --cycles 1 --only driver"]


@pytest.mark.parametrize("line", SPOILT, ids=lambda line: line.split(" ")[0])
def test_a_run_fails_if_a_resume_changes_a_bit(line: str, ran: Ran, folder: Path) -> None:
    (folder / "spoil").touch()
    try:
        code, found, text = ran(line)
    finally:
        (folder / "spoil").unlink()
    assert code == 1 and any("contents of" in each for each in found["failures"]), text
