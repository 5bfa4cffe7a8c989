"""Processes in pods: pid namespaces of their own, limits of memory, SIGTERM before the end, and jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import memsaver
from memsaver import cli
from memsaver.broker import discovery
from memsaver.errors import CHECKED
from tests.broker_support import APART, PATIENCE_S, Running, is_possible
from tests.nursery import Fork
from tests.pool_support import Worker, is_whole
from tests.support import GIB, MIB, PAGE, environment, fresh_device, run_program, until

POD = [*APART, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]  # and a host device of its own
MOUNTS = ["unshare", "--mount"]


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
    from tests.pool_support import *
    held = hold("r", {2 * PAGE}, "host", 7)
    for _ in range(3):
        memsaver.pause()
        memsaver.resume(memory_timeout=60)
        held.check()
    print(os.getpid() < 20, memsaver._core.in_pool("cpu"))
"""


@needs_namespaces
def test_pods_with_jobs_of_their_own_share_a_directory(broker: Running) -> None:
    """Each has a broker in its own namespace, which ends with it. The broker of this namespace has no part in it."""
    jobs = ["first", "second"]
    variables = {**broker.environment, "MEMSAVER_POOL": "shared", "MEMSAVER_POOL_CAPACITY": "64MiB"}
    pods = [start(TURN, {**variables, "MEMSAVER_JOB": job}, *POD) for job in jobs]
    for pod in pods:
        assert pod.communicate(timeout=PATIENCE_S) == ("True True\n", "")
    for job in jobs:
        logs = broker.directory / f"job-{job}"
        assert (logs / broker.path.with_suffix(".log").name).exists()
    assert broker.status()["clients"] == []
    assert [path for path in broker.directory.rglob("*.sock") if discovery.accepts(path)] == [broker.path]


@needs_namespaces
def test_a_command_in_another_pid_namespace_fails_in_one_line(broker: Running) -> None:
    program = "from memsaver import cli; print(*(cli.main(each) for each in (['top', '--json'], ['trim'])))"
    command = [*APART, sys.executable, "-c", program]
    done = run_program(command, env=broker.environment, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "1 1\n", 2)
    assert done.stderr.count("pid namespace") == done.stderr.count("MEMSAVER_JOB") == 2


# Limits of memory


@needs_mounts
def test_a_host_device_on_a_full_file_system_is_an_error() -> None:
    program = """
        import contextlib, memsaver
        with contextlib.suppress(OSError), open("/dev/shm/full", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        try:
            memsaver.region("r", device="cpu")
        except memsaver.DriverError as error:
            print(error)
    """
    command = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    run = start(program, environment(), *MOUNTS, "sh", "-c", command, "sh")
    out, errors = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, errors) == (0, "") and "No space left on device" in out


@needs_mounts
def test_a_pause_beyond_the_limit_of_a_cgroup_raises_with_its_figures(tmp_path: Path) -> None:
    """The process sees the files of a cgroup with a limit. Without the error the kernel would kill it in the pause."""
    limit, used = GIB, 800 * MIB
    group, folder = "0::/pod\n", tmp_path / "cgroup/pod"
    files = {"memory.max": str(limit), "memory.current": str(used), "memory.stat": "inactive_file 0"}
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
    figures, text, line, copied = out.splitlines()
    assert line == CHECKED
    left = (limit * 9 // 10 - used) // PAGE * PAGE
    needed, held, available, state = figures.split()
    assert (int(needed), held, state) == (300 * MIB, "0", "active")
    assert left - PAGE <= int(available) <= left + PAGE
    assert f"needs {300 * MIB} bytes" in text and "the limit of one of its cgroups" in text
    assert int(copied) == 300 * MIB


def test_locked_memory_does_not_limit_the_host_driver() -> None:
    with Fork({"MEMSAVER_HOST_DEVICE": fresh_device()}, "tests.pool_support") as process:
        process.run("import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))")
        process.run("held = hold('r', 8 * MIB, 'host', 7); memsaver.pause(); memsaver.resume(); held.check()")


# SIGTERM

HOLDER = f"""
    import sys
    from tests.pool_support import *
    if {{handles}}:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    held = hold("r", {40 * MIB}, "host")
    if {{waits}}:
        memsaver.pause()
        print("paused", flush=True)
        sys.stdin.readline()
        memsaver.resume(memory_timeout=600)
    print("ready", flush=True)
    while True:
        time.sleep(0.1)  # a signal that comes just before a sleep is handled after it
"""


@pytest.fixture
def holder(broker: Running) -> Iterator[Callable[[bool, bool], subprocess.Popen[str]]]:
    """Starts a client, which handles SIGTERM or not, and waits for memory or has it."""
    with ExitStack() as stack:

        def begin(handles: bool, waits: bool) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", textwrap.dedent(HOLDER).format(handles=handles, waits=waits)]
            variables = {**broker.environment, "MEMSAVER_POOL": "shared"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return stack.enter_context(subprocess.Popen(command, env=variables, text=True, **pipes))  # type: ignore[call-overload,no-any-return]

        yield begin


@pytest.mark.parametrize(
    ("handles", "waits"), [(False, True), (True, False)], ids=["default action, waiting", "handler that exits"]
)
def test_a_client_that_gets_sigterm_strands_no_memory(
    broker: Running, holder: Callable[[bool, bool], subprocess.Popen[str]], handles: bool, waits: bool
) -> None:
    client = holder(handles, waits)
    assert client.stdin is not None and client.stdout is not None
    with Worker(broker) as other:
        assert client.stdout.readline() == ("paused\n" if waits else "ready\n")
        if waits:
            other.run(f"held = hold('a', {50 * MIB}, 'none', 1)")
            client.stdin.write("\n")
            client.stdin.flush()
            until(lambda: broker.row(client.pid)["waiting"])
        client.send_signal(signal.SIGTERM)
        assert client.wait(PATIENCE_S) == (3 if handles else -signal.SIGTERM)
        until(lambda: client.pid not in [row["pid"] for row in broker.status()["clients"]])
        assert is_whole(broker.status())
        if waits:
            other.run("memsaver.pause()")
        other.run(f"claim({50 * MIB})")


def test_a_pod_that_gets_sigterm_ends_and_leaves_no_socket(
    broker: Running, holder: Callable[[bool, bool], subprocess.Popen[str]]
) -> None:
    """Kubernetes sends SIGTERM to all at once. The broker does not wait for its clients, nor they for the broker."""
    client = holder(True, False)
    assert client.stdout is not None and client.stdout.readline() == "ready\n"
    for process in (broker.process, client):
        process.send_signal(signal.SIGTERM)
    assert client.wait(PATIENCE_S) == 3
    assert broker.process.wait(PATIENCE_S) == 0
    assert not list(broker.directory.rglob("*.sock"))
    broker.start()
    assert os.path.exists(broker.path)


# Jobs


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The broker of a job, and this process in the same job."""
    monkeypatch.setenv("MEMSAVER_JOB", "first")
    with Running(str(64 * MIB)) as running:
        yield running
        assert running.process.poll() is None, "the broker did not survive"


def test_processes_of_two_jobs_have_a_broker_each(first: Running) -> None:
    assert first.path.parent == first.directory / "job-first"
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    first.environment["MEMSAVER_JOB"] = "second"
    with Worker(first, "region = memsaver.region('r', device='cpu')"):
        assert discovery.accepts(first.directory / "job-second" / first.path.name)
        assert first.status()["clients"] == []
    assert first.run("broker", "--stop").returncode == 0
    assert discovery.accepts(first.path)  # the broker of the first job still runs


def test_commands_apply_to_the_job_of_the_variable(
    first: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMSAVER_POOL_DIR", str(first.directory))
    assert cli.main(["trim"]) == 0
    monkeypatch.setenv("MEMSAVER_JOB", "second")
    assert cli.main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pools"] == []
    assert cli.main(["top"]) == 0
    assert "have brokers (1): MEMSAVER_JOB" in capsys.readouterr().out
    for command in (("trim",), ("broker", "--stop")):
        assert cli.main(command) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and "have brokers (1): MEMSAVER_JOB" in err


def test_memory_of_one_job_is_zero_in_the_next(first: Running) -> None:
    """Jobs have no broker in common. Chunks pass through the driver, which zeroes them."""
    with Worker(first, f"held = hold('a', {8 * PAGE}, 'none', 1)", "memsaver.pause()"):
        assert first.run("trim").returncode == 0
        first.environment["MEMSAVER_JOB"] = "second"
        with Worker(first, f"held = hold('b', {8 * PAGE}, 'none', None)") as other:
            other.run("assert not held.data.any()")
            first.run("broker", "--stop")


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b", "with a space", "x" * 33, "ä"])
def test_a_wrong_name_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MEMSAVER_JOB", name)
    with pytest.raises(memsaver.ConfigError, match="expected a name of 1 to 32 letters") as caught:
        memsaver.config.from_environment()
    assert (caught.value.option, caught.value.value) == ("job", name)
