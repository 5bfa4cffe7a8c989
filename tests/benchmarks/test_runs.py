"""Benchmarks as commands on the host driver, with contents that are spoiled, and on engines that are made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The smallest run of each benchmark that has a host device, and titles of its tables.
RUNS = {
    "pause_resume --scale 0.001 --cycles 1": ["with backup 'host'", "first pause", "out and in", "region to region"],
    "handover --scale 0.001 --cycles 1 --rounds 1": ["64 MiB without backup", "from process to process"],
    "together --gib 0.0625 --cycles 1": ["GB/s"],
    "scale --regions 5 --tensors 20 --holes 50 --cycles 1": ["5 regions", "in tensors", "an allocation", "600 tensors"],
    "disk --gib 0.01 --rounds 1": ["on disk"],
    "small --cycles 5 --rounds 1": ["us", "modules"],
    "turns --cycles 1": ["shared pool, 1 pairs", "driver: 3 turns", "weight sync"],
    "whole_process --steps 2": ["ledger of rank 1", "rank 1 killed"],
    "soak --turns 40 --every 2": ["growth"],
    "engine --only regions parallel": ["tokens/s of decode"],
}
LISTED = (ROOT / "docs/benchmarks.md").read_text().partition("fields of the line are ")[2].partition(".")[0]
FIELDS = re.findall(r"`(\w+)`", LISTED)

# Each resume changes one bit of one tensor in the regions that it resumes.
SPOILED = """
import gc, sys
import memsaver.transitions
real = memsaver.transitions.transition
def spoiled(pause, resume, *given, **options):
    done = real(pause, resume, *given, **options)
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


def ran(line: str, folder: Path, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON line and everything that was printed."""
    environ = {**os.environ, "MEMSAVER_TEST_COMMIT": "abc1234", "OMP_NUM_THREADS": "1", **variables}
    environ.pop("MEMSAVER_HOST_DEVICE", None)  # a run has one of its own
    command = [sys.executable, "-m", "benchmarks", *line.split(), "--device", "cpu"]
    command += ["--disk-dir", str(folder)] if line.startswith("disk") else []
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.split(" ")[0])
def test_a_small_run_prints_its_tables_and_a_json_line(line: str, tmp_path: Path) -> None:
    code, found, text = ran(line, tmp_path)
    assert (code, found["failures"]) == (0, []), text
    assert len(FIELDS) == 13 and set(FIELDS) <= set(found) and found["commit"] == "abc1234"
    assert found["benchmark"] in line and found["device"].startswith("host, ") and found["options"]["small"]
    assert all(any(title in each for each in found["tables"]) for title in RUNS[line]), found["tables"]
    assert all(rows and all(rows.values()) for rows in found["tables"].values())


SPOILT = ["pause_resume --scale 0.001 --cycles 1 --only switch", "soak --turns 20", "turns --cycles 1 --only driver"]


@pytest.mark.parametrize("line", SPOILT, ids=lambda line: line.split(" ")[0])
def test_a_run_fails_if_a_resume_changes_a_bit(line: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOILED)
    code, found, text = ran(line, tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 1 and any("contents of" in each for each in found["failures"]), text
