"""Checks of the host: its memory for backups, limits, pages, nodes, file systems, Ray's threshold, namespaces."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from memsaver import _core, config
from memsaver.doctor.findings import Finding, judged
from memsaver.doctor.machine import SHELL, Machine, joined
from memsaver.errors import gib

_UNLIMITED = 1 << 62  # bytes
_OF_MACHINE = "4026531836"  # the inode of the first pid namespace
_SYS_PTRACE = 1 << 19
_LEAST_SHM = 16 << 20  # bytes
_LEFT_UNUSED = 0.1  # of the machine's memory, as in csrc/backup/host_memory.cpp


def host_memory(machine: Machine) -> Iterator[Finding]:
    """Free host memory against the backups that regions of running processes will need."""
    left = _core.host_memory_left("self", machine.root)
    text = "unlimited" if left >= _UNLIMITED else gib(left)
    text += " can be taken until nine tenths of the machine, or of the limit of a cgroup, are in use"
    needs: list[tuple[str, int, int]] = []  # process, bytes that it needs beyond those it holds, its largest region
    for client in (client for pool in machine.pools for client in pool["clients"]):
        kept = [each for each in client["regions"] if each["backup"] == "host"]
        wanted = sum(each["allocated_bytes"] for each in kept)
        # Pinned memory serves later pauses.
        needed = wanted - min(wanted, client["host_held_bytes"] or 0)
        if not needed:
            continue
        largest = min(needed, max(each["allocated_bytes"] for each in kept))
        name, pid = f"{client['name']} (pid {client['pid']})", client["pid"]
        with suppress(OSError):  # it has exited
            left = min(left, _core.host_memory_left(str(pid), machine.root))
            limit = machine.variables_of(pid).get("MEMSAVER_HOST_LIMIT", "auto")
            if limit != "auto":
                rest = max(0, config.parse_size(limit, "host_limit") - (client["host_held_bytes"] or 0))
                if rest < needed:
                    remedy = "raise MEMSAVER_HOST_LIMIT, or pause with backup='disk' or 'none'"
                    value = f"{name} needs up to {gib(needed)} more for backups, its host_limit leaves {gib(rest)}"
                    yield Finding("host memory", "error", value, remedy)
        needs.append((name, needed, largest))
    total = sum(needed for _, needed, _ in needs)
    text += f"; backups of regions in reports need {f'up to {gib(total)}' if total else 'no'} more"
    text += "".join(f", {name} {gib(needed)}" for name, needed, _ in needs)
    remedy = "free host memory, raise the container's limit, or use backup='disk', 'none' or memsaver.Derived"
    yield judged(
        "host memory",
        text if total <= left else f"{text}; only {gib(left)} are left",
        (any(largest > left for _, _, largest in needs), "error", remedy),
        (total > left, "warning", remedy),
    )
    reporting = {client["pid"] for pool in machine.pools for client in pool["clients"]}
    rows = [row for device in machine.devices for row in device.account.rows]
    silent = {
        str(each): sum(row.bytes for row in rows if row.pid == each.pid)
        for each in machine.processes
        if each.pid not in reporting
    }
    parts = [f"{name} holds {gib(nbytes)} of a device" for name, nbytes in silent.items() if nbytes]
    if parts:
        remedy = "memsaver.stats() in the process has its regions; with a shared pool the doctor has them"
        yield Finding("host memory", "note", f"without a report of their regions: {', '.join(parts)}", remedy)


def locked_memory(machine: Machine) -> Iterator[Finding]:
    """The limit of locked memory, of this shell and of processes that run memsaver."""
    found: dict[str, list[str]] = {}
    for name, pid in [(SHELL, "self"), *((str(each), str(each.pid)) for each in machine.processes)]:
        limit = re.search(r"^Max locked memory +(\w+)", machine.text(f"/proc/{pid}/limits") or "", re.MULTILINE)
        found.setdefault(limit[1] if limit else "unknown", []).append(name)
    for limit_text, names in found.items():
        is_limited = limit_text.isdigit()
        text = f"RLIMIT_MEMLOCK is {gib(int(limit_text)) if is_limited else limit_text} in {joined(names)}"
        remedy = "some drivers count pinned memory: ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield judged("locked memory", text, (is_limited and _core.cuda_device_count(), "note", remedy))


def pages(machine: Machine) -> Iterator[Finding]:
    """Huge pages, and NUMA nodes."""
    huge = (machine.text("/sys/kernel/mm/transparent_hugepage/enabled") or "not known").strip()
    remedy = "without them the first pause is slower: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield judged("huge pages", huge, ("[never]" in huge, "note", remedy))
    memory, cpus = ((machine.text(f"/sys/devices/system/node/has_{each}") or "?").strip() for each in ("memory", "cpu"))
    is_hidden = machine.text("/proc/self/numa_maps") is None
    yield judged(
        "NUMA",
        f"nodes with memory: {memory}, with CPUs: {cpus}{', /proc/self/numa_maps cannot be read' if is_hidden else ''}",
        (memory != cpus and is_hidden, "warning", "a container has to show it where the memory of a GPU is a node"),
        (memory != cpus, "note", "backups lie on nodes with CPUs alone"),
    )


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """The space in /dev/shm."""
    shm = os.statvfs(f"{machine.root}/dev/shm")
    free = shm.f_bavail * shm.f_frsize
    remedy = "docker run --shm-size, or remove files: tables of host devices, torch and Ray need it"
    yield judged("/dev/shm", f"{gib(free)} free", (free < _LEAST_SHM, "warning", remedy))


def ray(machine: Machine) -> Iterator[Finding]:
    """The share of host memory at which Ray kills workers, against the tenth that memsaver leaves unused."""
    found = {SHELL: dict(machine.variables)} if any(each.startswith("RAY_") for each in machine.variables) else {}
    for pid in machine.pids():
        with suppress(OSError):
            if (machine.text(f"/proc/{pid}/comm") or "").strip() == "raylet":
                found[f"raylet (pid {pid})"] = machine.variables_of(pid)
    for name, variables in found.items():
        threshold = float(variables.get("RAY_memory_usage_threshold", 0.95))
        is_off = variables.get("RAY_memory_monitor_refresh_ms") == "0"
        text = f"{name}: RAY_memory_usage_threshold is {threshold:g}{', and the monitor is off' if is_off else ''}"
        remedy = "raise it above 0.9, up to which backups fill the memory, or lower host_limit: Ray kills workers there"
        yield judged("Ray", text, (threshold <= 1 - _LEFT_UNUSED and not is_off, "warning", remedy))


def container(machine: Machine) -> Iterator[Finding]:
    """Namespaces and capabilities."""
    try:
        namespace = os.readlink(f"{machine.root}/proc/self/ns/pid")
    except OSError:
        namespace = "?"
    capabilities = re.search(r"^CapEff:\s*(\w+)", machine.text("/proc/self/status") or "", re.MULTILINE)
    has = "" if capabilities and int(capabilities[1], 16) & _SYS_PTRACE else "no "
    text = f"pid namespace {namespace}, {has}CAP_SYS_PTRACE (not needed)"
    remedy = "processes of one shared pool need one pid namespace (shareProcessNamespace), or a MEMSAVER_JOB each"
    yield judged("container", text, (_OF_MACHINE not in namespace, "note", f"not that of the machine: {remedy}"))
