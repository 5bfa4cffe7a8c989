"""Brokers of jobs: a client without the secret of the job gets nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memsaver
from memsaver import BrokerError
from memsaver.broker import discovery, job, protocol, server
from memsaver.broker.admin import AdminClient
from memsaver.broker.protocol import Message
from tests.broker_support import PATIENCE_S, Client, Running
from tests.pool_support import Worker, is_whole
from tests.support import MIB, PAGE, environment, run_python, until

SECRET = "secret-of-the-first-job"
OTHER = "secret-of-the-second-job"
V = protocol.VERSION
JOIN = "import memsaver; memsaver.configure(pool='shared'); memsaver.region('r', device='cpu')"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The broker of a job, and this process in the same job."""
    monkeypatch.setenv("MEMSAVER_JOB", SECRET)
    with Running(str(64 * MIB)) as running:
        yield running
        assert running.process.poll() is None, "the broker did not survive"


def said_to(broker: Running, packet: bytes, files: tuple[int, ...] = ()) -> list[Message]:
    """All that the broker answers to a first packet, until it ends the connection."""
    with discovery.connect(broker.path) as channel:
        channel.settimeout(PATIENCE_S)
        protocol.send(channel, packet, files)
        answers = list(iter(lambda: protocol.receive(channel), None))
    return [each for each in answers if each is not None]


def hello(broker: Running, fields: dict[str, int], number: int = 5, version: int = V) -> bytes:
    return Message("hello", (version, number, os.getpid()), broker.uuid, fields=fields).encode()


def test_socket_of_a_job_lies_in_a_directory_that_does_not_show_the_secret(broker: Running) -> None:
    assert broker.path.parent == broker.directory / f"job-{job.Job(SECRET).name}"
    assert broker.path.parent.stat().st_mode & 0o777 == 0o700
    assert re.fullmatch("[0-9a-f]{16}", job.Job(SECRET).name)
    assert job.Job(OTHER).name != job.Job(SECRET).name


def test_process_of_the_job_uses_its_broker_and_the_next_one(broker: Running) -> None:
    with Worker(broker, f"held = hold('a', {PAGE}, 'host', 1)") as worker:
        worker.run("memsaver.pause(); memsaver.resume(memory_timeout=60); held.check()")
        broker.kill()
        broker.start()
        until(lambda: any(row["held_bytes"] for row in broker.status()["clients"]))
        worker.run("memsaver.pause(); memsaver.resume(memory_timeout=60); held.check()")


def test_broker_that_a_process_of_a_job_starts_belongs_to_the_job(broker: Running) -> None:
    name = job.Job(OTHER).name
    broker.environment["MEMSAVER_JOB"] = OTHER
    done = subprocess.run(
        [sys.executable, "-c", JOIN], env=broker.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (broker.directory / f"job-{name}" / broker.path.name).exists()
    assert broker.run("broker", "--stop").returncode == 0
    assert discovery.accepts(broker.path)  # the broker of the first job still runs


def test_client_with_the_secret_is_served(broker: Running) -> None:
    client = Client(broker.path)
    broker.clients.append(client)
    client.give(client.borrow(PAGE, PAGE))
    proof = job.Job(SECRET).broker_proof(client.number, os.getpid(), broker.uuid)
    assert job.contains(client.welcome.fields, proof)


def wrong_proofs(broker: Running) -> dict[str, dict[str, int]]:
    """Proofs of a client with the number 5, none of which is right."""
    own, pid = job.Job(SECRET), os.getpid()
    right = own.client_proof(5, pid, broker.uuid)
    return {
        "none": {},
        "of another job": job.Job(OTHER).client_proof(5, pid, broker.uuid),
        "of another number": own.client_proof(6, pid, broker.uuid),
        "of another process": own.client_proof(5, pid + 1, broker.uuid),
        "of another device": own.client_proof(5, pid, broker.uuid + "0"),
        "of the broker": own.broker_proof(5, pid, broker.uuid),
        "a part": dict(list(right.items())[:3]),
        "one bit": {**right, "proof_4": right["proof_4"] ^ 1},
    }


def test_hello_without_the_proof_is_refused_and_told_nothing_else(broker: Running) -> None:
    for name, fields in wrong_proofs(broker).items():
        [answer] = said_to(broker, hello(broker, fields))
        assert answer.kind == "refused" and protocol.refusal_name(answer.words[0]) == "user", name
        assert "MEMSAVER_JOB" in answer.text and not answer.files
    broker.client().borrow(PAGE, PAGE)


def test_any_first_message_but_a_hello_is_refused(broker: Running) -> None:
    client = broker.client()
    chunks = client.borrow(2 * PAGE, PAGE)
    before = broker.descriptors()
    for kind, (first, group, least) in protocol._SHAPES.items():
        words = [chunks[0]] * (first + group * max(1, least))
        [answer] = said_to(broker, Message(kind, words, "a").encode())
        assert answer.kind == "refused" and not answer.files
        assert str(64 * MIB) not in answer.text and broker.uuid not in answer.text
    until(lambda: broker.descriptors() <= before)
    assert broker.status()["total_bytes"] == 2 * PAGE
    assert client.look()[2] == {os.getpid(): 2 * PAGE}


def test_proof_of_another_process_is_of_no_use(broker: Running) -> None:
    """A process that has seen the `hello` of a client, as one that listened at its path, cannot send it."""
    client = broker.client()
    client.borrow(PAGE, PAGE)
    proof = job.Job(SECRET).client_proof(client.number, os.getpid(), broker.uuid)
    program = f"""
        from pathlib import Path
        from memsaver.broker import discovery, protocol
        from memsaver.broker.protocol import Message
        with discovery.connect(Path({str(broker.path)!r})) as channel:
            words = ({V}, {client.number}, {os.getpid()})
            protocol.send(channel, Message("hello", words, {broker.uuid!r}, fields={proof!r}).encode())
            print(protocol.receive(channel).kind, protocol.receive(channel))
    """
    done = run_python(program)
    assert (done.stdout, done.stderr) == ("refused None\n", "")
    client.look()  # its session goes on


def test_commands_need_the_secret(broker: Running) -> None:
    assert broker.run("top", "--json").returncode == 0
    assert broker.run("trim").returncode == 0
    for secret in (OTHER, ""):
        broker.environment = environment(
            **{name: broker.environment[name] for name in ("MEMSAVER_HOST_DEVICE", "MEMSAVER_POOL_DIR")},
            MEMSAVER_JOB=secret,
        )
        assert json.loads(broker.run("top", "--json").stdout)["pools"] == []
        assert "have brokers (1): MEMSAVER_JOB" in broker.run("top", "--once").stdout
        for command in (("trim",), ("broker", "--stop")):
            done = broker.run(*command)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.count("\n") == 1 and "have brokers (1): MEMSAVER_JOB" in done.stderr
    assert discovery.accepts(broker.path)


def test_admin_client_of_another_job_is_refused(broker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in (OTHER, None):
        monkeypatch.delenv("MEMSAVER_JOB") if secret is None else monkeypatch.setenv("MEMSAVER_JOB", secret)
        with pytest.raises(BrokerError, match="refuses: this broker serves one job") as caught:
            AdminClient(broker.path)
        assert caught.value.path == str(broker.path)


def test_process_of_a_job_leaves_a_broker_that_does_not_prove_the_job(broker: Running) -> None:
    """Another process of the user can listen at the path of the job, and must not get the job's memory."""
    broker.kill()
    broker.environment["MEMSAVER_POOL_DIR"] = str(broker.path.parent)
    del broker.environment["MEMSAVER_JOB"]
    broker.start()  # has no job
    settings = {**broker.environment, "MEMSAVER_POOL_DIR": str(broker.directory), "MEMSAVER_JOB": SECRET}
    done = subprocess.run(
        [sys.executable, "-c", JOIN], env=settings, capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("memsaver.errors.BrokerError: ") and "does not prove" in last and "MEMSAVER_JOB" in last
    with pytest.raises(BrokerError, match="does not prove"):
        AdminClient(broker.path)
    os.environ.pop("MEMSAVER_JOB")  # monkeypatch restores it
    assert broker.status()["clients"] == []


@pytest.mark.parametrize("seed", range(int(os.environ.get("MEMSAVER_TEST_SEED", "0")), 3))
def test_random_messages_of_another_job_get_refusals_alone(broker: Running, seed: int) -> None:
    with Worker(broker, f"held = hold('a', 3 * MIB, 'host', {seed})", "memsaver.pause()") as worker:
        until(lambda: is_whole(broker.status()))
        worker.send("take_turns(held, 30)")
        said = subprocess.run(
            [sys.executable, "-m", "tests.broker_fuzz", str(broker.path), str(seed), "600", "stranger"],
            env={**broker.environment, "MEMSAVER_JOB": OTHER},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (said.returncode, said.stdout.split()[:2]) == (0, ["said", "600"]), said.stderr
        worker.answer()
        assert [row["pid"] for row in broker.status()["clients"]] == [worker.pid]


def test_connections_without_a_hello_do_not_keep_the_job_out(broker: Running) -> None:
    client = broker.client()
    strangers = [discovery.connect(broker.path) for _ in range(2 * server.MOST_STRANGERS)]
    client.give(client.borrow(PAGE, PAGE))
    broker.client().look()
    refused = sum(protocol.receive(each) is not None for each in strangers[: server.MOST_STRANGERS])
    assert refused == server.MOST_STRANGERS  # the oldest were refused, and this call would wait for a newer one
    assert broker.descriptors() < 2 * server.MOST_STRANGERS
    for each in strangers:
        each.close()


def test_connection_without_a_hello_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_JOB", SECRET)
    with Running() as broker:
        broker.kill()
        program = "from memsaver import cli; from memsaver.broker import server; server.STRANGER_S = 0.2; cli.main()"
        broker.program = ["-c", program]
        broker.start()
        with discovery.connect(broker.path) as channel:
            channel.settimeout(PATIENCE_S)
            answer = protocol.receive(channel)
            assert answer is not None and "'hello'" in answer.text
            assert protocol.receive(channel) is None
        client = broker.client()
        client.look()


def test_refused_strangers_do_not_fill_the_log(broker: Running, tmp_path: Path) -> None:
    broker.kill()
    with open(tmp_path / "log", "w") as log:
        command = broker.command("broker", *broker.arguments)
        broker.process = subprocess.Popen(command, env=broker.environment, stderr=log)
    until(broker.sockets)
    for _ in range(200):
        said_to(broker, hello(broker, {}))
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "refused" in line]
    assert 1 <= len(lines) < 100 and "MEMSAVER_JOB" in lines[0]


# Memory between jobs


def test_memory_of_one_job_is_zero_in_the_next(broker: Running) -> None:
    """Jobs have no broker in common. Chunks pass through the driver, which zeroes them."""
    with Worker(broker, f"held = hold('a', {8 * PAGE}, 'none', 1)", "memsaver.pause()"):
        assert broker.run("trim").returncode == 0
        other = {**broker.environment, "MEMSAVER_JOB": OTHER, "MEMSAVER_POOL": "shared"}
        program = f"""
            import memsaver, torch
            with memsaver.region("b", device="cpu"):
                found = torch.empty({8 * PAGE}, dtype=torch.uint8)
            print(int(found.count_nonzero()))
        """
        done = run_python(program, **{name: other[name] for name in other if name.startswith("MEMSAVER_")})
        assert (done.stdout, done.stderr) == ("0\n", "")


# The secret


def test_a_printed_secret_is_valid_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "memsaver", "job"]
    found = {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    assert len(found) == 2
    for secret in found:
        monkeypatch.setenv("MEMSAVER_JOB", secret)
        own = job.current()
        assert own is not None and own.name not in secret


@pytest.mark.parametrize(
    "secret", ["", "short-and-hidden"[:15], "x" * 257, "with a space inside", "with-an-umlaut-äöü"]
)
def test_a_wrong_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("MEMSAVER_JOB", secret)
    with pytest.raises(memsaver.ConfigError, match=f"has {len(secret)} characters, expected 16 to 256") as caught:
        memsaver.config.from_environment()
    shown = f"{caught.value!r} {vars(caught.value)} {pickle.dumps(caught.value)!r}"
    assert not secret or secret not in shown
    assert caught.value.option == "job" and "MEMSAVER_JOB in the environment" in str(caught.value)


def test_config_and_stats_do_not_show_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_JOB", SECRET)
    for arguments in ((), ("--json",)):
        command = [sys.executable, "-m", "memsaver", "config", *arguments]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert SECRET not in shown and job.Job(SECRET).name in shown
    program = "import memsaver; memsaver.region('r', device='cpu'); print(memsaver.stats())"
    assert SECRET not in run_python(program).stdout
