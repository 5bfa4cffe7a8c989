"""Checks of the driver, of the features of GPUs, and of the processes that hold device memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memsaver import _core
from memsaver.doctor import versions
from memsaver.doctor.findings import Finding, judged
from memsaver.doctor.machine import DeviceMemory, Machine
from memsaver.errors import DriverError, gib

_FULL = 10  # a device with less than a tenth free is full


def driver(machine: Machine) -> Iterator[Finding]:
    """The driver, its CUDA version, and the features of each GPU."""
    module = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", machine.text("/proc/driver/nvidia/version") or "")
    visible = machine.variables.get("CUDA_VISIBLE_DEVICES")
    text = f"kernel module {module[1]}" if module else "no kernel module"
    text += "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
    try:
        gpus = _core.gpu_facts()
    except DriverError as error:
        remedy = "give the container libcuda (NVIDIA_DRIVER_CAPABILITIES=compute,utility), or upgrade the driver"
        is_wrong = module and visible != ""
        text += f", no usable CUDA driver: {error.message}"
        yield judged("driver", text, (is_wrong, "error", remedy), (True, "note", "device='cpu' needs none"))
        return
    version = _core.cuda_version()
    yield judged(
        "driver",
        f"CUDA {version // 1000}.{version % 1000 // 10}, {len(gpus)} GPUs, {text}",
        (0 < version // 1000 < versions.CUDA_OLDEST, "error", f"expected CUDA {versions.CUDA_OLDEST} or newer"),
        (not gpus, "note", "no GPU is visible: check CUDA_VISIBLE_DEVICES"),
    )
    for index, gpu in enumerate(gpus):
        names = {"virtual_memory": "virtual memory", "posix": "POSIX handles", "fabric": "fabric handles", "mps": "MPS"}
        parts = [f"{text}: {'yes' if gpu[name] else 'no'}" for name, text in names.items()]
        parts += ["a part of a GPU (MIG)"] if "MIG" in gpu["name"] else []
        yield judged(
            "GPU",
            f"cuda:{index} ({gpu['name']}): {', '.join(parts)}",
            (not gpu["virtual_memory"], "error", "memsaver cannot use it: a vGPU has to allow virtual memory"),
            (gpu["mps"], "warning", "no shared pool: end MPS, or leave pool='process'"),
            (not gpu["posix"], "warning", "no shared pool: leave pool='process'"),
        )


def holders(machine: Machine) -> Iterator[Finding]:
    """The processes that hold memory of a device, and those of them that memsaver cannot make return it."""
    if not machine.devices:
        yield Finding("device memory", "ok", "no process uses a host device")
    for device in machine.devices:
        yield from _holders(device)


def _holders(device: DeviceMemory) -> Iterator[Finding]:
    by_process: dict[str, int] = {}
    for row in device.account.rows:
        name = "no listed process" if row.pid is None else f"{row.name} (pid {row.pid})"
        by_process[name] = by_process.get(name, 0) + row.bytes
    silent = {row.pid for row in device.account.rows if row.kind == "process"}
    used, total, least = device.account.used_bytes, device.total_bytes, ""
    if used is None:  # the driver does not tell
        used, least = sum(by_process.values()), "at least "
    text = f"{device.name} ({device.uuid}): {least}{gib(used)} of {gib(total)} in use"
    shown = sorted(by_process.items(), key=lambda each: -each[1])
    text += "".join(f", {name} {gib(nbytes)}" for name, nbytes in shown)
    beside = used - device.pool["total_bytes"] if device.pool is not None else 0
    room = total - device.pool["capacity_bytes"] if device.pool is not None else 0
    if device.pool is not None:
        text += f"; a shared pool leaves {gib(room)} to others"
    remedy = "end the process, pause its regions, or run all with a shared pool (MEMSAVER_POOL=shared)"
    yield judged(
        "device memory",
        text,
        (silent and beside > room, "warning", f"the pool runs short: {remedy}, or give the broker a smaller capacity"),
        (silent and device.pool is None and total - used < total // _FULL, "warning", f"the device is full: {remedy}"),
        (len(silent) > 1 and device.pool is None, "warning", f"one may resume before another has paused: {remedy}"),
        (silent, "note", "no reports of regions come from processes outside of a shared pool"),
        (
            by_process.get("no listed process", 0) > total // _FULL, "note",
            "in some containers the driver lists no processes: look from outside (nvidia-smi)",
        ),
    )  # fmt: skip
