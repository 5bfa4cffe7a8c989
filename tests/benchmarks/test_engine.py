"""The benchmark of the engine's promises as a command, on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_parts_run_on_the_cpu_without_verdicts() -> None:
    command = [sys.executable, "benchmarks/engine.py", "--small", "--device", "cpu", "--only", "2", "7", "8", "9"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", MEMSAVER_TEST_COMMIT="abc1234")
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [row["part"] for row in results] == [2, 7, 8, 9]
    assert not any("error" in row for row in results), ran.stdout
    assert all(row["date"] and row["device"].startswith("host") and row["commit"] == "abc1234" for row in results)
    assert all(promise["met"] is None for row in results for promise in row["promises"])
    by_load = [row["tokens_per_s"] for row in results[0]["rows"]]
    assert len(by_load) == 4 and all(min(each["on"]) > 0 for each in by_load)
    assert results[1]["same_tokens"] and results[1]["bytes"]["released by that pause"] > 0
    assert len(results[2]["tokens_per_s"]) == 3 and results[2]["compiled_after"] == []
    assert {len(each) for each in results[3]["ms"].values()} == {2} and results[3]["ratios"]["one step"] == 1
    assert ran.stdout.count("says nothing at this size") == sum(len(row["promises"]) for row in results)
