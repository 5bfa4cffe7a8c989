"""The smallest program with Ray runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import run_program

pytest.importorskip("ray", reason="needs ray")
pytest.importorskip("transformers", reason="its model is one of transformers")


def test_two_actors_take_turns_and_learn(tmp_path: Path) -> None:
    size = (232 << 20) + os.getpid() % 100 * (2 << 20)  # no device that a concurrent process uses
    done = run_program(
        [sys.executable, "-m", "examples.two_actors", "--steps", "16"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "MEMSAVER_HOST_DEVICE": str(size), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(each) for each in re.findall(r"step \d+: reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 16
    assert max(rewards[-3:]) > rewards[0] + 0.08
