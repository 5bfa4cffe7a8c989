"""Each example of one file succeeds and prints the expected lines. Two of the examples run in forks of a process with
torch.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile

import pytest

from memsaver import cli
from tests.nursery import Fork
from tests.ranks_support import ranks, store_server
from tests.support import ROOT, fresh_device, run_program


def take_turns() -> None:
    """Its lines on stderr come with those it prints."""
    os.dup2(sys.stdout.fileno(), 2)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]  # a fork has torch
    begin = fork.Process.start
    # A process that is spawned gets its function and arguments pickled.
    fork.Process.start = lambda each: begin(each) if pickle.dumps((each._target, each._args)) else None  # type: ignore
    with pytest.raises(SystemExit) as end:
        runpy.run_module("examples.two_processes", run_name="__main__", alter_sys=True)
    assert not end.value.code


def test_the_quick_start_succeeds() -> None:
    """The command itself: its interpreter ends cleanly too."""
    size = (128 << 20) + os.getpid() % 100 * (2 << 20)  # no device that a concurrent process uses
    settings = {**os.environ, "MEMSAVER_HOST_DEVICE": str(size)}
    done = run_program([sys.executable, "-m", "examples.quickstart"], cwd=ROOT, env=settings, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same addresses: True; same outputs, bit for bit: True" in done.stdout
    assert done.stdout.count("refused:") == 2
    assert done.stderr == ""


def test_two_processes_take_turns() -> None:
    with tempfile.TemporaryDirectory() as directory:  # its path is short enough for a socket's
        settings = {"MEMSAVER_HOST_DEVICE": str(96 << 20), "MEMSAVER_POOL_DIR": directory}
        with Fork(settings, __name__, timeout=300) as process:
            process.start(take_turns)
            lines = process.answer().splitlines()
            process.start(cli.main, ["broker", "--stop"])
            assert "stopped the broker" in process.answer()
    assert sorted(lines) == [f"{name}: has its contents: True" for name in ("engine", "trainer") for _ in range(3)]


def run_as_torchrun_does(rank: int, port: int) -> None:
    """The store is that of another process, the agent."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **address})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples/torchrun.py"), run_name="__main__")
    states = ("in rollout: kv_cache active, params paused", "in train: kv_cache paused, params active")
    assert out.getvalue().splitlines() == [f"rank {rank}: {each}" for each in states]


def test_the_example_for_torchrun_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_HOST_DEVICE", fresh_device())
    with store_server() as (_, port), ranks(run_as_torchrun_does, 2, port):
        pass
