"""Checks of shared pools: their directory, sockets and brokers, regions that wait, and turns that came to no end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from memsaver.broker import caller, discovery
from memsaver.doctor.findings import Finding, judged
from memsaver.doctor.machine import Broker, Machine
from memsaver.errors import ConfigError, gib
from memsaver.turns import reports

_LONG_S = 5.0  # a wait for memory, or the age of a report
_UUID = "GPU-00000000-0000-0000-0000-000000000000"


def pool_directory(machine: Machine) -> Iterator[Finding]:
    """The directory of the sockets, with its rights."""
    try:
        path = discovery.socket_path(_UUID).parent
    except ConfigError as error:
        text = str(error).partition("\n")[0]
        yield Finding("pool directory", "error", text, "chmod 700, or another MEMSAVER_POOL_DIR: absolute, and short")
        return
    job = discovery.job()
    yield Finding("pool directory", "ok", f"{path}, job {job if job is not None else 'not set'}")
    jobs = list(machine.by_value("MEMSAVER_JOB"))
    if len(jobs) > 1:
        text = "; ".join(f"{name or 'not set'}: {who}" for (name,), who in jobs)
        remedy = "processes with different names have brokers of their own: unset it, or give all the same"
        yield Finding("job", "note", f"MEMSAVER_JOB differs: {text}", remedy)


def brokers(machine: Machine) -> Iterator[Finding]:
    """Brokers that run, hang, have another version of the protocol, or left a socket."""
    if not machine.brokers:
        yield Finding("broker", "ok", "none runs")
    for each in machine.brokers:
        yield _broker(each)


def _broker(broker: Broker) -> Finding:
    if broker.status is not None:
        pool = broker.status
        text = f"{pool['device']} ({pool['uuid']}), pid {pool['pid']}, {len(pool['clients'])} clients"
        job = "" if broker.of_this_job else f", of another job ({broker.path.parent.name})"
        text += f", capacity {gib(pool['capacity_bytes'])}, idle {gib(pool['idle_bytes'])}{job}"
        is_left = not pool["clients"] and pool["idle_bytes"]
        return judged("broker", text, (is_left, "note", "memsaver trim, or broker --stop, returns its idle memory"))
    return judged(
        "broker",
        broker.why.partition("\n")[0],
        ("of the protocol" in broker.why, "error", "memsaver broker --stop, then one version of memsaver in all"),
        (broker.is_locked, "error", f"its log: {broker.path.with_suffix('.log')}"),
        (True, "note", "a broker that was killed left this socket, and the next one replaces it"),
    )


def regions(machine: Machine) -> Iterator[Finding]:
    """Regions that are lost, or that nobody resumed, and processes that wait for memory or send no report."""
    count = 0
    for pool in machine.pools:
        states = [region["state"] for client in pool["clients"] for region in client["regions"]]
        is_idle = not any(client["waiting"] for client in pool["clients"])
        free = caller.free_bytes(pool)
        for client in pool["clients"]:
            yield from _client(client)
            for region in client["regions"]:
                count += 1
                name = f"{client['name']} (pid {client['pid']}): region {region['tag']!r} is {region['state']}"
                if region["state"] == "lost":
                    remedy = "start the process anew; memsaver.cpu_backup() reads its backups before"
                    yield Finding("region", "error", name, remedy)
                elif region["state"] == "paused" and is_idle and region["allocated_bytes"] <= free:
                    text = f"{name}, nobody waits, and {gib(free)} are free for its {gib(region['allocated_bytes'])}"
                    works = "active" in states or "resuming" in states
                    if not works:
                        text += "; no region of this device is active"
                    remedy = f"memsaver.resume({region['tag']!r}), or enter a phase that has it, in that process"
                    yield Finding("region", "note" if works else "warning", text, remedy)
    yield Finding("region", "ok", f"{count} regions in reports of running processes")


def _client(client: Mapping[str, Any]) -> Iterator[Finding]:
    name, age = f"{client['name']} (pid {client['pid']})", client["report_age_s"]
    if client["exited"]:
        keepers = ", ".join(f"{each['name']} (pid {each['pid']})" for each in client["kept_by"]) or "the driver"
        text = f"{name} has exited, and {keepers} keeps its {gib(client['held_bytes'])}"
        yield Finding("client", "warning", text, "end the processes that keep it: children hold its descriptors")
    elif not client["is_current"] and (age is None or age > _LONG_S):
        since = "has sent no report" if age is None else f"has sent no report for {age:.0f} s"
        remedy = "it is stopped, or a native call holds the GIL: py-spy dump --pid"
        yield Finding("client", "warning", f"{name} {since}", remedy)
    for wait in client["waiting"]:
        if wait["seconds"] > _LONG_S:
            text = f"{name} has waited {wait['seconds']:.0f} s for {gib(wait['needed_bytes'])}"
            text += f", has {gib(wait['granted_bytes'])}"
            remedy = "memsaver top has the holders: pause their regions, or enter the phase on all ranks"
            yield Finding("client", "warning", text, remedy)


def turns(machine: Machine) -> Iterator[Finding]:
    """The last report of a turn that a rank never reached."""
    files = reports.written()
    if not files:
        yield Finding("turns", "ok", f"no report in {reports.folder()}")
        return
    title = files[-1].read_text(errors="replace").partition("\n")[0]
    pid = files[-1].name.split("-")[3]  # turn-DATE-TIME-PID-RANDOM.txt
    runs = os.path.isdir(f"{machine.root}/proc/{pid}")
    text = f"{title}; the process that wrote it (pid {pid}) {'runs' if runs else 'has ended'}"
    remedy = f"{files[-1]} has the call and the stacks of each rank that answered"
    yield Finding("turns", "warning" if runs else "note", text, remedy)
