"""Brokers of jobs: the processes of a job have brokers of their own, in a directory of the job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

import memsaver
from memsaver.broker import discovery
from tests.broker_support import Running
from tests.pool_support import Worker
from tests.support import MIB, PAGE, environment, run_python

JOIN = "import memsaver; memsaver.configure(pool='shared'); memsaver.region('r', device='cpu')"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The broker of a job, and this process in the same job."""
    monkeypatch.setenv("MEMSAVER_JOB", "first")
    with Running(str(64 * MIB)) as running:
        yield running
        assert running.process.poll() is None, "the broker did not survive"


def test_processes_of_two_jobs_have_a_broker_each(broker: Running) -> None:
    assert broker.path.parent == broker.directory / "job-first"
    assert broker.path.parent.stat().st_mode & 0o777 == 0o700
    broker.environment["MEMSAVER_JOB"] = "second"
    done = subprocess.run(
        [sys.executable, "-c", JOIN], env=broker.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert discovery.accepts(broker.directory / "job-second" / broker.path.name)
    assert broker.status()["clients"] == []
    assert broker.run("broker", "--stop").returncode == 0
    assert discovery.accepts(broker.path)  # the broker of the first job still runs


def test_commands_apply_to_the_job_of_the_variable(broker: Running) -> None:
    assert broker.run("top", "--json").returncode == 0
    assert broker.run("trim").returncode == 0
    broker.environment["MEMSAVER_JOB"] = "second"
    assert json.loads(broker.run("top", "--json").stdout)["pools"] == []
    assert "have brokers (1): MEMSAVER_JOB" in broker.run("top").stdout
    for command in (("trim",), ("broker", "--stop")):
        done = broker.run(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1 and "have brokers (1): MEMSAVER_JOB" in done.stderr


def test_memory_of_one_job_is_zero_in_the_next(broker: Running) -> None:
    """Jobs have no broker in common. Chunks pass through the driver, which zeroes them."""
    with Worker(broker, f"held = hold('a', {8 * PAGE}, 'none', 1)", "memsaver.pause()"):
        assert broker.run("trim").returncode == 0
        other = {**broker.environment, "MEMSAVER_JOB": "second", "MEMSAVER_POOL": "shared"}
        program = f"""
            import memsaver, torch
            with memsaver.region("b", device="cpu"):
                found = torch.empty({8 * PAGE}, dtype=torch.uint8)
            print(int(found.count_nonzero()))
        """
        done = run_python(program, **{name: other[name] for name in other if name.startswith("MEMSAVER_")})
        assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b", "with a space", "x" * 33, "ä"])
def test_a_wrong_name_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MEMSAVER_JOB", name)
    with pytest.raises(memsaver.ConfigError, match="expected a name of 1 to 32 letters") as caught:
        memsaver.config.from_environment()
    assert (caught.value.option, caught.value.value) == ("job", name)


def test_config_shows_the_name_of_the_job() -> None:
    command = [sys.executable, "-m", "memsaver", "config"]
    shown = subprocess.run(
        command, env=environment(MEMSAVER_JOB="first"), capture_output=True, text=True, check=True
    ).stdout
    assert "first" in next(line for line in shown.splitlines() if line.startswith("job "))
