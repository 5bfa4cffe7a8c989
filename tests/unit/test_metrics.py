"""Figures for Prometheus: the collectors, their endpoint, and the queries of docs/grafana.json at a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import memsaver
from memsaver import _results, cli
from tests.broker_support import Running
from tests.pool_support import Worker
from tests.support import MIB, ROOT, Block, Make, Visitor, check, run_python, until

prometheus_client = pytest.importorskip("prometheus_client")
from memsaver import metrics  # noqa: E402

COUNTS = ("memsaver_transitions_total", "memsaver_failures_total")
Sample = tuple[str, frozenset[tuple[str, str]]]
# A client whose regions are paused, and its own endpoint.
PAUSED = (
    "import prometheus_client, memsaver.metrics",
    f"small, big, other = hold('small', {2 * MIB}, 'host'), hold('big', {128 * MIB}), hold('other', {64 * MIB})",
    "memsaver.pause(['big', 'other'])",
    "registry = prometheus_client.CollectorRegistry(); registry.register(memsaver.metrics.collector())",
)


def stubborn(call: str) -> None:
    if call == "come back":
        raise OSError("no network")


def samples(collector: object) -> dict[Sample, float]:
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def key(name: str, **labels: str) -> Sample:
    return f"memsaver_{name}", frozenset(labels.items())


def own() -> dict[Sample, float]:
    return samples(metrics.collector())


def growth(before: dict[Sample, float]) -> dict[Sample, float]:
    """The counters that have grown. None has become less."""
    after = own()
    counters = {each: value for each, value in after.items() if each[0].endswith("_total")}
    assert all(value >= before.get(each, 0.0) for each, value in counters.items())
    assert counters.keys() >= {each for each in before if each[0].endswith("_total")}
    grown = {each: value - before.get(each, 0.0) for each, value in counters.items()}
    return {each: value for each, value in grown.items() if value}


def test_the_collector_has_the_sums_of_the_history_and_the_bytes_of_stats(make: Make, tag: str) -> None:
    region, other = make("host"), make("host")
    blocks = [Block(region, 3 * MIB), Block(other, 2 * MIB)]
    memsaver.register(Visitor("stubborn", tag, stubborn))
    last, before = memsaver.history()[-1:], own()
    region.pause()
    memsaver.switch(pause=other, resume=region)
    memsaver.pause(tag)
    with pytest.raises(memsaver.GuestError):
        memsaver.resume(tag)
    memsaver._core.acquire([region._core])  # as a guarded launch
    try:
        for _ in range(2):
            with pytest.raises(memsaver.WaitTimeoutError):
                region.pause(timeout=0.01)
    finally:
        memsaver._core.release([region._core])
    grown, values = growth(before), own()
    records = [each for each in memsaver.history() if not last or each.number > last[0].number]
    assert len(records) == 6

    assert {each: value for each, value in grown.items() if each[0] in COUNTS} == {
        key("transitions_total", kind="pause", outcome="done"): 2,
        key("transitions_total", kind="switch", outcome="done"): 1,
        key("transitions_total", kind="resume", outcome="failed"): 1,
        key("transitions_total", kind="pause", outcome="failed"): 2,
        key("failures_total", error="GuestError"): 1,
        key("failures_total", error="WaitTimeoutError"): 2,
    }
    failed = sum(each.seconds for each in records if each.outcome == "failed" and each.pause)
    assert grown[key("transitions_seconds_total", kind="pause", outcome="failed")] == pytest.approx(failed)
    for name in {stage.name for each in records for stage in each.stages}:
        stages = [stage for each in records for stage in each.stages if stage.name == name]
        assert grown[key("stages_total", stage=name)] == len(stages)
        seconds = sum(each.seconds for each in stages)
        assert grown[key("stages_seconds_total", stage=name)] == pytest.approx(seconds, abs=1e-9)
    for figure in ("released_bytes", "restored_bytes"):
        assert grown[key(f"{figure}_total")] == sum(getattr(each, figure) for each in records) > 0
    for direction, number, nbytes in (("out", 2, 5 * MIB), ("in", 1, 3 * MIB)):
        assert grown[key("copies_total", direction=direction)] == number
        assert grown[key("copies_bytes_total", direction=direction)] == nbytes
        assert grown[key("copies_seconds_total", direction=direction)] > 0

    rows = [each for each in memsaver.stats().devices["cpu"].ledger.rows if each.label == region.tag]
    assert values[key("process_bytes", device="cpu", kind="region", label=region.tag)] == rows[0].bytes > 0
    assert values[key("process_bytes", device="cpu", kind="region", label=other.tag)] == 0
    assert values[key("backup_bytes", device="cpu", place="host")] >= 2 * MIB
    other.resume()
    check(blocks)


def test_transitions_that_left_the_history_or_were_dropped_are_counted_once(make: Make) -> None:
    region = make()
    before = last = own()
    for number in range(_results._KEPT + 1):
        region.pause()
        if number % 50 == 0:
            growth(last)  # no counter decreases
            last = own()
    region.resume()
    memsaver.transitions.prepare_pause(region.tag).abort()
    dropped = memsaver.transitions.prepare_pause(region.tag)
    del dropped
    memsaver.history()
    grown = growth(before)
    assert {each: value for each, value in grown.items() if each[0] in COUNTS} == {
        key("transitions_total", kind="pause", outcome="done"): _results._KEPT + 1,
        key("transitions_total", kind="resume", outcome="done"): 1,
        key("transitions_total", kind="pause", outcome="aborted"): 2,
    }
    events = [("cpu", "waits", 0.25, 1.0, MIB, [(1, MIB)]), ("cpu", "copies out", 0.5, 2.5, 3 * MIB, [])]
    move = SimpleNamespace(core=SimpleNamespace(stages=[], events=events))
    recorder, before = _results.Recorder(["a"], [], lambda: move), own()
    recorder.end("failed")
    recorder.end("aborted")
    grown = growth(before)
    assert [grown[key(f"waits{each}_total")] for each in ("", "_seconds", "_bytes")] == pytest.approx([1, 0.75, MIB])
    assert grown[key("copies_seconds_total", direction="out")] == pytest.approx(2.0)


# Ray


class Gauge:
    """ray.util.metrics.Gauge of Ray 2.60: the types that it accepts, and the last values."""

    made: dict[str, Gauge] = {}

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        assert name not in self.made and description and type(tag_keys) is tuple
        self.tag_keys, self.values = tag_keys, dict[frozenset[tuple[str, str]], float]()
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert type(value) is float and {*tags} == {*self.tag_keys} and {str, *map(type, tags.values())} == {str}
        self.values[frozenset(tags.items())] = value


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, Gauge]:
    for name, thing in (("_gauges", {}), ("_exported", set())):
        monkeypatch.setattr(metrics, name, thing)
    monkeypatch.setattr(Gauge, "made", {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Gauge=Gauge))  # type: ignore[arg-type]
    return Gauge.made


def test_the_gauges_of_ray_have_the_figures_of_the_collector(make: Make, gauges: dict[str, Gauge]) -> None:
    move = key("stages_seconds_total", stage="move")
    before = own().get(move, 0.0)  # below 0 after tests on a virtual clock
    region, other = make("host"), make()
    held = [Block(region, 3 * MIB), Block(other, 2 * MIB)]
    for call in (region.pause, other.pause, region.resume, other.resume):
        call()
        metrics.export_to_ray()
        found = {(name, tags): value for name, gauge in gauges.items() for tags, value in gauge.values.items()}
        assert found == own()
    assert found[key("process_bytes", device="cpu", kind="region", label=region.tag)] >= 3 * MIB
    assert found[move] > before
    del held
    other.close()
    metrics.export_to_ray()
    bytes_of = gauges["memsaver_process_bytes"].values
    ended = frozenset({"device": "cpu", "kind": "region", "label": other.tag}.items())
    assert bytes_of[ended] == 0 and ("memsaver_process_bytes", ended) not in own()


# The shared pools


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    with Running("256MiB") as running:
        monkeypatch.setenv("MEMSAVER_POOL_DIR", str(running.directory))
        monkeypatch.delenv("MEMSAVER_JOB", raising=False)
        yield running


@pytest.fixture
def worker(broker: Running) -> Iterator[Worker]:
    with Worker(broker, *PAUSED) as client:
        yield client


def begin_to_wait(broker: Running, worker: Worker) -> None:
    """A region of the worker waits for memory that another client has."""
    broker.client().borrow(192 * MIB)
    worker.run("moving = memsaver.start(resume='big', memory_timeout=600)")
    until(lambda: broker.row(worker.pid)["waiting"])


def test_pools_have_bytes_by_process_and_kind_and_demands(broker: Running, worker: Worker) -> None:
    pool = {"pool": broker.uuid, "device": "cpu"}
    assert samples(metrics.PoolCollector())[key("pool_free_bytes", **pool)] == 254 * MIB  # idle chunks among them
    begin_to_wait(broker, worker)
    for _ in range(2):
        broker.client().want(2 * MIB)
    [row], found = broker.row(worker.pid)["waiting"], samples(metrics.PoolCollector())
    client = {**pool, "pid": str(worker.pid), "process": broker.row(worker.pid)["name"]}
    assert found[key("device_bytes", **client, kind="region", label="small")] == 2 * MIB
    assert found[key("device_bytes", **client, kind="region", label="other")] == 0  # it is paused
    mine = {("pid", str(worker.pid)), ("pool", broker.uuid)}
    own_bytes = sum(value for each, value in found.items() if each[0] == "memsaver_device_bytes" and mine <= each[1])
    text = "print(sum(each.value for each in next(iter(registry.collect())).samples))"
    assert float(worker.run(text)) == own_bytes > 0  # of its own collector
    assert found[key("pool_capacity_bytes", **pool)] == 256 * MIB
    used = sum(value for each, value in found.items() if each[0] == "memsaver_device_bytes")
    assert found[key("pool_free_bytes", **pool)] == 256 * MIB - used
    assert found[key("demands", **client)] == 1
    assert found[key("demand_bytes", **client)] == row["needed_bytes"] - row["granted_bytes"] > 0
    assert found[key("demand_seconds", **client)] >= row["seconds"]
    this = {**pool, "pid": str(os.getpid()), "process": broker.row(os.getpid())["name"]}
    assert found[key("demands", **this)] == 2  # of two clients
    assert found[key("client_backup_bytes", **client)] == broker.row(worker.pid)["host_held_bytes"]


def test_a_broker_that_does_not_answer_is_down(broker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_BROKER_S", 0.1)
    (broker.directory / "job-other").mkdir(mode=0o700)
    (broker.directory / "GPU-2.sock").touch()  # of a broker that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(broker.directory / "job-other/GPU-1.sock"))
        silent.listen()
        found = samples(metrics.PoolCollector())
    up = {dict(each[1])["pool"]: value for each, value in found.items() if each[0] == "memsaver_broker_up"}
    assert up == {broker.uuid: 1, "job-other/GPU-1": 0, "GPU-2": 0}
    assert key("pool_capacity_bytes", pool=broker.uuid, device="cpu") in found


# The command, and Prometheus


@contextmanager
def serving(broker: Running) -> Iterator[int]:
    """`memsaver serve-metrics`. Yields its port."""
    command = [sys.executable, "-m", "memsaver", "serve-metrics", "--port", "0"]
    with subprocess.Popen(command, env=broker.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            match = re.fullmatch(r"serves http://127\.0\.0\.1:(\d+)/metrics\n", line)
            assert match is not None, line
            yield int(match[1])
        finally:
            process.terminate()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_command_prints_its_url_and_serves_until_it_is_interrupted(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    thread = threading.Thread()
    monkeypatch.setattr(thread, "join", interrupt)
    monkeypatch.setattr(metrics, "serve", lambda address, port: (port, thread))
    assert cli.main(["serve-metrics", "--port", "9100", "--address", address]) == 0
    url = capsys.readouterr().out.removeprefix("serves ").strip()
    assert (urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port) == (address, 9100)


def test_the_command_serves_and_refuses_in_one_line(broker: Running) -> None:
    with serving(broker) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert f'memsaver_broker_up{{pool="{broker.uuid}"}} 1.0' in answer.read().decode()
        done = broker.run("serve-metrics", "--port", str(port))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"memsaver: cannot serve at 127.0.0.1:{port}: Address already in use; expected")
    done = broker.run("serve-metrics", "--port", "0", "--address", "a..b")
    assert done.stderr.startswith("memsaver: cannot serve at a..b:0: ") and done.stderr.count("\n") == 1
    done = run_python("""
        import sys
        sys.modules["prometheus_client"] = None  # any import of it raises ModuleNotFoundError
        from memsaver import cli
        for port in ("0", "-1", "65536", "http", "9" * 5000):
            print(cli.main(["serve-metrics", f"--port={port}"]))
    """)
    text = "memsaver.metrics needs prometheus_client; expected it from pip install 'memsaver[metrics]'"
    ports = "-1", "65536", "http", "9" * 5000
    wrong = "".join(f"memsaver: the port is {port!r}, expected 0 to 65535\n" for port in ports)
    assert (done.stdout, done.stderr) == ("1\n" * 5, f"memsaver: {text}\n{wrong}")


@contextmanager
def prometheus(directory: Path, ports: list[int]) -> Iterator[Callable[[str], list[tuple[set[str], float]]]]:
    """A Prometheus that scrapes these ports. Yields a function for queries: names of labels, and values."""
    binary = shutil.which("prometheus")
    assert binary is not None
    targets = [f"127.0.0.1:{port}" for port in ports]
    scrapes = [{"job_name": "memsaver", "static_configs": [{"targets": targets}]}]
    config = directory / "prometheus.yml"  # JSON is YAML
    config.write_text(
        json.dumps({"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}, "scrape_configs": scrapes})
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    files = [f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]

    def values(query: str) -> list[tuple[set[str], float]]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return [({*each["metric"]}, float(each["value"][1])) for each in found["data"]["result"]]

    def is_ready() -> bool:
        try:
            return bool(urllib.request.urlopen(f"http://{address}/-/ready", timeout=60).close() is None)
        except OSError:  # it does not listen yet, or reads its files: 503
            return False

    with subprocess.Popen([binary, *files, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: process.poll() is not None or is_ready())
            assert process.poll() is None
            yield values
        finally:
            process.terminate()


def dashboard() -> dict[str, set[str]]:
    """The queries of the dashboard, and the labels by which each is grouped."""
    panels = json.loads((ROOT / "docs/grafana.json").read_text())["panels"]
    found = {target["expr"]: target["legendFormat"] for panel in panels for target in panel["targets"]}
    labels = {query: {*re.findall(r"\w+", re.findall(r"by \((.*?)\)", query)[0])} for query in found}
    assert all({*re.findall(r"{{(\w+)}}", legend)} <= labels[query] for query, legend in found.items())
    return labels


def test_the_dashboard_has_each_figure() -> None:
    families = [each for one in (metrics.collector(), metrics.PoolCollector()) for each in one.collect()]
    names = {each.name + ("_total" if each.type == "counter" else "") for each in families}
    assert {each for query in dashboard() for each in re.findall(r"memsaver_\w+", query)} == names


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no program prometheus in PATH")
def test_each_query_of_the_dashboard_returns_data_at_a_prometheus(
    broker: Running, worker: Worker, tmp_path: Path
) -> None:
    queries = dashboard()
    port = int(worker.run("print(prometheus_client.start_http_server(0, '127.0.0.1', registry)[0].server_port)"))
    with serving(broker) as pools, prometheus(tmp_path, [port, pools]) as values:
        seen: set[str] = set()

        def look() -> set[str]:
            """The queries without any value above 0, with all labels, until now."""
            for query in queries.keys() - seen:
                found = values(query.replace("$__rate_interval", "1m"))
                if any(value > 0 and labels == queries[query] for labels, value in found):
                    seen.add(query)
            return queries.keys() - seen

        until(lambda: [value for _, value in values("up")] == [1, 1])
        look()  # a pool in which demands wait has no free memory
        worker.run("memsaver.pause('small'); memsaver.resume('small')")
        begin_to_wait(broker, worker)
        assert "OutOfMemoryError" in worker.fails("memsaver.resume('other', memory_timeout=0.1)")
        until(lambda: not look())
