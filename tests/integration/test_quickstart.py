"""The examples of one file run and exit with status 0."""

from __future__ import annotations

import os
import sys
import tempfile

from tests.support import ROOT, run_program


def test_the_quick_start_succeeds() -> None:
    size = (128 << 20) + os.getpid() % 100 * (2 << 20)  # no device that a concurrent process uses
    done = run_program(
        [sys.executable, "-m", "examples.quickstart"],
        cwd=ROOT,
        env={**os.environ, "MEMSAVER_HOST_DEVICE": str(size)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same addresses: True; same outputs, bit for bit: True" in done.stdout
    assert done.stdout.count("refused:") == 2
    assert done.stderr == ""


def test_two_processes_take_turns() -> None:
    size = (96 << 20) + os.getpid() % 100 * (2 << 20)
    with tempfile.TemporaryDirectory() as directory:  # its path is short enough for a socket's
        env = {**os.environ, "MEMSAVER_HOST_DEVICE": str(size), "MEMSAVER_POOL_DIR": directory}
        done, _ = (
            run_program([sys.executable, "-m", *command.split()], cwd=ROOT, env=env, timeout=300)
            for command in ("examples.two_processes", "memsaver broker --stop")
        )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert [done.stdout.count(f"{name}: has its contents: True") for name in ("engine", "trainer")] == [3, 3]
