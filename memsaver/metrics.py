"""Figures for Prometheus and Ray: of this process, and of the shared pools of this machine."""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import product
from typing import Any

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "memsaver.metrics needs prometheus_client; expected it from pip install 'memsaver[metrics]'",
        name="prometheus_client",
    ) from error

from memsaver import _results, errors, figures, ledger
from memsaver.broker import caller, discovery
from memsaver.errors import BrokerError, ConfigError, Error

__all__ = ["collector", "export_to_ray"]

_BROKER_S = 3.0  # for the answer of a broker. Prometheus waits 10 s
# Of totals() in memsaver/_results.py: labels and a text.
_TOTALS = {
    "transitions": (("kind", "outcome"), "Transitions that have ended"),
    "transitions_seconds": (("kind", "outcome"), "Durations of these transitions"),
    "stages": (("stage",), "Stages of these transitions: waits, guests, and the move"),
    "stages_seconds": (("stage",), "Durations of these stages"),
    "failures": (("error",), "Transitions that failed, by the class of the error"),
    "released_bytes": ((), "Device memory that transitions released"),
    "restored_bytes": ((), "Device memory that transitions mapped"),
    "copies": (("direction",), "Copies of contents: of a transition by device and direction, and of offered contents"),
    "copies_seconds": (("direction",), "Durations of these copies"),
    "copies_bytes": (("direction",), "Contents that these copies moved"),
    "waits": ((), "Waits of transitions for memory that others hold, and for processes attached to a region"),
    "waits_seconds": ((), "Durations of these waits"),
    "waits_bytes": ((), "Memory that was waited for"),
}
_VALUES = {
    "kind": ("pause", "resume", "switch"),
    "outcome": ("done", "failed", "aborted"),
    "direction": ("out", "in"),
    "error": [name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Error)],
    "stage": (),  # guests and rebuilds are rare
}
# Prometheus sees no increase in a series that begins.
_ZEROS = {
    (name, *each): 0.0
    for name, (labels, _) in _TOTALS.items()
    for each in product(*(_VALUES[label] for label in labels))
}
# Of the status of a pool, and of its clients: see memsaver/broker/status.py.
_OF_POOLS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "pool_capacity_bytes": ("Most that the pool lends", lambda pool: pool["capacity_bytes"]),
    "pool_free_bytes": ("The part of the capacity that no client has", caller.free_bytes),
}
_OF_CLIENTS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "client_backup_bytes": (
        "Pinned host memory that a client holds for contents", lambda client: client["host_held_bytes"] or 0
    ),
    "demands": ("Demands of a client that wait", lambda client: len(client["waiting"])),
    "demand_bytes": (
        "Memory that these demands still lack",
        lambda client: sum(one["needed_bytes"] - one["granted_bytes"] for one in client["waiting"]),
    ),
    "demand_seconds": (
        "Seconds since the oldest of these demands",
        lambda client: max((one["seconds"] for one in client["waiting"]), default=0),
    ),
}  # fmt: skip
_Rows = Iterable[tuple[Sequence[str], float]]  # values of the labels, and a figure


def collector() -> Collector:
    """Returns a collector of this process's figures, for a registry of ``prometheus_client``.

    It needs ``pip install 'memsaver[metrics]'``. Figures are read at each scrape:

    - ``memsaver_process_bytes``: device memory by device, ``kind`` and ``label`` of the ledger's rows (see
      ``memsaver.stats()``).
    - ``memsaver_backup_bytes``: memory that is held for contents, by device and ``place``: ``"host"`` or ``"disk"``.
    - ``memsaver_waiting_bytes``: bytes for which calls wait at the broker of the shared pool, by device.
    - ``memsaver_transitions_total`` and ``memsaver_transitions_seconds_total``: by ``kind`` (``"pause"``, ``"resume"``
      or ``"switch"``) and ``outcome`` (``"done"``, ``"failed"`` or ``"aborted"``). All that have ended count,
      also those that ``memsaver.history()`` no longer has.
    - ``memsaver_stages_total`` and ``memsaver_stages_seconds_total``: by ``stage``, the name of a ``TransitionStage``.
    - ``memsaver_failures_total``: failed transitions by ``error``, the name of the class.
    - ``memsaver_released_bytes_total`` and ``memsaver_restored_bytes_total``: device memory.
    - ``memsaver_copies_total``, ``memsaver_copies_seconds_total``, ``memsaver_copies_bytes_total``: by ``direction``,
      ``"out"`` or ``"in"``.
    - ``memsaver_waits_total``, ``memsaver_waits_seconds_total``, ``memsaver_waits_bytes_total``: waits for memory that
      others hold, and for processes that are attached to a region.

    Returns:
        A ``prometheus_client.registry.Collector``.

    Examples:
        >>> from prometheus_client import CollectorRegistry
        >>> from memsaver.metrics import collector
        >>> registry = CollectorRegistry()
        >>> registry.register(collector())
        >>> before = registry.get_sample_value("memsaver_transitions_total", {"kind": "pause", "outcome": "done"})
        >>> done = memsaver.region("kv_cache", device="cpu").pause()
        >>> after = registry.get_sample_value("memsaver_transitions_total", {"kind": "pause", "outcome": "done"})
        >>> after - before
        1.0
    """
    return _ProcessCollector()


class _ProcessCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        devices, pid = figures.stats().devices, os.getpid()
        rows = [(name, row) for name, each in devices.items() for row in each.ledger.rows if row.pid == pid]
        regions = [((name, "region", row.tag), 0) for name, each in devices.items() for row in each.regions]
        yield _gauge(
            "process_bytes",
            "Device memory of this process, by kind, and region or guest",
            ("device", "kind", "label"),
            [*regions, *(((name, row.kind, row.label), row.bytes) for name, row in rows)],
        )
        held = {"host": "host_held_bytes", "disk": "disk_held_bytes"}
        yield _gauge(
            "backup_bytes",
            "Pinned host memory and files that this process holds for contents",
            ("device", "place"),
            [((name, place), getattr(each, field)) for name, each in devices.items() for place, field in held.items()],
        )
        yield _gauge(
            "waiting_bytes",
            "Memory of the shared pool for which calls of this process wait",
            ("device",),
            [((name,), each.pool.waiting_bytes) for name, each in devices.items() if each.pool is not None],
        )
        totals = {**_ZEROS, **_results.totals()}
        for name, (labels, text) in _TOTALS.items():
            family = CounterMetricFamily(f"memsaver_{name}", text, labels=labels)
            for (total, *values), figure in totals.items():
                if total == name:
                    family.add_metric(values, figure)
            yield family


_gauges: dict[str, Any] = {}  # of Ray, by name
_exported: set[tuple[str, frozenset[tuple[str, str]]]] = set()  # names of gauges, and their tags


def export_to_ray() -> None:
    """Sets gauges of ``ray.util.metrics`` to the figures of ``collector()``, in an actor or a task of Ray.

    Ray serves them with its own metrics: ``ray_memsaver_process_bytes`` has the device memory, and
    ``ray_memsaver_stages_seconds_total`` the seconds by stage. A gauge keeps its value until the next call, so call it
    after each step. A series that has ended is 0.

    Raises:
        memsaver.Error: This process is none of Ray.

    Examples:
        >>> memsaver.metrics.export_to_ray()
        Traceback (most recent call last):
        memsaver.errors.Error: this process has not joined Ray; expected a call in an actor, a task, or after ray.init()
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise Error("this process has not joined Ray; expected a call in an actor, a task, or after ray.init()")
    samples = {}
    for family in _ProcessCollector().collect():
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = float(sample.value)
            if sample.name not in _gauges:
                gauge = import_module("ray.util.metrics").Gauge
                _gauges[sample.name] = gauge(sample.name, family.documentation, tuple(sample.labels))
    for name, tags in _exported.difference(samples):
        _gauges[name].set(0.0, dict(tags))
    for (name, tags), value in samples.items():
        _gauges[name].set(value, dict(tags))
    _exported.update(samples)


class PoolCollector(Collector):
    """The shared pools of this user and their clients, by their brokers: the figures of ``memsaver top``.

    Pools of all jobs are in it. Raises ConfigError if the directory of the sockets cannot be used.
    """

    def __init__(self) -> None:
        discovery.directory()

    def collect(self) -> Iterator[Metric]:
        answers: list[tuple[tuple[str], int]] = []
        pools = {}
        for path in [*sorted(discovery.directory().glob("*.sock")), *discovery.elsewhere()]:
            name = str(path.relative_to(discovery.root()).with_suffix(""))
            try:
                pools[name] = caller.status(path, _BROKER_S)
                answers.append(((name,), 1))
            except BrokerError:
                answers.append(((name,), 0))
        labels = ("pool", "device")
        each_pool = [((name, pool["device"]), pool) for name, pool in pools.items()]
        clients = [
            ((*values, str(client["pid"]), client["name"]), client)
            for values, pool in each_pool
            for client in pool["clients"]
        ]
        yield _gauge(
            "broker_up",
            "1: the broker of the pool answers. 0: its socket is there, and it does not",
            ("pool",),
            answers,
        )
        for name, (text, of_pool) in _OF_POOLS.items():
            yield _gauge(name, text, labels, [(values, of_pool(pool)) for values, pool in each_pool])
        of_process = (*labels, "pid", "process")
        yield _gauge(
            "device_bytes",
            "Memory in use on the pool's device, by process, kind, and region or guest",
            (*of_process, "kind", "label"),
            [
                *(((*values, "region", each["tag"]), 0) for values, client in clients for each in client["regions"]),
                *(
                    ((*values, "" if row.pid is None else str(row.pid), row.name, row.kind, row.label), row.bytes)
                    for values, pool in each_pool
                    for row in ledger.of_pool(pool).rows
                ),
            ],
        )
        for name, (text, of_client) in _OF_CLIENTS.items():
            yield _gauge(name, text, of_process, [(values, of_client(client)) for values, client in clients])


def _gauge(name: str, text: str, labels: Sequence[str], rows: _Rows) -> Metric:
    """A family. Rows with the same values of labels are added."""
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for values, figure in rows:
        sums[tuple(values)] += figure
    family = GaugeMetricFamily(f"memsaver_{name}", text, labels=labels)
    for values, figure in sums.items():
        family.add_metric(values, figure)
    return family


def serve(address: str, port: int) -> tuple[int, threading.Thread]:
    """Serves the figures of all shared pools. Returns the port and the thread. Raises ConfigError."""
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
        why = getattr(error, "strerror", error)
        text = f"cannot serve at {address}:{port}: {why}; expected an address of this machine, and a free port"
        raise ConfigError(text, option="port", value=port) from None
    return server.server_port, thread
