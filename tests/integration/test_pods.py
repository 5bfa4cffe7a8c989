"""Processes in pods: pid namespaces of their own, limits of memory, and SIGTERM before the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from memsaver.broker import discovery
from tests.broker_support import PATIENCE_S, Running
from tests.pool_support import Worker, is_whole
from tests.support import GIB, MIB, PAGE, environment, until

APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # a pid namespace of its own
MOUNTS = ["unshare", "--mount"]


def is_possible(command: list[str]) -> bool:
    return subprocess.run(["sh", "-c", f"{' '.join(command)} true"], check=False, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not is_possible(APART), reason="no pid namespace can be made here")
needs_mounts = pytest.mark.skipif(not is_possible(MOUNTS), reason="no mount namespace can be made here")


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running(str(64 * MIB)) as running:
        yield running
        assert running.process.poll() is None, "the broker did not survive"


def start(program: str, variables: dict[str, str], *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Pid namespaces

TURN = f"""
    import os, memsaver, torch
    with memsaver.region("r", device="cpu", backup="host") as region:
        held = torch.full(({2 * PAGE},), 7, dtype=torch.uint8)
    for _ in range(3):
        memsaver.pause()
        memsaver.resume(memory_timeout=60)
    print(os.getpid() < 20, bool((held == 7).all()), memsaver._core.in_pool("cpu"))
"""


@needs_namespaces
def test_pods_with_jobs_of_their_own_share_a_directory(broker: Running) -> None:
    """Each has a broker in its own namespace, which ends with it. The broker of this namespace has no part in it."""
    jobs = ["first", "second"]
    variables = {**broker.environment, "MEMSAVER_POOL": "shared", "MEMSAVER_POOL_CAPACITY": "64MiB"}
    pods = [start(TURN, {**variables, "MEMSAVER_JOB": job}, *APART) for job in jobs]
    for pod in pods:
        assert pod.communicate(timeout=PATIENCE_S) == ("True True True\n", "")
    for job in jobs:
        logs = broker.directory / f"job-{job}"
        assert (logs / broker.path.with_suffix(".log").name).exists()
    assert broker.status()["clients"] == []
    assert [path for path in broker.directory.rglob("*.sock") if discovery.accepts(path)] == [broker.path]


@needs_namespaces
@pytest.mark.parametrize("arguments", [("top", "--json"), ("trim",), ("broker", "--stop")])
def test_a_command_in_another_pid_namespace_fails_in_one_line(broker: Running, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*APART, sys.executable, "-m", "memsaver", *arguments],
        env=broker.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "pid namespace" in done.stderr and "MEMSAVER_JOB" in done.stderr


# Limits of memory


@needs_mounts
@pytest.mark.parametrize("version", [1, 2])
def test_a_pause_beyond_the_limit_of_a_cgroup_raises_with_its_figures(tmp_path: Path, version: int) -> None:
    """The process sees the files of a cgroup with a limit. Without the error the kernel would kill it in the pause."""
    limit, used = GIB, 800 * MIB
    if version == 2:
        group, folder = "0::/pod\n", tmp_path / "cgroup/pod"
        files = {"memory.max": str(limit), "memory.current": str(used), "memory.stat": "inactive_file 0"}
    else:
        group, folder = "4:memory:/pod\n", tmp_path / "cgroup/memory/pod"
        files = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used)}
        files["memory.stat"] = "total_inactive_file 0"
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    (tmp_path / "group").write_text(group)
    program = f"""
        import memsaver
        region = memsaver.region("r", device="cpu", backup="host")
        held = region._core.allocate_array({300 * MIB})
        try:
            memsaver.pause()
        except memsaver.BackupError as error:
            print(error.needed_bytes, error.held_bytes, error.available_bytes, region.state)
            print(error)
        memsaver.configure(host_limit={400 * MIB})
        print(memsaver.pause().copied_bytes)
    """
    mounts = f"mount --bind {tmp_path}/cgroup /sys/fs/cgroup && mount --bind {tmp_path}/group /proc/$$/cgroup"
    run = start(program, environment(), *MOUNTS, "sh", "-c", f'{mounts} && exec "$@"', "sh")
    out, errors = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, errors) == (0, "")
    figures, text, copied = out.splitlines()
    left = (limit * 9 // 10 - used) // PAGE * PAGE
    needed, held, available, state = figures.split()
    assert (int(needed), held, state) == (300 * MIB, "0", "active")
    assert left - PAGE <= int(available) <= left + PAGE
    assert f"needs {300 * MIB} bytes" in text and "the limit of one of its cgroups" in text
    assert int(copied) == 300 * MIB


def test_locked_memory_does_not_limit_the_host_driver() -> None:
    program = f"""
        import resource, memsaver, torch
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        with memsaver.region("r", device="cpu", backup="host") as region:
            held = torch.full(({8 * MIB},), 7, dtype=torch.uint8)
        memsaver.pause()
        memsaver.resume()
        print(bool((held == 7).all()))
    """
    run = start(program, environment())
    assert run.communicate(timeout=PATIENCE_S) == ("True\n", "")


# SIGTERM

HOLDER = f"""
    import signal, sys, time, memsaver, torch
    if {{handles}}:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    with memsaver.region("r", device="cpu", backup="host") as region:
        held = torch.zeros({40 * MIB}, dtype=torch.uint8)
    if {{waits}}:
        memsaver.pause()
        print("paused", flush=True)
        sys.stdin.readline()
        print("waiting", flush=True)
        memsaver.resume(memory_timeout=600)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("handles", [False, True], ids=["default action", "handler that exits"])
@pytest.mark.parametrize("waits", [False, True], ids=["with memory", "waiting for memory"])
def test_a_client_that_gets_sigterm_strands_no_memory(broker: Running, handles: bool, waits: bool) -> None:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER).format(handles=handles, waits=waits)]
    variables = {**broker.environment, "MEMSAVER_POOL": "shared"}
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        with Worker(broker) as other:
            assert client.stdout.readline() == ("paused\n" if waits else "ready\n")
            if waits:
                other.run(f"held = hold('a', {50 * MIB}, 'none', 1)")
                client.stdin.write("\n")
                client.stdin.flush()
                assert client.stdout.readline() == "waiting\n"
                until(lambda: broker.row(client.pid)["waiting"])
            client.send_signal(signal.SIGTERM)
            assert client.wait(PATIENCE_S) == (3 if handles else -signal.SIGTERM)
            until(lambda: client.pid not in [row["pid"] for row in broker.status()["clients"]])
            assert is_whole(broker.status())
            if waits:
                other.run("memsaver.pause()")
            other.run(f"claim({50 * MIB})")


def test_a_pod_that_gets_sigterm_ends_and_leaves_no_socket(broker: Running) -> None:
    """Kubernetes sends SIGTERM to all at once. The broker does not wait for its clients, nor they for the broker."""
    command = [sys.executable, "-c", textwrap.dedent(HOLDER).format(handles=True, waits=False)]
    variables = {**broker.environment, "MEMSAVER_POOL": "shared"}
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        for process in (broker.process, client):
            process.send_signal(signal.SIGTERM)
        assert client.wait(PATIENCE_S) == 3
        assert broker.process.wait(PATIENCE_S) == 0
        assert not list(broker.directory.rglob("*.sock")) and not list(broker.directory.rglob("new-*"))
    broker.start()
    assert os.path.exists(broker.path)
